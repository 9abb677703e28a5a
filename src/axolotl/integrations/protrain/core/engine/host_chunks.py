"""The host side of trainable chunks: weights, gradients and what masters have beyond them.

# Note [Who updates what]

A rank alone updates every tensor of a chunk, the ranks of a node each a span of them
(`layout.spans`): whole tensors, because some optimizers look at whole tensors, and norms of
pieces would have other last bits. All of it lies in memory that the ranks share, so what
one of them has updated all of them fetch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..types import Chunk
from .host_tensors import HostMemory, HostTensors, MainGrads
from .masters import Masters

MASTER_KEY = "master"
"""Key of the fp32 master weight beside what the optimizer keeps."""


class HostChunk:
    """Host tensors of one trainable chunk; see Note [Who updates what].

    Args:
        params: The model's parameters by name; as an attribute those of the chunk.
        memory: Where everything lies; `HostMemory.add` has been called with the chunk.

    Attributes:
        owners: For each rank of the node the indices of the tensors that it updates, and
            as `span` those of this one.
        weights: In the arena.
        sums: Gradients of all ranks, of all micro-batches; the update reads them there.
        earlier: Of one of several ranks, those of micro-batches before the last.
        masters: What masters have beyond the weights.
        shared: Several ranks write here.
    """

    earlier: MainGrads | None = None

    def __init__(
        self, chunk: Chunk, params: Mapping[str, nn.Parameter], memory: HostMemory
    ) -> None:
        ranks = memory.ranks
        self.chunk, self.shared = chunk, ranks.world.size > 1
        self.params = [params[spec.name] for spec in chunk.tensors]
        self.owners = memory.spans[chunk.index]
        self.span = self.owners[ranks.local_rank]
        self.weights = HostTensors(chunk, memory.weights, self.span)
        self.main_grads = MainGrads(chunk, memory.gradients, memory, self.span)
        self.masters = Masters(chunk, memory, self.weights, self.span)

    def main_dtype(self, index: int) -> torch.dtype:
        """In which a parameter is updated."""
        own = self.chunk.tensors[index].dtype
        return torch.float32 if index in self.masters else own

    @property
    def waiting(self) -> set[int]:
        """Parameters with a gradient that an update will read."""
        if self.main_grads.present or self.earlier is None:
            return self.main_grads.present
        return self.earlier.present

    def total(self, index: int) -> Tensor:
        """A parameter's gradient of all micro-batches so far, in the dtype of the sum; no
        rank may be writing it. One of several ranks gets a copy."""
        if self.earlier is not None and index in self.earlier.present:
            return self.earlier[index]
        total = self.main_grads[index]
        return total.clone() if self.shared else total

    def replace(self, index: int, gradient: Tensor) -> None:
        """Overwrite a parameter's gradient; that of all ranks is its owner's."""
        if self.earlier is not None and index in self.earlier.present:
            self.earlier.replace(index, gradient)
            return
        self.main_grads.norms.pop(index, None)
        if index in self.span:
            self.main_grads.replace(index, gradient)
