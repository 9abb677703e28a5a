"""Plans without a search: the four knobs by hand, or as much resident as fits."""

from __future__ import annotations

from typing import NoReturn

from ..cost import host_bytes, state_bytes
from ..errors import BudgetError, ConfigError
from ..layout import check_slots, slot_floor, spread_evenly
from ..types import Budget, Layout, Placement, Plan, Policy


def fill_budget(
    layout: Layout, budget: Budget, n_checkpoint: int, fp32_master: bool
) -> Plan:
    """The plan with the most resident chunks whose states fit, spread evenly.

    Slots: those that one block needs plus one to fetch into. Trainable weights
    outside the blocks keep their state on the device only if room is left after that.

    Raises:
        BudgetError: Not even a plan without resident chunks fits.
    """
    total = len(layout.pageable)
    for n_persist in range(total, -1, -1):
        for outside in (Placement.RESIDENT, Placement.HOST_STATE):
            placements = _place(layout, n_persist, outside, fp32_master)
            n_buffer = _slots_to_run(layout, placements)
            if _fits(layout, placements, n_buffer, budget):
                plan = _plan(
                    layout, placements, n_persist, n_buffer, n_checkpoint, "budget"
                )
                _check_host(layout, plan, budget, fp32_master)
                return plan
    placements = _place(layout, 0, Placement.HOST_STATE, fp32_master)
    _refuse(layout, placements, _slots_to_run(layout, placements), budget)


def all_resident(layout: Layout, budget: Budget, n_checkpoint: int) -> Plan:
    """Everything on the device: plain training.

    Raises:
        BudgetError: It does not fit.
    """
    placements = (Placement.RESIDENT,) * len(layout.chunks)
    if not _fits(layout, placements, 0, budget):
        _refuse(layout, placements, 0, budget)
    n_persist = len(layout.pageable)
    return _plan(layout, placements, n_persist, 0, n_checkpoint, "all persistent")


def plan_by_hand(
    layout: Layout,
    budget: Budget,
    n_persist: int,
    n_buffer: int,
    n_checkpoint: int,
    fp32_master: bool,
) -> Plan:
    """The plan that the overrides ask for.

    Raises:
        ConfigError: A knob is outside its legal range, which the message gives.
        BudgetError: The plan does not fit.
    """
    total, blocks = len(layout.pageable), len(layout.blocks)
    _check_range("n_persist", n_persist, total, "chunks")
    _check_range("n_checkpoint", n_checkpoint, blocks, "blocks")
    for outside in (Placement.RESIDENT, Placement.HOST_STATE):
        placements = _place(layout, n_persist, outside, fp32_master)
        check_slots(layout, placements, n_buffer)
        if _fits(layout, placements, n_buffer, budget):
            plan = _plan(
                layout, placements, n_persist, n_buffer, n_checkpoint, "overrides"
            )
            _check_host(layout, plan, budget, fp32_master)
            return plan
    _refuse(layout, placements, n_buffer, budget)


def _place(
    layout: Layout, n_persist: int, outside: Placement, fp32_master: bool
) -> tuple[Placement, ...]:
    resident = spread_evenly(n_persist, len(layout.pageable))

    def placement(index: int) -> Placement:
        chunk = layout.chunks[index]
        if not chunk.pageable:
            wanted = outside
        else:
            wanted = Placement.RESIDENT if index in resident else Placement.PAGED
        trains_masters = chunk.trainable and chunk.has_masters(fp32_master)
        if wanted is Placement.RESIDENT and trains_masters:
            # masters live on the host, so the state of what trains does too
            return Placement.HOST_STATE
        return wanted

    return tuple(placement(index) for index in range(len(layout.chunks)))


def _slots_to_run(layout: Layout, placements: tuple[Placement, ...]) -> int:
    num_paged = sum(placement is Placement.PAGED for placement in placements)
    return min(slot_floor(layout, placements) + 1, num_paged) if num_paged else 0


def _fits(
    layout: Layout, placements: tuple[Placement, ...], n_buffer: int, budget: Budget
) -> bool:
    return state_bytes(layout, placements, n_buffer).total <= budget.usable_bytes


def _plan(
    layout: Layout,
    placements: tuple[Placement, ...],
    n_persist: int,
    n_buffer: int,
    n_checkpoint: int,
    origin: str,
) -> Plan:
    blocks = len(layout.blocks)
    return Plan(
        n_persist=n_persist,
        n_buffer=n_buffer,
        n_swap=0,
        n_checkpoint=n_checkpoint,
        placements=placements,
        # the paper keeps the last blocks: backward frees them first
        policies=(Policy.RECOMPUTE,) * n_checkpoint
        + (Policy.KEEP,) * (blocks - n_checkpoint),
        origin=origin,
    )


def _check_range(knob: str, value: int, highest: int, what: str) -> None:
    if not 0 <= value <= highest:
        raise ConfigError(
            f"protrain_{knob}_override: {value} is outside the legal range 0 to "
            f"{highest}, the number of {what} of this model."
        )


def _check_host(layout: Layout, plan: Plan, budget: Budget, fp32_master: bool) -> None:
    needed = host_bytes(layout, plan.placements, fp32_master)
    if needed > budget.host_bytes:
        raise BudgetError(
            f"protrain_cpu_capacity_bytes: the plan needs {needed:,} bytes of host "
            f"memory, {budget.host_bytes:,} may be used. Give the host more memory, "
            "raise protrain_capacity_bytes so that more stays on the device, or train "
            "an adapter."
        )


def _refuse(
    layout: Layout, placements: tuple[Placement, ...], n_buffer: int, budget: Budget
) -> NoReturn:
    needed = state_bytes(layout, placements, n_buffer)
    terms = ", ".join(
        f"{name} {value:,}" for name, value in vars(needed).items() if value
    )
    raise BudgetError(
        f"protrain_capacity_bytes: the states need {needed.total:,} bytes on the "
        f"device even so ({terms}); {budget.usable_bytes:,} of "
        f"{budget.device_bytes:,} may be used. Raise protrain_capacity_bytes by at "
        f"least {needed.total - budget.usable_bytes:,}, take a smaller adapter, or set "
        "fewer resident chunks or slots by hand (protrain_n_persist_override, "
        "protrain_n_buffer_override)."
    )
