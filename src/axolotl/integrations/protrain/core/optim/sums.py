"""Where gradients of a chunk add up on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import main_chunk
from ..runtime import Arena, Device
from ..runtime.device import Event
from ..types import Chunk
from .host_tensors import HostTensors


class GradientSums(HostTensors):
    """Gradients of a whole chunk on the host, until the update or the next addition.

    Args:
        chunk: Whose gradients they are.
        arena: Has them.
        span: Parameters of which this rank brings sums to the device.
        in_fp32: They add up in fp32.
        norms_fp32: Norms of 16-bit ones are taken in fp32, as they are used.

    Attributes:
        present: Indices of parameters that have a sum.
        arrived: What autograd has produced but nobody has sent, by index.
        norms: Of sums, on the device, as far as they are known.
        sent: After the last copy into `memory`.
    """

    def __init__(
        self,
        chunk: Chunk,
        arena: Arena,
        device: Device,
        span: range,
        in_fp32: bool,
        norms_fp32: bool = False,
    ) -> None:
        super().__init__(main_chunk(chunk, in_fp32), arena, span)
        self.chunk = chunk
        self.present: set[int] = set()
        self.arrived: dict[int, Tensor] = {}
        self.norms: dict[int, Tensor] = {}
        self.sent: Event | None = None
        self._device, self._norms_fp32 = device, norms_fp32

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
