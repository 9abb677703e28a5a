"""How long the search and `axolotl protrain plan` take, and in how much memory.

Limits: searches of an 80-block model take 1.5 s (median) and 3 s (longest) with a frozen
base, and 3 s and 9 s in a full fine-tune; a plan with its alternatives from the command line
takes 8 s of the processor beside Axolotl's imports, and 3 GB. Of two runs of a command the
faster counts: the first may compile what it imports. Nothing is downloaded: the models are
configurations written here. Exits with 1 when a limit does not hold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import operator
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from axolotl.integrations.protrain.core.errors import BudgetError
from axolotl.integrations.protrain.core.layout import build_layout, find_blocks
from axolotl.integrations.protrain.core.planner.cards import gpu_hardware
from axolotl.integrations.protrain.core.planner.emulation import Emulation
from axolotl.integrations.protrain.core.planner.memory import MemoryModel
from axolotl.integrations.protrain.core.planner.search import Search
from axolotl.integrations.protrain.core.planner.seconds import block_times
from axolotl.integrations.protrain.core.planner.trace import trace_step
from axolotl.integrations.protrain.core.types import Budget, Update, Workload, World

SEARCH_LIMITS_S = {"frozen base": (1.5, 3.0), "full fine-tune": (3.0, 9.0)}
"""Of the median and of the longest."""
PLAN_LIMIT_S, PLAN_LIMIT_BYTES = 8.0, 3e9
RUNS = 2
HOST_BYTES = 2048 << 30
# also where the package is on the path and not installed, so without entry points
AXOLOTL = """
from axolotl.cli.main import cli
from axolotl.integrations.protrain.cli import protrain
cli.add_command(protrain)
cli(prog_name="axolotl")
"""

LLAMA_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
QWEN3_32B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "vocab_size": 32000,
}
QWEN_VL_7B: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "image_token_id": 151655,
    "vision_start_token_id": 151652,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}
NO_KERNELS = {f"lora_{part}_kernel": False for part in ("mlp", "qkv", "o", "embedding")}
IMPORTS = "import axolotl.cli.main, axolotl.loaders.model, axolotl.utils.config"
"""What no answer can be without, as long as Axolotl builds the model."""
PLANS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama-3-70B QLoRA": (LLAMA_70B, {"adapter": "qlora", "load_in_4bit": True}),
    "Qwen3-32B LoRA": (QWEN3_32B, {"adapter": "lora"}),
    "Qwen2.5-VL-7B LoRA": (
        QWEN_VL_7B,
        {
            "adapter": "lora",
            "processor_type": "AutoProcessor",
            "sample_packing": False,
            "skip_prepare_dataset": True,
            "remove_unused_columns": False,
            "lora_target_linear": None,
            "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
            **NO_KERNELS,
        },
    ),
    "Mixtral 8x7B LoRA": (MIXTRAL, {"adapter": "lora"}),
}


def yaml_of(folder: Path, config: dict[str, Any], settings: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16", **config}))
    keys = {
        "base_model": str(folder),
        "datasets": [{"path": str(folder), "type": "completion"}],
        "output_dir": str(folder / "out"),
        "sequence_len": 2048,
        "sample_packing": True,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 4,
        "num_epochs": 1,
        "optimizer": "adamw_torch_fused",
        "lr_scheduler": "cosine",
        "learning_rate": 2e-4,
        "bf16": True,
        "attn_implementation": "flash_attention_2",
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_target_linear": True,
        "plugins": ["axolotl.integrations.protrain.ProTrainPlugin"],
        **settings,
    }
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in keys.items() if v is not None}))
    return path


def plan(path: Path, gpu: str) -> tuple[float, float, int, dict[str, Any]]:
    """Seconds on the clock and of the processor, peak bytes and answer of the command
    in a process of its own."""
    command = [sys.executable, "-c", AXOLOTL, "protrain", "plan", str(path)]
    command += ["--gpu", gpu, "--ram", "128", "--json"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1"}
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.DEVNULL, env=environment
        )
        _, _status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        output.seek(0)
        text = output.read()
    try:
        # `axolotl` prints its logo first
        answer = json.loads(text[max(0, text.find("{")) :])
    except ValueError:
        sys.exit(f"{path}: no plan came back: {text[:500]!r}")
    busy = usage.ru_utime + usage.ru_stime
    return seconds, busy, usage.ru_maxrss * 1024, answer


def import_seconds() -> float:
    """Seconds of the processor of a process that only imports Axolotl."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", IMPORTS]
    subprocess.run(command, check=True, capture_output=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def search_times(full: bool, ranks: int, rounds: int) -> list[float]:
    """Seconds of searches for an 80-block model over cards, budgets and accumulation.

    Of the process alone: a search is one thread of Python.

    Args:
        full: Train everything, some of it through masters, instead of small adapters.
        ranks: Of one node that train together.
        rounds: Searches of a kind, of which the fastest counts.
    """
    config = LlamaConfig(**{k: v for k, v in LLAMA_70B.items() if k != "architectures"})
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    adapters: set[str] = set()
    if not full:
        model.requires_grad_(False)
        for layer in model.model.layers:
            layer.input_layernorm.requires_grad_(True)
        adapters = {name for name, p in model.named_parameters() if p.requires_grad}
    ids = torch.ones(1, 2048, dtype=torch.long)

    def loss_of() -> torch.Tensor:
        with Emulation("cuda", torch.bfloat16):
            return model(input_ids=ids, labels=ids, use_cache=False).loss

    step = trace_step(model, find_blocks(model), loss_of)
    trace = step.trace
    # one rank alone may send their state to the host
    waiting = adapters if ranks == 1 else set()
    layout = build_layout(model, adapters - waiting, trace.blocks, waiting, step.rows)
    seconds = []
    for gpu, gib, accumulation, master in itertools.product(
        ("RTX 4090", "A100-80GB", "H200"),
        (16, 24, 32, 48, 80, 141),
        (1, 4),
        (False, True) if full else (False,),
    ):
        card = gpu_hardware(gpu, None, HOST_BYTES, num_gpus=ranks)
        times = block_times(trace, layout, card)
        workload = Workload(
            accumulation=accumulation,
            fp32_master=master,
            world=World(ranks, ranks),
            update=Update.HOST if master or ranks > 1 else Update.DEVICE,
        )
        budget = Budget(gib << 30, 0, HOST_BYTES)
        fastest = float("inf")
        for _ in range(rounds):
            start = time.process_time()
            memory = MemoryModel(layout, trace, workload, card)
            with suppress(BudgetError):
                Search(memory, times, budget).fastest()
            fastest = min(fastest, time.process_time() - start)
        seconds.append(fastest)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="RTX 4090")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    options = parser.parse_args()
    missed = []
    for ranks, (name, full) in itertools.product(
        options.ranks, (("frozen base", False), ("full fine-tune", True))
    ):
        seconds = search_times(full, ranks, options.rounds)
        found = statistics.median(seconds), max(seconds)
        if any(map(operator.gt, found, SEARCH_LIMITS_S[name])):
            missed.append(f"search of a {name} in {found[0]:.1f} to {found[1]:.1f} s")
        print(
            f"search, 80 blocks, {name}, {ranks} ranks: median {found[0]:.3f} s, "
            f"longest of {len(seconds)} {found[1]:.3f} s",
            flush=True,
        )
    imports = min(import_seconds() for _ in range(RUNS))
    print(f"importing Axolotl alone: {imports:.1f} s of the processor")
    for name, (config, settings) in PLANS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = yaml_of(Path(folder), config, settings)
            runs = (plan(path, options.gpu) for _ in range(RUNS))
            wall, busy, peak, answer = min(runs, key=operator.itemgetter(1))
        if busy - imports > PLAN_LIMIT_S or peak > PLAN_LIMIT_BYTES:
            missed.append(f"{name} in {busy - imports:.1f} s and {peak / 1e9:.1f} GB")
        print(
            f"{name:20} {wall:5.1f} s ({busy:.1f} s of the processor) {peak / 1e9:5.2f} GB  "
            f"{answer['verdict']}  {answer.get('reason') or ''}"[:110]
        )
    print(
        f"limits: {[*SEARCH_LIMITS_S.values()]} s; {PLAN_LIMIT_S:.0f} s beside imports, "
        f"{PLAN_LIMIT_BYTES / 1e9:.0f} GB"
    )
    if missed:
        print(f"missed: {'; '.join(missed)}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
