"""Division of chunks among the ranks of a node: by bytes for fetches, by tensor for
updates.

Shard r of N is the r-th of N equal ranges of a chunk's bytes; the last one ends beyond
the chunk where N does not divide it. A rank updates whole tensors, consecutive ones of
each chunk: optimizers look at whole tensors, and so do norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from ..types import Chunk
from .chunks import back_to_back

PAGE_BYTES = 4096
"""Shards begin on pages of their own: of what is frozen a rank page-locks its own alone."""


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
    tensors, nbytes = back_to_back(
        replace(spec, dtype=torch.float32) if fp32_master and spec.is_16_bit else spec
        for spec in chunk.tensors
    )
    return replace(chunk, tensors=tensors, nbytes=nbytes)


def master_chunk(chunk: Chunk, has_masters: bool = True) -> Chunk:
    """The fp32 masters of the 16-bit tensors of a chunk; other tensors are empty."""
    tensors, nbytes = back_to_back(
        replace(spec, dtype=torch.float32)
        if has_masters and spec.is_16_bit
        else replace(spec, shape=(0,))
        for spec in chunk.tensors
    )
    return replace(chunk, tensors=tensors, nbytes=nbytes)


def spans(chunks: Sequence[Chunk], ranks: int) -> list[tuple[range, ...]]:
    """For each chunk the indices of the tensors that each rank of a node updates.

    Chunks are cut where parts come closest to equal bytes; who has less so far takes the
    larger part, so that shares even out over all chunks.
    """
    done, found = [0] * ranks, []
    for chunk in chunks:
        starts = [*(spec.offset for spec in chunk.tensors), chunk.nbytes]
        goals = [chunk.nbytes * number / ranks for number in range(1, ranks)]
        inner = [
            min(
                range(len(starts)),
                key=[abs(start - goal) for start in starts].__getitem__,
            )
            for goal in goals
        ]
        cuts = [0, *inner, len(chunk.tensors)]
        parts = [range(*pair) for pair in pairwise(cuts)]
        parts.sort(key=lambda part: starts[part.start] - starts[part.stop])
        own = [range(0)] * ranks
        for rank, part in zip(
            sorted(range(ranks), key=done.__getitem__), parts, strict=True
        ):
            own[rank] = part
            done[rank] += starts[part.stop] - starts[part.start]
        found.append(tuple(own))
    return found


def span_bytes(chunk: Chunk, span: range) -> slice:
    """Return where consecutive tensors of a chunk lie in its bytes."""
    if not span:
        return slice(0, 0)
    first, last = chunk.tensors[span[0]], chunk.tensors[span[-1]]
    return slice(first.offset, last.offset + last.nbytes)
