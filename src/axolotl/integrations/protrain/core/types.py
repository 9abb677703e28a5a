"""The values that flow from layout to plan to runtime. Frozen, no behaviour beyond arithmetic.

Words are those of DESIGN.md: a *chunk* is the unit of residency and transfer, a
*block* the unit of compute, a *slot* a device buffer that paged chunks share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch


class Placement(Enum):
    """Where the parts of a chunk live. The members say which memory is in use."""

    RESIDENT = "resident"
    """Weights, gradients and optimizer state on the device."""
    HOST_STATE = "host-state"
    """Weights on the device; a host copy, gradients and optimizer state on the host."""
    PAGED = "paged"
    """All of it on the host; the weights pass through a slot while a block computes."""

    @property
    def on_host(self) -> bool:
        """True when the arena holds the chunk's bytes and is their truth."""
        return self is not Placement.RESIDENT


@dataclass(frozen=True)
class TensorSpec:
    """One parameter inside a chunk.

    Attributes:
        name: Full parameter name from the model root.
        shape: Shape of the parameter.
        dtype: Its dtype.
        offset: First byte inside the chunk, a multiple of the alignment.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def is_16_bit(self) -> bool:
        """True for the dtypes that an fp32 master is kept of."""
        return self.dtype in (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Chunk:
    """Parameters laid out back to back that move together.

    Attributes:
        index: Position in `Layout.chunks`.
        block: Index of the block that uses it, None for weights outside blocks.
        trainable: Whether its parameters are trained; never mixed in one chunk.
        tensors: The parameters in registration order.
        nbytes: Size in bytes, alignment gaps included.
    """

    index: int
    block: int | None
    trainable: bool
    tensors: tuple[TensorSpec, ...]
    nbytes: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of the parameters alone, without alignment gaps."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def has_masters(self, fp32_master: bool) -> bool:
        """True when any of its parameters is updated through an fp32 master."""
        return fp32_master and any(tensor.is_16_bit for tensor in self.tensors)

    @property
    def pageable(self) -> bool:
        """Only a block's chunks page: fused losses read the head without calling it."""
        return self.block is not None


@dataclass(frozen=True)
class Block:
    """One repeated layer: its name from the model root and the chunks it reads."""

    index: int
    name: str
    chunks: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """How the parameters of a model fall into chunks.

    Attributes:
        blocks: Repeated layers in the order of use.
        chunks: Block chunks first, in block order, then one for each trainable
            parameter outside the blocks.
        fixed_frozen_bytes: Frozen weights and buffers that never leave the device.
        fixed_trainable_bytes: Trainable weights that never leave it (adapters).
        num_fixed_trainable: How many such parameters there are.
    """

    blocks: tuple[Block, ...]
    chunks: tuple[Chunk, ...]
    fixed_frozen_bytes: int
    fixed_trainable_bytes: int
    num_fixed_trainable: int = 0

    @property
    def pageable(self) -> tuple[Chunk, ...]:
        return tuple(chunk for chunk in self.chunks if chunk.pageable)


@dataclass(frozen=True)
class Plan:
    """What the runtime does, decided once. The four knobs carry the paper's names.

    Attributes:
        n_persist: Pageable chunks that stay on the device.
        n_buffer: Slots.
        n_swap: Blocks whose activations go to the host.
        n_checkpoint: Blocks that recompute their activations.
        placements: One entry for each chunk of the layout.
        recompute: One entry for each block of the layout.
        origin: What decided the knobs, for the report.
    """

    n_persist: int
    n_buffer: int
    n_swap: int
    n_checkpoint: int
    placements: tuple[Placement, ...]
    recompute: tuple[bool, ...]
    origin: str

    @property
    def paged(self) -> tuple[int, ...]:
        """Chunk indices that pass through slots, in the order of use."""
        return tuple(
            index
            for index, placement in enumerate(self.placements)
            if placement is Placement.PAGED
        )

    @property
    def mode(self) -> str:
        """Mode A is resident, mode B pages from a host copy."""
        return "B" if self.paged else "A"
