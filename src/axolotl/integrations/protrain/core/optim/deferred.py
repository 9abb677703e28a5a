"""Updates of weights whose optimizer state is on the host, on the device.

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
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..runtime import Staging
from .chunk_update import ChunkUpdate, InMemory, OnDevice
from .noted_updates import NotedUpdates


class DeferredUpdates(NotedUpdates):
    """Makes steps where weights are used next; see Note [The deferred update].

    Args:
        staging: Through which gradients and states come.
    """

    def __init__(self, *args: Any, staging: Staging) -> None:
        super().__init__(*args)
        self._on_device = OnDevice(self._device, staging, self._shared)

    def note(self) -> None:
        self.fetch_ahead(0)

    def fetch_ahead(self, block: int) -> None:
        for own in self._all:
            at = own.host.chunk.block
            if own.noted is not None and at is not None and at >= block:
                if not self._on_device.fetch(own):
                    return

    def pending(self, chunk: int) -> bool:
        own = self._own.get(chunk)
        return own is not None and own.noted is not None

    def use(self, chunk: int, weights: Callable[[], InMemory]) -> None:
        if self.pending(chunk):
            self._make(self._own[chunk], weights())

    def finish(self) -> None:
        for own in self._all:
            self._on_device.send_home(own)

    def flush_chunk(self, chunk: int) -> None:
        if self.pending(chunk):
            own = self._own[chunk]
            with self._around.beside(own.host.chunk, own.left) as weights:
                self._make(own, weights)

    def flush(self) -> None:
        self.finish()
        for own in self._all:
            self.flush_chunk(own.host.chunk.index)
        self._on_device.settle()

    def _make(self, own: ChunkUpdate, weights: InMemory) -> None:
        self.show_states()
        self._on_device.make(own, weights)
