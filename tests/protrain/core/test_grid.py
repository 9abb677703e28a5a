"""What pages computes what does not: rows of plans, optimizers, models and devices."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from core_models import ALL
from covering import array
from grid import DEVICES, OPTIMIZERS, PLACES, POLICIES, Row, build, same
from odd_models import LOOKED_UP, MODELS

from axolotl.integrations.protrain.core.layout import PIECE_NUMEL
from axolotl.integrations.protrain.core.types import Update

DTYPES = (torch.float32, torch.bfloat16)
ON_HOST = ("outside too", "states")
"""Places in which every weight and its state is on the host."""
FEW_SLOTS = ("one slot", "two slots", "mixed states", "outside too")
"""Where another plan in mid-run may lead."""

AXES: dict[str, tuple[Any, ...]] = {
    "place": (*PLACES,),
    "policy": (*POLICIES,),
    "device": (*DEVICES,),
    "trained": ("full", "adapters", "waiting"),
    "dtype": DTYPES,
    "update": (*Update,),
    # whole vectors: torch's kernels round what is left of one otherwise
    "piece_numel": (PIECE_NUMEL, 128),
    "accumulation": (1, 2, 3),
    "clip": (None, 0.5),
    "dropout": (0.0, 0.1),
    "autocast": (False, True),
    "masters": (False, True),
    "looks": (False, True),
    "resumes": (False, False, True),
    "then": (None, None, *FEW_SLOTS),
    "inside": (False, True),
}


def valid(point: dict[str, Any]) -> bool:
    then, resumes = point["then"], point["resumes"]
    if point["masters"] and not (
        point["trained"] == "full"
        and point["dtype"] is torch.bfloat16
        and point["place"] in ON_HOST
        and then in (None, *ON_HOST)
    ):
        return False
    if point["inside"] and (then is None or resumes):
        return False
    if then is None or resumes:
        return True
    # another plan of a session only takes away from the device
    before, after = (
        on_host(point[name], point["trained"]) for name in ("place", "then")
    )
    return point["trained"] != "waiting" and bool(before) and before <= after


def on_host(place: str, trained: str) -> set[Any]:
    """Blocks, and what is outside of them."""
    knobs = PLACES[place]
    stay = () if "inside" in knobs else knobs.get("resident", ())
    outside = {"outside"} if "outside" in knobs and trained == "full" else set()
    return {*ALL} - {*stay} | outside


def rows(strength: int) -> dict[str, Row]:
    return {str(row): row for row in (Row(**p) for p in array(AXES, valid, strength))}


QUICK = rows(2)


@pytest.mark.parametrize("row", QUICK.values(), ids=QUICK.keys())
def test_any_two_things_together(row: Row) -> None:
    same(row)


@pytest.mark.full
@pytest.mark.parametrize("part", range(8))
def test_any_three_things_together(part: int) -> None:
    for row in [*rows(3).values()][part::8]:
        same(row)


def drawn(name: str, **fixed: Any) -> Row:
    """A valid row that has these values, and others by its name."""
    draw = random.Random(name)
    while True:
        point = {key: draw.choice(values) for key, values in AXES.items()} | fixed
        if valid(point):
            return Row(**point)


def of_optimizers() -> Iterator[Row]:
    """Each once in fp32 and once in bf16, and one of them resumes."""
    for number, name in enumerate(OPTIMIZERS):
        for dtype in DTYPES:
            yield drawn(
                f"{name} {dtype}",
                optimizer=name,
                dtype=dtype,
                trained="full",
                masters=False,
                then="states" if DTYPES[number % 2] is dtype else None,
                resumes=DTYPES[number % 2] is dtype,
            )


@pytest.fixture
def eager() -> Iterator[None]:
    """torchao compiles its step, which takes a minute and changes no number."""
    with torch.compiler.set_stance("force_eager"):
        yield


EACH = {f"{r.optimizer}, {r.dtype}": r for r in of_optimizers()}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("row", EACH.values(), ids=EACH.keys())
@pytest.mark.sampled(24)
def test_optimizers(row: Row) -> None:
    same(row)


def of_models() -> Iterator[Any]:
    """Each under some policies, and under all of them in the whole grid."""
    for number, name in enumerate(MODELS):
        adapts = hasattr(build(Row(model=name)), "peft_config")
        policies = ("keep", "recompute", "swap")
        # a block that changes its input cannot be run again
        policies = policies[:1] if name == "in place" else policies
        # a sum is added to what is in the memory of another gradient
        adds = {"accumulation": 3} if name == "positions" else {}
        for turn, policy in enumerate(policies):
            row = drawn(
                f"{name} {policy}",
                model=name,
                policy=policy,
                place=("one slot", "two slots", "mixed", "outside too")[number % 4],
                trained="adapters" if adapts or name in LOOKED_UP else "full",
                dtype=torch.float32,
                masters=False,
                dropout=0.0,
                autocast=False,
                then=None,
                inside=False,
                resumes=False,
                **adds,
            )
            often = number % 3 == turn if adapts else number % 3 != turn
            quick = often or len(policies) == 1
            marks = () if quick else pytest.mark.full
            yield pytest.param(row, id=f"{name}, {policy}", marks=marks)


@pytest.mark.parametrize("row", of_models())
@pytest.mark.sampled(40)
def test_models(row: Row) -> None:
    same(row)


COMPILED = [
    replace(row, compiled=True, autocast=not number % 2)
    for number, row in enumerate(
        drawn(
            policy,
            policy=policy,
            dtype=torch.float32,
            masters=False,
            then=None,
            inside=False,
            resumes=False,
            looks=False,
            dropout=0.0,
        )
        for policy in POLICIES
    )
]


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Each test compiles anew: torch keeps eight graphs of a function."""
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("row", COMPILED, ids=lambda row: row.policy)
@pytest.mark.sampled(4)
def test_compiled_blocks(row: Row) -> None:
    same(row)
