"""Cells of docs/compatibility.md: every optimizer that Axolotl knows.

Paged and plain are equal in losses, norms, weights and optimizer.pt: in fp32 with neither
clipping nor accumulation, and in bf16 (weights, too, in a full fine-tune) with both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from axolotl_jobs import LORA, overrides, pair
from matrix import Cell
from matrix_bases import QLORA

TABLE = "Optimizers (`optimizer:`)"
SAVES = {"save_strategy": "steps", "save_steps": 2}
PLAIN_SUMS = {"max_grad_norm": 0.0}
CLIPPED_SUMS = {"max_grad_norm": 0.1, "gradient_accumulation_steps": 2, "bf16": True}
COLUMNS: dict[str, dict[str, Any]] = {
    "full": PLAIN_SUMS,
    "full, clipped sums": CLIPPED_SUMS,
    "LoRA": LORA | PLAIN_SUMS,
    "LoRA, clipped sums": LORA | CLIPPED_SUMS,
    "QLoRA": QLORA | PLAIN_SUMS,
    "QLoRA, clipped sums": QLORA | CLIPPED_SUMS,
}


class Row(NamedTuple):
    """One optimizer: keys beside its name, and the package that it comes from."""

    keys: dict[str, Any] = {}  # noqa: RUF012 - never changed
    needs: str = ""


def _low_rank(**arguments: Any) -> dict[str, Any]:
    return {
        "optim_target_modules": "all_linear",
        "optim_args": {"rank": 4, "update_proj_gap": 2, **arguments},
    }


OPTIMIZERS: dict[str, Row] = {
    **dict.fromkeys(
        "adamw_torch adamw_torch_fused sgd adagrad rmsprop adafactor adamw_bnb_8bit "
        "adamw_8bit paged_adamw_32bit paged_adamw_8bit lion_8bit lion_32bit "
        "paged_lion_8bit paged_lion_32bit ademamix ademamix_8bit paged_ademamix_32bit "
        "paged_ademamix_8bit rmsprop_bnb rmsprop_bnb_8bit rmsprop_bnb_32bit "
        "adamw_torch_8bit adamw_torch_4bit ao_adamw_8bit ao_adamw_4bit ao_adamw_fp8 "
        "muon adopt_adamw adamc dion sinkgd polora".split(),
        Row(),
    ),
    **dict.fromkeys(
        "schedule_free_adamw schedule_free_radam schedule_free_sgd".split(),
        # their weights in evaluation are others than those that train
        Row({"val_set_size": 0.2, "eval_steps": 1}, "schedulefree"),
    ),
    **dict.fromkeys(("optimi_adamw", "stable_adamw"), Row(needs="torch-optimi")),
    "came_pytorch": Row(needs="came-pytorch"),
    "grokadamw": Row(needs="grokadamw"),
    **dict.fromkeys(("lomo", "adalomo"), Row(needs="lomo-optim")),
    **dict.fromkeys(
        ("apollo_adamw", "apollo_adamw_layerwise"), Row(_low_rank(), "apollo-torch")
    ),
    **dict.fromkeys(
        "galore_adamw galore_adamw_8bit galore_adafactor galore_adamw_layerwise "
        "galore_adamw_8bit_layerwise galore_adafactor_layerwise".split(),
        Row(_low_rank(), "galore-torch"),
    ),
    **dict.fromkeys(
        "flash_adamw flash_adam flash_sgd flash_sgdw flash_lion".split(),
        Row(needs="flashoptim"),
    ),
    "q_galore_adamw8bit": Row(
        {"optim_target_modules": "all_linear"}, needs="q-galore-torch"
    ),
}

CELLS: tuple[Cell, ...] = tuple(
    Cell(
        TABLE,
        f"`{name}`",
        column,
        pair(
            "llama", keys, SAVES, {"optimizer": name}, row.keys, plan=overrides(0, 2)
        ),
    )
    for name, row in OPTIMIZERS.items()
    for column, keys in COLUMNS.items()
)
