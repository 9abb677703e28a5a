"""Optimizers that move all weights outside of a step, where most weights are paged."""

from __future__ import annotations

from typing import Any

import pytest
import schedulefree
import torch
from core_models import Stack, batches, open_session, stack, train, twin
from simulated import DeferredDevice
from test_optimizer import PLANS

from axolotl.integrations.protrain.core.types import Update


def evaluated(model: Stack, optimizer: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """A loss and all weights of the mean, and back to where it trains."""
    optimizer.eval()
    model.eval()
    with torch.no_grad():
        loss = model(batches(1, seed=9)[0]).item()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.train()
    model.train()
    return loss, weights


@pytest.mark.parametrize("update", Update)
def test_sums_between_two_micro_batches_outlast_an_evaluation(update: Update) -> None:
    model = stack()
    plain = twin(model)
    # whose copies are on their way until somebody waits for them
    device = DeferredDevice()
    session = open_session(model, device=device, update=update, **PLANS["all paged"])
    ours = session.wrap_optimizer(schedulefree.SGDScheduleFree(model.parameters()))
    theirs = schedulefree.SGDScheduleFree(plain.parameters())
    for trained, optimizer in ((model, ours), (plain, theirs)):
        optimizer.train()
        for tokens in batches(3):
            trained(tokens).backward()
            evaluated(trained, optimizer)
        optimizer.step()
    session.settle()
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    session.close()


@pytest.mark.parametrize("update", Update)
def test_gradients_of_a_step_are_clipped_after_a_switch_too(update: Update) -> None:
    model = stack()
    plain = twin(model)
    session = open_session(model, update=update, **PLANS["all paged"])
    ours = session.wrap_optimizer(schedulefree.SGDScheduleFree(model.parameters()))
    theirs = schedulefree.SGDScheduleFree(plain.parameters())
    ours.train()
    theirs.train()
    model(batches(1)[0]).backward()
    plain(batches(1)[0]).backward()
    session.clip_grad_norm(1e-3)
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
    for optimizer in (ours, theirs):
        optimizer.step()
        optimizer.eval()
    with session.full_params():
        for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None and its.grad is not None
            assert torch.equal(mine.grad, its.grad)
    session.close()


def test_an_optimizer_without_a_switch_has_none_when_it_is_paged() -> None:
    model = stack()
    session = open_session(model, **PLANS["paged"])
    optimizer = session.wrap_optimizer(torch.optim.SGD(model.parameters()))
    assert not hasattr(optimizer, "train")
    assert not hasattr(optimizer, "eval")
    session.close()


def test_state_keeps_the_order_of_its_strides() -> None:
    """A product of transposed operands rounds otherwise than one of their copies."""
    model = stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    matrix = next(p for p in model.parameters() if p.ndim == 2)
    session = open_session(model, **PLANS["all paged"])
    ours = session.wrap_optimizer(optimizer)
    train(model, ours, [batches(1)], session)
    saved = ours.state_dict()
    number = [*model.parameters()].index(matrix)
    moment = saved["state"][number]["exp_avg"]
    # a view with gaps, as of a decomposition
    wide = torch.zeros(2 * moment.shape[1], moment.shape[0])
    saved["state"][number]["exp_avg"] = wide[::2].t().copy_(moment)
    ours.load_state_dict(saved)
    for _ in range(2):
        train(model, ours, [batches(1)], session)
        found = ours.state_dict()["state"][number]["exp_avg"]
        assert found.stride() == (1, moment.shape[0])
    session.close()
