"""Weights read from and loaded into an open session."""

from __future__ import annotations

import pytest
import torch
from core_models import (
    ALL,
    HOST_STATE,
    adamw,
    assert_same,
    batches,
    before_updates,
    freeze,
    open_session,
    slowly,
    stack,
    train,
    twin,
    weights,
    wrapped,
)


def test_state_dict_reads_the_truth_at_any_time() -> None:
    """Between two passes the slots hold something else: the host is read."""
    model = stack()
    truth = weights(model)
    session = open_session(model, n_buffer=1)
    for order in ([0], [3, 1], list(ALL)):
        model.order = order
        model(batches(1)[0]).backward()
        assert_same(model.state_dict(), truth)
        assert torch.equal(
            model.layers[2].state_dict()["extra"], truth["layers.2.extra"]
        )
    session.close()


@pytest.mark.parametrize("part", ["", "layers", "layers.5", "layers.5.up", "head"])
def test_state_dict_waits_for_updates(part: str) -> None:
    """Also that of a part of the model."""
    model = stack()
    plain = twin(model)
    session = open_session(model, outside=HOST_STATE)
    with before_updates(slowly):
        for own, used in ((plain, adamw(plain)), (model, wrapped(session))):
            own(batches(1)[0]).backward()
            used.step()
        ours = model.get_submodule(part).state_dict()
        ours = {name: value.clone() for name, value in ours.items()}
    assert_same(ours, plain.get_submodule(part).state_dict())
    session.close()


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "full"])
def test_loading_weights_equals_plain(frozen: bool) -> None:
    """Right after a step, whose updates are still queued."""
    model = stack()
    keep = freeze(model, ["extra"]) if frozen else ()
    plain, loaded = twin(model), weights(stack(seed=9))
    session = open_session(model, keep, outside=HOST_STATE)
    numbers = []
    for own, optimizer, run in (
        (plain, adamw(plain), None),
        (model, wrapped(session), session),
    ):
        with before_updates(slowly):
            losses = train(own, optimizer, [batches(1)], run)
            own.load_state_dict(loaded)
            losses += train(own, optimizer, [batches(1, 2)], run)
        numbers.append(losses)
    assert numbers[0] == numbers[1]
    assert_same(model.state_dict(), plain.state_dict())
    session.close()


@pytest.mark.parametrize("master", [False, True], ids=["plain", "master"])
def test_loading_weights_while_gradients_add_up(master: bool) -> None:
    model = stack(dtype=torch.bfloat16)
    session = open_session(model, fp32_master=master)
    optimizer = wrapped(session)
    before = weights(model)
    for tokens in batches(3):
        model(tokens).backward()
    model.load_state_dict(before)
    optimizer.step()
    session.close()
