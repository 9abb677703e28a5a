"""Updates of weights whose optimizer state is on the host, until they are made.

# Note [The deferred update]

`step` updates what has its state on the device; for every other chunk it only notes what
it would have done (Note [The ghost] in noted.py). The chunk is then *pending*: before its
weights are used next, gradient and state come beside them, the noted step is made, and
weights and state go back. Who reads the host's copy meanwhile has it made first (`flush`).
There is room for one gradient a chunk, so the next step makes what is pending first, and
refuses a gradient that has come meanwhile.

Every number is that of the run without paging: the same kernels with the same arguments on
the same device, one chunk later. Gradients, sums and norms never pass through another
processor.

# Note [Updates beside the next forward]

Where ranks share the weights on the host, each updates its span of every chunk, on its
device, and where the plan says so updates happen on the host. Both are queued when the
step is made, chunk by chunk in the order in which the next forward needs them. A slot that holds the chunk is stale from then on. Who reads the weights next
waits for the update of that very chunk and of no other: a fetch of the pager, or, for
weights that stay on the device, `Session.ready` when a module above the blocks is entered.
An update has landed when all ranks of the node have made theirs: each then enters a
barrier, asynchronously, on the host thread, and a fetch waits for that one too. It cannot
be deferred: who reads a weight would need the other ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from .apply import ChunkUpdate, OnDevice, OnHost
from .device import Event
from .host_chunks import HostChunk
from .host_tensors import HostMemory
from .recorded_step import non_tensor_state, states_of
from .slots import InBuffer
from .staging import Staging
from .worker import HostWorker


class Surroundings(NamedTuple):
    """What the owner of the weights does around updates.

    Attributes:
        in_use: The weights of a chunk that is about to be used.
        stays: Those that this rank updates of a chunk which is on the device, there.
        rewrites: The host's copy of some weights is about to be written.
        stale: Whether the device's copy of a chunk that stays there is older than it.
        hide: Nobody looks at gradients or uses weights from here on.
        show_again: A step is over: whoever looked may go on.
    """

    in_use: Callable[[HostChunk], InBuffer]
    stays: Callable[[HostChunk], InBuffer | None]
    rewrites: Callable[[HostChunk], None]
    stale: Callable[[int], bool]
    hide: Callable[[], None]
    show_again: Callable[[], None]


class PendingUpdates:
    """Makes noted steps where weights are used next, or queues them at once.

    Args:
        memory: Of the chunks, of which each rank of the node updates a span.
        staging: Through which gradients, states and weights come to the device.
        worker: Waits for the other ranks, and makes updates on the host.
        around: What the owner of the weights does.
        on_host: Steps are made on the host.

    Attributes:
        plain: The optimizer that the run would have used without paging.
    """

    plain: torch.optim.Optimizer

    def __init__(
        self,
        memory: HostMemory,
        staging: Staging,
        worker: HostWorker,
        around: Surroundings,
        on_host: bool,
    ) -> None:
        self._device, self._worker, self._around = memory.device, worker, around
        self._ranks, self._on_host = memory.ranks, on_host
        self._defers = not on_host and self._ranks.world.size == 1
        self._with_device = OnDevice(self._device, staging, weights=not self._defers)
        self._with_host = OnHost(self._device)
        self._all: list[ChunkUpdate] = []
        self._own: dict[int, ChunkUpdate] = {}
        self._hidden: dict[Any, Any] = {}
        # what the last step has noted of blocks, in the order of their use
        self._in_blocks: list[ChunkUpdate] = []

    @property
    def _states(self) -> dict[Any, Any]:
        return states_of(self.plain)

    def _note(self) -> None:
        """A step has been noted."""
        if self._defers:
            self._in_blocks = [
                own for own in self._all if own.recorded and _block(own) >= 0
            ]
            self.fetch_ahead(0)
            return
        waiting = [own for own in self._all if own.recorded is not None]
        # what lies outside of blocks is larger than a buffer, and gets memory of its own
        ahead = deque(
            own
            for own in waiting
            if own.host.chunk.block is not None
            and own.changes(own.recorded)
            and self._around.stays(own.host) is None
        )
        for own in waiting:
            while ahead and not self._on_host and self._with_device.fetch(ahead[0]):
                ahead.popleft()
            self._queue(own)

    def fetch_ahead(self, block: int) -> None:
        """Bring what the next updates read, from a block on, as far as there is room."""
        every = self._in_blocks
        # a search: blocks that nobody has used since would be looked at by each later one
        at = bisect_left(every, block, key=_block)
        while at < len(every):
            if every[at].recorded is None:
                del every[at]
            elif self._with_device.fetch(every[at]):
                at += 1
            else:
                return

    def pending(self, chunk: int) -> bool:
        """Whether the last step of a chunk has not yet reached who uses it."""
        if self._defers and self._own[chunk].recorded is not None:
            return True
        return self._worker.pending(chunk) or self._around.stale(chunk)

    def use(self, chunk: int) -> None:
        """A chunk is about to be used: make its noted step."""
        own = self._own.get(chunk)
        if self._defers and own is not None and own.recorded is not None:
            self.show_states()
            self._with_device.make(own, self._around.in_use(own.host))

    def finish(self) -> None:
        """Send home what an interrupt has kept from it, before slots are filled."""
        self._with_device.finish()

    def flush_chunk(self, chunk: int) -> None:
        """Have the last step of a chunk made, and wait for it where it is queued."""
        # what is noted then no other thread will make
        self._worker.wait(chunk)
        own = self._own[chunk]
        if own.recorded is None:
            return
        if not self._defers:
            self._queue(own)
            self._worker.wait(chunk)
            return
        self.show_states()
        weights = self._around.stays(own.host)
        if weights is None:
            self._around.rewrites(own.host)
        self._with_device.make(own, weights)

    def land(self, chunk: int) -> None:
        """The same, and return once its weights are at home."""
        if chunk in self._own:
            self.flush_chunk(chunk)
            _wait(self._own[chunk].left)

    def flush(self) -> None:
        """Return once nothing is pending: the host's copy is the truth."""
        self.finish()
        for own in self._all:
            self.flush_chunk(own.host.chunk.index)
        self._with_device.settle()

    def _queue(self, own: ChunkUpdate) -> None:
        self.show_states()
        self._around.rewrites(own.host)
        index, fetches = own.host.chunk.index, self._device.fetch.record()
        if self._on_host:
            land = partial(self._with_host.make, own, fetches, self._device.clock)
        else:
            self._worker.wait(index)
            if own.changes(own.recorded):
                self._with_device.make(own, self._around.stays(own.host))
            own.recorded = None
            land = partial(_wait, own.left)
        self._worker.submit(partial(self._land, land), changes=index)

    def _land(self, land: Callable[[], None]) -> Any:
        land()
        return self._ranks.updated()

    def _hide_states(self, params: Sequence[nn.Parameter]) -> None:
        for param in params:
            if param in self._states:
                self._hidden[param] = state = self._states[param]
                self._states[param] = non_tensor_state(state)

    def show_states(self) -> None:
        """A step that was being noted no longer hides what it is not to change."""
        if self._hidden:
            self._states.update(self._hidden)
            # not before: an interrupt in between would lose them
            self._hidden = {}


def _block(own: ChunkUpdate) -> int:
    block = own.host.chunk.block
    return -1 if block is None else block


def _wait(event: Event | None) -> None:
    if event is not None:
        event.synchronize()
