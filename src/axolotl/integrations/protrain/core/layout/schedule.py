"""Which chunk is wanted next. Integers only: no tensor, no stream, no clock.

Paged chunks are numbered 0..n-1 in the order of use, blocks own consecutive numbers.
Chunk c uses slot `c mod num_slots`, so the chunks ahead of a block, as many as there
are other slots, never collide with the block's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum


class Direction(Enum):
    """The order in which blocks follow each other."""

    FORWARD = "forward, to be followed by backward"
    BACKWARD = "backward"
    INFERENCE = "forward, to be followed by another forward"


class Schedule:
    """Order of the paged chunks around each block.

    Args:
        block_chunks: For each block its paged chunk numbers, consecutive and rising
            over the blocks; empty for a block without paged chunks.
        num_slots: Slots in the ring, at least as many as any block has chunks.
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
        self._ahead = {
            direction: tuple(
                self._chunks_ahead(start, stop, direction)
                for start, stop in self._bounds
            )
            for direction in Direction
        }

    def slot_of(self, chunk: int) -> int:
        """The one slot that a chunk ever uses."""
        return chunk % self.num_slots

    def needed(self, block: int) -> range:
        """Chunks that a block reads."""
        return range(*self._bounds[block])

    def ahead(self, block: int, direction: Direction) -> tuple[int, ...]:
        """Chunks to fetch while `block` computes, the soonest needed first.

        None of them shares a slot with the block's own chunks. At the turn from
        forward to backward nothing is ahead: the slots hold what backward begins with.
        """
        return self._ahead[direction][block]

    def _chunks_ahead(
        self, start: int, stop: int, direction: Direction
    ) -> tuple[int, ...]:
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
