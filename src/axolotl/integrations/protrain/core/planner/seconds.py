"""Seconds of one optimizer step: a discrete-event simulation of what the runtime does.

Four lanes work side by side: compute, copies to the device, copies from it, and the one
host thread; with several ranks their collectives are a fifth, which takes the time of
copies where ranks have no other link, and all ranks take the same time. The calling thread
queues their work and sometimes waits; every rule for who waits for whom is that of the
engine's `Step`, `Slots`, `Gradients`, `GradientReduction`, `Updates` and `Staging`. At the
update every lane is idle and the slots hold the chunks that forward begins with, so one
step, from update to update, is the period of the training.

The calling thread takes time to queue a block's work, and Python for each trained tensor
whose state is on the host; where compute is faster, it waits for the thread. Not modelled:
the order inside a block, and how long the thread takes outside them. What runs outside
the blocks is put between forward and backward, where the head is. Gradients
leave when their block's backward is done, those outside the blocks before the first
block's backward; the first weight outside is taken for the embedding, whose gradient
comes last. What DDP reduces outside the blocks counts as spread over them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ..types import (
    IN_FLIGHT,
    PAGING_GAIN,
    BlockSeconds,
    BlockTimes,
    Hardware,
    Layout,
    Trace,
    Work,
)
from .demand import COMMUNICATE, DISK, Demand, Traffic, TrainedWork, update_seconds

LANES = ("compute", "fetch", "offload", "host")


def work_s(work: Work, hardware: Hardware) -> float:
    """A roofline for each kind of operator; kernels cannot be launched faster."""
    computing = work.flops_16 / hardware.flops_16 + work.flops_32 / hardware.flops_32
    computing += work.attention_16 / hardware.attention_16
    busy = computing + work.moved_bytes / hardware.memory_bytes_s
    return max(busy, work.num_kernels * hardware.kernel_s)


def block_times(
    trace: Trace,
    layout: Layout,
    hardware: Hardware,
    measured: Mapping[int | None, BlockSeconds] | None = None,
) -> BlockTimes:
    """Times of all blocks by the roofline, for devices that are not here; of those that
    were `measured`, and under None of what is outside them, as they were."""
    # of each block and last of what runs outside them
    every = len(trace.blocks) + 1
    forward, backward, queue_forward, queue_backward = ([0.0] * every for _ in range(4))
    for segment in trace.segments:
        at = -1 if segment.block is None else segment.block
        ways, queue = forward, queue_forward
        if segment.backward:
            ways, queue = backward, queue_backward
        ways[at] += work_s(segment.work, hardware)
        queue[at] += segment.work.num_kernels * hardware.kernel_s
    again, queue_again = forward[:], queue_forward[:]
    for index, seconds in (measured or {}).items():
        at = -1 if index is None else index
        forward[at], backward[at] = seconds.forward_s, seconds.backward_s
        queue_forward[at] = queue_again[at] = seconds.queue_forward_s
        queue_backward[at] = seconds.queue_backward_s
        again[at] = seconds.forward_s
        if seconds.recompute_s is not None:
            again[at], queue_again[at] = seconds.recompute_s, seconds.queue_recompute_s
    fixed = layout.fixed_trainable_bytes
    return BlockTimes(
        forward_s=tuple(forward[:-1]),
        backward_s=tuple(backward[:-1]),
        outside_forward_s=forward[-1],
        outside_backward_s=backward[-1],
        # AdamW's, in the dtype of the weights
        update_s=update_seconds(fixed, 2 * fixed, hardware),
        measured=bool(measured),
        recompute_s=tuple(again[:-1]),
        queue_forward_s=tuple(queue_forward[:-1]),
        queue_backward_s=tuple(queue_backward[:-1]),
        queue_recompute_s=tuple(queue_again[:-1]),
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
        offloaded_bytes: Device to host, without swapped activations: gradients, and the
            weights and optimizer state that were updated on the device.
    """

    total_s: float
    busy_s: Mapping[str, float]
    exposed_s: Mapping[str, float]
    recompute_s: float
    fetched_bytes: int
    offloaded_bytes: int

    @property
    def limiter(self) -> str:
        """The lane that bounds the step: compute, or the lane that it waits for most if
        the step would be faster without waits by what predictions can tell."""
        exposed_s = sum(self.exposed_s.values())
        if not exposed_s or exposed_s < PAGING_GAIN * self.total_s:
            return "compute"
        return max(self.exposed_s, key=self.exposed_s.__getitem__)


def simulate(d: Demand) -> StepTime:
    """Run one step on clocks."""
    step = DeferredStep(d) if d.defers else SimulatedStep(d)
    step.update()
    first = last = d.accumulation == 1
    if not last:
        step.micro_batch(first=True)
        # the last one takes norms, or reduces
        step.repeat(step.micro_batch, d.accumulation - 2)
    step.micro_batch(first=first, last=True)
    step.settle()
    step.end_reads()
    total_s = step.now + step.skipped
    return StepTime(
        total_s=total_s,
        busy_s={"compute": total_s - sum(step.exposed.values()), **step.busy},
        exposed_s=step.exposed,
        recompute_s=d.accumulation * d.recompute_s,
        fetched_bytes=d.fetched_bytes,
        offloaded_bytes=d.offloaded_bytes,
    )


class Clocks:
    """The clocks of the lanes, in seconds since the update.

    Attributes:
        now: Compute has worked or waited until here.
        issued: The calling thread has queued work or waited until here.
        skipped: Of repetitions that were not simulated one by one.
        exposed: How long compute stood still, by the lane it waited for.
        busy: How long each of these lanes has worked.
    """

    def __init__(self, demand: Demand) -> None:
        self._demand = demand
        self.now = self.issued = self.skipped = 0.0
        lanes = [*LANES[1:], COMMUNICATE]
        shown = [*LANES[1:], *[COMMUNICATE] * demand.reduces]
        shown += [DISK] * bool(demand.reading_s)
        self.exposed = dict.fromkeys(shown, 0.0)
        self.busy = dict.fromkeys(self.exposed, 0.0)
        # when each lane has done what was queued
        self._free = dict.fromkeys(lanes, 0.0)
        self._cause = "host"

    def repeat(self, run: Callable[[], None], times: int) -> int:
        """Run so often, or until one run has moved all clocks by its own time alone, as
        the others would. Returns how many of them were counted and not run."""
        before = self._ahead() if times else []
        for left in reversed(range(times)):
            started, sums = self.issued, (dict(self.exposed), dict(self.busy))
            run()
            ahead, each_s = self._ahead(), self.issued - started
            if _close(ahead, before, each_s):
                self.skipped += left * each_s
                for lanes, began in zip((self.exposed, self.busy), sums, strict=True):
                    for lane in lanes:
                        lanes[lane] += left * (lanes[lane] - began[lane])
                return left
            before = ahead
        return 0

    def clocks(self) -> list[float]:
        """Return all moments that later work may have to wait for."""
        return [self.now, *self._free.values()]

    def _ahead(self) -> list[float]:
        """Return how far each clock is ahead of the calling thread; the others hold
        nothing up."""
        issued = self.issued
        return [clock - issued if clock > issued else 0.0 for clock in self.clocks()]

    def _block(self, until: float, lane: str) -> None:
        """The calling thread waits, and queues nothing meanwhile."""
        if until > self.issued:
            self.issued = until
            self._cause = lane

    def _run(self, seconds: float, queue_s: float = 0.0) -> None:
        """Compute works, not before the thread has come to queue it, which takes the
        thread some time."""
        if self.issued > self.now:
            self.exposed[self._cause] += self.issued - self.now
            self.now = self.issued
        self.now += seconds
        if not self._demand.overlaps:
            self.issued = self.now
        elif queue_s:
            self.issued += queue_s
            self._cause = "host"

    def _think(self, seconds: float) -> None:
        """The calling thread works for tensors on the host, and queues nothing meanwhile."""
        if seconds:
            self.busy["host"] += seconds
            self.issued += seconds
            self._cause = "host"

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

    def _exchange(self, way: str, seconds: float, ready: float) -> float:
        """Ranks gather or reduce: in the time of copies that `way` where they have no
        link of their own."""
        if not self._demand.shares_link or not seconds:
            return self._queue(COMMUNICATE, seconds, ready)
        done = self._queue(COMMUNICATE, seconds, max(ready, self._free[way]))
        self._free[way] = done
        return done


class Reads:
    """Reads from the disk: each begins as early as there is a buffer, in the order of
    the fetches.

    Attributes:
        free: Seconds until the disk has done what it began.
        ring: Seconds until each buffer is free again, the first to be read into first.
    """

    def __init__(self, demand: Demand) -> None:
        self._seconds = demand.disk_s
        # over the update the disk has filled the buffers
        self._before = demand.num_disk_buffers
        self.free = 0.0
        self.ring: deque[float] = deque()

    def end(self, chunk: int) -> float:
        """Return when a chunk is here that is the next to be read."""
        seconds = self._seconds[chunk]
        if not seconds or self._before:
            return 0.0
        return max(self.free, self.ring[0]) + seconds

    def take(self, chunk: int) -> float:
        """Let its copy to the device take a buffer; returns when it is here."""
        end = self.end(chunk)
        if self._before:
            self._before -= 1
        else:
            self.ring.popleft()
            self.free = end
        return end


class SimulatedStep(Clocks):
    """One optimizer step without deferred updates."""

    def __init__(self, demand: Demand) -> None:
        super().__init__(demand)
        self._traffic = demand.first
        self._updated = [0.0] * demand.num_chunks
        self._stale: list[tuple[TrainedWork, float]] = []
        self._arrival = [0.0] * demand.num_chunks
        self._last_use = [0.0] * demand.num_slots
        self._sent = [0.0] * demand.num_slots
        self._gone = 0.0
        self._in_flight: deque[float] = deque()
        # when what is staged is there, and when room for more is free
        self._staged: dict[int, float] = {}
        self._room = deque([0.0] * IN_FLIGHT)
        self._landing = "host" if demand.on_host else "offload"
        self._reads = Reads(demand)

    def update(self) -> None:
        """Queued updates: the device's part, then one chunk after another."""
        d = self._demand
        self._run(d.update_s)
        for work in d.works:
            if d.on_host:
                done = self._queue("host", work.update_s)
            else:
                n, home = d.num_parts, work.weight_bytes + work.state_bytes
                self._think(work.queue_update_s)
                for _part in range(n):
                    seconds = work.operand_bytes * d.update.fetch_s / n
                    self._await(self._queue("fetch", seconds, self._room.popleft()))
                    self._run(work.update_s / n)
                    seconds = home * d.update.offload_s / n
                    done = self._queue("offload", seconds, self.now)
                    self._room.append(done)
            if work.number is None:
                self._stale.append((work, done))
            else:
                self._updated[work.number] = done

    def micro_batch(self, first: bool = False, last: bool = False) -> None:
        """Forward and backward of one micro-batch."""
        self.forward(first)
        self.backward(first, last)

    def forward(self, first: bool) -> None:
        """Forward of one micro-batch and what runs outside the blocks."""
        d = self._demand
        self._traffic = traffic = d.first if first else d.later
        missing = (d.missing_first if first else d.missing_later)[::-1]
        self._enter(traffic)
        if d.rows_bytes:
            # `LookUp`: it reads what compute has made, here as in `_refresh`
            self._block(max(self.now, self.issued) + d.look_up_s, "host")
            self._refresh(d.rows_s, 0.0)
        for block, (start, stop) in enumerate(d.bounds):
            while missing and missing[-1] < stop:
                self._block(self._updated[missing[-1]], self._landing)
                self._fetch_chunk(missing.pop())
            self._await_chunks(start, stop)
            self._opened(block)
            while missing and missing[-1] < start + d.num_slots:
                # what is held back now is asked for again when the next block opens
                if self._updated[missing[-1]] > self.issued:
                    break
                if self._reads.end(missing[-1]) > self.issued:
                    break
                self._fetch_chunk(missing.pop())
            if d.swaps[block]:
                # only now is the room free that the one before has left
                self._await(self._gone, "offload")
            self._run(d.forward_s[block], d.queue_forward_s[block])
            self._mark_use(start, stop)
            if nbytes := d.moved.out[block]:
                seconds = nbytes * traffic.out_s
                self._gone = self._queue("offload", seconds, self.now)
        self._await(self._gone, "offload")
        self._run(d.outside_s)

    def backward(self, first: bool = False, last: bool = False) -> None:
        """Backward of one micro-batch; gradients leave block by block. In the last one
        of several ranks they are reduced, after the sums of earlier ones are there.
        """
        d = self._demand
        reduced = last and d.reduces
        self._traffic = d.last if last else d.backward if first else d.adding
        send: Callable[[TrainedWork], None] = partial(
            self._send, first=first, last=last
        )
        if reduced:
            self._drain()
            send = partial(self._reduce, first=first)
        missing = d.missing_backward[:]
        for gradients in d.outside[1:]:
            send(gradients)
        there: float | None = None
        for block in range(len(d.bounds) - 1, -1, -1):
            start, stop = d.bounds[block]
            self._reach(block, first)
            while missing and missing[-1] >= start:
                self._fetch_chunk(missing.pop())
            if there is None:
                there = self._swap_in(block)
            before = self._swap_in(block - 1) if block else None
            self._await_chunks(start, stop)
            self._await(there)
            there = before
            self._fetch_back(missing, stop - d.num_slots)
            self._run(d.backward_s[block], d.queue_backward_s[block])
            self._mark_use(start, stop)
            for gradients in d.gradients[block]:
                send(gradients)
            if reduced:
                self._exchange("offload", d.shared_s[block], self.now)
        for gradients in d.outside[:1]:
            send(gradients)
        # the trainer reads the loss of each micro-batch
        self._run(0.0)
        self.issued = self.now

    def _fetch_back(self, missing: list[int], first: int) -> None:
        """Fetch ahead of a block in backward, down to a chunk, what is read."""
        while missing and missing[-1] >= first:
            if self._reads.end(missing[-1]) > self.issued:
                return
            self._fetch_chunk(missing.pop())

    def settle(self) -> None:
        """`Gradients.settle`; the next update follows."""
        self._block(self._free[COMMUNICATE], COMMUNICATE)
        self._drain()
        self._run(0.0)

    def end_reads(self) -> None:
        """The disk reads ahead over the update, and has no time but the step's."""
        self._block(self._demand.reading_s - self.skipped, DISK)
        self._run(0.0)

    def _drain(self) -> None:
        """Wait until the host has all gradients that were sent."""
        while self._in_flight:
            self._block(self._in_flight.popleft(), "offload")

    def clocks(self) -> list[float]:
        every = [*super().clocks(), *self._in_flight, *self._room, *self._sent]
        every += [*self._staged.values(), self._reads.free, *self._reads.ring]
        # a run that leaves one of these behind, and fetches or uses none, is no repetition
        latest = max(self._arrival, default=0.0), max(self._last_use, default=0.0)
        return [*every, self._gone, *latest]

    def _enter(self, traffic: Traffic) -> None:
        """`DueUpdates.refresh_stale`: weights that stay on the device."""
        for work, done in sorted(self._stale, key=lambda stale: stale[0].chunk):
            self._block(done, self._landing)
            self._refresh(work.renew_bytes * traffic.fetch_s, work.gather_s)
        self._stale = []

    def _opened(self, block: int) -> None:
        """A block's window has opened in forward."""

    def _reach(self, block: int, first: bool) -> None:
        """`Gradients.reach`: the sums of this block and the one before it."""
        if not first:
            for at in range(block, max(block - 2, -1), -1):
                for work in self._demand.gradients[at]:
                    if work.chunk not in self._staged:
                        self._stage(work.chunk, self._sum_ahead(work))

    def _stage(self, chunk: int, nbytes: float) -> None:
        """Fetch sums of a chunk, if there is room."""
        if self._room:
            seconds = nbytes * self._traffic.fetch_s
            self._staged[chunk] = self._queue("fetch", seconds, self._room.popleft())

    def _take(self, chunk: int, nbytes: float) -> float:
        if chunk not in self._staged:
            self._stage(chunk, nbytes)
        return self._staged.pop(chunk)

    def _refresh(self, seconds: float, gather_s: float) -> None:
        """A copy to the device on compute; it takes the link from other fetches."""
        self._await(self._free["fetch"])
        self._stand(seconds, "fetch")
        self.busy["fetch"] += seconds
        self._free["fetch"] = self.now
        if gather_s:
            self._await(self._exchange("fetch", gather_s, self.now), COMMUNICATE)

    def _fetch_chunk(self, chunk: int) -> None:
        d = self._demand
        if d.disk_s[chunk]:
            self.busy[DISK] += d.disk_s[chunk]
            self._block(self._reads.take(chunk), DISK)
        seconds = d.chunk_bytes[chunk] * self._traffic.fetch_s
        # unpacked behind the copy, a piece at a time
        self._think(d.queue_unpack_s[chunk])
        seconds = max(seconds, d.unpack_s[chunk])
        slot = chunk % d.num_slots
        free = max(self._last_use[slot], self._sent[slot])
        arrival = self._queue("fetch", seconds, free)
        if d.gather_s[chunk]:
            arrival = self._exchange("fetch", d.gather_s[chunk], arrival)
        if d.disk_s[chunk]:
            self._reads.ring.append(arrival)
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
            return self._queue("fetch", nbytes * self._traffic.back_s, self.now)
        return 0.0

    def _send(self, work: TrainedWork, first: bool, last: bool) -> None:
        """A pass over each gradient of a chunk, which then leaves."""
        self._add(work, first)
        if last:
            self._run(work.norm_s)
        self._think(work.queue_s)
        self._leave(work.nbytes, self.now)

    def _add(self, work: TrainedWork, first: bool) -> None:
        if not first:
            ahead = self._sum_ahead(work)
            self._await(self._take(work.chunk, ahead))
            rest_s = (work.sum_bytes - ahead) * self._traffic.fetch_s
            # in pieces: what had no room comes while compute adds
            self._await(self._queue("fetch", rest_s, self.now) if rest_s else 0.0)
            self._run(work.sum_s)
            self._room.append(self.now)

    def _sum_ahead(self, work: TrainedWork) -> float:
        """Bytes of a chunk's sums that come before compute reaches its gradients."""
        return work.sum_bytes / self._demand.num_parts

    def _leave(self, nbytes: int, ready: float) -> None:
        """Gradients are sent once there is room for them on the way."""
        if len(self._in_flight) == IN_FLIGHT:
            self._block(self._in_flight.popleft(), "offload")
        seconds = nbytes * self._traffic.offload_s
        self._in_flight.append(self._queue("offload", seconds, ready))

    def _reduce(self, work: TrainedWork, first: bool) -> None:
        """Gradients are reduced, and the own part leaves; its norm is compute's."""
        self._add(work, first)
        self._run(work.norm_s)
        self._think(work.queue_s)
        seconds = work.nbytes * self._demand.scatter_s
        reduced = self._exchange("offload", seconds, self.now)
        self._leave(work.part_bytes, max(self.now, reduced))


class DeferredStep(SimulatedStep):
    """One optimizer step in which updates wait until weights are used: Note [The
    deferred update]."""

    def __init__(self, demand: Demand) -> None:
        super().__init__(demand)
        # of each block, updates that are due; parts in the order in which operands come
        self._due: deque[Sequence[TrainedWork]] = deque()
        self._coming: Iterator[TrainedWork] = iter(())
        self._operands: deque[float] = deque()
        self._outside: Sequence[TrainedWork] = ()
        self._leaving: deque[float] = deque()

    def update(self) -> None:
        """Update what is on the device; of the rest the first operands come."""
        d = self._demand
        self._run(d.update_s)
        self._due.extend(d.gradients)
        self._coming = (
            work for works in d.gradients for work in works for _ in range(d.num_parts)
        )
        self._outside = d.outside
        self._fetch_operands()

    def _enter(self, traffic: Traffic) -> None:
        """Weights outside blocks are updated one after the other, in memory that is
        compute's until then."""
        for work in self._outside:
            seconds = work.operand_bytes * traffic.fetch_s
            self._await(self._queue("fetch", seconds, self.now))
            left = self._update(work)
            if not work.renew_bytes:
                self._block(left, self._landing)
        self._outside = ()

    def _opened(self, block: int) -> None:
        if not self._due:
            return
        for work in self._due.popleft():
            # what is on the way takes turns; with the last ones the next chunk's come
            turns = max(0, self._demand.num_parts // IN_FLIGHT - 1)
            turn = partial(self._update_parts, work, IN_FLIGHT)
            for _counted in range(IN_FLIGHT * self.repeat(turn, turns)):
                next(self._coming)
            self._update_parts(work, self._demand.num_parts - IN_FLIGHT * turns)
        self._fetch_operands()

    def _update_parts(self, work: TrainedWork, times: int) -> None:
        n = self._demand.num_parts
        for _part in range(times):
            if not self._operands:
                self._fetch_operand(next(self._coming))
            self._room.append(self._update(work, self._operands.popleft(), n))
            if n > 1:
                self._fetch_operands()

    def _update(self, work: TrainedWork, there: float = 0.0, parts: int = 1) -> float:
        """Update one of so many parts; returns when all is on the host."""
        self._think(work.queue_update_s / parts)
        self._await(there)
        self._run(work.update_s / parts)
        offload_s = self._traffic.offload_s / parts
        sent = self._queue("offload", work.weight_bytes * offload_s, self.now)
        if work.number is not None:
            self._sent[work.number % self._demand.num_slots] = sent
        left = self._queue("offload", work.state_bytes * offload_s, self.now)
        self._leaving.append(left)
        if len(self._leaving) > IN_FLIGHT:
            self._block(self._leaving.popleft(), "offload")
        return left

    def _fetch_operands(self) -> None:
        """`Updates.prefetch`: as many as there is room for."""
        while self._room and (work := next(self._coming, None)):
            self._fetch_operand(work)

    def _fetch_operand(self, work: TrainedWork) -> None:
        seconds = work.operand_bytes * self._traffic.fetch_s / self._demand.num_parts
        self._operands.append(self._queue("fetch", seconds, self._room.popleft()))

    def clocks(self) -> list[float]:
        return [*super().clocks(), *self._operands, *self._leaving]


def _close(ours: list[float], theirs: list[float], scale: float) -> bool:
    pairs = zip(ours, theirs, strict=False)
    alike = all(abs(a - b) <= 1e-9 * scale for a, b in pairs)
    return len(ours) == len(theirs) and alike
