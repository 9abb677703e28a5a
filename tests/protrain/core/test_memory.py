"""Bytes on the device and on the host, against counts made from tensor sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core_models import (
    ALL,
    HOST_STATE,
    Stack,
    batches,
    freeze,
    open_session,
    stack,
    train,
    wrapped,
)
from torch import nn

from axolotl.integrations.protrain.core.cost import host_bytes, state_bytes
from axolotl.integrations.protrain.core.layout import ALIGNMENT_BYTES
from axolotl.integrations.protrain.core.session import Session
from axolotl.integrations.protrain.core.types import Placement


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


@pytest.mark.parametrize("plan", MEMORY_PLANS)
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "full"])
def test_device_peak_is_what_lies_there(frozen: bool, plan: str) -> None:
    """Counted from the model's own tensors, in the order in which they come.

    Exact where either all or no gradients stay; else what stays may be taken as there
    for the whole of backward.
    """
    model = stack(inner=INNER)
    keep = freeze(model, ["extra"]) if frozen else ()
    lowest, highest = device_peak(model, frozen, **MEMORY_PLANS[plan])
    session = open_session(model, keep, **MEMORY_PLANS[plan])
    train(model, wrapped(session), [batches(2, s) for s in range(2)], session)
    assert lowest <= session.measured().device_peak_bytes <= highest
    session.close()


def laid_out(params: list[nn.Parameter]) -> int:
    """Bytes of parameters one after the other, each at an aligned address."""
    end = 0
    for param in params:
        end += -end % ALIGNMENT_BYTES + param.nbytes
    return end


def device_peak(
    model: Stack,
    frozen: bool,
    resident: Any = (),
    n_buffer: int = 0,
    outside: Placement = Placement.RESIDENT,
) -> tuple[int, int]:
    """Weights, slots and state, and on top the most gradients at one time.

    The second number has all gradients that stay there from the start of backward.
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

    # in the order of backward: a chunk that leaves does so while the next arrives
    head_first = [[model.head.weight], [model.norm.weight], [model.norm.bias]]
    staying, on_its_way, seen = 0, 0, [0]
    pairs = [0]
    for chunk in [*head_first, *reversed(blocks), [model.embed.weight]]:
        nbytes = sum(p.nbytes for p in chunk if p.requires_grad)
        if id(chunk[0]) in on_host:
            seen.append(staying + on_its_way + nbytes)
            pairs.append(on_its_way + nbytes)
            on_its_way = nbytes
        else:
            staying += nbytes
            seen.append(staying + on_its_way)
    return standing + max(seen), standing + staying + max(pairs)


def predicted_bytes(session: Session) -> int:
    """What the plan was judged by, and AdamW's step counts: 4 bytes a parameter."""
    plan, trained = (
        session.plan,
        [p for p in session.model.parameters() if p.requires_grad],
    )
    return state_bytes(
        session.layout, plan.placements, plan.n_buffer
    ).total + optimizer_state_bytes(trained, num_moments=0)


@pytest.mark.parametrize("plan", MEMORY_PLANS)
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "full"])
def test_device_peak_was_predicted(frozen: bool, plan: str) -> None:
    model = stack(inner=INNER)
    keep = freeze(model, ["extra"]) if frozen else ()
    session = open_session(model, keep, **MEMORY_PLANS[plan])
    train(model, wrapped(session), [batches(2, s) for s in range(2)], session)
    assert session.measured().device_peak_bytes <= predicted_bytes(session)
    session.close()


@pytest.mark.parametrize("fp32_master", [False, True])
def test_host_memory_was_predicted(fp32_master: bool) -> None:
    model = stack(inner=INNER, dtype=torch.bfloat16)
    session = open_session(model, fp32_master=fp32_master, outside=HOST_STATE)
    train(model, wrapped(session), [batches(2)], session)
    measured, params = session.measured(), list(model.parameters())
    used = measured.host_arena_bytes + measured.host_optimizer_bytes
    predicted = host_bytes(session.layout, session.plan.placements, fp32_master)
    assert used <= predicted + optimizer_state_bytes(params, num_moments=0)
    session.close()


@pytest.mark.parametrize(
    "plan",
    [{}, {"resident": ALL, "inside": HOST_STATE}],
    ids=["paged", "state on the host"],
)
def test_gradients_of_incomplete_chunks_leave_too(plan: dict[str, Any]) -> None:
    """A parameter without gradient in every block must not hold all the others."""
    model = stack()
    for layer in model.layers:
        layer.use_extra = False
    session = open_session(model, outside=HOST_STATE, **plan)
    train(model, wrapped(session), [batches(1, s) for s in range(2)], session)
    assert session.measured().device_peak_bytes <= predicted_bytes(session)
    session.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_arena_is_as_large_as_what_it_holds(dtype: torch.dtype) -> None:
    model = stack(width=256, inner=512, dtype=dtype)
    freeze(model, [])
    payload = sum(p.nbytes for p in model.layers.parameters())
    session = open_session(model)
    assert payload <= session.measured().host_arena_bytes <= 1.01 * payload
    session.close()
