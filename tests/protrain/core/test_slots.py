"""Device buffers and the states of the chunks in them, on a real model and device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from core_models import (
    ALL,
    batches,
    before_updates,
    checked,
    open_session,
    stack,
    wrapped,
)
from hypothesis import given, strategies as st
from test_failures import FaultyDevice

from axolotl.integrations.protrain.core.engine.host_pool import HostPool
from axolotl.integrations.protrain.core.engine.ranks import Alone
from axolotl.integrations.protrain.core.engine.slots import (
    TRANSITIONS,
    ChunkState,
    Slot,
    Slots,
    Transport,
)
from axolotl.integrations.protrain.core.errors import LayoutError
from axolotl.integrations.protrain.core.layout import Direction, Schedule, build_layout
from axolotl.integrations.protrain.core.planner.plans import make_plan
from axolotl.integrations.protrain.core.types import Counters, Update, World

WAIT_S = 20.0
"""Longer than anything here takes: what would hang fails instead."""


def slots_of(device: FaultyDevice) -> Slots:
    """Three blocks of a chunk each, of which the first and the last share a slot."""
    layout = build_layout(stack(num_layers=3, width=4, inner=4))
    plan = make_plan(layout, 0, 2, 0, 0, fp32_master=False)
    pool = HostPool()
    pool.add(layout.chunks)
    slots = Slots(layout, plan, pool, device, Alone(), Counters())
    slots.allocate()
    return slots


Call = tuple[str, int | None]
CALLS: dict[Call, ChunkState | None] = {
    ("fetch", 0): ChunkState.FETCHING,
    ("fetch", 2): ChunkState.FETCHING,
    ("begin_use", 0): ChunkState.IN_USE,
    ("begin_use", 2): ChunkState.IN_USE,
    ("begin_update", 0): ChunkState.UPDATING,
    ("end_use", None): None,
    ("end_update", 0): None,
    ("forget", 0): None,
    ("forget_all", None): None,
}
"""Calls, and the state that the chunk of each has afterwards."""


def states_after(calls: list[Call], refused: bool = False) -> list[ChunkState]:
    """States of all chunks; `refused` is the last call, which raises and changes none."""
    slots = slots_of(FaultyDevice())
    for number, (name, chunk) in enumerate(calls):
        call: Callable[..., object] = getattr(slots, name)
        if name == "begin_use":
            call = partial(call, in_forward=True)
        args = () if chunk is None else (chunk,)
        if refused and number == len(calls) - 1:
            with pytest.raises(LayoutError):
                call(*args)
        else:
            call(*args)
    return [slots.state(chunk) for chunk in slots.chunks]


def test_chunks_make_exactly_the_moves_of_the_table() -> None:
    """Each call, wherever calls lead: it makes a legal move, or is an error."""
    made: set[tuple[ChunkState, ChunkState]] = set()
    paths: dict[tuple[ChunkState, ...], list[Call]] = {tuple(states_after([])): []}
    left = [*paths]
    while left:
        before = left.pop()
        for call, target in CALLS.items():
            path, (name, chunk) = [*paths[before], call], call
            moves = target is None or target in TRANSITIONS[before[chunk]]
            if name == "fetch":
                moves &= before[2 - chunk] is not ChunkState.IN_USE
            after = states_after(path, refused=not moves)
            assert moves or tuple(after) == before
            assert not moves or target in (None, after[chunk or 0])
            made |= {(a, b) for a, b in zip(before, after, strict=True) if a is not b}
            if moves and target is not None:
                made.add((before[chunk], target))
            if tuple(after) not in paths:
                paths[tuple(after)] = path
                left.append(tuple(after))
    assert made == {(a, b) for a, following in TRANSITIONS.items() for b in following}


def test_a_fetch_that_fails_leaves_an_empty_slot() -> None:
    device = FaultyDevice()
    slots = slots_of(device)
    slots.fetch(0)
    device.arm("fetch", 1, RuntimeError("on purpose"))
    with pytest.raises(RuntimeError, match="on purpose"):
        slots.fetch(2)
    assert slots.missing(0) == [0] and slots.missing(2) == [2]
    slots.fetch(2)
    slots.begin_use(2, in_forward=True)
    slots.end_use()
    slots.release()


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.sampled_from(ALL), st.sampled_from(Direction)), max_size=12),
)
def test_counters(num_slots: int, visits: list[tuple[int, Direction]]) -> None:
    """Fetches, their bytes and misses, against slots that are a dict."""
    model = stack()
    session = open_session(model, n_buffer=num_slots)
    schedule = Schedule([[block] for block in ALL], num_slots)
    held: dict[int, int] = {}
    fetched = misses = 0

    def use(block: int, direction: Direction) -> None:
        nonlocal fetched, misses
        misses += held.get(schedule.slot_of(block)) != block
        for chunk in (block, *schedule.ahead(block, direction)):
            fetched += held.get(schedule.slot_of(chunk)) != chunk
            held[schedule.slot_of(chunk)] = chunk

    in_use = None
    for block, direction in visits:
        x = torch.ones(2, 16, requires_grad=True)
        with torch.set_grad_enabled(direction is not Direction.INFERENCE):
            # a call finds the block in use of the backward before
            y = model.layers[block](x)
        if in_use != block:
            use(block, Direction.FORWARD if y.requires_grad else Direction.INFERENCE)
        in_use = None
        if direction is Direction.BACKWARD:
            torch.autograd.grad(y.sum(), x)
            use(block, Direction.BACKWARD)
            in_use = block
    counters = session.counters
    assert (counters.num_fetches, counters.num_misses) == (fetched, misses)
    assert counters.fetched_bytes == fetched * session.layout.chunks[0].nbytes
    session.close()


@pytest.fixture
def gate() -> Iterator[threading.Semaphore]:
    """Updates on the host thread wait for it, one for each parameter group."""
    gate = threading.Semaphore(0)

    def passes() -> None:
        assert gate.acquire(timeout=WAIT_S)

    with before_updates(passes):
        yield gate
        gate.release(1000)


def test_what_is_being_updated_is_not_fetched_ahead(gate: threading.Semaphore) -> None:
    """Nor anything after it: the copies would overtake each other."""
    model = stack(num_layers=4)
    session = open_session(model, n_buffer=3, update=Update.HOST)
    optimizer = wrapped(session)
    model(batches(1)[0]).backward()
    optimizer.step()
    fetches = []

    def let_through(*_: object) -> None:
        fetches.append(session.counters.num_fetches)
        gate.release(1000)
        session.settle()

    before, misses = session.counters.num_fetches, session.counters.num_misses
    handle = model.layers[0].register_forward_hook(let_through)
    gate.release(len(optimizer.param_groups))
    with torch.no_grad():
        model.layers[0](torch.ones(2, 16))
    handle.remove()
    assert fetches == [before + 1]
    assert session.counters.num_fetches == before + 3
    assert session.counters.num_misses == misses + 1
    assert session.stall_s > 0
    session.close()


class Twins(Alone):
    """Two ranks of a node of which the other has the same shard."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(2, 2)

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        whole.copy_(part.repeat(2))


def test_a_fetch_waits_for_the_gather_of_a_chunk_that_nobody_used() -> None:
    """A prefetch that a pass in the other direction did not want: its gather would write
    over the shard that comes next."""
    device = checked()
    slot = Slot(device.allocate(512), device, Transport(device, Twins()))
    shards = [torch.full((256,), chunk, dtype=torch.uint8) for chunk in range(2)]
    for chunk, shard in enumerate(shards):
        slot.fetch(chunk, shard)
    slot.begin_use()
    assert slot.buffer.eq(1).all()
    slot.end_use()
    device.synchronize()
