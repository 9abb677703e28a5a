"""Real Axolotl commands on a tiny Llama, each in a process of its own.

For what a shared worker process cannot do: end with an exit code, be interrupted, have
a limit on the size of its files, list other plugins. Two jobs run at a time, in the
background, in the order in which they were added.
"""

from __future__ import annotations

import json
import os
import resource
import runpy
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from axolotl.integrations.base import BasePlugin
from axolotl_jobs import BASE, PROTRAIN, SEEDING, overrides, same_bits
from checked_device import CHECKED
from fork_server import ENVIRONMENT, Fork
from safetensors.torch import load_file
from tiny_models import VOCABULARY, build_inputs, build_model, model_path
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    TrainerCallback,
)
from transformers.integrations import WandbCallback
from transformers.integrations.integration_utils import WandbLogModel
from transformers.modeling_outputs import CausalLMOutput

REPORT = Path("protrain") / "report.json"
SAVING = "protrain-save_0"
"""Name of the thread that writes beside training."""
FAMILY = "llama"
MODEL = model_path(FAMILY)
SLOWEST_JOB_S = 240
PLAIN: dict[str, Any] = {
    "base_model": str(MODEL),
    "gradient_accumulation_steps": 2,
    "gradient_checkpointing": True,
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 2,
}
"""Four steps, a checkpoint after the second and the last; the plugin is off."""

FLAT_MODEL: dict[str, Any] = {
    "base_model": "models/flat",
    "plugins": [PROTRAIN, SEEDING, "saving_jobs.FlatModelPlugin"],
}
"""A model that has no list of layers."""

FLAT_WITHOUT_WEIGHTS = "models/flat-without-weights"
WITHOUT_WEIGHTS = "models/without-weights"
"""The same model as `MODEL`, of which only config.json is there."""

PAGED: dict[str, Any] = {
    "protrain_auto_memory": True,
    "protrain_capacity_bytes": "1GiB",
    CHECKED: True,
    **overrides(0, 2),
}
"""No block of the model, adapter or not, stays on the device."""


@dataclass(frozen=True)
class Outcome:
    """What a job left behind."""

    exit_code: int | None
    log: str
    folder: Path

    @property
    def finished(self) -> Outcome:
        """Itself, if it ended well."""
        assert self.exit_code == 0, self.log[-6000:]
        return self

    @property
    def paged(self) -> bool:
        """Whether ProTrain ran and moved weights: an inert plugin passes any test."""
        written = (self.folder / REPORT).is_file()
        return written and self.report["measured"]["fetched_bytes"] > 0

    @cached_property
    def report(self) -> dict[str, Any]:
        return json.loads((self.folder / REPORT).read_text())

    @cached_property
    def history(self) -> list[dict[str, float]]:
        """Loss, grad norm and learning rate of each step, unrounded."""
        state = json.loads((self.folder / "trainer_state.json").read_text())
        keys = ("step", "loss", "grad_norm", "learning_rate")
        return [
            {key: entry[key] for key in keys}
            for entry in state["log_history"]
            if "loss" in entry
        ]


class Jobs:
    """Runs commands in `folder`, which gets the model, the data and all outputs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pool = ThreadPoolExecutor(2)
        self._results: dict[str, Future[Outcome]] = {}
        self._add("inputs", (), lambda: self._fork("inputs", folder, build))
        self.command("prepare", "preprocess", after=["inputs"])

    def __getitem__(self, name: str) -> Outcome:
        return self._results[name].result()

    def close(self) -> None:
        """Let running jobs end and forget the others."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def train(self, name: str, *settings: Mapping[str, Any], **options: Any) -> None:
        """Add `axolotl train`; see `command`."""
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
        shell: bool = False,
        **child: Any,
    ) -> None:
        """Add a command.

        Args:
            name: Of the job, and by default of its output folder.
            command: A module of `axolotl.cli`.
            settings: Laid over `PLAIN` in this order; a value of None drops the key.
            arguments: Added to the command line.
            after: Jobs whose output it reads.
            before: Called with the folder of all outputs just before the start.
            watch: Called with process id and log file while it runs.
            shell: Start `python -m` instead of forking, ten seconds slower.
            child: `stdin`, `file_limit` and `environment` of `run_command`.
        """

        def run() -> Outcome:
            if before is not None:
                before(self.folder)
            path, output = self._write_yaml(name, settings)
            argv = [f"axolotl.cli.{command}", str(path), *arguments]
            if shell:
                return self._shell(name, output, argv, watch=watch)
            called = partial(run_command, argv, **child)
            return self._fork(name, output, called, watch=watch)

        self._add(name, after, run)

    def _add(self, name: str, after: Sequence[str], run: Callable[[], Outcome]) -> None:
        assert name not in self._results, name
        earlier = [self._results[other] for other in after]

        def wait_and_run() -> Outcome:
            for result in earlier:
                result.result()
            return run()

        self._results[name] = self._pool.submit(wait_and_run)

    def _write_yaml(
        self, name: str, settings: Sequence[Mapping[str, Any]]
    ) -> tuple[Path, Path]:
        merged: dict[str, Any] = {**BASE, **PLAIN, "output_dir": name}
        for layer in settings:
            merged.update(layer)
        merged = {key: value for key, value in merged.items() if value is not None}
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(merged))
        return path, self.folder / merged["output_dir"]

    def _fork(self, name: str, output: Path, *arguments: Any, **watch: Any) -> Outcome:
        with self._log(name).open("w") as log:
            fork = Fork(*arguments, folder=self.folder, stdout=log, stderr=log)
        return self._ended(name, output, fork, **watch)

    def _shell(
        self, name: str, output: Path, argv: Sequence[str], **watch: Any
    ) -> Outcome:
        tests = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
        with self._log(name).open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *argv],
                cwd=self.folder,
                env=os.environ
                | ENVIRONMENT
                | {"PYTHONPATH": os.pathsep.join(filter(None, tests))},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self._ended(name, output, process, **watch)

    def _ended(
        self,
        name: str,
        output: Path,
        process: subprocess.Popen[bytes] | Fork,
        watch: Callable[[int, Path], None] | None = None,
    ) -> Outcome:
        log = self._log(name)
        if watch is not None:
            watch(process.pid, log)
        try:
            process.wait(SLOWEST_JOB_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return Outcome(process.returncode, log.read_text(errors="replace"), output)

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


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


def build() -> None:
    """Models, tokenizer and data in the current folder, always the same."""
    build_inputs(Path())
    build_model(Path(), FAMILY)
    Path(WITHOUT_WEIGHTS).mkdir()
    shutil.copy(MODEL / "config.json", WITHOUT_WEIGHTS)
    FlatModel(FlatConfig()).save_pretrained(FLAT_MODEL["base_model"])
    FlatConfig().save_pretrained(FLAT_WITHOUT_WEIGHTS)


class FlatConfig(PretrainedConfig):
    """Of a `FlatModel`."""

    model_type = "flat"


class FlatModel(PreTrainedModel):
    """A language model without repeated layers."""

    config_class = FlatConfig
    _supports_sdpa = True

    def __init__(self, config: FlatConfig) -> None:
        super().__init__(config)
        self.embed = torch.nn.Embedding(VOCABULARY, 8)
        self.mix = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, VOCABULARY)
        self.post_init()

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embed

    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> CausalLMOutput:
        logits = self.head(self.mix(self.embed(input_ids)))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return CausalLMOutput(loss=loss, logits=logits)


class FlatModelPlugin(BasePlugin):
    """Makes the flat model known to transformers."""

    def register(self, cfg: Any) -> None:
        AutoConfig.register(FlatConfig.model_type, FlatConfig)
        AutoModelForCausalLM.register(FlatConfig, FlatModel)


class LaterBudgetPlugin(BasePlugin):
    """Gives the budgets that are to be tested when the base has been loaded."""

    def post_model_load(self, cfg: Any, model: Any) -> None:
        cfg.update(json.loads(os.environ["LATER_BUDGET"]))


class InterruptedRotation(BasePlugin):
    """Ctrl-C comes while the older checkpoint is removed, half of it is gone."""

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        remove = shutil.rmtree

        def interrupted(path: Any, *args: Any, **kwargs: Any) -> None:
            if Path(path).name == "checkpoint-2":
                next(Path(path).glob("*.safetensors")).unlink()
                raise KeyboardInterrupt
            remove(path, *args, **kwargs)

        shutil.rmtree = interrupted


class SlowDisk(BasePlugin):
    """Each write of a save beside training takes 10 ms."""

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        plain = os.pwrite

        def write(*args: Any) -> int:
            if threading.current_thread().name == SAVING:
                self.wait()
            return plain(*args)

        os.pwrite = write

    def wait(self) -> None:
        """Called before a write of a save beside training."""
        time.sleep(0.01)


class DiskSlowerThanSteps(SlowDisk):
    """A save beside training ends after the next step, if that does not wait for it.

    It says which steps are made beside a save.
    """

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        super().post_trainer_create(cfg, trainer)
        self._steps = steps = threading.Condition()
        self._made, self._last = 0, False
        self._begun: set[threading.Thread] = set()
        disk = self

        class Watch(TrainerCallback):
            looks_at_weights = False

            def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
                if any(thread.name == SAVING for thread in threading.enumerate()):
                    print(f"made beside a save: step {state.global_step}", flush=True)
                with steps:
                    disk._made = state.global_step
                    disk._last = state.global_step >= state.max_steps
                    steps.notify_all()

        trainer.add_callback(Watch())

    def wait(self) -> None:
        with self._steps:
            if threading.current_thread() in self._begun:
                return
            self._begun.add(threading.current_thread())
            made = self._made
            # a step that waits for the save ends after it, and the test fails
            self._steps.wait_for(lambda: self._last or self._made > made, timeout=30)


class Uploads(DiskSlowerThanSteps):
    """Weights & Biases' callback sends each checkpoint; says what it has sent."""

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        super().post_trainer_create(cfg, trainer)
        trainer.add_callback(Uploader())


class Uploader(WandbCallback):
    """transformers' own `on_save`, with a service that prints."""

    def __init__(self) -> None:
        self._initialized, self._log_model = True, WandbLogModel.CHECKPOINT
        run = SimpleNamespace(id="run", name="run")
        self._wandb = SimpleNamespace(
            summary={}, config={}, run=run, Artifact=Artifact, log_artifact=sent
        )

    setup = on_train_begin = on_train_end = on_log = lambda *_, **__: None


def sent(artifact: Artifact, aliases: list[str]) -> None:
    """As `wandb.log_artifact`."""
    print(artifact, aliases)


class Artifact:
    """What is sent."""

    def __init__(self, **about: Any) -> None:
        self._files: list[str] = []

    def add_dir(self, folder: str) -> None:
        self._files = [folder, *sorted(os.listdir(folder))]

    def __repr__(self) -> str:
        return f"sent: {self._files}"


class FailingPush(BasePlugin):
    """No way to the Hub at step 4; what is pushed before is noted."""

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        def push(folder: str) -> None:
            print(f"pushed: {folder}, {sorted(os.listdir(folder))}")
            if folder.endswith("-4"):
                raise ConnectionError("no way to the Hub")

        trainer.args.push_to_hub = True
        trainer._push_from_checkpoint = push


def wait_for_steps(log: Path, num_steps: int, process_id: int) -> None:
    """Return once that many steps were logged, or the process is gone."""
    deadline = time.monotonic() + SLOWEST_JOB_S
    while time.monotonic() < deadline and Path(f"/proc/{process_id}/exe").exists():
        if (
            log.exists()
            and log.read_text(errors="replace").count("'loss'") >= num_steps
        ):
            return
        time.sleep(0.005)


def weights(folder: Path) -> dict[str, Tensor]:
    """Tensors of the model or adapter saved in `folder`."""
    names = ("model.safetensors", "adapter_model.safetensors")
    (path,) = (folder / name for name in names if (folder / name).is_file())
    return load_file(path)


def load(path: Path) -> Any:
    """What `torch.save` wrote, read as a stranger's file would be."""
    return torch.load(path, weights_only=True)


def difference(ours: Any, plain: Any, where: str = "") -> str | None:
    """The first place where two nested values differ in kind, type or any bit."""
    if isinstance(plain, Tensor) and isinstance(ours, Tensor):
        if (ours.dtype, ours.shape) != (plain.dtype, plain.shape):
            return (
                f"{where}: {ours.dtype} {ours.shape}, not {plain.dtype} {plain.shape}"
            )
        return None if same_bits(ours, plain) else f"{where}: other bits"
    if type(ours) is not type(plain):
        return f"{where}: {type(ours)}, not {type(plain)}"
    if isinstance(plain, Mapping):
        # by position where keys are tensors
        keys = [[k for k in d if not isinstance(k, Tensor)] for d in (ours, plain)]
        if keys[0] != keys[1] or len(ours) != len(plain):
            return f"{where}: keys {keys[0]}, not {keys[1]}"
        values = zip(plain, ours.values(), plain.values(), strict=True)
        found = (difference(a, b, f"{where}.{k}") for k, a, b in values)
    elif isinstance(plain, (list, tuple)):
        if len(ours) != len(plain):
            return f"{where}: {len(ours)} items, not {len(plain)}"
        pairs = enumerate(zip(ours, plain, strict=True))
        found = (difference(a, b, f"{where}[{n}]") for n, (a, b) in pairs)
    elif hasattr(plain, "__dict__"):
        return difference(vars(ours), vars(plain), where)
    else:
        return None if ours == plain else f"{where}: {ours!r}, not {plain!r}"
    return next((line for line in found if line is not None), None)
