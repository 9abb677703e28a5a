"""fp32 master weights, wherever they are updated."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import bitsandbytes
import pytest
import torch
from core_models import (
    HOST_STATE,
    adamw,
    assert_same,
    batches,
    open_session,
    stack,
    train,
    weights,
    wrapped,
)
from covering import pairwise
from hypothesis import given, strategies as st
from torch import Tensor, nn

from axolotl.integrations.protrain.core.engine.device import CpuDevice
from axolotl.integrations.protrain.core.engine.host_chunks import HostChunk, HostMemory
from axolotl.integrations.protrain.core.engine.host_pool import HostPool
from axolotl.integrations.protrain.core.engine.session import Session
from axolotl.integrations.protrain.core.errors import CheckpointError
from axolotl.integrations.protrain.core.types import Chunk, TensorSpec, Update

PLANS: dict[str, dict[str, Any]] = {
    "paged": {"n_buffer": 2, "outside": HOST_STATE},
    "one slot": {"n_buffer": 1, "outside": HOST_STATE, "recompute": (0, 2)},
    "weights stay": {
        "resident": range(6),
        "inside": HOST_STATE,
        "outside": HOST_STATE,
    },
}


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32 if tensor.itemsize == 4 else torch.int16)


@given(
    st.lists(st.integers(-(1 << 31), (1 << 31) - 1), min_size=1, max_size=40),
    st.data(),
)
def test_a_weight_that_is_written_is_its_own_master(
    patterns: list[int], data: Any
) -> None:
    """And the others keep theirs, NaN and minus zero too."""
    master = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    size = len(patterns)
    drawn = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    for dtype in (torch.bfloat16, torch.float16):
        model = nn.ParameterDict(
            {"weight": nn.Parameter(torch.zeros(size, dtype=dtype))}
        )
        (chunk,) = back_to_back_chunk(model)
        memory = HostMemory(HostPool(), CpuDevice(), has_masters=True)
        memory.weights.add([chunk])
        memory.add([chunk])
        host = HostChunk(chunk, dict(model.named_parameters()), memory)
        host.load_master(0, master)
        where = torch.tensor(drawn) & (host.weights.tensors[0] != 3.0)
        host.weights.tensors[0][where] = 3.0
        host.renew_masters([0])
        expected = torch.where(where, 3.0, master)
        assert torch.equal(bits(host.masters.tensors[0]), bits(expected))


def back_to_back_chunk(model: nn.Module) -> tuple[Chunk]:
    (name, param), *_ = model.named_parameters()
    spec = TensorSpec(name, tuple(param.shape), param.dtype, 0)
    return (Chunk(0, 0, True, (spec,), param.nbytes),)


def opened(update: Update, accumulation: int = 1, **plan: Any) -> Session:
    model = stack(dtype=torch.bfloat16)
    more = {"n_buffer": 2, "outside": HOST_STATE, **plan}
    return open_session(
        model, fp32_master=True, accumulates=accumulation > 1, update=update, **more
    )


def result(session: Session, optimizer: torch.optim.Optimizer) -> list[Any]:
    state = copy.deepcopy(optimizer.state_dict()["state"])
    session.close()
    return [weights(session.model), state]


def assert_same_result(ours: list[Any], theirs: list[Any]) -> None:
    assert_same(ours[0], theirs[0])
    assert ours[1].keys() == theirs[1].keys()
    for number, state in ours[1].items():
        assert state["master"].dtype is torch.float32
        assert_same(
            {key: state[key] for key in sorted(state)},
            {key: theirs[1][number][key] for key in sorted(state)},
        )


@pytest.mark.parametrize(
    ("plan", "accumulation", "clip"),
    pairwise([*itertools.product(PLANS, (1, 3), (None, 0.5))]),
)
@pytest.mark.sampled(3)
def test_the_device_updates_masters_as_the_host_does(
    plan: str, accumulation: int, clip: float | None
) -> None:
    data = [batches(accumulation, seed) for seed in range(4)]
    numbers, results = [], []
    for update in Update:
        session = opened(update, accumulation, **PLANS[plan])
        # so little that bf16 weights alone would often stay as they are
        optimizer = wrapped(session, lr=1e-4)
        numbers.append(train(session.model, optimizer, data, session, clip))
        results.append(result(session, optimizer))
    assert numbers[0] == numbers[1]
    assert_same_result(*results)


Make = Callable[[list[Any]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-3),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-3),
    "8 bits": lambda params: bitsandbytes.optim.AdamW8bit(
        params, 1e-3, min_8bit_size=8
    ),
    "foreach": lambda params: torch.optim.AdamW(params, lr=1e-4, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_masters_of_any_optimizer_are_those_of_a_loop_by_hand(name: str) -> None:
    plain = stack(dtype=torch.bfloat16)
    masters = [p.detach().float() for p in plain.parameters()]
    by_hand = OPTIMIZERS[name](masters)
    session = opened(Update.DEVICE)
    optimizer = session.wrap_optimizer(OPTIMIZERS[name]([*session.model.parameters()]))
    theirs = []
    for seed in range(4):
        (tokens,) = batches(1, seed)
        loss = plain(tokens)
        loss.backward()
        for master, param in zip(masters, plain.parameters(), strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        norm = torch.nn.utils.clip_grad_norm_(masters, 0.5)
        by_hand.step()
        for master, param in zip(masters, plain.parameters(), strict=True):
            param.data.copy_(master)
        theirs += [loss.item(), norm.item()]
    data = [batches(1, seed) for seed in range(4)]
    assert train(session.model, optimizer, data, session, clip=0.5) == theirs
    saved = optimizer.state_dict()["state"]
    for number, master in enumerate(masters):
        assert torch.equal(saved[number]["master"], master)
    session.close()
    assert_same(weights(session.model), weights(plain))


@pytest.mark.parametrize(
    ("before", "after"), [*itertools.product(Update, Update)], ids=str
)
@pytest.mark.sampled(2)
def test_masters_resume_wherever_they_were_updated(
    before: Update, after: Update
) -> None:
    """In one curve, from what was saved."""
    data = [batches(2, seed) for seed in range(4)]
    whole = opened(before, 2)
    optimizer = wrapped(whole, lr=1e-4)
    losses = train(whole.model, optimizer, data, whole, 0.5)
    expected = result(whole, optimizer)

    first = opened(before, 2)
    optimizer = wrapped(first, lr=1e-4)
    resumed = train(first.model, optimizer, data[:2], first, 0.5)
    saved, own = copy.deepcopy(optimizer.state_dict()), weights(first.model)
    first.close()
    second = opened(after, 2, **PLANS["weights stay"])
    optimizer = wrapped(second, lr=1e-4)
    second.model.load_state_dict(own)
    optimizer.load_state_dict(saved)
    resumed += train(second.model, optimizer, data[2:], second, 0.5)
    assert resumed == losses
    assert_same_result(result(second, optimizer), expected)


def test_masters_that_are_loaded_bring_their_weights() -> None:
    """What is on the device is fetched again."""
    session = opened(Update.DEVICE, resident=[0, 3], inside=HOST_STATE)
    optimizer = wrapped(session)
    train(session.model, optimizer, [batches(1)], session)
    saved, before = copy.deepcopy(optimizer.state_dict()), weights(session.model)
    loss = session.model(batches(1)[0]).item()
    train(session.model, optimizer, [batches(1)], session)
    optimizer.load_state_dict(saved)
    assert session.model(batches(1)[0]).item() == loss
    assert_same(weights(session.model), before)
    session.close()


def test_a_state_with_masters_needs_them_and_the_reverse() -> None:
    session = opened(Update.DEVICE)
    optimizer = wrapped(session)
    train(session.model, optimizer, [batches(1)], session)
    plain = open_session(stack(dtype=torch.bfloat16), outside=HOST_STATE)
    without = wrapped(plain)
    train(plain.model, without, [batches(1)], plain)
    with pytest.raises(CheckpointError, match="written with .*_fp32_master: true"):
        without.load_state_dict(optimizer.state_dict())
    with pytest.raises(CheckpointError, match="written without .*_fp32_master: false"):
        optimizer.load_state_dict(without.state_dict())
    session.close()
    plain.close()


def test_masters_of_weights_that_are_loaded_are_these() -> None:
    """Where a weight is loaded as it was, its master stays, too."""
    for update in Update:
        session = opened(update)
        optimizer = wrapped(session, lr=1e-4)
        train(session.model, optimizer, [batches(1)], session)
        own = copy.deepcopy(optimizer.state_dict())["state"]
        loaded = weights(stack(seed=3, dtype=torch.bfloat16))
        session.model.load_state_dict(loaded)
        saved = optimizer.state_dict()["state"]
        for number, weight in enumerate(adamw_order(session)):
            before, now = own[number]["master"], loaded[weight]
            expected = torch.where(before.bfloat16() == now, before, now.float())
            assert torch.equal(saved[number]["master"], expected)
        session.close()


def adamw_order(session: Session) -> list[str]:
    """Names of weights in the order of their groups."""
    names = {id(p): name for name, p in session.model.named_parameters()}
    groups = adamw(session.model).param_groups
    return [names[id(p)] for group in groups for p in group["params"]]
