"""The ring of slots: paged chunk number c always uses slot `c mod n_buffer`.

Everything that search and runtime both need to know about slots stands here once.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConfigError
from ..types import Layout, Placement


def slot_floor(layout: Layout, placements: Sequence[Placement]) -> int:
    """Fewest slots that can run: as many as one block has paged chunks.

    The chunks of a block have consecutive numbers, so that many slots hold them all.
    """
    return max(
        (
            sum(placements[chunk] is Placement.PAGED for chunk in block.chunks)
            for block in layout.blocks
        ),
        default=0,
    )


def slot_bytes(
    layout: Layout, placements: Sequence[Placement], n_buffer: int
) -> tuple[int, ...]:
    """Size of each slot in bytes: the largest chunk that the ring sends through it."""
    paged = [c for c in layout.chunks if placements[c.index] is Placement.PAGED]
    return tuple(
        max((chunk.nbytes for chunk in paged[slot::n_buffer]), default=0)
        for slot in range(n_buffer)
    )


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


def spread_evenly(count: int, total: int) -> frozenset[int]:
    """Choose `count` of `total` positions with even gaps, centred.

    Resident chunks between paged ones give each transfer more compute to hide behind;
    at both ends the ring already saves a transfer.
    """
    return frozenset((2 * k + 1) * total // (2 * count) for k in range(count))
