"""Exact-size host memory in which the truth of paged parameters lives."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from ..layout import aligned
from ..types import Chunk, TensorSpec


class Arena:
    """Anonymous mappings of exactly the bytes asked for.

    Pages are committed when they are first written, so filling it chunk by chunk
    while the original tensors are freed never holds two copies. Tensors handed out
    have storages of their own: to `safetensors` and `torch.save` they look like
    independent tensors, and a mapping lives as long as any of them.

    Args:
        chunks: The chunks to hold from the start, each at an offset of its own.
    """

    def __init__(self, chunks: Sequence[Chunk] = ()) -> None:
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
        nbytes = sum(aligned(chunk.nbytes) for chunk in chunks)
        if not nbytes:
            return None
        memory, start = _map_private(nbytes), 0
        for chunk in chunks:
            self._places[chunk.index] = (memory, start, chunk.nbytes)
            start += aligned(chunk.nbytes)
        self.nbytes += nbytes
        return torch.frombuffer(memory, dtype=torch.uint8)

    def chunk(self, index: int) -> Tensor:
        """All bytes of a chunk, uint8 of shape [chunk.nbytes]."""
        memory, start, nbytes = self._places[index]
        return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=start)

    def tensor(self, index: int, spec: TensorSpec) -> Tensor:
        """One parameter of a chunk with its shape and dtype, on its own storage."""
        memory, start, _ = self._places[index]
        flat = torch.frombuffer(
            memory, dtype=spec.dtype, count=spec.numel, offset=start + spec.offset
        )
        return flat.view(spec.shape)


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
