"""The ring of slots: paged chunk number c always uses slot `c mod n_buffer`.

Everything that search and runtime both need to know about slots stands here once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from ..errors import ConfigError
from ..types import Layout, Placement
from .shards import padded_bytes


def slot_floor(layout: Layout, placements: Sequence[Placement]) -> int:
    """Fewest slots that can run: as many as one block has paged chunks.

    The chunks of a block have consecutive numbers, so that many slots hold them all.
    """
    through_slots = Placement.PAGED
    paged = [
        chunk.block
        for chunk, placement in zip(layout.chunks, placements, strict=True)
        if placement is through_slots
    ]
    return max(Counter(paged).values(), default=0)


def slot_bytes(
    layout: Layout, placements: Sequence[Placement], n_buffer: int, shards: int = 1
) -> tuple[int, ...]:
    """Size of each slot in bytes: the largest chunk that the ring sends through it,
    padded to whole shards."""
    through_slots = Placement.PAGED
    paged = [
        chunk.nbytes if shards == 1 else padded_bytes(chunk, shards)
        for chunk, placement in zip(layout.chunks, placements, strict=True)
        if placement is through_slots
    ]
    return tuple(max(paged[slot::n_buffer], default=0) for slot in range(n_buffer))


def check_slots(layout: Layout, placements: Sequence[Placement], n_buffer: int) -> None:
    """Refuse a number of slots outside the legal range.

    Raises:
        ConfigError: Fewer than `slot_floor`, or more than there are paged chunks.
    """
    num_paged = sum(placement is Placement.PAGED for placement in placements)
    floor = slot_floor(layout, placements)
    if not floor <= n_buffer <= num_paged:
        raise ConfigError(
            f"protrain_n_buffer_override: {n_buffer} slots for {num_paged} paged "
            f"chunks is outside the legal range {floor} to {num_paged}: one block "
            f"needs {floor} at once, and more than {num_paged} would stand idle."
        )


@lru_cache(maxsize=None)
def spread_order(total: int) -> tuple[int, ...]:
    """All positions in the order in which they become resident.

    Each prefix is spread over the whole, and contains every shorter one: a larger
    budget only adds resident chunks, so it never makes a plan slower. Successive
    multiples of the golden ratio leave gaps of at most three sizes.
    """
    taken: dict[int, None] = {}
    point = 0.5
    for _ in range(total):
        position = int(point * total)
        while position in taken:
            position = (position + 1) % total
        taken[position] = None
        point = (point + GOLDEN_RATIO) % 1.0
    return tuple(taken)


GOLDEN_RATIO = 0.6180339887498949
