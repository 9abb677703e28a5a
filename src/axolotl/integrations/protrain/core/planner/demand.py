"""All that an optimizer step computes, moves and updates, in no order yet; seconds and
bytes.

Weights whose optimizer state is on the host are updated on the device, as they are used
next, or where several ranks each update a part, when the step is made; or on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from ..layout import padded_bytes, shard_bytes
from ..types import (
    ADAM_MOVED_BYTES,
    BlockTimes,
    Chunk,
    Hardware,
    Moved,
    Placement,
    Plan,
    Update,
)
from .trained_bytes import TrainedBytes

COMMUNICATE = "communicate"
"""The lane of collectives, where there are several ranks."""
DISK = "disk"
"""The lane of reads from the disk, where frozen weights lie on one."""
LAUNCH_S = 10e-6
"""Most seconds that a launch alone takes: 9 to 13 µs were measured beside an H100."""
QUEUED_GRADIENT, QUEUED_UPDATE = 25, 55
"""Launches in whose time the thread sends a trained tensor's gradient to the host, and
updates one whose state is there: 70 and 160 µs where a launch takes 1.6 µs (a CPU), about
250 and 550 µs where it takes 11 (beside an H100)."""

QUEUED_PIECE = 14
"""Launches in whose time it queues a piece of a packed weight: two copies, two events, four
operators. Beside an H200 a piece of either form came 170 µs after the one before."""


def update_seconds(weight_bytes: int, state_bytes: int, hardware: Hardware) -> float:
    """An update on the device: reads gradients, weights and state, writes the last two;
    clipping reads and writes gradients before."""
    return (5 * weight_bytes + 2 * state_bytes) / hardware.memory_bytes_s


class Traffic(NamedTuple):
    """Traffic of forward or backward and what it costs.

    Attributes:
        fetch_bytes: To the device; like `offload_bytes` without swapped activations.
        fetch_s: Seconds of each of these bytes; so is `offload_s`.
        back_s: Of each byte of swapped activations that comes back; `out_s` of each
            that leaves.
        fetching_s: Of all copies to the device; `offloading_s` of all from it.
    """

    fetch_bytes: int
    offload_bytes: int
    fetch_s: float
    offload_s: float
    back_s: float
    out_s: float
    fetching_s: float
    offloading_s: float


class TrainedWork(NamedTuple):
    """The work of one host-kept trained chunk, on each rank.

    Attributes:
        number: Among the paged ones, None if it stays.
        nbytes: Gradients that leave in a micro-batch; of several ranks, in the last one,
            what is reduced, of which `part_bytes` leave.
        sum_bytes: Come in each later micro-batch, to be added to.
        norm_s: Of the device, in the last micro-batch.
        operand_bytes: Come to the device for the update: gradients and state, of several
            ranks paged weights too.
        weight_bytes: Go to the host after it; so do `state_bytes`.
        update_s: Of the device, or of the host.
        renew_bytes: Come after it, where weights stay on the device, and are gathered in
            `gather_s`.
        queue_s: Of the calling thread, in each micro-batch.
        queue_update_s: Of the calling thread, for an update on the device.
    """

    chunk: int
    number: int | None
    nbytes: int
    part_bytes: int
    sum_bytes: int
    sum_s: float
    norm_s: float
    operand_bytes: int
    weight_bytes: int
    state_bytes: int
    update_s: float
    renew_bytes: int
    gather_s: float
    queue_s: float
    queue_update_s: float


def trained_work(
    chunk: Chunk,
    number: int | None,
    trained: TrainedBytes,
    hardware: Hardware,
    renew_bytes: int,
    gather_s: float,
) -> TrainedWork:
    """Count what training a chunk costs when its state is on the host."""
    workload, index = trained.workload, chunk.index
    ranks, several = workload.world.local_size, workload.world.size > 1
    main, own = trained.sums[index], chunk.payload_bytes
    state = trained.region[index] + trained.masters[index]
    read = trained.state[index] + trained.masters[index]
    operands, returned, back = main.nbytes + state, chunk.nbytes, state
    if several and number is not None or not renew_bytes:
        operands += chunk.nbytes
    update_s = update_seconds(own, read, hardware)
    if workload.update is Update.HOST:
        # clipping reads and writes gradients; weights are written beside their masters
        rounded = workload.fp32_master * chunk.payload_16_bit_bytes
        moved = (ADAM_MOVED_BYTES + 2) * (own + rounded) + rounded
        update_s = moved / (ADAM_MOVED_BYTES * hardware.adam_bytes_s)
        operands = returned = back = 0
    # a launch of the table of cards has a model's Python in it
    launch_s = len(chunk.tensors) * min(hardware.kernel_s, LAUNCH_S)
    return TrainedWork(
        index,
        number,
        main.payload_bytes,
        -(-main.payload_bytes // ranks),
        # weights outside blocks are tensors of their own, and come without gaps
        main.nbytes if chunk.block is not None else main.payload_bytes,
        # two are read, one is written
        3 * main.payload_bytes / hardware.memory_bytes_s,
        main.payload_bytes / hardware.memory_bytes_s / ranks,
        operands // ranks,
        returned // ranks,
        back // ranks,
        update_s / ranks,
        renew_bytes,
        gather_s,
        QUEUED_GRADIENT * launch_s,
        QUEUED_UPDATE * launch_s * (workload.update is Update.DEVICE) / ranks,
    )


class Demand:
    """All that a step computes, moves and updates, in no order yet; for `simulate`.

    Args:
        trained: Of the model's chunks and blocks, micro-batches, masters and ranks.
        plan: Where chunks live and what becomes of activations.
        times: Compute of one micro-batch under no plan; `update_s` of what has its state
            on the device under this one.
        hardware: `adam_bytes_s` counts the bytes of what AdamW updates: fp32 masters
            where there are any. Unless it `overlaps`, every copy runs on the calling
            thread, as compute does, and only host updates run beside it.
        moved: What swapping moves; needed only for plans that swap.
    """

    def __init__(
        self,
        trained: TrainedBytes,
        plan: Plan,
        times: BlockTimes,
        hardware: Hardware,
        moved: Moved | None = None,
    ) -> None:
        layout, workload = trained.layout, trained.workload
        self._shards, world = plan.shards, workload.world
        self.num_readers = world.local_size
        self.overlaps, self.shares_link = hardware.overlaps, hardware.shares_link
        self.accumulation, self.reduces = workload.accumulation, world.size > 1
        self.on_host = workload.update is Update.HOST
        self.defers = not self.on_host and not self.reduces
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

        def repeated(each: Sequence[float]) -> list[float]:
            pairs = zip(each, plan.policies, strict=True)
            return [seconds * policy.recomputes for seconds, policy in pairs]

        again = repeated(times.again_s)
        self.recompute_s = sum(again)
        none = (0.0,) * len(layout.blocks)
        self.queue_forward_s = times.queue_forward_s or none
        self.queue_backward_s = [
            seconds + more
            for seconds, more in zip(
                times.queue_backward_s or none,
                repeated(times.queue_recompute_s or none),
                strict=True,
            )
        ]
        self.backward_s = [
            seconds + more
            for seconds, more in zip(times.backward_s, again, strict=True)
        ]
        self.outside_s = times.outside_forward_s + times.outside_backward_s
        self.update_s = times.update_s
        looked_up = (
            chunk.rows_bytes
            for chunk, at in zip(layout.chunks, plan.placements, strict=True)
            if at is Placement.HOST_LOOKUP
        )
        self.rows_bytes = sum(looked_up)
        # read and written, by the host, and then copied
        host_bytes_s = ADAM_MOVED_BYTES * hardware.adam_bytes_s
        self.look_up_s = 2 * self.rows_bytes / host_bytes_s
        self.rows_s = self.rows_bytes / hardware.fetch_bytes_s

        paged = [layout.chunks[index] for index in plan.paged]
        self.num_chunks, self.num_slots = len(paged), plan.n_buffer
        stored = [chunk.in_pool for chunk in paged]
        self.chunk_bytes = [shard_bytes(chunk, plan.shards) for chunk in stored]
        unpacked = [trained.unpacked[chunk.index] for chunk in paged]
        self.unpack_s = [nbytes / hardware.memory_bytes_s for nbytes, _ in unpacked]
        launch_s = min(hardware.kernel_s, LAUNCH_S)
        self.queue_unpack_s = [QUEUED_PIECE * launch_s * count for _, count in unpacked]
        self.disk_s = self._disk_s(plan, paged, hardware)
        self.num_disk_buffers = plan.disk_buffers
        self.gather_s = [self._gather_s(chunk) for chunk in paged]
        # of the two ways that a shard goes
        gathers = plan.shards * self.gathering_s > 1 / hardware.fetch_bytes_s
        self.slower = COMMUNICATE if plan.shards > 1 and gathers else "fetch"
        # chunks of each block, by their numbers among the paged ones
        paging = [
            sum(plan.placements[c] is Placement.PARAM_OFFLOADED for c in block.chunks)
            for block in layout.blocks
        ]
        self.bounds = list(pairwise(accumulate(paging, initial=0)))
        # of each block and last of what is outside them
        works: list[list[TrainedWork]] = [[] for _ in range(len(layout.blocks) + 1)]
        self._add_training(trained, plan, hardware, works)
        *self.gradients, self.outside = works
        # in the order of the next forward: outside the blocks first
        self.works = [work for own in (self.outside, *self.gradients) for work in own]
        # operands of an update come in so many parts, of which two are on their way
        self.num_parts = 1
        if plan.in_pieces:
            whole, piece = max(trained.operands), max(trained.piece_operands)
            self.num_parts = -(-whole // max(piece, 1))
        self._add_traffic(hardware)

    def _disk_s(
        self, plan: Plan, paged: Sequence[Chunk], hardware: Hardware
    ) -> list[float]:
        """Seconds of the reads from the disk, which all ranks of a node share."""
        if len(plan.on_disk) <= plan.disk_buffers:
            # each is read once, and stays
            return [0.0] * len(paged)
        each_s = self.num_readers / hardware.disk_bytes_s
        on_disk = frozenset(plan.on_disk)
        return [
            nbytes * each_s * (chunk.index in on_disk)
            for chunk, nbytes in zip(paged, self.chunk_bytes, strict=True)
        ]

    def _gather_s(self, chunk: Chunk) -> float:
        n = self._shards
        return padded_bytes(chunk.in_pool, n) * self.gathering_s if n > 1 else 0.0

    def _add_training(
        self,
        trained: TrainedBytes,
        plan: Plan,
        hardware: Hardware,
        works: list[list[TrainedWork]],
    ) -> None:
        """Gradients and updates: of the host, and what DDP reduces of the device's."""
        layout = trained.layout
        numbers = {index: number for number, index in enumerate(plan.paged)}
        on_device = [0] * len(layout.blocks) + [layout.fixed_trainable_bytes]
        for chunk in layout.chunks:
            at = -1 if chunk.block is None else chunk.block
            if not chunk.trainable:
                continue
            if not plan.placements[chunk.index].on_host:
                on_device[at] += chunk.payload_bytes
                continue
            fetched = shard_bytes(chunk, plan.shards), self._gather_s(chunk)
            number = numbers.get(chunk.index)
            works[at].append(trained_work(chunk, number, trained, hardware, *fetched))
        # of DDP, when each block's backward is done
        *inside, outside = on_device
        each = outside / len(inside) if inside else 0.0
        rate = self.scatter_s + self.gathering_s
        self.shared_s = [rate * (nbytes + each) for nbytes in inside]

    def _add_traffic(self, hardware: Hardware) -> None:
        """Count what forward and backward fetch and send, and how often."""
        works, queued = self.works, [] if self.defers else self.works
        stale = {work.number for work in queued if work.number is not None}
        kept = range(min(self.num_slots, self.num_chunks))
        self.missing_later = list(range(len(kept), self.num_chunks))
        self.missing_first = [c for c in kept if c in stale] + self.missing_later
        self.missing_backward = list(range(self.num_chunks - len(kept)))
        renewed = sum(work.renew_bytes for work in queued if work.number is None)
        out, back = sum(self.moved.out), sum(self.moved.back)
        gradients = sum(work.nbytes for work in works)
        parts = sum(work.part_bytes for work in works)
        sums = sum(work.sum_bytes for work in works)
        operands = sum(work.operand_bytes for work in works)
        returned = sum(w.weight_bytes + w.state_bytes for w in works)

        def phase(
            chunks: list[int], more: int, offload_bytes: int, **swapped: int
        ) -> Traffic:
            fetch_bytes = sum(self.chunk_bytes[c] for c in chunks) + more
            return _traffic(fetch_bytes, offload_bytes, hardware, **swapped)

        again = self.accumulation - 1
        # of updates that are not deferred, alone
        self.update = _traffic(operands, returned, hardware)
        home = returned * self.defers
        brought = operands if self.defers else renewed
        self.first = phase(self.missing_first, brought, home, out=out)
        self.later = phase(self.missing_later, 0, 0, out=out)
        self.backward = phase(self.missing_backward, 0, gradients, back=back)
        self.adding = phase(self.missing_backward, sums, gradients, back=back)
        # in the last micro-batch of several ranks only parts leave
        sums = sums if again else 0
        self.last = self.adding if again else self.backward
        if self.reduces:
            self.last = phase(self.missing_backward, sums, parts, back=back)
        passes = [self.first, *again * (self.later,), self.last]
        passes += [self.backward, *(again - 1) * (self.adding,)][:again]
        passes += [] if self.defers else [self.update]
        fetched = sum(traffic.fetch_bytes for traffic in passes)
        self.least_s = self._least_s(passes)
        alone = [*again * self.missing_later, *self.missing_first]
        alone += self.accumulation * self.missing_backward
        self.reading_s = sum(self.disk_s[chunk] for chunk in alone)
        self.least_s = max(self.least_s, self.reading_s)
        # without swapped activations
        self.fetched_bytes = fetched + self.accumulation * self.rows_bytes
        self.offloaded_bytes = sum(traffic.offload_bytes for traffic in passes)

    def _least_s(self, passes: list[Traffic]) -> float:
        """The step is not shorter: compute, with the copies in whose time it has nothing
        else to do, and copies each way."""
        again = self.accumulation - 1
        micro_batch_s = sum(self.forward_s) + sum(self.backward_s) + self.outside_s
        compute_s = self.update_s + self.accumulation * micro_batch_s
        compute_s += sum(again * work.sum_s + work.norm_s for work in self.works)
        if not self.on_host:
            compute_s += sum(work.update_s for work in self.works)
        if self.defers:
            compute_s += self.first.fetch_s * sum(w.operand_bytes for w in self.outside)
        compute_s += self.accumulation * (self.look_up_s + self.rows_s)
        return max(
            compute_s,
            sum(traffic.fetching_s for traffic in passes),
            sum(traffic.offloading_s for traffic in passes),
        )


def _traffic(
    fetch_bytes: int,
    offload_bytes: int,
    hardware: Hardware,
    back: int = 0,
    out: int = 0,
) -> Traffic:
    """As much of each direction as the other has work for goes at the rate for both:
    of weights, gradients and state first, of swapped activations what is left of it.

    One average of all would make those copies faster the more swaps, so that a plan
    could gain by swaps that it does not need.
    """
    fetch_s, offload_s = 1 / hardware.fetch_bytes_s, 1 / hardware.offload_bytes_s
    fetch_both_s, offload_both_s = fetch_s, offload_s
    if hardware.overlaps:
        fetch_both_s = 1 / hardware.fetch_both_bytes_s
        offload_both_s = 1 / hardware.offload_both_bytes_s
    fetching, offloading = fetch_bytes * fetch_s, offload_bytes * offload_s
    coming, leaving = back * fetch_s, out * offload_s
    there, away = fetching + coming, offloading + leaving
    back_s = _mixed(fetch_s, fetch_both_s, coming, away - fetching)
    out_s = _mixed(offload_s, offload_both_s, leaving, there - offloading)
    fetch_s = _mixed(fetch_s, fetch_both_s, fetching, away)
    offload_s = _mixed(offload_s, offload_both_s, offloading, there)
    return Traffic(
        fetch_bytes,
        offload_bytes,
        fetch_s,
        offload_s,
        back_s,
        out_s,
        fetch_bytes * fetch_s + back * back_s,
        offload_bytes * offload_s + out * out_s,
    )


def _mixed(alone_s: float, both_s: float, seconds: float, other: float) -> float:
    """Seconds of a byte of what takes so many alone, `other` of them beside copies the
    other way."""
    both = min(seconds, max(other, 0.0))
    return alone_s + both / seconds * (both_s - alone_s) if both else alone_s
