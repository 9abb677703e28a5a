"""Bytes of the model states: weights, gradients, optimizer moments.

The first term of the paper's peak (equations 8 to 11): resident chunks plus slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from ..layout import aligned, slot_bytes
from ..types import Chunk, Layout, Placement

RESIDENT_TRAINABLE_COPIES = 4
"""Weight, gradient and AdamW's two moments, all in the weight's dtype."""

STEP_BYTES = 4
"""AdamW's step count, an fp32 scalar of each parameter."""

GRADIENTS_IN_FLIGHT = 3
"""Two chunks on their way to the host and the one whose gradients are being made."""

STAGING_BUFFERS = 2
"""Host buffers, as large as the largest trainable chunk, for sums of gradients."""


@dataclass(frozen=True)
class StateBytes:
    """Device bytes of the states under a plan, by term.

    Attributes:
        fixed: Weights and buffers outside blocks that never move, frozen.
        adapters: Trainable weights that never move, their gradients and moments.
        resident: Resident chunks; gradients and moments too where they train.
        host_state: Weights on the device whose gradients and moments are not.
        slots: The ring.
        gradients: Gradients on their way to the host.
    """

    fixed: int
    adapters: int
    resident: int
    host_state: int
    slots: int
    gradients: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def state_bytes(
    layout: Layout, placements: Sequence[Placement], n_buffer: int
) -> StateBytes:
    """Peak device bytes of the states, reached in backward or at the update."""

    def placed(placement: Placement) -> list[Chunk]:
        return [c for c in layout.chunks if placements[c.index] is placement]

    leaving = sorted(
        (c.nbytes for c in layout.chunks if c.trainable and _on_host(placements, c)),
        reverse=True,
    )
    return StateBytes(
        fixed=layout.fixed_frozen_bytes,
        adapters=RESIDENT_TRAINABLE_COPIES * layout.fixed_trainable_bytes
        + STEP_BYTES * layout.num_fixed_trainable,
        resident=sum(map(resident_bytes, placed(Placement.RESIDENT))),
        host_state=sum(c.nbytes for c in placed(Placement.HOST_STATE)),
        slots=sum(slot_bytes(layout, placements, n_buffer)),
        gradients=sum(leaving[:GRADIENTS_IN_FLIGHT]),
    )


def resident_bytes(chunk: Chunk) -> int:
    """Device bytes of a resident chunk."""
    if not chunk.trainable:
        return chunk.nbytes
    return RESIDENT_TRAINABLE_COPIES * chunk.nbytes + STEP_BYTES * len(chunk.tensors)


def host_bytes(
    layout: Layout, placements: Sequence[Placement], fp32_master: bool
) -> int:
    """Host bytes of the arena, host gradients, their staging, masters and moments."""
    trained = [c for c in layout.chunks if c.trainable and _on_host(placements, c)]
    total = STAGING_BUFFERS * max((chunk.nbytes for chunk in trained), default=0)
    for chunk in layout.chunks:
        if not _on_host(placements, chunk):
            continue
        total += aligned(chunk.nbytes)
        if not chunk.trainable:
            continue
        for tensor in chunk.tensors:
            # gradient, two moments and, with masters, the master itself, all fp32
            has_master = fp32_master and tensor.is_16_bit
            total += 16 * tensor.numel if has_master else 3 * tensor.nbytes
            total += STEP_BYTES
    return total


def _on_host(placements: Sequence[Placement], chunk: Chunk) -> bool:
    return placements[chunk.index].on_host
