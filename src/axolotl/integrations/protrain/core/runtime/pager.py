"""Bring a block's chunks into their slots before it computes, and look ahead.

One block's *window* is open at a time: from the first thing that needs its weights to
the moment the next block opens or its forward ends. Prefetch, miss, evaluation,
generation and recompute all go through `open` and `close`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ..errors import LayoutError
from ..layout import Direction, Schedule
from .slots import Slot


class Pager:
    """Executes a `Schedule` on slots.

    Args:
        schedule: Order of the paged chunks.
        slots: The ring.
        sources: Host bytes of each paged chunk, by its number in the schedule.
        wait_update: Blocks until the pending host update of a chunk has landed.
        update_pending: True while a chunk must not be fetched ahead.
        before_ahead: Called with a block that opens in backward, once its own chunks
            are on their way and before others are.
        before_backward: Called with a block that opens in backward before anything
            else: what follows it in forward is done.
    """

    def __init__(
        self,
        schedule: Schedule,
        slots: Sequence[Slot],
        sources: Sequence[Tensor],
        wait_update: Callable[[int], None],
        update_pending: Callable[[int], bool],
        before_ahead: Callable[[int], None] | None = None,
        before_backward: Callable[[int], None] | None = None,
    ) -> None:
        self._needed = [
            [
                (chunk, slots[schedule.slot_of(chunk)])
                for chunk in schedule.needed(block)
            ]
            for block in range(schedule.num_blocks)
        ]
        self._ahead = {
            direction: [
                [
                    (chunk, slots[schedule.slot_of(chunk)])
                    for chunk in schedule.ahead(block, direction)
                ]
                for block in range(schedule.num_blocks)
            ]
            for direction in Direction
        }
        self._slots = slots
        self._slot_of = schedule.slot_of
        self._sources = sources
        self._wait_update = wait_update
        self._update_pending = update_pending
        self._before_ahead = before_ahead
        self._before_backward = before_backward
        self._window: int | None = None
        self._forward_runs = False
        self._held_back = False
        self.fetched_bytes = 0
        self.num_fetches = 0
        self.num_misses = 0

    @property
    def window(self) -> int | None:
        """The block whose weights may be read now."""
        return self._window

    def open(self, block: int, direction: Direction) -> None:
        """Make a block's weights readable; does nothing if they are.

        Raises:
            LayoutError: The forward of another block is still running.
        """
        if self._window == block:
            return
        if self._before_backward is not None and direction is Direction.BACKWARD:
            self._before_backward(block)
        if self._window is not None:
            if self._forward_runs and direction is not Direction.BACKWARD:
                raise LayoutError(
                    f"block {block} is called inside block {self._window}: one of them "
                    "is not a repeated layer, so this model cannot be paged. Set "
                    "protrain_auto_memory: false."
                )
            self.close(self._window)
        for chunk, slot in self._needed[block]:
            if slot.holds != chunk:
                self.num_misses += 1
                self._wait_update(chunk)
                self._fetch(chunk, slot)
        # once nothing can fail any more: a window is open whole or not at all
        for _chunk, slot in self._needed[block]:
            slot.begin_use()
        self._window = block
        self._forward_runs = direction is not Direction.BACKWARD
        if self._before_ahead is not None and direction is Direction.BACKWARD:
            self._before_ahead(block)
        self._fetch_ahead(block, direction)

    def close(self, block: int, direction: Direction | None = None) -> None:
        """Mark the last use of a block's weights; does nothing if it is not open."""
        if self._window != block:
            return
        for _chunk, slot in self._needed[block]:
            slot.end_use()
        self._window = None
        if self._held_back and direction is not None:
            self._fetch_ahead(block, direction)

    def close_any(self) -> None:
        """Close whatever window is open: the backward pass has no closing hook."""
        if self._window is not None:
            self.close(self._window)

    def forget(self, chunk: int) -> None:
        """The host copy of a chunk changed; a slot that holds it is stale."""
        slot = self._slots[self._slot_of(chunk)]
        if slot.holds == chunk:
            slot.forget()

    def forget_all(self) -> None:
        """Something wrote through the parameters into the slots."""
        self.close_any()
        for slot in self._slots:
            slot.overwritten()

    def _fetch_ahead(self, block: int, direction: Direction) -> None:
        self._held_back = False
        for chunk, slot in self._ahead[direction][block]:
            if slot.holds == chunk:
                continue
            if self._update_pending(chunk):
                # waiting here would keep the block itself from being queued
                self._held_back = True
                return
            self._fetch(chunk, slot)

    def _fetch(self, chunk: int, slot: Slot) -> None:
        source = self._sources[chunk]
        slot.fetch(chunk, source)
        self.fetched_bytes += source.nbytes
        self.num_fetches += 1
