"""Legal plans: from the four knobs to where every chunk sits and what blocks keep."""

from __future__ import annotations

from itertools import islice

from ..errors import ConfigError
from ..layout import check_slots, spread_order
from ..types import Chunk, Layout, Placement, Plan, Policy


def make_plan(
    layout: Layout,
    n_persist: int,
    n_buffer: int,
    n_swap: int,
    n_checkpoint: int,
    fp32_master: bool,
    outside: Placement = Placement.RESIDENT,
    swap_interval: int = 1,
    shards: int = 1,
    n_host_state: int = 0,
) -> Plan:
    """The plan that follows from the four knobs; see `place` and `block_policies`.

    Raises:
        ConfigError: A knob is outside its legal range, which the message gives.
    """
    blocks = len(layout.blocks)
    _check_range("n_persist", n_persist, len(layout.pageable), "chunks")
    _check_range("n_checkpoint", n_checkpoint, blocks, "blocks")
    _check_range("n_swap", n_swap, blocks, "blocks")
    placements = place(layout, n_persist, fp32_master, outside, n_host_state)
    check_slots(layout, placements, n_buffer)
    return Plan(
        n_persist=n_persist,
        n_buffer=n_buffer,
        n_swap=n_swap,
        n_checkpoint=n_checkpoint,
        placements=placements,
        policies=block_policies(blocks, n_swap, n_checkpoint, swap_interval),
        origin="overrides",
        shards=shards,
    )


def block_policies(
    num_blocks: int, n_swap: int, n_checkpoint: int, swap_interval: int = 1
) -> tuple[Policy, ...]:
    """Choose what each block does with its activations.

    Blocks 0, I, 2I, … swap, so that most compute follows them; I is `swap_interval`, or
    less if `n_swap` blocks are not there at that distance. The first of the others
    recompute; the last ones keep, because backward frees them first. Where the counts
    exceed the blocks, so many of the first that swap do both.
    """
    step = swap_interval
    if n_swap and (n_swap - 1) * step >= num_blocks:
        step = max(1, num_blocks // n_swap)
    swapping = range(0, n_swap * step, step)
    policies = [Policy.KEEP] * num_blocks
    for block in swapping:
        policies[block] = Policy.SWAP
    others = (b for b in range(num_blocks) if policies[b] is Policy.KEEP)
    for block in islice(others, n_checkpoint):
        policies[block] = Policy.RECOMPUTE
    for block in swapping[: max(0, n_swap + n_checkpoint - num_blocks)]:
        policies[block] = Policy.SWAP_INPUT
    return tuple(policies)


def place(
    layout: Layout,
    n_persist: int,
    fp32_master: bool,
    outside: Placement,
    n_host_state: int = 0,
) -> tuple[Placement, ...]:
    """Return where each chunk sits when `n_persist` of the pageable ones stay, spread
    over the blocks, `n_host_state` of them without the state of what trains there.
    `outside` is for the state of adapters and of trainable weights outside the blocks;
    if it is not RESIDENT, the host looks up the frozen embeddings that it can."""
    # pageable chunks come first in a layout
    order = spread_order(len(layout.pageable))[:n_persist]
    staying, whole = set(order), set(order[: n_persist - n_host_state])
    paged, state_on_host = Placement.PARAM_OFFLOADED, Placement.OPTIMIZER_OFFLOADED
    resident, on_host = Placement.RESIDENT, outside is state_on_host

    def where(chunk: Chunk) -> Placement:
        if chunk.pageable and chunk.index not in staying:
            return paged
        if chunk.rows_bytes and outside is not resident:
            return Placement.HOST_LOOKUP
        # masters live on the host, so the state of what trains does too
        if chunk.trainable and chunk.has_masters(fp32_master):
            return state_on_host
        if chunk.trainable and chunk.pageable and chunk.index not in whole:
            return state_on_host
        return (
            state_on_host
            if on_host and chunk.trainable and not chunk.pageable
            else resident
        )

    return tuple(map(where, layout.chunks))


def _check_range(knob: str, value: int, highest: int, what: str) -> None:
    if not 0 <= value <= highest:
        raise ConfigError(
            f"protrain_{knob}_override: {value} is outside the legal range 0 to "
            f"{highest}, the number of {what} of this model."
        )
