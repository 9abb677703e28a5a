"""Exact-size host memory in which the truth of paged parameters lives.

The ranks of a node map it together.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch
from torch import Tensor

from ..errors import ConfigError
from ..layout import aligned, padded_bytes, shard_bytes
from ..layout.packed import Packed, stored_specs
from ..layout.shards import PAGE_BYTES
from ..types import Chunk, TensorSpec
from .device import Device
from .ranks import Alone, Ranks

_COPIERS = 4


class HostPool:
    """Anonymous mappings of exactly the bytes asked for.

    Pages are committed when they are first written, so filling it chunk by chunk
    while the original tensors are freed never holds two copies. Tensors handed out
    have storages of their own: to `safetensors` and `torch.save` they look like
    independent tensors, and a mapping lives as long as any of them.

    Args:
        ranks: Whose node shares the memory; every rank then makes the same calls. None
            for a process alone.
        shards: Each chunk has room for so many equal ones.
    """

    def __init__(
        self,
        ranks: Ranks | None = None,
        shards: int = 1,
    ) -> None:
        self._ranks = ranks or Alone()
        self._shards = shards
        self._in_files = self._ranks.world.local_size > 1
        self._places: dict[int, tuple[mmap.mmap, int, int]] = {}
        # of chunks that are packed here: their tensors, by name
        self._stored: dict[int, dict[str, TensorSpec]] = {}
        self._shares: dict[int, Tensor] = {}
        self._files: dict[mmap.mmap, int] = {}
        self.nbytes = 0

    def __contains__(self, index: int) -> bool:
        return index in self._places

    def add(self, chunks: Sequence[Chunk]) -> Tensor | None:
        """Hold further chunks, each from a page of its own, so that it can be page-locked
        alone; what is there stays where it is.

        Returns:
            Their mapping as one uint8 tensor, None when it is empty.
        """
        self._stored |= {
            chunk.index: {spec.name: spec for spec in chunk.stored.tensors}
            for chunk in chunks
            if chunk.stored is not None
        }
        chunks = [chunk.in_pool for chunk in chunks]
        sizes = [aligned(padded_bytes(c, self._shards), PAGE_BYTES) for c in chunks]
        nbytes = sum(sizes)
        if not nbytes:
            return None
        if not self._in_files:
            memory = _map_private(nbytes)
        else:
            memory, self._files[memory] = map_shared(nbytes, self._ranks)
            weakref.finalize(self, os.close, self._files[memory])
        start = 0
        for chunk, size in zip(chunks, sizes, strict=True):
            self._places[chunk.index] = (memory, start, chunk.nbytes)
            start += size
        self.nbytes += nbytes
        return torch.frombuffer(memory, dtype=torch.uint8)

    def chunk(self, index: int) -> Tensor:
        """All bytes of a chunk, uint8 of shape [chunk.nbytes]."""
        memory, start, nbytes = self._places[index]
        return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=start)

    def share(self, chunk: Chunk) -> Tensor:
        """Return the bytes that this rank fetches of a chunk, uint8: all, or its shard."""
        if chunk.index not in self._shares:
            memory, start, _ = self._places[chunk.index]
            size = shard_bytes(chunk.in_pool, self._shards)
            if self._shards > 1:
                start += self._ranks.local_rank * size
            share = torch.frombuffer(
                memory, dtype=torch.uint8, count=size, offset=start
            )
            # kept: it has to live while somebody copies
            self._shares[chunk.index] = share
        return self._shares[chunk.index]

    def tensor(self, index: int, spec: TensorSpec) -> Tensor:
        """One parameter of a chunk with its shape and dtype, on its own storage."""
        if spec.form is not None:
            codes, scales = (self.tensor(index, part) for part in stored_specs(spec))
            return Packed(spec.form, spec.shape, spec.dtype, [(codes, scales)])
        spec = self._stored.get(index, {}).get(spec.name, spec)
        memory, start, _ = self._places[index]
        flat = torch.frombuffer(
            memory, dtype=spec.dtype, count=spec.numel, offset=start + spec.offset
        )
        return flat.view(spec.shape)

    def copy_on_write(self) -> HostPool:
        """Map these bytes again, as far as this rank does not write others over them; itself
        where that makes no difference."""
        if not self._files:
            return self
        own = HostPool(ranks=self._ranks, shards=self._shards)
        maps = {
            memory: mmap.mmap(file, len(memory), flags=mmap.MAP_PRIVATE)
            for memory, file in self._files.items()
        }
        own._stored = self._stored
        own._places = {
            index: (maps[memory], start, nbytes)
            for index, (memory, start, nbytes) in self._places.items()
        }
        return own

    def forget_pages(self) -> None:
        """Take no part in shared pages until they are touched again."""
        # a set: the chunks of one call share a mapping
        for memory in {memory for memory, *_ in self._places.values()}:
            memory.madvise(mmap.MADV_DONTNEED)


class StateMemory:
    """Gives regions, uint8, for optimizer state.

    Several ranks each have the state of the weights that they update, and one of them
    writes checkpoints. So their regions lie in files without a name (`memfd_create`), which
    the writer maps by the process and the descriptor of the owner.

    Args:
        locks: Copies of the device reach them.
        shares: Other ranks read them.
    """

    def __init__(self, device: Device, locks: bool, shares: bool) -> None:
        self._device, self._locks, self._shares = device, locks, shares
        # descriptor and length of each region, by its address
        self._files: dict[int, tuple[int, int]] = {}

    def take(self, nbytes: int) -> Tensor:
        """A region of that many bytes."""
        if self._shares:
            memory, descriptor = map_shared(nbytes, Alone())
            region = torch.frombuffer(memory, dtype=torch.uint8)
            self._files[region.data_ptr()] = descriptor, nbytes
        else:
            region = host_buffer(nbytes)
        if self._locks:
            self._device.pin(region)
        return region

    def settle(self) -> None:
        """Return once no copy to a region is on its way."""
        self._device.synchronize()

    def release(self, region: Tensor) -> None:
        """Unlock a region that is not needed any longer; a reader keeps its memory."""
        if self._locks:
            self._device.unpin(region)
        descriptor, _ = self._files.pop(region.data_ptr(), (None, 0))
        if descriptor is not None:
            os.close(descriptor)

    def file_of(self, address: int) -> tuple[int, int, int] | None:
        """Descriptor and length of the file in which an address lies, and where."""
        for start, (descriptor, nbytes) in self._files.items():
            if start <= address < start + nbytes:
                return descriptor, nbytes, address - start
        return None


def copy_together(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy host tensors, (target, source), by several threads: the system clears a new
    page, or reads one of a file, for the thread that touches it first."""
    with ThreadPoolExecutor(_COPIERS) as pool:
        copies = [
            pool.submit(target.copy_, source.detach()) for target, source in pairs
        ]
        for copy in copies:
            copy.result()


def host_buffer(nbytes: int) -> Tensor:
    """uint8 tensor of shape [nbytes] on whole pages of its own, fit to be pinned."""
    return torch.frombuffer(_map_private(nbytes), dtype=torch.uint8)


def _map_private(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # dataloader workers would make every updated page exist twice
    memory.madvise(mmap.MADV_DONTFORK)
    return memory


def return_freed_memory() -> None:
    """Ask glibc to give freed heap pages back; other libraries cannot."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def map_shared(nbytes: int, ranks: Ranks) -> tuple[mmap.mmap, int]:
    """Map zeros that all ranks of a node see, and open their file; every rank has to
    call it.

    It has no name in any file system, so nothing is left when the last rank ends, in
    whatever way, and the size of /dev/shm does not matter.

    Raises:
        ConfigError: The system cannot share memory so.
    """
    with ExitStack() as opened:

        def make() -> tuple[int, int]:
            descriptor = os.memfd_create("protrain", os.MFD_CLOEXEC)
            opened.callback(os.close, descriptor)
            os.ftruncate(descriptor, nbytes)
            return os.getpid(), descriptor

        process, number = ranks.from_first_of_node(make)

        def map_it() -> tuple[mmap.mmap, int]:
            own = open_of(process, number) if ranks.local_rank else os.dup(number)
            memory = mmap.mmap(own, nbytes, flags=mmap.MAP_SHARED)
            memory.madvise(mmap.MADV_DONTFORK)
            return memory, own

        # the first rank keeps it open until the others have it
        return ranks.together(map_it)


def open_of(process: int, number: int) -> int:
    """A descriptor of another process, as one of this process.

    Raises:
        ConfigError: The system does not let it.
    """
    path = f"/proc/{process}/fd/{number}"
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"protrain_auto_memory: {path} cannot be opened ({error.strerror}), through "
            "which the ranks of a node share host memory. Run them as one user in one "
            "container, or set protrain_force_all_persistent: true."
        ) from error
