"""Updates of weights whose optimizer state is on the host, as soon as they are noted.

# Note [Updates beside the next forward]

Where ranks share the weights on the host, each updates its span of every chunk, on its
device, and where the plan says so updates happen on the host. Both are queued when the
step is made, chunk by chunk in the order in which the next forward needs them. A slot that
holds the chunk is stale from then on. Who reads the weights next waits for the update of
that very chunk and of no other: a fetch of the pager, or, for weights that stay on the
device, `Session.ready` when a module above the blocks is entered. An update has landed when
all ranks of the node have made theirs: each then enters a barrier, asynchronously, on the
host thread, and a fetch waits for that one too. It cannot be deferred: who reads a weight
would need the other ranks.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

from ..runtime import HostWorker, Staging
from ..runtime.device import Event
from .chunk_update import ChunkUpdate, OnDevice, OnHost
from .noted_updates import NotedUpdates


class QueuedUpdates(NotedUpdates):
    """Makes steps at once; see Note [Updates beside the next forward].

    Args:
        staging: Through which gradients, states and weights come to the device.
        worker: Waits for the other ranks, and makes updates on the host.
    """

    def __init__(self, *args: Any, staging: Staging, worker: HostWorker) -> None:
        super().__init__(*args)
        self._worker = worker
        self._with_device = OnDevice(self._device, staging, self._shared)
        self._with_host = OnHost(self._device, self._shared)

    def note(self) -> None:
        waiting = [own for own in self._all if own.noted is not None]
        ahead = deque(
            own
            for own in waiting
            if own.changes(own.noted) and self._around.stays(own.host) is None
        )
        for own in waiting:
            while (
                ahead and not self._on_host and self._with_device.fetch(ahead[0], True)
            ):
                ahead.popleft()
            self._queue(own)

    def pending(self, chunk: int) -> bool:
        return self._worker.pending(chunk) or self._around.stale(chunk)

    def finish(self) -> None:
        for own in self._all:
            self._with_device.send_home(own)

    def flush_chunk(self, chunk: int) -> None:
        self._worker.wait(chunk)

    def flush(self) -> None:
        for own in self._all:
            if own.noted is not None:
                # what an interrupt has left, unless the host makes it now
                self._worker.wait(own.host.chunk.index)
                if own.noted is not None:
                    self._queue(own)
        self._worker.drain()
        self._with_device.settle()

    def _queue(self, own: ChunkUpdate) -> None:
        self.show_states()
        self._around.rewrites(own.host)
        index, fetches = own.host.chunk.index, self._device.fetch.record()
        if self._on_host:
            land = partial(self._with_host.make, own, fetches)
        else:
            self._worker.wait(index)
            if own.changes(own.noted):
                self._with_device.make(own, self._around.stays(own.host))
            own.noted = None
            land = partial(_wait, own.left)
        self._worker.submit(partial(self._land, land), changes=index)

    def _land(self, land: Any) -> Any:
        land()
        return self._ranks.updated()


def _wait(event: Event | None) -> None:
    if event is not None:
        event.synchronize()
