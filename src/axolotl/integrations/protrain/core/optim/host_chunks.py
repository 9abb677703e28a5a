"""The host side of trainable chunks: weights, gradients, and what the optimizer sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..runtime import Arena, Device
from ..types import Chunk


class HostChunk:
    """Private host tensors of one trainable chunk.

    Args:
        chunk: The chunk.
        params: The model's parameters by name.
        arena: Holds the chunk's weights.
        gradients: Holds buffers for its gradients, unless it has masters: those add
            up in fp32, in memory of their own.
        fp32_master: Update 16-bit weights through fp32 masters.
        device: Is told what is read and written.

    The optimizer never reaches a weight through `param.data`, which a fetch may be
    filling; it owns views of the arena.

    Attributes:
        chunk: What it is the host side of.
        params: The model's parameters.
        weights: Arena views that fetches read, in the dtype of the model.
        leaves: What the optimizer updates: `weights`, or fp32 masters of them. A
            leaf's `.grad` is None until a gradient has arrived since the last clear.
    """

    def __init__(
        self,
        chunk: Chunk,
        params: Mapping[str, nn.Parameter],
        arena: Arena,
        gradients: Arena,
        fp32_master: bool,
        device: Device,
    ) -> None:
        self._device = device
        buffered = chunk.index in gradients
        self.chunk = chunk
        self.params = [params[spec.name] for spec in chunk.tensors]
        self.weights = [arena.tensor(chunk.index, spec) for spec in chunk.tensors]
        self.leaves = [
            weight.to(torch.float32) if fp32_master and spec.is_16_bit else weight
            for weight, spec in zip(self.weights, chunk.tensors, strict=True)
        ]
        self._grads = [
            gradients.tensor(chunk.index, spec)
            if buffered
            else torch.empty(spec.shape, dtype=leaf.dtype)
            for leaf, spec in zip(self.leaves, chunk.tensors, strict=True)
        ]

    @property
    def gradients(self) -> list[Tensor]:
        """Those that have arrived since the last clear."""
        return [leaf.grad for leaf in self.leaves if leaf.grad is not None]

    def changes(self) -> None:
        """Weights, leaves and gradients are about to be written by this thread."""
        self._device.writes((*self.weights, *self.leaves, *self.gradients))

    def accumulate(self, index: int, gradient: Tensor) -> None:
        """Add a host gradient to that of leaf `index`."""
        self._device.reads((gradient,))
        self._device.writes((self._grads[index],))
        leaf = self.leaves[index]
        if leaf.grad is None:
            leaf.grad = self._grads[index].copy_(gradient)
        else:
            leaf.grad.add_(gradient)

    def first_buffer(self, index: int) -> Tensor | None:
        """Where a first gradient may be copied as it is; None if it must be added."""
        buffer = self._grads[index]
        if (
            self.leaves[index].grad is None
            and buffer.dtype == self.weights[index].dtype
        ):
            return buffer
        return None

    def arrived(self, index: int) -> None:
        """The copy into `first_buffer` has been queued."""
        self.leaves[index].grad = self._grads[index]

    def clear(self) -> None:
        """Forget the gradients."""
        for leaf in self.leaves:
            leaf.grad = None

    def publish(self) -> None:
        """Round the masters into the weights that the next fetch reads."""
        for leaf, weight in zip(self.leaves, self.weights, strict=True):
            if leaf is not weight:
                weight.copy_(leaf)

    def reload(self) -> None:
        """The weights were loaded from outside: renew the masters."""
        self.changes()
        for leaf, weight in zip(self.leaves, self.weights, strict=True):
            if leaf is not weight:
                leaf.copy_(weight)

    def host_bytes(self) -> int:
        """Bytes of masters and gradients; weights are the arena's, moments Adam's."""
        own = (x for x, w in zip(self.leaves, self.weights, strict=True) if x is not w)
        return sum(t.nbytes for t in (*own, *self._grads))


def leaves_by_param(chunks: Sequence[HostChunk]) -> dict[int, Tensor]:
    """Map `id(parameter)` to the tensor that the optimizer updates in its place."""
    return {
        id(param): leaf
        for host in chunks
        for param, leaf in zip(host.params, host.leaves, strict=True)
    }
