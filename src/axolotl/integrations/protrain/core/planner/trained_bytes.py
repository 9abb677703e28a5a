"""Bytes of the model states: weights, gradients, optimizer state.

The first term of the paper's peak (equations 8 to 11): resident chunks plus slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property

from ..layout import (
    aligned,
    main_chunk,
    master_chunk,
    padded_bytes,
    slot_bytes,
    span_bytes,
    spans,
)
from ..layout.shards import PAGE_BYTES
from ..types import (
    GRAD_PIECE_BYTES,
    IN_FLIGHT,
    STATE_ALIGNMENT_BYTES,
    Chunk,
    Layout,
    Placement,
    Update,
    Workload,
    main_grads_in_fp32,
)


def adamw_bytes(nbytes: int) -> tuple[int, ...]:
    """AdamW's state of a parameter: two moments and an fp32 scalar, its steps."""
    return nbytes, nbytes, 4


class TrainedBytes:
    """What the trained chunks of a layout take in a step beside their weights, each
    list by the index of a chunk: 0 for a frozen one."""

    def __init__(self, layout: Layout, workload: Workload) -> None:
        self.layout, self.workload = layout, workload
        self.main_grads_fp32 = main_grads_in_fp32(
            workload.fp32_master,
            workload.accumulation > 1,
            workload.world,
            workload.update,
        )
        """Gradients with masters add up in fp32."""

    @cached_property
    def _states(self) -> list[list[tuple[int, ...]]]:
        """Bytes of the tensors of the state of each tensor of each chunk."""
        known = self.workload.state_bytes
        return [
            [
                adamw_bytes(spec.nbytes) if known is None else known[spec.name]
                for spec in main_chunk(chunk, self.workload.fp32_master).tensors
            ]
            if chunk.trainable
            else []
            for chunk in self.layout.chunks
        ]

    @cached_property
    def sums(self) -> list[Chunk]:
        """Their gradients, laid out as they add up."""
        return [main_chunk(chunk, self.main_grads_fp32) for chunk in self.layout.chunks]

    @cached_property
    def state(self) -> list[int]:
        """All of their optimizer state."""
        return [sum(map(sum, states)) for states in self._states]

    @cached_property
    def region(self) -> list[int]:
        """The same as it lies on the host."""
        return [sum(map(_region_bytes, states)) for states in self._states]

    @cached_property
    def managed(self) -> list[int]:
        """What of it the driver may move to the host where the device updates it."""
        managed = self.workload.managed_bytes
        return [
            sum(managed.get(spec.name, 0) for spec in chunk.tensors)
            for chunk in self.layout.chunks
        ]

    @cached_property
    def fixed_state(self) -> int:
        """State of what never leaves the device, on the device."""
        known, managed = self.workload.state_bytes, self.workload.managed_bytes
        layout = self.layout
        if known is None:
            steps = adamw_bytes(0)[-1] * layout.num_fixed_trainable
            return 2 * layout.fixed_trainable_bytes + steps
        everything = sum(map(sum, known.values())) - sum(managed.values())
        return everything - sum(self.state) + sum(self.managed)

    @cached_property
    def masters(self) -> list[int]:
        """fp32 masters of its 16-bit weights."""
        return [
            master_chunk(chunk).nbytes
            if chunk.trainable and self.workload.fp32_master
            else 0
            for chunk in self.layout.chunks
        ]

    @cached_property
    def operands(self) -> list[int]:
        """What comes beside the weights at once: gradients, masters and state for an
        update, of several ranks with the paged weights of the largest span; or sums."""
        size = self.workload.world.local_size
        trained = [chunk for chunk in self.layout.chunks if chunk.trainable]
        found = [0] * len(self.layout.chunks)
        for chunk, own in zip(trained, spans(trained, size), strict=True):
            sums = self.sums[chunk.index]
            if self.workload.accumulation > 1:
                found[chunk.index] = aligned(sums.nbytes)
            if self.workload.update is Update.DEVICE:
                most = max(self._operands(chunk, sums, span) for span in own)
                found[chunk.index] = max(found[chunk.index], most)
        return found

    def _operands(self, chunk: Chunk, sums: Chunk, span: range) -> int:
        """Of a span of a chunk for its update."""
        w, states = self.workload, self._states[chunk.index]
        region = sum(_region_bytes(states[index]) for index in span)
        parts = [span_bytes(sums, span)]
        if w.fp32_master:
            parts.append(span_bytes(master_chunk(chunk), span))
        if w.world.size > 1 and chunk.pageable:
            parts.append(span_bytes(chunk, span))
        return aligned(region) + sum(aligned(p.stop - p.start) for p in parts)

    @cached_property
    def update(self) -> list[int]:
        """What an update of the chunk alone takes on top."""
        return [
            self._update(chunk) if chunk.trainable else 0
            for chunk in self.layout.chunks
        ]

    def _update(self, chunk: Chunk) -> int:
        w = self.workload
        if w.update is Update.HOST:
            return 0
        main = [tensor.nbytes for tensor in main_chunk(chunk, w.fp32_master).tensors]
        single = max(main)
        if w.fp32_master and not self.main_grads_fp32:
            # one after the other, with its gradient in fp32
            copies = 1 + w.update_copies + w.update_parameter_copies
            return round(copies * single)
        whole = w.update_copies * sum(main)
        return round(whole + w.update_parameter_copies * single)


def _region_bytes(tensors: tuple[int, ...]) -> int:
    """Of the state of a tensor where it lies on the host or in staging."""
    return sum(aligned(nbytes, STATE_ALIGNMENT_BYTES) for nbytes in tensors)


@dataclass(frozen=True)
class StateBytes:
    """Device bytes of the states under a plan, by term.

    Attributes:
        fixed: Frozen weights and buffers outside blocks that never move.
        adapters: Their weights, and other trainable ones that never move.
        resident: Weights of resident chunks.
        host_state: Weights that stay while their gradients and moments do not.
        slots: The ring.
        operands: Two buffers for what comes from the host, to be updated or to be added
            to: gradients and optimizer state of blocks, of several ranks weights too.
        moments: Optimizer state of what trains on the device.
        gradients: Gradients of what trains on the device, all of them.
        buckets: Copy of `gradients` that DDP reduces, there from the start.
    """

    fixed: int
    adapters: int
    resident: int
    host_state: int
    slots: int
    operands: int
    moments: int
    gradients: int
    buckets: int

    @property
    def weights(self) -> int:
        """What is there from opening to closing, before any step."""
        placed = self.fixed + self.adapters + self.resident + self.host_state
        return placed + self.slots + self.buckets


def state_bytes(
    trained: TrainedBytes, placements: Sequence[Placement], n_buffer: int, shards: int
) -> StateBytes:
    """Device bytes of the states."""
    # in one pass: a search asks for hundreds
    layout, workload = trained.layout, trained.workload
    on_device, state_on_host = Placement.RESIDENT, Placement.OPTIMIZER_OFFLOADED
    resident = host_state = 0
    trained_bytes = adapters = layout.fixed_trainable_bytes
    fixed = layout.fixed_frozen_bytes
    moments = trained.fixed_state
    leaving: list[Chunk] = []
    for chunk, placement in zip(layout.chunks, placements, strict=True):
        if placement is Placement.HOST_LOOKUP:
            # one element stands for all
            fixed += chunk.tensors[0].dtype.itemsize
        elif placement is on_device and chunk.rows_bytes:
            fixed += chunk.payload_bytes
        elif placement is on_device:
            # tensor by tensor; only what has a host copy lies there in one piece
            adapters += chunk.adapter * chunk.payload_bytes
            resident += (not chunk.adapter) * chunk.payload_bytes
            if chunk.trainable:
                trained_bytes += chunk.payload_bytes
                moments += trained.state[chunk.index] - trained.managed[chunk.index]
            continue
        if placement is state_on_host:
            adapters += chunk.adapter * chunk.nbytes
            host_state += (not chunk.adapter) * padded_bytes(chunk, shards)
        if chunk.trainable:
            leaving.append(chunk)
    largest = max(
        (trained.operands[c.index] for c in leaving if c.block is not None), default=0
    )
    if not largest and workload.accumulation > 1:
        # sums outside blocks come back through buffers of their own then
        whole = max((chunk.payload_bytes for chunk in leaving), default=0)
        largest = aligned(min(whole, GRAD_PIECE_BYTES))
    return StateBytes(
        fixed=fixed,
        adapters=adapters,
        resident=resident,
        host_state=host_state,
        slots=sum(slot_bytes(layout, placements, n_buffer, shards)),
        operands=IN_FLIGHT * largest,
        moments=moments,
        gradients=trained_bytes,
        buckets=trained_bytes if workload.world.size > 1 else 0,
    )


@dataclass(frozen=True)
class HostBytes:
    """Host bytes of a node under a plan, by term.

    Attributes:
        arena: Weights of every chunk that is kept there.
        gradients: Their gradients, in fp32 where there are masters, unless a rank
            alone does not accumulate; with several ranks that do also the sums of each.
        masters: What fp32 masters have beyond their weights.
        moments: Optimizer state of what has it on the host, or in managed memory.
        swapped: Saved tensors of swapped blocks.
        loader: Batches that wait in the dataloader.
        rows: Of embeddings that the host looks up, on their way.
    """

    arena: int
    gradients: int
    masters: int
    moments: int
    swapped: int = 0
    loader: int = 0
    rows: int = 0

    @property
    def total(self) -> int:
        return sum(astuple(self))


def host_state_bytes(
    held: TrainedBytes, placements: Sequence[Placement], shards: int = 1
) -> HostBytes:
    """Host bytes of the arena and of what trains there, for all ranks of a node."""
    layout, workload = held.layout, held.workload
    ranks, several = workload.world.local_size, workload.world.size > 1
    kept = [chunk for chunk in layout.chunks if placements[chunk.index].on_host]
    trained = [chunk for chunk in kept if chunk.trainable]
    gradients = sum(held.sums[chunk.index].nbytes for chunk in trained)
    if several and workload.accumulation > 1:
        # sums of each, and their average
        gradients += ranks * gradients
    managed = sum(workload.managed_bytes.values())
    managed -= sum(held.managed[chunk.index] for chunk in trained)
    return HostBytes(
        arena=sum(aligned(padded_bytes(c, shards), PAGE_BYTES) for c in kept),
        gradients=gradients,
        masters=sum(held.masters[chunk.index] for chunk in trained),
        moments=sum(held.region[chunk.index] for chunk in trained) + ranks * managed,
        loader=ranks * workload.loader_bytes,
        rows=ranks * sum(chunk.rows_bytes for chunk in kept),
    )
