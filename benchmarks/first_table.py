"""README's first table: examples on cards that are not here, as `plan --json` predicts them.

A row is an example, a card and host memory. Plain training and this plugin are two answers
of one plan. ZeRO-3's column is the formula of DeepSpeed's own estimator for parameters and
optimizer on the host. `--write` puts the table between the marks of README.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "protrain")]
from plan_jobs import Plans  # noqa: E402
from published_models import BASES  # noqa: E402

MARK = "<!-- first table -->"
GIB = 2**30
LORA_BYTES = 4
"""Of an adapter's parameter, which Axolotl keeps in fp32."""
ZERO3_BUFFERS = 1.5
ZERO3_BYTES = 18
ZERO3_FROZEN_BYTES = 2
"""DeepSpeed's estimator (deepspeed.readthedocs.io/en/latest/memory.html, offload_param and
offload_optimizer on the CPU): 18 bytes per parameter, half as much again for buffers. Of the
18, 16 are gradients and optimizer state, which a frozen parameter has not."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        label: Of the training, with a link to the example.
        example: Of `EXAMPLES`.
        card: For `--gpu`.
        host_gib: For `--ram`.
    """

    label: str
    example: str
    card: str
    host_gib: int


EXAMPLES = {
    "8b-2k": "llama3-8b-lora-12gb",
    "8b-8k": "llama3-8b-lora-24gb",
    "8b-full": "llama3-8b-full-24gb",
    "30b": "qwen3-30b-a3b-qlora-24gb",
    "70b": "llama3-70b-qlora-24gb",
}
"""By the word that README's links have."""
ROWS = (
    Row("Llama 3.1 8B, LoRA, 2k", "8b-2k", "RTX 3060 12GB", 24),
    Row("Llama 3.1 8B, LoRA, 8k", "8b-8k", "RTX 3090", 64),
    Row("Llama 3.1 8B, LoRA, 8k", "8b-8k", "RTX 4090", 64),
    Row("Llama 3.1 8B, full, 4k", "8b-full", "RTX 4090", 64),
    Row("Llama 3.1 8B, full, 4k", "8b-full", "RTX 5090", 64),
    Row("Qwen3 30B-A3B, QLoRA, 4k", "30b", "RTX 4090", 64),
    Row("Llama 3 70B, QLoRA, 1k", "70b", "RTX 3090", 64),
    Row("Llama 3 70B, QLoRA, 1k", "70b", "RTX 4090", 64),
    Row("Llama 3 70B, QLoRA, 1k", "70b", "H100", 64),
)


def yaml_of(row: Row) -> Path:
    return ROOT / "examples" / f"{EXAMPLES[row.example]}.yaml"


class Table:
    """The rows' plans, each example traced once for all of its cards."""

    def __init__(self, folder: Path, rows: Sequence[Row]) -> None:
        self._folder, self._rows = folder, rows
        for name, config in BASES.items():
            (folder / name).mkdir(parents=True)
            (folder / name / "config.json").write_text(json.dumps(config))
        plans = Plans(folder)
        for example in {row.example for row in rows}:
            of_it = [row for row in rows if row.example == example]
            cards = [word for row in of_it for word in ("--gpu", row.card)]
            (host_gib,) = {row.host_gib for row in of_it}
            asked = [*cards, "--ram", str(host_gib), "--json"]
            plans.command(example, str(yaml_of(of_it[0])), *asked)
        self._answers: dict[Row, Mapping[str, Any]] = {}
        for row in rows:
            found = plans[row.example].json
            for answer in found if isinstance(found, list) else [found]:
                if answer["hardware"]["name"] == row.card:
                    self._answers[row] = answer
        plans.close()

    @cached_property
    def lines(self) -> list[str]:
        """The table's Markdown, one line per row."""
        return [self._line(row) for row in self._rows]

    def _line(self, row: Row) -> str:
        answer = self._answers[row]
        (plain,) = (
            other
            for other in answer["alternatives"]
            if other["change"] == "without ProTrain"
        )
        fits = plain["verdict"] == "fits"
        speed = answer["step_s"]["tokens_per_s"]
        cells = (
            f"[{row.label}][{row.example}]",
            row.card,
            f"{rounded(plain['tokens_per_s'])}" if fits else lacking(plain["note"]),
            self._zero3(row, answer),
            f"{rounded(speed)}, host {answer['host_bytes']['peak'] / GIB:.0f} GiB",
        )
        return f"| {' | '.join(cells)} |"

    def _zero3(self, row: Row, answer: Mapping[str, Any]) -> str:
        """Host memory by DeepSpeed's formula, which has no weights in 4 bits."""
        keys = yaml.safe_load(yaml_of(row).read_text())
        if keys.get("load_in_4bit"):
            return "no estimate"
        weights = num_parameters(self._folder / keys["base_model"])
        adapters = answer["device_bytes"]["terms"]["adapters"] // LORA_BYTES
        trained, frozen = (adapters, weights) if adapters else (weights, 0)
        nbytes = ZERO3_BUFFERS * (ZERO3_BYTES * trained + ZERO3_FROZEN_BYTES * frozen)
        return f"host {nbytes / GIB:.0f} GiB"


def num_parameters(base: Path) -> int:
    """Count the parameters of a base, built without memory."""
    config = AutoConfig.from_pretrained(base)
    kind = AutoModel if hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):
        model: PreTrainedModel = kind.from_config(config)
    return model.num_parameters()


def rounded(speed: float) -> str:
    """Two digits of tokens per second: predictions have no more."""
    return f"{float(f'{speed:.2g}'):,.0f} tok/s"


def lacking(note: str) -> str:
    """Of plan's words the bytes alone, without decimals."""
    nbytes, unit, *_ = note.split()
    return f"lacks {float(nbytes):.0f} {unit}"


def written(lines: Sequence[str], rows: Sequence[Row] = ROWS) -> str:
    """The table with its head, and the links of its first column."""
    head = ("training, tokens per row", "card", "plain", "ZeRO-3 offload", "this")
    links = {
        row.example: f"[{row.example}]: examples/{yaml_of(row).name}" for row in rows
    }
    table = [f"| {' | '.join(head)} |", "|---|---|---|---|---|", *lines]
    return "\n".join(["", *table, "", *links.values(), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="into README.md")
    options = parser.parse_args()
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        text = written(Table(Path(folder), ROWS).lines)
    print(text)
    if options.write:
        readme = ROOT / "README.md"
        before, _, after = readme.read_text("utf-8").split(MARK)
        readme.write_text(f"{before}{MARK}\n{text}\n{MARK}{after}", "utf-8")


if __name__ == "__main__":
    main()
