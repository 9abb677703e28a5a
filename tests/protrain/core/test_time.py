"""The simulated step: bounds, limits, and the bytes that a real session moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from core_models import (
    HOST_STATE,
    batches,
    checked,
    freeze,
    layouts,
    make_plan,
    stack,
    train,
)
from hypothesis import given, settings, strategies as st

from axolotl.integrations.protrain.core.engine.session import Options, Session
from axolotl.integrations.protrain.core.layout import build_layout, slot_floor
from axolotl.integrations.protrain.core.planner.demand import (
    QUEUED_GRADIENT,
    QUEUED_UPDATE,
    Demand,
    TrainedWork,
    trained_work,
)
from axolotl.integrations.protrain.core.planner.seconds import (
    COMMUNICATE,
    DISK,
    LANES,
    DeferredStep,
    StepTime,
    block_times,
    simulate,
)
from axolotl.integrations.protrain.core.planner.trained_bytes import TrainedBytes
from axolotl.integrations.protrain.core.types import (
    Block,
    BlockSeconds,
    BlockTimes,
    Chunk,
    Hardware,
    Layout,
    Moved,
    Placement,
    Plan,
    Policy,
    Segment,
    TensorSpec,
    Trace,
    Update,
    Work,
    Workload,
    World,
)

PAGED, RESIDENT = Placement.PARAM_OFFLOADED, Placement.RESIDENT
COLLECTIVES = ("gather_bytes_s", "reduce_bytes_s", "across_bytes_s")
RATES = (
    "fetch_bytes_s",
    "offload_bytes_s",
    "fetch_both_bytes_s",
    "offload_both_bytes_s",
    "adam_bytes_s",
    "disk_bytes_s",
    *COLLECTIVES,
)
WORLDS = [World(), World(2, 2), World(4, 4), World(3, 1), World(4, 2)]
HARDWARE = Hardware(
    name="a test",
    source="made up",
    device_bytes=0,
    host_bytes=0,
    unseen_bytes=0,
    flops_16=1,
    flops_32=1,
    attention_16=1,
    memory_bytes_s=1,
    kernel_s=0,
    **dict.fromkeys(RATES, 1.0),
)
"""One byte a second, everywhere."""


@dataclass(frozen=True)
class Case:
    """What a `Demand` is made of, a workload's figures one by one."""

    layout: Layout
    plan: Plan
    times: BlockTimes
    hardware: Hardware
    accumulation: int
    fp32_master: bool
    moved: Moved | None
    world: World = World()
    update: Update = Update.HOST

    def workload(self) -> Workload:
        return Workload(
            self.accumulation,
            fp32_master=self.fp32_master,
            world=self.world,
            update=self.update,
        )

    def demand(self) -> Demand:
        trained = TrainedBytes(self.layout, self.workload())
        return Demand(trained, self.plan, self.times, self.hardware, self.moved)

    def step(self) -> StepTime:
        return simulate(self.demand())

    def compute_s(self) -> float:
        """What the plan computes, added up by hand."""
        t = self.times
        redone = sum(
            seconds
            for seconds, policy in zip(t.forward_s, self.plan.policies, strict=True)
            if policy.recomputes
        )
        outside = t.outside_forward_s + t.outside_backward_s
        once = sum(t.forward_s) + sum(t.backward_s) + redone + outside
        return t.update_s + self.accumulation * once + self.trained_s()

    def trained_s(self) -> float:
        """What the device does for weights with state on the host: for each byte of theirs
        sums; a norm, clipping and the update (7, with AdamW's numbers of steps), shared
        with the ranks of the node."""
        again, moved = self.accumulation - 1, 0.0
        ranks, device = self.world.local_size, self.update is Update.DEVICE
        widens = again or self.world.size > 1 or not device
        for chunk, at in zip(self.layout.chunks, self.plan.placements, strict=True):
            if chunk.trainable and at.on_host:
                own = chunk.payload_bytes
                wide = self.fp32_master * chunk.payload_16_bit_bytes
                moved += (1 / ranks + 3 * again) * (own + wide * bool(widens))
                state = 2 * (own + wide) + 4 * len(chunk.tensors)
                state += 2 * wide
                moved += device * (5 * own + 2 * state) / ranks
        return moved / self.hardware.memory_bytes_s


@st.composite
def cases(
    draw: st.DrawFn, frozen: bool = False, swaps: bool = True, disk: bool = False
) -> Case:
    """Any legal plan for any small layout, on any machine; `disk`, perhaps with one."""
    layout = draw(layouts())
    if frozen:
        chunks = tuple(replace(chunk, trainable=False) for chunk in layout.chunks)
        layout = replace(layout, chunks=chunks)
    placements = tuple(
        draw(st.sampled_from([RESIDENT, HOST_STATE, *[PAGED] * chunk.pageable]))
        for chunk in layout.chunks
    )
    num_blocks = len(layout.blocks)
    floor, num_paged = slot_floor(layout, placements), placements.count(PAGED)
    kinds = [p for p in Policy if swaps or not p.swaps]
    policies = tuple(draw(st.sampled_from(kinds)) for _ in layout.blocks)
    seconds = st.floats(0, 50)
    per_block = st.tuples(*[seconds] * num_blocks)
    rates = {name: draw(st.floats(0.5, 20)) for name in RATES}
    world, masters = draw(st.sampled_from(WORLDS)), draw(st.booleans())
    for way in ("fetch", "offload"):
        share = draw(st.floats(0.5, 1))
        rates[f"{way}_both_bytes_s"] = rates[f"{way}_bytes_s"] * share
    return Case(
        layout,
        Plan(
            n_persist=placements.count(RESIDENT),
            n_buffer=draw(st.integers(floor, num_paged)),
            n_swap=sum(policy.swaps for policy in policies),
            n_checkpoint=sum(policy.recomputes for policy in policies),
            placements=placements,
            policies=policies,
            origin="test",
            shards=draw(st.sampled_from([1, world.local_size])),
            on_disk=draw(on_disk(layout, placements)) if disk else (),
            disk_buffers=draw(st.integers(1, 3)),
        ),
        BlockTimes(
            draw(per_block), draw(per_block), *draw(st.tuples(*[seconds] * 3)), True
        ),
        replace(HARDWARE, **rates, shares_link=draw(st.booleans())),
        draw(st.integers(1, 5)),
        masters,
        Moved(*[tuple(draw(st.integers(0, 100 * p.swaps)) for p in policies)] * 2),
        world,
        draw(st.sampled_from(Update)),
    )


def on_disk(layout: Layout, placements: Sequence[Placement]) -> Any:
    """Some of the chunks that may lie on the disk."""
    frozen = [
        chunk.index
        for chunk, at in zip(layout.chunks, placements, strict=True)
        if at is PAGED and not chunk.trainable
    ]
    chosen = st.sets(st.sampled_from(frozen)) if frozen else st.just(set())
    return chosen.map(lambda some: tuple(sorted(some)))


def at_most(ours: float, theirs: float) -> bool:
    return ours <= theirs * (1 + 1e-9) + 1e-9


@settings(max_examples=80)
@given(cases(disk=True), st.booleans())
def test_total_lies_between_the_busiest_lane_and_one_thing_at_a_time(
    case: Case, overlaps: bool
) -> None:
    case = replace(case, hardware=replace(case.hardware, overlaps=overlaps))
    step = case.step()
    together = (COMMUNICATE,) if case.world.size > 1 else ()
    disk = (DISK,) if DISK in step.busy_s else ()
    assert disk == () or case.plan.on_disk
    assert tuple(step.busy_s) == (*LANES, *together, *disk)
    assert at_most(max(step.busy_s.values()), step.total_s)
    assert at_most(step.total_s, sum(step.busy_s.values()))


@settings(max_examples=80)
@given(cases(disk=True))
def test_every_second_of_a_step_is_compute_or_exposed(
    case: Case,
) -> None:
    step = case.step()
    assert step.busy_s["compute"] == pytest.approx(case.compute_s())
    assert step.total_s == pytest.approx(
        step.busy_s["compute"] + sum(step.exposed_s.values())
    )
    assert min(step.exposed_s.values()) >= 0


@given(cases(disk=True))
def test_nothing_is_waited_for_where_copies_and_host_are_infinitely_fast(
    case: Case,
) -> None:
    fast = replace(case.hardware, **dict.fromkeys(RATES, math.inf))
    step = replace(case, hardware=fast).step()
    assert step.total_s == pytest.approx(case.compute_s())
    exposed_s = sum(step.exposed_s.values())
    assert exposed_s == pytest.approx(0, abs=1e-9 * step.total_s)
    assert step.limiter == "compute" or not step.total_s


@given(cases(frozen=True, swaps=False))
def test_without_compute_a_frozen_base_takes_as_long_as_its_copies(
    case: Case,
) -> None:
    plan = replace(case.plan, shards=1)
    case = replace(case, plan=plan, world=World())
    num_blocks = len(case.layout.blocks)
    idle = BlockTimes((0.0,) * num_blocks, (0.0,) * num_blocks, 0, 0, 0, True)
    step = replace(case, times=idle).step()
    assert step.total_s == pytest.approx(step.busy_s["fetch"])
    assert step.limiter == "fetch" or not step.total_s


@settings(max_examples=80)
@given(
    cases(disk=True),
    st.sampled_from(["fetch", "offload", "adam", "disk"]),
    st.floats(1, 8),
)
def test_a_faster_link_or_host_is_never_slower(
    case: Case, what: str, factor: float
) -> None:
    faster = {
        name: getattr(case.hardware, name) * factor
        for name in RATES
        if name.startswith(what)
    }
    after = replace(case, hardware=replace(case.hardware, **faster)).step()
    assert at_most(after.total_s, case.step().total_s)


@settings(max_examples=80)
@given(cases())
def test_a_step_is_never_faster_where_blocks_swap_or_recompute(case: Case) -> None:
    """The search leaves out what swaps or recomputes more than it has to."""

    def step_s(*policies: Policy) -> float:
        plan = replace(case.plan, policies=policies)
        return replace(case, plan=plan, moved=None).step().total_s

    redone = [
        Policy.RECOMPUTE if policy.recomputes else Policy.KEEP
        for policy in case.plan.policies
    ]
    unswapped_s = step_s(*redone)
    assert at_most(unswapped_s, case.step().total_s)
    assert at_most(step_s(*[Policy.KEEP] * len(redone)), unswapped_s)


# Not with swapped blocks: a chunk fetched far ahead can stand in the one queue before
# the activations that the next block needs.
@settings(max_examples=80)
@given(cases(frozen=True, swaps=False))
def test_one_more_slot_is_never_slower_for_a_frozen_base(
    case: Case,
) -> None:
    if case.plan.n_buffer < len(case.plan.paged):
        more = replace(case.plan, n_buffer=case.plan.n_buffer + 1)
        after = replace(case, plan=more).step()
        assert at_most(after.total_s, case.step().total_s)


@given(cases(frozen=True))
def test_without_overlap_a_frozen_base_takes_the_plain_sum(
    case: Case,
) -> None:
    step = replace(case, hardware=replace(case.hardware, overlaps=False)).step()
    moves = sum(step.busy_s.values()) - step.busy_s["compute"]
    assert step.total_s == pytest.approx(case.compute_s() + moves)


# Against a session: the bytes of a step are those that the pager really moves.

LORA = ("norm",)


def session_of(
    trained: Sequence[str] | None, accumulates: bool = True, **options: Any
) -> Session:
    """A small model whose blocks differ in size; `trained` None trains all of it."""
    dtype = torch.bfloat16 if options.get("fp32_master") else torch.float32
    model = stack(dtype=dtype, inner=(32, 8, 48, 16, 40, 24))
    keep = freeze(model, trained) if trained else set()
    layout = build_layout(model, keep if trained == LORA else ())
    master = options.pop("fp32_master", False)
    plan = make_plan(layout, **options)
    return Session(model, layout, plan, checked(), Options(master, accumulates))


SESSIONS: dict[str, dict[str, Any]] = {
    "frozen": {"trained": LORA, "n_buffer": 2},
    "frozen, one slot": {"trained": LORA, "n_buffer": 1},
    "frozen, a slot each": {"trained": LORA, "n_buffer": 6},
    "frozen, resident ones": {"trained": LORA, "n_buffer": 3, "resident": {0, 3}},
    "frozen, recomputed": {"trained": LORA, "n_buffer": 2, "recompute": range(6)},
    "two chunks a block": {"trained": ("up", "norm"), "n_buffer": 3},
    "two chunks a block, resident": {
        "trained": ("up",),
        "n_buffer": 4,
        "resident": {1, 4, 5},
    },
    "full": {"trained": None, "n_buffer": 2, "outside": HOST_STATE},
    "full, host-state": {
        "trained": None,
        "n_buffer": 3,
        "resident": {1, 2},
        "inside": HOST_STATE,
        "outside": HOST_STATE,
        "recompute": {0, 5},
    },
    "full, one slot": {"trained": None, "n_buffer": 1},
    "full, updated on the host": {
        "trained": None,
        "n_buffer": 2,
        "outside": HOST_STATE,
        "update": Update.HOST,
    },
    "full, masters": {
        "trained": None,
        "n_buffer": 2,
        "outside": HOST_STATE,
        "fp32_master": True,
    },
    "full, masters on the host": {
        "trained": None,
        "n_buffer": 2,
        "outside": HOST_STATE,
        "fp32_master": True,
        "update": Update.HOST,
    },
}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", SESSIONS)
@pytest.mark.sampled(14)
def test_a_step_moves_the_bytes_that_a_session_moves(
    name: str, accumulation: int
) -> None:
    options = dict(SESSIONS[name])
    fp32_master = options.get("fp32_master", False)
    session = session_of(options.pop("trained"), accumulation > 1, **options)
    try:
        plain = torch.optim.AdamW(
            [p for p in session.model.parameters() if p.requires_grad]
        )
        optimizer = session.wrap_optimizer(plain)
        data = [batches(accumulation)]
        # staging grows with the state, which is there from the second update on
        train(session.model, optimizer, data * 3)
        before = session.measured()
        train(session.model, optimizer, data)
        after = session.measured()
    finally:
        session.close()
    update = session.plan.update
    workload = Workload(accumulation, fp32_master=fp32_master, update=update)
    times = BlockTimes((1.0,) * 6, (1.0,) * 6, 1, 1, 1, True)
    trained = TrainedBytes(session.layout, workload)
    step = simulate(Demand(trained, session.plan, times, HARDWARE))
    assert step.fetched_bytes == after.fetched_bytes - before.fetched_bytes
    assert step.offloaded_bytes == after.offloaded_bytes - before.offloaded_bytes
    assert step.busy_s["fetch"] == step.fetched_bytes / HARDWARE.fetch_bytes_s
    assert step.busy_s["offload"] == step.offloaded_bytes / HARDWARE.offload_bytes_s


# By hand: three or four blocks, one chunk each, one byte a second.


def by_hand(
    sizes: Sequence[int],
    n_buffer: int,
    forward_s: float,
    backward_s: float,
    trainable: bool = False,
    policies: Sequence[Policy] | None = None,
    moved: Sequence[int] | None = None,
    **rates: float,
) -> Case:
    """Blocks of one paged fp32 chunk each, given by its parameters."""
    blocks = range(len(sizes))
    chunks = tuple(
        Chunk(b, b, trainable, (TensorSpec(f"p{b}", (n,), torch.float32, 0),), 4 * n)
        for b, n in zip(blocks, sizes, strict=True)
    )
    layout = Layout(tuple(Block(b, f"layers.{b}", (b,)) for b in blocks), chunks, 0, 0)
    placements = (PAGED,) * len(sizes)
    chosen = tuple(policies or [Policy.KEEP] * len(sizes))
    return Case(
        layout,
        Plan(0, n_buffer, 0, 0, placements, chosen, "test"),
        BlockTimes(
            (forward_s,) * len(sizes), (backward_s,) * len(sizes), 0, 0, 0, True
        ),
        replace(HARDWARE, **rates),
        1,
        False,
        Moved(tuple(moved), tuple(moved)) if moved else None,
    )


def test_a_block_waits_for_its_copy_and_the_copy_for_the_slot() -> None:
    # forward: chunks 0, 1 are there; 2 needs the slot of 0, is queued at 1, comes at 5,
    # 3 at 9. Blocks end at 1, 2, 6, 10. Backward: 1 is queued when 2 opens at 12 and
    # comes at 16, 0 when 1 opens and comes at 20. Block 0 ends at 22.
    step = by_hand([1, 1, 1, 1], 2, 1, 2).step()
    assert step.total_s == 22
    assert step.busy_s == {"compute": 12, "fetch": 16, "offload": 0, "host": 0}
    assert step.exposed_s == {"fetch": 10, "offload": 0, "host": 0}
    assert step.limiter == "fetch"


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_gather_over_the_link_of_the_copies_gains_nothing(ranks: int) -> None:
    """Ranks that gather what they do not fetch move the same bytes over one link; with a
    link of its own the gather takes no time from the next fetch."""
    # shards are whole pages
    page = 4096
    whole = by_hand([ranks * page] * 4, 2, page, 2 * page)
    world = World(ranks, ranks)
    # a gather at the pace of a copy: all but the own part travels
    hardware = replace(HARDWARE, gather_bytes_s=ranks / (ranks - 1))
    shares = replace(whole.plan, shards=ranks)
    fetched, apart, shared = (
        replace(whole, plan=plan, hardware=machine, world=world).step()
        for plan, machine in (
            (whole.plan, hardware),
            (shares, hardware),
            (shares, replace(hardware, shares_link=True)),
        )
    )
    assert apart.total_s < fetched.total_s
    assert shared.total_s >= fetched.total_s * (1 - 1e-9)
    both = shared.busy_s["fetch"] + shared.busy_s[COMMUNICATE]
    assert both == pytest.approx(fetched.busy_s["fetch"])
    assert both <= shared.total_s


def test_a_reduction_over_the_link_of_the_copies_takes_its_time_from_them() -> None:
    case = by_hand([4, 4, 4], 3, 1, 1, trainable=True, memory_bytes_s=math.inf)
    case = replace(case, update=Update.DEVICE, world=World(2, 2))
    shared = replace(case, hardware=replace(case.hardware, shares_link=True))
    apart_s, step = case.step().total_s, shared.step()
    assert step.total_s > apart_s
    assert step.busy_s["offload"] + step.busy_s[COMMUNICATE] <= step.total_s


CLIPPED = {"adam_bytes_s": 9 / 7, "memory_bytes_s": math.inf}
"""AdamW scales and updates an fp32 weight in 4 seconds, 9 bytes for each of its own; what
the device does takes no time."""


def test_a_fetch_waits_for_the_update_of_its_own_chunk_only() -> None:
    # updates end at 4, 8, 12; each fetch takes one second.
    # block 0 opens at 5, 1 at 9, 2 at 13 and ends at 14.
    # Backward: 2 ends at 15, 1 at 16; 0 was fetched meanwhile and ends at 17.
    # Gradients leave from 15 to 18, a second each; the last arrives at 18
    four = dict.fromkeys(RATES[:4], 4)
    step = by_hand([1] * 3, 2, 1, 1, True, **{**four, **CLIPPED}).step()
    assert step.total_s == pytest.approx(18)
    waited = {"fetch": 3, "offload": 1, "host": 8}
    assert step.exposed_s == pytest.approx(waited)
    assert step.limiter == "host"


def test_at_most_two_chunks_of_gradients_are_on_their_way() -> None:
    # all four slots hold their chunk again at 0; gradients take 4 seconds each, from 1;
    # the third is sent at 5 instead of 3, the fourth at 9
    instant = [name for name in RATES if not name.startswith("offload")]
    rates = dict.fromkeys([*instant, "memory_bytes_s"], math.inf)
    case = by_hand([1] * 4, 4, 0, 1, True, **rates)
    step = case.step()
    assert step.total_s == 17
    assert step.exposed_s == {"fetch": 0, "offload": 13, "host": 0}


def test_swapped_activations_come_back_during_the_block_before() -> None:
    # out from 1 to 4, which backward waits for; block 2 runs from 4 to 6, block 1 from
    # 6 to 8; in from 6 to 9
    policies = [Policy.SWAP, Policy.KEEP, Policy.KEEP]
    case = by_hand([1] * 3, 3, 1, 2, False, policies, [3, 0, 0])
    step = case.step()
    assert step.busy_s == {"compute": 9, "fetch": 3, "offload": 3, "host": 0}
    assert step.exposed_s == {"fetch": 1, "offload": 1, "host": 0}
    assert step.fetched_bytes == 0


def test_swapped_activations_come_back_after_they_have_left() -> None:
    # out from 1 to 13, which backward waits for; in until 25, beside block 1
    policies = [Policy.SWAP, Policy.KEEP]
    step = by_hand([1] * 2, 2, 1, 2, False, policies, [12, 0]).step()
    assert step.total_s == 27
    assert step.exposed_s == {"fetch": 10, "offload": 11, "host": 0}


def test_the_next_block_that_swaps_waits_until_the_one_before_has_left() -> None:
    # out from 1 to 5; block 1 runs until 2, block 2 from 5 to 6; out from 6 to 7;
    # backward waits until 7; block 2 has its tensors at 8 and ends at 10, block 1 at
    # 12; those of block 0 come from 10 to 14, it ends at 16
    policies = [Policy.SWAP, Policy.KEEP, Policy.SWAP]
    step = by_hand([1] * 3, 3, 1, 2, False, policies, [4, 0, 1]).step()
    assert step.total_s == 16
    assert step.exposed_s == {"fetch": 3, "offload": 4, "host": 0}


def test_swapped_activations_come_before_weights_ahead() -> None:
    # chunk 3 comes from 1 to 5, forward ends at 6; when block 2 opens at 8, what block 1
    # swapped comes until 10 and the weights of block 0 until 14
    policies = [Policy.KEEP, Policy.SWAP, Policy.KEEP, Policy.KEEP]
    step = by_hand([1] * 4, 3, 1, 2, False, policies, [0, 2, 0, 0]).step()
    assert step.total_s == 16
    assert step.exposed_s == {"fetch": 4, "offload": 0, "host": 0}


def test_inputs_that_swap_are_there_before_the_block_recomputes() -> None:
    # forward until 2, out from 1 to 3, block 1 until 5; in from 3 to 5
    policies = [Policy.SWAP_INPUT, Policy.KEEP]
    step = by_hand([1] * 2, 2, 1, 2, False, policies, [2, 0]).step()
    assert step.total_s == 3 + 2 + 3
    assert step.recompute_s == 1


# Several ranks, by hand: two chunks of one page, one byte of the link a second.

PAGE = 4096


def of_ranks(
    world: World, shards: int = 1, accumulation: int = 1, **rates: Any
) -> Case:
    """Two trained blocks of one page each, both in slots of their own."""
    case = by_hand([PAGE // 4] * 2, 2, 0, 0, True, **rates)
    plan = replace(case.plan, shards=shards)
    return replace(case, plan=plan, world=world, accumulation=accumulation)


INSTANT = dict.fromkeys([*RATES, "memory_bytes_s"], math.inf)


def test_a_shard_is_fetched_and_then_gathered() -> None:
    # two pages in two shards: a page each at 1, then 2 at 4; the second copy runs
    # beside the first gather
    rates = INSTANT | {"fetch_bytes_s": PAGE, "fetch_both_bytes_s": PAGE}
    rates["gather_bytes_s"] = 2 * PAGE / 4
    case = by_hand([PAGE // 2] * 2, 1, 0, 0, **rates)
    case = replace(case, plan=replace(case.plan, shards=2), world=World(2, 2))
    # forward brings the second chunk, backward the first
    step = case.step()
    assert step.total_s == (1 + 4) * 2
    assert step.fetched_bytes == 2 * PAGE
    assert step.busy_s["fetch"] == 2 and step.busy_s["communicate"] == 8
    assert step.exposed_s["communicate"] == 10 and step.limiter == "communicate"
    # with a slot each both are there
    roomy = replace(case, plan=replace(case.plan, n_buffer=2)).step()
    assert roomy.total_s == 0


def test_gradients_are_reduced_before_a_part_of_them_leaves() -> None:
    # a page is reduced in 3 s, half of it leaves in 1; the second chunk is reduced
    # meanwhile and its part leaves from 6 to 7
    rates = INSTANT | {"reduce_bytes_s": PAGE / 3}
    rates |= {"offload_bytes_s": PAGE / 2, "offload_both_bytes_s": PAGE / 2}
    step = of_ranks(World(2, 2), **rates).step()
    assert step.total_s == 7
    assert step.busy_s["communicate"] == 6
    assert (step.busy_s["offload"], step.offloaded_bytes) == (2, PAGE)
    # two nodes: a rank's half goes across in 5 s, the next reduction waits
    across = rates | {"across_bytes_s": PAGE / 10}
    assert of_ranks(World(4, 2), **across).step().total_s == 3 + 5 + 3 + 5 + 1
    # nodes of one rank do not reduce inside, and all of a chunk leaves
    single = of_ranks(World(3, 1), **across).step()
    assert single.total_s == 10 + 10 + 2 and single.offloaded_bytes == 2 * PAGE


def test_sums_of_earlier_micro_batches_come_back_in_each_later_one() -> None:
    rates = INSTANT | {"fetch_bytes_s": PAGE / 2, "fetch_both_bytes_s": PAGE / 2}
    for accumulation in (1, 2, 5):
        step = of_ranks(World(2, 2), 1, accumulation, **rates).step()
        # the update renews both chunks
        assert step.fetched_bytes == 2 * PAGE * accumulation
        # all but the last send whole chunks
        assert step.offloaded_bytes == 2 * PAGE * (accumulation - 1) + PAGE
        assert step.total_s == 4 * accumulation


def test_ranks_update_their_share_on_the_device_and_fetch_all() -> None:
    # operands of half a chunk, weights with them, are a page and 48 bytes of state each
    case = replace(of_ranks(World(2, 2), **INSTANT), update=Update.DEVICE)
    step = case.step()
    own = PAGE // 2
    state = 2 * PAGE + 16
    assert step.fetched_bytes == 2 * (2 * own + state // 2) + 2 * PAGE
    # a part of each gradient leaves, and half of weights and state
    assert step.offloaded_bytes == 2 * (own + own + state // 2)
    alone = replace(case, world=World()).step()
    assert step.offloaded_bytes == alone.offloaded_bytes / 2


def test_what_stays_on_the_device_is_reduced_beside_backward() -> None:
    # adapters of 8 bytes, half of them a block, are reduced at 4 and gathered at 1
    # byte a second: 5 s a block. Blocks end at 3, 6; all is there at 3 + 5 + 5
    rates = INSTANT | {"reduce_bytes_s": 4, "gather_bytes_s": 1}
    case = by_hand([1] * 2, 2, 0, 3, **rates)
    case = replace(case, layout=replace(case.layout, fixed_trainable_bytes=8))
    assert case.step().total_s == 6
    step = replace(case, world=World(2, 2), accumulation=3).step()
    assert step.busy_s["communicate"] == 10
    assert step.total_s == 6 * 2 + 3 + 10
    assert step.exposed_s["communicate"] == 7


def work_of(case: Case, chunk: Chunk, ranks: int) -> TrainedWork:
    world = World(ranks, ranks)
    trained = TrainedBytes(case.layout, replace(case, world=world).workload())
    return trained_work(chunk, None, trained, case.hardware, 0, 0)


@given(cases(), st.sampled_from([2, 3, 8]))
def test_more_ranks_of_a_node_have_less_to_update(case: Case, ranks: int) -> None:
    for chunk in filter(lambda chunk: chunk.trainable, case.layout.chunks):
        alone, together, more = (work_of(case, chunk, n) for n in (1, ranks, ranks + 1))
        assert together.update_s == pytest.approx(alone.update_s / ranks)
        assert more.update_s < together.update_s
        assert more.part_bytes <= together.part_bytes <= together.nbytes


@pytest.mark.parametrize(
    ("dtype", "update"),
    [
        # one weight of 4 bytes: 7 moved for each, 2 to scale
        (torch.float32, 36),
        # and its 2 bytes are written beside the master of 4
        (torch.bfloat16, 36 + 2),
    ],
)
def test_an_update_on_the_host_takes_its_bytes(dtype: torch.dtype, update: int) -> None:
    case = by_hand([1], 1, 0, 0, True, adam_bytes_s=1 / 7)
    spec = replace(case.layout.chunks[0].tensors[0], dtype=dtype)
    chunk = replace(case.layout.chunks[0], tensors=(spec,), nbytes=spec.nbytes)
    layout = replace(case.layout, chunks=(chunk,))
    case = replace(case, layout=layout, fp32_master=True, accumulation=3)
    assert case.step().busy_s["host"] == pytest.approx(update)


def outside_trained(accumulation: int = 1) -> Case:
    """A frozen resident block of 2 and 3 s; two host-state weights of 4 bytes outside."""
    case = by_hand([1], 1, 2, 3, **CLIPPED)
    chunks = [
        Chunk(c, None, True, (TensorSpec(f"p{c}", (1,), torch.float32, 0),), 4)
        for c in (1, 2)
    ]
    return replace(
        case,
        layout=replace(case.layout, chunks=(*case.layout.chunks, *chunks)),
        plan=replace(
            case.plan, n_buffer=0, placements=(RESIDENT, HOST_STATE, HOST_STATE)
        ),
        times=replace(case.times, outside_forward_s=10, update_s=1),
        accumulation=accumulation,
    )


def test_weights_that_stay_are_refreshed_before_forward() -> None:
    # updates end at 4 and 8, copies to the device at 8 and 12; forward ends at 24. The
    # second gradient leaves before the block's backward, the first after it, from 27
    step = outside_trained().step()
    assert step.total_s == pytest.approx(24 + 3 + 4 + 1)
    waited = {"fetch": 8, "offload": 5, "host": 3}
    assert step.exposed_s == pytest.approx(waited)


# Updates on the device, by hand: AdamW's state of an fp32 weight lies in 48 bytes, its two
# moments and number of steps each 16 apart; an update moves 5 * 4 + 2 * 12 bytes.

DEFERRED = {
    **dict.fromkeys(("fetch_bytes_s", "fetch_both_bytes_s"), 52),
    **dict.fromkeys(("offload_bytes_s", "offload_both_bytes_s"), 4),
}
"""Gradient and state come in a second, a gradient leaves in one, weights and state are
home after 13."""


def deferred(num: int, n_buffer: int, seconds: float, **rates: float) -> Case:
    """Blocks of one weight; updates take no time but that of copies."""
    rates = {**DEFERRED, "memory_bytes_s": math.inf, **rates}
    case = by_hand([1] * num, n_buffer, seconds, seconds, True, **rates)
    return replace(case, update=Update.DEVICE)


def test_operands_come_a_block_ahead_and_the_end_waits_for_the_last_gradient() -> None:
    # operands at 1 and 2; blocks run 1 to 31, 31 to 61; gradients of the second leave
    # beside the first's backward, 91 to 121; the last one by 122
    step = deferred(2, 2, 30).step()
    assert step.total_s == 122
    assert step.exposed_s == {"fetch": 1, "offload": 1, "host": 0}
    # gradients of 4 bytes leave, weights and state return
    assert step.offloaded_bytes == 2 * (4 + 52) and step.fetched_bytes == 2 * 52


def test_operands_wait_for_a_buffer_that_is_home() -> None:
    # the first two are home at 14 and 27; the third's operands come at 15, its weights
    # are there; the second block ends at 3, so compute waits from 3 to 15
    step = deferred(3, 3, 1).step()
    # home at 14, 27 and 40; then the gradients leave, one after the other
    assert step.exposed_s["fetch"] == 1 + 12
    assert step.total_s == 43


def test_a_slot_is_filled_after_its_weights_are_home() -> None:
    # the first's are home at 2, the second's come until 2 + 4 / 52; those go home after
    # the first's state, at 15, and only then the first's come again
    step = deferred(2, 1, 0).step()
    assert step.exposed_s["fetch"] == pytest.approx(15 + 4 / 52)


def test_sums_come_back_a_block_ahead_of_later_backwards() -> None:
    # while the block that made them computes, or the one after it: nobody waits
    once, twice, thrice = (
        replace(deferred(4, 4, 30), accumulation=n).step() for n in (1, 2, 3)
    )
    assert twice.fetched_bytes - once.fetched_bytes == 4 * 4
    assert thrice.total_s - twice.total_s == pytest.approx(8 * 30)
    assert twice.offloaded_bytes - once.offloaded_bytes == 4 * 4


def test_weights_outside_blocks_are_updated_one_after_the_other_first() -> None:
    case = deferred(1, 0, 0)
    outside = [replace(case.layout.chunks[0], index=c, block=None) for c in range(1, 3)]
    case = replace(
        case,
        layout=replace(case.layout, chunks=(*case.layout.chunks, *outside)),
        plan=replace(case.plan, placements=(RESIDENT, HOST_STATE, HOST_STATE)),
    )
    # operands at 1 and 2; home at 14 and 27, then the gradients leave, until 28 and 29
    step = case.step()
    assert step.exposed_s["fetch"] == 2
    assert step.total_s == 29


def test_the_device_norms_only_in_the_last_micro_batch() -> None:
    fast = dict.fromkeys(RATES, math.inf)
    case = deferred(1, 1, 0, **fast | {"memory_bytes_s": 1})
    update = 5 * 4 + 2 * 12
    for accumulation in (1, 2, 5):
        step = replace(case, accumulation=accumulation).step()
        sums = 3 * 4 * (accumulation - 1)
        assert step.busy_s["compute"] == update + sums + 4


@settings(max_examples=80)
@given(cases(), st.integers(1, 3))
def test_one_more_micro_batch_is_never_faster(case: Case, more: int) -> None:
    longer = replace(case, accumulation=case.accumulation + more).step()
    assert at_most(case.step().total_s, longer.total_s)


class EveryPart(DeferredStep):
    """A step in which nothing is only counted."""

    def repeat(self, run: Callable[[], None], times: int) -> int:
        for _ in range(times):
            run()
        return 0


@settings(max_examples=150)
@given(cases(disk=True), st.integers(1, 60), st.integers(1, 9))
def test_what_is_counted_takes_as_long_as_what_runs(
    case: Case, parts: int, accumulation: int
) -> None:
    case = replace(case, world=World(), update=Update.DEVICE, accumulation=accumulation)
    case = replace(case, plan=replace(case.plan, shards=1))
    demand = case.demand()
    demand.num_parts = parts
    every = EveryPart(demand)
    every.update()
    for number in range(accumulation):
        every.micro_batch(first=number == 0, last=number == accumulation - 1)
    every.settle()
    every.end_reads()
    step = simulate(demand)
    assert step.total_s == pytest.approx(every.now, rel=1e-7)
    assert step.exposed_s == pytest.approx(
        every.exposed, rel=1e-6, abs=1e-6 * every.now
    )
    for lane, seconds in every.busy.items():
        assert step.busy_s[lane] == pytest.approx(seconds)


def test_recomputation_repeats_the_forward_of_its_blocks() -> None:
    policies = [Policy.RECOMPUTE, Policy.KEEP, Policy.RECOMPUTE]
    step = by_hand([1] * 3, 3, 1, 2, False, policies).step()
    assert (step.total_s, step.recompute_s, step.limiter) == (11, 2, "compute")


def test_copies_share_the_link_for_as_long_as_both_ways_have_work() -> None:
    # backward moves 8 bytes each way: at half the rate; forward 16 alone
    slow = dict.fromkeys(("fetch_both_bytes_s", "offload_both_bytes_s"), 0.5)
    case = by_hand([1] * 4, 2, 1, 1, True, **slow)
    step = case.step()
    assert step.busy_s["fetch"] == 16 + 8 / 0.5
    assert step.busy_s["offload"] == 8 + 8 / 0.5


def test_swapped_activations_make_no_other_copy_faster() -> None:
    # Forward ends at 20. Backward has 4 seconds of gradients for 8 of weights, which take
    # 1.5 a byte. Chunk 1 comes from 21 to 27, what block 0 swapped until 35, chunk 0
    # until 41: beside block 1, which ends at 47. The last gradients are there at 51.
    # Only this test always notices weights that take less where more comes back.
    rates = {
        "fetch_both_bytes_s": 0.5,
        "offload_bytes_s": 4,
        "offload_both_bytes_s": 2,
        **dict.fromkeys(("adam_bytes_s", "memory_bytes_s"), math.inf),
    }
    policies = [Policy.SWAP, Policy.KEEP, Policy.KEEP, Policy.KEEP]
    case = by_hand([1] * 4, 2, 4, 1, True, policies, **rates)
    times = replace(case.times, backward_s=(1, 20, 1, 1))
    for back, fetch_s in ((0, 16 + 8 * 1.5), (8, 16 + 8 * 1.5 + 8)):
        moved = Moved((0,) * 4, (back, 0, 0, 0))
        step = replace(case, times=times, moved=moved).step()
        assert step.total_s == 51
        assert step.busy_s["fetch"] == fetch_s


def test_measured_times_replace_computed_ones() -> None:
    ways = [(block, backward) for backward in (False, True) for block in (0, None, 1)]
    segments = tuple(Segment(*way, Work(moved_bytes=8), 0) for way in ways)
    subject = Trace(segments, (), ("0", "1")), Layout((), (), 0, 0), HARDWARE
    seconds = {1: BlockSeconds(0.5, 0.25)}
    computed, measured = block_times(*subject), block_times(*subject, seconds)
    assert measured.measured and not computed.measured
    assert measured == replace(
        computed,
        forward_s=(computed.forward_s[0], 0.5),
        backward_s=(computed.backward_s[0], 0.25),
        recompute_s=(computed.forward_s[0], 0.5),
        measured=True,
    )


@pytest.mark.parametrize(
    "buffers, total_s, exposed_s",
    [
        # chunks 0 and 1 are there; 2, 3, 1 and 0 are fetched. A read takes 5, a copy 4, a
        # block 1. With two buffers 2 and 3 are read before the step; 2 comes at 5, when 1
        # is read until 10, 3 at 9, when 0 is read until 15. In backward 1 is queued at 11
        # and comes at 15, 0 at 19.
        (2, 20, {"fetch": 12, "disk": 0}),
        # With one, 3 is read from 5 to 10 and comes at 14. Backward has 3 and 2 until 17;
        # 1 is read until 19 and comes at 23, 0 until 28 and comes at 32.
        (1, 33, {"fetch": 15, "disk": 10}),
        # all stay in their buffers
        (4, 20, {"fetch": 12}),
    ],
)
def test_reads_from_the_disk_go_ahead_as_far_as_there_are_buffers(
    buffers: int, total_s: float, exposed_s: dict[str, float]
) -> None:
    case = by_hand([1, 1, 1, 1], 2, 1, 1, disk_bytes_s=4 / 5)
    plan = replace(case.plan, on_disk=(0, 1, 2, 3), disk_buffers=buffers)
    step = replace(case, plan=plan).step()
    assert step.total_s == total_s
    assert {k: v for k, v in step.exposed_s.items() if v or k == "disk"} == exposed_s


def test_a_step_is_no_shorter_than_its_reads() -> None:
    case = by_hand([1, 1, 1, 1], 2, 1, 1, disk_bytes_s=4 / 50)
    plan = replace(case.plan, on_disk=(0, 1, 2, 3), disk_buffers=2)
    step = replace(case, plan=plan).step()
    assert step.busy_s["disk"] == 200 <= step.total_s
    assert step.limiter == "disk"


def test_compute_waits_for_the_thread_that_queues_it() -> None:
    # Each block computes for 1 s in each direction and takes the thread 3 to queue: the
    # device waits for 2, twice a block. With 0.5 the thread is ahead.
    case = by_hand([1] * 4, 4, 1, 1)
    idle = case.step()
    for queue_s, waits in (0.5, 0.0), (3.0, 16.0):
        queued = {f"queue_{way}_s": (queue_s,) * 4 for way in ("forward", "backward")}
        step = replace(case, times=replace(case.times, **queued)).step()
        assert step.total_s == idle.total_s + waits
        assert step.exposed_s["host"] == waits


def test_a_block_recomputes_for_as_long_as_was_timed() -> None:
    case = by_hand([1] * 4, 4, 1, 1, policies=[Policy.RECOMPUTE] * 4)
    timed = replace(case.times, recompute_s=(1.5,) * 4)
    step = replace(case, times=timed).step()
    assert step.recompute_s == 6.0
    assert step.total_s == case.step().total_s + 2.0


def test_trained_tensors_whose_state_is_on_the_host_take_the_thread_time() -> None:
    # of gradients and of updates, which are due in the next forward
    fast = dict.fromkeys([*RATES, "memory_bytes_s"], 1e15)
    case = by_hand([1] * 4, 4, 0, 0, trainable=True, **fast)
    slow = replace(case.hardware, kernel_s=1e-6)
    for update in Update:
        here = replace(case, update=update)
        more = replace(here, hardware=slow).step().total_s - here.step().total_s
        queued = QUEUED_GRADIENT + QUEUED_UPDATE * (update is Update.DEVICE)
        assert more == pytest.approx(4 * queued * 1e-6)


def test_times_must_fit_the_layout() -> None:
    case = by_hand([1] * 3, 2, 1, 1)
    with pytest.raises(ValueError, match="zip"):
        replace(case, times=replace(case.times, forward_s=(1, 1))).step()
