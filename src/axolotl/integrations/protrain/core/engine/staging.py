"""A ring of device memory through which operands of updates and sums come from the host.

# Note [Staging protocol]

A segment of the ring is filled ahead (`fetch`) or on demand, belongs to compute from `take`
to `give_back`, and is filled again only after what compute had queued until then, and after
the copies back to the host that the giver names. Segments are filled, used and given back
in about the same order, so the ring is short of room only while the oldest is in use: then
nothing is filled ahead, and a demand first drops what was filled ahead last, and then gets
memory of its own for a moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import LayoutError
from ..layout import aligned
from ..types import IN_FLIGHT, Counters
from .device import Device, Event


class Source(NamedTuple):
    """Host bytes to bring, which are there after a point of the offload stream."""

    memory: Tensor
    after: Event | None


class _Segment:
    """Bytes of the ring, or `memory` of its own, and what their next filling waits for."""

    key: Hashable = None

    def __init__(self, memory: Tensor, start: int = -1) -> None:
        self.memory, self.start, self.stop = memory, start, start + memory.numel()
        self.parts: list[Tensor] = []
        self.arrival: Event | None = None
        # until it is filled: an error in the middle leaves it so
        self.is_free, self.in_use = True, False
        self.busy: list[Event] = []


class Staging:
    """See Note [Staging protocol].

    Args:
        device: Whose memory and streams it uses.
        counters: Counts fetched bytes; who sends them back counts there too.

    Attributes:
        nbytes: Bytes of the ring, which has room for `IN_FLIGHT` of the largest demand,
            or more to fill it further ahead.
    """

    def __init__(self, device: Device, counters: Counters) -> None:
        self._device, self.counters, self.nbytes = device, counters, 0
        self._ring: Tensor | None = None
        # those in the ring in the order of their filling, and those with their own memory
        self._segments: deque[_Segment] = deque()
        self._apart: list[_Segment] = []
        self._held: dict[Hashable, _Segment] = {}
        # of segments that are gone: what the next filling waits for
        self._passed: list[Event] = []

    def reserve(self, nbytes: int) -> None:
        """Let the ring have so many bytes at least; nothing is in use."""
        if self._ring is None:
            self.nbytes = max(self.nbytes, nbytes)
        elif self.nbytes < nbytes:
            self._grow(nbytes)

    def fetch(self, key: Hashable, sources: Sequence[Source]) -> bool:
        """Fill a segment ahead, unless one holds this already; False if there is no room."""
        if key in self._held:
            return True
        segment = self._place(_size(sources))
        if segment is None:
            return False
        self._fill(segment, key, sources)
        return True

    def take(
        self, key: Hashable, sources: Sequence[Source], grows: bool = True
    ) -> list[Tensor]:
        """The bytes of each source, uint8, for compute to use.

        Unless the ring `grows`, a demand for which it is too small gets memory of its own,
        which goes when it is given back.
        """
        segment = self._held.get(key)
        if segment is None:
            nbytes = _size(sources)
            if grows:
                segment = self._make_room(nbytes)
            elif self._ring is not None and IN_FLIGHT * nbytes <= self.nbytes:
                segment = self._place(nbytes)
            if segment is None:
                segment = _Segment(self._allocate(nbytes))
                # an allocator hands out what compute may just have used
                segment.busy = [self._device.compute.record()]
                self._apart.append(segment)
            self._fill(segment, key, sources)
        assert segment.arrival is not None
        segment.in_use = True
        self._device.wait_stalled(segment.arrival)
        return segment.parts

    def give_back(self, key: Hashable, busy: Sequence[Event] = ()) -> Event | None:
        """Compute has queued its last use of what it took; copies still read it.

        What was only fetched ahead is forgotten.

        Returns:
            After the last read of the sources; None if there was none.
        """
        segment = self._held.get(key)
        if segment is None:
            return None
        self._let_go(key, busy)
        self.retire()
        return segment.arrival

    def retire(self) -> None:
        """Let go of memory that nobody copies any more; waits for nothing."""
        for segment in [*self._apart]:
            if segment.is_free and all(event.query() for event in segment.busy):
                self._apart.remove(segment)
                self._device.free(segment.memory)

    def close(self) -> None:
        """Release all memory; no copy may be in flight."""
        for segment in self._apart:
            self._device.free(segment.memory)
        if self._ring is not None:
            self._device.free(self._ring)
        self._ring, self._apart, self._passed, self.nbytes = None, [], [], 0
        self._segments.clear()
        self._held.clear()

    def _let_go(self, key: Hashable, busy: Sequence[Event] = ()) -> None:
        segment = self._held.pop(key)
        assert segment.arrival is not None
        segment.busy = [self._device.compute.record(), segment.arrival, *busy]
        segment.key, segment.parts = None, []
        segment.is_free, segment.in_use = True, False

    def _make_room(self, nbytes: int) -> _Segment | None:
        """A segment for a demand, in whose favour what was filled ahead is dropped."""
        segment = self._place(nbytes)
        while segment is None and self._segments and not self._segments[-1].in_use:
            dropped = self._segments.pop()
            # fillings of the ring follow each other: it is through before the next one
            self._passed += dropped.busy
            self._held.pop(dropped.key, None)
            segment = self._place(nbytes)
        return segment

    def _place(self, nbytes: int) -> _Segment | None:
        """Room of the ring behind the newest segment; None if the oldest is in the way."""
        if self._ring is None or IN_FLIGHT * nbytes > self.nbytes:
            if not self._grow(IN_FLIGHT * nbytes):
                return None
        assert self._ring is not None
        segments = self._segments
        start, half = segments[-1].stop if segments else 0, self.nbytes // IN_FLIGHT
        if IN_FLIGHT * nbytes > half:
            # or a smaller one before it would leave room for one of them, not for two
            start = -(-start // half) * half
        if start + nbytes > self.nbytes:
            start = 0
        stop = start + nbytes
        while any(own.start < stop and start < own.stop for own in segments):
            if not segments[0].is_free:
                return None
            self._passed += segments.popleft().busy
        segments.append(_Segment(self._ring[start:stop], start))
        return segments[-1]

    def _grow(self, nbytes: int) -> bool:
        """Take memory for the ring, or more of it; False while something is in use."""
        if any(segment.in_use for segment in self._segments):
            return False
        while self._segments:
            dropped = self._segments.pop()
            self._held.pop(dropped.key, None)
            for event in (*dropped.busy, *filter(None, [dropped.arrival])):
                event.synchronize()
            del dropped
        self._passed.clear()
        if self._ring is not None:
            self._device.free(self._ring)
        # none is referred to when the next one is allocated
        self._ring = None
        self.nbytes = max(self.nbytes, nbytes)
        self._ring = self._allocate(self.nbytes)
        self._passed = [self._device.compute.record()]
        return True

    # an evaluation in inference mode may be the first to need it, training the next
    @torch.inference_mode(False)
    def _allocate(self, nbytes: int) -> Tensor:
        return self._device.allocate(nbytes)

    def _fill(
        self, segment: _Segment, key: Hashable, sources: Sequence[Source]
    ) -> None:
        stream = self._device.fetch
        if segment.start >= 0:
            segment.busy, self._passed = self._passed, []
        for event in segment.busy:
            stream.wait(event)
        segment.busy, start = [], 0
        for source in sources:
            nbytes = source.memory.numel()
            segment.parts.append(segment.memory[start : start + nbytes])
            if source.after is not None:
                stream.wait(source.after)
            stream.copy(segment.parts[-1], source.memory)
            start += aligned(nbytes)
            self.counters.fetched_bytes += nbytes
        segment.arrival, segment.is_free, segment.key = stream.record(), False, key
        self._held[key] = segment


def _size(sources: Sequence[Source]) -> int:
    return sum(aligned(source.memory.numel()) for source in sources)


def views_of(
    memory: Tensor,
    places: Iterable[tuple[int, Sequence[int], Sequence[int] | None, torch.dtype]],
) -> list[Tensor]:
    """Tensors within bytes, several times as fast as by a slice and two views each.

    Args:
        memory: uint8.
        places: First byte, shape, stride, which is None in plain order, and dtype of each,
            in the order of their bytes.

    Raises:
        LayoutError: The bytes end before the last tensor does.
    """
    found, typed, end = [], dict[torch.dtype, Tensor](), 0
    for offset, shape, stride, dtype in places:
        own = typed.get(dtype)
        if own is None:
            whole = memory.numel() // dtype.itemsize * dtype.itemsize
            own = typed[dtype] = memory[:whole].view(dtype)
        first = own.storage_offset() + offset // dtype.itemsize
        found.append(own.as_strided(shape, stride or _contiguous(*shape), first))
        end = offset
    if found and end + found[-1].nbytes > memory.numel():
        # `as_strided` asks the whole allocation only, in which other bytes follow
        raise LayoutError(f"{memory.numel()} bytes for tensors that end later")
    return found


@lru_cache(maxsize=1024)
def _contiguous(*shape: int) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
