"""A pager whose fetches are the same, in the same order, on all ranks.

Where a fetch is a collective, a rank that does not use a block (an image tower without
images, a dropped layer) has to fetch its chunks all the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..layout import Direction, Schedule
from .pager import Pager


class Lockstep(Pager):
    """Opens every block of a pass in order, those that nobody uses too.

    A pass goes up from the first block or, in backward, down from the last. It is
    completed when the next one begins; one that goes down when backward ends.
    """

    def __init__(self, schedule: Schedule, *args: Any, **kwargs: Any) -> None:
        super().__init__(schedule, *args, **kwargs)
        self._num_blocks = schedule.num_blocks
        self._direction = Direction.FORWARD
        # the block that was opened last in this pass
        self._at = -1

    def open(self, block: int, direction: Direction) -> None:
        if self.window == block:
            return
        turns = (direction is Direction.BACKWARD) != self._down
        again = block == self._at and not turns
        if turns or (self._is_behind(block) and not again):
            self.complete()
            self._begin(direction)
        if not again:
            self._pass(self._until(block)[:-1])
        super().open(block, self._direction)
        self._at = block

    def complete(self) -> None:
        """Open what is left of the pass."""
        if self._at != self._start:
            self._pass(self._until(0 if self._down else self._num_blocks - 1))
        self.close_any()

    def _pass(self, blocks: Iterable[int]) -> None:
        """Open what others may use and this rank does not."""
        for block in blocks:
            super().open(block, self._direction)
            self.close_any()
            self._at = block

    @property
    def _down(self) -> bool:
        return self._direction is Direction.BACKWARD

    @property
    def _start(self) -> int:
        return self._num_blocks if self._down else -1

    def _begin(self, direction: Direction) -> None:
        self._direction = direction
        self._at = self._start
        if self._down:
            # called once all of backward has run
            torch.autograd.Variable._execution_engine.queue_callback(self.complete)

    def _is_behind(self, block: int) -> bool:
        return block >= self._at if self._down else block <= self._at

    def _until(self, block: int) -> range:
        if self._down:
            return range(self._at - 1, block - 1, -1)
        return range(self._at + 1, block + 1)
