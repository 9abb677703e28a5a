"""Blocks whose forward is compiled, paged and plain: equal bits, one graph for all."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from core_models import (
    ALL,
    adamw,
    batches,
    checked,
    make_plan,
    open_session,
    train,
)
from torch import Tensor, nn

from axolotl.integrations.protrain.core.engine.session import Options, Session
from axolotl.integrations.protrain.core.layout import build_layout

AOT = {"backend": "aot_eager"}
"""Graphs, their partition and what they save as with inductor, without its kernels."""
LENGTH = 40
"""Tokens of a row, so that hidden states are large enough to be swapped."""


class Gated(nn.Module):
    """A block that saves its weights as they are, transposed and cast."""

    def __init__(self, number: int, width: int = 32) -> None:
        super().__init__()
        self.number = number
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 48), nn.Linear(48, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x))) * torch.sigmoid(x @ self.down.weight)
        return x + self.dropout(self.down(hidden))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(map(Gated, ALL))
        self.head = nn.Linear(32, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Each test compiles anew: torch keeps eight graphs of a function."""
    yield
    torch._dynamo.reset()


def compiled(model: nn.Module, keep: Any = (), how: Any = AOT, **plan: Any) -> Session:
    layout = build_layout(model, keep)
    options = Options(compiled=how)
    return Session(model, layout, make_plan(layout, **plan), checked(), options)


def test_all_blocks_share_a_graph_and_evaluation_has_another() -> None:
    graphs: list[int] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(len(inputs))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    model = Model()
    data = [batches(2, seed, LENGTH) for seed in range(2)]
    with closing(compiled(model, how={"backend": counting}, resident=(2,))) as session:
        train(model, session.wrap_optimizer(adamw(model)), data)
        assert len(graphs) == 1
        model.eval()
        with torch.no_grad():
            model(data[0][0])
            model(data[1][0])
        assert len(graphs) == 2


def test_a_copy_computes_with_its_own_weights() -> None:
    model = Model()
    (tokens,) = batches(1)
    with closing(compiled(model)) as session:
        with session.full_params():
            copied = copy.deepcopy(model)
        with torch.no_grad():
            for param in copied.parameters():
                param.zero_()
            assert copied.eval()(tokens).item() == pytest.approx(4.1589, abs=1e-4)
            assert model.eval()(tokens).item() != pytest.approx(4.1589, abs=1e-4)


@pytest.mark.parametrize("recompute", ((), ALL))
def test_a_whole_model_that_somebody_compiles_pages(recompute: Any) -> None:
    """Dynamo would read blocks without the calls around them."""
    model, losses = Model().eval(), []
    plain = copy.deepcopy(model)
    with closing(open_session(model, n_buffer=1, recompute=recompute)) as session:
        pairs = (model, session.wrap_optimizer(adamw(model))), (plain, adamw(plain))
        for each, optimizer in pairs:
            whole = torch.compile(each, **AOT)
            parts = torch.compile(
                lambda x, each=each: each.layers[1](each.layers[0](x)), **AOT
            )
            for tokens in batches(3, length=LENGTH):
                # one by one: a graph of both would sum gradients in another order
                for loss in whole(tokens), parts(each.embed(tokens)).mean():
                    loss.backward()
                    losses.append(loss.item())
                with torch.no_grad():
                    losses.append(whole(tokens).item())
                optimizer.step()
                optimizer.zero_grad()
            torch._dynamo.reset()
    assert losses[:9] == losses[9:]


def test_a_closed_session_leaves_no_compiled_forward() -> None:
    model = Model()
    own = model.layers[1].forward = lambda x: Gated.forward(model.layers[1], x)
    compiled(model).close()
    assert "forward" not in vars(model.layers[0])
    assert model.layers[1].forward is own
