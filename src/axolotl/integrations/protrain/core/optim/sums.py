"""Where gradients of a chunk add up on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..layout import span_bytes
from ..runtime import Device
from ..runtime.device import Event
from ..types import Chunk, TensorSpec


class GradientSums:
    """Gradients of a whole chunk on the host, until the update or the next addition.

    Args:
        chunk: Whose gradients they are.
        summed: The same in the dtypes of the sums.
        whole: uint8, all sums as `summed` lays them out.
        buffers: The same, for each parameter with a storage of its own.
        span: Parameters of which this rank brings sums to the device.
        in_fp32: Norms of 16-bit ones are taken in fp32, as they are used.

    Attributes:
        memory: uint8, the sums of the span.
        present: Indices of parameters that have a sum.
        arrived: What autograd has produced but nobody has sent, by index.
        norms: Of sums, on the device, as far as they are known.
        sent: After the last copy into `memory`.
    """

    def __init__(
        self,
        chunk: Chunk,
        summed: Chunk,
        whole: Tensor,
        buffers: Sequence[Tensor],
        device: Device,
        span: range,
        in_fp32: bool = False,
    ) -> None:
        self.chunk, self._summed = chunk, summed
        own = span_bytes(summed, span)
        self.memory, self._start = whole[own], own.start
        self.present: set[int] = set()
        self.arrived: dict[int, Tensor] = {}
        self.norms: dict[int, Tensor] = {}
        self.sent: Event | None = None
        self._device, self._buffers, self._in_fp32 = device, buffers, in_fp32

    def within(self, buffer: Tensor, index: int) -> Tensor:
        """The sum of a parameter in a copy of the memory."""
        return tensor_in(buffer, self._summed.tensors[index], self._start)

    def norm(self, gradient: Tensor) -> Tensor:
        """That of one of them, by the kernel that the plain run takes."""
        if self._in_fp32 and gradient.dtype is not torch.float32:
            return torch.linalg.vector_norm(gradient, dtype=torch.float32)
        return torch.nn.utils.get_total_norm([gradient])

    def total(self, index: int) -> Tensor:
        """The sum of a parameter."""
        return self._buffers[index]

    def replace(self, index: int, gradient: Tensor) -> None:
        """Overwrite the sum of a parameter."""
        self._buffers[index].copy_(gradient)
        self.norms.pop(index, None)

    def add(self, index: int, gradient: Tensor) -> None:
        """Add a host gradient to that of a parameter."""
        total = self._buffers[index]
        self._device.reads((gradient,))
        self._device.writes((total,))
        self.norms.pop(index, None)
        if index in self.present:
            total.add_(gradient)
        else:
            total.copy_(gradient)
            self.present.add(index)


def tensor_in(buffer: Tensor, spec: TensorSpec, start: int = 0) -> Tensor:
    """A tensor of a chunk in its bytes, of which the first one is `start`."""
    first = spec.offset - start
    flat = buffer[first : first + spec.nbytes]
    return flat.view(spec.dtype).view(spec.shape)
