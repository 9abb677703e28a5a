"""The fastest plan that fits (equation 1 of the paper).

For every number of resident chunks, of slots and of swapping blocks, the fewest
recomputed blocks that fit: recompute only ever adds compute. A step takes at least its
compute, and its copies each way. The candidates are simulated in the order of this bound,
until it is longer than the best step: so the result is the optimum over all of them, and a
larger budget never gives a slower plan.

Numbers of swapping blocks: none; the paper's bound N / I, the blocks divided by the
interval at which their copies hide behind compute, with any number of the others
recomputing; and half the bound, the bound and all blocks where every block recomputes
and the swapping ones send their inputs away. With several ranks on a node, each also
with chunks that they share (mode C).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, replace
from functools import cached_property, lru_cache
from itertools import chain, product
from math import ceil, inf
from operator import add
from typing import NamedTuple, NoReturn

from ..errors import BudgetError, ConfigError
from ..layout import aligned, padded_bytes, slot_bytes, slot_floor, spread_order
from ..layout.shards import PAGE_BYTES
from ..sizes import format_bytes
from ..types import BlockTimes, Budget, Knobs, Placement, Plan, Policy, Update
from .demand import Demand, update_seconds
from .memory import MemoryModel, Parameters
from .plans import block_policies, make_plan, place
from .seconds import StepTime, simulate
from .trained_bytes import ring_bytes

MODES = frozenset("ABC")
"""Candidate modes, all values of `Plan.mode`. Without A only plans that page something
are searched."""

ONLY_A = frozenset("A")
"""Only plans with nothing on the host but what has masters there."""

ONE_MEMORY = (
    "This device shares the host's memory: paging saves nothing; recomputation and the "
    "disk (protrain_disk_dir) do"
)

MAX_EXTRA_SLOTS = 2
"""Slots worth trying beyond the fewest that can run with nothing resident. One more lets
copies run ahead; each further one saves one fetch a micro-batch where a resident chunk
would save two."""

ROUNDING = 1e-9
"""Relative difference of seconds that are taken as equal."""


class _Row(NamedTuple):
    """Numbers of blocks that swap and recompute."""

    n_swap: int
    n_checkpoint: int


class _Place(NamedTuple):
    """Facts that plans share whose chunks sit in the same places. With the bytes of
    each number of slots that is tried, what else the chunks take on the device, the
    blocks that have to recompute there, and what of one memory the host has."""

    n_persist: int
    shards: int
    in_pieces: bool
    placements: tuple[Placement, ...]
    slots: dict[int, int]
    parameters: Parameters
    redone: Set[int]
    held: int = 0


class _Candidate(NamedTuple):
    """A place, its slots, and a row of policies that may fit there. In the order in
    which they are tried, but for the place: at a tie in `least_s`, below which the step
    cannot be, what swaps less, recomputes less or has fewer slots."""

    least_s: float
    row: _Row
    n_buffer: int
    at: _Place


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
        self._reachable, self._redone_if_paged = reachable, redone_if_paged
        self.memory, self._times, self._budget = memory, times, budget
        self._layout = layout = memory.layout
        self._num_chunks, self._num_blocks = len(layout.pageable), len(layout.blocks)
        trained = memory.trained
        self._updates_s = [
            chunk.trainable
            * update_seconds(chunk.payload_bytes, state, memory.hardware)
            for chunk, state in zip(layout.chunks, trained.state, strict=True)
        ]
        # of all plans, at least
        self._update_s = times.update_s
        if memory.workload.update is Update.DEVICE:
            self._update_s += sum(self._updates_s) / memory.workload.world.local_size
        # what has masters is updated on the host anyhow
        masters = memory.workload.fp32_master
        outside = [chunk for chunk in layout.chunks if not chunk.pageable]
        self._outside, self._hosts_state = [Placement.RESIDENT], False
        # what has no other memory to go to stays
        self._one_memory = memory.hardware.one_memory
        if not self._one_memory:
            if any(c.rows_bytes for c in outside):
                self._outside.append(Placement.HOST_LOOKUP)
            if any(c.trainable and not c.has_masters(masters) for c in outside):
                self._outside.append(Placement.OPTIMIZER_OFFLOADED)
            self._hosts_state = memory.workload.update is Update.DEVICE and any(
                chunk.trainable and not chunk.has_masters(masters)
                for chunk in layout.pageable
            )
        # whether operands of updates come in pieces, where that takes less
        less = trained.piece_operands != trained.operands
        self._staging = [False, True] if less else [False]
        nothing = place(layout, 0, False, Placement.RESIDENT)
        self._most_slots = slot_floor(layout, nothing) + MAX_EXTRA_SLOTS
        self._activations = lru_cache(maxsize=None)(
            lambda row: memory.activations(self._policies(row))
        )
        self._place = lru_cache(maxsize=None)(self._placed)

    def simulate(self, plan: Plan) -> StepTime:
        """Predicted seconds of an optimizer step, by lane."""
        return simulate(self._demand(plan))

    def _demand(self, plan: Plan) -> Demand:
        memory = self.memory
        pairs = zip(self._updates_s, plan.placements, strict=True)
        updates_s = sum(seconds for seconds, at in pairs if not at.on_host)
        times = replace(self._times, update_s=self._times.update_s + updates_s)
        moved = memory.activations(plan.policies).moved
        return Demand(memory.trained, plan, times, memory.hardware, moved)

    def fastest(self, modes: Set[str] = MODES) -> Plan:
        """The fastest plan of these modes that fits; none is C with one rank on a node.

        Raises:
            BudgetError: None fits; names the nearest and what it lacks.
        """
        best: Plan | None = None
        best_s = inf
        candidates = self._candidates(self._places(modes, host=True))
        for candidate in sorted(candidates, key=lambda candidate: candidate[:-1]):
            if candidate.least_s >= best_s * (1 - ROUNDING):
                break
            plan = self._plan(candidate)
            demand = self._demand(plan)
            if demand.least_s >= best_s * (1 - ROUNDING):
                continue
            step_s = simulate(demand).total_s
            if step_s < best_s * (1 - ROUNDING) and self._fits_host(plan):
                best, best_s = plan, step_s
        if best is None:
            resident = modes == ONLY_A
            what = "keeping everything resident" if resident else "the smallest plan"
            self._refuse(self.nearest(modes), what, modes)
        return best

    def by_hand(self, knobs: Knobs, shards: int = 1) -> Plan:
        """The plan that the overrides ask for.

        Raises:
            ConfigError: A knob is outside its legal range, which the message gives.
            BudgetError: The plan does not fit.
        """
        plan = self.asked(knobs, shards)
        if not self.fits(plan):
            self._refuse(plan, "the plan of the overrides")
        return plan

    def asked(self, knobs: Knobs, shards: int = 1) -> Plan:
        """Return the plan of knobs that somebody asks for, whether it fits or not."""
        wheres = [(outside, 0) for outside in self._outside]
        if self._hosts_state:
            # what is asked for are weights that stay
            wheres.append((self._outside[-1], knobs.n_persist))
        for (outside, staying), in_pieces in product(wheres, self._staging):
            plan = make_plan(
                self._layout,
                **asdict(knobs),
                fp32_master=self.memory.workload.fp32_master,
                outside=outside,
                swap_interval=self.swap_interval,
                shards=shards,
                n_host_state=staying,
            )
            plan = replace(plan, in_pieces=in_pieces)
            plan = with_disk(plan, self.memory, self._budget)
            if self.fits(plan):
                break
        if not _allowed(self._paged_blocks(plan.placements), plan.policies):
            raise ConfigError(
                f"protrain_n_checkpoint_override: {knobs.n_checkpoint} with "
                f"protrain_n_persist_override {knobs.n_persist} and "
                f"protrain_n_swap_override {knobs.n_swap} pages weights of a block "
                "under lora_mlp_kernel that does not recompute, which "
                "protrain_lora_mlp_forbid_offload: true excludes. Set "
                f"protrain_n_checkpoint_override: {self._num_blocks}, or remove "
                "protrain_lora_mlp_forbid_offload."
            )
        return plan

    def nearest(self, modes: Set[str] = MODES, lacks_host: bool = False) -> Plan:
        """The plan that lacks the least, of device and host together, or with `lacks_host`
        of the host alone, if any fits the device; among equals what swaps nothing and takes
        the fewest slots."""
        host_bytes = self._budget.host_bytes
        nothing = self._place(0, 0, self._outside[0], 1)
        best, least = self._candidate(_Row(0, 0), min(nothing.slots), nothing), inf
        for at in sorted(self._places(modes), key=lambda at: at.parameters.base):
            usable = self._budget.usable_bytes - at.held
            n_buffer, slots = min(at.slots.items(), key=lambda item: item[1])
            without = self._candidate(_Row(0, 0), n_buffer, at)
            phases = dict(self.memory.host(self._plan(without)).phases)
            loading = phases.pop("load")
            for rows in self._swapping:
                out = self._activations(rows[0]).moved.out
                swapped = self.memory.workload.world.local_size * sum(out)
                host = max(loading, max(phases.values()) + swapped)
                missing = max(host - host_bytes, 0)
                while missing < least:
                    more = 0 if lacks_host else least - missing - 1
                    room = usable + more - slots
                    if (row := self._first_that_fits(rows, at, room)) is None:
                        break
                    best = self._candidate(row, n_buffer, at)
                    device = slots + self._peak_bytes(row, at)
                    least = missing + max(device - usable, 0)
        return self._plan(best)

    def plain(self, n_checkpoint: int) -> Plan:
        """Everything resident, whether it fits or not: training without a pager."""
        knobs = self._num_chunks, 0, 0, n_checkpoint
        return make_plan(self._layout, *knobs, fp32_master=False)

    def fits(self, plan: Plan) -> bool:
        """Tell whether device and host have room for it."""
        peak = self.memory.device(plan).peak_bytes
        return peak <= self.budget_for(plan).usable_bytes and self._fits_host(plan)

    def budget_for(self, plan: Plan) -> Budget:
        """Return what a plan may use: of one memory, the device what the host leaves."""
        if not self._one_memory:
            return self._budget
        held = self.memory.host(plan).phases["train"]
        return replace(self._budget, reserve_bytes=self._budget.reserve_bytes + held)

    @cached_property
    def swap_interval(self) -> int:
        """Blocks from one that swaps to the next, so that what one sends away leaves
        beside the compute of so many."""
        memory, forward_s = self.memory, sum(self._times.forward_s)
        offload_s = memory.swappable_bytes / memory.hardware.offload_bytes_s
        most = max(1, self._num_blocks)
        if offload_s >= most * forward_s:
            return most
        return max(1, ceil(offload_s / forward_s))

    @cached_property
    def _families(self) -> list[list[_Row]]:
        """All policies that are tried, the fewest recomputed blocks first: without
        swaps, with saved tensors that swap, and with inputs that do."""
        blocks = self._num_blocks
        most = ceil(blocks / self.swap_interval)
        plain = [_Row(0, n) for n in range(blocks + 1)]
        if self._one_memory:
            return [plain, []]
        return [
            plain,
            [_Row(most, n) for n in range(blocks - most + 1)],
            *([_Row(n, blocks)] for n in sorted({ceil(most / 2), most, blocks})),
        ]

    @cached_property
    def _swapping(self) -> list[list[_Row]]:
        """Order candidates by what leaves for the host, the least first; of each what
        recomputes most first, which most often takes the least of the device."""
        found: dict[int, list[_Row]] = {}
        for row in chain.from_iterable(map(reversed, self._families)):
            found.setdefault(sum(self._activations(row).moved.out), []).append(row)
        return [found[nbytes] for nbytes in sorted(found)]

    def _places(self, modes: Set[str], host: bool = False) -> Iterator[_Place]:
        """All legal ones, the most resident first; perhaps only those for which the
        host has room."""
        ranks = self.memory.workload.world.local_size
        shared = [1] * bool(modes & {"A", "B"}) + [ranks] * ("C" in modes and ranks > 1)
        outsides = self._outside[: 1 if modes == ONLY_A else None]
        for shards, outside in product(shared, outsides):
            fewest = 0 if "A" in modes and shards == 1 else 1
            pages = modes != ONLY_A
            if self._one_memory:
                pages = pages and self._budget.disk_bytes > 0
            most = self._num_chunks if pages else 0
            where = [(num_paged, 0) for num_paged in range(fewest, most + 1)]
            if self._hosts_state and modes != ONLY_A:
                where += [(n, self._num_chunks - n) for n in range(fewest, most)]
                where += [(0, n) for n in range(1, self._num_chunks) if not fewest]
            for (num_paged, n_host_state), in_pieces in product(where, self._staging):
                at = self._place(num_paged, n_host_state, outside, shards, in_pieces)
                if self._reachable and not self._reachable(at.placements):
                    continue
                plain = self._plan(self._candidate(_Row(0, 0), min(at.slots), at))
                if self._one_memory and set(plain.paged) != set(plain.on_disk):
                    continue
                if not host or self._fits_host(plain):
                    yield at

    def _placed(
        self,
        num_paged: int,
        n_host_state: int,
        outside: Placement,
        shards: int,
        in_pieces: bool = False,
    ) -> _Place:
        layout, memory = self._layout, self.memory
        n_persist, masters = self._num_chunks - num_paged, memory.workload.fp32_master
        placements = place(layout, n_persist, masters, outside, n_host_state)
        most = min(placements.count(Placement.PARAM_OFFLOADED), self._most_slots)
        slots = {
            n_buffer: sum(slot_bytes(layout, placements, n_buffer, shards))
            + memory.trained.unpacking(n_buffer, shards)
            for n_buffer in range(slot_floor(layout, placements), most + 1)
        }
        parameters = memory.parameters(placements, shards, in_pieces)
        redone = self._paged_blocks(placements)
        placed = n_persist, shards, in_pieces, placements
        at = _Place(*placed, slots, parameters, redone)
        if not self._one_memory:
            return at
        plain = self._plan(self._candidate(_Row(0, 0), min(slots), at))
        return at._replace(held=memory.host(plain).phases["train"])

    def _candidates(self, places: Iterable[_Place]) -> Iterator[_Candidate]:
        """Plans for which the device has room; the host may lack it for what swaps.

        Swaps only add to a plan that recomputes nothing, and those of inputs to one that
        fits without: then they are left out.
        """
        plain, saved, *inputs = self._families
        for at in places:
            # with the most slots the least is fetched
            widest = self._candidate(_Row(0, 0), max(at.slots), at)
            least_s = self._demand(self._plan(widest)).least_s
            for n_buffer, nbytes in at.slots.items():
                room = self._budget.usable_bytes - at.held - nbytes
                row = self._first_that_fits(plain, at, room)
                rows = [row]
                if row is None or row.n_checkpoint:
                    rows.append(self._first_that_fits(saved, at, room))
                if row is None:
                    rows += [self._first_that_fits(some, at, room) for some in inputs]
                found = filter(None, rows)
                yield from (
                    self._candidate(row, n_buffer, at, least_s) for row in found
                )

    def _first_that_fits(
        self, rows: Iterable[_Row], at: _Place, room: float
    ) -> _Row | None:
        """The first row for which there is room, slots excepted, if any."""
        before, segment = at.parameters.before, 0
        rest = room - at.parameters.base - self.memory.hardware.unseen_bytes
        for row in rows if rest >= 0 else ():
            activations = self._activations(row)
            # the segment that was too large under the last row most often is again
            if activations.first[segment] + before[segment] > rest:
                continue
            if self._peak_bytes(row, at) > room:
                totals = list(map(add, activations.first, before))
                segment = totals.index(max(totals))
            elif _allowed(at.redone, self._policies(row)):
                return row
        return None

    def _peak_bytes(self, row: _Row, at: _Place) -> int:
        """Bytes of the device, without slots."""
        return self.memory.peak_without_slots(at.parameters, self._activations(row))

    def _candidate(
        self, row: _Row, n_buffer: int, at: _Place, least_s: float = 0.0
    ) -> _Candidate:
        times = self._times
        again = zip(times.again_s, self._policies(row), strict=True)
        micro_batch_s = sum(times.forward_s) + sum(times.backward_s)
        micro_batch_s += times.outside_forward_s + times.outside_backward_s
        micro_batch_s += sum(seconds for seconds, policy in again if policy.recomputes)
        compute_s = self._update_s + self.memory.workload.accumulation * micro_batch_s
        if least_s < compute_s * (1 + ROUNDING):
            # equal: what has fewer slots comes first
            least_s = compute_s
        return _Candidate(least_s, row, n_buffer, at)

    def _policies(self, row: _Row) -> tuple[Policy, ...]:
        return block_policies(self._num_blocks, *row, self.swap_interval)

    def _paged_blocks(self, placements: Sequence[Placement]) -> Set[int]:
        """Blocks of these that have to recompute."""
        pairs = zip(self._layout.chunks, placements, strict=True)
        return self._redone_if_paged & frozenset(
            chunk.block for chunk, at in pairs if at is Placement.PARAM_OFFLOADED
        )

    def _fits_host(self, plan: Plan) -> bool:
        return self.memory.host(plan).peak_bytes <= self._budget.host_bytes

    def _plan(self, candidate: _Candidate) -> Plan:
        _, row, n_buffer, at = candidate
        plan = Plan(
            at.n_persist,
            n_buffer,
            *row,
            placements=at.placements,
            policies=self._policies(row),
            origin="search",
            shards=at.shards,
            in_pieces=at.in_pieces,
        )
        return with_disk(plan, self.memory, self._budget)

    def _refuse(self, plan: Plan, what: str, modes: Set[str] = frozenset()) -> NoReturn:
        """Say what `plan` lacks and what would make it, or another of `modes`, fit."""
        budget, one = self.budget_for(plan), self._one_memory
        estimate = self.memory.device(plan)
        missing = estimate.peak_bytes - budget.usable_bytes
        note = f" {ONE_MEMORY}." * one
        if missing > 0:
            or_host, other = 0, self.nearest(modes, lacks_host=True) if modes else plan
            peak = self.memory.device(other).peak_bytes
            if not one and peak <= budget.usable_bytes:
                or_host = self.memory.host(other).peak_bytes
            more_host = (
                f"if the host has {format_bytes(or_host)}, set "
                f"`protrain_cpu_capacity_bytes: {_limit(or_host)}`; "
            )
            error = BudgetError(
                f"protrain_capacity_bytes: {what} needs {format_bytes(estimate.peak_bytes)} "
                f"on the device {estimate.peak.moment} ({_largest(estimate.terms)}); "
                f"{format_bytes(budget.usable_bytes)} of {format_bytes(budget.device_bytes)} may be "
                f"used, {format_bytes(missing)} too little. If the device has it, set "
                f"`protrain_capacity_bytes: {_limit(budget.device_bytes + missing)}`; "
                f"{more_host * bool(or_host)}else lower micro_batch_size, sequence_len or "
                "the adapter's rank, or let `axolotl-protrain plan YOUR.yaml --write "
                "NEW.yaml` do that."
                f"{note}{self._way_out()}"
            )
            error.needs = budget.device_bytes + missing
            error.has, error.or_host = budget.device_bytes, or_host
            raise error
        host = self.memory.host(plan)
        missing = host.peak_bytes - budget.host_bytes
        error = BudgetError(
            f"protrain_cpu_capacity_bytes: {what} needs {format_bytes(host.peak_bytes)} of "
            f"host memory ({_largest(host.terms)}); {format_bytes(budget.host_bytes)} may be "
            f"used, {format_bytes(missing)} too little. If the host has it, set "
            f"`protrain_cpu_capacity_bytes: {_limit(host.peak_bytes)}`; else raise "
            "protrain_capacity_bytes so that more stays on the device, or train an "
            f"adapter.{note}"
        )
        error.of_device, error.needs, error.has = (
            False,
            host.peak_bytes,
            budget.host_bytes,
        )
        raise error

    def _way_out(self) -> str:
        """Name AdamW on the host, which needs no room on the device for updates, if it
        would make something fit."""
        memory, workload = self.memory, self.memory.workload
        if not workload.host_can_update:
            return ""
        on_host, hardware = workload.on_host(), memory.hardware
        other = MemoryModel(memory.layout, memory.trace, on_host, hardware)
        redone = self._redone_if_paged
        try:
            Search(other, self._times, self._budget, self._reachable, redone).fastest()
        except BudgetError:
            return ""
        return (
            " Or let the host update weights with state there, which fits: "
            "`protrain_cpu_optimizer: torch`."
        )


def with_disk(plan: Plan, memory: MemoryModel, budget: Budget) -> Plan:
    """Put as few frozen chunks on the disk as the host has no room for, spread over the
    blocks; none where that does not help. Of one memory the host has room for none."""
    if not budget.disk_bytes:
        return plan
    phases = memory.host(plan).phases
    missing: float = max(phases["train"], phases["save"]) - budget.host_bytes
    if memory.hardware.one_memory:
        missing = inf
    paged = map(memory.layout.chunks.__getitem__, plan.paged)
    frozen = [chunk for chunk in paged if not chunk.trainable]
    if missing <= 0 or not frozen:
        return plan
    ranks = memory.workload.world.local_size
    missing += ranks * ring_bytes(frozen, plan.disk_buffers, plan.shards)
    chosen, written = list[int](), 0
    for position in spread_order(len(frozen)):
        if missing <= 0:
            break
        nbytes = padded_bytes(frozen[position].in_pool, plan.shards)
        nbytes = aligned(nbytes, PAGE_BYTES)
        missing, written = missing - nbytes, written + nbytes
        chosen.append(frozen[position].index)
    if written > budget.disk_bytes:
        return plan
    return replace(plan, on_disk=tuple(sorted(chosen)))


def _allowed(redone: Iterable[int], policies: Sequence[Policy]) -> bool:
    return all(policies[block].recomputes for block in redone)


def _largest(terms: Mapping[str, int]) -> str:
    ordered = sorted(terms.items(), key=lambda term: -term[1])
    return ", ".join(
        f"{name} {format_bytes(nbytes)}" for name, nbytes in ordered if nbytes
    )


def _limit(nbytes: int) -> str:
    """A value of a key that allows so much, rounded up as people write it."""
    if nbytes < 2**30:
        return f'"{-(-nbytes // 2**20)}MiB"'
    return f'"{-(-nbytes * 10 // 2**30) / 10}GiB"'
