"""The fastest plan that fits.

For every number of resident chunks, of slots and of swapping blocks, the fewest
recomputed blocks that fit: recompute only ever adds compute. Candidates are simulated in
the order of a lower bound of their time until that bound loses, so the result is the
optimum over all of them, exactly, and a larger budget never gives a slower plan. Equation
1 of the paper, with a simulation for its equations 2 to 7.

Numbers of swapping blocks: none; the paper's bound, the blocks divided by the interval
at which their copies hide behind compute, with any number of the others recomputing;
and half the bound, the bound and all blocks where every block recomputes and the
swapping ones send their inputs away.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate, chain, compress
from math import ceil, inf
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
from ..errors import BudgetError, ConfigError
from ..layout import slot_bytes, slot_floor
from ..types import BlockTimes, Budget, Moved, Placement, Plan, Policy
from .bounds import PlacedBound, Row, StepBound
from .plans import block_policies, make_plan, place

MAX_EXTRA_SLOTS = 2
"""Slots worth trying beyond the fewest that can run with nothing resident. One more lets
copies run ahead; each further one saves one fetch a micro-batch where a resident chunk
would save two."""


ROUNDING = 1e-9
"""Relative difference of seconds that are taken as equal."""


class _Knobs(NamedTuple):
    """What tells one candidate from another; `outside` counts `Search._outside`."""

    n_swap: int
    n_checkpoint: int
    n_buffer: int
    n_persist: int
    outside: int


class _Family(NamedTuple):
    """Candidates with the same number of swapping blocks."""

    n_swap: int
    checkpoints: range


class _Known(NamedTuple):
    """A row of policies, what it takes and what it moves."""

    policies: tuple[Policy, ...]
    activations: Activations
    moved: Moved


class Search:
    """Plans of one model and batch on one machine.

    Args:
        memory: Peaks of its plans.
        times: What its blocks take to compute.
        budget: What may be used.
        reachable: Whether the chunks may sit so; None where they may sit anyhow.
        redone_if_paged: Blocks that have to recompute where any weight of theirs pages.
    """

    def __init__(
        self,
        memory: MemoryModel,
        times: BlockTimes,
        budget: Budget,
        reachable: Callable[[Sequence[Placement]], bool] | None = None,
        redone_if_paged: Set[int] = frozenset(),
    ) -> None:
        self._reachable = reachable
        self._redone_if_paged = redone_if_paged
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
        self._known = lru_cache(maxsize=None)(self._walk)
        self._row = lru_cache(maxsize=None)(self._make_row)
        self._legal = lru_cache(maxsize=None)(self._list_legal)
        self._least_s = lru_cache(maxsize=None)(self._least_seconds)

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
            self._memory.moved_bytes(plan.policies),
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
        best_s = inf
        # what swaps has to beat the best that does not
        for families in (self._families[:1], self._families[1:]):
            # at a tie less recompute and fewer slots come first
            limit_s = best_s * (1 - ROUNDING)
            candidates = chain.from_iterable(
                self._candidates(family, all_resident, limit_s) for family in families
            )
            for bound_s, knobs in sorted(candidates):
                if bound_s >= best_s * (1 - ROUNDING):
                    break
                plan = self._plan(knobs)
                if knobs.n_swap and not self._fits_host(plan):
                    continue
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
                swap_interval=self.swap_interval,
            )
            if self.fits(plan):
                break
        if not self._allowed(self._paged_blocks(plan.placements), plan.policies):
            raise ConfigError(
                f"protrain_n_checkpoint_override: {n_checkpoint} with "
                f"protrain_n_persist_override {n_persist} and "
                f"protrain_n_swap_override {n_swap} pages weights of a block under "
                "lora_mlp_kernel that does not recompute, which "
                "protrain_lora_mlp_forbid_offload: true excludes. Set "
                f"protrain_n_checkpoint_override: {self._num_blocks}, or remove "
                "protrain_lora_mlp_forbid_offload."
            )
        return plan

    def nearest(self, all_resident: bool = False) -> Plan:
        """The plan that takes the least of the device or, if that has room for some
        plan, the one among those that takes the least of the host."""
        most: dict[tuple[_Family, int], _Knobs] = {}
        for family in self._families:
            fitting = self._fitting(family, all_resident, host=False)
            # the more is resident, the less is on the host
            for knobs in sorted(fitting, key=_num_resident):
                most[family, knobs.outside] = knobs
        if not most:
            return self._plan(self._smallest(all_resident))
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

    @cached_property
    def swap_interval(self) -> int:
        """Blocks from one that swaps to the next, so that what one sends away leaves
        beside the compute of so many."""
        memory, forward_s = self._memory, sum(self._times.forward_s)
        offload_s = memory.swappable_bytes / memory.hardware.offload_bytes_s
        most = max(1, self._num_blocks)
        if offload_s >= most * forward_s:
            return most
        return max(1, ceil(offload_s / forward_s))

    @cached_property
    def _families(self) -> list[_Family]:
        """All policies that are tried: without swaps, with saved tensors that swap, and
        with inputs that do."""
        blocks = self._num_blocks
        most = ceil(blocks / self.swap_interval)
        all_redo = range(blocks, blocks + 1)
        inputs = [_Family(n, all_redo) for n in sorted({ceil(most / 2), most, blocks})]
        saved = _Family(most, range(blocks - most + 1))
        return [_Family(0, range(blocks + 1)), *inputs, saved]

    def _candidates(
        self, family: _Family, all_resident: bool, limit_s: float
    ) -> Iterator[tuple[float, _Knobs]]:
        """Plans that fit the device, each with a bound of its time; none left out is
        faster, unless it takes `limit_s` or longer."""
        for knobs in self._fitting(family, all_resident, limit_s=limit_s):
            placed = self._placed(knobs.n_persist, knobs.outside)
            row = self._row(knobs.n_swap, knobs.n_checkpoint)
            yield placed.bound.seconds(knobs.n_buffer, row), knobs

    def _fitting(
        self,
        family: _Family,
        all_resident: bool,
        host: bool = True,
        limit_s: float = inf,
    ) -> Iterator[_Knobs]:
        """Plans that the device, and perhaps the host, has room for, though there not
        for what is swapped."""
        fewest: dict[int, int] = {}
        n_swap, checkpoints = family
        places = self._legal(all_resident, True, host)
        if n_swap and limit_s < inf:
            places = [at for at in places if self._least_s(at) < limit_s]
        states = min(map(self._state_bytes, places), default=0)
        room = self._budget.usable_bytes - states
        kept = self._least_kept(family)
        start = bisect_left(kept, -room, key=lambda n: -n)
        checkpoints = checkpoints[start : self._num_faster(family, limit_s)]
        if not checkpoints:
            return
        if n_swap and len(checkpoints) > 1:
            row = self._least_row(n_swap, checkpoints[0])
            bounds = (
                self._placed(n_persist, outside).bound.seconds(n_buffer, row)
                for n_buffer, n_persist, outside in places
            )
            places = list(compress(places, (bound_s < limit_s for bound_s in bounds)))
        # nothing need be walked for
        if not places:
            return
        least = self._least_activations(n_swap, checkpoints)
        for n_buffer, n_persist, outside in places:
            # without gradients for the host, residents only take transfers away:
            # fewer of them are of use only where they spare recompute
            limit = self._num_blocks + 1
            if self._frozen and not outside and not n_swap:
                limit = fewest.get(n_buffer, limit)
            if not limit:
                continue
            placed = self._placed(n_persist, outside)
            n_checkpoint = self._least_recompute(
                placed, n_buffer, n_swap, checkpoints, least
            )
            if n_checkpoint is None or n_checkpoint >= limit:
                continue
            fewest[n_buffer] = n_checkpoint
            yield _Knobs(n_swap, n_checkpoint, n_buffer, n_persist, outside)

    def _list_legal(
        self, all_resident: bool, device: bool = False, host: bool = False
    ) -> list[tuple[int, int, int]]:
        """Slots, resident chunks and `outside` of every plan, the most resident first;
        perhaps only of those that device or host could have room for."""
        legal: list[tuple[int, int, int]] = []
        room = self._budget.usable_bytes if device else inf
        for outside in range(len(self._outside)):
            least = self._least_persist(outside) if host else 0
            if all_resident:
                least = max(least, self._num_chunks)
            persists = range(least, self._num_chunks + 1)
            takes = partial(self._least_bytes, outside)
            stop = bisect_right(persists, room, key=takes)
            for n_persist in reversed(persists[:stop]):
                placed = self._placed(n_persist, outside)
                if self._reachable and not self._reachable(placed.placements):
                    continue
                most = min(placed.num_paged, self._most_slots)
                for n_buffer in range(placed.floor, most + 1):
                    if takes(n_persist) + placed.slot_bytes(n_buffer) <= room:
                        legal.append((n_buffer, n_persist, outside))
        return legal

    def _least_bytes(self, outside: int, n_persist: int) -> float:
        """What no plan takes less than of the device, slots excepted."""
        (first,), (later,) = self._least
        placed = self._placed(n_persist, outside)
        return max(placed.base + first, placed.held + later)

    @cached_property
    def _least(self) -> tuple[list[int], list[int]]:
        """Of activations, under any policies."""
        return self._beside_states([self._memory.least])

    @cached_property
    def _most_slots(self) -> int:
        return self._placed(0, 0).floor + MAX_EXTRA_SLOTS

    def _least_persist(self, outside: int) -> int:
        """The fewest resident chunks with which the host has room; they only relieve
        it. One more than there are if none."""

        def fits(n_persist: int) -> bool:
            placed = self._placed(n_persist, outside)
            return self._fits_host(
                self._plan(_Knobs(0, 0, placed.floor, n_persist, outside))
            )

        # most often it has
        if fits(0):
            return 0
        return bisect_left(range(self._num_chunks + 1), True, key=fits)

    def _num_faster(self, family: _Family, limit_s: float) -> int:
        """How many of a family compute for less than `limit_s`; they come first."""
        n_swap, checkpoints = family
        times, count = self._times, self._memory.workload.accumulation
        policies = block_policies(
            self._num_blocks, n_swap, checkpoints[0], self.swap_interval
        )
        seconds = sum(times.forward_s) + sum(times.backward_s)
        seconds += times.outside_forward_s + times.outside_backward_s
        again = zip(policies, times.forward_s, strict=True)
        seconds += sum(s for policy, s in again if policy.recomputes)
        more = zip(policies, times.forward_s, strict=True)
        redone = (count * s for policy, s in more if policy is Policy.KEEP)
        totals = list(accumulate(redone, initial=count * seconds))
        return bisect_left(totals, limit_s)

    def _least_recompute(
        self,
        placed: _Placed,
        n_buffer: int,
        n_swap: int,
        checkpoints: range,
        least: tuple[list[int], list[int]],
    ) -> int | None:
        """The fewest recomputed blocks with which the device has room, if any."""
        room = self._budget.usable_bytes - placed.slot_bytes(n_buffer)
        first, later = least
        start = bisect_left(first, placed.base - room, key=lambda n: -n)
        start = max(start, bisect_left(later, placed.held - room, key=lambda n: -n))
        if start >= len(first):
            return None
        states, segment = placed.parameters, 0
        rest = room - states.base - self._memory.hardware.unseen_bytes
        for n_checkpoint in checkpoints[start:]:
            known = self._known(n_swap, n_checkpoint)
            if not self._allowed(placed.redone, known.policies):
                continue
            totals = known.activations.first
            # the segment that was too large for one less often is again
            if totals[segment] + states.before[segment] > rest:
                continue
            if self._peak_bytes(placed, n_swap, n_checkpoint) <= room:
                return n_checkpoint
            totals = list(map(add, totals, states.before))
            segment = totals.index(max(totals))
        return None

    def _smallest(self, all_resident: bool) -> _Knobs:
        """The plan that takes the least of the device."""
        best, best_bytes = _Knobs(0, 0, 0, 0, 0), inf
        rows = [
            (least, family.n_swap, n_checkpoint)
            for family in self._families
            for n_checkpoint, least in zip(
                family.checkpoints, self._least_kept(family), strict=True
            )
        ]
        # most often what recomputes most takes the least
        rows.sort(key=lambda row: (row[0], -row[2]))
        places = self._legal(all_resident)
        for states, at in sorted((self._state_bytes(at), at) for at in places):
            n_buffer, n_persist, outside = at
            placed = self._placed(n_persist, outside)
            for least, n_swap, n_checkpoint in rows:
                if states + least >= best_bytes:
                    break
                known = self._known(n_swap, n_checkpoint)
                if not self._allowed(placed.redone, known.policies):
                    continue
                nbytes = self._peak_bytes(placed, n_swap, n_checkpoint)
                nbytes += placed.slot_bytes(n_buffer)
                if nbytes < best_bytes:
                    best_bytes = nbytes
                    best = _Knobs(n_swap, n_checkpoint, n_buffer, n_persist, outside)
        return best

    def _least_kept(self, family: _Family) -> list[int]:
        """For each number of recomputed blocks less than any plan takes beside the
        states, found without a walk."""
        kept, least = self._kept
        n_swap, checkpoints = family
        policies = block_policies(
            self._num_blocks, n_swap, checkpoints[0], self.swap_interval
        )
        keeping = [n for n, p in zip(kept, policies, strict=True) if p is Policy.KEEP]
        totals = list(accumulate(reversed(keeping), initial=least))
        return totals[::-1]

    @cached_property
    def _kept(self) -> tuple[list[int], int]:
        """What each block that keeps its tensors takes at the turn from forward to
        backward, and the peak there under any policies, beside the states."""
        gradients = self._placed(0, len(self._outside) - 1).parameters.before
        totals = list(map(add, self._memory.least.first, gradients))
        turn = [segment.backward for segment in self._memory.trace.segments].index(True)
        at = max(turn - 1, turn, key=totals.__getitem__)
        least = totals[at] + self._memory.hardware.unseen_bytes
        return self._memory.kept_bytes(at), least

    def _state_bytes(self, at: tuple[int, int, int]) -> int:
        n_buffer, n_persist, outside = at
        placed = self._placed(n_persist, outside)
        return placed.base + placed.slot_bytes(n_buffer)

    def _least_activations(
        self, n_swap: int, checkpoints: range
    ) -> tuple[list[int], list[int]]:
        """For each number of recomputed blocks the least that it and the fewer take
        beside the states, in the first micro-batch and in later ones. Gradients of
        blocks take the least when they leave."""
        every = [self._known(n_swap, number).activations for number in checkpoints]
        return self._beside_states(every)

    def _beside_states(self, every: list[Activations]) -> tuple[list[int], list[int]]:
        gradients = self._placed(0, len(self._outside) - 1).parameters.before
        unseen = self._memory.hardware.unseen_bytes
        first = (max(map(add, each.first, gradients)) + unseen for each in every)
        later = (max(each.later) + unseen for each in every)
        return list(accumulate(first, min)), list(accumulate(later, min))

    def _peak_bytes(self, placed: _Placed, n_swap: int, n_checkpoint: int) -> int:
        """Of the device, without slots."""
        key = n_swap, n_checkpoint
        if key not in placed.peaks:
            placed.peaks[key] = self._memory.peak_without_slots(
                placed.parameters, self._known(*key).activations
            )
        return placed.peaks[key]

    def _walk(self, n_swap: int, n_checkpoint: int) -> _Known:
        policies = block_policies(
            self._num_blocks, n_swap, n_checkpoint, self.swap_interval
        )
        activations = self._memory.activations(policies)
        return _Known(policies, activations, self._memory.moved_bytes(policies))

    def _make_row(self, n_swap: int, n_checkpoint: int) -> Row:
        known = self._known(n_swap, n_checkpoint)
        return self._bound.row(known.policies, known.moved)

    def _least_seconds(self, at: tuple[int, int, int]) -> float:
        """What no policies beat there: nothing is done again, and nothing moves but to
        take the link from copies that go the other way."""
        n_buffer, n_persist, outside = at
        row = self._row(0, 0)._replace(more_bytes=self._large_bytes)
        return self._placed(n_persist, outside).bound.seconds(n_buffer, row)

    @cached_property
    def _large_bytes(self) -> int:
        """No policies move more."""
        holdings = self._memory.trace.holdings
        return sum(holding.nbytes for holding in holdings if holding.large)

    def _least_row(self, n_swap: int, n_checkpoint: int) -> Row:
        """Where more blocks that do not swap recompute, no plan takes less."""
        policies = block_policies(
            self._num_blocks, n_swap, n_checkpoint, self.swap_interval
        )
        return self._bound.row(policies, *self._memory.surely_moved(policies))

    @staticmethod
    def _allowed(redone: Iterable[int], policies: Sequence[Policy]) -> bool:
        return all(policies[block].recomputes for block in redone)

    def _paged_blocks(self, placements: Sequence[Placement]) -> Set[int]:
        """Those of them that have to recompute."""
        pairs = zip(self._layout.chunks, placements, strict=True)
        return self._redone_if_paged & frozenset(
            chunk.block for chunk, at in pairs if at is Placement.PAGED
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
        redone = self._paged_blocks(placements)
        return _Placed(self._memory, self._bound, placements, redone)

    def _plan(self, knobs: _Knobs) -> Plan:
        return make_plan(
            self._layout,
            knobs.n_persist,
            knobs.n_buffer,
            knobs.n_swap,
            knobs.n_checkpoint,
            self._memory.workload.fp32_master,
            self._outside[knobs.outside],
            origin="search",
            swap_interval=self.swap_interval,
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
        redone: Blocks that have to recompute.
        base: Weights and optimizer state on the device, without slots.
        held: The same with gradients of what trains there, for later micro-batches;
            minus infinity where there are none.
        peaks: Device peaks known so far, by swapping and recomputed blocks, without
            slots.
    """

    def __init__(
        self,
        memory: MemoryModel,
        bound: StepBound,
        placements: tuple[Placement, ...],
        redone: Set[int],
    ) -> None:
        self._memory = memory
        self._bound = bound
        self.placements = placements
        self.redone = redone
        self.floor = slot_floor(memory.layout, placements)
        self.num_paged = placements.count(Placement.PAGED)
        self._states = memory.states(placements)
        self.base = self._states.weights + self._states.moments
        again = memory.workload.accumulation > 1
        self.held: float = self.base + self._states.gradients if again else -inf
        self.slot_bytes = lru_cache(maxsize=None)(self._slot_bytes)
        self.peaks: dict[tuple[int, int], int] = {}

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
