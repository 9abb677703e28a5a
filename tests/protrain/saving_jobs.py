"""Real Axolotl commands on a tiny Llama, each in a process of its own.

Importing Axolotl takes longer than such a run. A fork server imports it once and
every job is a fork of it: as isolated as a command typed in a shell, and seconds
cheaper. Two jobs run at a time, in the background, in the order they were added.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import resource
import runpy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

PLUGIN = "axolotl.integrations.protrain.ProTrainPlugin"
REPORT = Path("protrain") / "report.json"
SLOWEST_JOB_S = 240
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1"}
PRELOAD = [
    "axolotl.cli.config",
    "axolotl.common.datasets",
    "axolotl.evaluate",
    "axolotl.monkeypatch.relora",
    "axolotl.train",
    "torch.distributed.optim",
    "torch.profiler",
    "trl.trainer.dpo_config",
    "trl.trainer.reward_trainer",
    "wandb",
]
"""Heavy, and without what Axolotl builds once from the plugins that are listed."""

OFF = {"protrain_auto_memory": False}
PAGED = {"protrain_capacity_bytes": "1MiB", "protrain_check_races": True}
OTHER_PLAN = {
    "protrain_capacity_bytes": "8MiB",
    "protrain_n_persist_override": 1,
    "protrain_n_buffer_override": 3,
    "protrain_check_races": True,
}
LORA = {
    "adapter": "lora",
    "lora_model_dir": "adapter",
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "lora_target_linear": True,
    "lora_mlp_kernel": False,
    "lora_qkv_kernel": False,
    "lora_o_kernel": False,
    "lora_embedding_kernel": False,
}
BASE = {
    "base_model": "model",
    "datasets": [{"path": "data.jsonl", "ds_type": "json", "type": "completion"}],
    "dataset_prepared_path": "prepared",
    "dataset_num_proc": 1,
    "dataloader_num_workers": 0,
    "val_set_size": 0,
    "sequence_len": 64,
    "sample_packing": False,
    "pad_to_sequence_len": True,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 4,
    "optimizer": "adamw_torch_fused",
    "lr_scheduler": "cosine",
    "learning_rate": 0.002,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "bf16": False,
    "fp16": False,
    "tf32": False,
    "attn_implementation": "sdpa",
    "gradient_checkpointing": True,
    "save_steps": 2,
    "logging_steps": 1,
    "seed": 7,
    "plugins": [PLUGIN],
}


@dataclass(frozen=True)
class Outcome:
    """What a job left behind."""

    exit_code: int | None
    log: str
    folder: Path

    @property
    def finished(self) -> Outcome:
        assert self.exit_code == 0, self.log[-6000:]
        return self

    @property
    def paged(self) -> bool:
        """Whether ProTrain ran and moved weights: an inert plugin passes any test."""
        report = self.folder / REPORT
        return report.is_file() and self.report["measured"]["fetched_bytes"] > 0

    @cached_property
    def report(self) -> dict[str, Any]:
        return json.loads((self.folder / REPORT).read_text())

    def history(self, step: int) -> list[dict[str, float]]:
        """Loss, grad norm and learning rate of each step up to checkpoint `step`."""
        state = self.folder / f"checkpoint-{step}" / "trainer_state.json"
        keys = ("step", "loss", "grad_norm", "learning_rate")
        return [
            {key: entry[key] for key in keys}
            for entry in json.loads(state.read_text())["log_history"]
            if "loss" in entry
        ]


class Jobs:
    """Runs commands in `folder`, which gets the model, the data and all outputs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for key, value in ENVIRONMENT.items():
            os.environ.setdefault(key, value)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._pool = ThreadPoolExecutor(2)
        self._results: dict[str, Future[Outcome]] = {}
        self._add("inputs", (), lambda name: self._process(name, build_inputs))
        prepare = {"output_dir": str(folder / "prepare")}
        self.command("prepare", "preprocess", OFF | prepare, after=["inputs"])

    def __getitem__(self, name: str) -> Outcome:
        return self._results[name].result()

    def close(self) -> None:
        """Let running jobs end and forget the others."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def train(self, name: str, *settings: Mapping[str, Any], **options: Any) -> None:
        """Add `axolotl train`, with its output in a folder called `name`."""
        options.setdefault("after", ["prepare"])
        self.command(name, "train", *settings, **options)

    def command(
        self,
        name: str,
        command: str,
        *settings: Mapping[str, Any],
        arguments: Sequence[str] = (),
        after: Sequence[str] = ("prepare",),
        before: Callable[[Path], None] | None = None,
        watch: Callable[[int, Path], None] | None = None,
        **child: Any,
    ) -> None:
        """Add a command.

        Args:
            name: Of the job, and by default of its output folder.
            command: A module of `axolotl.cli`.
            settings: Laid over `BASE` in this order; a value of None drops the key.
            arguments: Added to the command line.
            after: Jobs whose output it reads.
            before: Called with the folder of all outputs just before the start.
            watch: Called with process id and log file while it runs.
            child: `stdin`, `file_limit` and `environment` of `run_command`.
        """

        def run(name: str) -> Outcome:
            if before is not None:
                before(self.folder)
            path, output = self._write_yaml(name, settings)
            argv = [f"axolotl.cli.{command}", str(path), *arguments]
            return self._process(name, run_command, argv, child, watch, output)

        self._add(name, after, run)

    def _write_yaml(
        self, name: str, settings: Sequence[Mapping[str, Any]]
    ) -> tuple[Path, Path]:
        merged: dict[str, Any] = {**BASE, "output_dir": name}
        for layer in settings:
            merged.update(layer)
        merged = {key: value for key, value in merged.items() if value is not None}
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(merged))
        return path, self.folder / merged["output_dir"]

    def _add(
        self, name: str, after: Sequence[str], run: Callable[[str], Outcome]
    ) -> None:
        earlier = [self._results[other] for other in after]

        def wait_and_run() -> Outcome:
            for result in earlier:
                result.result()
            return run(name)

        assert name not in self._results, name
        self._results[name] = self._pool.submit(wait_and_run)

    def _process(
        self,
        name: str,
        target: Callable[..., None],
        argv: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
        watch: Callable[[int, Path], None] | None = None,
        output: Path | None = None,
    ) -> Outcome:
        log = self.folder / f"{name}.log"
        process = self._context.Process(
            target=run_in_child,
            args=(target, str(self.folder), str(log), list(argv), dict(options or {})),
        )
        process.start()
        if watch is not None and process.pid is not None:
            watch(process.pid, log)
        process.join(SLOWEST_JOB_S)
        if process.exitcode is None:
            process.kill()
            process.join()
        text = log.read_text(errors="replace") if log.exists() else ""
        return Outcome(process.exitcode, text, output or self.folder)


def run_in_child(
    target: Callable[..., None],
    folder: str,
    log: str,
    argv: Sequence[str],
    options: Mapping[str, Any],
) -> None:
    """Everything that makes the fork a process of its own, then the target."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.chdir(folder)
    # objects of the fork server; without it each collection looks through all of them
    gc.freeze()
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    target(*([argv] if argv else []), **options)


def run_command(
    argv: Sequence[str],
    stdin: str = "",
    file_limit: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """`python -m argv`, as it would run in a shell.

    Args:
        argv: Module and arguments.
        stdin: What a person would type.
        file_limit: Bytes after which writing a file fails, like on a full disk.
        environment: Variables added for this command.
    """
    typed = Path(f"stdin-{os.getpid()}.txt")
    typed.write_text(stdin)
    sys.stdin = typed.open()
    os.environ.update(environment or {})
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    sys.argv = list(argv)
    runpy.run_module(argv[0], run_name="__main__")


def build_inputs() -> None:
    """Model, tokenizer, adapter and data in the current folder, always the same."""
    from peft import LoraConfig, get_peft_model
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: n for n, text in enumerate([*special.values(), *alphabet])}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only, **special)
    tokenizer.save_pretrained("model")

    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_llama(len(vocabulary)))
    model.save_pretrained("model")
    targets = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
    adapter = get_peft_model(
        model,
        LoraConfig(
            r=LORA["lora_r"],
            lora_alpha=LORA["lora_alpha"],
            target_modules=targets,
            init_lora_weights=False,
            task_type="CAUSAL_LM",
            base_model_name_or_path="model",
        ),
    )
    adapter.save_pretrained("adapter")
    rows = [f"{n} squared is {n * n}, and cubed {n**3}. " * 2 for n in range(90)]
    lines = "".join(json.dumps({"text": row}) + "\n" for row in rows)
    Path("data.jsonl").write_text(lines)


def tiny_llama(vocabulary: int = 259) -> Any:
    """Four layers of 37,000 parameters."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def wait_for_steps(log: Path, num_steps: int, process_id: int) -> None:
    """Return once that many steps were logged, or the process is gone."""
    deadline = time.monotonic() + SLOWEST_JOB_S
    while time.monotonic() < deadline and Path(f"/proc/{process_id}/exe").exists():
        if log.exists() and log.read_text(errors="replace").count("'loss'") >= num_steps:
            return
        time.sleep(0.01)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors of the model or adapter saved in `folder`."""
    names = ("model.safetensors", "adapter_model.safetensors")
    (path,) = (folder / name for name in names if (folder / name).is_file())
    return load_file(path)


def load(path: Path) -> Any:
    """What `torch.save` wrote, read as a stranger's file would be."""
    return torch.load(path, weights_only=True)


def difference(ours: Any, plain: Any, where: str = "") -> str | None:
    """The first place where two nested values differ in kind, type or any bit."""
    if isinstance(plain, torch.Tensor) and isinstance(ours, torch.Tensor):
        if (ours.dtype, ours.shape) != (plain.dtype, plain.shape):
            return f"{where}: {ours.dtype} {ours.shape}, not {plain.dtype} {plain.shape}"
        return None if same_bits(ours, plain) else f"{where}: other bits"
    if type(ours) is not type(plain):
        return f"{where}: {type(ours)}, not {type(plain)}"
    if isinstance(plain, Mapping):
        if list(ours) != list(plain):
            return f"{where}: keys {list(ours)}, not {list(plain)}"
        found = (difference(ours[k], plain[k], f"{where}.{k}") for k in plain)
    elif isinstance(plain, (list, tuple)):
        if len(ours) != len(plain):
            return f"{where}: {len(ours)} items, not {len(plain)}"
        pairs = enumerate(zip(ours, plain, strict=True))
        found = (difference(a, b, f"{where}[{n}]") for n, (a, b) in pairs)
    else:
        return None if ours == plain else f"{where}: {ours!r}, not {plain!r}"
    return next((line for line in found if line is not None), None)


def same_bits(ours: torch.Tensor, plain: torch.Tensor) -> bool:
    """Equal as bytes: -0.0 is not 0.0, and NaN is itself."""
    as_bytes = (t.contiguous().reshape(-1).view(torch.uint8) for t in (ours, plain))
    return torch.equal(*as_bytes)
