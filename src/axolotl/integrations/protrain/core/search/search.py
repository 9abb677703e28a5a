"""The fastest plan that fits.

For every number of resident chunks, of slots and of swapping blocks, the fewest
recomputed blocks that fit: recompute only ever adds compute. Candidates wait in the
order of a lower bound of their time, from totals at first; what comes first is looked
at more closely and waits again, or is simulated, until no bound is below the best time.
So the result is the optimum over all of them, exactly for one rank and up to `SLACK`
for several, and a larger budget never gives a plan that is slower by more. Equation 1 of the paper, with a simulation for its equations 2 to 7.

Numbers of swapping blocks: none; the paper's bound, the blocks divided by the interval
at which their copies hide behind compute, with any number of the others recomputing;
and half the bound, the bound and all blocks where every block recomputes and the
swapping ones send their inputs away.

With several ranks on a node, chunks that they share (mode C) come last: they have to
beat the best of the rest, and all that is known of policies is known of theirs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from heapq import heapify, heappop, heappush
from itertools import accumulate, product
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
from ..types import BlockTimes, Budget, Placement, Plan, Policy
from .bounds import PlacedBound, Row, StepBound
from .plans import block_policies, make_plan, place

MODES = frozenset("ABC")
"""All values of `Plan.mode`. Without A only plans that page something are searched."""

ONLY_A = frozenset("A")
"""Only plans with nothing on the host but what has masters there."""

MAX_EXTRA_SLOTS = 2
"""Slots worth trying beyond the fewest that can run with nothing resident. One more lets
copies run ahead; each further one saves one fetch a micro-batch where a resident chunk
would save two."""


ROUNDING = 1e-9
"""Relative difference of seconds that are taken as equal."""

SLACK = 0.005
"""With several ranks, by how much less time a plan must be able to take to be tried:
their bounds are less close, and every plan that might be faster would be simulated."""


class _Place(NamedTuple):
    """A candidate but for its policies: slots, pageable chunks that are not resident,
    what of `Search._outside` applies, and `Plan.shards`."""

    n_buffer: int
    num_paged: int
    outside: int
    shards: int


class _Family(NamedTuple):
    """Candidates with the same number of swapping blocks."""

    n_swap: int
    checkpoints: range


class _Candidate(NamedTuple):
    """A place and the fewest recomputed blocks that may fit there.

    In the order in which they are looked at: at a tie those first that recompute less,
    have fewer slots or page less.

    Attributes:
        bound_s: No such plan takes less.
        family: Number in `Search._families`.
        step: Of the family's `checkpoints`.
        at: The place.
        fits: Whether `step` is known to fit. Until then `bound_s` is one of totals.
    """

    bound_s: float
    family: int
    step: int
    at: _Place
    fits: bool


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
        self._policies = lru_cache(maxsize=None)(self._list_policies)
        self._row = lru_cache(maxsize=None)(self._make_row)
        self._least_kept = lru_cache(maxsize=None)(self._list_least_kept)
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
            self._memory.moved_bytes(plan.policies),
            world=workload.world,
            launches_ahead=hardware.overlaps,
        )

    def fastest(self, modes: Set[str] = MODES) -> Plan:
        """The fastest plan that fits.

        Args:
            modes: Only plans of these; C is none with one rank on a node.

        Raises:
            BudgetError: None fits; names the nearest and what it lacks.
        """
        best: Plan | None = None
        best_s = inf
        slack = ROUNDING if self._memory.workload.world.size == 1 else SLACK
        # what swaps has to beat the best that does not
        every = range(len(self._families))
        for shards, families in product(self._shards(modes), (every[:1], every[1:])):
            for candidate in self._by_bound(families, shards, modes, best_s):
                if candidate.bound_s >= best_s * (1 - slack):
                    break
                if not candidate.fits:
                    continue
                plan = self._plan(candidate.family, candidate.step, candidate.at)
                if plan.n_swap and not self._fits_host(plan):
                    continue
                step_s = self.simulate(plan).total_s
                if step_s < best_s * (1 - ROUNDING):
                    best, best_s = plan, step_s
        if best is None:
            resident = modes == ONLY_A
            what = "keeping everything resident" if resident else "the smallest plan"
            self._refuse(self.nearest(modes), what)
        return best

    def by_hand(
        self,
        n_persist: int,
        n_buffer: int,
        n_swap: int,
        n_checkpoint: int,
        shards: int = 1,
    ) -> Plan:
        """The plan that the overrides ask for.

        Raises:
            ConfigError: A knob is outside its legal range, which the message gives.
            BudgetError: The plan does not fit.
        """
        plan = self.asked(n_persist, n_buffer, n_swap, n_checkpoint, shards)
        if not self.fits(plan):
            self._refuse(plan, "the plan of the overrides")
        return plan

    def asked(
        self,
        n_persist: int,
        n_buffer: int,
        n_swap: int,
        n_checkpoint: int,
        shards: int = 1,
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
                shards=shards,
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

    def nearest(self, modes: Set[str] = MODES) -> Plan:
        """The plan that takes the least of the device or, if that has room for some
        plan, the one among those that takes the least of the host."""
        families = range(len(self._families))
        outsides = range(len(self._outside))
        plans = []
        for shards, family, outside in product(self._shards(modes), families, outsides):
            # the more is resident, the less is on the host
            places = self._places(shards, modes, device=True)
            for at in (at for at in places if at.outside == outside):
                step = self._first_that_fits(family, at)
                if step is not None:
                    plans.append(self._plan(family, step, at))
                    break
        if not plans:
            return self._smallest(modes)
        return min(plans, key=lambda plan: self._memory.host(plan).peak_bytes)

    def plain(self, n_checkpoint: int) -> Plan:
        """Everything resident, whether it fits or not: training without a pager."""
        return make_plan(
            self._layout, self._num_chunks, 0, 0, n_checkpoint, fp32_master=False
        )

    def fits(self, plan: Plan) -> bool:
        """Whether device and host have room for it."""
        peak = self._memory.peak_bytes(
            plan.placements, plan.n_buffer, plan.policies, plan.shards
        )
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

    def _shards(self, modes: Set[str]) -> list[int]:
        """Values of `Plan.shards` in these modes, 1 first."""
        ranks = self._memory.workload.world.local_size
        alone = [1] if modes & {"A", "B"} else []
        return alone + ([ranks] if "C" in modes and ranks > 1 else [])

    def _by_bound(
        self, families: Iterable[int], shards: int, modes: Set[str], limit_s: float
    ) -> Iterator[_Candidate]:
        """What the device may have room for, the lowest bound first, and again when it
        is known to fit; the host may lack room for what is swapped."""
        places = self._places(shards, modes, device=True, host=True)
        if limit_s < inf:
            backward_s = sum(self._times.backward_s)
            places = [at for at in places if self._least_s(at, backward_s) < limit_s]
        waiting = list(self._roughly(families, places))
        heapify(waiting)
        fitting: list[_Candidate] = []
        while waiting:
            candidate = heappop(waiting)
            if self._frozen and any(_spares(other, candidate) for other in fitting):
                continue
            yield candidate
            if candidate.fits:
                continue
            closer = self._closer(candidate)
            if closer is not None:
                heappush(waiting, closer)
                fitting.append(closer)

    def _roughly(
        self, families: Iterable[int], places: Iterable[_Place]
    ) -> Iterator[_Candidate]:
        """Candidates with what totals say of their time and of their memory."""
        for family in families:
            backward_s = self._backward_s(family)
            moved = self._surely_moved(family)
            for at in places:
                step = self._first_to_try(family, at)
                if step < len(backward_s):
                    least_s = self._least_s(at, backward_s[step], *moved)
                    yield _Candidate(least_s, family, step, at, False)

    def _least_s(
        self, at: _Place, backward_s: float, out_bytes: int = 0, back_bytes: int = 0
    ) -> float:
        bound = self._placed(at.num_paged, at.outside, at.shards).bound
        return bound.least_seconds(at.n_buffer, backward_s, out_bytes, back_bytes)

    def _closer(self, candidate: _Candidate) -> _Candidate | None:
        """The same with a higher bound; None if it does not fit."""
        step = self._first_that_fits(candidate.family, candidate.at)
        if step is None:
            return None
        at = candidate.at
        bound = self._placed(at.num_paged, at.outside, at.shards).bound
        bound_s = bound.seconds(at.n_buffer, self._row(candidate.family, step))
        return candidate._replace(
            bound_s=max(candidate.bound_s, bound_s), step=step, fits=True
        )

    def _places(
        self, shards: int, modes: Set[str], device: bool = False, host: bool = False
    ) -> list[_Place]:
        """All legal ones, the most resident first; perhaps only those that device or
        host could have room for."""
        places: list[_Place] = []
        room = self._budget.usable_bytes if device else inf
        resident = modes == ONLY_A
        for outside in range(1 if resident else len(self._outside)):
            most = self._most_paged(outside, shards) if host else self._num_chunks
            # what is paged takes less of the device
            fewest = 0 if "A" in modes and shards == 1 else 1
            paged = range(fewest, min(most, 0 if resident else most) + 1)
            takes = partial(self._least_bytes, outside, shards)
            first = bisect_left(paged, True, key=lambda n: takes(n) <= room)
            for num_paged in paged[first:]:
                placed = self._placed(num_paged, outside, shards)
                if self._reachable and not self._reachable(placed.placements):
                    continue
                most_slots = min(placed.num_in_slots, self._most_slots)
                for n_buffer in range(placed.floor, most_slots + 1):
                    if takes(num_paged) + placed.slot_bytes(n_buffer) <= room:
                        places.append(_Place(n_buffer, num_paged, outside, shards))
        return places

    def _least_bytes(self, outside: int, shards: int, num_paged: int) -> float:
        """What no plan takes less than of the device, slots excepted, nor buffers for
        reductions, which are there from the first paged chunk on."""
        placed = self._placed(num_paged, outside, shards)
        first, later = self._least
        return max(placed.base + first, placed.held + later) - placed.reduction

    @cached_property
    def _least(self) -> tuple[int, int]:
        """What no policies take less than beside the states, in the first micro-batch
        and in later ones."""
        least, unseen = self._memory.least, self._memory.hardware.unseen_bytes
        first = max(map(add, least.first, self._least_gradients))
        return first + unseen, max(least.later) + unseen

    @cached_property
    def _least_gradients(self) -> list[int]:
        """Beside each segment's own in the first micro-batch. Those of blocks take the
        least when they leave."""
        all_paged = self._placed(self._num_chunks, len(self._outside) - 1, 1)
        return all_paged.parameters.before

    @cached_property
    def _most_slots(self) -> int:
        return self._placed(self._num_chunks, 0, 1).floor + MAX_EXTRA_SLOTS

    def _most_paged(self, outside: int, shards: int) -> int:
        """The most paged chunks with which the host has room; they only burden it. Less
        than none if it has room for no plan."""

        def lacks(num_paged: int) -> bool:
            floor = self._placed(num_paged, outside, shards).floor
            return not self._fits_host(
                self._plan(0, 0, _Place(floor, num_paged, outside, shards))
            )

        # most often it has
        if not lacks(self._num_chunks):
            return self._num_chunks
        return bisect_left(range(self._num_chunks + 1), True, key=lacks) - 1

    def _backward_s(self, family: int) -> list[float]:
        """Compute of a micro-batch's backward for each number of recomputed blocks."""
        times, policies = self._times, self._policies(family, 0)
        again = list(zip(policies, times.forward_s, strict=True))
        seconds = sum(times.backward_s) + sum(s for p, s in again if p.recomputes)
        more = (s for policy, s in again if policy is Policy.KEEP)
        return list(accumulate(more, initial=seconds))

    def _surely_moved(self, family: int) -> tuple[int, int]:
        """Bytes that leave and come back however many of the others recompute."""
        if not self._families[family].n_swap:
            return 0, 0
        moved = self._memory.surely_moved(self._policies(family, 0))
        return sum(moved.out), sum(moved.back)

    def _first_to_try(self, family: int, at: _Place) -> int:
        """No step before it can fit."""
        room = self._budget.usable_bytes - self._state_bytes(at)
        return bisect_left(self._least_kept(family), -room, key=lambda n: -n)

    def _first_that_fits(self, family: int, at: _Place) -> int | None:
        """The first step for which the device has room, if any."""
        placed = self._placed(at.num_paged, at.outside, at.shards)
        room = self._budget.usable_bytes - placed.slot_bytes(at.n_buffer)
        states, segment = placed.parameters, 0
        rest = room - states.base - self._memory.hardware.unseen_bytes
        steps = range(len(self._families[family].checkpoints))
        for step in steps[self._first_to_try(family, at) :]:
            if not self._allowed(placed.redone, self._policies(family, step)):
                continue
            totals = self._activations(family, step).first
            # the segment that was too large for one less often is again
            if totals[segment] + states.before[segment] > rest:
                continue
            if self._peak_bytes(placed, family, step) <= room:
                return step
            totals = list(map(add, totals, states.before))
            segment = totals.index(max(totals))
        return None

    def _smallest(self, modes: Set[str]) -> Plan:
        """The plan that takes the least of the device."""
        best, best_bytes = (0, 0, _Place(0, 0, 0, 1)), inf
        rows = [
            (least, -step, family)
            for family in range(len(self._families))
            for step, least in enumerate(self._least_kept(family))
        ]
        # most often what recomputes most takes the least
        rows.sort()
        places = [at for n in self._shards(modes) for at in self._places(n, modes)]
        for states, at in sorted((self._state_bytes(at), at) for at in places):
            placed = self._placed(at.num_paged, at.outside, at.shards)
            for least, minus_step, family in rows:
                if states + least >= best_bytes:
                    break
                policies = self._policies(family, -minus_step)
                if not self._allowed(placed.redone, policies):
                    continue
                nbytes = self._peak_bytes(placed, family, -minus_step)
                nbytes += placed.slot_bytes(at.n_buffer)
                if nbytes < best_bytes:
                    best, best_bytes = (family, -minus_step, at), nbytes
        return self._plan(*best)

    def _list_least_kept(self, family: int) -> list[int]:
        """For each step less than any plan takes beside the states, found without a
        walk."""
        kept, least = self._kept
        policies = self._policies(family, 0)
        keeping = [n for n, p in zip(kept, policies, strict=True) if p is Policy.KEEP]
        totals = list(accumulate(reversed(keeping), initial=least))
        return totals[::-1]

    @cached_property
    def _kept(self) -> tuple[list[int], int]:
        """What each block that keeps its tensors takes at the turn from forward to
        backward, and the peak there under any policies, beside the states."""
        totals = list(map(add, self._memory.least.first, self._least_gradients))
        turn = [segment.backward for segment in self._memory.trace.segments].index(True)
        at = max(turn - 1, turn, key=totals.__getitem__)
        least = totals[at] + self._memory.hardware.unseen_bytes
        return self._memory.kept_bytes(at), least

    def _state_bytes(self, at: _Place) -> int:
        placed = self._placed(at.num_paged, at.outside, at.shards)
        return placed.base + placed.slot_bytes(at.n_buffer)

    def _peak_bytes(self, placed: _Placed, family: int, step: int) -> int:
        """Of the device, without slots."""
        if (family, step) not in placed.peaks:
            placed.peaks[family, step] = self._memory.peak_without_slots(
                placed.parameters, self._activations(family, step)
            )
        return placed.peaks[family, step]

    def _list_policies(self, family: int, step: int) -> tuple[Policy, ...]:
        n_swap, checkpoints = self._families[family]
        return block_policies(
            self._num_blocks, n_swap, checkpoints[step], self.swap_interval
        )

    def _walk(self, family: int, step: int) -> Activations:
        return self._memory.activations(self._policies(family, step))

    def _make_row(self, family: int, step: int) -> Row:
        policies = self._policies(family, step)
        return self._bound.row(policies, self._memory.moved_bytes(policies))

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

    def _place(self, num_paged: int, outside: int, shards: int) -> _Placed:
        placements = place(
            self._layout,
            self._num_chunks - num_paged,
            self._memory.workload.fp32_master,
            self._outside[outside],
        )
        redone = self._paged_blocks(placements)
        return _Placed(self._memory, self._bound, placements, shards, redone)

    def _plan(self, family: int, step: int, at: _Place) -> Plan:
        n_swap, checkpoints = self._families[family]
        return make_plan(
            self._layout,
            self._num_chunks - at.num_paged,
            at.n_buffer,
            n_swap,
            checkpoints[step],
            self._memory.workload.fp32_master,
            self._outside[at.outside],
            origin="search",
            swap_interval=self.swap_interval,
            shards=at.shards,
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
        shards: Ranks that share each host-kept chunk.
        floor: Fewest slots that can run.
        num_in_slots: Chunks that pass through them.
        placements: Where each chunk sits.
        redone: Blocks that have to recompute.
        base: Weights and optimizer state on the device, without slots.
        reduction: Buffers in it in which gradients for the host are reduced.
        held: The same with gradients of what trains there, for later micro-batches;
            minus infinity where there are none.
        peaks: Device peaks known so far, by family and step, without slots.
    """

    def __init__(
        self,
        memory: MemoryModel,
        bound: StepBound,
        placements: tuple[Placement, ...],
        shards: int,
        redone: Set[int],
    ) -> None:
        self._memory = memory
        self._bound = bound
        self.placements = placements
        self.shards = shards
        self.redone = redone
        self.floor = slot_floor(memory.layout, placements)
        self.num_in_slots = placements.count(Placement.PAGED)
        self._states = memory.states(placements, shards)
        self.reduction = self._states.reduction
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
        return self._bound.under(self.placements, self.shards)

    def _slot_bytes(self, n_buffer: int) -> int:
        layout = self._memory.layout
        return sum(slot_bytes(layout, self.placements, n_buffer, self.shards))


def _spares(one: _Candidate, other: _Candidate) -> bool:
    """Whether `one` takes no longer because it only has less to fetch: where nothing
    trains on the host, fewer residents are of use only where they spare recompute."""
    return (
        one.family == other.family == 0
        and one.at.outside == other.at.outside == 0
        and one.at.n_buffer == other.at.n_buffer
        and one.at.shards == other.at.shards
        and one.at.num_paged < other.at.num_paged
        and one.step <= other.step
    )


def _largest(terms: Mapping[str, int]) -> str:
    ordered = sorted(terms.items(), key=lambda term: -term[1])
    return ", ".join(f"{name} {nbytes:,}" for name, nbytes in ordered if nbytes)
