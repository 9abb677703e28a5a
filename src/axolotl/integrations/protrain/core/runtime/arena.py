"""Exact-size host memory in which the truth of paged parameters lives."""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch
from torch import Tensor

from ..layout import aligned
from ..types import Chunk, TensorSpec


class Arena:
    """One anonymous mapping of exactly the bytes asked for.

    Pages are committed when they are first written, so filling it chunk by chunk
    while the original tensors are freed never holds two copies. Tensors handed out
    have storages of their own: to `safetensors` and `torch.save` they look like
    independent tensors, and the mapping lives as long as any of them.

    Args:
        chunks: The chunks to hold, each at an offset of its own.
    """

    def __init__(self, chunks: tuple[Chunk, ...]) -> None:
        self._offsets: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        end = 0
        for chunk in chunks:
            self._offsets[chunk.index] = end
            self._sizes[chunk.index] = chunk.nbytes
            end += aligned(chunk.nbytes)
        self.nbytes = end
        self._memory = _map_private(end) if end else None

    def __contains__(self, index: int) -> bool:
        return index in self._offsets

    def chunk(self, index: int) -> Tensor:
        """All bytes of a chunk, uint8 of shape [chunk.nbytes]."""
        return self._view(torch.uint8, self._sizes[index], self._offsets[index])

    def tensor(self, index: int, spec: TensorSpec) -> Tensor:
        """One parameter of a chunk with its shape and dtype, on its own storage."""
        start = self._offsets[index] + spec.offset
        return self._view(spec.dtype, spec.numel, start).view(spec.shape)

    def whole(self) -> Tensor | None:
        """The mapping as one uint8 tensor, None when it is empty."""
        return self._view(torch.uint8, self.nbytes, 0) if self.nbytes else None

    def _view(self, dtype: torch.dtype, count: int, offset: int) -> Tensor:
        assert self._memory is not None
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset)


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
