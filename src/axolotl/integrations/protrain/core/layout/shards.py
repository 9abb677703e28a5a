"""How the ranks of a node divide a chunk: by bytes for fetches, by tensor for updates.

Shard r of N is the r-th of N equal ranges of the chunk's bytes; the last one ends beyond
the chunk where N does not divide it. A rank updates the elements of its own shard. For
the reduction all gradients of one dtype are laid out shard by shard, back to back, each
shard padded to the longest, so that one reduce-scatter gives every rank its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..types import Chunk

PAGE_BYTES = 4096
"""Shards begin on pages of their own: a rank page-locks no memory of another."""


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of one tensor of a chunk, all in one shard.

    Attributes:
        tensor: Index in `Chunk.tensors`.
        start: First element, counted row by row.
        stop: The one after the last.
        position: First element in the `Reduction` of its dtype.
    """

    tensor: int
    start: int
    stop: int
    position: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Reduction:
    """Gradients of one dtype of a chunk, laid out for a reduce-scatter.

    Attributes:
        dtype: Of the parameters and their gradients.
        part_numel: Elements that each rank receives, padding included.
        pieces: For each rank those of its shard.
    """

    dtype: torch.dtype
    part_numel: int
    pieces: tuple[tuple[Piece, ...], ...]

    @property
    def numel(self) -> int:
        """Elements of the whole, on every rank."""
        return self.part_numel * len(self.pieces)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def part_bytes(self) -> int:
        return self.part_numel * self.dtype.itemsize


def shard_bytes(chunk: Chunk, ranks: int) -> int:
    """Bytes of each shard; all of the chunk for one rank."""
    if ranks == 1:
        return chunk.nbytes
    pages = -(-chunk.nbytes // (ranks * PAGE_BYTES))
    return pages * PAGE_BYTES


def padded_bytes(chunk: Chunk, ranks: int) -> int:
    """Bytes of all shards of a chunk together."""
    return ranks * shard_bytes(chunk, ranks)


def reductions(chunk: Chunk, ranks: int) -> tuple[Reduction, ...]:
    """How the gradients of a chunk are reduced, one entry for each dtype in it."""
    size = shard_bytes(chunk, ranks)
    dtypes = dict.fromkeys(tensor.dtype for tensor in chunk.tensors)
    return tuple(_reduction(chunk, dtype, ranks, size) for dtype in dtypes)


def reduce_bytes(chunk: Chunk, ranks: int) -> int:
    """Bytes of the gradients of a chunk, laid out for their reductions."""
    return sum(reduction.nbytes for reduction in reductions(chunk, ranks))


def _reduction(chunk: Chunk, dtype: torch.dtype, ranks: int, size: int) -> Reduction:
    # (tensor, first element, the one after the last) by rank
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    for index, spec in enumerate(chunk.tensors):
        if spec.dtype is not dtype:
            continue
        first, last = spec.offset // size, (spec.offset + spec.nbytes - 1) // size
        for rank in range(first, last + 1):
            # shards begin on pages and tensors at multiples of the alignment
            start = max(rank * size - spec.offset, 0) // dtype.itemsize
            stop = min((rank + 1) * size - spec.offset, spec.nbytes) // dtype.itemsize
            found[rank].append((index, start, stop))
    part = max(_numel(own) for own in found)
    pieces = []
    for rank, own in enumerate(found):
        position = rank * part
        placed = []
        for index, start, stop in own:
            placed.append(Piece(index, start, stop, position))
            position += stop - start
        pieces.append(tuple(placed))
    return Reduction(dtype, part, tuple(pieces))


def _numel(own: Iterable[tuple[int, int, int]]) -> int:
    return sum(stop - start for _, start, stop in own)
