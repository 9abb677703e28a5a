"""Another plan in the middle of a step: what was moves along, and the numbers stay."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from core_models import (
    ALL,
    HOST_STATE,
    assert_same,
    batches,
    freeze,
    host_weight,
    make_plan,
    open_session,
    stack,
    train,
    weights,
    wrapped,
)
from torch import nn

DATA = [batches(2, seed) for seed in range(4)]


@pytest.mark.parametrize("master", [False, True], ids=["plain", "master"])
def test_what_is_on_the_host_stays_where_it_is(master: bool) -> None:
    model = stack(dtype=torch.bfloat16)
    session = open_session(
        model, fp32_master=master, resident=[1, 4], inside=HOST_STATE
    )
    train(model, wrapped(session), DATA[:1], session)
    chunks = session.layout.chunks
    hosted = [s.name for c in chunks if c.block == 0 for s in c.tensors]
    before = {name: host_weight(session, name).data_ptr() for name in hosted}
    arena, used = session.measured().host_arena_bytes, session.device.used_bytes()
    session.replan(make_plan(session.layout, resident=[4], inside=HOST_STATE))
    assert {name: host_weight(session, name).data_ptr() for name in hosted} == before
    assert session.measured().host_arena_bytes == arena
    assert session.device.used_bytes() == used - chunks[1].nbytes
    session.close()


def test_memory_follows_the_plan() -> None:
    """Device bytes are those of a session that began with the second plan."""
    first, second = stack(), stack()
    session = open_session(first, resident=[0, 1, 3])
    train(first, wrapped(session), DATA[:1], session)
    session.replan(make_plan(session.layout, resident=[3], n_buffer=2))
    other = open_session(second, resident=[3], n_buffer=2)
    train(second, wrapped(other), DATA[:1], other)
    for each in (session, other):
        each.settle()
    ours, theirs = session.measured(), other.measured()
    assert ours.device_placed_bytes == theirs.device_placed_bytes
    assert ours.device_optimizer_bytes == theirs.device_optimizer_bytes
    assert ours.host_optimizer_bytes == theirs.host_optimizer_bytes
    assert session.device.used_bytes() == other.device.used_bytes()
    # what was counted under the first plan is still counted
    assert ours.fetched_bytes > 0 and ours.offloaded_bytes > 0
    session.close()
    other.close()


def test_adapters_may_move_only_what_is_frozen() -> None:
    model = stack()
    keep = freeze(model, ["extra", "head"])
    session = open_session(model, keep - {"head.weight"}, resident=range(6))
    optimizer = wrapped(session)
    (head,) = (c.index for c in session.layout.chunks if c.trainable)
    assert session.movable == set(range(len(session.layout.chunks))) - {head}
    with pytest.raises(ValueError, match=f"chunk {head} "):
        session.replan(make_plan(session.layout, outside=HOST_STATE))
    before = weights(model)
    session.replan(make_plan(session.layout))
    assert_same(model.state_dict(), before)
    train(model, optimizer, DATA[:1], session)
    with pytest.raises(ValueError, match="chunk 2 "):
        session.replan(make_plan(session.layout, resident=[2]))
    session.close()


def test_a_plan_that_does_not_fit_leaves_the_model(monkeypatch: Any) -> None:
    """The session cannot go on after that, but it closes."""
    model = stack()
    session = open_session(model, resident=[1])
    train(model, wrapped(session), DATA[:1], session)
    before = weights(model)

    def full(nbytes: int) -> None:
        raise torch.OutOfMemoryError("nothing left")

    monkeypatch.setattr(session.device, "allocate", full)
    with pytest.raises(torch.OutOfMemoryError):
        session.replan(make_plan(session.layout))
    session.close()
    assert_same(model.state_dict(), before)
    assert all(
        isinstance(p, nn.Parameter) and p.grad is None for p in model.parameters()
    )


def test_buffers_outside_of_slots_make_room() -> None:
    """Weights that stayed on the device page, and no slot was there before."""
    model = stack()
    session = open_session(model, resident=ALL, inside=HOST_STATE)
    train(model, wrapped(session), DATA[:1], session)
    session.settle()
    own = sum(chunk.nbytes for chunk in session.layout.chunks if chunk.pageable)
    used = session.device.used_bytes()
    session.replan(make_plan(session.layout, n_buffer=2))
    slots = sum(session.layout.chunks[index].nbytes for index in (0, 1))
    assert session.device.used_bytes() == used - own + slots
    session.close()


def test_what_was_coming_back_makes_room() -> None:
    """Backward fails after the tensors of the next block have been asked for."""
    model = stack(width=64, inner=256)
    session = open_session(model, swap=ALL)
    train(model, wrapped(session), DATA[:1], session)
    session.settle()
    used = session.device.used_bytes()
    model.layers[3].raise_in_backward = RuntimeError("on purpose")
    with session.watch():
        with pytest.raises(RuntimeError, match="on purpose") as caught:
            model(DATA[0][0]).backward()
        traceback.clear_frames(caught.tb)
    del caught
    session.forget_gradients()
    assert session.device.used_bytes() == used
    session.close()
