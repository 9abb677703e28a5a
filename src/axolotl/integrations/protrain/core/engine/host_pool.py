"""Exact-size host memory in which the truth of paged parameters lives.

The ranks of a node map it together.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from ..errors import ConfigError
from ..layout import aligned, padded_bytes, shard_bytes
from ..layout.packed import Packed, stored_specs
from ..layout.shards import PAGE_BYTES
from ..types import Chunk, TensorSpec
from .chunk_files import (
    BaseFiles,
    ChunkFile,
    Mappings,
    mappings,
    spans_of,
    store,
    written,
)
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
        disk: Folder for the files of chunks that have no memory.

    Attributes:
        files: Those chunks' files, by index: of their own, or the base's.
    """

    def __init__(
        self,
        ranks: Ranks | None = None,
        shards: int = 1,
        disk: Path | None = None,
    ) -> None:
        self._disk = disk
        self.files: dict[int, ChunkFile | BaseFiles] = {}
        # frozen tensors of chunks that stay in the base's files, by name
        self._in_base: dict[int, dict[str, Tensor]] = {}
        self._mappings: Mappings | None = None
        self._staging: mmap.mmap | None = None
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
        return index in self._places or index in self._in_base

    def add(
        self, chunks: Sequence[Chunk], on_disk: Collection[int] = ()
    ) -> Tensor | None:
        """Hold further chunks, each from a page of its own, so that it can be page-locked
        alone; what is there stays where it is. Those `on_disk` share room until each is
        `filled`.

        Returns:
            Their mapping as one uint8 tensor, None when it is empty.
        """
        self._stored |= {
            chunk.index: {spec.name: spec for spec in chunk.stored.tensors}
            for chunk in chunks
            if chunk.stored is not None
        }
        self._mappings = None
        chunks = [chunk.in_pool for chunk in chunks]
        staged = [chunk for chunk in chunks if chunk.index in on_disk]
        if staged:
            nbytes = max(padded_bytes(chunk, self._shards) for chunk in staged)
            self._staging = self._map(nbytes)
            places = ((c.index, (self._staging, 0, c.nbytes)) for c in staged)
            self._places.update(places)
        chunks = [chunk for chunk in chunks if chunk.index not in on_disk]
        sizes = [aligned(padded_bytes(c, self._shards), PAGE_BYTES) for c in chunks]
        nbytes = sum(sizes)
        if not nbytes:
            return None
        memory = self._map(nbytes)
        start = 0
        for chunk, size in zip(chunks, sizes, strict=True):
            self._places[chunk.index] = (memory, start, chunk.nbytes)
            start += size
        self.nbytes += nbytes
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _map(self, nbytes: int) -> mmap.mmap:
        if not self._in_files:
            return _map_private(nbytes)
        memory, file = map_shared(nbytes, self._ranks)
        self._files[memory] = file
        weakref.finalize(self, os.close, file)
        return memory

    def leave_in_base(
        self,
        chunk: Chunk,
        copies: Sequence[tuple[Tensor, Tensor]] | None,
        tensors: Mapping[str, Tensor],
    ) -> bool:
        """Let the bytes of a chunk stay in the base's files, if they are there and its
        place is the disk; all ranks of a node call it.

        Args:
            chunk: A frozen one.
            copies: Target and source of each copy that would fill it; None if this rank
                does not have all of them.
            tensors: Its parameters, by name.
        """
        memory, *_ = self._places[chunk.index]
        if memory is not self._staging:
            return False
        assert self._disk is not None
        spans = None
        if copies is not None:
            first = self.chunk(chunk.index).data_ptr()
            placed = ((t.data_ptr() - first, source) for t, source in copies)
            if self._mappings is None:
                self._mappings = mappings()
            spans = spans_of(placed, self._disk, self._mappings)
        if self._ranks.node_sum(
            torch.tensor([float(spans is None)], device="cpu")
        ).item():
            return False
        assert spans is not None
        file = self.files[chunk.index] = BaseFiles(spans)
        weakref.finalize(self, file.close)
        self._in_base[chunk.index] = dict(tensors)
        del self._places[chunk.index]
        return True

    def filled(self, chunk: Chunk) -> None:
        """Move a chunk whose bytes are all there to its file, if that is its place; all
        ranks of a node call it."""
        memory, _, nbytes = self._places[chunk.index]
        if memory is not self._staging:
            return
        assert self._disk is not None
        folder, size = self._disk, padded_bytes(chunk.in_pool, self._shards)
        staged = torch.frombuffer(memory, dtype=torch.uint8)
        # until all have filled their parts
        self._ranks.meet_on_node()

        def write() -> Path:
            # no rank reads all of a sharded file, as it would be checked by
            path = store(folder, staged[:size], compares=self._shards > 1)
            # or the next one's gaps would have bytes of this one
            staged.zero_()
            return path

        path = self._ranks.from_first_of_node(write)
        file = self.files[chunk.index] = ChunkFile(path, size)
        weakref.finalize(self, file.close)
        self._places[chunk.index] = (file.map(), 0, nbytes)

    def undo_writes(self, indices: Iterable[int]) -> list[int]:
        """Take back what somebody has written over chunks that lie in files; returns those
        that had other bytes then."""
        found = []
        own: dict[int, ChunkFile] = {}
        for index in indices:
            file = self.files.get(index)
            if isinstance(file, ChunkFile):
                own[index] = file
            elif file is not None and file.undo_writes():
                found.append(index)
        pages = [self.chunk(index) for index in own]
        for (index, file), now, is_written in zip(
            own.items(), pages, written(pages) if own else [], strict=True
        ):
            if is_written:
                kept = torch.frombuffer(file.map(), dtype=torch.uint8)
                if not torch.equal(now, kept[: len(now)]):
                    found.append(index)
                self._places[index][0].madvise(mmap.MADV_DONTNEED)
        return found

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
        if index in self._in_base:
            return self._in_base[index][spec.name]
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
        own._stored, own._in_base = self._stored, self._in_base
        own._places = {
            # of a file on the disk it is that already
            index: (maps.get(memory, memory), start, nbytes)
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
