"""Legal plans, and the fastest that fits, against every plan there is."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import astuple, replace
from typing import Any

import pytest
import torch
from core_models import (
    CPU,
    adamw,
    assert_same,
    batches,
    checked,
    freeze,
    layouts,
    stack,
    train,
    twin,
    weights,
)
from hypothesis import given, strategies as st
from search_cases import (
    ALMOST,
    PLENTY,
    Case,
    Judged,
    cases,
    few,
    missing,
    of_one_memory,
)

from axolotl.integrations.protrain.core.engine.session import Session
from axolotl.integrations.protrain.core.errors import BudgetError, ConfigError
from axolotl.integrations.protrain.core.layout import (
    build_layout,
    check_slots,
    find_blocks,
    slot_floor,
)
from axolotl.integrations.protrain.core.layout.shards import PAGE_BYTES
from axolotl.integrations.protrain.core.planner.memory import MemoryModel
from axolotl.integrations.protrain.core.planner.meta import meta_copy
from axolotl.integrations.protrain.core.planner.plans import (
    block_policies,
    make_plan,
    place,
)
from axolotl.integrations.protrain.core.planner.search import (
    MODES,
    ONE_MEMORY,
    ONLY_A,
    Search,
)
from axolotl.integrations.protrain.core.planner.seconds import block_times
from axolotl.integrations.protrain.core.planner.trace import trace_step
from axolotl.integrations.protrain.core.sizes import format_bytes
from axolotl.integrations.protrain.core.types import (
    Block,
    Budget,
    Chunk,
    Knobs,
    Layout,
    Placement,
    Plan,
    Policy,
    TensorSpec,
    Update,
    Workload,
    World,
)

RESIDENT, HOST_STATE, PAGED, ROWS = Placement
OUTSIDE = st.sampled_from([RESIDENT, HOST_STATE])


def uniform(num_blocks: int, numel: int, trainable: bool = False) -> Layout:
    """One chunk of float32 in each block."""
    blocks, chunks = [], []
    for index in range(num_blocks):
        spec = TensorSpec(f"p{index}", (numel,), torch.float32, 0)
        chunks.append(Chunk(index, index, trainable, (spec,), spec.nbytes))
        blocks.append(Block(index, f"layers.{index}", (index,)))
    return Layout(tuple(blocks), tuple(chunks), 0, 0)


# where chunks sit


@given(layouts(), st.data(), st.booleans(), OUTSIDE)
def test_each_chunk_has_its_place(
    layout: Layout, data: st.DataObject, fp32_master: bool, outside: Placement
) -> None:
    n_persist = data.draw(st.integers(0, len(layout.pageable)))
    placements = place(layout, n_persist, fp32_master, outside)
    assert placements.count(PAGED) == len(layout.pageable) - n_persist
    for chunk, placement in zip(layout.chunks, placements, strict=True):
        if placement is PAGED:
            assert chunk.pageable
        elif chunk.trainable and chunk.has_masters(fp32_master):
            assert placement is HOST_STATE
        else:
            assert placement is (RESIDENT if chunk.pageable else outside)


@given(layouts(), st.data())
def test_state_leaves_the_chunks_that_would_page_next(
    layout: Layout, data: st.DataObject
) -> None:
    n_persist = data.draw(st.integers(0, len(layout.pageable)))
    n_host_state = data.draw(st.integers(0, n_persist))
    fewer = place(layout, n_persist - n_host_state, False, RESIDENT)
    placements = place(layout, n_persist, False, RESIDENT, n_host_state)
    for chunk, whole, at in zip(layout.chunks, fewer, placements, strict=True):
        left = chunk.pageable and chunk.trainable and whole is PAGED
        assert (at is HOST_STATE) is (left and at is not PAGED)
        assert at is PAGED or left or at is RESIDENT


@given(layouts(), st.booleans(), OUTSIDE)
def test_one_more_resident_chunk_moves_no_other(
    layout: Layout, fp32_master: bool, outside: Placement
) -> None:
    fewer = place(layout, 0, fp32_master, outside)
    for n_persist in range(1, len(layout.pageable) + 1):
        more = place(layout, n_persist, fp32_master, outside)
        moved = [pair for pair in zip(fewer, more, strict=True) if pair[0] != pair[1]]
        assert len(moved) == 1
        assert moved[0][0] is PAGED
        fewer = more


# what blocks do


rows = st.integers(1, 40).flatmap(
    lambda blocks: st.tuples(
        st.just(blocks), st.integers(0, blocks), st.integers(0, blocks)
    )
)


@given(rows, st.integers(1, 50))
def test_a_row_has_the_policies_asked_for(
    knobs: tuple[int, int, int], interval: int
) -> None:
    num_blocks, n_swap, n_checkpoint = knobs
    row = block_policies(num_blocks, n_swap, n_checkpoint, interval)
    assert len(row) == num_blocks
    assert sum(policy.swaps for policy in row) == n_swap
    assert sum(policy.recomputes for policy in row) == n_checkpoint
    swapping = [block for block, policy in enumerate(row) if policy.swaps]
    if n_swap and (n_swap - 1) * interval >= num_blocks:
        interval = max(1, num_blocks // n_swap)
    assert swapping == list(range(0, n_swap * interval, interval))
    # both only where there is no other room, and then the first ones
    both = [block for block in swapping if row[block] is Policy.SWAP_INPUT]
    assert both == swapping[: max(0, n_swap + n_checkpoint - num_blocks)]
    others = [policy for policy in row if not policy.swaps]
    assert others == sorted(others, key=[Policy.RECOMPUTE, Policy.KEEP].index)


def test_rows_of_ten_blocks() -> None:
    def row(*knobs: int) -> str:
        letters = {"swap-input": "I"}
        return "".join(
            letters.get(policy.value, policy.value[0].upper())
            for policy in block_policies(10, *knobs)
        )

    assert row(0, 4, 3) == "RRRRKKKKKK"
    assert row(2, 4, 3) == "SRRSRRKKKK"
    assert row(4, 6, 3) == "SRRSRRSRRS"
    assert row(5, 0, 3) == "SKSKSKSKSK"
    assert row(4, 8, 3) == "IRRIRRSRRS"
    assert row(10, 10, 3) == "I" * 10


# plans by hand


@given(layouts(), st.data())
def test_a_plan_is_exactly_what_was_asked_for(
    layout: Layout, data: st.DataObject
) -> None:
    total, blocks = len(layout.pageable), len(layout.blocks)
    n_persist = data.draw(st.integers(0, total))
    n_buffer = data.draw(st.integers(0, total + 1))
    n_swap = data.draw(st.integers(0, blocks))
    n_checkpoint = data.draw(st.integers(0, blocks))
    knobs = (n_persist, n_buffer, n_swap, n_checkpoint)
    try:
        plan = make_plan(layout, *knobs, fp32_master=False)
    except ConfigError as error:
        low, high = map(int, re.findall(r"range (\d+) to (\d+)", str(error))[0])
        assert not low <= n_buffer <= high
        assert high == total - n_persist
        return
    assert (plan.n_persist, plan.n_buffer, plan.n_swap, plan.n_checkpoint) == knobs
    assert len(plan.paged) == total - n_persist
    assert plan.mode == ("B" if any(p.on_host for p in plan.placements) else "A")
    assert sum(p.recomputes for p in plan.policies) == n_checkpoint
    assert sum(policy.swaps for policy in plan.policies) == n_swap
    check_slots(layout, plan.placements, plan.n_buffer)


RANGES = [
    ("n_persist", (-1, 1, 0, 0), "range 0 to 4, the number of chunks"),
    ("n_persist", (5, 0, 0, 0), "range 0 to 4, the number of chunks"),
    ("n_checkpoint", (0, 1, 0, -1), "range 0 to 4, the number of blocks"),
    ("n_checkpoint", (0, 1, 0, 5), "range 0 to 4, the number of blocks"),
    ("n_buffer", (0, 0, 0, 0), "range 1 to 4"),
    ("n_buffer", (0, 5, 0, 0), "range 1 to 4"),
    ("n_buffer", (4, 1, 0, 0), "range 0 to 0"),
    ("n_swap", (0, 1, -1, 0), "range 0 to 4, the number of blocks"),
    ("n_swap", (0, 1, 5, 0), "range 0 to 4, the number of blocks"),
]


@pytest.mark.parametrize(("knob", "knobs", "message"), RANGES)
def test_what_is_out_of_range_is_refused(
    knob: str, knobs: tuple[int, int, int, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        make_plan(uniform(4, 100), *knobs, fp32_master=False)
    assert str(refusal.value).startswith(f"protrain_{knob}_override")
    # what pydantic shows to the person
    assert isinstance(refusal.value, ValueError)


@given(cases(), st.data())
def test_by_hand_skips_the_search(case: Case, data: st.DataObject) -> None:
    """Any legal knobs, also such that the search would not choose."""
    layout, master = case.layout, case.workload.fp32_master
    n_persist = data.draw(st.integers(0, len(layout.pageable)))
    floor = slot_floor(layout, place(layout, n_persist, master, RESIDENT))
    n_buffer = data.draw(st.integers(floor, len(layout.pageable) - n_persist))
    n_swap, n_checkpoint = (
        data.draw(st.integers(0, len(layout.blocks))) for _ in range(2)
    )
    knobs = (n_persist, n_buffer, n_swap, n_checkpoint)
    interval = case.search().swap_interval
    # weights outside blocks give up their state on the device before blocks do, and
    # those before it is refused
    places = [(RESIDENT, 0), (HOST_STATE, 0)]
    if case.workload.update is Update.DEVICE and any(
        chunk.trainable for chunk in layout.pageable
    ):
        places.append((HOST_STATE, n_persist))
    first, *others = (
        make_plan(
            layout,
            *knobs,
            master,
            outside,
            swap_interval=interval,
            n_host_state=n_host_state,
        )
        for outside, n_host_state in places
    )
    if not case.allows(first):
        with pytest.raises(ConfigError, match="n_checkpoint.*mlp_forbid_offload"):
            case.search().by_hand(Knobs(*knobs))
        return
    assert case.search().by_hand(Knobs(*knobs)) == first
    assert first.origin == "overrides"

    plans = [first, *others]
    needed = [case.memory.device(plan).peak_bytes for plan in plans]
    for nbytes in needed:
        plan = case.search(nbytes).by_hand(Knobs(*knobs))
        assert plan == plans[[n <= nbytes for n in needed].index(True)]
    with pytest.raises(BudgetError, match="the plan of the overrides needs") as refusal:
        case.search(min(needed) - 1).by_hand(Knobs(*knobs))
    if needed[-1] == min(needed):
        assert missing(refusal.value) == "1 B"

    least = [case.memory.host(plan).peak_bytes for plan in plans]
    assert case.search(host_bytes=least[0]).by_hand(Knobs(*knobs)) == first
    with pytest.raises(BudgetError, match="protrain_cpu_capacity_bytes: the plan of"):
        case.search(host_bytes=min(least) - 1).by_hand(Knobs(*knobs))


# the search


def fitting(plans: list[Judged], device_bytes: int, host_bytes: int) -> list[Judged]:
    return [
        judged
        for judged in plans
        if judged.device_bytes <= device_bytes and judged.host_bytes <= host_bytes
    ]


def is_resident(case: Case, plan: Plan) -> bool:
    """Whether nothing is on the host but what has masters there."""
    master = case.workload.fp32_master
    pairs = zip(case.layout.chunks, plan.placements, strict=True)
    return not plan.paged and not any(
        at.on_host and not chunk.has_masters(master) for chunk, at in pairs
    )


def a_budget(data: st.DataObject, plans: list[Judged]) -> tuple[int, int]:
    """One at which some plan just fits the device, and some, perhaps, the host."""
    device = data.draw(st.sampled_from(sorted({p.device_bytes for p in plans})))
    hosts = sorted({p.host_bytes for p in plans})
    return device, data.draw(st.sampled_from([*hosts, PLENTY]))


@few
@given(st.one_of(cases(), cases(trained=False), cases(trained=True)), st.data())
def test_no_plan_that_fits_is_faster(case: Case, data: st.DataObject) -> None:
    plans = case.plans()
    device, host = a_budget(data, plans)
    candidates = fitting(plans, device, host)
    search = case.search(device, host)
    if not candidates:
        with pytest.raises(BudgetError):
            search.fastest()
        return
    plan = search.fastest()
    assert plan.origin == "search" and case.allows(plan)
    assert case.memory.device(plan).peak_bytes <= device
    assert case.memory.host(plan).peak_bytes <= host
    best_s = min(judged.step.total_s for judged in candidates)
    assert search.simulate(plan).total_s <= best_s * ALMOST


@few
@given(st.one_of(cases(), cases(trained=False)), st.data())
def test_the_disk_has_what_the_host_has_no_room_for(
    case: Case, data: st.DataObject
) -> None:
    """And not a chunk more; without a disk nothing changes."""
    # weights are pages of their files until they move
    case = replace(case, workload=replace(case.workload, mapped_bytes=PLENTY))
    plain = case.search().nearest(lacks_host=True)
    most = case.memory.host(plain).peak_bytes
    host = data.draw(st.integers(most // 2, most))
    search = case.search(host_bytes=host, disk_bytes=PLENTY)
    try:
        plan = search.by_hand(Knobs(*astuple(plain)[:4]))
    except BudgetError:
        return
    assert case.memory.host(plan).peak_bytes <= host
    assert not any(case.layout.chunks[index].trainable for index in plan.on_disk)
    assert set(plan.on_disk) <= set(plan.paged)
    if not plan.on_disk:
        return
    fewer = replace(plan, on_disk=())
    assert case.memory.host(fewer).peak_bytes > host
    nbytes = sum(case.layout.chunks[index].nbytes for index in plan.on_disk)
    short = case.search(host_bytes=host, disk_bytes=nbytes // 2)
    with pytest.raises(BudgetError):
        short.by_hand(Knobs(*astuple(plain)[:4]))


@few
@given(cases(), st.data())
def test_more_budget_is_never_slower(case: Case, data: st.DataObject) -> None:
    plans = case.plans()
    device, host = a_budget(data, plans)
    if not fitting(plans, device, host):
        return
    more = st.integers(0, 5000)
    small = case.search(device, host)
    large = case.search(device + data.draw(more), host + data.draw(more))
    large_s = large.simulate(large.fastest()).total_s
    assert large_s <= small.simulate(small.fastest()).total_s * ALMOST


@few
@given(cases(), st.data())
def test_everything_resident_on_demand(case: Case, data: st.DataObject) -> None:
    plans = [judged for judged in case.plans() if is_resident(case, judged.plan)]
    device, host = a_budget(data, plans)
    candidates = fitting(plans, device, host)
    search = case.search(device, host)
    if not candidates:
        with pytest.raises(BudgetError, match="keeping everything resident needs"):
            search.fastest(ONLY_A)
        return
    plan = search.fastest(ONLY_A)
    assert is_resident(case, plan)
    best_s = min(judged.step.total_s for judged in candidates)
    assert search.simulate(plan).total_s <= best_s * ALMOST


# one memory for device and host

ONE_GPU_EACH = [World(), World(3, 1)]


def together(case: Case, plan: Plan) -> int:
    """Bytes of both memories at the same time, as of a machine that has two."""
    memory = of_one_memory(case, False).memory
    device, host = memory.device(plan).phases, memory.host(plan).phases
    trains = max(n for phase, n in device.items() if phase not in ("load", "save"))
    return max(trains + host["train"], device["save"] + host["save"])


def resident(case: Case) -> list[Judged]:
    """The plans that neither page nor swap."""
    return [
        judged
        for judged in case.plans()
        if is_resident(case, judged.plan) and not judged.plan.n_swap
    ]


@few
@given(st.one_of(cases(worlds=ONE_GPU_EACH), cases(True, ONE_GPU_EACH)), st.data())
def test_one_memory_counts_once_and_nothing_pages(
    case: Case, data: st.DataObject
) -> None:
    """Two budgets of one size, each checked alone, would allow twice the memory."""
    case = of_one_memory(case)
    plans = resident(case)
    takes = [max(together(case, j.plan), j.host_bytes) for j in plans]
    memory = data.draw(st.sampled_from(sorted(takes))) - data.draw(st.integers(0, 1))
    search = case.search(memory, memory)
    fitting = [j for j, n in zip(plans, takes, strict=True) if n <= memory]
    if not fitting:
        with pytest.raises(BudgetError, match=ONE_MEMORY.split(":")[0]) as refusal:
            search.fastest()
        lacks = min(takes) - memory
        assert missing(refusal.value) == format_bytes(lacks)
        return
    plan = search.fastest()
    assert is_resident(case, plan) and not (plan.n_swap or plan.n_buffer)
    assert together(case, plan) <= memory
    best_s = min(judged.step.total_s for judged in fitting)
    assert search.simulate(plan).total_s <= best_s * ALMOST


@pytest.mark.parametrize("trains", ["nothing", "every other", "all"])
def test_of_one_memory_only_the_disk_pages(trains: str) -> None:
    """A chunk that pages to the host, or trains, takes the memory that it took before."""
    trained = Trained(trains != "all", inner=[192] * 12)
    chunks = trained.layout.chunks
    if trains == "every other":
        chunks = tuple(replace(c, trainable=c.index % 2 == 0) for c in chunks)
    # weights are pages of their files until they move
    workload = replace(trained.memory.workload, mapped_bytes=PLENTY)
    memory = MemoryModel(
        replace(trained.layout, chunks=chunks),
        trained.memory.trace,
        workload,
        replace(trained.hardware, one_memory=True, disk_bytes_s=1e7),
    )

    def search(nbytes: int, disk_bytes: int = PLENTY) -> Search:
        return Search(memory, trained.times, Budget(nbytes, 0, nbytes, disk_bytes))

    def taken(plan: Plan) -> int:
        return memory.device(plan).peak_bytes + memory.host(plan).phases["train"]

    resident = taken(search(0).plain(len(trained.layout.blocks)))
    assert not search(resident).fastest().paged
    with pytest.raises(BudgetError):
        search(resident - 1, disk_bytes=PAGE_BYTES).fastest()
    pages = False
    for nbytes in range(resident * 3 // 4, resident, resident // 50):
        with suppress(BudgetError):
            plan = search(nbytes).fastest()
            assert plan.on_disk == plan.paged and not plan.n_swap
            assert not any(chunks[index].trainable for index in plan.paged)
            assert taken(plan) <= nbytes
            pages |= bool(plan.paged)
    assert pages is (trains == "nothing")


def test_of_one_memory_a_model_fits_by_recomputing() -> None:
    """And is refused with what is missing where that is not enough; a host beside the
    device would take something."""
    trained = Trained(False)
    memory = MemoryModel(
        trained.layout,
        trained.memory.trace,
        trained.memory.workload,
        replace(trained.hardware, one_memory=True),
    )

    def search(nbytes: int) -> Search:
        return Search(memory, trained.times, Budget(nbytes, 0, nbytes))

    blocks = len(trained.layout.blocks)
    kept, recomputed = (
        memory.device(plan).peak_bytes + memory.host(plan).phases["train"]
        for plan in map(search(0).plain, (0, blocks))
    )
    assert recomputed < kept
    assert search(kept).fastest().n_checkpoint == 0
    plan = search(recomputed).fastest()
    assert 0 < plan.n_checkpoint <= blocks and plan.mode == "A"
    assert search(recomputed).fits(plan) and not search(recomputed - 1).fits(plan)
    with pytest.raises(BudgetError) as refusal:
        search(recomputed - 100).fastest()
    assert missing(refusal.value) == "100 B" and ONE_MEMORY in str(refusal.value)
    assert refusal.value.needs == recomputed and not refusal.value.or_host
    other = trained.search(recomputed - 100).fastest()
    assert other.paged or other.n_swap


# nothing fits


@few
@given(cases(), st.booleans())
def test_the_plan_named_lacks_the_least_of_the_device(
    case: Case, resident: bool
) -> None:
    plans = [j for j in case.plans() if not resident or is_resident(case, j.plan)]
    modes = ONLY_A if resident else MODES
    least = min(judged.device_bytes for judged in plans)
    search = case.search(least - 1)
    with pytest.raises(BudgetError, match="protrain_capacity_bytes") as refusal:
        search.fastest(modes)
    assert missing(refusal.value) == "1 B"
    nearest = search.nearest(modes)
    assert case.allows(nearest)
    assert case.memory.device(nearest).peak_bytes == least
    # and with that much more it fits
    case.search(least).fastest(modes)


@few
@given(cases())
def test_the_plan_named_lacks_the_least_of_the_host(case: Case) -> None:
    plans = case.plans()
    device = max(judged.device_bytes for judged in plans)
    least = min(judged.host_bytes for judged in plans)
    search = case.search(device, least - 5)
    with pytest.raises(BudgetError, match="protrain_cpu_capacity_bytes") as refusal:
        search.fastest()
    assert missing(refusal.value) == "5 B"
    nearest = search.nearest()
    assert case.memory.host(nearest).peak_bytes == least
    assert case.memory.device(nearest).peak_bytes <= device
    case.search(device, least).fastest()


@few
@given(cases(), st.data())
def test_the_nearest_plan_lacks_the_least_of_both(
    case: Case, data: st.DataObject
) -> None:
    """Of device and host together: a plan whose activations all go to a host that has no
    room for them is not near."""
    plans = case.plans()
    device, host = a_budget(data, plans)
    device -= data.draw(st.integers(1, 500))
    host = min(host, 10_000) - data.draw(st.integers(0, 500))

    def lacks(device_bytes: int, host_bytes: int) -> int:
        return max(device_bytes - device, 0) + max(host_bytes - host, 0)

    if fitting(plans, device, host):
        return
    nearest = case.search(device, host).nearest()
    assert case.allows(nearest)
    taken = case.memory.device(nearest), case.memory.host(nearest)
    least = min(lacks(judged.device_bytes, judged.host_bytes) for judged in plans)
    assert lacks(*(estimate.peak_bytes for estimate in taken)) == least
    with pytest.raises(BudgetError) as refusal:
        case.search(device, host).fastest()
    if refusal.value.of_device:
        of_host = [j.host_bytes for j in plans if j.device_bytes <= device]
        assert refusal.value.or_host == min(of_host, default=0)


def test_a_refusal_says_where_the_host_could_update() -> None:
    """Staging of updates is what does not fit: two times three times a block's bytes."""
    trained = Trained(False, inner=256)
    workload = Workload(accumulation=2, update=Update.DEVICE, host_can_update=True)
    for can in (True, False):
        workload = replace(workload, host_can_update=can)
        memory = MemoryModel(
            trained.layout, trained.memory.trace, workload, trained.hardware
        )
        on_host = replace(memory.workload, update=Update.HOST)
        other = MemoryModel(
            trained.layout, trained.memory.trace, on_host, trained.hardware
        )
        needed = [
            m.device(Search(m, trained.times, Budget(0, 0, PLENTY)).nearest())
            for m in (memory, other)
        ]
        least = needed[1].peak_bytes
        assert least < needed[0].peak_bytes
        for nbytes, fits in ((least, can), (least - 1, False)):
            with pytest.raises(BudgetError) as refusal:
                Search(memory, trained.times, Budget(nbytes, 0, PLENTY)).fastest()
            said = "`protrain_cpu_optimizer: torch`" in str(refusal.value)
            assert said is fits


@given(cases())
def test_the_refusal_names_every_term(case: Case) -> None:
    memory = case.memory
    search = Search(memory, case.times, Budget(1100, 1000, PLENTY))
    if memory.device(search.nearest()).peak_bytes <= 100:
        return
    with pytest.raises(BudgetError) as refusal:
        search.fastest()
    message = str(refusal.value)
    estimate = memory.device(search.nearest())
    assert "100 B of 1.1 KiB may be used" in message
    assert f"needs {format_bytes(estimate.peak_bytes)} on the device" in message
    assert estimate.peak.moment in message
    listed = message[message.index("(") + 1 : message.index(")")].split(", ")
    terms = [f"{name} {format_bytes(n)}" for name, n in estimate.terms.items() if n]
    assert sorted(listed) == sorted(terms)
    assert missing(refusal.value) == format_bytes(estimate.peak_bytes - 100)


# on a real model


class Trained:
    """A model, a search over it on this device, and what plain training makes of it."""

    def __init__(self, frozen: bool, **sizes: Any) -> None:
        self.model = stack(width=48, **sizes)
        self.keep = freeze(self.model, ["extra"]) if frozen else set()
        self.data = [batches(2, seed) for seed in range(2)]
        meta = meta_copy(self.model)
        tokens = self.data[0][0]
        trace = trace_step(meta, find_blocks(meta), lambda: meta(tokens)).trace
        self.layout = build_layout(self.model, self.keep)
        # fetches and updates as fast as compute, so that no knob is free
        self.hardware = replace(
            CPU, flops_32=1e9, memory_bytes_s=1e9, kernel_s=1e-6, adam_bytes_s=1e8
        )
        self.hardware = replace(self.hardware, fetch_bytes_s=1e7, offload_bytes_s=1e7)
        self.memory = MemoryModel(
            self.layout,
            trace,
            Workload(accumulation=2, update=Update.DEVICE),
            self.hardware,
        )
        self.times = block_times(trace, self.layout, self.hardware)
        plain = twin(self.model)
        self.numbers = train(plain, adamw(plain), self.data)
        self.weights = weights(plain)

    def search(self, device_bytes: int) -> Search:
        return Search(self.memory, self.times, Budget(device_bytes, 0, PLENTY))


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "full"])
def test_every_plan_of_the_search_runs(frozen: bool) -> None:
    """From the smallest budget to plenty: same numbers, and never over the budget."""
    trained = Trained(frozen, inner=[48, 96, 64, 160, 128, 192])
    least, most = (
        trained.memory.device(plan).peak_bytes
        for plan in (trained.search(0).nearest(), trained.search(0).plain(0))
    )
    plans = set()
    for step in range(9):
        budget = least + (most - least) * step // 8
        plan = trained.search(budget).fastest()
        plans.add((plan.n_persist, plan.n_buffer, plan.n_checkpoint))
        model = twin(trained.model)
        plan = replace(plan, update=Update.DEVICE)
        session = Session(model, trained.layout, plan, checked())
        optimizer = session.wrap_optimizer(adamw(model))
        assert train(model, optimizer, trained.data, session) == trained.numbers
        assert session.measured().device_peak_bytes <= budget
        session.close()
        assert_same(weights(model), trained.weights)
    assert len(plans) > 4
