"""The order of fetches: integers in, integers out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, strategies as st

from axolotl.integrations.protrain.core.layout import Direction, Schedule


class Ring(NamedTuple):
    """Chunks per block and a legal number of slots."""

    chunks: list[int]
    num_slots: int

    @property
    def num_chunks(self) -> int:
        return sum(self.chunks)

    def schedule(self) -> Schedule:
        ends = [sum(self.chunks[: n + 1]) for n in range(len(self.chunks))]
        blocks = [
            range(end - own, end) for end, own in zip(ends, self.chunks, strict=True)
        ]
        return Schedule(blocks, self.num_slots)


@st.composite
def rings(draw: st.DrawFn) -> Ring:
    chunks = draw(st.lists(st.integers(0, 3), min_size=1, max_size=9).filter(any))
    return Ring(chunks, draw(st.integers(max(chunks), sum(chunks))))


class Simulation:
    """Slots as a list of what they hold; fetches counted, nothing else."""

    def __init__(self, ring: Ring) -> None:
        self.schedule = ring.schedule()
        self.holds: list[int | None] = [None] * ring.num_slots
        self.fetches: list[int] = []

    def fetch(self, chunk: int) -> None:
        slot = chunk % len(self.holds)
        if self.holds[slot] != chunk:
            self.holds[slot] = chunk
            self.fetches.append(chunk)

    def visit(self, block: int, direction: Direction) -> None:
        needed = self.schedule.needed(block)
        for chunk in needed:
            self.fetch(chunk)
        for chunk in self.schedule.ahead(block, direction):
            self.fetch(chunk)
        # the block computes only now
        assert set(needed) <= set(self.holds)

    def sweep(self, blocks: Sequence[int], direction: Direction) -> int:
        before = len(self.fetches)
        for block in blocks:
            self.visit(block, direction)
        return len(self.fetches) - before


@given(rings())
def test_ahead_never_collides(ring: Ring) -> None:
    schedule = ring.schedule()
    for block in range(len(ring.chunks)):
        for direction in Direction:
            wanted = [*schedule.needed(block), *schedule.ahead(block, direction)]
            slots = [schedule.slot_of(chunk) for chunk in wanted]
            assert all(0 <= chunk < ring.num_chunks for chunk in wanted)
            assert all(0 <= slot < ring.num_slots for slot in slots)
            assert len(set(slots)) == len(slots)


@given(rings())
def test_ahead_is_the_order_of_use(ring: Ring) -> None:
    schedule = ring.schedule()
    num = ring.num_chunks
    for block in range(len(ring.chunks)):
        needed = schedule.needed(block)
        forward = schedule.ahead(block, Direction.FORWARD)
        backward = schedule.ahead(block, Direction.BACKWARD)
        inference = schedule.ahead(block, Direction.INFERENCE)
        assert forward == tuple(range(num))[needed.stop : needed.stop + len(forward)]
        assert backward == tuple(range(needed.start))[::-1][: len(backward)]
        assert inference == tuple(
            (needed.stop + n) % num for n in range(len(inference))
        )
        # all the room there is, as far as there are chunks to put into it
        room = ring.num_slots - len(needed)
        assert len(forward) == min(room, num - needed.stop)
        assert len(backward) == min(room, needed.start)
        assert inference[: len(forward)] == forward


@given(rings())
def test_at_the_turn_the_last_chunks_are_held(ring: Ring) -> None:
    simulation = Simulation(ring)
    simulation.sweep(range(len(ring.chunks)), Direction.FORWARD)
    last = range(ring.num_chunks - ring.num_slots, ring.num_chunks)
    assert set(simulation.holds) == set(last)
    simulation.sweep(range(len(ring.chunks))[::-1], Direction.BACKWARD)
    assert set(simulation.holds) == set(range(ring.num_slots))


@given(rings(), st.integers(1, 4))
def test_training_fetches_the_minimum(ring: Ring, num_micro_batches: int) -> None:
    """With S slots no order holds more than S chunks at a turn.

    Of the C chunks that the sweep after the turn reads, at least C - S have to be
    fetched, and the first sweep finds nothing: C + (2 m - 1)(C - S) in all.
    """
    simulation = Simulation(ring)
    blocks = range(len(ring.chunks))
    for _ in range(num_micro_batches):
        for order, direction in (
            (blocks, Direction.FORWARD),
            (blocks[::-1], Direction.BACKWARD),
        ):
            before = len(simulation.fetches)
            simulation.sweep(order, direction)
            fetched = simulation.fetches[before:]
            assert len(fetched) == len(set(fetched))
    spare = ring.num_chunks - ring.num_slots
    expected = ring.num_chunks + (2 * num_micro_batches - 1) * spare
    assert len(simulation.fetches) == expected


@given(rings(), st.integers(1, 4))
def test_inference_fetches_what_shares_a_slot(ring: Ring, num_passes: int) -> None:
    """A chunk alone in its slot is fetched once, every other once in each pass.

    What the end of a pass has fetched for the next one counts for the next one.
    """
    simulation = Simulation(ring)
    blocks = range(len(ring.chunks))
    residues = [chunk % ring.num_slots for chunk in range(ring.num_chunks)]
    again = sum(residues.count(slot) > 1 for slot in residues)
    simulation.sweep(blocks, Direction.INFERENCE)
    for _ in range(num_passes):
        assert simulation.sweep(blocks, Direction.INFERENCE) == again


@given(rings())
def test_after_inference_the_next_pass_begins_at_once(ring: Ring) -> None:
    """The wrap-around: some of the first chunks are there before they are asked for."""
    simulation = Simulation(ring)
    blocks = range(len(ring.chunks))
    simulation.sweep(blocks, Direction.INFERENCE)
    last = simulation.schedule.ahead(blocks[-1], Direction.INFERENCE)
    room = ring.num_slots > ring.chunks[-1]
    collides = 0 in {c % ring.num_slots for c in simulation.schedule.needed(blocks[-1])}
    if room and ring.num_chunks > ring.chunks[-1] and not collides:
        assert last[0] == 0
    for chunk in last:
        assert simulation.holds[chunk % ring.num_slots] == chunk


@given(rings(), st.data())
def test_any_order_finds_its_chunks(ring: Ring, data: st.DataObject) -> None:
    simulation = Simulation(ring)
    block = st.integers(0, len(ring.chunks) - 1)
    visit = st.tuples(block, st.sampled_from(Direction))
    for visited, direction in data.draw(st.lists(visit, max_size=20)):
        simulation.visit(visited, direction)


def test_a_schedule_refuses_what_the_ring_cannot_do() -> None:
    with pytest.raises(ValueError, match="3 chunks of a block, 2 slots"):
        Schedule([[0, 1, 2]], 2)
    with pytest.raises(ValueError, match="do not continue at 1"):
        Schedule([[0], [2]], 2)
