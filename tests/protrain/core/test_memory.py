"""Bytes on the device and on the host, against counts made from tensor sizes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from core_models import (
    ALL,
    CPU,
    HOST_STATE,
    Stack,
    batches,
    freeze,
    open_session,
    stack,
    train,
    wrapped,
)
from covering import pairwise
from torch import Tensor, nn

from axolotl.integrations.protrain.core.engine.session import Session
from axolotl.integrations.protrain.core.layout import aligned, find_blocks
from axolotl.integrations.protrain.core.planner.memory import MemoryModel
from axolotl.integrations.protrain.core.planner.meta import meta_copy
from axolotl.integrations.protrain.core.planner.plans import make_plan
from axolotl.integrations.protrain.core.planner.trace import trace_step
from axolotl.integrations.protrain.core.planner.trained_bytes import (
    TrainedBytes,
    host_state_bytes,
)
from axolotl.integrations.protrain.core.types import (
    Block,
    Chunk,
    Layout,
    Placement,
    Segment,
    TensorSpec,
    Trace,
    Update,
    Work,
    Workload,
    World,
)


def optimizer_state_bytes(params: list[nn.Parameter], num_moments: int = 2) -> int:
    """Moments and the step count, a fp32 scalar, of each parameter."""
    return sum(num_moments * p.nbytes + 4 for p in params)


MEMORY_PLANS: dict[str, dict[str, Any]] = {
    "one slot": {"n_buffer": 1},
    "three slots": {"n_buffer": 3},
    "mixed": {"resident": (0, 2, 5), "n_buffer": 2},
    "mixed, state outside on the host": {
        "resident": (1, 3),
        "n_buffer": 2,
        "outside": HOST_STATE,
    },
    "paged, state outside on the host": {"n_buffer": 2, "outside": HOST_STATE},
    "resident": {"resident": ALL},
}
# no two neighbours alike, so that every slot has a largest chunk of its own
INNER = [16, 48, 32, 80, 64, 96]


# two tokens: so little is computed that states are nearly all of the peak
SIZES = {"inner": INNER, "width": 256}
# in the third step state comes for the first time
DATA = [[tokens[:1, :2] for tokens in batches(2, seed)] for seed in range(3)]


@pytest.mark.parametrize("plan", MEMORY_PLANS)
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "full"])
def test_device_peak_is_what_lies_there(frozen: bool, plan: str) -> None:
    """Counted from the model's own tensors, in the order in which they come.

    Between steps exact. In a step either all or no gradients stay, else what stays may
    be taken as there for the whole of backward; and at most a few activations come on
    top.
    """
    model = stack(**SIZES)
    keep = freeze(model, ["extra"]) if frozen else ()
    standing, lowest, highest = device_bytes(model, frozen, **MEMORY_PLANS[plan])
    session = open_session(model, keep, **MEMORY_PLANS[plan])
    train(model, wrapped(session), DATA, session)
    assert session.device.used_bytes() == standing
    peak = session.measured().device_peak_bytes
    assert lowest < peak <= highest + 0.1 * standing
    session.close()


def laid_out(params: list[nn.Parameter]) -> int:
    """Bytes of parameters one after the other, each at an aligned address."""
    end = 0
    for param in params:
        end = aligned(end) + param.nbytes
    return end


def region_bytes(params: list[nn.Parameter]) -> int:
    """Bytes of moments and step counts one after the other."""
    return aligned(sum(2 * aligned(p.nbytes, 16) + 16 for p in params))


def device_bytes(
    model: Stack,
    frozen: bool,
    resident: Any = (),
    n_buffer: int = 0,
    outside: Placement = Placement.RESIDENT,
) -> tuple[int, int, int]:
    """Weights, slots, staging and state; twice with the most gradients at one time.

    The last number has all gradients that stay there from the start of backward.
    """
    params = list(model.parameters())
    trained = [p for p in params if p.requires_grad]
    blocks = [list(layer.parameters()) for layer in model.layers]
    paged = [
        [p for p in block if not (frozen and p.requires_grad)]
        for index, block in enumerate(blocks)
        if index not in resident
    ]
    slots = sum(
        max(laid_out(block) for block in paged[slot::n_buffer])
        for slot in range(n_buffer if paged else 0)
    )
    away = {id(p) for block in paged for p in block}
    standing = slots + sum(p.nbytes for p in params if id(p) not in away)
    standing += sum(buffer.nbytes for buffer in model.buffers())

    on_host = set() if frozen else {id(p) for block in paged for p in block}
    if outside is HOST_STATE and not frozen:
        in_blocks = {id(p) for block in blocks for p in block}
        on_host |= {id(p) for p in params if id(p) not in in_blocks}
    own = [p for p in trained if id(p) not in on_host]
    standing += optimizer_state_bytes(own)
    # gradients and moments of two blocks that come from the host
    at_once = [aligned(laid_out(b)) + region_bytes(b) for b in paged if not frozen]
    standing += 2 * max(at_once, default=0)

    # in the order of backward: on this device a chunk that leaves is gone at once
    head_first = [[model.head.weight], [model.norm.weight], [model.norm.bias]]
    staying, seen, leaving = 0, [0], [0]
    for chunk in [*head_first, *reversed(blocks), [model.embed.weight]]:
        nbytes = sum(p.nbytes for p in chunk if p.requires_grad)
        seen.append(staying + nbytes)
        if id(chunk[0]) in on_host:
            leaving.append(nbytes)
        else:
            staying += nbytes
    # what updates of the others bring from the host, one after the other
    whole = {id(p) for block in blocks for p in block}
    for param in (p for p in trained if id(p) in on_host - whole):
        leaving.append(aligned(param.nbytes) + region_bytes([param]) - staying)
    return standing, standing + max(seen), standing + staying + max(leaving)


def traced(model: Stack, tokens: Tensor) -> Trace:
    """A micro-batch of a model that no session has hooked yet."""
    twin = meta_copy(model)
    return trace_step(twin, find_blocks(twin), lambda: twin(tokens)).trace


def predicted_bytes(session: Session, trace: Trace, **more: Any) -> int:
    """What the plan of a session was judged by, two micro-batches a step."""
    asked = Workload(**{"accumulation": 2, **more}, update=session.plan.update)
    memory = MemoryModel(session.layout, trace, asked, CPU)
    return memory.device(session.plan).peak_bytes


@pytest.mark.parametrize(
    ("recompute", "frozen", "plan"),
    pairwise([*product(((), (0, 1, 2), ALL), (True, False), MEMORY_PLANS)]),
)
@pytest.mark.sampled(12)
def test_device_peak_was_predicted(
    recompute: Sequence[int], frozen: bool, plan: str
) -> None:
    model = stack(inner=INNER)
    keep = freeze(model, ["extra"]) if frozen else ()
    data = [batches(2, s) for s in range(3)]
    trace = traced(model, data[0][0])
    session = open_session(model, keep, recompute=recompute, **MEMORY_PLANS[plan])
    train(model, wrapped(session), data, session)
    predicted = predicted_bytes(session, trace)
    assert session.measured().device_peak_bytes == pytest.approx(predicted, rel=0.01)
    session.close()


def test_weights_outside_are_updated_beside_the_gradients_of_others() -> None:
    """At the end of a step, before anybody clears those: the peak where activations are few."""
    model = stack(inner=16, width=512)
    trace = traced(model, DATA[0][0])
    session = open_session(model, resident=(0, 1, 2, 3), n_buffer=2, outside=HOST_STATE)
    train(model, wrapped(session), DATA, session)
    asked = Workload(accumulation=2, update=session.plan.update)
    told = MemoryModel(session.layout, trace, asked, CPU).device(session.plan)
    measured = session.measured().device_peak_bytes
    assert measured == pytest.approx(told.peak_bytes, rel=0.01)
    assert told.peak.phase == "update"
    session.close()


@pytest.mark.parametrize(
    ("resident", "accumulation", "fused"),
    pairwise([*product(((), (1, 3)), (1, 2), (True, False))]),
)
def test_device_peak_of_masters_was_predicted(
    resident: Sequence[int], accumulation: int, fused: bool
) -> None:
    model = stack(width=64, inner=INNER, dtype=torch.bfloat16)
    # buffers are as large as they get in the third step
    data = [batches(accumulation, s) for s in range(4)]
    trace = traced(model, data[0][0])
    session = open_session(
        model,
        fp32_master=True,
        accumulates=accumulation > 1,
        outside=HOST_STATE,
        inside=HOST_STATE,
        resident=resident,
        recompute=ALL,
    )
    more = {"fused": True} if fused else {"fused": False, "foreach": True}
    train(model, wrapped(session, **more), data, session)
    predicted = predicted_bytes(
        session,
        trace,
        accumulation=accumulation,
        fp32_master=True,
        update_copies=0.0 if fused else 1.0,
    )
    measured = session.measured().device_peak_bytes
    # what lies outside of blocks may find room in the ring of the blocks
    assert measured == pytest.approx(predicted, rel=0.015)
    session.close()


@pytest.mark.parametrize("update", Update, ids=str)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("fp32_master", [False, True])
def test_host_memory_was_predicted(
    fp32_master: bool, accumulation: int, update: Update
) -> None:
    model = stack(**SIZES, dtype=torch.bfloat16)
    session = open_session(
        model,
        fp32_master=fp32_master,
        accumulates=accumulation > 1,
        outside=HOST_STATE,
        update=update,
    )
    train(model, wrapped(session), [batches(accumulation)], session)
    session.settle()
    measured, params = session.measured(), list(model.parameters())
    used = measured.host_arena_bytes + measured.host_optimizer_bytes
    workload = Workload(accumulation, fp32_master=fp32_master, update=update)
    placements = session.plan.placements
    held = TrainedBytes(session.layout, workload)
    predicted = host_state_bytes(held, placements)
    assert used == predicted.total
    if fp32_master:
        # and what small tensors are apart from one another; the host adds where it reads
        numel = sum(p.numel() for p in params)
        bytes_each = 16 + 2 * (accumulation > 1 or update is Update.HOST)
        assert bytes_each * numel <= used <= 1.03 * bytes_each * numel
    session.close()


@pytest.mark.parametrize(
    "plan",
    [{}, {"resident": ALL, "inside": HOST_STATE}],
    ids=["paged", "state on the host"],
)
def test_gradients_of_incomplete_chunks_leave_too(plan: dict[str, Any]) -> None:
    """A parameter without gradient in every block must not hold all the others.

    Those of one block may wait until the block before it begins.
    """
    model = stack()
    for layer in model.layers:
        layer.use_extra = False
    data = [batches(2, s) for s in range(2)]
    trace = traced(model, data[0][0])
    session = open_session(model, outside=HOST_STATE, **plan)
    train(model, wrapped(session), data, session)
    waiting = max(sum(p.nbytes for p in layer.parameters()) for layer in model.layers)
    predicted = predicted_bytes(session, trace)
    assert session.measured().device_peak_bytes <= predicted + 1.1 * waiting
    session.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_arena_is_as_large_as_what_it_holds(dtype: torch.dtype) -> None:
    model = stack(width=256, inner=512, dtype=dtype)
    freeze(model, [])
    payload = sum(p.nbytes for p in model.layers.parameters())
    session = open_session(model)
    assert payload <= session.measured().host_arena_bytes <= 1.01 * payload
    session.close()


# several ranks, by hand: four trained blocks of 5000 fp32 weights, adapters, no compute

NUMEL, ADAPTERS = 5000, 300
WHOLE = 4 * NUMEL
"""Of a chunk: 4.88 pages; 6 pages in shards for 2 ranks, 8 for 4."""


def of_ranks(world: World, accumulation: int = 1, master: bool = False) -> MemoryModel:
    dtype = torch.bfloat16 if master else torch.float32
    numel = WHOLE // dtype.itemsize
    specs = [TensorSpec(f"p{b}", (numel,), dtype, 0) for b in range(4)]
    layout = Layout(
        tuple(Block(b, f"layers.{b}", (b,)) for b in range(4)),
        tuple(Chunk(b, b, True, (spec,), WHOLE) for b, spec in enumerate(specs)),
        fixed_frozen_bytes=0,
        fixed_trainable_bytes=ADAPTERS,
    )
    forward = [Segment(b, False, Work(), 0) for b in range(4)]
    backward = [
        Segment(
            b,
            True,
            Work(),
            WHOLE,
            first_peak_bytes=WHOLE,
            widened_peak_bytes=2 * WHOLE if master else WHOLE,
            gradients=((f"p{b}", WHOLE),),
        )
        for b in reversed(range(4))
    ]
    trace = Trace((*forward, *backward), (), tuple(b.name for b in layout.blocks))
    workload = Workload(
        accumulation=accumulation,
        loader_bytes=7,
        fp32_master=master,
        world=world,
    )
    return MemoryModel(layout, trace, workload, CPU)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    ("world", "shards", "slot_pages"),
    [
        (World(2, 2), 1, 0),
        (World(2, 2), 2, 6),
        (World(8, 4), 4, 8),
        (World(3, 1), 1, 0),
    ],
)
def test_device_bytes_of_several_ranks(
    world: World, shards: int, slot_pages: int, accumulation: int
) -> None:
    memory = of_ranks(world, accumulation)
    plan = make_plan(memory.layout, 1, 2, 0, 0, False, shards=shards)
    terms = memory.device(plan).terms
    assert terms["slots"] == 2 * (4096 * slot_pages or WHOLE)
    # DDP's copy of what it reduces: adapters and the resident chunk
    assert terms["gradient buckets"] == ADAPTERS + WHOLE
    # a chunk is one tensor, which one rank updates: weights, gradients and state in two
    # buffers, each up to the alignment
    assert terms["update operands"] == 2 * (20224 + 20224 + 40192)
    assert sum(terms.values()) == memory.device(plan).peak_bytes

    resident = make_plan(memory.layout, 4, 0, 0, 0, False)
    terms = memory.device(resident).terms
    assert terms["gradient buckets"] == ADAPTERS + 4 * WHOLE
    assert "update operands" not in terms
    alone = of_ranks(World(), accumulation).device(resident).terms
    assert "gradient buckets" not in alone
    assert alone["gradients"] == terms["gradients"]


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_host_bytes_of_a_node(accumulation: int, master: bool) -> None:
    memory = of_ranks(World(8, 4), accumulation, master)
    shared = make_plan(memory.layout, 0, 2, 0, 0, master, shards=4)
    whole = make_plan(memory.layout, 0, 2, 0, 0, master)
    trained = (2 if master else 1) * 4 * WHOLE
    for plan, pages in ((shared, 8), (whole, 5)):
        host = memory.host(plan).states
        assert host.host_pool == 4 * pages * 4096
        # a share of each rank is one copy, and the sums of each before they are reduced
        private = 4 * trained if accumulation > 1 else 0
        assert host.gradients == trained + private
        # fp32 for each 16-bit weight
        assert host.masters == (2 * 4 * WHOLE if master else 0)
        # and a number of steps, each at a multiple of 16
        assert host.moments == 2 * trained + 4 * 16
        assert host.loader == 4 * 7
