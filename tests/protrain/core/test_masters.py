"""fp32 master weights, wherever they are updated."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

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
from hypothesis import given, strategies as st
from torch import Tensor, nn

from axolotl.integrations.protrain.core.engine.device import CpuDevice
from axolotl.integrations.protrain.core.engine.host_chunks import HostChunk, HostMemory
from axolotl.integrations.protrain.core.engine.host_pool import HostPool
from axolotl.integrations.protrain.core.engine.session import Session
from axolotl.integrations.protrain.core.errors import CheckpointError
from axolotl.integrations.protrain.core.types import Chunk, TensorSpec, Update


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


@pytest.mark.parametrize("shown", [False, True], ids=["hidden", "shown"])
@pytest.mark.parametrize("masters", [False, True], ids=["weights", "masters"])
def test_what_is_loaded_is_read_at_once(masters: bool, shown: bool) -> None:
    """By blocks that are called alone, too: what is on the device is fetched again, in a
    slot or not, and what backward has left in use."""
    session = opened(Update.DEVICE, resident=[1, 3], inside=HOST_STATE)
    model, optimizer = session.model, wrapped(session)

    @torch.no_grad()
    def read() -> list[float]:
        x = torch.ones(2, 16, dtype=torch.bfloat16)
        return [layer(x).sum().item() for layer in model.layers]

    train(model, optimizer, [batches(1)], session)
    saved, before, numbers = (
        copy.deepcopy(optimizer.state_dict()),
        weights(model),
        read(),
    )
    train(model, optimizer, [batches(1)], session)
    model(batches(1)[0]).backward()
    with session.full_params() if shown else nullcontext():
        if masters:
            optimizer.load_state_dict(saved)
        else:
            model.load_state_dict(before)
        if shown:
            assert_same(before | dict(model.named_parameters()), before)
    assert read() == numbers
    assert_same(weights(model), before)
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
