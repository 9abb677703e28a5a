"""Peak bytes of a plan: a walk over the segments of a step.

The paper's peak (equations 8 to 11) with a term of its own for the saved inputs of
recomputed blocks, and without its factor for what was not modelled: the trace follows
every tensor, and what no trace sees is one measured number of the hardware.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from operator import add
from typing import NamedTuple

from ..layout import reduce_bytes, slot_bytes
from ..types import (
    IN_FLIGHT,
    Hardware,
    Layout,
    Moved,
    Placement,
    Plan,
    Policy,
    Trace,
    Workload,
)
from .states import (
    HostBytes,
    StateBytes,
    host_state_bytes,
    state_bytes,
)

_SWAP, _SWAP_INPUT = Policy.SWAP, Policy.SWAP_INPUT


@dataclass(frozen=True)
class Point:
    """Device bytes at one moment of a step.

    Attributes:
        label: For people, "forward 3" for example.
        phase: load, forward, backward, update, evaluation or save.
        weights: Everything that holds weights, slots excepted.
        slots: The ring.
        moments: Optimizer state.
        gradients: Gradients of parameters.
        activations: What the model and autograd hold.
        working: What the running segment takes on top.
    """

    label: str
    phase: str
    weights: int
    slots: int
    moments: int
    gradients: int
    activations: int
    working: int

    @property
    def total(self) -> int:
        return (
            self.weights
            + self.slots
            + self.moments
            + self.gradients
            + self.activations
            + self.working
        )


@dataclass(frozen=True)
class DeviceEstimate:
    """Predicted device bytes of a plan.

    Attributes:
        peak_bytes: Highest total, `unseen_bytes` included.
        unseen_bytes: What no trace sees.
        states: Terms of the states.
        peak: The moment of the peak.
        phases: Highest total of each phase.
        timeline: The step, moment by moment.
    """

    peak_bytes: int
    unseen_bytes: int
    states: StateBytes
    peak: Point
    phases: dict[str, int]
    timeline: tuple[Point, ...]

    @property
    def terms(self) -> dict[str, int]:
        """The peak by term."""
        states = self.states
        of_ranks = {
            "gradient buckets": states.buckets,
            "reduction buffers": states.reduction,
        }
        return {
            "fixed weights": states.fixed,
            "adapters": states.adapters,
            "resident chunks": states.resident,
            "host-state weights": states.host_state,
            "slots": states.slots,
            **{name: nbytes for name, nbytes in of_ranks.items() if nbytes},
            "optimizer state": self.peak.moments,
            "gradients": self.peak.gradients,
            "saved activations": self.peak.activations,
            "working set": self.peak.working,
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
        return {f.name: getattr(self.states, f.name) for f in fields(self.states)}


class Activations(NamedTuple):
    """Activation bytes under one choice of policies, for each segment.

    `first` and `later` are the highest totals within it, with and without gradients
    of parameters that pile up in the segment.
    """

    start: list[int]
    first: list[int]
    later: list[int]
    after: int


class Parameters(NamedTuple):
    """What parameters take on the device under one choice of placements.

    Attributes:
        base: Weights and optimizer state, slots excepted.
        gradients: Gradients of what trains there, all of them.
        update: What the device's update takes on top of them.
        before: Gradient bytes beside each segment's own in the first micro-batch.
        extra: The same in later ones, beside `gradients`.
    """

    base: int
    gradients: int
    update: int
    before: list[int]
    extra: list[int]


class _Holding(NamedTuple):
    """A `Holding`, its latest reason first: segment, block, whether only recomputing
    keeps it, and whether it can wait on the host as an input; `large` if it can at
    all."""

    made: int
    forgotten: int
    nbytes: int
    large: bool
    holds: list[tuple[int, int | None, bool, bool]]


class _Life(NamedTuple):
    """When a holding is on the device under some policies, in segments.

    Attributes:
        end: The last one, but for the time after it has been away.
        back: The first and the last one of that time, if there is one.
        redone: Those in which recomputing makes it again.
        out: The block that sends it to the host.
        home: The block for which it comes back.
    """

    end: int
    back: tuple[int, int] | None
    redone: list[int]
    out: int | None
    home: int | None


class _Part(NamedTuple):
    """What some holdings add to which totals, and the segments that make one again."""

    changes: list[tuple[list[int], int, int]]
    redone: set[int]


class MemoryModel:
    """Peaks of the plans of one model, batch and device.

    Args:
        layout: The chunks.
        trace: One micro-batch.
        workload: The rest of the step.
        hardware: Whose copies may lag, and what it takes unseen.
    """

    def __init__(
        self, layout: Layout, trace: Trace, workload: Workload, hardware: Hardware
    ) -> None:
        self.layout = layout
        self.trace = trace
        self.workload = workload
        self.hardware = hardware
        several = workload.world.size > 1
        # a copy that runs at once leaves no gradient behind on the device, nor does
        # a reduction, which packs them first
        at_once = not hardware.overlaps or (several and workload.accumulation == 1)
        self._in_flight = 0 if at_once else IN_FLIGHT
        self._packed_bytes = [
            reduce_bytes(chunk, workload.world.local_size, workload.fp32_master)
            if chunk.trainable
            else 0
            for chunk in layout.chunks
            if several
        ]
        chunk_of = {
            spec.name: chunk.index for chunk in layout.chunks for spec in chunk.tensors
        }
        # by segment, of each chunk, None for weights that never move
        self._gradients: list[dict[int | None, int]] = []
        for segment in trace.segments:
            made: dict[int | None, int] = {}
            for name, nbytes in segment.gradients:
                chunk = chunk_of.get(name)
                made[chunk] = made.get(chunk, 0) + nbytes
            self._gradients.append(made)
        self._trained = sorted(
            {chunk for made in self._gradients for chunk in made if chunk is not None}
        )
        self._follow(trace)
        self._kept_gradients = lru_cache(maxsize=None)(self._gradient_walk)

    def peak_bytes(
        self,
        placements: tuple[Placement, ...],
        n_buffer: int,
        policies: tuple[Policy, ...],
        shards: int = 1,
    ) -> int:
        """The peak of a plan alone."""
        slots = sum(slot_bytes(self.layout, placements, n_buffer, shards))
        parameters = self.parameters(placements, self.states(placements, shards))
        return slots + self.peak_without_slots(parameters, self.activations(policies))

    def states(self, placements: tuple[Placement, ...], shards: int = 1) -> StateBytes:
        """States on the device, slots excepted."""
        return self._states(placements, 0, shards)

    def parameters(
        self, placements: tuple[Placement, ...], states: StateBytes
    ) -> Parameters:
        """What a choice of placements takes, for `peak_without_slots`."""
        return Parameters(
            states.weights + states.moments,
            states.gradients,
            self._update_bytes(states),
            *self._kept_gradients(self._leave(placements)),
        )

    def peak_without_slots(
        self, parameters: Parameters, activations: Activations
    ) -> int:
        """The peak of placements and policies together: for the search, which has
        many of each."""
        p, a = parameters, activations
        highest = max(map(add, a.first, p.before))
        if self.workload.accumulation > 1:
            later = max(map(add, a.later, p.extra))
            highest = max(highest, p.gradients + later)
        update = a.after + p.gradients + p.update
        inference = self._inference_bytes if self.workload.eval_ratio else 0
        return p.base + max(highest, update, inference) + self.hardware.unseen_bytes

    def device(self, plan: Plan) -> DeviceEstimate:
        """The whole prediction for the device."""
        timeline = tuple(self._timeline(plan))
        peak = max(timeline, key=lambda point: point.total)
        unseen = self.hardware.unseen_bytes
        phases: dict[str, int] = {}
        for point in timeline:
            known = phases.get(point.phase, 0)
            phases[point.phase] = max(known, point.total + unseen)
        return DeviceEstimate(
            peak_bytes=peak.total + unseen,
            unseen_bytes=unseen,
            states=self._states(plan.placements, plan.n_buffer, plan.shards),
            peak=peak,
            phases=phases,
            timeline=timeline,
        )

    def host(self, plan: Plan) -> HostEstimate:
        """The prediction for the host of a node.

        While it is loaded the whole model is there, chunk by chunk replaced by the
        arena; a save brings trainable weights back from the device.
        """
        layout, ranks = self.layout, self.workload.world.local_size
        states = host_state_bytes(layout, plan.placements, self.workload, plan.shards)
        swapped = ranks * sum(self.moved_bytes(plan.policies).out)
        states = replace(states, swapped=swapped)
        model = layout.fixed_frozen_bytes + layout.fixed_trainable_bytes
        model += sum(chunk.nbytes for chunk in layout.chunks)
        largest = max((chunk.nbytes for chunk in layout.chunks), default=0)
        on_device = self._states(plan.placements, plan.n_buffer, plan.shards).gradients
        return HostEstimate(
            states=states,
            phases={
                "load": model + largest,
                "train": states.total,
                "save": states.total + on_device,
            },
        )

    @cached_property
    def least(self) -> Activations:
        """No policies take less at any moment: blocks hold nothing."""
        trace = self.trace
        change = [0] * (len(trace.segments) + 2)
        for holding in trace.holdings:
            holds = (h.segment for h in holding.holds if h.block is None)
            change[holding.made + 1] += holding.nbytes
            change[max(holding.forgotten, *holds, 0) + 1] -= holding.nbytes
        live = list(accumulate(change, initial=trace.batch_bytes))
        start, after = live[1:-2], live[-2]
        rises = [
            s.peak_bytes
            if s.backward or s.block is None
            else min(s.peak_bytes, s.dropped_peak_bytes, s.swapped_peak_bytes)
            for s in trace.segments
        ]
        piles = [
            s.first_peak_bytes if s.backward else rise
            for s, rise in zip(trace.segments, rises, strict=True)
        ]
        first, later = (list(map(add, start, more)) for more in (piles, rises))
        return Activations(start, first, later, after)

    def kept_bytes(self, segment: int) -> list[int]:
        """What each block that keeps its tensors adds to `least` at a segment."""
        return [
            sum(
                holding.nbytes
                for holding in held
                if holding.made < segment
                and holding.forgotten < segment
                and any(at >= segment and not inp for at, _, inp, _ in holding.holds)
                and not any(
                    at >= segment and by is None for at, by, _, _ in holding.holds
                )
            )
            for held in self._held_by
        ]

    @cached_property
    def swappable_bytes(self) -> int:
        """What leaves when every block swaps."""
        return sum(
            holding.nbytes
            for holding in self.trace.holdings
            if holding.large
            and any(h.block is not None and not h.as_input for h in holding.holds)
        )

    def moved_bytes(self, policies: tuple[Policy, ...]) -> Moved:
        """What swapping moves under these policies; `out` is also what each block's
        region on the host must hold."""
        if not any(policy.swaps for policy in policies):
            return Moved((0,) * len(policies), (0,) * len(policies))
        self._change_policies(policies)
        return Moved(tuple(self._out), tuple(self._home))

    def surely_moved(self, policies: tuple[Policy, ...]) -> Moved:
        """The same of what one block alone holds, whatever those that do not swap do."""
        self._change_policies(policies)
        self._add(self._parts[-1], -1)
        moved = Moved(tuple(self._out), tuple(self._home))
        self._add(self._parts[-1])
        return moved

    def _follow(self, trace: Trace) -> None:
        """Begin the walk with every block keeping its tensors."""
        self._holdings = [
            _Holding(
                holding.made,
                holding.forgotten,
                holding.nbytes,
                holding.large
                and any(h.by_position or not h.as_input for h in holding.holds),
                sorted(
                    (
                        (h.segment, h.block, h.as_input, h.by_position)
                        for h in holding.holds
                    ),
                    # at a tie the input: what is there as such does not come back
                    key=lambda hold: (-hold[0], not hold[2]),
                ),
            )
            for holding in trace.holdings
        ]
        blocks = range(trace.num_blocks)
        self._run_by: list[list[int]] = [[] for _ in blocks]
        for index, segment in enumerate(trace.segments):
            if segment.block is not None:
                self._run_by[segment.block].append(index)
        # by the block that holds them, or none or several
        own: list[list[_Holding]] = [[] for _ in blocks]
        shared: list[_Holding] = []
        unheld: list[_Holding] = []
        for holding in self._holdings:
            by = {hold[1] for hold in holding.holds if hold[1] is not None}
            group = unheld if not by else own[min(by)] if len(by) == 1 else shared
            group.append(holding)
        self._held_by = own
        self._shared = shared
        self._follow_swaps(trace)
        self._policies = (Policy.KEEP,) * trace.num_blocks
        self._swaps = False
        self._dropped: dict[int, int] = {}
        # by block
        self._out, self._home = [0] * trace.num_blocks, [0] * trace.num_blocks
        size = len(trace.segments) + 2
        # by segment: bytes that its start has more than the one before, and bytes
        # that come back in it because they were not kept
        self._change, self._regained = [0] * size, [0] * size
        self._part_of = lru_cache(maxsize=None)(self._block_part)
        self._add(self._part(unheld))
        self._parts = [self._part_of(b, Policy.KEEP, None) for b in blocks]
        self._parts.append(self._part(shared))
        for part in self._parts:
            self._add(part)
        rises = [self._rise(index) for index in range(len(trace.segments))]
        self._rises = [rise for rise, _ in rises]
        self._piles = [piled for _, piled in rises]

    def activations(self, policies: tuple[Policy, ...]) -> Activations:
        """Of one choice of policies; cheap for one that differs little from the last."""
        self._change_policies(policies)
        size = len(self.trace.segments)
        live = list(accumulate(self._change, initial=self.trace.batch_bytes))
        start = live[1 : size + 1]
        return Activations(
            start,
            list(map(add, start, self._piles)),
            list(map(add, start, self._rises)),
            live[size + 1],
        )

    def _change_policies(self, policies: tuple[Policy, ...]) -> None:
        """Look again only at what is held by blocks whose policy is another."""
        pairs = zip(self._policies, policies, strict=True)
        blocks = [block for block, (old, new) in enumerate(pairs) if old is not new]
        if not blocks:
            return
        self._swaps = any(policy.swaps for policy in policies)
        dropped = self._drops(policies) if self._swaps else {}
        changed = {b for b, _ in self._dropped.items() ^ dropped.items()}.union(blocks)
        self._policies, self._dropped = policies, dropped
        parts = [(b, self._part_of(b, policies[b], dropped.get(b))) for b in changed]
        # the last one is of what several blocks hold
        parts.append((-1, self._part(self._shared)))
        segments = {segment for block in blocks for segment in self._run_by[block]}
        for group, part in parts:
            before = self._parts[group]
            self._add(before, -1)
            self._add(part)
            self._parts[group] = part
            segments.update(before.redone, part.redone)
        for segment in segments:
            self._rises[segment], self._piles[segment] = self._rise(segment)

    def _rise(self, index: int) -> tuple[int, int]:
        """Highest rise within a segment, without and with gradients that pile up."""
        segment = self.trace.segments[index]
        rise, piled, block = segment.peak_bytes, segment.first_peak_bytes, segment.block
        policy = Policy.KEEP if block is None else self._policies[block]
        if not segment.backward:
            if policy.recomputes:
                rise = segment.dropped_peak_bytes
            elif policy is Policy.SWAP and not self.hardware.overlaps:
                rise = segment.swapped_peak_bytes
            return rise, rise
        if policy.recomputes:
            back, redone = self._regained[index], self._redone[block]
            rise, piled = max(back + rise, redone), max(back + piled, redone)
        return rise, piled

    def _add(self, part: _Part, sign: int = 1) -> None:
        for totals, index, nbytes in part.changes:
            totals[index] += sign * nbytes

    def _block_part(self, block: int, policy: Policy, dropped: int | None) -> _Part:
        """Of what this block alone holds; the arguments are all that it depends on."""
        assert (self._policies[block], self._dropped.get(block)) == (policy, dropped)
        return self._part(self._held_by[block])

    def _part(self, holdings: list[_Holding]) -> _Part:
        """What holdings take under the policies of now."""
        changes: list[tuple[list[int], int, int]] = []
        again: set[int] = set()
        for holding in holdings:
            made, nbytes = holding.made, holding.nbytes
            end, back, redone, out, home = self._life(holding)
            if end > made:
                changes.append((self._change, made + 1, nbytes))
                changes.append((self._change, end + 1, -nbytes))
            if back is not None:
                changes.append((self._change, back[0], nbytes))
                changes.append((self._change, back[1] + 1, -nbytes))
            changes += [(self._regained, segment, nbytes) for segment in redone]
            again.update(redone)
            if out is not None:
                changes.append((self._out, out, nbytes))
            if home is not None:
                changes.append((self._home, home, nbytes))
        return _Part(changes, again)

    def _life(self, holding: _Holding) -> _Life:
        """From the latest reason to keep it to the earliest."""
        end, policies = holding.forgotten, self._policies
        large = self._swaps and holding.large
        redone: list[int] = []
        # blocks for which it waits on the host, and the segments of their backward
        waits: list[tuple[int, int]] = []
        for segment, block, as_input, by_position in holding.holds:
            if segment <= end and not large:
                break
            policy = Policy.KEEP if block is None else policies[block]
            if block is None or policy.recomputes is as_input:
                moves = policy is _SWAP or policy is _SWAP_INPUT and by_position
                if large and moves and block is not None and block in self._opened:
                    waits.append((block, segment))
                else:
                    end = max(end, segment)
            elif not as_input and segment > end:
                redone.append(segment)
        if not waits:
            return _Life(end, None, [s for s in redone if s > end], None, None)
        out, (home, _) = min(waits)[0], max(waits)
        end = max(end, self._dropped.get(out, 0))
        start, stop = self._opened[home], max(segment for _, segment in waits)
        back = (start, stop) if end < start <= stop else None
        if start <= end:
            end = max(end, stop)
        redone = [s for s in redone if s > end and not (back and start <= s <= stop)]
        return _Life(end, back, redone, out, home if back else None)

    def _follow_swaps(self, trace: Trace) -> None:
        """When blocks begin, for what leaves and comes back at that time."""
        backward: dict[int, int] = {}
        self._begun: dict[int, int] = {}
        for index, segment in enumerate(trace.segments):
            if segment.block is not None:
                seen = backward if segment.backward else self._begun
                seen.setdefault(segment.block, index)
        # the block after it in forward brings back what it swapped
        self._opened = {
            block: min(index, backward.get(block + 1, index))
            for block, index in backward.items()
        }

    def _drops(self, policies: tuple[Policy, ...]) -> dict[int, int]:
        """The last segment in which what each swapping block sends to the host may
        still be on the device: it is given up when the next one begins or the last
        block's forward ends."""
        if not self.hardware.overlaps:
            return {}
        swapping = [block for block in self._begun if policies[block].swaps]
        ends = [self._begun[block] - 1 for block in swapping[1:]]
        ends.append(max(self._begun.values(), default=0))
        return dict(zip(swapping, ends, strict=False))

    @cached_property
    def _redone(self) -> dict[int | None, int]:
        return {
            segment.block: segment.redone_peak_bytes
            for segment in self.trace.segments
            if not segment.backward
        }

    def _leave(self, placements: tuple[Placement, ...]) -> tuple[bool, ...]:
        """For each trained chunk whether its gradients go to the host."""
        stays = Placement.RESIDENT
        return tuple(placements[chunk] is not stays for chunk in self._trained)

    def _gradient_walk(self, leave: tuple[bool, ...]) -> tuple[list[int], list[int]]:
        """Gradient bytes beside each segment's own, in the first and later passes.

        Those of earlier segments that stay or are on their way; in later passes what
        the segment holds for the host until its chunk is complete.
        """
        leaves: dict[int | None, bool] = dict(zip(self._trained, leave, strict=True))
        before, extra = [], []
        kept = way = 0
        leaving = [0] * self._in_flight
        for segment, gradients in zip(
            self.trace.segments, self._gradients, strict=True
        ):
            before.append(kept + way)
            if not gradients:
                extra.append(way)
                continue
            left = 0
            for chunk, nbytes in gradients.items():
                if leaves.get(chunk):
                    left += nbytes
                else:
                    kept += nbytes
            if left:
                extra.append(way + segment.first_peak_bytes - segment.peak_bytes)
                leaving = [*leaving, left][1:]
                way = sum(leaving)
            else:
                extra.append(way)
        return before, extra

    def _states(
        self, placements: tuple[Placement, ...], n_buffer: int, shards: int
    ) -> StateBytes:
        return state_bytes(
            self.layout,
            placements,
            n_buffer,
            self.workload,
            self._in_flight,
            shards,
            self._packed_bytes,
        )

    def _update_bytes(self, states: StateBytes) -> int:
        workload = self.workload
        if not states.gradients:
            return 0
        return round(
            workload.update_copies * states.gradients
            + workload.update_parameter_copies * self._largest_trained
        )

    @cached_property
    def _largest_trained(self) -> int:
        return max(
            (nbytes for s in self.trace.segments for _name, nbytes in s.gradients),
            default=0,
        )

    @cached_property
    def _inference_bytes(self) -> int:
        """Activations of an evaluation batch: nothing is saved."""
        change = [0] * (len(self.trace.segments) + 2)
        for holding in self.trace.holdings:
            change[holding.made + 1] += holding.nbytes
            change[holding.forgotten + 1] -= holding.nbytes
        live = highest = 0
        for index, segment in enumerate(self.trace.segments):
            if segment.backward:
                break
            live += change[index]
            highest = max(highest, live + segment.dropped_peak_bytes)
        return round(self.workload.eval_ratio * highest)

    def _timeline(self, plan: Plan) -> Iterator[Point]:
        states = self._states(plan.placements, plan.n_buffer, plan.shards)
        curve = self.activations(plan.policies)
        before, extra = self._kept_gradients(self._leave(plan.placements))
        later_passes = self.workload.accumulation > 1

        def point(
            label: str, phase: str, gradients: int, activations: int, working: int
        ) -> Point:
            moments = 0 if phase == "load" else states.moments
            return Point(
                label=label,
                phase=phase,
                weights=states.weights - states.slots,
                slots=states.slots,
                moments=moments,
                gradients=gradients,
                activations=activations,
                working=working,
            )

        yield point("loaded", "load", 0, 0, 0)
        for index, segment in enumerate(self.trace.segments):
            phase = "backward" if segment.backward else "forward"
            where = "outside blocks" if segment.block is None else str(segment.block)
            label, live = f"{phase} {where}", curve.start[index]
            first = before[index] + curve.first[index]
            later = states.gradients + extra[index] + curve.later[index]
            if later_passes and later > first:
                gradients = states.gradients + extra[index]
                rise = curve.later[index] - live
            else:
                gradients, rise = before[index], curve.first[index] - live
            yield point(label, phase, gradients, live, 0)
            highest = ", ".join(filter(None, (label, segment.peak_operator)))
            yield point(highest, phase, gradients, live, rise)
        update = self._update_bytes(states)
        yield point("update", "update", states.gradients, curve.after, update)
        if self.workload.eval_ratio:
            inference = self._inference_bytes
            yield point("evaluation", "evaluation", 0, 0, inference)
        yield point("save", "save", 0, 0, 0)
