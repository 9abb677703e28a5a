"""Lay the parameters of a model out in chunks, block by block."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from torch import nn

from ..types import Block, Chunk, Layout, TensorSpec
from .blocks import find_blocks
from .packed import form_of, stored_specs
from .tensors import (
    ALIGNMENT_BYTES,
    Binding,
    beside_quantised,
    bindings,
    check_quantised,
    extent,
    own_quant_states,
    shared_bytes,
)


def aligned(nbytes: int, alignment: int = ALIGNMENT_BYTES) -> int:
    """`nbytes` rounded up to the alignment."""
    return -(-nbytes // alignment) * alignment


def build_layout(
    model: nn.Module,
    keep_resident: Collection[str] = frozenset(),
    order: Sequence[str] = (),
    adapters: Collection[str] = frozenset(),
    rows: Mapping[str, int] = MappingProxyType({}),
) -> Layout:
    """Assign every parameter of `model` to a chunk or to the fixed part.

    A block gives one chunk for its frozen parameters, one for its trainable ones and one
    for its `adapters`, whose state may leave the device. A trainable parameter outside
    the blocks is a chunk of its own, so that its gradient leaves as soon as it is there,
    and so is a frozen embedding of which `rows` says how many bytes a micro-batch looks up.
    Other frozen parameters outside the blocks, those that several blocks or a block and
    the rest share, or that share bytes with another parameter or a buffer, empty or
    strided ones, biases of quantised weights and those named in `keep_resident` never
    leave the device. A quantised weight takes its quant state along as tensors of its own.
    `requires_grad` must be final; `keep_resident` and `adapters` are names of trainable
    parameters, `order` those of all blocks in the order of first use, by default that of
    their definition.

    Raises:
        LayoutError: The model has no recognisable blocks, or quantised weights that
            cannot be moved.
    """
    found = dict(find_blocks(model))
    # walked once: a walk over a large model takes as long as the rest
    own_quant_states(model)
    named = dict(model.named_parameters())
    inside = {name: list(found[name].parameters()) for name in order or found}
    check_quantised(named)
    held = {id(p): bindings(name, p) for name, p in named.items()}
    kept = beside_quantised(model, named) | {
        key
        for key, own in held.items()
        if own[0].name in keep_resident or not all(map(_fits_in_chunk, own))
    }
    every = [*named.values(), *model.buffers()]
    together = [[every[n] for n in group] for group in shared_bytes(every)]
    kept |= {id(tensor) for group in together for tensor in group}
    apart = {id(p) for name, p in named.items() if name in adapters}
    stay = kept | _shared_parameters(model, inside)
    kept |= apart
    chunks: list[Chunk] = []
    blocks = []
    for index, (name, params) in enumerate(inside.items()):
        first = len(chunks)
        members = [p for p in params if id(p) not in stay and id(p) not in apart]
        for trainable in (False, True):
            same = [p for p in members if p.requires_grad is trainable]
            if same:
                tensors = [binding for p in same for binding in held[id(p)]]
                chunks.append(_pack(len(chunks), index, trainable, tensors))
        blocks.append(Block(index, name, tuple(range(first, len(chunks)))))
    for index, params in enumerate(inside.values()):
        members = [p for p in params if id(p) in apart and id(p) not in stay]
        if members:
            tensors = [binding for p in members for binding in held[id(p)]]
            chunk = _pack(len(chunks), index, True, tensors)
            chunks.append(replace(chunk, adapter=True))
            own_chunks = *blocks[index].chunks, chunk.index
            blocks[index] = replace(blocks[index], chunks=own_chunks)

    chunked = {id(p) for params in inside.values() for p in params} - stay
    fixed = {False: 0, True: 0}
    num_fixed_trainable = 0
    for p in named.values():
        if id(p) in chunked:
            continue
        own = held[id(p)]
        rows_bytes = 0 if p.requires_grad else rows.get(own[0].name, 0)
        rows_bytes *= rows_bytes < p.nbytes
        if (p.requires_grad or rows_bytes) and id(p) not in kept:
            chunk = _pack(len(chunks), None, p.requires_grad, own)
            chunks.append(replace(chunk, rows_bytes=rows_bytes))
        else:
            fixed[p.requires_grad] += sum(b.tensor.nbytes for b in own)
            num_fixed_trainable += p.requires_grad
    fixed[False] += sum(buffer.nbytes for buffer in model.buffers())
    for group in together:
        _, starts, stops = zip(*map(extent, group), strict=True)
        fixed[False] += (
            max(stops) - min(starts) - sum(tensor.nbytes for tensor in group)
        )
    return Layout(
        blocks=tuple(blocks),
        chunks=tuple(chunks),
        fixed_frozen_bytes=fixed[False],
        fixed_trainable_bytes=fixed[True],
        num_fixed_trainable=num_fixed_trainable,
    )


def _shared_parameters(
    model: nn.Module, inside: Mapping[str, Sequence[nn.Parameter]]
) -> set[int]:
    """Ids of parameters that more than one block, or a block and the rest, use."""
    prefixes = tuple(f"{name}." for name in inside)
    outside = {
        id(p)
        for name, p in model.named_parameters(remove_duplicate=False)
        if not name.startswith(prefixes)
    }
    seen: set[int] = set()
    shared: set[int] = set()
    for members in (*({id(p) for p in own} for own in inside.values()), outside):
        shared |= seen & members
        seen |= members
    return shared


def _fits_in_chunk(binding: Binding) -> bool:
    # a chunk stores its tensors row by row; another layout could round otherwise
    return binding.tensor.numel() > 0 and binding.tensor.is_contiguous()


def _pack(
    index: int, block: int | None, trainable: bool, members: Sequence[Binding]
) -> Chunk:
    named = ((m.name, m.tensor, form_of(m.owner)) for m in members)
    specs = (TensorSpec(n, tuple(t.shape), t.dtype, 0, form) for n, t, form in named)
    chunk = Chunk(index, block, trainable, *back_to_back(specs))
    if all(spec.form is None for spec in chunk.tensors):
        return chunk
    stored = (part for spec in chunk.tensors for part in stored_specs(spec))
    tensors, nbytes = back_to_back(stored)
    return replace(chunk, stored=replace(chunk, tensors=tensors, nbytes=nbytes))


def back_to_back(specs: Iterable[TensorSpec]) -> tuple[tuple[TensorSpec, ...], int]:
    """Tensors at aligned offsets, one after the other, and the bytes of all."""
    placed, end = [], 0
    for spec in specs:
        placed.append(replace(spec, offset=aligned(end)))
        end = placed[-1].offset + spec.nbytes
    return tuple(placed), end
