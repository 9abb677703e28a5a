"""The order of blocks in a pass, where a fetch is a collective.

# Note [Fetches that all ranks make]

Where a fetch is a gather, all ranks have to make the same ones in the same order, and
nothing that depends on timing may decide about one: an update can hold back a prefetch,
but not change the order. A rank that leaves out a block (an image tower without images, a
dropped layer) uses it all the same, in order. A pass goes up from the first block or, in
backward, down from the last; what is left of it is used when the next pass begins, and of
one that goes down when backward ends. A rank that runs no block of a pass has none to use,
so ranks meet where a pass begins.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..layout import Direction
from .ranks import Ranks


class PassOrder:
    """Names the blocks that this rank leaves out and other ranks may use.

    Attributes:
        direction: The direction of the pass that runs.
    """

    def __init__(self, num_blocks: int, ranks: Ranks) -> None:
        self._num_blocks, self._ranks = num_blocks, ranks
        self.direction = Direction.FORWARD
        self._met = False
        # the block that was used last in this pass
        self._at = -1

    @property
    def goes_down(self) -> bool:
        """True for a backward pass."""
        return self.direction is Direction.BACKWARD

    def begins(self, block: int, direction: Direction) -> bool:
        """Return whether a pass begins with a block, because it goes the other way or back."""
        turns = (direction is Direction.BACKWARD) != self.goes_down
        behind = block > self._at if self.goes_down else block < self._at
        return turns or behind

    def begin(self, direction: Direction) -> None:
        """Begin a pass."""
        self.direction, self._met = direction, False
        self._at = self._start

    def skipped(self, block: int) -> Iterator[int]:
        """Blocks between the last one and this one, which comes next."""
        if block != self._at:
            for between in self._until(block):
                self._meet()
                self._at = between
                if between != block:
                    yield between
        self._meet()

    def rest(self) -> Iterator[int]:
        """Blocks that are left of a pass which has begun."""
        if self._at != self._start:
            for block in self._until(0 if self.goes_down else self._num_blocks - 1):
                self._meet()
                self._at = block
                yield block

    @property
    def _start(self) -> int:
        return self._num_blocks if self.goes_down else -1

    def _meet(self) -> None:
        if not self._met:
            self._ranks.begin_pass(self.direction)
            self._met = True

    def _until(self, block: int) -> range:
        step = -1 if self.goes_down else 1
        return range(self._at + step, block + step, step)
