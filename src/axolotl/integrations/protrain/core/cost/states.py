"""Bytes of the model states: weights, gradients, optimizer moments.

The first term of the paper's peak (equations 8 to 11): resident chunks plus slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from ..layout import ALIGNMENT_BYTES, aligned, padded_bytes, slot_bytes
from ..layout.shards import PAGE_BYTES
from ..types import IN_FLIGHT, Chunk, Layout, Placement, Workload

STEP_BYTES = 4
"""AdamW's step count, an fp32 scalar of each parameter."""


@dataclass(frozen=True)
class StateBytes:
    """Device bytes of the states under a plan, by term.

    Attributes:
        fixed: Frozen weights and buffers outside blocks that never move.
        adapters: Trainable weights that never move.
        resident: Weights of resident chunks.
        host_state: Weights that stay while their gradients and moments do not.
        slots: The ring.
        moments: Optimizer state of what trains on the device.
        gradients: Gradients of what trains on the device, all of them.
        buckets: Copy of `gradients` that DDP reduces, there from the start.
        reduction: Buffers in which gradients for the host are reduced.
    """

    fixed: int
    adapters: int
    resident: int
    host_state: int
    slots: int
    moments: int
    gradients: int
    buckets: int
    reduction: int

    @property
    def weights(self) -> int:
        """What is there from opening to closing, before any step."""
        placed = self.fixed + self.adapters + self.resident + self.host_state
        return placed + self.slots + self.buckets + self.reduction


def state_bytes(
    layout: Layout,
    placements: Sequence[Placement],
    n_buffer: int,
    workload: Workload,
    shards: int,
    packed_bytes: Sequence[int],
) -> StateBytes:
    """Device bytes of the states. `packed_bytes` is of each chunk what its gradients
    take while they are reduced, empty with one rank."""
    # in one pass: a search asks for hundreds
    on_device, state_on_host = Placement.RESIDENT, Placement.HOST_STATE
    resident = host_state = 0
    trained_bytes = layout.fixed_trainable_bytes
    num_trained = layout.num_fixed_trainable
    leaving: list[Chunk] = []
    for chunk, placement in zip(layout.chunks, placements, strict=True):
        if placement is on_device:
            # tensor by tensor; only what has a host copy lies there in one piece
            resident += chunk.payload_bytes
            if chunk.trainable:
                trained_bytes += chunk.payload_bytes
                num_trained += len(chunk.tensors)
            continue
        if placement is state_on_host:
            host_state += padded_bytes(chunk, shards)
        if chunk.trainable:
            leaving.append(chunk)
    reduction = 0
    if packed_bytes and leaving:
        reduction = IN_FLIGHT * max(packed_bytes[chunk.index] for chunk in leaving)
        if workload.accumulation > 1:
            # the sums of earlier micro-batches come back from the host
            reduction += max(_sum_bytes(chunk, workload) for chunk in leaving)
    moments = round(workload.moment_copies * trained_bytes)
    return StateBytes(
        fixed=layout.fixed_frozen_bytes,
        adapters=layout.fixed_trainable_bytes,
        resident=resident,
        host_state=host_state,
        slots=sum(slot_bytes(layout, placements, n_buffer, shards)),
        moments=moments + STEP_BYTES * num_trained,
        gradients=trained_bytes,
        buckets=trained_bytes if workload.world.size > 1 else 0,
        reduction=reduction,
    )


@dataclass(frozen=True)
class HostBytes:
    """Host bytes of a node under a plan, by term.

    Attributes:
        arena: Weights of every chunk that is kept there.
        gradients: Their gradients, in fp32 where there are masters; with several
            ranks that accumulate also the sums of each.
        masters: fp32 masters.
        moments: Optimizer state of what trains on the host.
        staging: Buffers in which gradients of later micro-batches land.
        swapped: Saved tensors of swapped blocks.
        loader: Batches that wait in the dataloader.
    """

    arena: int
    gradients: int
    masters: int
    moments: int
    staging: int
    swapped: int = 0
    loader: int = 0

    @property
    def total(self) -> int:
        return sum(astuple(self))


def host_state_bytes(
    layout: Layout, placements: Sequence[Placement], workload: Workload, shards: int = 1
) -> HostBytes:
    """Host bytes of the arena and of what trains there, for all ranks of a node."""
    ranks, several = workload.world.local_size, workload.world.size > 1
    kept = [chunk for chunk in layout.chunks if placements[chunk.index].on_host]
    trained = [chunk for chunk in kept if chunk.trainable]
    mastered = workload.fp32_master * sum(c.payload_16_bit_bytes for c in trained)
    masters = 2 * mastered
    gradients = sum(chunk.payload_bytes for chunk in trained) - mastered + masters
    largest = max((chunk.nbytes for chunk in trained), default=0)
    # several ranks map it, each chunk from a page of its own
    alignment = PAGE_BYTES if several else ALIGNMENT_BYTES
    sums = 0
    if several and workload.accumulation > 1:
        sums = ranks * sum(_sum_bytes(chunk, workload) for chunk in trained)
    return HostBytes(
        arena=sum(aligned(padded_bytes(c, shards), alignment) for c in kept),
        gradients=gradients + sums,
        masters=masters,
        moments=2 * gradients,
        staging=ranks * IN_FLIGHT * largest,
        loader=ranks * workload.loader_bytes,
    )


def _sum_bytes(chunk: Chunk, workload: Workload) -> int:
    """Sums of micro-batches on one rank, in fp32 where there are masters."""
    return chunk.nbytes + workload.fp32_master * chunk.payload_16_bit_bytes
