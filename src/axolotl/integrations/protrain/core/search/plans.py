"""Legal plans: from the four knobs to where every chunk sits and what blocks keep."""

from __future__ import annotations

from ..errors import ConfigError
from ..layout import check_slots, slot_floor, spread_order
from ..types import Layout, Placement, Plan, Policy


def make_plan(
    layout: Layout,
    n_persist: int,
    n_buffer: int,
    n_swap: int,
    n_checkpoint: int,
    fp32_master: bool,
    outside: Placement = Placement.RESIDENT,
    origin: str = "overrides",
) -> Plan:
    """The plan that follows from the four knobs.

    Args:
        layout: The chunks.
        n_persist: Resident chunks, spread over the blocks.
        n_buffer: Slots.
        n_swap: Blocks that swap; not available yet.
        n_checkpoint: Blocks that recompute, the first ones: backward frees the last
            ones first, so those keep their activations at the least cost.
        fp32_master: bf16 weights train through masters, which live on the host.
        outside: Where trainable weights outside the blocks have their state.
        origin: What decided, for the report.

    Raises:
        ConfigError: A knob is outside its legal range, which the message gives.
    """
    blocks = len(layout.blocks)
    _check_range("n_persist", n_persist, len(layout.pageable), "chunks")
    _check_range("n_checkpoint", n_checkpoint, blocks, "blocks")
    _check_range("n_swap", n_swap, 0, "blocks that may swap in this version")
    placements = place(layout, n_persist, fp32_master, outside)
    check_slots(layout, placements, n_buffer)
    return Plan(
        n_persist=n_persist,
        n_buffer=n_buffer,
        n_swap=n_swap,
        n_checkpoint=n_checkpoint,
        placements=placements,
        policies=(Policy.RECOMPUTE,) * n_checkpoint
        + (Policy.KEEP,) * (blocks - n_checkpoint),
        origin=origin,
    )


def place(
    layout: Layout, n_persist: int, fp32_master: bool, outside: Placement
) -> tuple[Placement, ...]:
    """Where each chunk sits when `n_persist` of the pageable ones stay."""
    stays = [
        # masters live on the host, so the state of what trains does too
        Placement.HOST_STATE
        if chunk.trainable and chunk.has_masters(fp32_master)
        else (Placement.RESIDENT if chunk.pageable else outside)
        for chunk in layout.chunks
    ]
    placements = [
        Placement.PAGED if chunk.pageable else stays[chunk.index]
        for chunk in layout.chunks
    ]
    # pageable chunks come first in a layout
    for index in spread_order(len(layout.pageable))[:n_persist]:
        placements[index] = stays[index]
    return tuple(placements)


def slot_range(layout: Layout, placements: tuple[Placement, ...]) -> range:
    """Numbers of slots worth trying, the least that can run first.

    One more than that lets copies run ahead; each further one saves one fetch a
    micro-batch where a resident chunk would save two.
    """
    num_paged = sum(placement is Placement.PAGED for placement in placements)
    if not num_paged:
        return range(1)
    floor = slot_floor(layout, placements)
    return range(floor, min(floor + MAX_EXTRA_SLOTS, num_paged) + 1)


MAX_EXTRA_SLOTS = 2


def _check_range(knob: str, value: int, highest: int, what: str) -> None:
    if not 0 <= value <= highest:
        raise ConfigError(
            f"protrain_{knob}_override: {value} is outside the legal range 0 to "
            f"{highest}, the number of {what} of this model."
        )
