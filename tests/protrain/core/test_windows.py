"""A block's window is open wherever its weights are read, or the run is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core_models import Layer, Stack, adamw, assert_same, batches, open_session, wrapped
from torch import Tensor, nn

from axolotl.integrations.protrain.core.errors import AccessError, ProTrainError


class Model(Stack):
    kind, how = Layer, "plain"

    def __init__(self, kind: type[Layer], how: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(16, 32) for _ in range(6))
        self.how = how

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            y = layer(x)
            x = y if self.how != "attribute" else layer.kept
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits[:, 0], tokens[:, 1])


def numbers(kind: type[Layer], how: str, hook: Any = None, **plan: Any) -> Any:
    torch.manual_seed(0)
    model = Model(kind, how)
    if hook is not None:
        hook(model)
    session = open_session(model, **plan) if plan else None
    optimizer = wrapped(session) if session else adamw(model)
    losses = []
    try:
        for tokens in batches(3):
            loss = model(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    finally:
        if session is not None:
            session.close()
    return losses, model.state_dict()


def calls_another(model: Any) -> None:
    def act(_: Tensor) -> None:
        with torch.no_grad():
            model.layers[1](torch.ones(1, 2, 16))

    model.layers[4].down.weight.register_hook(act)


def calls_the_model(model: Any) -> None:
    def act(_: Tensor) -> None:
        with torch.no_grad():
            model(batches(1)[0])

    model.layers[4].down.weight.register_hook(act)


@pytest.mark.parametrize("n_buffer", (1, 2))
@pytest.mark.parametrize("swap", ((), range(6)))
@pytest.mark.parametrize(
    ("kind", "how", "hook"),
    (
        (Layer, "plain", calls_another),
        (Layer, "plain", calls_the_model),
    ),
)
def test_windows_open_where_weights_are_read(
    kind: type[Layer], how: str, hook: Any, swap: Any, n_buffer: int
) -> None:
    plain = numbers(kind, how, hook)
    ours = numbers(kind, how, hook, n_buffer=n_buffer, swap=swap)
    assert ours[0] == plain[0]
    assert_same(ours[1], plain[1])


class Kept(Layer):
    def forward(self, x: Tensor) -> None:  # type: ignore[override]
        self.kept = super().forward(x)


def test_what_a_block_does_not_return_is_refused() -> None:
    with pytest.raises(AccessError, match="nothing that it returns"):
        numbers(Kept, "attribute", n_buffer=2)
    numbers(Kept, "attribute", n_buffer=2, recompute=range(6))


def goes_back_inside(model: Any) -> None:
    def act(_module: Any, _args: Any, _output: Tensor) -> None:
        torch.autograd.grad(
            model.kept.sum(), model.layers[1].up.weight, retain_graph=True
        )

    model.layers[1].register_forward_hook(
        lambda *given: setattr(model, "kept", given[2])
    )
    model.layers[4].norm.register_forward_hook(act)


def calls_inside(model: Any) -> None:
    def act(*_: Any) -> None:
        with torch.no_grad():
            model.layers[0](torch.ones(1, 2, 16))
            model(batches(1)[0])

    model.layers[4].norm.register_forward_hook(act)


@pytest.mark.parametrize("hook", (goes_back_inside, calls_inside))
def test_a_pass_inside_a_block_is_refused(hook: Any) -> None:
    with pytest.raises(ProTrainError, match="inside"):
        numbers(Layer, "plain", hook, n_buffer=2)
