"""Lay the parameters of a model out in chunks, block by block."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from ..types import Block, Chunk, Layout, TensorSpec
from .blocks import find_blocks

ALIGNMENT_BYTES = 256
"""What matrix libraries look at when they choose a kernel by the address of a weight:
a view must not be less aligned than the allocation that the plain run would have."""


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def build_layout(
    model: nn.Module, keep_resident: Collection[str] = frozenset()
) -> Layout:
    """Assign every parameter of `model` to a chunk or to the fixed part.

    A block gives one chunk for its frozen parameters and one for its trainable
    ones. A trainable parameter outside the blocks is a chunk of its own, so that
    its gradient leaves as soon as it is there. Frozen parameters outside the blocks,
    parameters that several blocks or a block and the rest share, empty or strided ones
    and those named in `keep_resident` never leave the device.

    Args:
        model: The model as it will be trained; `requires_grad` must be final.
        keep_resident: Names of trainable parameters to keep (adapters).

    Raises:
        LayoutError: The model has no recognisable blocks.
    """
    blocks = find_blocks(model)
    names = {id(p): name for name, p in model.named_parameters()}
    shared = _shared_parameters(model, blocks)
    chunks: list[Chunk] = []
    chunked: set[int] = set()
    placed_blocks = []
    for block_index, (block_name, module) in enumerate(blocks):
        own = [
            p
            for p in module.parameters()
            if id(p) not in shared
            and names[id(p)] not in keep_resident
            and _fits_in_chunk(p)
        ]
        block_chunks = []
        for trainable in (False, True):
            members = [p for p in own if p.requires_grad is trainable]
            if members:
                block_chunks.append(len(chunks))
                chunks.append(
                    _pack(len(chunks), block_index, trainable, members, names)
                )
        chunked.update(map(id, own))
        placed_blocks.append(Block(block_index, block_name, tuple(block_chunks)))

    fixed = {False: 0, True: 0}
    num_fixed_trainable = 0
    for p in model.parameters():
        if id(p) in chunked:
            continue
        kept = names[id(p)] in keep_resident or not _fits_in_chunk(p)
        if p.requires_grad and not kept:
            chunks.append(_pack(len(chunks), None, True, [p], names))
        else:
            fixed[p.requires_grad] += p.nbytes
            num_fixed_trainable += p.requires_grad
    buffer_bytes = sum(buffer.nbytes for buffer in model.buffers())
    return Layout(
        blocks=tuple(placed_blocks),
        chunks=tuple(chunks),
        fixed_frozen_bytes=fixed[False] + buffer_bytes,
        fixed_trainable_bytes=fixed[True],
        num_fixed_trainable=num_fixed_trainable,
    )


def _shared_parameters(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]
) -> set[int]:
    """Ids of parameters that more than one block, or a block and the rest, use."""
    inside = [{id(p) for p in module.parameters()} for _, module in blocks]
    prefixes = tuple(f"{name}." for name, _ in blocks)
    outside = {
        id(p)
        for name, p in model.named_parameters(remove_duplicate=False)
        if not name.startswith(prefixes)
    }
    seen: set[int] = set()
    shared: set[int] = set()
    for members in (*inside, outside):
        shared |= seen & members
        seen |= members
    return shared


def _fits_in_chunk(p: nn.Parameter) -> bool:
    # a chunk stores its parameters row by row; another layout could round otherwise
    return p.numel() > 0 and p.is_contiguous()


def _pack(
    index: int,
    block: int | None,
    trainable: bool,
    members: list[nn.Parameter],
    names: dict[int, str],
) -> Chunk:
    tensors = []
    end = 0
    for p in members:
        offset = aligned(end)
        tensors.append(TensorSpec(names[id(p)], tuple(p.shape), p.dtype, offset))
        end = offset + p.nbytes
    return Chunk(index, block, trainable, tuple(tensors), end)
