"""Plans from a budget and by hand."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
import torch
from core_models import layouts
from hypothesis import given, strategies as st

from axolotl.integrations.protrain.core.cost import host_bytes, state_bytes
from axolotl.integrations.protrain.core.errors import BudgetError, ConfigError
from axolotl.integrations.protrain.core.layout import check_slots, slot_floor
from axolotl.integrations.protrain.core.search import (
    fill_budget,
    plan_by_hand,
)
from axolotl.integrations.protrain.core.types import (
    Block,
    Budget,
    Chunk,
    Layout,
    Placement,
    Plan,
    TensorSpec,
)

PLENTY = 1 << 50


def device(nbytes: int, reserve: int = 0) -> Budget:
    return Budget(device_bytes=nbytes, reserve_bytes=reserve, host_bytes=PLENTY)


def needed(layout: Layout, plan: Plan) -> int:
    return state_bytes(layout, plan.placements, plan.n_buffer).total


def uniform(num_blocks: int, numel: int, trainable: bool) -> Layout:
    """One chunk of float32 in each block and one, trainable, outside."""

    def chunk(index: int, block: int | None, trains: bool) -> Chunk:
        spec = TensorSpec(f"p{index}", (numel,), torch.float32, 0)
        return Chunk(index, block, trains, (spec,), spec.nbytes)

    chunks = [chunk(index, index, trainable) for index in range(num_blocks)]
    if trainable:
        chunks.append(chunk(num_blocks, None, True))
    blocks = [Block(index, f"layers.{index}", (index,)) for index in range(num_blocks)]
    return Layout(tuple(blocks), tuple(chunks), 0, 0)


class Filled(NamedTuple):
    """A plan that `fill_budget` made, and from what."""

    layout: Layout
    budget: Budget
    plan: Plan


@st.composite
def filled(draw: st.DrawFn, fp32_master: bool = False) -> Filled:
    layout = draw(layouts())
    reserve = draw(st.integers(0, 500))
    least = least_budget(layout, fp32_master)
    budget = device(reserve + least + draw(st.integers(0, 4000)), reserve)
    n_checkpoint = draw(st.integers(0, len(layout.blocks)))
    plan = fill_budget(layout, budget, n_checkpoint, fp32_master)
    assert plan.n_checkpoint == n_checkpoint
    return Filled(layout, budget, plan)


def least_budget(layout: Layout, fp32_master: bool) -> int:
    """A budget that fits: what the refusal says is missing from nothing."""
    try:
        fill_budget(layout, device(0), 0, fp32_master)
    except BudgetError as error:
        return missing_bytes(error)
    return 0


def missing_bytes(error: BudgetError) -> int:
    found = re.search(r"by at least ([\d,]+)", str(error))
    assert found, error
    return int(found.group(1).replace(",", ""))


@given(st.one_of(filled(), filled(fp32_master=True)))
def test_a_plan_fits_and_can_run(made: Filled) -> None:
    layout, budget, plan = made
    assert needed(layout, plan) <= budget.usable_bytes
    check_slots(layout, plan.placements, plan.n_buffer)
    assert len(plan.placements) == len(layout.chunks)
    assert plan.recompute == tuple(
        index < plan.n_checkpoint for index in range(len(layout.blocks))
    )
    assert plan.n_swap == 0
    staying = [
        chunk
        for chunk in layout.pageable
        if plan.placements[chunk.index] is not Placement.PAGED
    ]
    assert len(staying) == plan.n_persist
    assert plan.paged == tuple(
        c.index for c in layout.pageable if c.index not in {s.index for s in staying}
    )
    assert plan.mode == ("B" if plan.paged else "A")


@given(filled(), st.integers(0, 3000))
def test_more_budget_never_keeps_less(made: Filled, more: int) -> None:
    layout, budget, plan = made
    larger = Budget(budget.device_bytes + more, budget.reserve_bytes, PLENTY)
    assert fill_budget(layout, larger, 0, False).n_persist >= plan.n_persist


@given(filled())
def test_one_more_resident_chunk_would_not_fit(made: Filled) -> None:
    """The most that fits among plans with one slot to fetch into."""
    layout, budget, plan = made
    for n_persist in range(plan.n_persist + 1, len(layout.pageable) + 1):
        num_paged = len(layout.pageable) - n_persist
        # as many slots as chunks are always legal
        legal = plan_by_hand(layout, device(PLENTY), n_persist, num_paged, 0, False)
        n_buffer = min(slot_floor(layout, legal.placements) + 1, num_paged)
        with pytest.raises(BudgetError):
            plan_by_hand(layout, budget, n_persist, n_buffer, 0, False)


@given(layouts(), st.booleans())
def test_the_missing_bytes_are_enough(layout: Layout, fp32_master: bool) -> None:
    missing = least_budget(layout, fp32_master)
    plan = fill_budget(layout, device(missing), 0, fp32_master)
    assert needed(layout, plan) <= missing
    # and what was refused had them short by exactly that
    if missing:
        with pytest.raises(BudgetError) as refusal:
            fill_budget(layout, device(0, reserve=100), 0, fp32_master)
        assert missing_bytes(refusal.value) == missing + 100


@pytest.mark.parametrize("trainable", [False, True])
def test_the_refusal_names_every_term(trainable: bool) -> None:
    layout = uniform(4, 1000, trainable)
    with pytest.raises(BudgetError) as refusal:
        fill_budget(layout, device(3000, reserve=1000), 0, False)
    message = str(refusal.value)
    assert message.startswith("protrain_capacity_bytes")
    assert "2,000 of 3,000 may be used" in message
    listed = message[message.index("(") + 1 : message.index(")")]
    terms = {
        name: int(value.replace(",", ""))
        for name, value in (term.split() for term in listed.split(", "))
    }
    assert set(terms) == {"slots"} | (
        {"host_state", "gradients"} if trainable else set()
    )
    assert sum(terms.values()) - 2000 == missing_bytes(refusal.value)


def test_one_slot_is_only_taken_by_hand() -> None:
    """It runs, but hides no fetch: the refusal says how to ask for it."""
    layout = uniform(4, 100, trainable=False)
    by_hand = plan_by_hand(layout, device(400), 0, 1, 0, False)
    assert needed(layout, by_hand) == 400
    with pytest.raises(BudgetError, match="protrain_n_buffer_override"):
        fill_budget(layout, device(400), 0, False)


@given(filled())
def test_the_host_has_a_budget_too(made: Filled) -> None:
    layout, budget, plan = made
    used = host_bytes(layout, plan.placements, False)
    enough = Budget(budget.device_bytes, budget.reserve_bytes, used)
    assert fill_budget(layout, enough, 0, False).placements == plan.placements
    if used:
        short = Budget(budget.device_bytes, budget.reserve_bytes, used - 1)
        with pytest.raises(BudgetError, match="protrain_cpu_capacity_bytes") as refusal:
            fill_budget(layout, short, 0, False)
        assert f"{used:,}" in str(refusal.value)
        assert f"{used - 1:,}" in str(refusal.value)


@given(layouts())
def test_masters_keep_their_state_on_the_host(layout: Layout) -> None:
    plan = fill_budget(layout, device(PLENTY), 0, fp32_master=True)
    for chunk, placement in zip(layout.chunks, plan.placements, strict=True):
        halves = any(spec.dtype.itemsize == 2 for spec in chunk.tensors)
        if chunk.trainable and halves:
            assert placement is Placement.HOST_STATE
        else:
            assert placement is Placement.RESIDENT


@given(layouts(), st.data())
def test_by_hand_runs_exactly_what_was_asked(
    layout: Layout, data: st.DataObject
) -> None:
    total = len(layout.pageable)
    n_persist = data.draw(st.integers(0, total))
    n_checkpoint = data.draw(st.integers(0, len(layout.blocks)))
    n_buffer = data.draw(st.integers(0, total + 1))
    try:
        plan = plan_by_hand(
            layout, device(PLENTY), n_persist, n_buffer, n_checkpoint, False
        )
    except ConfigError as error:
        low, high = map(int, re.findall(r"range (\d+) to (\d+)", str(error))[0])
        assert not low <= n_buffer <= high
        assert high == total - n_persist
        return
    assert (plan.n_persist, plan.n_buffer) == (n_persist, n_buffer)
    assert plan.n_checkpoint == n_checkpoint == sum(plan.recompute)
    check_slots(layout, plan.placements, plan.n_buffer)


RANGES = [
    ("n_persist", (-1, 1, 0), "range 0 to 4, the number of chunks"),
    ("n_persist", (5, 0, 0), "range 0 to 4, the number of chunks"),
    ("n_checkpoint", (0, 1, -1), "range 0 to 4, the number of blocks"),
    ("n_checkpoint", (0, 1, 5), "range 0 to 4, the number of blocks"),
    ("n_buffer", (0, 0, 0), "range 1 to 4"),
    ("n_buffer", (0, 5, 0), "range 1 to 4"),
    ("n_buffer", (4, 1, 0), "range 0 to 0"),
]


@pytest.mark.parametrize(("knob", "values", "message"), RANGES)
def test_by_hand_refuses_what_is_out_of_range(
    knob: str, values: tuple[int, int, int], message: str
) -> None:
    layout = uniform(4, 100, trainable=False)
    with pytest.raises(ConfigError, match=message) as refusal:
        plan_by_hand(layout, device(PLENTY), *values, False)
    assert str(refusal.value).startswith(f"protrain_{knob}_override")
    # what pydantic shows to the person
    assert isinstance(refusal.value, ValueError)


def test_by_hand_refuses_what_does_not_fit() -> None:
    layout = uniform(4, 100, trainable=True)
    plan = plan_by_hand(layout, device(PLENTY), 2, 2, 0, False)
    assert plan.placements[-1] is Placement.RESIDENT
    # weights outside blocks give up their state on the device first
    smaller = plan_by_hand(layout, device(needed(layout, plan) - 1), 2, 2, 0, False)
    assert smaller.placements[-1] is Placement.HOST_STATE
    short = device(needed(layout, smaller) - 7)
    with pytest.raises(BudgetError) as refusal:
        plan_by_hand(layout, short, 2, 2, 0, False)
    assert missing_bytes(refusal.value) == 7
