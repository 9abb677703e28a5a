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


LAYERWISE = "It updates weights inside of backward."
TOGETHER = "What it does to a weight depends on others, or on how many came before it."
ONLY_LORA = "Axolotl: it only updates the factors of LoRA."
NO_SUMS = "transformers: without accumulation only."
CUDA = "Its kernels are for GPUs: the plain run ends so too."
NOT_BUILT = "Axolotl names it, and cannot build it."
ABSENT = "Not in any package index: not tried."


class Ends(NamedTuple):
    """How a row's trainings end that cannot come out equal.

    Attributes:
        message: Part of the error.
        reason: For people.
        called: In the document.
        columns: Those that it is so in: beginnings of their names.
        plain: The plain run ends so.
    """

    message: str
    reason: str
    called: str = "refused"
    columns: tuple[str, ...] = ("",)
    plain: bool = False


class Row(NamedTuple):
    """One optimizer: keys beside its name, its package, and columns without trainings."""

    keys: dict[str, Any] = {}  # noqa: RUF012 - never changed
    needs: str = ""
    ends: tuple[Ends, ...] = ()


def _low_rank(**arguments: Any) -> dict[str, Any]:
    return {
        "optim_target_modules": "all_linear",
        "optim_args": {"rank": 4, "update_proj_gap": 2, **arguments},
    }


def _full(message: str, reason: str) -> Ends:
    return Ends(message, reason, columns=("full",))


def _cuda(message: str, *columns: str) -> Ends:
    return Ends(message, CUDA, "CUDA only", columns or ("",), plain=True)


BACKWARD = _full("updates weights inside of backward", LAYERWISE)
SUMS = Ends(
    "does not support gradient accumulation",
    NO_SUMS,
    "not in transformers",
    ("LoRA, c", "QLoRA, c"),
    plain=True,
)
NO_CUDA = "Torch not compiled with CUDA enabled"
QUANTISES = "requires a CUDA device"
OPTIMIZERS: dict[str, Row] = {
    **dict.fromkeys(
        "adamw_torch adamw_torch_fused sgd adagrad rmsprop adafactor adamw_bnb_8bit "
        "adamw_8bit paged_adamw_32bit paged_adamw_8bit lion_8bit lion_32bit "
        "paged_lion_8bit paged_lion_32bit ademamix ademamix_8bit paged_ademamix_32bit "
        "paged_ademamix_8bit rmsprop_bnb rmsprop_bnb_8bit rmsprop_bnb_32bit "
        "adamw_torch_8bit adamw_torch_4bit ao_adamw_fp8 muon adopt_adamw adamc".split(),
        Row(),
    ),
    **dict.fromkeys(
        "schedule_free_adamw schedule_free_radam schedule_free_sgd".split(),
        # their weights in evaluation are others than those that train
        Row({"val_set_size": 0.2, "eval_steps": 1}, "schedulefree"),
    ),
    "optimi_adamw": Row(needs="torch-optimi"),
    "stable_adamw": Row(needs="torch-optimi", ends=(_cuda("0 active drivers"),)),
    "came_pytorch": Row(needs="came-pytorch"),
    "apollo_adamw": Row(_low_rank(), "apollo-torch"),
    "galore_adamw": Row(_low_rank(), "galore-torch"),
    "galore_adafactor": Row(_low_rank(), "galore-torch"),
    "galore_adamw_8bit": Row(_low_rank(), "galore-torch", (_cuda(NO_CUDA),)),
    **dict.fromkeys(
        "flash_adamw flash_adam flash_sgd flash_sgdw flash_lion".split(),
        Row(needs="flashoptim", ends=(_cuda(QUANTISES),)),
    ),
    "sinkgd": Row(ends=(_full("draws random numbers for all weights", TOGETHER),)),
    "dion": Row(
        {"dion_lr": 0.01, "dion_momentum": 0.95, "dion_rank_fraction": 0.5},
        ends=(_full("draws random numbers for all weights", TOGETHER),),
    ),
    "grokadamw": Row(
        needs="grokadamw",
        ends=(_full("slows momentum down by the place of a weight", TOGETHER),),
    ),
    "lomo": Row(needs="lomo-optim", ends=(BACKWARD,)),
    "adalomo": Row(needs="lomo-optim", ends=(BACKWARD, _cuda(NO_CUDA))),
    "apollo_adamw_layerwise": Row(_low_rank(), "apollo-torch", (BACKWARD, SUMS)),
    "galore_adamw_layerwise": Row(_low_rank(), "galore-torch", (BACKWARD, SUMS)),
    "galore_adamw_8bit_layerwise": Row(
        _low_rank(), "galore-torch", (BACKWARD, SUMS, _cuda(NO_CUDA))
    ),
    "galore_adafactor_layerwise": Row(
        _low_rank(),
        "galore-torch",
        (
            BACKWARD,
            SUMS,
            Ends(
                "Cannot combine manual `lr` and `relative_step=True`",
                "transformers builds it with options that exclude each other.",
                "not in transformers",
                plain=True,
            ),
        ),
    ),
    "polora": Row(
        ends=(
            Ends("only updates LoRA", ONLY_LORA, "not in Axolotl", ("full",), True),
            Ends("pip install git+https", ABSENT, "not tried", plain=True),
        )
    ),
    **dict.fromkeys(
        ("ao_adamw_8bit", "ao_adamw_4bit"),
        Row(
            ends=(Ends("Unhandled optimizer", NOT_BUILT, "not in Axolotl", plain=True),)
        ),
    ),
}


def _cell(name: str, row: Row, column: str) -> Cell:
    trainings = pair(
        "llama",
        COLUMNS[column],
        SAVES,
        {"optimizer": name},
        row.keys,
        plan=overrides(0, 2),
    )
    for ends in row.ends:
        if column.startswith(ends.columns):
            return Cell(
                TABLE,
                f"`{name}`",
                column,
                refused=trainings.plain if ends.plain else trainings.paged,
                message=ends.message,
                reason=ends.reason,
                called=ends.called,
                needs=row.needs,
            )
    return Cell(TABLE, f"`{name}`", column, trainings, needs=row.needs)


CELLS: tuple[Cell, ...] = tuple(
    _cell(name, row, column) for name, row in OPTIMIZERS.items() for column in COLUMNS
)
