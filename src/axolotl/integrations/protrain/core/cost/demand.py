"""What an optimizer step computes, moves and updates, in no order yet; seconds and bytes.

Weights whose optimizer state is on the host are updated there (`HostWork`) or, as they are
used next, on the device (`DeviceWork`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from ..layout import main_chunk, padded_bytes, shard_bytes
from ..types import (
    ADAM_MOVED_BYTES,
    BlockTimes,
    Chunk,
    Hardware,
    Layout,
    Moved,
    Placement,
    Plan,
    Update,
    Workload,
)
from .states import TrainedBytes

COMMUNICATE = "communicate"
"""The lane of collectives, where there are several ranks."""


def norm_seconds(nbytes: int, hardware: Hardware) -> float:
    """The norm of that many bytes of gradients, on the device."""
    return nbytes / hardware.memory_bytes_s


def update_seconds(weight_bytes: int, state_bytes: int, hardware: Hardware) -> float:
    """An update on the device: reads gradients, weights and state, writes the last two;
    clipping reads and writes gradients before."""
    return (5 * weight_bytes + 2 * state_bytes) / hardware.memory_bytes_s


class Traffic(NamedTuple):
    """Traffic of forward or backward and what it costs, seconds per byte."""

    fetch_bytes: int
    offload_bytes: int
    fetch_s: float
    offload_s: float


class HostWork(NamedTuple):
    """Of one host-kept trained chunk: gradient bytes that leave in a micro-batch, and
    seconds of the host to add them up, for their norm and for the update.

    With several ranks `part_bytes` leave in the last micro-batch instead, after a
    reduction, and `part_sum_s` is what the host adds then.
    """

    nbytes: int
    first_sum_s: float
    later_sum_s: float
    norm_s: float
    update_s: float
    part_bytes: int
    part_sum_s: float


def host_work(chunk: Chunk, hardware: Hardware, workload: Workload) -> HostWork:
    """What training a chunk costs each rank when its state is on the host."""
    moved_s = 1 / (ADAM_MOVED_BYTES * hardware.adam_bytes_s)
    mastered = chunk.payload_16_bit_bytes if workload.fp32_master else 0
    own, masters = chunk.payload_bytes - mastered, 2 * mastered
    updated = own + masters
    # masters are rounded into the weights, clipping reads and writes gradients
    moved = ADAM_MOVED_BYTES * updated + masters + mastered + 2 * updated
    # a gradient without a master is copied straight into its buffer at first
    first_sum_s = moved_s * (mastered + masters)
    later_sum_s = moved_s * (own + mastered + 2 * updated)
    part_sum_s, ranks = 0.0, workload.world.local_size
    if workload.world.size > 1:
        # until they are reduced, sums are as wide as the gradients
        part_sum_s, first_sum_s = first_sum_s / ranks, 0.0
        later_sum_s = 3 * moved_s * chunk.payload_bytes
    return HostWork(
        own + mastered,
        first_sum_s,
        later_sum_s,
        updated / (hardware.norm_bytes_s * ranks),
        moved_s * moved / ranks,
        -(-chunk.payload_bytes // ranks),
        part_sum_s,
    )


class DeviceWork(NamedTuple):
    """Of one host-kept trained chunk that the device updates, with its number among the
    paged ones, None if it stays.

    Attributes:
        nbytes: Gradients that leave in a micro-batch.
        operand_bytes: Gradients and state that come for the update.
        weight_bytes: Go home after it; so do `state_bytes`.
        sum_bytes: Come in each later micro-batch, to be added to.
        norm_s: Of the device, in the last micro-batch.
    """

    chunk: int
    number: int | None
    nbytes: int
    operand_bytes: int
    weight_bytes: int
    state_bytes: int
    sum_bytes: int
    update_s: float
    sum_s: float
    norm_s: float


def device_work(
    chunk: Chunk, number: int | None, trained: TrainedBytes, hardware: Hardware
) -> DeviceWork:
    """What training a chunk costs when its state is on the host and its update is not."""
    state = trained.region[chunk.index] + trained.rests[chunk.index]
    # gradients as they add up
    main, own = main_chunk(chunk, trained.sums_fp32), chunk.payload_bytes
    read = trained.state[chunk.index] + trained.rests[chunk.index]
    return DeviceWork(
        chunk.index,
        number,
        main.payload_bytes,
        main.nbytes + state,
        chunk.nbytes,
        state,
        # weights outside blocks are tensors of their own, and come without gaps
        main.nbytes if chunk.pageable else main.payload_bytes,
        update_seconds(own, read, hardware),
        # two are read, one is written
        3 * main.payload_bytes / hardware.memory_bytes_s,
        norm_seconds(main.payload_bytes, hardware),
    )


class HostUpdate(NamedTuple):
    """Host update of one chunk; `number` among the paged ones, None if it stays. Then
    `nbytes` are fetched for it, and gathered in `gather_s`."""

    number: int | None
    chunk: int
    nbytes: int
    gather_s: float
    seconds: float


class Demand:
    """What a step computes, moves and updates, in no order yet; see `simulate_step`."""

    def __init__(
        self,
        layout: Layout,
        plan: Plan,
        times: BlockTimes,
        hardware: Hardware,
        workload: Workload,
        moved: Moved | None = None,
        trained: TrainedBytes | None = None,
    ) -> None:
        self._shards, world = plan.shards, workload.world
        self.overlaps = hardware.overlaps
        self.accumulation, self.reduces = workload.accumulation, world.size > 1
        self.defers = workload.update is Update.DEVICE
        # seconds per byte: of an all-gather's result, of sums over all ranks of which
        # each rank of a node gets a part; 0 where there is nobody to do it with
        inside, across = world.local_size > 1, world.num_nodes > 1
        self.gathering_s = 1 / hardware.gather_bytes_s if inside else 0.0
        self.scatter_s = 1 / hardware.reduce_bytes_s if inside else 0.0
        if across:
            self.scatter_s += 1 / (world.local_size * hardware.across_bytes_s)
        self.moved = moved or Moved(*[(0,) * len(layout.blocks)] * 2)
        self.swaps = [policy.swaps for policy in plan.policies]
        self.forward_s = times.forward_s
        again = [
            seconds * policy.recomputes
            for seconds, policy in zip(times.forward_s, plan.policies, strict=True)
        ]
        self.recompute_s = sum(again)
        self.backward_s = [
            seconds + more
            for seconds, more in zip(times.backward_s, again, strict=True)
        ]
        self.outside_s = times.outside_forward_s + times.outside_backward_s
        self.update_s = times.update_s

        paged = [layout.chunks[index] for index in plan.paged]
        self.num_chunks, self.num_slots = len(paged), plan.n_buffer
        self.chunk_bytes = [shard_bytes(chunk, plan.shards) for chunk in paged]
        self.gather_s = [self._gather_s(chunk) for chunk in paged]
        # of the two ways that a shard goes
        gathers = plan.shards * self.gathering_s > 1 / hardware.fetch_bytes_s
        self.slower = COMMUNICATE if plan.shards > 1 and gathers else "fetch"
        # chunks of each block, by their numbers among the paged ones
        paging = [
            sum(plan.placements[c] is Placement.PAGED for c in block.chunks)
            for block in layout.blocks
        ]
        self.bounds = list(pairwise(accumulate(paging, initial=0)))
        self.updates: list[HostUpdate] = []
        self.norm_s = 0.0
        # of each block and last of what is outside them
        self._works: list[list[HostWork]] = [[] for _ in range(len(layout.blocks) + 1)]
        self._deferred: list[list[DeviceWork]] = [[] for _ in self._works]
        trained = trained or TrainedBytes(layout, workload)
        self._add_training(layout, plan, hardware, trained)
        every: Sequence[Sequence[Any]] = self._deferred if self.defers else self._works
        # `DeviceWork` if the device updates, else `HostWork`
        *self.gradients, self.outside = every
        self._add_traffic(hardware)

    def _gather_s(self, chunk: Chunk) -> float:
        n = self._shards
        return padded_bytes(chunk, n) * self.gathering_s if n > 1 else 0.0

    def _add_training(
        self, layout: Layout, plan: Plan, hardware: Hardware, trained: TrainedBytes
    ) -> None:
        """Gradients and updates: of the host, and what DDP reduces of the device's."""
        numbers = {index: number for number, index in enumerate(plan.paged)}
        on_device = [0] * len(layout.blocks) + [layout.fixed_trainable_bytes]
        for chunk in layout.chunks:
            at = -1 if chunk.block is None else chunk.block
            number = numbers.get(chunk.index)
            if not chunk.trainable:
                continue
            if not plan.placements[chunk.index].on_host:
                on_device[at] += chunk.payload_bytes
            elif self.defers:
                deferred = device_work(chunk, number, trained, hardware)
                self._deferred[at].append(deferred)
            else:
                work = host_work(chunk, hardware, trained.workload)
                self._works[at].append(work)
                self.norm_s += work.norm_s
                fetched = shard_bytes(chunk, plan.shards), self._gather_s(chunk)
                update = HostUpdate(number, chunk.index, *fetched, work.update_s)
                self.updates.append(update)
        # `Session` updates first what forward reads first: outside the blocks
        self.updates.sort(key=lambda u: layout.chunks[u.chunk].block is not None)
        # of DDP, when each block's backward is done
        *inside, outside = on_device
        each = outside / len(inside) if inside else 0.0
        rate = self.scatter_s + self.gathering_s
        self.shared_s = [rate * (nbytes + each) for nbytes in inside]

    def _add_traffic(self, hardware: Hardware) -> None:
        """What forward and backward fetch and send, and how often."""
        stale = {u.number for u in self.updates if u.number is not None}
        kept = range(min(self.num_slots, self.num_chunks))
        self.missing_later = list(range(len(kept), self.num_chunks))
        self.missing_first = [c for c in kept if c in stale] + self.missing_later
        self.missing_backward = list(range(self.num_chunks - len(kept)))
        refreshed = sum(u.nbytes for u in self.updates if u.number is None)
        out, back = sum(self.moved.out), sum(self.moved.back)
        works = [work for works in self._works for work in works]
        deferred = [work for works in self._deferred for work in works]
        gradients = sum(w.nbytes for w in works) + sum(w.nbytes for w in deferred)
        parts = sum(work.part_bytes for work in works)
        operands = sum(work.operand_bytes for work in deferred)
        self.returned_bytes = sum(w.weight_bytes + w.state_bytes for w in deferred)

        def phase(chunks: list[int], more: int, offload_bytes: int) -> Traffic:
            fetch_bytes = sum(self.chunk_bytes[c] for c in chunks) + more
            return _traffic(fetch_bytes, offload_bytes, hardware)

        again = self.accumulation - 1
        home = out + self.returned_bytes
        self.first = phase(self.missing_first, refreshed + operands, home)
        self.later = phase(self.missing_later, 0, out)
        self.backward = self.last = phase(self.missing_backward, back, gradients)
        # of one micro-batch that is unlike the others: of several ranks the last one,
        # in which what earlier ones have added up comes back, else the first
        odd, others = self.backward, self.backward
        if self.reduces:
            sums = gradients if again else 0
            odd = self.last = phase(self.missing_backward, back + sums, parts)
        elif self.defers:
            sums = sum(work.sum_bytes for work in deferred)
            others = phase(self.missing_backward, back + sums, gradients)
        self.adding = others
        passes = [self.first, odd, *again * (self.later, others)]
        fetched = sum(traffic.fetch_bytes for traffic in passes)
        offloaded = sum(traffic.offload_bytes for traffic in passes)
        self.least_s = self._least_s(passes, deferred)
        # without swapped activations
        self.fetched_bytes = fetched - self.accumulation * back
        offloaded -= self.accumulation * out
        self.offloaded_bytes = offloaded - self.returned_bytes

    def _least_s(self, passes: list[Traffic], deferred: list[DeviceWork]) -> float:
        """The step is not shorter: compute, with the copies in whose time it has nothing
        else to do, and copies each way."""
        again = self.accumulation - 1
        micro_batch_s = sum(self.forward_s) + sum(self.backward_s) + self.outside_s
        compute_s = self.update_s + self.accumulation * micro_batch_s
        compute_s += sum(w.update_s + w.norm_s + again * w.sum_s for w in deferred)
        compute_s += self.first.fetch_s * sum(
            work.operand_bytes for work in self._deferred[-1]
        )
        return max(
            compute_s,
            sum(traffic.fetch_bytes * traffic.fetch_s for traffic in passes),
            sum(traffic.offload_bytes * traffic.offload_s for traffic in passes),
        )


def _traffic(fetch_bytes: int, offload_bytes: int, hardware: Hardware) -> Traffic:
    """As much of each direction as the other has work for goes at the rate for both."""
    fetch_s, offload_s = 1 / hardware.fetch_bytes_s, 1 / hardware.offload_bytes_s
    fetching, offloading = fetch_bytes * fetch_s, offload_bytes * offload_s
    both = min(fetching, offloading)
    if hardware.overlaps and both:
        fetch_both_s = 1 / hardware.fetch_both_bytes_s
        offload_both_s = 1 / hardware.offload_both_bytes_s
        fetch_s += both / fetching * (fetch_both_s - fetch_s)
        offload_s += both / offloading * (offload_both_s - offload_s)
    return Traffic(fetch_bytes, offload_bytes, fetch_s, offload_s)
