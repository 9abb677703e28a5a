"""Seconds of one optimizer step: a discrete-event simulation of what the runtime does.

Four lanes work side by side: compute, copies to the device, copies from it, and the one
host thread; with several ranks their collectives are a fifth, and all ranks take the
same time. The calling thread queues their work and sometimes waits; every rule for
who waits for whom is that of `Pager`, `Slot`, `GradientOffload`, `HostAdamW` and
`Session`. At the update every lane is idle and the slots hold the chunks that forward
begins with, so one step, from update to update, is the period of the training.

Not modelled: the time to launch work, and the order inside a block. What runs outside
the blocks is put at the turn from forward to backward, where the head is. Gradients
leave when their block's backward is done, those outside the blocks before the first
block's backward; the first weight outside is taken for the embedding, whose gradient
comes last. What DDP reduces outside the blocks counts as spread over them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

from ..layout import padded_bytes, shard_bytes
from ..types import (
    ADAM_MOVED_BYTES,
    IN_FLIGHT,
    BlockTimes,
    Chunk,
    Hardware,
    Layout,
    Moved,
    Placement,
    Plan,
    Trace,
    Work,
    Workload,
)

LANES = ("compute", "fetch", "offload", "host")
COMMUNICATE = "communicate"
"""One more lane where there are several ranks."""

COMPUTE_BOUND_SHARE = 0.01
"""Compute bounds the step if it stands still for less than this share of it."""


def work_s(work: Work, hardware: Hardware) -> float:
    """A roofline for each kind of operator; kernels cannot be launched faster."""
    computing = work.flops_16 / hardware.flops_16 + work.flops_32 / hardware.flops_32
    busy = computing + work.moved_bytes / hardware.memory_bytes_s
    return max(busy, work.num_kernels * hardware.kernel_s)


def update_seconds(nbytes: int, hardware: Hardware) -> float:
    """AdamW on the device for that many bytes of weights."""
    return ADAM_MOVED_BYTES * nbytes / hardware.memory_bytes_s


def block_times(trace: Trace, layout: Layout, hardware: Hardware) -> BlockTimes:
    """Times of all blocks by the roofline, for devices that are not here."""
    # of each block and last of what runs outside them
    forward, backward = ([0.0] * (len(trace.blocks) + 1) for _ in range(2))
    for segment in trace.segments:
        at = -1 if segment.block is None else segment.block
        ways = backward if segment.backward else forward
        ways[at] += work_s(segment.work, hardware)
    return BlockTimes(
        forward_s=tuple(forward[:-1]),
        backward_s=tuple(backward[:-1]),
        outside_forward_s=forward[-1],
        outside_backward_s=backward[-1],
        update_s=update_seconds(layout.fixed_trainable_bytes, hardware),
        measured=False,
    )


@dataclass(frozen=True)
class StepTime:
    """One optimizer step in the steady state of training.

    Attributes:
        busy_s: For each of `LANES`, and `COMMUNICATE`, how long it works.
        exposed_s: For each of the others how long compute stood still for it; with
            compute's busy time they add up to the step.
        recompute_s: Part of compute that repeats forward.
        fetched_bytes: Host to device, without swapped activations.
        offloaded_bytes: Gradients to the host.
    """

    total_s: float
    busy_s: Mapping[str, float]
    exposed_s: Mapping[str, float]
    recompute_s: float
    fetched_bytes: int
    offloaded_bytes: int

    @property
    def limiter(self) -> str:
        """What bounds the step: compute, or the lane that it waits for most."""
        exposed_s = sum(self.exposed_s.values())
        if not exposed_s or exposed_s < COMPUTE_BOUND_SHARE * self.total_s:
            return "compute"
        return max(self.exposed_s, key=self.exposed_s.__getitem__)


def simulate_step(
    layout: Layout,
    plan: Plan,
    times: BlockTimes,
    hardware: Hardware,
    workload: Workload,
    moved: Moved | None = None,
) -> StepTime:
    """Run one step of a plan on clocks.

    Args:
        layout: The model's chunks and blocks.
        plan: Where chunks live and what becomes of activations.
        times: Compute of one micro-batch under no plan; `update_s` of this plan.
        hardware: `adam_bytes_s` counts the bytes of what AdamW updates: fp32 masters
            where there are any. Unless it `overlaps`, every copy runs on the calling
            thread, as compute does, and only host updates run beside it.
        workload: Micro-batches, masters and ranks.
        moved: What swapping moves; needed only for plans that swap.
    """
    d = Demand(layout, plan, times, hardware, workload, moved)
    step = Step(d)
    step.update()
    before: list[float] = []
    # the last micro-batch of several ranks is unlike the others
    alike = d.accumulation - d.reduces
    for number in range(alike):
        started, sums = step.issued, (dict(step.exposed), dict(step.busy))
        step.forward(first=number == 0)
        step.backward(first=number == 0)
        offsets = step.offsets()
        if _close(offsets, before, step.issued - started):
            step.repeat(alike - 1 - number, started, *sums)
            break
        before = offsets
    if d.reduces:
        step.forward(first=alike == 0)
        step.backward(reduced=True)
    step.settle()
    total_s = step.now + step.skipped
    return StepTime(
        total_s=total_s,
        busy_s={"compute": total_s - sum(step.exposed.values()), **step.busy},
        exposed_s=step.exposed,
        recompute_s=d.accumulation * d.recompute_s,
        fetched_bytes=d.fetched_bytes,
        offloaded_bytes=d.offloaded_bytes,
    )


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
        moved_s * updated / ranks,
        moved_s * moved / ranks,
        -(-chunk.payload_bytes // ranks),
        part_sum_s,
    )


class _Update(NamedTuple):
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
    ) -> None:
        self._shards, world = plan.shards, workload.world
        self.overlaps = hardware.overlaps
        self.accumulation, self.reduces = workload.accumulation, world.size > 1
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
        self._add_training(layout, plan, hardware, workload)
        self._add_traffic(hardware)

    def _gather_s(self, chunk: Chunk) -> float:
        n = self._shards
        return padded_bytes(chunk, n) * self.gathering_s if n > 1 else 0.0

    def _add_training(
        self, layout: Layout, plan: Plan, hardware: Hardware, workload: Workload
    ) -> None:
        """Gradients and updates: of the host, and what DDP reduces of the device's."""
        numbers = {index: number for number, index in enumerate(plan.paged)}
        self.updates: list[_Update] = []
        self.norm_s = 0.0
        # of each block and last of what is outside them
        gradients: list[list[HostWork]] = [[] for _ in range(len(layout.blocks) + 1)]
        on_device = [0] * len(layout.blocks) + [layout.fixed_trainable_bytes]
        for chunk in layout.chunks:
            at = -1 if chunk.block is None else chunk.block
            if not chunk.trainable:
                continue
            if not plan.placements[chunk.index].on_host:
                on_device[at] += chunk.payload_bytes
                continue
            work = host_work(chunk, hardware, workload)
            gradients[at].append(work)
            self.norm_s += work.norm_s
            where = numbers.get(chunk.index), chunk.index
            fetched = shard_bytes(chunk, plan.shards), self._gather_s(chunk)
            self.updates.append(_Update(*where, *fetched, work.update_s))
        # `Session` updates first what forward reads first: outside the blocks
        self.updates.sort(key=lambda u: layout.chunks[u.chunk].block is not None)
        self.works = [work for works in gradients for work in works]
        *self.gradients, self.outside = gradients
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
        gradients = sum(work.nbytes for work in self.works)
        parts = sum(work.part_bytes for work in self.works)

        def phase(chunks: list[int], more: int, offload_bytes: int) -> Traffic:
            fetch_bytes = sum(self.chunk_bytes[c] for c in chunks) + more
            return _traffic(fetch_bytes, offload_bytes, hardware)

        again = self.accumulation - 1
        self.first = phase(self.missing_first, refreshed, out)
        self.later = phase(self.missing_later, 0, out)
        self.backward = self.last = phase(self.missing_backward, back, gradients)
        if self.reduces:
            # what earlier micro-batches have added up comes back
            sums = gradients if again else 0
            self.last = phase(self.missing_backward, back + sums, parts)
        passes = [self.first, self.last, *again * (self.later, self.backward)]
        fetched = sum(traffic.fetch_bytes for traffic in passes)
        offloaded = sum(traffic.offload_bytes for traffic in passes)
        # without swapped activations
        self.fetched_bytes = fetched - self.accumulation * back
        self.offloaded_bytes = offloaded - self.accumulation * out


class Step:
    """The clocks of the lanes, in seconds since the update.

    Attributes:
        now: Compute has worked or waited until here.
        issued: The calling thread has queued work or waited until here.
        skipped: Of micro-batches that were not simulated one by one.
        exposed: How long compute stood still, by the lane it waited for.
        busy: How long each of these lanes has worked.
    """

    def __init__(self, demand: Demand) -> None:
        self._demand, self._traffic = demand, demand.first
        self.now = self.issued = self.skipped = 0.0
        lanes = [*LANES[1:], COMMUNICATE]
        self.exposed = dict.fromkeys(lanes if demand.reduces else LANES[1:], 0.0)
        self.busy = dict.fromkeys(self.exposed, 0.0)
        # when each lane has done what was queued
        self._free = dict.fromkeys(lanes, 0.0)
        self._cause = "host"
        self._updated = [0.0] * demand.num_chunks
        self._stale: list[tuple[_Update, float]] = []
        self._arrival = [0.0] * demand.num_chunks
        self._last_use = [0.0] * demand.num_slots
        self._gone = 0.0
        self._in_flight: deque[float] = deque()
        self._staging = deque([0.0] * IN_FLIGHT)
        self._packed = deque([0.0] * IN_FLIGHT)

    def update(self) -> None:
        """`PagedAdamW.step`: the device's part, then one host update after another."""
        self._run(self._demand.update_s)
        for update in self._demand.updates:
            done = self._queue("host", update.seconds)
            if update.number is None:
                self._stale.append((update, done))
            else:
                self._updated[update.number] = done

    def forward(self, first: bool) -> None:
        """Forward of one micro-batch and what runs outside the blocks."""
        d = self._demand
        self._traffic = traffic = d.first if first else d.later
        missing = (d.missing_first if first else d.missing_later)[::-1]
        # `Session.ready`: weights that stay on the device
        for update, done in sorted(self._stale, key=lambda stale: stale[0].chunk):
            self._block(done, "host")
            self._refresh(update.nbytes * traffic.fetch_s, update.gather_s)
        self._stale = []
        for block, (start, stop) in enumerate(d.bounds):
            while missing and missing[-1] < stop:
                self._block(self._updated[missing[-1]], "host")
                self._fetch_chunk(missing.pop())
            self._await_chunks(start, stop)
            while missing and missing[-1] < start + d.num_slots:
                # what is held back now is asked for again when the next block opens
                if self._updated[missing[-1]] > self.issued:
                    break
                self._fetch_chunk(missing.pop())
            if d.swaps[block]:
                # only now is the room free that the one before has left
                self._await(self._gone, "offload")
            self._run(d.forward_s[block])
            self._mark_use(start, stop)
            if nbytes := d.moved.out[block]:
                seconds = nbytes * traffic.offload_s
                self._gone = self._queue("offload", seconds, self.now)
        self._await(self._gone, "offload")
        self._run(d.outside_s)

    def backward(self, first: bool = False, reduced: bool = False) -> None:
        """Backward of one micro-batch; gradients leave block by block. In the last one
        of several ranks they are `reduced`, after the sums of earlier ones are there.
        """
        d = self._demand
        self._traffic = d.last if reduced else d.backward
        send: Callable[[HostWork], None] = partial(self._send, first=first)
        if reduced:
            self._drain()
            send = self._reduce
        missing = d.missing_backward[:]
        for gradients in d.outside[1:]:
            send(gradients)
        there: float | None = None
        for block in range(len(d.bounds) - 1, -1, -1):
            start, stop = d.bounds[block]
            while missing and missing[-1] >= start:
                self._fetch_chunk(missing.pop())
            if there is None:
                there = self._swap_in(block)
            before = self._swap_in(block - 1) if block else None
            self._await_chunks(start, stop)
            self._await(there)
            there = before
            while missing and missing[-1] >= stop - d.num_slots:
                self._fetch_chunk(missing.pop())
            self._run(d.backward_s[block])
            self._mark_use(start, stop)
            for gradients in d.gradients[block]:
                send(gradients)
            if reduced:
                self._queue(COMMUNICATE, d.shared_s[block], self.now)
        for gradients in d.outside[:1]:
            send(gradients)
        # the trainer reads the loss of each micro-batch
        self._run(0.0)
        self.issued = self.now

    def settle(self) -> None:
        """`GradientOffload.settle` and the norm; the next update follows."""
        self._block(self._free[COMMUNICATE], COMMUNICATE)
        self._drain()
        if self._demand.norm_s:
            self._block(self._queue("host", self._demand.norm_s), "host")
        self._run(0.0)

    def _drain(self) -> None:
        """Wait until the host has all gradients that were sent."""
        while self._in_flight:
            self._block(self._in_flight.popleft(), "offload")
        for done in self._staging:
            self._block(done, "host")

    def offsets(self) -> list[float]:
        """How far each clock is ahead of the calling thread between micro-batches."""
        clocks = (*self._free.values(), *self._in_flight, *self._staging)
        return [max(0.0, clock - self.issued) for clock in clocks]

    def repeat(self, times: int, started: float, *before: Mapping[str, float]) -> None:
        """Count the micro-batch that began at `started`, with `exposed` and `busy` as
        `before`, that many times more."""
        self.skipped += times * (self.issued - started)
        for sums, began in zip((self.exposed, self.busy), before, strict=True):
            for lane in sums:
                sums[lane] += times * (sums[lane] - began[lane])

    def _block(self, until: float, lane: str) -> None:
        """The calling thread waits, and queues nothing meanwhile."""
        if until > self.issued:
            self.issued = until
            self._cause = lane

    def _run(self, seconds: float) -> None:
        """Compute works, not before the thread has come to queue it."""
        if self.issued > self.now:
            self.exposed[self._cause] += self.issued - self.now
            self.now = self.issued
        self.now += seconds
        if not self._demand.overlaps:
            self.issued = self.now

    def _stand(self, seconds: float, lane: str) -> None:
        """Compute stands still for a copy that runs in its place."""
        self._run(seconds)
        self.exposed[lane] += seconds

    def _await(self, event: float, lane: str = "fetch") -> None:
        """Compute waits for a copy."""
        if self.issued > self.now:
            self._run(0.0)
        if event > self.now:
            self._stand(event - self.now, lane)

    def _queue(self, lane: str, seconds: float, ready: float = 0.0) -> float:
        """A lane works, not before `ready`, and not before the thread has come to
        queue it. Returns when it is done."""
        self.busy[lane] += seconds
        if not self._demand.overlaps and lane != "host":
            self._stand(seconds, lane)
            return self.now
        done = max(self._free[lane], self.issued, ready) + seconds
        self._free[lane] = done
        return done

    def _refresh(self, seconds: float, gather_s: float) -> None:
        """A copy to the device on compute; it takes the link from other fetches."""
        self._await(self._free["fetch"])
        self._stand(seconds, "fetch")
        self.busy["fetch"] += seconds
        self._free["fetch"] = self.now
        if gather_s:
            self._await(self._queue(COMMUNICATE, gather_s, self.now), COMMUNICATE)

    def _fetch_chunk(self, chunk: int) -> None:
        d = self._demand
        seconds = d.chunk_bytes[chunk] * self._traffic.fetch_s
        arrival = self._queue("fetch", seconds, self._last_use[chunk % d.num_slots])
        if d.gather_s[chunk]:
            arrival = self._queue(COMMUNICATE, d.gather_s[chunk], arrival)
        self._arrival[chunk] = arrival

    def _await_chunks(self, start: int, stop: int) -> None:
        if start < stop:
            self._await(max(self._arrival[start:stop]), self._demand.slower)

    def _mark_use(self, start: int, stop: int) -> None:
        for chunk in range(start, stop):
            self._last_use[chunk % self._demand.num_slots] = self.now

    def _swap_in(self, block: int) -> float:
        """Not before compute is here: the room for it comes from its stream."""
        if nbytes := self._demand.moved.back[block]:
            return self._queue("fetch", nbytes * self._traffic.fetch_s, self.now)
        return 0.0

    def _send(self, gradients: HostWork, first: bool) -> None:
        """`GradientOffload._send` of a chunk."""
        if len(self._in_flight) == IN_FLIGHT:
            self._block(self._in_flight.popleft(), "offload")
        sum_s = gradients.first_sum_s if first else gradients.later_sum_s
        if sum_s:
            self._block(self._staging.popleft(), "host")
        seconds = gradients.nbytes * self._traffic.offload_s
        arrived = self._queue("offload", seconds, self.now)
        self._in_flight.append(arrived)
        if sum_s:
            self._staging.append(self._queue("host", sum_s, arrived))

    def _reduce(self, gradients: HostWork) -> None:
        """Sums come, all is packed on compute, reduced, and the own part leaves."""
        d, traffic = self._demand, self._traffic
        if d.accumulation > 1:
            # one buffer for them: compute has just read those before
            seconds = gradients.nbytes * traffic.fetch_s
            self._await(self._queue("fetch", seconds, self.now))
        self._await(self._packed.popleft(), COMMUNICATE)
        scatter_s = gradients.nbytes * d.scatter_s
        reduced = self._queue(COMMUNICATE, scatter_s, self.now)
        seconds = gradients.part_bytes * traffic.offload_s
        arrived = self._queue("offload", seconds, max(self.now, reduced))
        self._packed.append(arrived)
        self._staging.append(self._queue("host", gradients.part_sum_s, arrived))


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


def _close(ours: list[float], theirs: list[float], scale: float) -> bool:
    pairs = zip(ours, theirs, strict=False)
    alike = all(abs(a - b) <= 1e-9 * scale for a, b in pairs)
    return len(ours) == len(theirs) and alike
