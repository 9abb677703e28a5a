"""The ring of slots, and which chunk is wanted next in it.

Paged chunks are numbered 0..n-1 in the order of use, blocks own consecutive numbers, and
chunk c always uses slot `c mod n_buffer`: the chunks ahead of a block, as many as there
are other slots, never collide with the block's own. Integers only: no tensor, no stream,
no clock. Everything that search and runtime both need to know about slots stands here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from enum import Enum
from functools import lru_cache

from ..errors import ConfigError
from ..types import Chunk, Layout, Placement, Plan
from .shards import padded_bytes


def slot_floor(layout: Layout, placements: Sequence[Placement]) -> int:
    """Fewest slots that can run: as many as one block has paged chunks.

    The chunks of a block have consecutive numbers, so that many slots hold them all.
    """
    paged = _paged(layout, placements)
    return max(Counter(chunk.block for chunk in paged).values(), default=0)


def slot_bytes(
    layout: Layout, placements: Sequence[Placement], n_buffer: int, shards: int = 1
) -> tuple[int, ...]:
    """Size of each slot in bytes: the largest chunk that the ring sends through it,
    padded to whole shards."""
    paged = [padded_bytes(chunk, shards) for chunk in _paged(layout, placements)]
    return tuple(max(paged[slot::n_buffer], default=0) for slot in range(n_buffer))


def ring_fits(layout: Layout, plan: Plan, held: Collection[int]) -> bool:
    """Tell whether a plan's slots have room for each of its paged chunks, in their order,
    when those that are held have buffers of their own."""
    sizes = slot_bytes(layout, plan.placements, plan.n_buffer, plan.shards)
    rest = (
        padded_bytes(layout.chunks[index], plan.shards)
        for index in plan.paged
        if index not in held
    )
    return all(
        nbytes <= sizes[number % plan.n_buffer] for number, nbytes in enumerate(rest)
    )


def _paged(layout: Layout, placements: Sequence[Placement]) -> list[Chunk]:
    pairs = zip(layout.chunks, placements, strict=True)
    return [
        chunk for chunk, placement in pairs if placement is Placement.PARAM_OFFLOADED
    ]


def check_slots(layout: Layout, placements: Sequence[Placement], n_buffer: int) -> None:
    """Refuse a number of slots outside the legal range.

    Raises:
        ConfigError: Fewer than `slot_floor`, or more than there are paged chunks.
    """
    num_paged = len(_paged(layout, placements))
    floor = slot_floor(layout, placements)
    if not floor <= n_buffer <= num_paged:
        raise ConfigError(
            f"protrain_n_buffer_override: {n_buffer} slots for {num_paged} paged "
            f"chunks is outside the legal range {floor} to {num_paged}: one block "
            f"needs {floor} at once, and more than {num_paged} would stand idle."
        )


@lru_cache(maxsize=None)
def spread_order(total: int) -> tuple[int, ...]:
    """All positions in the order in which they become resident.

    Each prefix is spread over the whole, and contains every shorter one: a larger
    budget only adds resident chunks, so it never makes a plan slower. Successive
    multiples of the golden ratio leave gaps of at most three sizes.
    """
    taken: dict[int, None] = {}
    point = 0.5
    for _ in range(total):
        position = int(point * total)
        while position in taken:
            position = (position + 1) % total
        taken[position] = None
        point = (point + GOLDEN_RATIO) % 1.0
    return tuple(taken)


GOLDEN_RATIO = 0.6180339887498949


class Direction(Enum):
    """The order in which blocks follow each other."""

    FORWARD = "forward, to be followed by backward"
    BACKWARD = "backward"
    INFERENCE = "forward, to be followed by another forward"

    # as itself: that of an enum is a function of Python, called for each block
    __hash__ = object.__hash__


class Schedule:
    """Order of the paged chunks around each block.

    `block_chunks` are for each block its paged chunk numbers, if any, consecutive and
    rising over the blocks; there are at least as many slots as any block has chunks.
    """

    def __init__(self, block_chunks: Sequence[Sequence[int]], num_slots: int) -> None:
        self.num_blocks = len(block_chunks)
        self.num_chunks = sum(map(len, block_chunks))
        self.num_slots = num_slots
        self._bounds: list[tuple[int, int]] = []
        end = 0
        for chunks in block_chunks:
            if list(chunks) != list(range(end, end + len(chunks))):
                raise ValueError(f"chunks {list(chunks)} do not continue at {end}")
            if len(chunks) > num_slots:
                raise ValueError(f"{len(chunks)} chunks of a block, {num_slots} slots")
            self._bounds.append((end, end + len(chunks)))
            end += len(chunks)

    def slot_of(self, chunk: int) -> int:
        """The one slot that a chunk ever uses."""
        return chunk % self.num_slots

    def needed(self, block: int) -> range:
        """Chunks that a block reads."""
        return range(*self._bounds[block])

    def after(self, block: int, direction: Direction) -> tuple[int, ...]:
        """Chunks that are fetched after `block` begins, the soonest needed first, up to
        the same block of the pass after the next."""
        start, stop = self._bounds[block]
        last = max(self.num_chunks - self.num_slots, 0)
        rest, back = range(stop, self.num_chunks), range(start - 1, -1, -1)
        if direction is Direction.FORWARD:
            return (*rest, *range(last - 1, -1, -1))
        if direction is Direction.BACKWARD:
            return (
                *back,
                *range(min(self.num_slots, self.num_chunks), self.num_chunks),
            )
        return (*rest, *range(stop))

    def ahead(self, block: int, direction: Direction) -> tuple[int, ...]:
        """Chunks to fetch while `block` computes, the soonest needed first.

        None of them shares a slot with the block's own chunks. Going from
        forward to backward nothing is ahead: the slots hold what backward begins with.
        """
        start, stop = self._bounds[block]
        room = self.num_slots - (stop - start)
        if direction is Direction.BACKWARD:
            return tuple(range(start - 1, max(start - 1 - room, -1), -1))
        if direction is Direction.FORWARD:
            return tuple(range(stop, min(stop + room, self.num_chunks)))
        wanted: list[int] = []
        taken = {self.slot_of(c) for c in range(start, stop)}
        for step in range(min(room, self.num_chunks - (stop - start))):
            chunk = (stop + step) % self.num_chunks
            # past the wrap the ring may point at a slot that is still needed
            if self.slot_of(chunk) in taken:
                break
            taken.add(self.slot_of(chunk))
            wanted.append(chunk)
        return tuple(wanted)
