"""The fastest plan that fits.

For every number of resident chunks and of slots, the fewest recomputed blocks that fit:
recompute only ever adds compute. Candidates are simulated in the order of a lower bound
of their time until that bound loses, so the result is the optimum over all of them,
exactly, and a larger budget never gives a slower plan. Equation 1 of the paper, with a
simulation for its equations 2 to 7.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import accumulate
from operator import add
from typing import NamedTuple, NoReturn

from ..cost import (
    Activations,
    MemoryModel,
    Parameters,
    StepTime,
    simulate_step,
    update_seconds,
)
from ..errors import BudgetError
from ..layout import slot_bytes, slot_floor
from ..types import BlockTimes, Budget, Placement, Plan, Policy
from .bounds import PlacedBound, StepBound
from .plans import make_plan, place

MAX_EXTRA_SLOTS = 2
"""Slots worth trying beyond the fewest that can run with nothing resident. One more lets
copies run ahead; each further one saves one fetch a micro-batch where a resident chunk
would save two."""


ROUNDING = 1e-9
"""Relative difference of seconds that are taken as equal."""


class _Knobs(NamedTuple):
    """What tells one candidate from another; `outside` counts `Search._outside`."""

    n_checkpoint: int
    n_buffer: int
    n_persist: int
    outside: int


class Search:
    """Plans of one model and batch on one machine.

    Args:
        memory: Peaks of its plans.
        times: What its blocks take to compute.
        budget: What may be used.
        reachable: Whether the chunks may sit so; None where they may sit anyhow.
    """

    def __init__(
        self,
        memory: MemoryModel,
        times: BlockTimes,
        budget: Budget,
        reachable: Callable[[Sequence[Placement]], bool] | None = None,
    ) -> None:
        self._reachable = reachable
        self._memory = memory
        self._times = times
        self._budget = budget
        self._layout = memory.layout
        self._num_chunks = len(self._layout.pageable)
        self._num_blocks = len(self._layout.blocks)
        # what has masters is updated on the host anyhow
        masters = memory.workload.fp32_master
        outside = [
            chunk.has_masters(masters)
            for chunk in self._layout.chunks
            if not chunk.pageable
        ]
        choice = not all(outside)
        self._outside = (Placement.RESIDENT, Placement.HOST_STATE)[: 1 + choice]
        # that nothing trains on the host with the first choice
        self._frozen = not any(outside) and not any(
            chunk.trainable for chunk in self._layout.pageable
        )
        self._bound = StepBound(self._layout, times, memory.workload, memory.hardware)
        self._placed = lru_cache(maxsize=None)(self._place)
        self._activations = lru_cache(maxsize=None)(self._walk)

    def simulate(self, plan: Plan) -> StepTime:
        """Predicted seconds of an optimizer step, by lane."""
        workload, hardware = self._memory.workload, self._memory.hardware
        trained = sum(
            chunk.nbytes
            for chunk in self._layout.chunks
            if chunk.trainable and not plan.placements[chunk.index].on_host
        )
        update_s = self._times.update_s + update_seconds(trained, hardware)
        return simulate_step(
            self._layout,
            plan,
            replace(self._times, update_s=update_s),
            hardware,
            workload.accumulation,
            workload.fp32_master,
            launches_ahead=hardware.overlaps,
        )

    def fastest(self, all_resident: bool = False) -> Plan:
        """The fastest plan that fits.

        Args:
            all_resident: Only plans without paging.

        Raises:
            BudgetError: None fits; names the nearest and what it lacks.
        """
        best: Plan | None = None
        best_s = float("inf")
        # at a tie less recompute and fewer slots come first
        for bound_s, knobs in sorted(self._candidates(all_resident)):
            if bound_s >= best_s * (1 - ROUNDING):
                break
            plan = self._plan(knobs)
            step_s = self.simulate(plan).total_s
            if step_s < best_s * (1 - ROUNDING):
                best, best_s = plan, step_s
        if best is None:
            what = (
                "keeping everything resident" if all_resident else "the smallest plan"
            )
            self._refuse(self.nearest(all_resident), what)
        return best

    def by_hand(
        self, n_persist: int, n_buffer: int, n_swap: int, n_checkpoint: int
    ) -> Plan:
        """The plan that the overrides ask for.

        Raises:
            ConfigError: A knob is outside its legal range, which the message gives.
            BudgetError: The plan does not fit.
        """
        plan = self.asked(n_persist, n_buffer, n_swap, n_checkpoint)
        if not self.fits(plan):
            self._refuse(plan, "the plan of the overrides")
        return plan

    def asked(
        self, n_persist: int, n_buffer: int, n_swap: int, n_checkpoint: int
    ) -> Plan:
        """The same, whether it fits or not.

        Raises:
            ConfigError: As in `by_hand`.
        """
        for outside in self._outside:
            plan = make_plan(
                self._layout,
                n_persist,
                n_buffer,
                n_swap,
                n_checkpoint,
                self._memory.workload.fp32_master,
                outside,
            )
            if self.fits(plan):
                break
        return plan

    def nearest(self, all_resident: bool = False) -> Plan:
        """The plan that takes the least of the device or, if that has room for some
        plan, the one among those that takes the least of the host."""
        fitting = list(self._fitting(all_resident, host=False))
        if not fitting:
            return self._plan(self._least(all_resident))
        # the more is resident, the less is on the host
        most = {knobs.outside: knobs for knobs in sorted(fitting, key=_num_resident)}
        plans = map(self._plan, most.values())
        return min(plans, key=lambda plan: self._memory.host(plan).peak_bytes)

    def plain(self, n_checkpoint: int) -> Plan:
        """Everything resident, whether it fits or not: training without a pager."""
        return make_plan(
            self._layout, self._num_chunks, 0, 0, n_checkpoint, fp32_master=False
        )

    def fits(self, plan: Plan) -> bool:
        """Whether device and host have room for it."""
        peak = self._memory.peak_bytes(plan.placements, plan.n_buffer, plan.policies)
        return peak <= self._budget.usable_bytes and self._fits_host(plan)

    def _candidates(self, all_resident: bool) -> Iterator[tuple[float, _Knobs]]:
        """Plans that fit, each with a bound of its time; none left out is faster."""
        for knobs in self._fitting(all_resident):
            placed = self._placed(knobs.n_persist, knobs.outside)
            bound_s = placed.bound.seconds(knobs.n_buffer, knobs.n_checkpoint)
            yield bound_s, knobs

    def _fitting(self, all_resident: bool, host: bool = True) -> Iterator[_Knobs]:
        """Plans that the device, and perhaps the host, has room for."""
        fewest: dict[int, int] = {}
        for n_buffer, n_persist, outside in self._legal(all_resident, host):
            # without gradients for the host, residents only take transfers away:
            # fewer of them are of use only where they spare recompute
            limit = self._num_blocks + 1
            if self._frozen and not outside:
                limit = fewest.get(n_buffer, limit)
            if not limit:
                continue
            placed = self._placed(n_persist, outside)
            n_checkpoint = self._least_recompute(placed, n_buffer)
            if n_checkpoint is None or n_checkpoint >= limit:
                continue
            fewest[n_buffer] = n_checkpoint
            yield _Knobs(n_checkpoint, n_buffer, n_persist, outside)

    def _legal(
        self, all_resident: bool, host: bool = False
    ) -> Iterator[tuple[int, int, int]]:
        """Slots, resident chunks and `outside` of every plan, the most resident first."""
        for outside in range(len(self._outside)):
            least = self._least_persist(outside) if host else 0
            if all_resident:
                least = max(least, self._num_chunks)
            for n_persist in range(self._num_chunks, least - 1, -1):
                placed = self._placed(n_persist, outside)
                if self._reachable and not self._reachable(placed.placements):
                    continue
                most = min(placed.num_paged, self._most_slots)
                for n_buffer in range(placed.floor, most + 1):
                    yield n_buffer, n_persist, outside

    @cached_property
    def _most_slots(self) -> int:
        return self._placed(0, 0).floor + MAX_EXTRA_SLOTS

    def _least_persist(self, outside: int) -> int:
        """The fewest resident chunks with which the host has room; they only relieve
        it. One more than there are if none."""

        def fits(n_persist: int) -> bool:
            placed = self._placed(n_persist, outside)
            return self._fits_host(
                self._plan(_Knobs(0, placed.floor, n_persist, outside))
            )

        return bisect_left(range(self._num_chunks + 1), True, key=fits)

    def _least_recompute(self, placed: _Placed, n_buffer: int) -> int | None:
        """The fewest recomputed blocks with which the device has room, if any."""
        room = self._budget.usable_bytes - placed.slot_bytes(n_buffer)
        least, later = self._least_activations
        start = bisect_left(least, placed.base - room, key=lambda n: -n)
        if self._memory.workload.accumulation > 1:
            held = placed.base + placed.gradients
            start = max(start, bisect_left(later, held - room, key=lambda n: -n))
        if start > self._num_blocks:
            return None
        states, segment = placed.parameters, 0
        rest = room - states.base - self._memory.hardware.unseen_bytes
        for n_checkpoint in range(start, self._num_blocks + 1):
            first = self._activations(n_checkpoint).first
            # the segment that was too large for one less often is again
            if first[segment] + states.before[segment] > rest:
                continue
            if self._peak_bytes(placed, n_checkpoint) <= room:
                return n_checkpoint
            totals = list(map(add, first, states.before))
            segment = totals.index(max(totals))
        return None

    def _least(self, all_resident: bool) -> _Knobs:
        """The plan that takes the least of the device."""
        best, best_bytes = _Knobs(0, 0, 0, 0), float("inf")
        bounds = []
        first, _ = self._least_activations
        for knobs in self._legal(all_resident):
            n_buffer, n_persist, outside = knobs
            placed = self._placed(n_persist, outside)
            states = placed.base + placed.slot_bytes(n_buffer)
            bounds.append((states + first[-1], *knobs))
        for least, n_buffer, n_persist, outside in sorted(bounds):
            if least >= best_bytes:
                break
            placed = self._placed(n_persist, outside)
            for n_checkpoint in range(self._num_blocks, -1, -1):
                nbytes = self._peak_bytes(placed, n_checkpoint)
                nbytes += placed.slot_bytes(n_buffer)
                if nbytes < best_bytes:
                    best_bytes = nbytes
                    best = _Knobs(n_checkpoint, n_buffer, n_persist, outside)
        return best

    @cached_property
    def _least_activations(self) -> tuple[list[int], list[int]]:
        """For each number of recomputed blocks the least that it and fewer take beside
        the states, in the first micro-batch and in later ones. Gradients of blocks
        take the least when they leave."""
        gradients = self._placed(0, len(self._outside) - 1).parameters.before
        unseen = self._memory.hardware.unseen_bytes
        every = [self._activations(number) for number in range(self._num_blocks + 1)]
        first = (max(map(add, each.first, gradients)) + unseen for each in every)
        later = (max(each.later) + unseen for each in every)
        return list(accumulate(first, min)), list(accumulate(later, min))

    def _peak_bytes(self, placed: _Placed, n_checkpoint: int) -> int:
        """Of the device, without slots."""
        if n_checkpoint not in placed.peaks:
            placed.peaks[n_checkpoint] = self._memory.peak_without_slots(
                placed.parameters, self._activations(n_checkpoint)
            )
        return placed.peaks[n_checkpoint]

    def _walk(self, n_checkpoint: int) -> Activations:
        kept = self._num_blocks - n_checkpoint
        return self._memory.activations(
            (Policy.RECOMPUTE,) * n_checkpoint + (Policy.KEEP,) * kept
        )

    def _fits_host(self, plan: Plan) -> bool:
        return self._memory.host(plan).peak_bytes <= self._budget.host_bytes

    def _place(self, n_persist: int, outside: int) -> _Placed:
        placements = place(
            self._layout,
            n_persist,
            self._memory.workload.fp32_master,
            self._outside[outside],
        )
        return _Placed(self._memory, self._bound, placements)

    def _plan(self, knobs: _Knobs) -> Plan:
        return make_plan(
            self._layout,
            knobs.n_persist,
            knobs.n_buffer,
            0,
            knobs.n_checkpoint,
            self._memory.workload.fp32_master,
            self._outside[knobs.outside],
            origin="search",
        )

    def _refuse(self, plan: Plan, what: str) -> NoReturn:
        """Say what `plan` lacks and what would make it fit."""
        budget = self._budget
        estimate = self._memory.device(plan)
        missing = estimate.peak_bytes - budget.usable_bytes
        if missing > 0:
            raise BudgetError(
                f"protrain_capacity_bytes: {what} needs {estimate.peak_bytes:,} bytes "
                f"on the device at {estimate.peak.label} ({_largest(estimate.terms)}); "
                f"{budget.usable_bytes:,} of {budget.device_bytes:,} may be used. "
                f"Raise protrain_capacity_bytes by at least {missing:,}, or lower "
                "micro_batch_size, sequence_len or the adapter's rank."
            )
        host = self._memory.host(plan)
        missing = host.peak_bytes - budget.host_bytes
        raise BudgetError(
            f"protrain_cpu_capacity_bytes: {what} needs {host.peak_bytes:,} bytes of "
            f"host memory ({_largest(host.terms)}), {budget.host_bytes:,} may be used. "
            f"Give the host at least {missing:,} more, raise protrain_capacity_bytes "
            "so that more stays on the device, or train an adapter."
        )


class _Placed:
    """What plans share whose chunks sit in the same places.

    Attributes:
        floor: Fewest slots that can run.
        num_paged: Chunks that pass through them.
        placements: Where each chunk sits.
        base: Weights and optimizer state on the device, without slots.
        gradients: Of what trains there.
        peaks: Device peaks known so far, by recomputed blocks, without slots.
    """

    def __init__(
        self, memory: MemoryModel, bound: StepBound, placements: tuple[Placement, ...]
    ) -> None:
        self._memory = memory
        self._bound = bound
        self.placements = placements
        self.floor = slot_floor(memory.layout, placements)
        self.num_paged = placements.count(Placement.PAGED)
        self._states = memory.states(placements)
        self.base = self._states.weights + self._states.moments
        self.gradients = self._states.gradients
        self.slot_bytes = lru_cache(maxsize=None)(self._slot_bytes)
        self.peaks: dict[int, int] = {}

    @cached_property
    def parameters(self) -> Parameters:
        return self._memory.parameters(self.placements, self._states)

    @cached_property
    def bound(self) -> PlacedBound:
        return self._bound.under(self.placements)

    def _slot_bytes(self, n_buffer: int) -> int:
        return sum(slot_bytes(self._memory.layout, self.placements, n_buffer))


def _num_resident(knobs: _Knobs) -> int:
    return knobs.n_persist


def _largest(terms: Mapping[str, int]) -> str:
    ordered = sorted(terms.items(), key=lambda term: -term[1])
    return ", ".join(f"{name} {nbytes:,}" for name, nbytes in ordered if nbytes)
