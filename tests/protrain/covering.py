"""Few points of a grid that hold all pairs of its values."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

Point = tuple[Hashable, ...]


def covering(points: Sequence[Point], strength: int = 2) -> set[Point]:
    """Points that hold every combination of values of any `strength` axes."""
    holds = {p: frozenset(combinations(enumerate(p), strength)) for p in points}
    missing = set().union(*holds.values())
    chosen: set[Point] = set()
    while missing:
        best = max(points, key=lambda point: len(holds[point] & missing))
        missing -= holds[best]
        chosen.add(best)
    return chosen


def pairwise(points: Sequence[Point], strength: int = 2) -> list[Any]:
    """All points as parameters, the quick ones first and the others marked `full`."""
    quick = covering(points, strength)
    return [
        pytest.param(
            *point,
            id="-".join(map(str, point)),
            marks=() if point in quick else pytest.mark.full,
        )
        for point in sorted(points, key=lambda point: point not in quick)
    ]


def array(
    axes: Mapping[str, Sequence[Any]],
    valid: Callable[[dict[str, Any]], bool],
    strength: int = 2,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Valid points of a grid that is too large to list, with all combinations of values
    of any `strength` axes that some valid point has; the same ones each time."""
    drawn, misses = random.Random(seed), 0
    seen: set[Any] = set()

    def new(point: dict[str, Any]) -> set[Any]:
        return {*combinations(point.items(), strength)} - seen

    while misses < 20:
        points = [{k: drawn.choice(v) for k, v in axes.items()} for _ in range(40)]
        best = max(filter(valid, points), key=lambda p: len(new(p)), default={})
        misses = 0 if new(best) else misses + 1
        if new(best):
            seen |= new(best)
            yield best
