"""Chunks that stay on the device for many forwards in a row, as generation has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from core_models import (
    adamw,
    assert_same,
    batches,
    freeze,
    open_session,
    stack,
    train,
    twin,
    weights,
    wrapped,
)
from hypothesis import given, settings, strategies as st
from simulated import DeferredDevice
from test_failures import FaultyDevice

from axolotl.integrations.protrain.core.engine.session import Session
from axolotl.integrations.protrain.core.errors import AccessError
from axolotl.integrations.protrain.core.layout import ring_fits

FORWARDS = 3


def looked_at(model: Any, session: Session | None = None) -> list[float]:
    """Losses of forwards without gradients."""
    with torch.no_grad():
        return [model(tokens).item() for tokens in batches(FORWARDS, seed=9)]


def addresses(session: Session) -> list[int]:
    return [param.data_ptr() for param in session.model.parameters()]


@settings(max_examples=25)
@given(
    st.lists(st.sampled_from([16, 32]), min_size=3, max_size=6),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 63),
    st.booleans(),
)
def test_forwards_and_steps_are_those_without(
    inner: Sequence[int], n_buffer: int, frozen: bool, chosen: int, amid: bool
) -> None:
    """Only this sees a chunk that a ring of other sizes cannot take, or a step that reads
    what was bound for the forwards."""
    model = stack(num_layers=len(inner), inner=list(inner))
    if frozen:
        freeze(model, ("norm", "extra"))
    plain = twin(model)
    session = open_session(model, n_buffer=min(n_buffer, len(inner)) + frozen)
    held = [c for n, c in enumerate(session.plan.paged) if chosen >> n & 1]
    if not ring_fits(session.layout, session.plan, held):
        held = list(session.plan.paged)
    optimizer, other = wrapped(session), adamw(plain)
    before = addresses(session)
    data = [batches(2, seed) for seed in range(3)]
    for each in data:
        if amid:
            # gradients of the first micro-batch are there
            for model_ in (model, plain):
                model_.train()
                model_(each[0]).backward()
        looked_at(model)
        used = session.device.used_bytes()
        with session.holding(held), session.watch():
            assert looked_at(model) == looked_at(plain)
        assert addresses(session) == before
        assert session.device.used_bytes() == used
        rest = each[1:] if amid else each
        assert train(model, optimizer, [rest], session, clip=0.5) == train(
            plain, other, [rest], clip=0.5
        )
    session.close()
    assert_same(weights(model), weights(plain))


def test_what_is_held_is_fetched_once() -> None:
    """And given back: this is the fastest to see memory that somebody keeps."""
    session = open_session(stack())
    model = session.model
    used = session.device.used_bytes()
    with session.holding(session.plan.paged):
        looked_at(model)
        assert session.counters.num_fetches == len(session.plan.paged)
    assert session.device.used_bytes() == used
    looked_at(model)
    assert session.counters.num_fetches > 2 * len(session.plan.paged)
    with session.holding(session.plan.paged[1:4]):
        fetched = session.counters.num_fetches
        looked_at(model)
        rest = len(session.plan.paged) - 3
        # the ring brings some of them for the pass that follows
        assert session.counters.num_fetches - fetched <= 3 + FORWARDS * rest + rest
    session.close()


@pytest.mark.parametrize("before", [False, True])
def test_what_is_updated_while_it_is_held_and_what_is_shown_stay_true(
    before: bool,
) -> None:
    """Only this sees a slot that goes before its weights have left it, one that backward
    has left in use, and weights that are shown and taken from slots afterwards; or, where
    they are updated `before`, a fetch beside the copy home from another slot."""
    model = stack()
    plain = twin(model)
    session = open_session(model, device=DeferredDevice())
    data = [batches(2)]
    losses = train(model, wrapped(session), data, session)
    assert losses == train(plain, adamw(plain), data)
    if before:
        with torch.no_grad():
            model(batches(1)[0])
    for _ in range(2):
        with session.holding(session.plan.paged):
            assert looked_at(model) == looked_at(plain)
        model(batches(1)[0]).backward()
    with session.full_params():
        with session.holding(session.plan.paged):
            assert looked_at(model) == looked_at(plain)
        shown = dict(model.named_parameters())
        assert_same(shown, dict(plain.named_parameters()))
    session.close()


def test_it_is_refused_inside_of_a_pass() -> None:
    session = open_session(stack())

    def hold(*_: Any) -> None:
        with session.holding(session.plan.paged):
            pass

    handle = session.model.layers[2].register_forward_hook(hold)
    with pytest.raises(AccessError, match="between two passes"):
        session.model(batches(1)[0])
    handle.remove()
    session.close()


def test_an_error_inside_leaves_a_model_that_trains() -> None:
    model = stack()
    plain = twin(model)
    session = open_session(model)
    optimizer = wrapped(session)
    model.layers[3].raise_in_forward = ValueError("amid")
    with pytest.raises(ValueError, match="amid"), session.holding(session.plan.paged):
        looked_at(model)
    model.layers[3].raise_in_forward = None
    data = [batches(2, seed) for seed in range(2)]
    assert train(model, optimizer, data, session) == train(plain, adamw(plain), data)
    session.close()


def test_no_room_to_hold_leaves_a_model_that_trains() -> None:
    """Only this sees slots of the first chunks that nobody gives back."""
    model = stack()
    plain = twin(model)
    device = FaultyDevice()
    session = open_session(model, device=device)
    used = device.used_bytes()
    optimizer = wrapped(session)
    device.arm("allocate", 3, torch.OutOfMemoryError("no room"))
    with pytest.raises(torch.OutOfMemoryError), session.holding(session.plan.paged):
        looked_at(model)
    assert device.used_bytes() == used
    data = [batches(2, seed) for seed in range(2)]
    assert train(model, optimizer, data, session) == train(plain, adamw(plain), data)
    session.close()
