"""Models whose blocks are not a plain chain, and readers at awkward moments."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from core_models import checked
from torch import Tensor, nn

from axolotl.integrations.protrain.core.engine.device import CpuDevice
from axolotl.integrations.protrain.core.engine.session import Session
from axolotl.integrations.protrain.core.errors import LayoutError, TraceError
from axolotl.integrations.protrain.core.layout import build_layout, find_blocks
from axolotl.integrations.protrain.core.planner.meta import meta_copy
from axolotl.integrations.protrain.core.planner.plans import make_plan
from axolotl.integrations.protrain.core.planner.trace import trace_step

NUM_BLOCKS = 5


class IdentityBlock(nn.Module):
    """Returns its input, as a skipped layer does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x


class PlainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(torch.tanh(self.inner(x))))


class ChainModel(nn.Module):
    def __init__(self, identity: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            IdentityBlock() if i == identity else PlainBlock()
            for i in range(NUM_BLOCKS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


class Reversed(torch.autograd.Function):
    """Blocks without a graph; its own backward runs their parts again, one by one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: nn.ModuleList) -> Tensor:
        ctx.layers, ctx.inputs = layers, [x]
        for layer in layers:
            ctx.inputs.append(layer(ctx.inputs[-1]))
        return ctx.inputs[-1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        for layer, x in zip(ctx.layers[::-1], ctx.inputs[-2::-1], strict=True):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                torch.tanh(layer.inner(torch.tanh(layer.inner(x)))).backward(gradient)
            gradient = x.grad
        return gradient, None


class ReversedModel(ChainModel):
    def __init__(self, identity: int) -> None:
        super().__init__(identity)
        self.embed, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def run(self, x: Tensor) -> Tensor:
        return Reversed.apply(self.embed(x), self.layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if not x.requires_grad:
            # Reformer's anchor
            x = x.requires_grad_()
        return Reversed.apply(x, self.layers).square().sum()


class NestedModel(nn.Module):
    """Two lists whose children call each other."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.ModuleList(PlainBlock() for _ in range(2))
        self.inner = nn.ModuleList(PlainBlock() for _ in range(2))
        self.outer[0].register_forward_hook(
            lambda _module, _args, output: self.inner[1](output)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.outer[1](self.outer[0](x)).sum()


def open_session(
    model: nn.Module, n_buffer: int, n_checkpoint: int = 0, device: Any = None
) -> Session:
    layout = build_layout(model)
    plan = make_plan(layout, 0, n_buffer, 0, n_checkpoint, False)
    return Session(model, layout, plan, checked(device))


def steps(model: nn.Module, session: Session | None) -> list[float]:
    """Losses of three steps, the last of them after two updates."""
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if session is not None:
        optimizer = session.wrap_optimizer(optimizer)
    generator = torch.Generator().manual_seed(3)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 8, generator=generator))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        model.zero_grad()
    return losses


@pytest.mark.parametrize("trained", ["layers", "embed"])
def test_a_backward_that_runs_parts_of_blocks_again_is_refused(trained: str) -> None:
    """As that of Reformer, whatever trains; without gradients nothing runs again."""
    model = ReversedModel(identity=-1).requires_grad_(False)
    model.get_submodule(trained).requires_grad_()
    copied = meta_copy(model)
    x = torch.zeros(2, 8, device="meta")
    with pytest.raises(
        TraceError, match=r"ReversedModel: .* layers\.0 and 4 other blocks"
    ):
        trace_step(copied, find_blocks(copied), lambda: copied(x))
    copied.requires_grad_(False)
    copied.head.requires_grad_()
    trace_step(copied, find_blocks(copied), lambda: copied.head(copied.run(x)).sum())


def test_a_block_inside_another_block_is_refused() -> None:
    model = NestedModel()
    session = open_session(model, 2)
    with pytest.raises(LayoutError, match="protrain_auto_memory"):
        # called from within the first block, before its window closes
        model.outer[0].inner.register_forward_hook(
            lambda _module, _args, output: model.inner[0](output)
        )
        model(torch.ones(2, 8))
    session.close()


@pytest.mark.parametrize("n_checkpoint", [0, NUM_BLOCKS])
def test_backward_twice_through_one_graph(n_checkpoint: int) -> None:
    torch.manual_seed(0)
    model = ChainModel(identity=-1)
    plain = copy.deepcopy(model)
    session = open_session(model, 2, n_checkpoint)
    gradients = []
    for own in (model, plain):
        x = torch.ones(2, 8, requires_grad=True)
        loss = own(x)
        loss.backward(retain_graph=True)
        loss.backward()
        gradients.append(x.grad)
    session.close()
    assert torch.equal(*gradients)


class ReadingDevice(CpuDevice):
    """Reads the model's state whenever the session touches the device."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.truth = {k: v.clone() for k, v in model.state_dict().items()}
        self.num_reads = 0

    def read(self) -> None:
        self.num_reads += 1
        for name, value in self.model.state_dict().items():
            assert torch.equal(value, self.truth[name]), name

    def place(self, tensor: Tensor) -> Tensor:
        self.read()
        return super().place(tensor)

    def pin(self, host: Tensor) -> None:
        self.read()

    def unpin(self, host: Tensor) -> None:
        self.read()

    def synchronize(self) -> None:
        self.read()


def test_the_state_is_true_while_a_session_opens_and_closes() -> None:
    """Ctrl-C saves the model at any moment."""
    model = ChainModel(identity=-1)
    model.register_buffer("scale", torch.ones(1))
    device = ReadingDevice(model)
    session = open_session(model, 2, device=device)
    opened = device.num_reads
    assert opened > 0
    session.close()
    assert device.num_reads > opened


def test_a_session_that_cannot_open_gives_the_model_back() -> None:
    class FullDevice(CpuDevice):
        def pin(self, host: Tensor) -> None:
            raise RuntimeError("no memory to lock")

    model = ChainModel(identity=-1)
    truth = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="no memory to lock"):
        open_session(model, 2, device=FullDevice())
    for name, value in model.state_dict().items():
        assert torch.equal(value, truth[name])
    assert torch.isfinite(model(torch.ones(2, 8)))
