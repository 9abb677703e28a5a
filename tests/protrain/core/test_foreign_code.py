"""Code of others inside a pass: the numbers of the plain run, or an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from core_models import (
    ALL,
    HOST_STATE,
    Layer,
    Stack,
    adamw,
    assert_same,
    batches,
    open_session,
    stack,
    twin,
)
from simulated import DeferredDevice
from torch import Tensor
from torch.nn.functional import gelu, normalize

from axolotl.integrations.protrain.core.errors import AccessError
from axolotl.integrations.protrain.core.types import Placement, Update

PLANS: dict[str, dict[str, Any]] = {
    "one slot": {"n_buffer": 1},
    "two slots": {"outside": HOST_STATE},
    "recompute": {"recompute": ALL},
    "swap": {"swap": ALL},
    "some stay": {"resident": (0, 3), "inside": HOST_STATE, "swap": (4,)},
    "all stay": {"resident": ALL, "inside": HOST_STATE, "outside": HOST_STATE},
}
"""On a device that computes and copies as late as events allow."""
Losses = list[Tensor]
Act = Callable[[Any, Losses], None]


def numbers(act: Act, plan: dict[str, Any] | None = None, late: bool = False) -> Any:
    """Losses and weights of three steps; `late` acts once the session is open."""
    model, losses, seen = stack(), [], []
    if not late:
        act(model, losses)
    session = None
    if plan is not None:
        session = open_session(model, device=DeferredDevice(), **plan)
    if late:
        act(model, losses)
    optimizer: Any = adamw(model)
    if session is not None:
        optimizer = session.wrap_optimizer(optimizer)
    try:
        for first, second in zip(batches(3), batches(3, seed=2), strict=True):
            for tokens in (first, second):
                losses.clear()
                # of the forward, not of what recomputes it
                loss = model(tokens) + sum(losses[: len(ALL)])
                loss.backward()
                seen.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    finally:
        if session is not None:
            session.close()
    return seen, model.state_dict()


def hooked(make: Callable[[Any, Tensor], Tensor]) -> Act:
    """A loss that a forward hook of each block makes of the block and its output."""

    def act(model: Any, losses: Losses) -> None:
        for layer in model.layers:
            layer.register_forward_hook(
                lambda own, _args, output: losses.append(make(own, output) * 0.1)
            )

    return act


LOSSES: dict[str, Act] = {
    "of a product": hooked(lambda own, out: (out @ own.up.weight.T).pow(2).mean()),
    "of a call": hooked(lambda own, out: gelu(own.up(out.detach())).pow(2).mean()),
    "of a weight": hooked(lambda own, out: own.up.weight.norm()),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "act, late",
    [
        ("of a product", False),
        ("of a product", True),
        ("of a call", False),
        ("of a weight", True),
    ],
)
def test_a_loss_that_a_hook_makes_of_its_block(act: str, plan: str, late: bool) -> None:
    """Its backward reads the block's weights before backward comes to the output."""
    losses, weights = numbers(LOSSES[act], PLANS[plan], late)
    plain_losses, plain_weights = numbers(LOSSES[act])
    assert losses == plain_losses
    assert_same(weights, plain_weights)


@dataclass(frozen=True)
class Output:
    """Has no tensors where torch looks for them."""

    hidden: Tensor


@dataclass
class Sized:
    size: int


class OddOutput(Sized):
    """Has an attribute that is no field."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__(len(hidden))
        self.hidden = hidden


class Returning(Layer):
    def forward(self, x: Tensor) -> Any:
        return self.kind(super().forward(x))


class Unwrapping(Stack):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x).hidden
        return self.loss(x, tokens)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", (Output, OddOutput))
def test_a_loss_that_a_hook_makes_of_a_block_that_returns_a_dataclass(
    kind: Any, plan: str
) -> None:
    def act(model: Any, losses: Losses) -> None:
        model.__class__ = Unwrapping
        for layer in model.layers:
            layer.__class__, layer.kind = Returning, kind
        make = hooked(lambda own, out: (out.hidden @ own.up.weight.T).pow(2).mean())
        make(model, losses)

    losses, weights = numbers(act, PLANS[plan])
    plain_losses, plain_weights = numbers(act)
    assert losses == plain_losses
    assert_same(weights, plain_weights)


def writes(name: str, hook: str) -> Act:
    @torch.no_grad()
    def write(module: Any, *_: Any) -> None:
        module.weight.div_(module.weight.norm())

    def act(model: Any, _losses: Losses) -> None:
        getattr(model.get_submodule(name), hook)(write)

    return act


def writes_the_same(model: Any, _losses: Losses) -> None:
    """As the removal of a parametrization does, from the second step on."""
    calls = count()

    @torch.no_grad()
    def write(module: Any, _args: Any) -> None:
        if next(calls) > 1:
            module.weight.mul_(1)

    model.layers[1].up.register_forward_pre_hook(write)


def limits_rows(model: Any, _losses: Losses) -> None:
    model.embed.max_norm = 1.0


def replaces(model: Any, _losses: Losses) -> None:
    """As a model does that normalises its weights, through another address."""

    def replace(module: Any, _args: Any) -> None:
        module.weight.data = normalize(module.weight.data, dim=-1)

    model.layers[1].up.register_forward_pre_hook(replace)


def writes_later(model: Any, _losses: Losses) -> None:
    """As `max_norm` does: nothing, until a row is too long."""
    calls = count()

    @torch.no_grad()
    def write(module: Any, _args: Any) -> None:
        module.weight.mul_(0.5 if next(calls) > 3 else 1)

    model.layers[1].up.register_forward_pre_hook(write)


INSIDE = {
    **{
        hook: writes("layers.1.up", f"register_{hook}")
        for hook in ("forward_pre_hook", "full_backward_hook")
    },
    "later": writes_later,
}
OUTSIDE = {"head": writes("head", "register_forward_pre_hook"), "rows": limits_rows}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("act", INSIDE)
def test_a_write_in_a_pass_to_a_weight_of_a_block(act: str, plan: str) -> None:
    """A slot would lose it; what stays on the device keeps it."""
    if plan == "all stay":
        assert numbers(INSIDE[act], PLANS[plan])[0] == numbers(INSIDE[act])[0]
        return
    with pytest.raises(AccessError, match=r"layers\.1\.up\.weight: .* in a pass"):
        numbers(INSIDE[act], PLANS[plan])


@pytest.mark.parametrize("plan", PLANS)
def test_a_weight_that_is_replaced_in_a_pass_is_refused(plan: str) -> None:
    """Its updates would go to memory that it has left."""
    with pytest.raises(AccessError, match=r"layers\.1\.up\.weight: .* in a pass"):
        numbers(replaces, PLANS[plan])


def test_a_forward_without_the_models_own_sees_a_write_too() -> None:
    model = stack()
    session = open_session(model, n_buffer=2)
    with torch.no_grad():
        model.layers[1].up.weight.mul_(0.5)
    with pytest.raises(AccessError, match=r"^layers\.1\.up\.weight: somebody changed"):
        model.forward(batches(1)[0])
    session.close()


class Inside(Layer):
    """Keeps a part of its computation of which its output has nothing."""

    def forward(self, x: Tensor) -> Tensor:
        self.inside = torch.tanh(self.up(x)).square().mean()
        return super().forward(x)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("with_output", (False, True))
@pytest.mark.parametrize("trained", ("embed", "layers"))
def test_a_loss_of_something_inside_of_blocks(
    trained: str, with_output: bool, plan: str
) -> None:
    """Backward comes into them in their middle, and no output says so."""
    model = stack()
    for layer in model.layers:
        layer.__class__ = Inside
    for name, param in model.named_parameters():
        param.requires_grad_(name.startswith(trained))
    plain = twin(model)
    how = {"n_buffer": 2, **PLANS[plan]}
    if trained == "embed":
        how |= {"n_buffer": 1, "inside": Placement.RESIDENT, "outside": HOST_STATE}
    session = open_session(model, device=DeferredDevice(), **how)
    losses = []
    for own, optimizer in (
        (model, session.wrap_optimizer(adamw(model))),
        (plain, adamw(plain)),
    ):
        for first, second in zip(batches(2), batches(2, seed=2), strict=True):
            loss: Any = 0
            for tokens in first, second:
                output = own(tokens)
                loss = loss + own.layers[3].inside + own.layers[1].inside
                loss = loss + output if with_output else loss
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    session.close()
    assert losses[:2] == losses[2:]
    assert_same(model.state_dict(), plain.state_dict())


def test_a_wrapper_of_backward_that_outlives_a_session() -> None:
    """It calls the one that looks at losses, which may not call it again."""
    plain, (tokens,) = torch.autograd.backward, batches(1)
    held: list[Any] = []
    try:
        torch.autograd.backward = partial(plain)
        for number in range(3):
            model = stack()
            session = open_session(model, n_buffer=2)
            if number == 0:
                # a wrapper that has come before goes first
                torch.autograd.backward = plain
            if number == 1:
                torch.autograd.backward = partial(torch.autograd.backward)
            held.append(torch.autograd.backward)
            model(tokens).backward()
            if number > 0:
                with pytest.raises(AccessError, match="outside of the model's forward"):
                    model.layers[2].up.weight.sum().backward()
            session.close()
        for backward in held:
            # of somebody who has taken it from a session
            backward(stack()(tokens))
    finally:
        torch.autograd.backward = plain


class Doubled(torch.autograd.Function):
    """Takes a sequence number whether or not anything needs a gradient."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_a_function_in_a_frozen_block_is_no_graph() -> None:
    model = stack()
    for name, param in model.named_parameters():
        param.requires_grad_("head" in name)
    for layer in model.layers:
        layer.register_forward_hook(lambda *given: Doubled.apply(given[2]))
    plain, session = twin(model), open_session(model, n_buffer=2)
    losses = []
    for own in model, plain:
        loss = own(batches(1)[0])
        loss.backward()
        losses.append(loss.item())
    session.close()
    assert losses[0] == losses[1]


def test_backward_begins_at_an_edge() -> None:
    model = stack()
    session = open_session(model, n_buffer=2)
    loss = model(batches(1)[0])
    torch.autograd.backward(torch.autograd.graph.get_gradient_edge(loss))
    assert model.head.weight.grad is not None
    session.close()


def test_a_write_that_changes_nothing_is_none() -> None:
    """Only this compares a weight with its host copy while that has its update still to
    come."""
    losses, weights = numbers(writes_the_same, PLANS["two slots"])
    plain_losses, plain_weights = numbers(writes_the_same)
    assert losses == plain_losses
    assert_same(weights, plain_weights)


@pytest.mark.parametrize("plan", ("two slots", "recompute", "all stay"))
@pytest.mark.parametrize("act", OUTSIDE)
def test_a_write_in_a_pass_to_a_weight_outside_of_blocks(act: str, plan: str) -> None:
    losses, weights = numbers(OUTSIDE[act], PLANS[plan])
    plain_losses, plain_weights = numbers(OUTSIDE[act])
    assert losses == plain_losses
    assert_same(weights, plain_weights)


@pytest.mark.parametrize("act", OUTSIDE)
def test_an_update_on_the_host_would_lose_a_write_in_a_pass(act: str) -> None:
    with pytest.raises(AccessError, match="this weight in a pass"):
        numbers(OUTSIDE[act], {"outside": HOST_STATE, "update": Update.HOST})


def test_a_hook_of_a_load_that_comes_too_late_is_an_error() -> None:
    """Behind ours it finds a slot; the loads of other modules do not hide its write."""
    model = stack()
    session = open_session(model, outside=HOST_STATE)

    @torch.no_grad()
    def halve(module: Any, _keys: Any) -> None:
        module.weight.mul_(0.5)

    model.layers[2].up.register_load_state_dict_post_hook(halve)
    model.load_state_dict(model.state_dict())
    with pytest.raises(AccessError, match=r"layers\.2\.up\.weight: somebody changed"):
        model(batches(1)[0])
    session.close()
