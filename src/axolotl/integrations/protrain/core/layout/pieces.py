"""Pieces of a chunk: the tensors, or the elements of a large one, of one update.

An update brings gradient, state and masters of a piece to the device at a time, so that
the room for them does not grow with the chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..types import Chunk

PIECE_NUMEL = 1 << 23
"""Elements of a piece: 128 MiB with fp32 gradient, master and two moments. Its multiples
fall between the vectors of every kernel."""


@dataclass(frozen=True)
class Piece:
    """Consecutive tensors of a chunk, or elements of one.

    Attributes:
        span: Indices of the tensors.
        elements: Of the only tensor, flattened; None for whole tensors.
        is_last: No other piece of that tensor follows.
        is_first: No other piece of that tensor is before it.
    """

    span: range
    elements: slice | None = None
    is_last: bool = True
    is_first: bool = True


def pieces(
    chunk: Chunk, span: range, splits: bool, numel: int | None = None
) -> list[Piece]:
    """Cut a span of a chunk into pieces of at most `numel` elements, in order.

    A larger tensor is a piece of its own, and where the optimizer `splits` tensors, which
    updates each element independently of others, several.
    """
    numel = numel or PIECE_NUMEL
    found: list[Piece] = []
    start, total = span.start, 0
    for index in span:
        own = chunk.tensors[index].numel
        if start < index and total + own > numel:
            found.append(Piece(range(start, index)))
            start, total = index, 0
        total += own
        if splits and own > numel:
            found.extend(_elements(index, own, numel))
            start, total = index + 1, 0
    if start < span.stop:
        found.append(Piece(range(start, span.stop)))
    return found


def _elements(index: int, total: int, numel: int) -> Iterator[Piece]:
    for first in range(0, total, numel):
        stop = min(first + numel, total)
        elements = slice(first, stop)
        yield Piece(range(index, index + 1), elements, stop == total, not first)
