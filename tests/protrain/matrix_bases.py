"""Cells of docs/compatibility.md: bases in few bits."""

from __future__ import annotations

from itertools import product
from typing import Any

from axolotl_jobs import LORA, overrides, pair
from matrix import Cell
from tiny_models import NUM_BLOCKS

QLORA: dict[str, Any] = {**LORA, "adapter": "qlora", "load_in_4bit": True, "bf16": True}
STORAGE = ("bfloat16", "uint8", "float32")
RECOMPUTE = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}


def _in_4_bits(kind: str, double: bool, storage: str, recompute: bool) -> Cell:
    quantisation = {
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": double,
        "bnb_4bit_quant_storage": storage,
    }
    return Cell(
        table="Bases in 4 bits (`load_in_4bit: true`, QLoRA)",
        row=f"{kind.upper()}{', double quantisation' if double else ''}",
        column=f"in {storage}, blocks {'recompute' if recompute else 'keep'}",
        trainings=pair(
            "llama",
            {**QLORA, "bnb_config_kwargs": quantisation},
            plan=overrides(1, 2, (NUM_BLOCKS - 1) * recompute)
            | {"gradient_checkpointing": recompute},
            plain=RECOMPUTE if recompute else {},
        ),
    )


_QUANTISED = [
    _in_4_bits(kind, double, storage, recompute)
    for kind, double, storage, recompute in product(
        ("nf4", "fp4"), (False, True), STORAGE, (False, True)
    )
]

_ON_DISK = [
    Cell(
        table="Bases that are quantised on the disk",
        row="NF4, double quantisation",
        column="QLoRA",
        trainings=pair("llama-nf4", QLORA, plan=overrides(0, 2)),
    ),
]

CELLS = (*_QUANTISED, *_ON_DISK)
