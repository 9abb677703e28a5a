"""What switching between adapters costs: python benchmarks/service.py [--width 512]

A Llama is served on this machine's device, two adapters of one rank take turns. Medians,
in milliseconds, beside a copy of the same bytes and beside the same step in a training
by Axolotl. Requests that wait let the next adapter come while one computes; without is the
same with nobody looking at who is next.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

ROWS, LENGTH, ROUNDS = 2, 256, 9
TESTS = Path(__file__).resolve().parents[1] / "tests/protrain"


def median_ms(act: Callable[[], object], rounds: int = ROUNDS) -> float:
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - start)
    return 1000 * statistics.median(seconds)


def base(root: Path, width: int, rank: int) -> dict[str, Any]:
    """A model, its data and a YAML."""
    sys.path.insert(0, str(TESTS))
    from tiny_models import DATA, TOKENIZER, VOCABULARY, build_inputs

    build_inputs(root)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=8,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
    )
    LlamaForCausalLM(config).save_pretrained(root / "model")
    return {
        "plugins": ["axolotl.integrations.protrain.ProTrainPlugin"],
        "protrain_auto_memory": True,
        "protrain_capacity_bytes": "4GiB",
        "protrain_force_replicated_cpu_offload": True,
        "base_model": str(root / "model"),
        "tokenizer_config": str(root / TOKENIZER),
        "datasets": [
            {"path": str(root / DATA), "ds_type": "json", "type": "completion"}
        ],
        "dataset_prepared_path": str(root / "prepared"),
        "output_dir": str(root / "out"),
        "adapter": "lora",
        "lora_r": rank,
        "lora_alpha": rank,
        "lora_target_linear": True,
        "sequence_len": LENGTH,
        "pad_to_sequence_len": True,
        "micro_batch_size": ROWS,
        "gradient_accumulation_steps": 1,
        "max_steps": ROUNDS,
        "learning_rate": 1e-4,
        "lr_scheduler": "constant",
        "optimizer": "adamw_torch_fused",
        "bf16": torch.cuda.is_available(),
        "save_strategy": "no",
        # which a service leaves off, and a CPU has not
        **{f"lora_{what}_kernel": False for what in ("mlp", "qkv", "o", "embedding")},
        "attn_implementation": "sdpa",
    }


def served(path: Path) -> dict[str, float]:
    """Milliseconds of what a service does."""
    from axolotl.integrations.protrain.service.engine import AdapterService
    from axolotl.integrations.protrain.service.losses import Datum
    from axolotl.integrations.protrain.service.optimizers import AdamParams

    tokens = torch.arange(LENGTH) % 250
    weights = torch.full((LENGTH,), 1 / LENGTH)
    data = [Datum(tokens, {"target_tokens": tokens, "weights": weights})] * ROWS
    with AdapterService(path) as service:
        rank = yaml.safe_load(path.read_text())["lora_r"]
        kinds, names = ["attn", "mlp"], iter(range(1000))

        def create() -> None:
            service.create(f"m{next(names)}", rank, kinds, seed=1).result()

        def step(model: str) -> None:
            service.forward_backward(model, data)
            service.optim_step(model, AdamParams()).result()

        def switch() -> None:
            # refused, because it has no gradients, once its adapter is there
            for model in ("m0", "m1"):
                service.optim_step(model, AdamParams()).exception()

        def queued() -> float:
            """A step of two adapters whose requests all wait: two switches a step."""
            start, last = time.perf_counter(), []
            for _ in range(ROUNDS):
                for model in ("m0", "m1"):
                    service.forward_backward(model, data)
                    last.append(service.optim_step(model, AdamParams()))
            for answer in last:
                answer.result()
            return 1000 * (time.perf_counter() - start) / len(last)

        made = median_ms(create, 5)
        before = service.live.moved_bytes
        switched = median_ms(switch) / 2
        moved = (service.live.moved_bytes - before) // (2 * ROUNDS)
        alone, turns = [], []
        for _ in range(ROUNDS):
            step("m0")
            alone.append(median_ms(lambda: step("m0"), 1))
            turns.append(median_ms(lambda: step("m1"), 1))
        overlapping = queued()
        ahead = service.live.prefetched
        with patch.object(service.turns, "peek", lambda: None):
            apart = queued()
        source, target = (torch.ones(moved, dtype=torch.uint8) for _ in range(2))
        copied = median_ms(lambda: target.copy_(source))
    return {
        "create_model": made,
        "step, one adapter": statistics.median(alone),
        "step, two in turns": statistics.median(turns),
        "step, two that wait": overlapping,
        "... without overlap": apart,
        "switches made ahead": ahead,
        "switch": switched,
        "a copy of its bytes": copied,
        "MiB moved by a switch": moved / 2**20,
    }


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rank", type=int, default=32)
    asked = parser.parse_args()
    os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        keys = base(root, asked.width, asked.rank)
        path = root / "base.yaml"
        path.write_text(yaml.safe_dump(keys))
        found = served(path)
        command = [sys.executable, "-m", "axolotl.cli.train", str(path)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr[-3000:]
        report = json.loads((root / "out/protrain/report.json").read_text())
        found["step, axolotl train"] = 1000 * report["measured"]["step_s"]
    for what, value in found.items():
        print(f"{what:24} {value:10.1f}")
    ratio = found["step, one adapter"] / found["step, axolotl train"]
    print(f"a step of one adapter is {ratio:.2f} of one of axolotl train")


if __name__ == "__main__":
    main()
