"""Peak bytes of a plan: a walk over the segments of a step.

The paper's peak (equations 8 to 11) with a term of its own for the saved inputs of
recomputed blocks, and without its factor for what was not modelled: the trace follows
every tensor, and what no trace sees is one measured number of the hardware.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from operator import add
from typing import NamedTuple

from ..types import (
    IN_FLIGHT,
    Hardware,
    Layout,
    Lifetime,
    Moved,
    Placement,
    Plan,
    Policy,
    Segment,
    Trace,
    Update,
    Workload,
)
from .trained_bytes import (
    HostBytes,
    StateBytes,
    TrainedBytes,
    host_state_bytes,
    state_bytes,
)

# of an enum each look-up takes its time, and a walk has thousands
_KEEP, _SWAP, _SWAP_INPUT = Policy.KEEP, Policy.SWAP, Policy.SWAP_INPUT


_OF_LOSS = " of the loss"
GENERATION, SENDING = "generation", "sending"


def moment(label: str) -> str:
    """Say when a labelled point is, for people, whom the operator tells nothing."""
    if label == GENERATION:
        return "while answers are generated"
    if label == SENDING:
        return "while weights go to the server that answers"
    where = label.partition(", ")[0]
    return "while computing the loss" if _OF_LOSS in label else f"at {where}"


@dataclass(frozen=True)
class Point:
    """Device bytes at one moment of a step.

    Attributes:
        label: For people, "forward 3" for example; `moment` is a part of a sentence.
        phase: load, forward, backward, update, evaluation or save.
        weights: Everything that holds weights, slots excepted.
        operands: Gradients and optimizer state that come from the host.
        activations: What the model and autograd hold.
        working: What the running segment takes on top.
    """

    label: str
    phase: str
    weights: int
    slots: int
    operands: int
    moments: int
    gradients: int
    activations: int
    working: int

    @property
    def in_loss(self) -> bool:
        """Tell whether it is between the blocks' forward and their backward."""
        return _OF_LOSS in self.label

    @property
    def moment(self) -> str:
        """Say when it is, as `moment` words it."""
        return moment(self.label)

    @property
    def total(self) -> int:
        standing = self.weights + self.slots + self.operands + self.moments
        return standing + self.gradients + self.activations + self.working


@dataclass(frozen=True)
class DeviceEstimate:
    """Predicted device bytes of a plan, `unseen_bytes` included in the peak and in the
    highest total of each phase, but in no point of the timeline."""

    peak_bytes: int
    unseen_bytes: int
    states: StateBytes
    peak: Point
    phases: dict[str, int]
    timeline: tuple[Point, ...]

    @property
    def terms(self) -> dict[str, int]:
        """The peak by term."""
        states, peak = self.states, self.peak
        return {
            "fixed weights": states.fixed,
            "adapters": states.adapters,
            "resident chunks": states.resident,
            "host-state weights": states.host_state,
            "slots": states.slots,
            **({"update operands": peak.operands} if peak.operands else {}),
            **({"gradient buckets": states.buckets} if states.buckets else {}),
            "optimizer state": peak.moments,
            "gradients": peak.gradients,
            "saved activations": peak.activations,
            "working set": peak.working,
            "context and workspaces": self.unseen_bytes,
        }


@dataclass(frozen=True)
class HostEstimate:
    """Predicted host bytes of a node, and their highest total by phase."""

    states: HostBytes
    phases: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        return max(self.phases.values())

    @property
    def terms(self) -> dict[str, int]:
        # `arena` is its name in report.json
        names = {"host_pool": "arena"}
        return {names.get(name, name): n for name, n in vars(self.states).items()}


class Activations(NamedTuple):
    """Activation bytes of a micro-batch under one choice of policies.

    At the start of each segment; the highest total within each, in the first
    micro-batch, where gradients of parameters pile up, and in later ones; and `after`
    all. `moved.out` is also what each block's region on the host must hold.
    """

    start: list[int]
    first: list[int]
    later: list[int]
    after: int
    moved: Moved


class Parameters(NamedTuple):
    """Bytes that parameters take on the device under one choice of placements.

    Attributes:
        base: Weights, optimizer state and operands of updates, slots excepted.
        gradients: Of what trains there, all of them.
        update: What the device's update takes on top of them, or that of host-kept weights
            which the step itself makes current.
        deferred: What updates of host-kept chunks take at the start of each segment.
        before: Gradient bytes beside each segment's own in the first micro-batch.
        extra: The same in later ones, beside `gradients`.
    """

    base: int
    gradients: int
    update: int
    deferred: list[int]
    before: list[int]
    extra: list[int]


class _Residency(NamedTuple):
    """Segments in which a lifetime's bytes are on the device under some policies.

    Until `end`, in `redone` because recomputing makes them again, and, where block `out`
    has sent them to the host, from the first to the second of `back` for its third, a
    block.
    """

    end: int
    redone: list[int]
    out: int | None = None
    back: tuple[int, int, int] | None = None


def walk(trace: Trace, policies: tuple[Policy, ...], overlaps: bool) -> Activations:
    """Live bytes, segment by segment (equations 8 to 11). 0.5 ms for 80 blocks.

    Where copies overlap with compute, what is sent to the host may still be there when
    the next block begins.
    """
    size = len(trace.segments) + 2
    # by segment: what its start has more than the one before, and what comes back in
    # it because it was not kept
    change, again = [0] * size, [0] * size
    out, back = [0] * len(policies), [0] * len(policies)
    opened, given_up = _swap_times(trace, policies, overlaps)
    for lifetime in trace.lifetimes:
        made, nbytes = lifetime.made, lifetime.nbytes
        there = _residency(lifetime, policies, opened, given_up)
        if there.end > made:
            change[made + 1] += nbytes
            change[there.end + 1] -= nbytes
        for segment in there.redone:
            again[segment] += nbytes
        if there.out is not None:
            out[there.out] += nbytes
        if there.back is not None:
            begin, end, block = there.back
            change[begin] += nbytes
            change[end + 1] -= nbytes
            back[block] += nbytes
    *start, after, _ = accumulate(change)
    first, later = [], []
    redone: dict[int | None, int] = defaultdict(int)
    for part in trace.segments:
        if not part.backward:
            redone[part.block] = max(redone[part.block], part.redone_peak_bytes)
    for live, more, part in zip(start, again, trace.segments, strict=False):
        policy = _KEEP if part.block is None else policies[part.block]
        rise, piled = _rise(part, policy, overlaps)
        if part.backward and policy.recomputes:
            least = redone[part.block]
            rise, piled = max(more + rise, least), max(more + piled, least)
        first.append(live + piled)
        later.append(live + rise)
    return Activations(start, first, later, after, Moved(tuple(out), tuple(back)))


def _rise(segment: Segment, policy: Policy, overlaps: bool) -> tuple[int, int]:
    """Highest rise within a segment, without and with gradients that pile up."""
    if segment.backward:
        return segment.peak_bytes, segment.first_peak_bytes
    if policy.recomputes:
        return (segment.dropped_peak_bytes,) * 2
    if policy is _SWAP and not overlaps:
        return (segment.swapped_peak_bytes,) * 2
    return (segment.peak_bytes,) * 2


def _residency(
    lifetime: Lifetime,
    policies: tuple[Policy, ...],
    opened: Mapping[int, int],
    given_up: Mapping[int, int],
) -> _Residency:
    end = lifetime.forgotten
    redone: list[int] = []
    # blocks for which it waits on the host, and the segments of their backward
    waits: list[tuple[int, int]] = []
    for save in lifetime.saves:
        block = save.block
        policy = _KEEP if block is None else policies[block]
        if block is not None and policy.recomputes is not save.as_input:
            if not save.as_input:
                redone.append(save.segment)
            continue
        moves = policy is _SWAP or policy is _SWAP_INPUT and save.by_position
        if moves and lifetime.large and block is not None and block in opened:
            waits.append((block, save.segment))
        elif save.segment > end:
            end = save.segment
    if not waits:
        return _Residency(end, [s for s in redone if s > end])
    out, last = min(waits)[0], max(waits)[0]
    end = max(end, given_up.get(out, 0))
    start, stop = opened[last], max(segment for _, segment in waits)
    back = (start, stop, last) if end < start <= stop else None
    if start <= end:
        end = max(end, stop)
    redone = [s for s in redone if s > end and not (back and start <= s <= stop)]
    return _Residency(end, redone, out, back)


def _swap_times(
    trace: Trace, policies: tuple[Policy, ...], overlaps: bool
) -> tuple[dict[int, int], dict[int, int]]:
    """For each block the segment in which what it swapped comes back, and for each that
    swaps the last one in which that may still be on the device: it is given up when the
    next one begins or the last block's forward ends."""
    begun: dict[int, int] = {}
    backward: dict[int, int] = {}
    for index, segment in enumerate(trace.segments):
        if segment.block is not None:
            (backward if segment.backward else begun).setdefault(segment.block, index)
    # the block after it in forward brings back what it swapped
    opened = {b: min(at, backward.get(b + 1, at)) for b, at in backward.items()}
    if not overlaps:
        return opened, {}
    swapping = [block for block in begun if policies[block].swaps]
    ends = [begun[block] - 1 for block in swapping[1:]]
    ends.append(max(begun.values(), default=0))
    return opened, dict(zip(swapping, ends, strict=False))


class MemoryModel:
    """Peaks of the plans of one model, batch and device.

    Of `hardware` it matters whether copies may lag, and what it takes unseen.
    """

    def __init__(
        self, layout: Layout, trace: Trace, workload: Workload, hardware: Hardware
    ) -> None:
        self.layout, self.trace = layout, trace
        self.workload, self.hardware = workload, hardware
        # a copy that runs at once leaves no gradient behind on the device
        self._in_flight = IN_FLIGHT if hardware.overlaps else 0
        self.trained = trained = TrainedBytes(layout, workload)
        self._on_device = workload.update is Update.DEVICE
        # on one rank updates of blocks wait for the next fetch
        self._deferred = self._on_device and workload.world.size == 1
        # by segment, of each chunk, None for weights that never move
        self._gradients: list[dict[int | None, int]] = []
        for segment in trace.segments:
            made: dict[int | None, int] = defaultdict(int)
            for name, nbytes in segment.gradients:
                made[layout.chunk_of.get(name)] += nbytes
            self._gradients.append(made)
        # what sums in fp32 of those of a chunk have more
        self._wider = [
            chunk.payload_16_bit_bytes if trained.main_grads_fp32 else 0
            for chunk in layout.chunks
        ]
        self.activations = lru_cache(maxsize=None)(
            partial(walk, trace, overlaps=hardware.overlaps)
        )
        # a search asks for whole updates and for pieces, one after the other
        self._by_segment = lru_cache(maxsize=1)(self._beside_segments)

    def parameters(
        self,
        placements: tuple[Placement, ...],
        shards: int = 1,
        in_pieces: bool = False,
    ) -> Parameters:
        """Bytes that a choice of placements takes, for `peak_without_slots`."""
        states = state_bytes(self.trained, placements, 0, shards, in_pieces)
        return Parameters(
            states.weights + states.moments + states.operands,
            states.gradients,
            self._update_bytes(states.gradients, placements),
            *self._by_segment(placements),
        )

    def peak_without_slots(
        self, parameters: Parameters, activations: Activations
    ) -> int:
        """The peak of placements and policies together: for the search, which has
        many of each. `device` has the same moment by moment."""
        p, a = parameters, activations
        highest = max(map(add, a.first, p.before))
        if self.workload.accumulation > 1:
            later = max(map(add, a.later, p.extra))
            highest = max(highest, p.gradients + later)
        highest = max(highest, *map(add, a.start, p.deferred))
        update = a.after + p.gradients + p.update
        inference = self._inference_bytes if self.workload.eval_ratio else 0
        if (sampled := self.workload.generation) is not None:
            # one sequence at least
            there = sampled.amid_step * p.gradients
            inference = max(inference, there + sampled.row_bytes)
        if (served := self.workload.served) is not None:
            there = served.amid_step * p.gradients
            inference = max(inference, there + served.visiting_bytes)
        return p.base + max(highest, update, inference) + self.hardware.unseen_bytes

    def standing_bytes(self, plan: Plan) -> int:
        """Device bytes between two steps, with the slots, before anything is sampled."""
        states, sampled = self._states(plan), self.workload.generation
        standing = states.weights + states.moments + states.operands
        if sampled is not None and sampled.amid_step:
            standing += states.gradients
        return standing + self.hardware.unseen_bytes

    def device(
        self, plan: Plan, cache_bytes: int | None = None, working_bytes: int = 0
    ) -> DeviceEstimate:
        """The whole prediction for the device, with the cache of what is generated and
        what else that takes; by default of one sequence."""
        states, sampled = self._states(plan), self.workload.generation
        timeline = tuple(self._timeline(plan, states))
        if sampled is not None:
            if cache_bytes is None:
                cache_bytes = sampled.cache_bytes
                working_bytes = sampled.row_bytes - cache_bytes
            point = replace(
                timeline[-1],
                label=GENERATION,
                phase=GENERATION,
                gradients=sampled.amid_step * states.gradients,
                activations=cache_bytes,
                working=working_bytes,
            )
            timeline = (*timeline[:-1], point, timeline[-1])
        if (served := self.workload.served) is not None:
            point = replace(
                timeline[-1],
                label=SENDING,
                phase=SENDING,
                gradients=served.amid_step * states.gradients,
                activations=0,
                working=served.visiting_bytes,
            )
            timeline = (*timeline[:-1], point, timeline[-1])
        unseen = self.hardware.unseen_bytes
        phases: dict[str, int] = {}
        for point in timeline:
            highest = max(phases.get(point.phase, 0), point.total + unseen)
            phases[point.phase] = highest
        peak = max(timeline, key=lambda point: point.total)
        total = peak.total + unseen
        return DeviceEstimate(total, unseen, states, peak, phases, timeline)

    def host(self, plan: Plan) -> HostEstimate:
        """The prediction for the host of a node.

        While it is loaded the whole model is there, chunk by chunk replaced by the
        host pool; a save brings trainable weights back from the device. Where both have
        one memory, that of loading is the whole memory's.
        """
        layout, workload = self.layout, self.workload
        disk = plan.on_disk, plan.disk_buffers
        states = host_state_bytes(self.trained, plan.placements, plan.shards, *disk)
        out = self.activations(plan.policies).moved.out
        states = replace(states, swapped=workload.world.local_size * sum(out))
        model = layout.fixed_frozen_bytes + layout.fixed_trainable_bytes
        model += sum(chunk.in_pool.nbytes for chunk in layout.chunks)
        one, on_device = self.hardware.one_memory, self._states(plan)
        pairs = zip(layout.chunks, plan.placements, strict=True)
        moves = max(
            (chunk.in_pool.nbytes for chunk, at in pairs if at.on_host or one),
            default=0,
        )
        if one:
            # what goes to the device takes the place of what it is copied from
            moves = max(moves, layout.fixed_frozen_bytes) + self.hardware.unseen_bytes
            moves += on_device.slots + on_device.buckets
        save = on_device.gradients
        phases = {
            "load": model - workload.mapped_bytes + moves,
            "train": states.total,
            "save": states.total + save,
        }
        return HostEstimate(states, phases)

    @cached_property
    def swappable_bytes(self) -> int:
        """Bytes that leave when every block swaps."""
        return sum(
            lifetime.nbytes
            for lifetime in self.trace.lifetimes
            if lifetime.large
            and any(s.block is not None and not s.as_input for s in lifetime.saves)
        )

    def _beside_segments(
        self, placements: tuple[Placement, ...]
    ) -> tuple[list[int], list[int], list[int]]:
        """`Parameters.deferred`, `before` and `extra`."""
        return self._deferred_updates(placements), *self._gradient_walk(placements)

    def _gradient_walk(
        self, placements: tuple[Placement, ...]
    ) -> tuple[list[int], list[int]]:
        """Gradient bytes beside each segment's own, in the first and later passes.

        Those of earlier segments that stay or are on their way; in later passes what
        the segment holds for the host until its chunk is complete.
        """
        before, extra = [], []
        kept = way = held = 0
        leaving = [0] * self._in_flight
        waits = self.workload.world.size > 1
        pairs = zip(self.trace.segments, self._gradients, strict=True)
        for segment, gradients in pairs:
            on_host = [
                chunk
                for chunk in gradients
                if chunk is not None and placements[chunk].on_host
            ]
            left = sum(gradients[chunk] for chunk in on_host)
            wider = sum(self._wider[chunk] for chunk in on_host)
            rise = segment.widened_peak_bytes - segment.first_peak_bytes if wider else 0
            if held and on_host and segment.block is not None:
                # several ranks reduce here what came before
                leaving = [*leaving, held][1:]
                way, held = sum(leaving), 0
            before.append(kept + way + held + rise)
            kept += sum(gradients.values()) - left
            piled = segment.first_peak_bytes - segment.peak_bytes if left else 0
            extra.append(way + held + piled + rise)
            if waits:
                held += left + wider
            elif left:
                leaving = [*leaving, left + wider][1:]
                way = sum(leaving)
        return before, extra

    def _deferred_updates(self, placements: tuple[Placement, ...]) -> list[int]:
        """At the start of each segment what updates of its host-kept chunks take, one
        after the other; those outside blocks before all others."""
        highest = [0] * len(self.trace.segments)
        if not self._deferred:
            return highest
        outside, of_block = self._updates_on_top(placements)
        for index, segment in enumerate(self.trace.segments):
            if not segment.backward and segment.block is not None:
                highest[index] = of_block.pop(segment.block, 0)
        highest[0] = max(highest[0], outside)
        return highest

    def _updates_on_top(
        self, placements: tuple[Placement, ...]
    ) -> tuple[int, dict[int, int]]:
        """Count what updates of host-kept chunks take on top of the staging: outside
        blocks, which have none, and of each block."""
        trained, overlaps = self.trained, self.hardware.overlaps
        outside: list[tuple[int, int]] = []
        of_block: dict[int, int] = {}
        for chunk, placement in zip(self.layout.chunks, placements, strict=True):
            if not chunk.trainable or not placement.on_host:
                continue
            nbytes = trained.update[chunk.index]
            if chunk.block is None:
                outside.append((trained.piece_operands[chunk.index], nbytes))
                continue
            # the first update makes the state beside the staging
            made = trained.made[chunk.index] if overlaps else 0
            highest = max(of_block.get(chunk.block, 0), nbytes + made)
            of_block[chunk.block] = highest
        # one is updated, others are on their way to the host
        leaving = IN_FLIGHT - 1 if overlaps else 0
        outside.sort(reverse=True)
        others = sum(operands for operands, _ in outside[1 : 1 + leaving])
        return max(map(sum, outside), default=0) + others, of_block

    def _states(self, plan: Plan) -> StateBytes:
        placed = plan.placements, plan.n_buffer, plan.shards, plan.in_pieces
        return state_bytes(self.trained, *placed)

    def _update_bytes(self, gradients: int, placements: tuple[Placement, ...]) -> int:
        """Count what the update takes of the device, which has so many bytes of
        gradients, and after it those that are queued."""
        queued = 0
        if self._on_device:
            # weights outside never wait: gradients of others are still there
            queued, of_block = self._updates_on_top(placements)
            if not self._deferred:
                queued = max(queued, 0, *of_block.values())
        if not gradients:
            return queued
        w = self.workload
        largest = max(
            nbytes
            for chunk, nbytes in self._largest_gradients.items()
            if chunk is None or not placements[chunk].on_host
        )
        whole = round(w.update_copies * gradients + w.update_parameter_copies * largest)
        return max(whole, queued)

    @cached_property
    def _largest_gradients(self) -> dict[int | None, int]:
        """By chunk, None for weights that never move."""
        found: dict[int | None, int] = {None: 0}
        for segment in self.trace.segments:
            for name, nbytes in segment.gradients:
                chunk = self.layout.chunk_of.get(name)
                found[chunk] = max(found.get(chunk, 0), nbytes)
        return found

    @cached_property
    def _loss(self) -> range:
        """Segments from the last block's forward to the first one's backward."""
        segments = self.trace.segments
        inside = [i for i, s in enumerate(segments) if s.block is not None]
        forward = [i for i in inside if not segments[i].backward]
        backward = [i for i in inside if segments[i].backward]
        return range(max(forward, default=-1) + 1, min(backward, default=0))

    @cached_property
    def _inference_bytes(self) -> int:
        """Activations of an evaluation batch, and what training alone has shown not to
        need."""
        activations = round(self.workload.eval_ratio * inference_bytes(self.trace))
        return activations + self.hardware.unneeded_bytes

    def _timeline(self, plan: Plan, states: StateBytes) -> Iterator[Point]:
        parameters = self.parameters(plan.placements, plan.shards, plan.in_pieces)
        curve = self.activations(plan.policies)

        def point(
            label: str, phase: str, gradients: int, activations: int, working: int
        ) -> Point:
            weights = states.weights - states.slots
            # the first update makes them
            made = states.operands, states.moments
            standing = weights, states.slots, *((0, 0) if phase == "load" else made)
            return Point(label, phase, *standing, gradients, activations, working)

        yield point("loaded", "load", 0, 0, 0)
        for index, segment in enumerate(self.trace.segments):
            phase = "backward" if segment.backward else "forward"
            where = "outside blocks" if segment.block is None else str(segment.block)
            if index in self._loss:
                where = "of the loss"
            label, live = f"{phase} {where}", curve.start[index]
            if update := parameters.deferred[index]:
                yield point(f"update before {label}", "forward", 0, live, update)
            gradients, highest = parameters.before[index], curve.first[index]
            later = states.gradients + parameters.extra[index], curve.later[index]
            if self.workload.accumulation > 1 and sum(later) > gradients + highest:
                gradients, highest = later
            yield point(label, phase, gradients, live, 0)
            label = ", ".join(filter(None, (label, segment.peak_operator)))
            yield point(label, phase, gradients, live, highest - live)
        working = parameters.update
        yield point("update", "update", states.gradients, curve.after, working)
        if self.workload.eval_ratio:
            yield point("evaluation", "evaluation", 0, 0, self._inference_bytes)
        yield point("save", "save", 0, 0, 0)


def inference_bytes(trace: Trace) -> int:
    """Activations of a forward that saves nothing, at its peak."""
    change = [0] * (len(trace.segments) + 2)
    for lifetime in trace.lifetimes:
        change[lifetime.made + 1] += lifetime.nbytes
        change[lifetime.forgotten + 1] -= lifetime.nbytes
    live = highest = 0
    for index, segment in enumerate(trace.segments):
        if segment.backward:
            break
        live += change[index]
        highest = max(highest, live + segment.dropped_peak_bytes)
    return highest
