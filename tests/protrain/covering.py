"""Few points of a grid that hold all pairs of its values."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
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
