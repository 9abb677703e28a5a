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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..layout import padded_bytes, shard_bytes
from ..types import (
    IN_FLIGHT,
    BlockTimes,
    Chunk,
    Hardware,
    Layout,
    Moved,
    Placement,
    Plan,
    World,
)

LANES = ("compute", "fetch", "offload", "host")
COMMUNICATE = "communicate"
"""One more lane where there are several ranks."""

ADAM_MOVED_BYTES = 7
"""Bytes that AdamW moves for each byte it updates: reads weight, gradient and two
moments, writes all but the gradient. Other host work is charged by its bytes."""

ALONE = World()
"""One process."""

COMPUTE_BOUND_SHARE = 0.01
"""Compute bounds the step if it stands still for less than this share of it."""


@dataclass(frozen=True)
class StepTime:
    """One optimizer step in the steady state of training.

    Attributes:
        total_s: The step.
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
    world: World = ALONE,
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
        world: Who trains together.
        clips: Whether gradients are clipped by their norm.
        launches_ahead: Whether the calling thread runs ahead of the device, as on
            CUDA; False where blocks compute on it, as on a CPU.

    Raises:
        ValueError: Times or moved bytes do not fit the layout.
    """
    demand = _Demand(layout, plan, times, hardware, fp32_master, moved, world, clips)
    step = _Step(demand, hardware.overlaps, launches_ahead)
    step.update()
    before: list[float] | None = None
    # the last micro-batch of several ranks is unlike the others
    alike = accumulation - demand.reduces
    for number in range(alike):
        started, exposed = step.issued, dict(step.exposed)
        step.forward(first=number == 0)
        step.backward(first=number == 0)
        offsets = step.offsets()
        if before is not None and _close(offsets, before, step.issued - started):
            step.repeat(alike - 1 - number, started, exposed)
            break
        before = offsets
    if demand.reduces:
        step.forward(first=accumulation == 1)
        step.reduce(sums=accumulation > 1)
    step.settle()
    return StepTime(
        total_s=step.now + step.skipped,
        busy_s=demand.busy(accumulation),
        exposed_s=step.exposed,
        recompute_s=accumulation * demand.recompute_s,
        fetched_bytes=demand.fetched_bytes(accumulation),
        offloaded_bytes=demand.offloaded_bytes(accumulation),
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
    world: World = ALONE,
    clips: bool = True,
) -> float:
    """Seconds that no order of the same work can beat; cheap.

    The busiest lane. Forward and backward count apart: what one of them fetches, it
    fetches and needs within itself.
    """
    d = _Demand(layout, plan, times, hardware, fp32_master, moved, world, clips)
    busy = d.busy(accumulation)
    if not hardware.overlaps:
        host_s = busy.pop("host")
        return max(sum(busy.values()), host_s)
    forward, backward = sum(d.forward_s), sum(d.backward_s)
    refresh = d.refresh_bytes * d.first.fetch_s
    phases = max(d.update_s + refresh + forward, d.first.fetch_bytes * d.first.fetch_s)
    phases += (accumulation - 1) * max(forward, d.later.fetch_bytes * d.later.fetch_s)
    phases += accumulation * d.outside_s
    for number, link in d.backwards(accumulation):
        phases += number * max(backward, link.fetch_bytes * link.fetch_s)
    del busy["compute"], busy["fetch"]
    return max(phases + d.norm_s, *busy.values())


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
    d = _Demand(layout, plan, times, hardware, fp32_master, moved, ALONE, clips=False)

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


class Collectives(NamedTuple):
    """Seconds per byte: of an all-gather's result, of a reduce-scatter's input, and of
    what each rank then reduces with other nodes; 0 where there is nobody to do it with.
    """

    gather_s: float
    reduce_s: float
    across_s: float

    @classmethod
    def of(cls, hardware: Hardware, world: World) -> Collectives:
        """Those of a world on a machine."""
        inside, across = world.local_size > 1, world.num_nodes > 1
        return cls(
            1 / hardware.gather_bytes_s if inside else 0.0,
            1 / hardware.reduce_bytes_s if inside else 0.0,
            1 / (world.local_size * hardware.across_bytes_s) if across else 0.0,
        )

    @property
    def scatter_s(self) -> float:
        """Of sums over all ranks, of which each rank of a node gets a part."""
        return self.reduce_s + self.across_s

    @property
    def all_reduce_s(self) -> float:
        """Of sums that all ranks get, as DDP makes them."""
        return self.scatter_s + self.gather_s


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


def host_work(
    chunk: Chunk,
    hardware: Hardware,
    fp32_master: bool,
    clips: bool = True,
    world: World = ALONE,
) -> HostWork:
    """What training a chunk costs each rank when its state is on the host."""
    moved_s = 1 / (ADAM_MOVED_BYTES * hardware.adam_bytes_s)
    mastered = chunk.payload_16_bit_bytes if fp32_master else 0
    own, masters = chunk.payload_bytes - mastered, 2 * mastered
    updated = own + masters
    # masters are rounded into the weights, clipping reads and writes gradients
    moved = ADAM_MOVED_BYTES * updated + masters + mastered
    moved += 2 * updated if clips else 0
    # a gradient without a master is copied straight into its buffer at first
    first_sum_s = moved_s * (mastered + masters)
    later_sum_s = moved_s * (own + mastered + 2 * updated)
    ranks = world.local_size
    if world.size > 1:
        # until they are reduced, sums are as wide as the gradients
        part_sum_s, first_sum_s = first_sum_s / ranks, 0.0
        later_sum_s = 3 * moved_s * chunk.payload_bytes
    else:
        part_sum_s = 0.0
    return HostWork(
        own + mastered,
        first_sum_s,
        later_sum_s,
        (moved_s * updated if clips else 0.0) / ranks,
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
        world: World,
        clips: bool,
    ) -> None:
        self.world = world
        self.reduces = world.size > 1
        self.collectives = Collectives.of(hardware, world)
        placements, policies = plan.placements, plan.policies
        paged = [i for i, p in enumerate(placements) if p is Placement.PAGED]
        self.num_chunks = len(paged)
        self.num_slots = plan.n_buffer
        self.chunk_bytes = [shard_bytes(layout.chunks[i], plan.shards) for i in paged]
        self.gather_s = [self._gather_s(layout.chunks[i], plan) for i in paged]
        # of the two ways that a shard goes
        gathers = plan.shards * self.collectives.gather_s > 1 / hardware.fetch_bytes_s
        self.slower = COMMUNICATE if plan.shards > 1 and gathers else "fetch"
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
        self._add_shared(layout, plan)
        self._add_links(hardware)

    def backwards(self, accumulation: int) -> list[tuple[int, _Link]]:
        """How often what is moved in a backward; with several ranks the last differs."""
        if not self.reduces:
            return [(accumulation, self.backward)]
        last = self.last if accumulation > 1 else self.only
        return [(accumulation - 1, self.backward), (1, last)]

    def fetched_bytes(self, accumulation: int) -> int:
        """Host to device in a step, without swapped activations."""
        back = sum(self.moved.back)
        return (
            self.first.fetch_bytes
            + (accumulation - 1) * self.later.fetch_bytes
            + sum(
                number * (link.fetch_bytes - back)
                for number, link in self.backwards(accumulation)
            )
        )

    def offloaded_bytes(self, accumulation: int) -> int:
        """Device to host in a step, without swapped activations."""
        return sum(
            number * link.offload_bytes for number, link in self.backwards(accumulation)
        )

    def busy(self, accumulation: int) -> dict[str, float]:
        """Seconds of work by lane."""
        compute = self.outside_s + sum(self.forward_s) + sum(self.backward_s)
        first, later = self.first, self.later
        more = accumulation - 1
        sums = [g for block in (*self.gradients, self.outside) for g in block]
        fetch_s = first.fetch_bytes * first.fetch_s
        fetch_s += more * later.fetch_bytes * later.fetch_s
        offload_s = first.offload_bytes * first.offload_s
        offload_s += more * later.offload_bytes * later.offload_s
        for number, link in self.backwards(accumulation):
            fetch_s += number * link.fetch_bytes * link.fetch_s
            offload_s += number * link.offload_bytes * link.offload_s
        host_s = self.norm_s + sum(update.seconds for update in self.updates)
        added = more - 1 if self.reduces and more else more
        host_s += sum(
            g.first_sum_s + added * g.later_sum_s + g.part_sum_s for g in sums
        )
        busy = {
            "compute": self.update_s + accumulation * compute,
            "fetch": fetch_s,
            "offload": offload_s,
            "host": host_s,
        }
        if self.reduces:
            gathered = self.missing_first + more * self.missing_later
            gathered += accumulation * self.missing_backward
            busy[COMMUNICATE] = (
                sum(self.gather_s[chunk] for chunk in gathered)
                + sum(u.gather_s for u in self.updates if u.number is None)
                + sum(g.nbytes for g in sums) * self.collectives.scatter_s
                + sum(self.shared_s)
            )
        return busy

    def _gather_s(self, chunk: Chunk, plan: Plan) -> float:
        if plan.shards == 1:
            return 0.0
        return padded_bytes(chunk, plan.shards) * self.collectives.gather_s

    def _add_shared(self, layout: Layout, plan: Plan) -> None:
        """Seconds of DDP's reductions when each block's backward is done."""
        inside = [0] * len(layout.blocks)
        outside = layout.fixed_trainable_bytes
        for chunk in layout.chunks:
            if chunk.trainable and not plan.placements[chunk.index].on_host:
                if chunk.block is None:
                    outside += chunk.payload_bytes
                else:
                    inside[chunk.block] += chunk.payload_bytes
        each = outside / len(inside) if inside else 0.0
        rate = self.collectives.all_reduce_s
        self.shared_s = [rate * (nbytes + each) for nbytes in inside]

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
            work = host_work(chunk, hardware, fp32_master, clips, self.world)
            chunks = (
                self.outside if chunk.block is None else self.gradients[chunk.block]
            )
            chunks.append(work)
            self.norm_s += work.norm_s
            number = numbers.get(chunk.index)
            self.updates.append(
                _Update(
                    number,
                    chunk.index,
                    shard_bytes(chunk, plan.shards),
                    self._gather_s(chunk, plan),
                    work.update_s,
                )
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
        sums = [g for block in (*self.gradients, self.outside) for g in block]
        gradients = sum(work.nbytes for work in sums)
        parts = sum(work.part_bytes for work in sums)

        def link(chunks: list[int], more: int, offload_bytes: int) -> _Link:
            fetch_bytes = sum(self.chunk_bytes[c] for c in chunks) + more
            rates = seconds_per_byte(fetch_bytes, offload_bytes, hardware)
            return _Link(fetch_bytes, offload_bytes, *rates)

        self.first = link(self.missing_first, self.refresh_bytes, swapped)
        self.later = link(self.missing_later, 0, swapped)
        back = sum(self.moved.back)
        self.backward = link(self.missing_backward, back, gradients)
        if self.reduces:
            self.only = link(self.missing_backward, back, parts)
            self.last = link(self.missing_backward, back + gradients, parts)


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
        lanes = [*LANES[1:], COMMUNICATE] if demand.reduces else LANES[1:]
        self.exposed = dict.fromkeys(lanes, 0.0)
        self._fetch_free = self._offload_free = self._host_free = 0.0
        self._communicate_free = 0.0
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
            done = self._on_host(update.seconds, 0.0)
            if update.number is None:
                self._stale.append((update, done))
            else:
                self._updated[update.number] = done

    def forward(self, first: bool) -> None:
        """Forward of one micro-batch and what runs outside the blocks."""
        d = self._demand
        link = d.first if first else d.later
        missing = (d.missing_first if first else d.missing_later)[::-1]
        # `Session.ready`: weights that stay on the device
        for update, done in sorted(self._stale, key=lambda stale: stale[0].chunk):
            self._block(done, "host")
            self._refresh(update.nbytes * link.fetch_s, update.gather_s)
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

        def send(gradients: HostWork) -> None:
            self._send(gradients, first)

        self._backward(self._demand.backward, send, [])

    def reduce(self, sums: bool) -> None:
        """Backward of the last micro-batch of several ranks: gradients are reduced,
        after `sums` of earlier micro-batches have been added."""
        d = self._demand
        link = d.last if sums else d.only
        self._drain()

        def send(gradients: HostWork) -> None:
            self._reduce(gradients, link, sums)

        self._backward(link, send, d.shared_s)

    def _backward(
        self, link: _Link, send: Callable[[HostWork], None], shared_s: Sequence[float]
    ) -> None:
        d = self._demand
        missing = d.missing_backward[:]
        for gradients in d.outside[1:]:
            send(gradients)
        there: float | None = None
        for block in range(len(d.bounds) - 1, -1, -1):
            start, stop = d.bounds[block]
            while missing and missing[-1] >= start:
                self._fetch_chunk(missing.pop(), link)
            if there is None:
                there = self._swap_in(block, link)
            before = self._swap_in(block - 1, link) if block else None
            self._await_chunks(start, stop)
            self._await(there)
            there = before
            while missing and missing[-1] >= stop - d.num_slots:
                self._fetch_chunk(missing.pop(), link)
            self._run(d.backward_s[block])
            self._mark_use(start, stop)
            for gradients in d.gradients[block]:
                send(gradients)
            if shared_s:
                self._communicate(shared_s[block])
        for gradients in d.outside[:1]:
            send(gradients)
        # the trainer reads the loss of each micro-batch
        self._run(0.0)
        self.issued = self.now

    def settle(self) -> None:
        """`GradientOffload.settle` and the norm; the next update follows."""
        self._block(self._communicate_free, COMMUNICATE)
        self._drain()
        if self._demand.norm_s:
            self._block(self._on_host(self._demand.norm_s, 0.0), "host")
        self._run(0.0)

    def _drain(self) -> None:
        """Wait until the host has all gradients that were sent."""
        while self._in_flight:
            self._block(self._in_flight.popleft(), "offload")
        for done in self._staging:
            self._block(done, "host")

    def offsets(self) -> list[float]:
        """How far each clock is ahead of the calling thread between micro-batches."""
        clocks = (
            self._fetch_free,
            self._offload_free,
            self._host_free,
            self._communicate_free,
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

    def _offload(self, seconds: float, ready: float = 0.0) -> float:
        if not self._overlaps:
            self._stand(seconds, "offload")
            return self.now
        start = max(self._offload_free, self.now, self.issued, ready)
        self._offload_free = start + seconds
        return self._offload_free

    def _communicate(self, seconds: float, ready: float | None = None) -> float:
        """Not before `ready`, or before compute is here."""
        if not self._overlaps:
            self._stand(seconds, COMMUNICATE)
            return self.now
        ready = self.now if ready is None else ready
        start = max(self._communicate_free, self.issued, ready)
        self._communicate_free = start + seconds
        return self._communicate_free

    def _on_host(self, seconds: float, ready: float) -> float:
        self._host_free = max(self._host_free, self.issued, ready) + seconds
        return self._host_free

    def _refresh(self, seconds: float, gather_s: float) -> None:
        """A copy to the device on compute; it takes the link from other fetches."""
        self._await(self._fetch_free)
        self._stand(seconds, "fetch")
        self._fetch_free = self.now
        if gather_s:
            self._await(self._communicate(gather_s), COMMUNICATE)

    def _fetch_chunk(self, chunk: int, link: _Link) -> None:
        d = self._demand
        arrival = self._fetch(
            d.chunk_bytes[chunk] * link.fetch_s, self._last_use[chunk % d.num_slots]
        )
        if d.gather_s[chunk]:
            arrival = self._communicate(d.gather_s[chunk], arrival)
        self._arrival[chunk] = arrival

    def _await_chunks(self, start: int, stop: int) -> None:
        if start < stop:
            self._await(max(self._arrival[start:stop]), self._demand.slower)

    def _mark_use(self, start: int, stop: int) -> None:
        for chunk in range(start, stop):
            self._last_use[chunk % self._demand.num_slots] = self.now

    def _swap_in(self, block: int, link: _Link) -> float:
        """Not before compute is here: the room for it comes from its stream."""
        nbytes = self._demand.moved.back[block]
        return self._fetch(nbytes * link.fetch_s, self.now) if nbytes else 0.0

    def _send(self, gradients: HostWork, first: bool) -> None:
        """`GradientOffload._send` of a chunk."""
        if len(self._in_flight) == IN_FLIGHT:
            self._block(self._in_flight.popleft(), "offload")
        sum_s = gradients.first_sum_s if first else gradients.later_sum_s
        if sum_s:
            self._block(self._staging.popleft(), "host")
        arrived = self._offload(gradients.nbytes * self._demand.backward.offload_s)
        self._in_flight.append(arrived)
        if sum_s:
            self._staging.append(self._on_host(sum_s, arrived))

    def _reduce(self, gradients: HostWork, link: _Link, sums: bool) -> None:
        """Sums come, all is packed on compute, reduced, and the own part leaves."""
        if sums:
            # one buffer for them: compute has just read those before
            self._await(self._fetch(gradients.nbytes * link.fetch_s, self.now))
        self._await(self._packed.popleft(), COMMUNICATE)
        scatter_s = gradients.nbytes * self._demand.collectives.scatter_s
        reduced = self._communicate(scatter_s)
        arrived = self._offload(gradients.part_bytes * link.offload_s, reduced)
        self._packed.append(arrived)
        self._staging.append(self._on_host(gradients.part_sum_s, arrived))


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
