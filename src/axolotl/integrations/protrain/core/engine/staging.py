"""Device buffers through which what an update or a sum reads comes from the host.

# Note [Staging protocol]

A buffer is filled ahead (`fetch`) or on demand, belongs to compute from `take` to
`give_back`, and is filled again only after what compute had queued until then, and after
the copies back to the host that the giver names. At most `IN_FLIGHT` of them are kept;
whoever needs one more, or a larger one for a moment, gets memory of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from torch import Tensor

from ..layout import aligned
from ..types import IN_FLIGHT, Counters
from .device import Device, Event


class Source(NamedTuple):
    """Host bytes to bring, which are there after a point of the offload stream."""

    memory: Tensor
    after: Event | None


class _Buffer:
    """One of them: what it holds, since when, and what its next filling waits for."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.parts: list[Tensor] = []
        self.holds: Hashable = None
        self.arrival: Event | None = None
        self.in_use = False
        self.busy: list[Event] = []


class Staging:
    """See Note [Staging protocol].

    Args:
        device: Whose memory and streams it uses.
        counters: Counts fetched bytes; who sends them back counts there too.

    Attributes:
        nbytes: Of one buffer; a request for more makes buffers larger.
    """

    def __init__(self, device: Device, counters: Counters) -> None:
        self._device, self.counters = device, counters
        self._kept: list[_Buffer] = []
        self._leaving: deque[_Buffer] = deque()
        self.nbytes = 0

    def fetch(self, key: Hashable, sources: Sequence[Source]) -> bool:
        """Fill a buffer ahead, unless one holds this already; False if none is free."""
        if self._holder(key) is not None:
            return True
        held = [buffer for buffer in self._kept if buffer.holds is not None]
        if len(held) == IN_FLIGHT:
            return False
        self._fill(self._free(_size(sources)), key, sources)
        return True

    def take(
        self, key: Hashable, sources: Sequence[Source], keep: bool = True
    ) -> list[Tensor]:
        """The bytes of each source, uint8, for compute to use.

        Without `keep` the memory goes when it is given back.
        """
        buffer = self._holder(key)
        if buffer is None:
            nbytes = _size(sources)
            buffer = self._free(nbytes) if keep else self._new(nbytes)
            if buffer not in self._kept:
                buffer.in_use = True
                self._leaving.append(buffer)
            self._fill(buffer, key, sources)
        assert buffer.arrival is not None
        buffer.in_use = True
        self._device.wait_stalled(buffer.arrival)
        return buffer.parts

    def give_back(self, key: Hashable, busy: Sequence[Event] = ()) -> Event | None:
        """Compute has queued its last use of what it took; copies still read it.

        What was only fetched ahead is forgotten.

        Returns:
            After the last read of the sources; None if there was none.
        """
        buffer = self._holder(key)
        if buffer is None:
            return None
        self._let_go(buffer, busy)
        self.retire()
        return buffer.arrival

    def forget(self) -> None:
        """What was fetched ahead, or taken, is not wanted."""
        for buffer in (*self._kept, *self._leaving):
            if buffer.holds is not None:
                self._let_go(buffer)

    def retire(self) -> None:
        """Let go of memory that nobody copies any more; waits for nothing."""
        for buffer in [*self._leaving]:
            if not buffer.in_use and all(event.query() for event in buffer.busy):
                self._leaving.remove(buffer)
                self._device.free(buffer.memory)

    def close(self) -> None:
        """Release all memory; no copy may be in flight."""
        for buffer in (*self._kept, *self._leaving):
            self._device.free(buffer.memory)
        self._kept, self._leaving, self.nbytes = [], deque(), 0

    def _let_go(self, buffer: _Buffer, busy: Sequence[Event] = ()) -> None:
        assert buffer.arrival is not None
        buffer.busy = [self._device.compute.record(), buffer.arrival, *busy]
        buffer.holds, buffer.in_use = None, False

    def _holder(self, key: Hashable) -> _Buffer | None:
        every = (*self._kept, *self._leaving)
        return next((buffer for buffer in every if buffer.holds == key), None)

    def _free(self, nbytes: int) -> _Buffer:
        """A kept buffer that nobody uses; what it was filled with ahead is dropped."""
        self.nbytes = max(self.nbytes, nbytes)
        idle = [buffer for buffer in self._kept if not buffer.in_use]
        # none is referred to when the next one is allocated
        while small := next((b for b in idle if b.memory.numel() < self.nbytes), None):
            for event in (*small.busy, *filter(None, [small.arrival])):
                event.synchronize()
            idle.remove(small)
            self._kept.remove(small)
            self._device.free(small.memory)
        if len(self._kept) < IN_FLIGHT:
            self._kept.append(self._new(self.nbytes))
            return self._kept[-1]
        if not idle:
            return self._new(nbytes)
        # an empty one, or that which was filled first
        chosen = min(idle, key=lambda buffer: buffer.holds is not None)
        self._kept.remove(chosen)
        self._kept.append(chosen)
        if chosen.holds is not None and chosen.arrival is not None:
            chosen.busy.append(chosen.arrival)
        return chosen

    def _new(self, nbytes: int) -> _Buffer:
        buffer = _Buffer(self._device.allocate(nbytes))
        # an allocator hands out what compute may just have used
        buffer.busy = [self._device.compute.record()]
        return buffer

    def _fill(self, buffer: _Buffer, key: Hashable, sources: Sequence[Source]) -> None:
        stream = self._device.fetch
        for event in buffer.busy:
            stream.wait(event)
        # an error in the middle leaves it empty
        buffer.holds, buffer.parts, start = None, [], 0
        for source in sources:
            nbytes = source.memory.numel()
            buffer.parts.append(buffer.memory[start : start + nbytes])
            if source.after is not None:
                stream.wait(source.after)
            stream.copy(buffer.parts[-1], source.memory)
            start += aligned(nbytes)
            self.counters.fetched_bytes += nbytes
        buffer.arrival, buffer.busy = stream.record(), []
        buffer.holds = key


def _size(sources: Sequence[Source]) -> int:
    return sum(aligned(source.memory.numel()) for source in sources)
