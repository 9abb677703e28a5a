"""Gradients on the host and their AdamW, against torch's beside it, bit for bit."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from core_models import (
    HOST_STATE,
    Layer,
    Stack,
    adamw,
    assert_same,
    batches,
    freeze,
    make_plan,
    open_session,
    stack,
    train,
    twin,
    weights,
    wrapped,
)
from torch import nn

from axolotl.integrations.protrain.core.engine import session as session_module
from axolotl.integrations.protrain.core.engine.device import CpuDevice
from axolotl.integrations.protrain.core.engine.session import Session
from axolotl.integrations.protrain.core.errors import AccessError, ConfigError
from axolotl.integrations.protrain.core.layout import build_layout
from axolotl.integrations.protrain.core.types import Placement, Update

DTYPES = [torch.float32, torch.bfloat16]

PLANS: dict[str, dict[str, Any]] = {
    "paged": {"n_buffer": 2},
    "all paged": {"n_buffer": 1, "outside": Placement.OPTIMIZER_OFFLOADED},
    "mixed": {
        "resident": (1, 4),
        "n_buffer": 3,
        "outside": Placement.OPTIMIZER_OFFLOADED,
    },
    "resident": {"resident": range(6)},
    "resident, host state": {
        "resident": range(6),
        "inside": Placement.OPTIMIZER_OFFLOADED,
        "outside": Placement.OPTIMIZER_OFFLOADED,
    },
}


def pair(
    model: Stack,
    plan: str = "all paged",
    update: Update = Update.DEVICE,
    **defaults: Any,
) -> tuple[Stack, torch.optim.Optimizer, Session, torch.optim.Optimizer]:
    """The plain twin with its AdamW; a session on `model` with the wrapped one."""
    plain = twin(model)
    session = open_session(model, update=update, **PLANS[plan])
    optimizer = session.wrap_optimizer(adamw(model, **defaults))
    return plain, adamw(plain, **defaults), session, optimizer


def assert_same_state(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Two optimizer states, without the names that only ours carries."""
    assert list(ours["state"]) == list(theirs["state"])
    for index, mine in ours["state"].items():
        other = theirs["state"][index]
        assert list(mine) == list(other)
        for key, value in mine.items():
            assert value.dtype == other[key].dtype
            assert torch.equal(value, other[key]), (index, key)
    for mine, other in zip(ours["param_groups"], theirs["param_groups"], strict=True):
        assert {k: v for k, v in mine.items() if k != "param_names"} == other


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_micro_batches", [1, 2, 5])
def test_gradients_add_up_like_grad(num_micro_batches: int, dtype: torch.dtype) -> None:
    """With AdamW's first step the sign would hide much: compare norms and moments."""
    model = stack(dtype=dtype)
    plain, optimizer, session, paged = pair(model)
    for tokens in batches(num_micro_batches):
        plain(tokens).backward()
        model(tokens).backward()
    grads = [p.grad for p in plain.parameters() if p.grad is not None]
    theirs = nn.utils.get_total_norm(grads).item()
    assert session.clip_grad_norm(float("inf")).item() == theirs
    with pytest.raises(AccessError):
        nn.utils.get_total_norm([model.layers[1].up.weight.grad])
    optimizer.step()
    paged.step()
    assert_same_state(paged.state_dict(), optimizer.state_dict())
    session.close()


def extra_in(model: Stack, used: list[int]) -> None:
    """Let the loss depend on `extra` of these layers only."""
    for index, layer in enumerate(model.layers):
        layer.use_extra = index in used


def test_two_graphs_in_one_micro_batch() -> None:
    model = stack()
    plain, optimizer, session, paged = pair(model)
    first, second = batches(2)
    for own, used in ((plain, optimizer), (model, paged)):
        losses = [own(first), own(second)]
        losses[1].backward()
        losses[0].backward()
        used.step()
    assert_same_state(paged.state_dict(), optimizer.state_dict())
    session.close()


@pytest.mark.parametrize("plan", ["all paged", "mixed"])
def test_zero_grad_forgets(plan: str) -> None:
    """Also what has not been sent, and what a queued update still needs stays."""
    model = stack()
    extra_in(model, [0])
    plain, optimizer, session, paged = pair(model, plan)
    unwanted, wanted = batches(2)
    for _ in range(3):
        for own, used in ((plain, optimizer), (model, paged)):
            own(unwanted).backward()
            used.zero_grad()
            own(wanted).backward()
            used.step()
            used.zero_grad()
            used.step()
    assert_same_state(paged.state_dict(), optimizer.state_dict())
    assert_same(model.state_dict(), plain.state_dict())
    session.close()


def test_zero_grad_forgets_a_clip_without_a_step() -> None:
    """A step that was skipped, for a NaN loss perhaps, must not scale the next one."""
    model = stack()
    plain, optimizer, session, paged = pair(model)
    first, second = batches(2)
    plain(first).backward()
    model(first).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
    session.clip_grad_norm(1e-3)
    for own, used in ((plain, optimizer), (model, paged)):
        used.zero_grad()
        own(second).backward()
        used.step()
    assert_same_state(paged.state_dict(), optimizer.state_dict())
    session.close()


def test_a_second_clip_sees_the_first() -> None:
    model = stack()
    plain, optimizer, session, paged = pair(model, "mixed")
    (tokens,) = batches(1)
    plain(tokens).backward()
    model(tokens).backward()
    for max_norm in (0.5, 0.1, float("inf")):
        theirs = nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        assert session.clip_grad_norm(max_norm).item() == theirs.item()
    optimizer.step()
    paged.step()
    assert_same_state(paged.state_dict(), optimizer.state_dict())
    session.close()


class Mixed(Layer):
    """A layer with weights of three dtypes, one of them complex."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 2 * width)
        self.extra = nn.Parameter(torch.randn(width, dtype=torch.complex64))
        self.use_extra = False
        self.narrow = nn.Linear(width, width, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = super().forward(x) * self.extra
        return turned.real + turned.imag + self.narrow(x.bfloat16())


@pytest.mark.parametrize("plan", ["all paged", "mixed", "resident"])
def test_a_norm_over_several_dtypes_is_that_of_plain(plan: str) -> None:
    """In torch's order of dtypes, which differs from that of the parameters."""
    model = stack()
    model.layers = nn.ModuleList(Mixed(16) for _ in range(6))
    plain, _optimizer, session, _paged = pair(model, plan)
    for tokens in batches(12):
        plain(tokens).backward()
        model(tokens).backward()
        theirs = nn.utils.clip_grad_norm_(plain.parameters(), 1e9).item()
        ours = session.clip_grad_norm(1e9)
        if ours is None:
            ours = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        assert ours.item() == theirs
    session.close()


@pytest.mark.parametrize("fused", [True, False])
def test_a_group_that_changes_between_steps(fused: bool) -> None:
    """A parameter leaves its group and comes back, another one is in two, one is empty."""
    model = stack()
    plain, session = twin(model), open_session(model, outside=HOST_STATE)
    for own in (model, plain):
        used: Any = torch.optim.AdamW(own.parameters(), lr=1e-2, fused=fused)
        used = session.wrap_optimizer(used) if own is model else used
        (group,) = used.param_groups

        def train_one(seed: int, own: Any = own, used: Any = used) -> None:
            train(own, used, [batches(1, seed)])
            own.zero_grad()

        train_one(1)
        group["params"] = [p for p in group["params"] if p is not own.head.weight]
        train_one(2)
        used.param_groups.append({**group, "params": [own.layers[1].up.weight]})
        train_one(3)
        used.add_param_group({"params": [own.head.weight], "lr": 0.1})
        group["params"] = []
        train_one(4)
    session.settle()
    assert_same(model.state_dict(), plain.state_dict())
    session.close()


def test_a_step_without_gradients_changes_nothing() -> None:
    model = stack()
    before = weights(model)
    _plain, _optimizer, session, paged = pair(model)
    paged.step()
    paged.zero_grad()
    paged.step()
    assert_same(model.state_dict(), before)
    assert paged.state_dict()["state"] == {}
    session.close()


def test_loading_does_not_tie_two_runs_together() -> None:
    model = stack()
    plain, optimizer, session, paged = pair(model)
    train(plain, optimizer, [batches(1)])
    state = optimizer.state_dict()
    before = state["state"][0]["exp_avg"].clone()
    paged.load_state_dict(state)
    train(model, paged, [batches(1, 5)], session)
    session.settle()
    assert torch.equal(state["state"][0]["exp_avg"], before)
    session.close()


def test_moments_of_another_precision_are_converted() -> None:
    """As `Optimizer.load_state_dict` does: moments follow their parameter."""
    source = stack()
    train(source, wide := adamw(source), [batches(1)])
    model = stack(dtype=torch.bfloat16)
    plain, optimizer, session, paged = pair(model)
    optimizer.load_state_dict(wide.state_dict())
    paged.load_state_dict(wide.state_dict())
    data = [batches(1, 7)]
    assert train(model, paged, data, session) == train(plain, optimizer, data)
    assert_same_state(paged.state_dict(), optimizer.state_dict())
    session.close()


def test_adapters_keep_the_plain_optimizer() -> None:
    model = stack()
    session = open_session(model, keep=freeze(model))
    plain = adamw(model)
    assert session.wrap_optimizer(plain) is plain
    assert session.clip_grad_norm(1.0) is None
    session.close()


@pytest.mark.parametrize("update", Update, ids=str)
def test_the_wrapped_optimizer_is_an_optimizer(update: Update) -> None:
    model = stack(num_layers=2)
    *_, session, paged = pair(model, "paged", update)
    assert isinstance(paged, torch.optim.Optimizer)
    # what looks for the class of the plain run finds it
    assert isinstance(paged, torch.optim.AdamW)
    steps: list[str] = []
    paged.register_step_pre_hook(lambda *_: steps.append("before"))
    paged.register_step_post_hook(lambda *_: steps.append("after"))
    train(model, paged, [batches(1)], session)
    assert steps == ["before", "after"]
    with pytest.raises(ConfigError, match="closure"):
        paged.step(lambda: 0.0)
    session.close()


CORE = str(Path(session_module.__file__).parent)


def lines_of_a_step(num_layers: int, plan: dict[str, Any]) -> Counter[str]:
    """How many lines each function of core runs, in steps whose micro-batches use all
    blocks or the upper half."""
    model = stack(num_layers=num_layers)
    layout = build_layout(model)
    session = Session(model, layout, make_plan(layout, **plan), CpuDevice())
    optimizer = wrapped(session)
    counted: Counter[str] = Counter()

    def line(frame: FrameType, event: str, _: Any) -> Any:
        counted[f"{Path(frame.f_code.co_filename).name} {frame.f_code.co_name}"] += 1
        return line

    def call(frame: FrameType, *_: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(CORE) else None

    for order in (range(num_layers), range(num_layers // 2, num_layers)):
        model.order = order
        train(model, optimizer, [batches(1)], session)
        sys.settrace(call)
        train(model, optimizer, [batches(2)])
        sys.settrace(None)
    session.close()
    return counted


LINEAR = (
    {"outside": Placement.OPTIMIZER_OFFLOADED, "swap": (0, 2)},
    {"update": Update.HOST},
)
WHOLE = {
    "recorded_step.py replay",
    "recorded_step.py <listcomp>",
    "recorded_step.py <dictcomp>",
}
"""A recorded step has all parameters in its groups: their places there count."""


@pytest.mark.parametrize("plan", LINEAR, ids=str)
def test_a_step_does_as_much_for_each_block(plan: dict[str, Any]) -> None:
    few, more, many = (lines_of_a_step(n, plan) for n in (6, 12, 24))
    # what grows with the square of their number grows four times as much
    grown = {
        name: (more[name] - few[name], many[name] - more[name])
        for name in many.keys() - WHOLE
    }
    assert not {n: by for n, by in grown.items() if by[1] > 2.5 * by[0] + 50}
    assert many["apply.py prefetch"] and many["step.py before_block"] > 24


class Completing(torch.optim.AdamW):
    """Notes in a group that it has made state, as optimi's do, by which it goes on."""

    def step(self, closure: Any = None) -> Any:
        before = set(self.state)
        super().step(closure)
        made = set(self.state) - before
        for group in self.param_groups:
            if not made.isdisjoint(group["params"]):
                group["kahan_sum"] = True


Completing.__module__, Completing.__name__ = "optimi", "AdamW"


class Coupled(torch.optim.AdamW):
    """Somebody's own, from a module whose name begins as that of a package does."""


Coupled.__module__, Coupled.__name__ = "optimizers", "AdamW"


def test_a_name_that_begins_alike_is_no_known_optimizer() -> None:
    """It may look at all parameters together, here one chunk after the other."""
    model = stack()
    session = open_session(model, outside=HOST_STATE)
    with pytest.raises(
        ConfigError, match="^optimizer: optimizers.Coupled is not known"
    ):
        session.wrap_optimizer(Coupled(model.parameters()))
    session.close()


def test_a_clip_counts_under_any_default_dtype() -> None:
    """Rounded to bf16 this coefficient would be 1."""
    model = stack()
    plain, optimizer, session, paged = pair(model, update=Update.HOST)
    (tokens,) = batches(1)
    for own in plain, model:
        own(tokens).backward()
    norm = session.clip_grad_norm(float("inf")).item()
    nn.utils.clip_grad_norm_(plain.parameters(), 0.9995 * norm)
    session.clip_grad_norm(0.9995 * norm)
    optimizer.step()
    torch.set_default_dtype(torch.bfloat16)
    try:
        paged.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same_state(paged.state_dict(), optimizer.state_dict())
    session.close()


def test_saved_groups_are_those_after_updates_that_are_due() -> None:
    """Torch reads them before the state, which applies the updates of blocks; that of what
    lies outside of them may have been made before."""
    saved = []
    for pages in (True, False):
        model = stack()
        blocks = list(model.layers.parameters())
        outside = [p for p in model.parameters() if all(p is not b for b in blocks)]
        groups = [{"params": params, "kahan_sum": None} for params in (outside, blocks)]
        optimizer: torch.optim.Optimizer = Completing(groups)
        session = open_session(model, outside=HOST_STATE) if pages else None
        if session is not None:
            optimizer = session.wrap_optimizer(optimizer)
        train(model, optimizer, [batches(1)], session)
        saved.append(optimizer.state_dict()["param_groups"])
        if session is not None:
            session.close()
    assert saved[0] == saved[1] and all(group["kahan_sum"] for group in saved[1])
