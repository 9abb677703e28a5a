"""Tensors of a chunk on the host, in copies of these bytes, and sums of gradients there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..layout import main_chunk, rest_chunk, span_bytes, spans
from ..types import Chunk
from .device import Device, Event
from .host_pool import HostPool
from .ranks import Alone, Ranks


@dataclass
class HostMemory:
    """What trainable chunks take on the host beside their weights, which the arena has.

    The `ranks` of a node share it. With `masters` 16-bit weights have fp32 masters, and
    with `main_grads_fp32` their gradients add up in fp32.
    """

    weights: HostPool
    device: Device
    ranks: Ranks = field(default_factory=Alone)
    masters: bool = False
    main_grads_fp32: bool = False
    spans: dict[int, tuple[range, ...]] = field(default_factory=dict)
    """For each chunk what each rank of the node updates."""

    def __post_init__(self) -> None:
        self.rests, self.gradients = (
            HostPool(ranks=self.ranks),
            HostPool(ranks=self.ranks),
        )

    def add(self, chunks: Sequence[Chunk]) -> list[Tensor]:
        """Take memory for further chunks; returns what has to be page-locked."""
        every = spans(chunks, self.ranks.world.local_size)
        self.spans.update((c.index, own) for c, own in zip(chunks, every, strict=True))
        rests = [rest_chunk(chunk, self.masters) for chunk in chunks]
        summed = [main_chunk(chunk, self.main_grads_fp32) for chunk in chunks]
        regions = self.rests.add(rests), self.gradients.add(summed)
        return [region for region in regions if region is not None]


class HostTensors:
    """Weights of a chunk, or what has a tensor for each of them.

    Args:
        laid: The chunk as its tensors lie in `arena`.
        span: Parameters that this rank updates.

    Attributes:
        within_chunk: Where those of the span lie in the bytes of the chunk.
        memory: uint8, these bytes.
    """

    def __init__(self, laid: Chunk, pool: HostPool, span: range) -> None:
        self._laid = laid
        # on storages of their own, that live as long as copies of them
        self._tensors = {
            number: pool.tensor(laid.index, spec)
            for number, spec in enumerate(laid.tensors)
            if spec.numel
        }
        self.within_chunk = span_bytes(laid, span)
        self.memory = torch.empty(0, dtype=torch.uint8)
        if laid.nbytes:
            self.memory = pool.chunk(laid.index)[self.within_chunk]

    def __getitem__(self, index: int) -> Tensor:
        """That of a parameter, which any rank may update."""
        return self._tensors[index]

    def within(self, buffer: Tensor, index: int) -> Tensor:
        """That of a parameter in a copy of `memory`."""
        spec = self._laid.tensors[index]
        start = spec.offset - self.within_chunk.start
        return buffer[start : start + spec.nbytes].view(spec.dtype).view(spec.shape)


class MainGrads(HostTensors):
    """Gradients of a whole chunk on the host, until the update or the next addition.

    Args:
        chunk: Whose gradients they are.
        arena: Has them.
        memory: Says how they add up. Under masters norms of 16-bit ones are taken in fp32,
            as they are used.
        span: Parameters of which this rank brings sums to the device.

    Attributes:
        present: Indices of parameters that have a sum.
        arrived: What autograd has produced but nobody has sent, by index.
        norms: Of sums, on the device, as far as they are known.
        sent: After the last copy into `memory`.
    """

    def __init__(
        self, chunk: Chunk, pool: HostPool, memory: HostMemory, span: range
    ) -> None:
        super().__init__(main_chunk(chunk, memory.main_grads_fp32), pool, span)
        self.chunk = chunk
        self.present: set[int] = set()
        self.arrived: dict[int, Tensor] = {}
        self.norms: dict[int, Tensor] = {}
        self.sent: Event | None = None
        self._device, self._norms_fp32 = memory.device, memory.masters

    def norm(self, gradient: Tensor) -> Tensor:
        """That of one of them, by the kernel that the plain run takes."""
        if self._norms_fp32 and gradient.dtype is not torch.float32:
            return torch.linalg.vector_norm(gradient, dtype=torch.float32)
        return torch.nn.utils.get_total_norm([gradient])

    def replace(self, index: int, gradient: Tensor) -> None:
        """Overwrite the sum of a parameter."""
        self[index].copy_(gradient)
        self.norms.pop(index, None)

    def add(self, index: int, gradient: Tensor) -> None:
        """Add a host gradient to that of a parameter."""
        total = self[index]
        self._device.reads((gradient,))
        self._device.writes((total,))
        self.norms.pop(index, None)
        if index in self.present:
            total.add_(gradient)
        else:
            total.copy_(gradient)
            self.present.add(index)
