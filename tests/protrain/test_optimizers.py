"""Optimizers through `axolotl train`: resumed in turns, and with groups of many kinds.

That each of them is exact in one go is the business of docs/compatibility.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from axolotl_jobs import (
    LORA,
    PAGED,
    Job,
    Pair,
    Result,
    differences,
    job,
    overrides,
    pair,
)
from compatibility import state_differences
from matrix import Cell
from matrix_optimizers import CLIPPED_SUMS, OPTIMIZERS

Run = Callable[[Job], Result]

SIX_STEPS = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
OTHER_PLAN = PAGED | overrides(1, 3, 2)


@dataclass(frozen=True)
class Resumed:
    """Six steps of one optimizer in one go, and what it comes from."""

    plain: Job
    needs: str

    @property
    def jobs(self) -> tuple[Job, ...]:
        return (self.plain,)


def _resumed(name: str, **keys: Any) -> Resumed:
    row = OPTIMIZERS[name]
    # in fp32: torch casts the state that it loads to the dtype of the weight
    keys = CLIPPED_SUMS | {"optimizer": name, "bf16": False} | row.keys | keys
    # a run that goes on evaluates once more where it begins
    keys |= SIX_STEPS | {"val_set_size": 0.0, "eval_steps": None}
    return Resumed(job("llama", keys), row.needs)


def _go_on(run: Run, first: Job, step: int, settings: dict[str, Any]) -> Job:
    """Train on from a checkpoint of another run."""
    assert not run(first).error
    folder = f"{first.settings['output_dir']}/checkpoint-{step}"
    plain = dict.fromkeys(OTHER_PLAN) | {"protrain_auto_memory": False}
    return first.but(plain, {"resume_from_checkpoint": folder}, settings)


def _assert_same_curve(got: Result, wanted: Result) -> None:
    found = differences(got, wanted) or state_differences(got.output, wanted.output)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("name", "resumed"),
    [
        pytest.param(
            name,
            _resumed(name),
            id=name,
            marks=() if name == "adamw_bnb_8bit" else pytest.mark.full,
        )
        for name in ("adamw_bnb_8bit", "adafactor", "schedule_free_adamw", "muon")
    ],
)
def test_plain_paged_and_plain_again_are_one_curve(
    run: Run, name: str, resumed: Resumed
) -> None:
    paged = _go_on(run, resumed.plain, 2, OTHER_PLAN)
    again = _go_on(run, paged, 4, {})
    _assert_same_curve(run(paged), run(resumed.plain))
    _assert_same_curve(run(again), run(resumed.plain))


@pytest.mark.full
@pytest.mark.parametrize(
    "resumed", [_resumed("adafactor", bf16=True)], ids=["adafactor"]
)
def test_a_state_is_cast_as_the_plain_run_does(run: Run, resumed: Resumed) -> None:
    paged = _go_on(run, resumed.plain, 2, OTHER_PLAN)
    again = _go_on(run, resumed.plain, 2, {})
    _assert_same_curve(run(paged), run(again))
    assert differences(run(again), run(resumed.plain))


@pytest.mark.full
@pytest.mark.parametrize(
    "resumed",
    [_resumed("apollo_adamw"), _resumed("galore_adamw")],
    ids=lambda r: r.needs,
)
def test_a_state_with_objects_resumes_paged(run: Run, resumed: Resumed) -> None:
    """The plain run cannot: transformers does not let torch read its own objects."""
    if not Cell("", "", "", needs=resumed.needs).is_possible:
        pytest.skip(f"{resumed.needs} is not installed")
    paged = _go_on(run, resumed.plain, 2, OTHER_PLAN)
    again = _go_on(run, paged, 4, PAGED | overrides(0, 2))
    _assert_same_curve(run(paged), run(resumed.plain))
    _assert_same_curve(run(again), run(resumed.plain))
    plain = _go_on(run, resumed.plain, 2, {})
    assert "weights_only" in run(plain).error


EIGHT_BITS = {"optimizer": "adamw_bnb_8bit", "weight_decay": 0.1, "max_steps": 4}
GROUPS: dict[str, tuple[dict[str, Any], ...]] = {
    "lr_groups": (
        {
            "lr_groups": [
                {"name": "attention", "modules": ["q_proj", "o_proj"], "lr": 0.002},
                {"name": "first", "modules": ["layers.0"], "lr": 0.005},
            ]
        },
    ),
    "embedding_lr": ({"embedding_lr": 0.001},),
    "embedding_lr_scale": ({"embedding_lr_scale": 0.5},),
    "loraplus_lr_ratio": (LORA, {"loraplus_lr_ratio": 16}),
    "loraplus_lr_ratio, trained MLPs": (
        LORA,
        {
            "loraplus_lr_ratio": 16,
            "lora_target_linear": False,
            "lora_target_modules": ["q_proj"],
            "lora_modules_to_save": ["mlp"],
        },
    ),
    "warmup": ({"lr_scheduler": "linear", "warmup_steps": 2},),
    "one_cycle": ({"lr_scheduler": "one_cycle"},),
    "rex": ({"lr_scheduler": "rex"},),
    "constant_with_warmup": (
        {"lr_scheduler": "constant_with_warmup", "warmup_ratio": 0.5},
    ),
    "cosine_min_lr_ratio": ({"cosine_min_lr_ratio": 0.3},),
    "no decay": ({"weight_decay": 0.0},),
}


@pytest.mark.parametrize(
    "jobs",
    [
        pytest.param(
            pair("llama", EIGHT_BITS, *settings, plan=overrides(0, 2)),
            id=name,
            marks=() if name == "lr_groups" else pytest.mark.full,
        )
        for name, settings in GROUPS.items()
    ],
)
def test_groups_and_schedules_hold(run: Run, jobs: Pair) -> None:
    found = differences(run(jobs.paged), run(jobs.plain))
    assert not found, "\n".join(found)
    without = run(
        job("llama", EIGHT_BITS, LORA if "adapter" in jobs.plain.yaml else {})
    )
    assert differences(run(jobs.plain), without), "trains the same without the key"
