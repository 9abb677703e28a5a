"""From a traced model and a machine to a plan and its prediction.

The one planner: training and the dry run both ask it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace

from ..errors import BudgetError
from ..sizes import format_bytes
from ..types import (
    BlockTimes,
    Budget,
    Hardware,
    Layout,
    Moved,
    Placement,
    Plan,
    Trace,
    Workload,
)
from .generation import GenerationPlan, plan_generation, timed
from .memory import GENERATION, DeviceEstimate, HostEstimate
from .search import Search
from .seconds import StepTime


@dataclass(frozen=True)
class Forecast:
    """A plan, from what it was made, and what it will cost."""

    layout: Layout
    trace: Trace
    workload: Workload
    hardware: Hardware
    times: BlockTimes
    budget: Budget
    plan: Plan
    device: DeviceEstimate
    host: HostEstimate
    step: StepTime
    moved: Moved
    generation: GenerationPlan | None = None

    @property
    def sampling_s(self) -> float:
        """Seconds in which answers are sampled, for each step; 0 for those that somebody
        asks for at any time."""
        plan, asked = self.generation, self.workload.generation
        return plan.total_s / asked.steps if plan and asked and asked.steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens of a step of all ranks, padding included, over its seconds and those in
        which its answers are sampled."""
        workload = self.workload
        tokens = workload.tokens * workload.accumulation * workload.world.size
        return tokens / (self.step.total_s + self.sampling_s)

    def __str__(self) -> str:
        """A line of the plan, one for each memory by term, and one of seconds by lane."""
        plan, step, budget = self.plan, self.step, self.budget
        lines = [
            f"mode {plan.mode}: n_persist {plan.n_persist} of {len(self.layout.pageable)} "
            f"chunks, n_buffer {plan.n_buffer}, n_swap {plan.n_swap}, n_checkpoint "
            f"{plan.n_checkpoint} of {len(plan.policies)} blocks"
        ]
        for where, peak, room in (
            ("device", self.device, budget.usable_bytes),
            ("host", self.host, budget.host_bytes),
        ):
            terms = ", ".join(
                f"{k} {format_bytes(n)}" for k, n in peak.terms.items() if n
            )
            lines.append(
                f"{where}: {format_bytes(peak.peak_bytes)} of {format_bytes(room)}: {terms}"
            )
        lanes = ", ".join(f"{lane} {s:.3g} s" for lane, s in step.busy_s.items() if s)
        lines.append(f"step: {step.total_s:.3g} s: {lanes}")
        return "\n".join(lines)


class Planner(Search):
    """Makes plans for one model, batch and machine, and tells what they will cost."""

    def replan(
        self, plan: Plan, unplanned_bytes: int, asked_bytes: int, movable: Set[int]
    ) -> Forecast:
        """The fastest plan that leaves room for what `plan` did not foresee.

        Its peak is lower by what was asked for than what `plan` had, which is less than
        its own where others use the device; else by as much as is possible. What was
        unplanned comes on top of it.

        Args:
            plan: What ran.
            unplanned_bytes: What the step took beyond the plan's predicted peak; negative
                where others had the rest.
            asked_bytes: What could not be allocated.
            movable: Chunks that may go from the device to the host; none comes back.

        Raises:
            BudgetError: None is lower.
        """

        def reachable(placements: Sequence[Placement]) -> bool:
            pairs = zip(plan.placements, placements, strict=True)
            return all(
                old.on_host == new.on_host or (new.on_host and index in movable)
                for index, (old, new) in enumerate(pairs)
            )

        def fastest(below: int) -> Plan:
            smaller = Budget(min(room, below + held), 0, budget.host_bytes)
            redone = self._redone_if_paged
            search = Search(self.memory, self._times, smaller, reachable, redone)
            return search.fastest(frozenset("C" if plan.shards > 1 else "AB"))

        budget = self._budget
        peak = self.memory.device(plan).peak_bytes
        room = budget.usable_bytes - max(unplanned_bytes, 0)
        # of one memory the host has as much under each plan
        held = self.budget_for(plan).reserve_bytes - budget.reserve_bytes
        had = peak + min(unplanned_bytes, 0)
        for below in (had - asked_bytes, had - 1):
            with suppress(BudgetError):
                lower = fastest(min(below, peak - 1))
                break
        else:
            lower = fastest(peak - 1)
        return self.forecast(replace(lower, origin="notch"))

    def forecast(self, plan: Plan) -> Forecast:
        """Predict what a plan will cost."""
        return self._forecast(plan, self._generation(plan))

    def plainly(self, n_checkpoint: int) -> Forecast:
        """Predict training without a pager, which samples all sequences at once and has
        their keys and values on the device, whether there is room or not."""
        plan, sampled = self.plain(n_checkpoint), self.memory.workload.generation
        generation = None
        if sampled is not None:
            room, demand = sampled.rows * sampled.row_bytes, self._demand(plan)
            generation = timed((), room, self.memory, plan, demand)
        return self._forecast(plan, generation)

    def _forecast(self, plan: Plan, generation: GenerationPlan | None) -> Forecast:
        memory = self.memory
        moved = memory.activations(plan.policies).moved
        device = memory.device(plan)
        if generation is not None:
            taken = generation.cache_bytes, generation.taken_bytes
            device = memory.device(plan, *taken)
        host = memory.host(plan)
        if generation is not None and generation.away_bytes:
            ranks = memory.workload.world.local_size
            there = host.phases["train"] + ranks * generation.away_bytes
            host = replace(host, phases={**host.phases, GENERATION: there})
        order = gradient_order(memory.layout, memory.trace)
        return Forecast(
            memory.layout,
            memory.trace,
            memory.workload,
            memory.hardware,
            self._times,
            self.budget_for(plan),
            replace(
                plan,
                swap_bytes=moved.out,
                gradient_order=order,
                update=memory.workload.update,
                staging_bytes=device.states.operands,
            ),
            device,
            host,
            self.simulate(plan),
            moved,
            generation,
        )

    def _generation(self, plan: Plan) -> GenerationPlan | None:
        if self.memory.workload.generation is None:
            return None
        room = self.budget_for(plan).usable_bytes
        host = self._budget.host_bytes - self.memory.host(plan).phases["train"]
        # each rank of a node has a cache of its own
        host = max(host, 0) // self.memory.workload.world.local_size
        return plan_generation(self.memory, plan, self._demand(plan), room, host)


def gradient_order(layout: Layout, trace: Trace) -> tuple[int, ...]:
    """Chunks in the order in which the traced backward was done with them."""
    done: dict[int, None] = {}
    for segment in trace.segments:
        for name, _ in segment.gradients:
            if (chunk := layout.chunk_of.get(name)) is not None:
                # the last gradient of a chunk decides
                done.pop(chunk, None)
                done[chunk] = None
    return tuple(done)
