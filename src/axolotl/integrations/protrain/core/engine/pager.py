"""Bring a block's chunks into their slots before it computes, and look ahead.

One block's *window* is open at a time: from the first thing that needs its weights to
the moment the next block opens or its forward ends. Prefetch, miss, evaluation,
generation and recompute all go through `open` and `close`.

# Note [The end of a window in backward]

Nothing closes a block's window at the end of its backward: module backward hooks fire
before the gradients of leaves are accumulated, which still may read weights. Autograd
runs ready nodes in reverse order of creation, so once the output gradient of block b-1 is
ready (the hook on the nodes of its outputs opens its window), block b is done, and a
gradient of b that has not arrived never will. So the next opening closes the window, and
the gradients of b go then (`left`). After the first block's backward it stays open until
the update, the next forward or `close_any`.

# Note [The turn]

Nothing is ahead of the last block in training: the slots hold what backward begins with,
and after backward the first chunks are in their slots again. Without gradients the ring
wraps to the first chunk. What an update is about to change is not fetched ahead: its fetch
is held back, and asked for again when the forward of the block that looked ahead ends.

# Note [Fetches that all ranks make]

Where a fetch is a collective, all ranks have to make the same ones in the same order, and
nothing that depends on timing may decide about one: an update can hold back fetches
ahead, but not change their order. A rank that leaves out a block (an image tower without
images, a dropped layer) opens it all the same, in order. A pass goes up from the first
block or, in backward, down from the last; what is left of it is opened when the next pass
begins, and of one that goes down when backward ends, by a callback of the engine. A rank
that runs no block of a pass has none to open, so ranks meet where a pass begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import LayoutError
from ..layout import Direction, Schedule, padded_bytes, slot_bytes
from ..types import Chunk, Counters, Layout, Placement, Plan
from .device import POISON_BYTE, Device, Event, Stream
from .host_pool import HostPool
from .ranks import Ranks
from .slots import Slot, Transport
from .worker import HostWorker


class Pager:
    """Executes a `Schedule` on slots.

    Args:
        schedule: Order of the paged chunks.
        slots: The ring.
        sources: Host bytes of each paged chunk, by its number in the schedule.
        wait_update: Blocks until the pending host update of a chunk has landed.
        update_pending: True while a chunk must not be fetched ahead.
        opened: Called with a block whose window has opened, before others are fetched.
        before_backward: Called with a block that opens in backward, before anything
            else: what follows it is done.
        before_forward: Called first when a block opens in a forward.
        counters: Fetches and misses are counted here.

    Attributes:
        window: The block whose weights may be read now.
    """

    def __init__(
        self,
        schedule: Schedule,
        slots: Sequence[Slot],
        sources: Sequence[Tensor],
        wait_update: Callable[[int], None],
        update_pending: Callable[[int], bool],
        opened: Callable[[int, Direction], None] = lambda *_: None,
        before_backward: Callable[[int], None] = lambda _: None,
        before_forward: Callable[[], None] = lambda: None,
        counters: Counters | None = None,
    ) -> None:
        def with_slots(chunks: Iterable[int]) -> list[tuple[int, Slot]]:
            return [(chunk, slots[schedule.slot_of(chunk)]) for chunk in chunks]

        blocks = range(schedule.num_blocks)
        self._needed = [with_slots(schedule.needed(block)) for block in blocks]
        self._ahead = {
            direction: [with_slots(schedule.ahead(b, direction)) for b in blocks]
            for direction in Direction
        }
        self._slots = slots
        self._schedule = schedule
        self._sources = sources
        self._wait_update = wait_update
        self._update_pending = update_pending
        self._opened = opened
        self._before_backward = before_backward
        self._before_forward = before_forward
        self.window: int | None = None
        self._forward_runs = self._held_back = False
        self.counters = counters or Counters()

    def open(self, block: int, direction: Direction) -> None:
        """Make a block's weights readable; does nothing if they are.

        Raises:
            LayoutError: The forward of another block is still running.
        """
        if self.window == block:
            return
        backward = direction is Direction.BACKWARD
        if backward:
            self._before_backward(block)
        else:
            self._before_forward()
        if self.window is not None:
            if self._forward_runs and not backward:
                raise LayoutError(
                    f"block {block} is called inside block {self.window}: one of them "
                    "is not a repeated layer, so this model cannot be paged. Set "
                    "protrain_auto_memory: false."
                )
            # see Note [The end of a window in backward]
            self.close(self.window)
        for chunk, slot in self._needed[block]:
            if slot.holds != chunk:
                self.counters.num_misses += 1
                self._wait_update(chunk)
                self._fetch(chunk, slot)
        # once nothing can fail any more: a window is open whole or not at all
        for _chunk, slot in self._needed[block]:
            slot.begin_use()
        self.window = block
        self._forward_runs = not backward
        self._opened(block, direction)
        self._fetch_ahead(block, direction)

    def close(self, block: int, direction: Direction | None = None) -> None:
        """Mark the last use of a block's weights; does nothing if it is not open."""
        if self.window != block:
            return
        for _chunk, slot in self._needed[block]:
            slot.end_use()
        self.window = None
        if self._held_back and direction is not None:
            self._fetch_ahead(block, direction)

    def close_any(self) -> None:
        """Close whatever window is open: the backward pass has no closing hook."""
        if self.window is not None:
            self.close(self.window)

    def begin_micro_batch(self) -> None:
        """A forward begins, and a backward after it."""

    def pages(self, block: int) -> bool:
        """Whether weights of a block are in slots."""
        return bool(self._needed[block])

    def is_running(self) -> bool:
        """Whether a block's forward has begun and not ended."""
        return self.window is not None and self._forward_runs

    def forget(self, chunk: int) -> None:
        """The host copy of a chunk changed; a slot that holds it is stale."""
        slot = self._slots[self._schedule.slot_of(chunk)]
        if slot.holds == chunk:
            slot.holds = None

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
        slot.fetch(chunk, self._sources[chunk])
        self.counters.fetched_bytes += self._sources[chunk].nbytes
        self.counters.num_fetches += 1


class ShardedPager(Pager):
    """Opens every block of a pass in order; see Note [Fetches that all ranks make].

    `meet` is called once before the first one, on all ranks of the node.
    """

    def __init__(
        self, schedule: Schedule, *args: Any, meet: Callable[[], None], **kwargs: Any
    ) -> None:
        super().__init__(schedule, *args, **kwargs)
        self._direction, self._meet, self._met = Direction.FORWARD, meet, False
        # the block that was opened last in this pass
        self._at = -1

    def open(self, block: int, direction: Direction) -> None:
        if self.window == block:
            return
        turns = (direction is Direction.BACKWARD) != self._down
        again = block == self._at and not turns
        behind = block >= self._at if self._down else block <= self._at
        if turns or (behind and not again):
            self.complete()
            self._begin(direction)
        self._begin_together()
        if not again:
            self._pass(self._until(block)[:-1])
        super().open(block, self._direction)
        self._at = block

    def begin_micro_batch(self) -> None:
        self.complete()
        self._direction, self._at, self._met = Direction.FORWARD, -1, False

    def complete(self) -> None:
        """Open what is left of the pass."""
        if self._at != self._start:
            self._pass(self._until(0 if self._down else self._schedule.num_blocks - 1))
        self.close_any()

    def _pass(self, blocks: Iterable[int]) -> None:
        """Open what others may use and this rank does not."""
        for block in blocks:
            self._begin_together()
            super().open(block, self._direction)
            self.close_any()
            self._at = block

    @property
    def _down(self) -> bool:
        return self._direction is Direction.BACKWARD

    @property
    def _start(self) -> int:
        return self._schedule.num_blocks if self._down else -1

    def _begin(self, direction: Direction) -> None:
        self._direction = direction
        self._at, self._met = self._start, False
        if self._down:
            # called once all of backward has run
            torch.autograd.Variable._execution_engine.queue_callback(self.complete)

    def _begin_together(self) -> None:
        if not self._met:
            self._meet()
            self._met = True

    def _until(self, block: int) -> range:
        step = -1 if self._down else 1
        return range(self._at + step, block + step, step)


class Ring:
    """The slots of a plan, and what comes into them from where.

    Args:
        layout: All chunks.
        plan: Which of them are paged.
        arena: Holds the bytes of those on the host.
        device: Has the slots, once they are taken.
        ranks: Who trains; under a plan with shards each has one of every chunk.

    Attributes:
        numbers: Of the paged chunks in the schedule, by index.
        slots: Empty until `take`.
    """

    def __init__(
        self,
        layout: Layout,
        plan: Plan,
        pool: HostPool,
        device: Device,
        ranks: Ranks,
    ) -> None:
        self._layout, self._plan = layout, plan
        self._pool, self._device = pool, device
        self._sharing = ranks if plan.shards > 1 else None
        self._transport = Transport(device, self._sharing)
        self.numbers: dict[int, int] = {}
        self.slots: list[Slot] = []

    def take(self, plan: Plan) -> None:
        """Allocate the slots of a plan; those before it have been released."""
        self._plan = plan
        self.numbers = {index: n for n, index in enumerate(plan.paged)}
        sizes = slot_bytes(self._layout, plan.placements, plan.n_buffer, plan.shards)
        device = self._device
        self.slots = [
            Slot(device.allocate(nbytes), device, self._transport) for nbytes in sizes
        ]

    def slot_of(self, index: int) -> Slot | None:
        """Through which a chunk passes, if it is paged."""
        number = self.numbers.get(index)
        return self.slots[number % self._plan.n_buffer] if number is not None else None

    def buffer_of(self, chunk: Chunk) -> Tensor:
        """What a host-kept chunk's parameters become views of: its slot, or new memory;
        one element of poison where rows alone come."""
        if self._plan.placements[chunk.index] is Placement.HOST_LOOKUP:
            element = self._device.allocate(chunk.tensors[0].dtype.itemsize)
            self._device.compute.fill(element, POISON_BYTE)
            return element
        slot = self.slot_of(chunk.index)
        if slot is None:
            return self._device.allocate(padded_bytes(chunk, self._plan.shards))
        return slot.buffer

    def fetch(self, stream: Stream, buffer: Tensor, source: Tensor) -> Event:
        """Queue a chunk's bytes into a buffer that is no slot; see `Transport.fetch`."""
        # one of its own: the slots' keeps what it has seen, and this buffer may go
        return Transport(self._device, self._sharing).fetch(stream, buffer, source)

    def pager(self, worker: HostWorker, **around: Any) -> Pager:
        """A pager of these slots, with further arguments of `Pager`."""
        paged = self._plan.paged
        blocks = [
            [self.numbers[c] for c in block.chunks if c in self.numbers]
            for block in self._layout.blocks
        ]
        kind: Callable[..., Pager] = Pager
        if self._sharing is not None:
            kind = partial(ShardedPager, meet=self._sharing.begin_pass)
        return kind(
            Schedule(blocks, self._plan.n_buffer),
            self.slots,
            [self._pool.share(self._layout.chunks[index]) for index in self.numbers],
            wait_update=lambda number: worker.wait(paged[number]),
            update_pending=lambda number: worker.pending(paged[number]),
            **around,
        )
