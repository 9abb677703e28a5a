"""Cells of docs/compatibility.md: kinds of adapters, and what trains beside them."""

from __future__ import annotations

from typing import Any

from axolotl_jobs import LORA, job, overrides, pair
from matrix import Cell
from matrix_bases import QLORA

BASES = {"LoRA": LORA | {"bf16": True}, "QLoRA": QLORA}
ADAPTERS: dict[str, dict[str, Any]] = {
    "DoRA (`peft_use_dora`)": {"peft_use_dora": True},
}

CELLS = tuple(
    Cell(
        table="Adapters",
        row=row,
        column=column,
        trainings=pair("llama", base, settings, plan=overrides(1, 2)),
        without=job("llama", base),
    )
    for row, settings in ADAPTERS.items()
    for column, base in BASES.items()
)
