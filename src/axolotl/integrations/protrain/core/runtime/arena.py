"""Exact-size host memory in which the truth of paged parameters lives."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from ..layout import aligned, padded_bytes, shard_bytes
from ..layout.shards import PAGE_BYTES
from ..types import Chunk, TensorSpec
from .ranks import Ranks
from .shared import map_shared


class Arena:
    """Anonymous mappings of exactly the bytes asked for.

    Pages are committed when they are first written, so filling it chunk by chunk
    while the original tensors are freed never holds two copies. Tensors handed out
    have storages of their own: to `safetensors` and `torch.save` they look like
    independent tensors, and a mapping lives as long as any of them.

    Args:
        chunks: The chunks to hold from the start, each at an offset of its own.
        ranks: Whose node shares the memory; every rank then makes the same calls, and
            each chunk begins on a page.
        shards: Each chunk has room for so many equal ones.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk] = (),
        ranks: Ranks | None = None,
        shards: int = 1,
    ) -> None:
        self._ranks = ranks
        self._shards = shards
        self._places: dict[int, tuple[mmap.mmap, int, int]] = {}
        self.nbytes = 0
        self.add(chunks)

    def __contains__(self, index: int) -> bool:
        return index in self._places

    def add(self, chunks: Sequence[Chunk]) -> Tensor | None:
        """Hold further chunks; what is there stays where it is.

        Returns:
            Their mapping as one uint8 tensor, None when it is empty.
        """
        sizes = [self._size(chunk) for chunk in chunks]
        nbytes = sum(sizes)
        if not nbytes:
            return None
        memory, start = self._map(nbytes), 0
        for chunk, size in zip(chunks, sizes, strict=True):
            self._places[chunk.index] = (memory, start, chunk.nbytes)
            start += size
        self.nbytes += nbytes
        return torch.frombuffer(memory, dtype=torch.uint8)

    def chunk(self, index: int) -> Tensor:
        """All bytes of a chunk, uint8 of shape [chunk.nbytes]."""
        memory, start, nbytes = self._places[index]
        return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=start)

    def shard(self, chunk: Chunk, ranks: int, rank: int) -> Tensor:
        """One of the equal shards of a chunk, uint8 of shape [shard_bytes]."""
        memory, start, _ = self._places[chunk.index]
        size = shard_bytes(chunk, ranks)
        return torch.frombuffer(
            memory, dtype=torch.uint8, count=size, offset=start + rank * size
        )

    def tensor(self, index: int, spec: TensorSpec) -> Tensor:
        """One parameter of a chunk with its shape and dtype, on its own storage."""
        memory, start, _ = self._places[index]
        flat = torch.frombuffer(
            memory, dtype=spec.dtype, count=spec.numel, offset=start + spec.offset
        )
        return flat.view(spec.shape)

    def forget_pages(self) -> None:
        """Take no part in shared pages until they are touched again."""
        for memory in {
            id(place[0]): place[0] for place in self._places.values()
        }.values():
            memory.madvise(mmap.MADV_DONTNEED)

    def _size(self, chunk: Chunk) -> int:
        if self._ranks is None:
            return aligned(chunk.nbytes)
        return aligned(padded_bytes(chunk, self._shards), PAGE_BYTES)

    def _map(self, nbytes: int) -> mmap.mmap:
        if self._ranks is None or self._ranks.world.local_size == 1:
            return _map_private(nbytes)
        memory = map_shared(nbytes, self._ranks)
        memory.madvise(mmap.MADV_DONTFORK)
        return memory


def host_buffer(nbytes: int) -> Tensor:
    """uint8 tensor of shape [nbytes] on whole pages of its own, fit to be pinned."""
    return torch.frombuffer(_map_private(nbytes), dtype=torch.uint8)


def _map_private(nbytes: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, nbytes)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_DONTFORK"):
        # dataloader workers would make every updated page exist twice
        memory.madvise(mmap.MADV_DONTFORK)
    return memory


def return_freed_memory() -> None:
    """Ask glibc to give freed heap pages back; elsewhere do nothing."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
