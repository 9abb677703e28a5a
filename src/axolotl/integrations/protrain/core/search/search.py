"""The fastest plan that fits.

For every number of recomputed blocks and of slots, the most resident chunks that fit:
residency only ever removes transfers. Candidates are simulated in the order of a lower
bound of their time until that bound loses, so the result is the optimum over that
family, exactly. Equation 1 of the paper, with a simulation for its equations 2 to 7.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, NoReturn

from ..cost import MemoryModel, StepTime, simulate_step, update_seconds
from ..errors import BudgetError
from ..types import BlockTimes, Budget, Placement, Plan, Policy
from .plans import MAX_EXTRA_SLOTS, make_plan, place, slot_range


class _Candidate(NamedTuple):
    """Sorts by the bound; then less recompute, and fewer slots, come first."""

    bound_s: float
    n_checkpoint: int
    extra_slots: int
    n_persist: int
    outside: Placement


class Search:
    """Plans of one model and batch on one machine.

    Args:
        memory: Peaks of its plans.
        times: What its blocks take to compute.
        budget: What may be used.
    """

    def __init__(self, memory: MemoryModel, times: BlockTimes, budget: Budget) -> None:
        self._memory = memory
        self._times = times
        self._budget = budget
        self._layout = memory.layout
        self._num_chunks = len(self._layout.pageable)
        self._num_blocks = len(self._layout.blocks)
        trains_outside = any(
            chunk.trainable and not chunk.pageable for chunk in self._layout.chunks
        )
        self._outside = (
            (Placement.RESIDENT, Placement.HOST_STATE)
            if trains_outside
            else (Placement.RESIDENT,)
        )
        self._placed = lru_cache(maxsize=None)(self._place)

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
        # placements have no order: at a tie the earlier candidate comes first
        for candidate in sorted(self._candidates(all_resident), key=lambda c: c[:4]):
            if candidate.bound_s >= best_s:
                break
            plan = self._plan(*candidate[1:])
            if not self._fits_host(plan):
                continue
            step_s = self.simulate(plan).total_s
            if step_s < best_s:
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
        if all_resident:
            return self._least(self._num_chunks, self._outside[-1])
        every, least = self._num_blocks, self._outside[-1]
        fitting = [
            self._least(self._most(every, 0, 0, outside), outside)
            for outside in self._outside
            if self._fits_device(every, 0, 0, outside)
        ]
        return min(
            fitting or [self._least(0, least)],
            key=lambda plan: self._memory.host(plan).peak_bytes,
        )

    def plain(self, n_checkpoint: int) -> Plan:
        """Everything resident, whether it fits or not: training without a pager."""
        return make_plan(
            self._layout, self._num_chunks, 0, 0, n_checkpoint, fp32_master=False
        )

    def fits(self, plan: Plan) -> bool:
        """Whether device and host have room for it."""
        peak = self._memory.peak_bytes(plan.placements, plan.n_buffer, plan.policies)
        return peak <= self._budget.usable_bytes and self._fits_host(plan)

    def _candidates(self, all_resident: bool) -> Iterator[_Candidate]:
        for outside in self._outside:
            for extra in range(1 if all_resident else MAX_EXTRA_SLOTS + 1):
                least = self._num_chunks if all_resident else 0

                def too_large(
                    n_checkpoint: int,
                    extra: int = extra,
                    outside: Placement = outside,
                    least: int = least,
                ) -> bool:
                    return not self._fits_device(n_checkpoint, extra, least, outside)

                # recompute only ever takes bytes away
                first = bisect_left(
                    range(self._num_blocks + 1), True, key=lambda c: not too_large(c)
                )
                n_persist = least
                for n_checkpoint in range(first, self._num_blocks + 1):
                    n_persist = self._most(n_checkpoint, extra, n_persist, outside)
                    bound_s = self._bound_s(n_checkpoint, extra, n_persist, outside)
                    yield _Candidate(bound_s, n_checkpoint, extra, n_persist, outside)
                    if n_persist == self._num_chunks:
                        # nothing is fetched: more recompute only costs
                        break

    def _most(
        self, n_checkpoint: int, extra: int, at_least: int, outside: Placement
    ) -> int:
        """The most resident chunks that fit, from a number that probably does."""
        low, high = 0, self._num_chunks
        if self._fits_device(n_checkpoint, extra, at_least, outside):
            low, stride = at_least, 1
            while low + stride <= self._num_chunks and self._fits_device(
                n_checkpoint, extra, low + stride, outside
            ):
                low, stride = low + stride, 2 * stride
            high = min(low + stride, self._num_chunks + 1) - 1
        else:
            high = at_least - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits_device(n_checkpoint, extra, middle, outside):
                low = middle
            else:
                high = middle - 1
        return low

    def _bound_s(
        self, n_checkpoint: int, extra: int, n_persist: int, outside: Placement
    ) -> float:
        """No plan of these knobs is faster: busy seconds of compute and of fetches.

        Each paged chunk comes once in forward and once in backward, but for those
        that are still in their slots at the turns.
        """
        workload, hardware, times = (
            self._memory.workload,
            self._memory.hardware,
            self._times,
        )
        placements, slots = self._placed(n_persist, outside)
        n_buffer = slots[min(extra, len(slots) - 1)]
        compute_s = (
            sum(times.forward_s)
            + sum(times.backward_s)
            + sum(times.forward_s[:n_checkpoint])
            + times.outside_forward_s
            + times.outside_backward_s
        )
        sizes = sorted(
            chunk.nbytes
            for chunk, placement in zip(self._layout.chunks, placements, strict=True)
            if placement is Placement.PAGED
        )
        fetched = 2 * sum(sizes[: len(sizes) - n_buffer])
        rate = max(hardware.fetch_bytes_s, hardware.fetch_both_bytes_s)
        fetch_s = fetched / rate
        micro_s = max(compute_s, fetch_s) if hardware.overlaps else compute_s + fetch_s
        return workload.accumulation * micro_s

    def _fits_device(
        self, n_checkpoint: int, extra: int, n_persist: int, outside: Placement
    ) -> bool:
        placements, slots = self._placed(n_persist, outside)
        n_buffer = slots[min(extra, len(slots) - 1)]
        policies = self._policies(n_checkpoint)
        peak = self._memory.peak_bytes(placements, n_buffer, policies)
        return peak <= self._budget.usable_bytes

    def _fits_host(self, plan: Plan) -> bool:
        return self._memory.host(plan).peak_bytes <= self._budget.host_bytes

    def _place(
        self, n_persist: int, outside: Placement
    ) -> tuple[tuple[Placement, ...], range]:
        """Where chunks sit, and the numbers of slots worth trying."""
        master = self._memory.workload.fp32_master
        placements = place(self._layout, n_persist, master, outside)
        return placements, slot_range(self._layout, placements)

    def _policies(self, n_checkpoint: int) -> tuple[Policy, ...]:
        kept = self._num_blocks - n_checkpoint
        return (Policy.RECOMPUTE,) * n_checkpoint + (Policy.KEEP,) * kept

    def _plan(
        self, n_checkpoint: int, extra: int, n_persist: int, outside: Placement
    ) -> Plan:
        _, slots = self._placed(n_persist, outside)
        return make_plan(
            self._layout,
            n_persist,
            slots[min(extra, len(slots) - 1)],
            0,
            n_checkpoint,
            self._memory.workload.fp32_master,
            outside,
            origin="search",
        )

    def _least(self, n_persist: int, outside: Placement) -> Plan:
        return self._plan(self._num_blocks, 0, n_persist, outside)

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
        raise BudgetError(
            f"protrain_cpu_capacity_bytes: {what} needs {host.peak_bytes:,} bytes of "
            f"host memory ({_largest(host.terms)}), {budget.host_bytes:,} may be used. "
            "Give the host more memory, raise protrain_capacity_bytes so that more "
            "stays on the device, or train an adapter."
        )


def _largest(terms: Mapping[str, int]) -> str:
    ordered = sorted(terms.items(), key=lambda term: -term[1])
    return ", ".join(f"{name} {nbytes:,}" for name, nbytes in ordered if nbytes)
