"""Seconds from `axolotl train` to the first step, beside plain training.

A Llama of 1 GB in bf16 with LoRA, half of whose blocks are paged, trains one step per process:
plain, with the plugin on a machine that it has never measured, and with what it has kept. The
processes alternate. Prints a Markdown table; `--output FILE` writes it too.

    python benchmarks/start_up.py --rounds 3
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import yaml
from machine import command, describe
from whole_runs import ROOT

sys.path.insert(0, str(ROOT / "examples"))
ARMS = "plain", "first start", "later start"


@contextmanager
def inputs() -> Iterator[tuple[Path, dict[str, object]]]:
    """A folder with the model, and the YAML of the plain run."""
    import demo
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    demo.build_inputs()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        AutoTokenizer.from_pretrained(demo.WORK / "model").save_pretrained(folder)
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=demo.VOCAB_SIZE,
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=10,
            num_attention_heads=16,
            num_key_value_heads=8,
            dtype=torch.bfloat16,
        )
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        model.save_pretrained(folder)
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        print(f"model: {size / 1e9:.2f} GB", file=sys.stderr)
        base = yaml.safe_load(demo.YAML.read_text("utf-8"))
        for key in ("protrain_auto_memory", "protrain_capacity_bytes", "save_steps"):
            base.pop(key, None)
        base |= {
            "base_model": str(folder),
            "sequence_len": 128,
            "micro_batch_size": 1,
            "gradient_accumulation_steps": 1,
            "max_steps": 1,
            "save_strategy": "no",
            "plugins": ["first_step.FirstStep"],
        }
        yield folder, base


def seconds(config: Mapping[str, object], folder: Path, cache: Path) -> list[float]:
    """Seconds from the start of the process to the beginning of its first step, on the
    clock and of the processor.

    Raises:
        RuntimeError: Training failed.
    """
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({**config, "output_dir": str(folder / "out")}))
    environment = {
        "HF_HUB_OFFLINE": "1",
        "AXOLOTL_DO_NOT_TRACK": "1",
        **os.environ,
        "XDG_CACHE_HOME": str(cache),
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
        ),
        "FIRST_STEP": str(folder / "first_step.json"),
    }
    axolotl = str(Path(sys.executable).parent / "axolotl")
    run = subprocess.run(
        [axolotl, "train", str(path), "--launcher=python"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    if run.returncode:
        raise RuntimeError(f"axolotl train failed:\n{run.stderr[-4000:]}")
    first: list[float] = json.loads((folder / "first_step.json").read_text())
    return first


def _columns(rounds: list[list[float]]) -> list[tuple[float, ...]]:
    return list(zip(*rounds, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--capacity", default="900MiB", help="of the CPU device")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
    with inputs() as (folder, base):
        paged = {
            **base,
            "plugins": ["axolotl.integrations.protrain.ProTrainPlugin"]
            + ["first_step.FirstStep"],
            "protrain_auto_memory": True,
            "protrain_capacity_bytes": options.capacity,
        }
        for number in range(options.rounds):
            cache = folder / f"cache{number}"
            for arm in ARMS:
                took = seconds(base if arm == "plain" else paged, folder, cache)
                print(f"{arm}: {took[0]:.1f} s", file=sys.stderr, flush=True)
                found[arm].append(took)
    lines = [
        "| run | seconds | more than plain | of the processor | more than plain |",
        "|---|---|---|---|---|",
    ]
    told = []
    for arm, rounds in found.items():
        cells = [arm]
        for mine, plain in zip(_columns(rounds), _columns(found["plain"]), strict=True):
            more = [a - b for a, b in zip(mine, plain, strict=True)]
            cells += [
                f"{statistics.median(mine):.1f} ({min(mine):.1f} to {max(mine):.1f})"
            ]
            cells += [
                f"{statistics.median(more):+.1f} ({min(more):+.1f} to {max(more):+.1f})"
            ]
        lines.append(f"| {' | '.join(cells)} |")
        told.append(f"{arm} {cells[2].split()[0]}")
    facts = "; ".join(f"{key} {value}" for key, value in describe().items())
    text = "\n".join([f"`{command()}`", "", facts, "", *lines])
    print(text)
    if options.output:
        options.output.write_text(text + "\n", "utf-8")
    print(f"s more than plain: {', '.join(told[1:])}")


if __name__ == "__main__":
    main()
