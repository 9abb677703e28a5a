"""How the ranks of a node divide a chunk: by bytes for fetches, by tensor for updates.

Shard r of N is the r-th of N equal ranges of the chunk's bytes; the last one ends beyond
the chunk where N does not divide it. A rank updates the elements of its own shard. For
the reduction all gradients of one dtype are laid out shard by shard, back to back, each
shard padded to the longest, so that one reduce-scatter gives every rank its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from ..types import Chunk
from .chunks import aligned

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
        dtype: In which gradients are summed.
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
    return -(-chunk.nbytes // (ranks * PAGE_BYTES)) * PAGE_BYTES


def padded_bytes(chunk: Chunk, ranks: int) -> int:
    """Bytes of all shards of a chunk together."""
    return ranks * shard_bytes(chunk, ranks)


def main_chunk(chunk: Chunk, fp32_master: bool) -> Chunk:
    """The tensors of a chunk as the optimizer updates them: in fp32 under masters."""
    specs, end = [], 0
    for spec in chunk.tensors:
        dtype = torch.float32 if fp32_master and spec.is_16_bit else spec.dtype
        own = replace(spec, dtype=dtype, offset=aligned(end))
        specs.append(own)
        end = own.offset + own.nbytes
    return replace(chunk, tensors=tuple(specs), nbytes=end)


def rest_chunk(chunk: Chunk) -> Chunk:
    """What fp32 masters have beyond the weights of a chunk, uint8; see masters.py.

    Of a bf16 weight 17 bits, of an fp16 one, which says less, the whole master.
    """
    specs, end = [], 0
    for spec in chunk.tensors:
        nbytes = 4 * spec.numel if spec.is_16_bit else 0
        if spec.dtype is torch.bfloat16:
            nbytes = 2 * spec.numel + -(-spec.numel // 8)
        specs.append(
            replace(spec, shape=(nbytes,), dtype=torch.uint8, offset=aligned(end))
        )
        end = specs[-1].offset + nbytes
    return replace(chunk, tensors=tuple(specs), nbytes=end)


def reductions(
    chunk: Chunk, ranks: int, fp32_master: bool = False
) -> tuple[Reduction, ...]:
    """How the gradients of a chunk are reduced, one for each dtype of its main parameters."""
    mains = main_chunk(chunk, fp32_master).tensors
    members: dict[torch.dtype, list[int]] = {}
    for index, main in enumerate(mains):
        members.setdefault(main.dtype, []).append(index)
    return tuple(
        _reduction(chunk, dtype, indices, ranks) for dtype, indices in members.items()
    )


def reduce_bytes(chunk: Chunk, ranks: int, fp32_master: bool = False) -> int:
    """Bytes of the gradients of a chunk, laid out for their reductions."""
    laid_out = reductions(chunk, ranks, fp32_master)
    return sum(aligned(reduction.nbytes) for reduction in laid_out)


def _reduction(
    chunk: Chunk, dtype: torch.dtype, members: Iterable[int], ranks: int
) -> Reduction:
    size = shard_bytes(chunk, ranks)
    # by rank, at positions in its part
    found: list[list[Piece]] = [[] for _ in range(ranks)]
    ends = [0] * ranks
    for index in members:
        spec = chunk.tensors[index]
        itemsize = spec.dtype.itemsize
        first, last = spec.offset // size, (spec.offset + spec.nbytes - 1) // size
        for rank in range(first, last + 1):
            # shards begin on pages and tensors at multiples of the alignment
            start = max(rank * size - spec.offset, 0) // itemsize
            stop = min((rank + 1) * size - spec.offset, spec.nbytes) // itemsize
            found[rank].append(Piece(index, start, stop, ends[rank]))
            ends[rank] += stop - start
    part = max(ends)
    pieces = [
        tuple(replace(piece, position=rank * part + piece.position) for piece in own)
        for rank, own in enumerate(found)
    ]
    return Reduction(dtype, part, tuple(pieces))
