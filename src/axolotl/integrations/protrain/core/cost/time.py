"""Seconds of one optimizer step: a discrete-event simulation of what the runtime does.

Four lanes work side by side: compute, copies to the device, copies from it, and the one
host thread. The calling thread queues their work and sometimes waits; every rule for
who waits for whom is that of `Pager`, `Slot`, `GradientOffload`, `HostAdamW` and
`Session`. At the update every lane is idle and the slots hold the chunks that forward
begins with, so one step, from update to update, is the period of the training.

Not modelled: the time to launch work, and the order inside a block. What runs outside
the blocks is put at the turn from forward to backward, where the head is. Gradients
leave when their block's backward is done, those outside the blocks before the first
block's backward; the first weight outside is taken for the embedding, whose gradient
comes last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..types import BlockTimes, Chunk, Hardware, Layout, Moved, Placement, Plan

LANES = ("compute", "fetch", "offload", "host")

MAX_IN_FLIGHT = 2
"""Chunks whose gradients are on their way to the host, and staging buffers there."""

ADAM_MOVED_BYTES = 7
"""Bytes that AdamW moves for each byte it updates: reads weight, gradient and two
moments, writes all but the gradient. Other host work is charged by its bytes."""

COMPUTE_BOUND_SHARE = 0.01
"""Compute bounds the step if it stands still for less than this share of it."""


@dataclass(frozen=True)
class StepTime:
    """One optimizer step in the steady state of training.

    Attributes:
        total_s: The step.
        busy_s: For each of `LANES` how long it works.
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
    def exposed_share(self) -> float:
        """Part of the step in which compute stands still, 0 to 1."""
        return sum(self.exposed_s.values()) / self.total_s if self.total_s else 0.0

    @property
    def limiter(self) -> str:
        """What bounds the step: compute, or the lane that it waits for most."""
        if self.exposed_share < COMPUTE_BOUND_SHARE:
            return "compute"
        return max(self.exposed_s, key=self.exposed_s.__getitem__)


def simulate_step(
    layout: Layout,
    plan: Plan,
    times: BlockTimes,
    hardware: Hardware,
    accumulation: int,
    fp32_master: bool,
    moved: Moved | None = None,
    *,
    clips: bool = True,
    launches_ahead: bool = True,
) -> StepTime:
    """Run one step of a plan on clocks.

    Args:
        layout: The model's chunks and blocks.
        plan: Where chunks live and what becomes of activations.
        times: Compute of one micro-batch under no plan; `update_s` of this plan.
        hardware: Rates. `adam_bytes_s` counts the bytes of what AdamW updates: fp32
            masters where there are any. Unless it `overlaps`, every copy runs on the
            compute thread, and only host updates run beside it.
        accumulation: Micro-batches of a step.
        fp32_master: Whether 16-bit host weights are updated through masters.
        moved: What swapping moves; needed only for plans that swap.
        clips: Whether gradients are clipped by their norm.
        launches_ahead: Whether the calling thread runs ahead of the device, as on
            CUDA; False where blocks compute on it, as on a CPU.

    Raises:
        ValueError: Times or moved bytes do not fit the layout.
    """
    demand = _Demand(layout, plan, times, hardware, fp32_master, moved, clips)
    step = _Step(demand, hardware.overlaps, launches_ahead)
    step.update()
    before: list[float] | None = None
    for number in range(accumulation):
        started, exposed = step.issued, dict(step.exposed)
        step.forward(first=number == 0)
        step.backward(first=number == 0)
        offsets = step.offsets()
        if before is not None and _close(offsets, before, step.issued - started):
            step.repeat(accumulation - 1 - number, started, exposed)
            break
        before = offsets
    step.settle()
    return StepTime(
        total_s=step.now + step.skipped,
        busy_s=demand.busy(accumulation),
        exposed_s=step.exposed,
        recompute_s=accumulation * demand.recompute_s,
        fetched_bytes=demand.first.fetch_bytes
        + (accumulation - 1) * demand.later.fetch_bytes
        + accumulation * (demand.backward.fetch_bytes - sum(demand.moved.back)),
        offloaded_bytes=accumulation * demand.backward.offload_bytes,
    )


def lower_bound_s(
    layout: Layout,
    plan: Plan,
    times: BlockTimes,
    hardware: Hardware,
    accumulation: int,
    fp32_master: bool,
    moved: Moved | None = None,
    *,
    clips: bool = True,
) -> float:
    """Seconds that no order of the same work can beat; cheap.

    The busiest lane. Forward and backward count apart: what one of them fetches, it
    fetches and needs within itself.
    """
    d = _Demand(layout, plan, times, hardware, fp32_master, moved, clips)
    busy = d.busy(accumulation)
    if not hardware.overlaps:
        return max(busy["compute"] + busy["fetch"] + busy["offload"], busy["host"])
    forward, backward = sum(d.forward_s), sum(d.backward_s)
    refresh = d.refresh_bytes * d.first.fetch_s
    phases = max(d.update_s + refresh + forward, d.first.fetch_bytes * d.first.fetch_s)
    phases += (accumulation - 1) * max(forward, d.later.fetch_bytes * d.later.fetch_s)
    phases += accumulation * d.outside_s
    phases += accumulation * max(backward, d.backward.fetch_bytes * d.backward.fetch_s)
    return max(phases + d.norm_s, busy["offload"], busy["host"])


def closed_form_s(
    layout: Layout,
    plan: Plan,
    times: BlockTimes,
    hardware: Hardware,
    fp32_master: bool,
    moved: Moved | None = None,
) -> float:
    """The paper's time of a step of one micro-batch, to compare with.

    Equations 2 to 7 with one rank (no gather, no reduce), a block's chunks taken
    together, and the two directions of the link side by side. Clipping is not in them.
    """
    d = _Demand(layout, plan, times, hardware, fp32_master, moved, clips=False)

    def upload_s(block: int, chunks: Iterable[int], link: _Link) -> float:
        if not 0 <= block < len(d.bounds):
            return 0.0
        start, stop = d.bounds[block]
        return link.fetch_s * sum(d.chunk_bytes[c] for c in chunks if start <= c < stop)

    every, gone = range(d.num_chunks), range(d.num_chunks - d.num_slots)
    forward_s = sum(
        max(seconds, upload_s(block + 1, every, d.first))
        for block, seconds in enumerate(d.forward_s)
    )
    backward_s = sum(
        max(
            seconds,
            upload_s(block - 1, gone, d.backward),
            d.backward.offload_s * sum(g.nbytes for g in d.gradients[block]),
        )
        for block, seconds in enumerate(d.backward_s)
    )
    host_s = sum(update.seconds for update in d.updates)
    return (
        forward_s
        + times.outside_forward_s
        + max(backward_s + times.outside_backward_s + times.update_s, host_s)
    )


class _Link(NamedTuple):
    """Traffic of forward or backward and what it costs, seconds per byte."""

    fetch_bytes: int
    offload_bytes: int
    fetch_s: float
    offload_s: float


class HostWork(NamedTuple):
    """Of one host-kept trained chunk: gradient bytes that leave in a micro-batch, and
    seconds of the host to add them up, for their norm and for the update."""

    nbytes: int
    first_sum_s: float
    later_sum_s: float
    norm_s: float
    update_s: float


def host_work(
    chunk: Chunk, hardware: Hardware, fp32_master: bool, clips: bool = True
) -> HostWork:
    """What training a chunk costs when its state is on the host."""
    moved_s = 1 / (ADAM_MOVED_BYTES * hardware.adam_bytes_s)
    mastered = chunk.payload_16_bit_bytes if fp32_master else 0
    own, masters = chunk.payload_bytes - mastered, 2 * mastered
    updated = own + masters
    # masters are rounded into the weights, clipping reads and writes gradients
    moved = ADAM_MOVED_BYTES * updated + masters + mastered
    moved += 2 * updated if clips else 0
    return HostWork(
        own + mastered,
        # a gradient without a master is copied straight into its buffer at first
        moved_s * (mastered + masters),
        moved_s * (own + mastered + 2 * updated),
        moved_s * updated if clips else 0.0,
        moved_s * moved,
    )


class _Update(NamedTuple):
    """Host update of one chunk; `number` among the paged ones, None if it stays."""

    number: int | None
    chunk: int
    nbytes: int
    seconds: float


class _Demand:
    """What a step computes, moves and updates under a plan; no order yet."""

    def __init__(
        self,
        layout: Layout,
        plan: Plan,
        times: BlockTimes,
        hardware: Hardware,
        fp32_master: bool,
        moved: Moved | None,
        clips: bool,
    ) -> None:
        placements, policies = plan.placements, plan.policies
        paged = [i for i, p in enumerate(placements) if p is Placement.PAGED]
        self.num_chunks = len(paged)
        self.num_slots = plan.n_buffer
        self.chunk_bytes = [layout.chunks[i].nbytes for i in paged]
        self.bounds: list[tuple[int, int]] = []
        end = 0
        for block in layout.blocks:
            start = end
            for index in block.chunks:
                end += placements[index] is Placement.PAGED
            self.bounds.append((start, end))

        self.forward_s = list(times.forward_s)
        self.backward_s = list(times.backward_s)
        self.recompute_s = 0.0
        self.swaps = [policy.swaps for policy in policies]
        if moved is None and not any(self.swaps):
            moved = Moved(*[(0,) * len(policies)] * 2)
        if moved is None or not len(moved.out) == len(moved.back) == len(policies):
            raise ValueError(
                f"moved bytes of {len(moved.out) if moved else 0} blocks for a plan "
                f"that swaps some of {len(policies)}"
            )
        self.moved = moved
        if not len(self.bounds) == len(self.forward_s) == len(self.backward_s):
            raise ValueError(
                f"times of {len(self.forward_s)} and {len(self.backward_s)} blocks for "
                f"a layout of {len(self.bounds)}"
            )
        for number, policy in enumerate(policies):
            if policy.recomputes:
                self.backward_s[number] += self.forward_s[number]
                self.recompute_s += self.forward_s[number]
        self.outside_s = times.outside_forward_s + times.outside_backward_s
        self.update_s = times.update_s
        self._add_host_work(layout, plan, paged, hardware, fp32_master, clips)
        self._add_links(hardware)

    def busy(self, accumulation: int) -> dict[str, float]:
        """Seconds of work by lane."""
        compute = self.outside_s + sum(self.forward_s) + sum(self.backward_s)
        first, later, backward = self.first, self.later, self.backward
        more = accumulation - 1
        sums = [g for block in (*self.gradients, self.outside) for g in block]
        return {
            "compute": self.update_s + accumulation * compute,
            "fetch": first.fetch_bytes * first.fetch_s
            + more * later.fetch_bytes * later.fetch_s
            + accumulation * backward.fetch_bytes * backward.fetch_s,
            "offload": first.offload_bytes * first.offload_s
            + more * later.offload_bytes * later.offload_s
            + accumulation * backward.offload_bytes * backward.offload_s,
            "host": self.norm_s
            + sum(update.seconds for update in self.updates)
            + sum(g.first_sum_s + more * g.later_sum_s for g in sums),
        }

    def _add_host_work(
        self,
        layout: Layout,
        plan: Plan,
        paged: list[int],
        hardware: Hardware,
        fp32_master: bool,
        clips: bool,
    ) -> None:
        numbers = {index: number for number, index in enumerate(paged)}
        self.updates: list[_Update] = []
        self.gradients: list[list[HostWork]] = [[] for _ in layout.blocks]
        self.outside: list[HostWork] = []
        self.norm_s = 0.0
        for chunk in layout.chunks:
            if not chunk.trainable or not plan.placements[chunk.index].on_host:
                continue
            work = host_work(chunk, hardware, fp32_master, clips)
            chunks = (
                self.outside if chunk.block is None else self.gradients[chunk.block]
            )
            chunks.append(work)
            self.norm_s += work.norm_s
            number = numbers.get(chunk.index)
            self.updates.append(
                _Update(number, chunk.index, chunk.nbytes, work.update_s)
            )
        # `Session` updates first what forward reads first: outside the blocks
        self.updates.sort(key=lambda u: layout.chunks[u.chunk].block is not None)

    def _add_links(self, hardware: Hardware) -> None:
        stale = {u.number for u in self.updates if u.number is not None}
        kept = range(min(self.num_slots, self.num_chunks))
        self.missing_later = list(range(len(kept), self.num_chunks))
        self.missing_first = [c for c in kept if c in stale] + self.missing_later
        self.missing_backward = list(range(self.num_chunks - len(kept)))
        self.refresh_bytes = sum(u.nbytes for u in self.updates if u.number is None)
        swapped = sum(self.moved.out)
        gradients = sum(
            g.nbytes for block in (*self.gradients, self.outside) for g in block
        )

        def link(chunks: list[int], more: int, offload_bytes: int) -> _Link:
            fetch_bytes = sum(self.chunk_bytes[c] for c in chunks) + more
            rates = seconds_per_byte(fetch_bytes, offload_bytes, hardware)
            return _Link(fetch_bytes, offload_bytes, *rates)

        self.first = link(self.missing_first, self.refresh_bytes, swapped)
        self.later = link(self.missing_later, 0, swapped)
        self.backward = link(self.missing_backward, sum(self.moved.back), gradients)


class _Step:
    """The clocks of the lanes, in seconds since the update.

    Attributes:
        now: Compute has worked or waited until here.
        issued: The calling thread has queued work or waited until here.
        skipped: Seconds of micro-batches that were not simulated one by one.
        exposed: Seconds that compute stood still, by the lane it waited for.
    """

    def __init__(self, demand: _Demand, overlaps: bool, launches_ahead: bool) -> None:
        self._demand = demand
        self._overlaps = overlaps
        self._ahead = launches_ahead and overlaps
        self.now = self.issued = self.skipped = 0.0
        self.exposed = dict.fromkeys(LANES[1:], 0.0)
        self._fetch_free = self._offload_free = self._host_free = 0.0
        self._cause = "host"
        self._updated = [0.0] * demand.num_chunks
        self._stale: list[tuple[int, int, float]] = []
        self._arrival = [0.0] * demand.num_chunks
        self._last_use = [0.0] * demand.num_slots
        self._gone = 0.0
        self._in_flight: deque[float] = deque()
        self._staging = deque([0.0] * MAX_IN_FLIGHT)

    def update(self) -> None:
        """`PagedAdamW.step`: the device's part, then one host update after another."""
        self._run(self._demand.update_s)
        for update in self._demand.updates:
            done = self._on_host(update.seconds, 0.0)
            if update.number is None:
                self._stale.append((update.chunk, update.nbytes, done))
            else:
                self._updated[update.number] = done

    def forward(self, first: bool) -> None:
        """Forward of one micro-batch and what runs outside the blocks."""
        d = self._demand
        link = d.first if first else d.later
        missing = (d.missing_first if first else d.missing_later)[::-1]
        # `Session.ready`: weights that stay on the device
        for _, nbytes, done in sorted(self._stale):
            self._block(done, "host")
            self._refresh(nbytes * link.fetch_s)
        self._stale = []
        for block, (start, stop) in enumerate(d.bounds):
            while missing and missing[-1] < stop:
                self._block(self._updated[missing[-1]], "host")
                self._fetch_chunk(missing.pop(), link)
            self._await_chunks(start, stop)
            while missing and missing[-1] < start + d.num_slots:
                # what is held back now is asked for again when the next block opens
                if self._updated[missing[-1]] > self.issued:
                    break
                self._fetch_chunk(missing.pop(), link)
            if d.swaps[block]:
                # only now is the room free that the one before has left
                self._await(self._gone, "offload")
            self._run(d.forward_s[block])
            self._mark_use(start, stop)
            if d.moved.out[block]:
                self._gone = self._offload(d.moved.out[block] * link.offload_s)
        self._await(self._gone, "offload")
        self._run(d.outside_s)

    def backward(self, first: bool) -> None:
        """Backward of one micro-batch; gradients leave block by block."""
        d = self._demand
        link = d.backward
        missing = d.missing_backward[:]
        for gradients in d.outside[1:]:
            self._send(gradients, first)
        there: float | None = None
        for block in range(len(d.bounds) - 1, -1, -1):
            start, stop = d.bounds[block]
            while missing and missing[-1] >= start:
                self._fetch_chunk(missing.pop(), link)
            if there is None:
                there = self._swap_in(block)
            before = self._swap_in(block - 1) if block else None
            self._await_chunks(start, stop)
            self._await(there)
            there = before
            while missing and missing[-1] >= stop - d.num_slots:
                self._fetch_chunk(missing.pop(), link)
            self._run(d.backward_s[block])
            self._mark_use(start, stop)
            for gradients in d.gradients[block]:
                self._send(gradients, first)
        for gradients in d.outside[:1]:
            self._send(gradients, first)
        # the trainer reads the loss of each micro-batch
        self._run(0.0)
        self.issued = self.now

    def settle(self) -> None:
        """`GradientOffload.settle` and the norm; the next update follows."""
        while self._in_flight:
            self._block(self._in_flight.popleft(), "offload")
        for done in self._staging:
            self._block(done, "host")
        if self._demand.norm_s:
            self._block(self._on_host(self._demand.norm_s, 0.0), "host")
        self._run(0.0)

    def offsets(self) -> list[float]:
        """How far each clock is ahead of the calling thread between micro-batches."""
        clocks = (
            self._fetch_free,
            self._offload_free,
            self._host_free,
            *self._in_flight,
            *self._staging,
        )
        return [max(0.0, clock - self.issued) for clock in clocks]

    def repeat(self, times: int, started: float, exposed: Mapping[str, float]) -> None:
        """Count the micro-batch that began at `started` that many times more."""
        self.skipped += times * (self.issued - started)
        for lane, before in exposed.items():
            self.exposed[lane] += times * (self.exposed[lane] - before)

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
        if not self._ahead:
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

    def _fetch(self, seconds: float, ready: float) -> float:
        if not self._overlaps:
            self._stand(seconds, "fetch")
            return self.now
        self._fetch_free = max(self._fetch_free, self.issued, ready) + seconds
        return self._fetch_free

    def _offload(self, seconds: float) -> float:
        if not self._overlaps:
            self._stand(seconds, "offload")
            return self.now
        start = max(self._offload_free, self.now, self.issued)
        self._offload_free = start + seconds
        return self._offload_free

    def _on_host(self, seconds: float, ready: float) -> float:
        self._host_free = max(self._host_free, self.issued, ready) + seconds
        return self._host_free

    def _refresh(self, seconds: float) -> None:
        """A copy to the device on compute; it takes the link from other fetches."""
        self._await(self._fetch_free)
        self._stand(seconds, "fetch")
        self._fetch_free = self.now

    def _fetch_chunk(self, chunk: int, link: _Link) -> None:
        d = self._demand
        self._arrival[chunk] = self._fetch(
            d.chunk_bytes[chunk] * link.fetch_s, self._last_use[chunk % d.num_slots]
        )

    def _await_chunks(self, start: int, stop: int) -> None:
        if start < stop:
            self._await(max(self._arrival[start:stop]))

    def _mark_use(self, start: int, stop: int) -> None:
        for chunk in range(start, stop):
            self._last_use[chunk % self._demand.num_slots] = self.now

    def _swap_in(self, block: int) -> float:
        """Not before compute is here: the room for it comes from its stream."""
        nbytes, link = self._demand.moved.back[block], self._demand.backward
        return self._fetch(nbytes * link.fetch_s, self.now) if nbytes else 0.0

    def _send(self, gradients: HostWork, first: bool) -> None:
        """`GradientOffload._send` of a chunk."""
        if len(self._in_flight) == MAX_IN_FLIGHT:
            self._block(self._in_flight.popleft(), "offload")
        sum_s = gradients.first_sum_s if first else gradients.later_sum_s
        if sum_s:
            self._block(self._staging.popleft(), "host")
        arrived = self._offload(gradients.nbytes * self._demand.backward.offload_s)
        self._in_flight.append(arrived)
        if sum_s:
            self._staging.append(self._on_host(sum_s, arrived))


def seconds_per_byte(
    fetch_bytes: int, offload_bytes: int, hardware: Hardware
) -> tuple[float, float]:
    """Of fetches and offloads in one phase.

    As much of each direction as the other has work for goes at the rate for both.
    """
    fetch_s, offload_s = 1 / hardware.fetch_bytes_s, 1 / hardware.offload_bytes_s
    if not hardware.overlaps:
        return fetch_s, offload_s
    fetching, offloading = fetch_bytes * fetch_s, offload_bytes * offload_s
    both = min(fetching, offloading)
    fetch_share = both / fetching if fetching else 0.0
    offload_share = both / offloading if offloading else 0.0
    return (
        fetch_s + fetch_share * (1 / hardware.fetch_both_bytes_s - fetch_s),
        offload_s + offload_share * (1 / hardware.offload_both_bytes_s - offload_s),
    )


def _close(ours: list[float], theirs: list[float], scale: float) -> bool:
    return len(ours) == len(theirs) and all(
        abs(a - b) <= 1e-9 * scale for a, b in zip(ours, theirs, strict=True)
    )
