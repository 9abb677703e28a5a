"""Tensors of a chunk where they lie on the host, and in copies of these bytes."""

from __future__ import annotations

from torch import Tensor

from ..layout import span_bytes
from ..runtime import Arena
from ..types import Chunk


class HostTensors:
    """Weights of a chunk, or what has a tensor for each of them.

    Args:
        laid: The chunk as its tensors lie in `arena`.
        span: Parameters that this rank updates.

    Attributes:
        within_chunk: Where those of the span lie in the bytes of the chunk.
        memory: uint8, these bytes.
    """

    def __init__(self, laid: Chunk, arena: Arena, span: range) -> None:
        self._laid = laid
        # on storages of their own, that live as long as copies of them
        self._tensors = {
            number: arena.tensor(laid.index, spec)
            for number, spec in enumerate(laid.tensors)
            if spec.numel
        }
        self.within_chunk = span_bytes(laid, span)
        self.memory = arena.chunk(laid.index)[self.within_chunk]

    def __getitem__(self, index: int) -> Tensor:
        """That of a parameter, which any rank may update."""
        return self._tensors[index]

    def within(self, buffer: Tensor, index: int) -> Tensor:
        """That of a parameter in a copy of `memory`."""
        spec = self._laid.tensors[index]
        start = spec.offset - self.within_chunk.start
        return buffer[start : start + spec.nbytes].view(spec.dtype).view(spec.shape)
