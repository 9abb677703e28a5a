"""Frozen chunks on a disk, read ahead into a ring of page-locked host buffers.

# Note [Chunks on a disk]

A frozen weight is only ever read, so its bytes may stay in a file: the base's own, where
they lie there as the slot needs them, or one that is written for them. On its way into a slot
such a chunk passes through a buffer of page-locked memory. One thread fills the buffers in
the order in which blocks will ask for them, each by several direct reads; the calling
thread waits for a read only where a block needs the chunk now, and a prefetch leaves out
what is not there. A buffer is read into again once the copy out of it has ended.

What the buffers hold stays valid, as nobody changes it, so a ring that has room for all
of its chunks reads each only once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from ..layout import aligned
from ..layout.shards import PAGE_BYTES
from ..types import Counters
from .chunk_files import NUM_READERS, BaseFiles, ChunkFile
from .device import Device, Event
from .host_pool import host_buffer
from .worker import HostTask


@dataclass(eq=False)
class _Buffer:
    """A place of the ring; `left` is the end of the copy to the device, once queued."""

    memory: Tensor
    chunk: int | None = None
    task: HostTask[None] | None = None
    left: Event | None = None


@dataclass(frozen=True)
class Extent:
    """The bytes of a chunk's file that this rank reads, from a page on."""

    file: ChunkFile | BaseFiles
    start: int
    nbytes: int


class Disk:
    """Reads chunks ahead; see Note [Chunks on a disk].

    Args:
        device: Copies from the buffers, which are page-locked for it.
        extents: What this rank reads of each chunk.
        num_buffers: Of the ring.
        counters: Bytes and waits are counted here.
    """

    def __init__(
        self,
        device: Device,
        extents: Mapping[int, Extent],
        num_buffers: int,
        counters: Counters,
    ) -> None:
        self._device, self._extents, self._counters = device, extents, counters
        nbytes = max(aligned(e.nbytes, PAGE_BYTES) for e in extents.values())
        num = min(num_buffers, len(extents))
        self._buffers = [_Buffer(host_buffer(nbytes)) for _ in range(num)]
        for buffer in self._buffers:
            device.pin(buffer.memory)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="protrain-disk")
        self._readers = ThreadPoolExecutor(NUM_READERS, "protrain-read")

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._extents

    def is_ready(self, chunk: int) -> bool:
        """Return whether `take` would not wait."""
        buffer = self._holding(chunk)
        return buffer is not None and buffer.task is not None and buffer.task.done

    def read_ahead(self, chunks: Sequence[int]) -> None:
        """Queue reads of the chunks that are needed next, as far as there are buffers."""
        wanted = chunks[: len(self._buffers)]
        for chunk in wanted:
            if self._holding(chunk) is None:
                self._read(chunk, self._free(wanted))

    def take(self, chunk: int) -> Tensor:
        """Wait for the bytes of a chunk, uint8; `leaves` has to follow.

        Raises:
            DiskError: They could not be read.
        """
        buffer = self._holding(chunk)
        if buffer is None:
            buffer = self._free(())
            self._read(chunk, buffer)
        assert buffer.task is not None
        start = time.perf_counter()
        buffer.task.result()
        self._counters.disk_wait_s += time.perf_counter() - start
        return buffer.memory[: self._extents[chunk].nbytes]

    def leaves(self, chunk: int, event: Event) -> None:
        """Note that the copy of a chunk to the device ends at `event`."""
        buffer = self._holding(chunk)
        assert buffer is not None
        buffer.left = event

    def close(self) -> None:
        """End the threads and let go of the buffers, out of which no copy is on its way."""
        self._thread.shutdown()
        self._readers.shutdown()
        for buffer in self._buffers:
            if buffer.task is not None:
                buffer.task.wait()
            self._device.unpin(buffer.memory)
        self._buffers.clear()

    def _holding(self, chunk: int) -> _Buffer | None:
        return next((b for b in self._buffers if b.chunk == chunk), None)

    def _free(self, wanted: Iterable[int]) -> _Buffer:
        """The buffer whose content is needed least: none, or what has left longest ago."""
        free = [b for b in self._buffers if b.chunk is None or b.chunk not in wanted]
        unused = [b for b in free if b.chunk is None or b.left is not None]
        chosen = (unused or free)[0]
        # the last to be chosen again
        self._buffers.remove(chosen)
        self._buffers.append(chosen)
        return chosen

    def _read(self, chunk: int, buffer: _Buffer) -> None:
        extent, left = self._extents[chunk], buffer.left
        room = buffer.memory[: aligned(extent.nbytes, PAGE_BYTES)]

        def read() -> None:
            if left is not None:
                left.synchronize()
            self._device.writes([room])
            extent.file.read(room, extent.start, self._readers)

        self._counters.disk_bytes += extent.nbytes
        buffer.chunk, buffer.left = chunk, None
        buffer.task = HostTask(self._thread, self._device, read)
