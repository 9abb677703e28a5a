"""Gradients on the host and their AdamW, against torch's beside it, bit for bit."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from core_models import (
    Stack,
    adamw,
    assert_same,
    batches,
    freeze,
    host_weight,
    make_plan,
    open_session,
    stack,
    train,
    twin,
    weights,
    wrapped,
)
from covering import pairwise
from torch import nn

from axolotl.integrations.protrain.core.engine import session as session_module
from axolotl.integrations.protrain.core.engine.device import CpuDevice
from axolotl.integrations.protrain.core.engine.session import Session
from axolotl.integrations.protrain.core.errors import (
    AccessError,
    CheckpointError,
    ConfigError,
)
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


def host_gradient(session: Session, optimizer: Any, model: nn.Module) -> float:
    """The norm of all gradients, wherever they are."""
    norm = session.clip_grad_norm(float("inf"))
    if norm is None:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(grads)
    return norm.item()


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


@pytest.mark.parametrize(
    ("plan", "dtype", "update"), pairwise([*product(PLANS, DTYPES, Update)])
)
@pytest.mark.sampled(5)
def test_training_is_that_of_adamw(
    plan: str, dtype: torch.dtype, update: Update
) -> None:
    model = stack(dtype=dtype)
    plain, optimizer, session, paged = pair(model, plan, update)
    data = [batches(3, seed) for seed in range(4)]
    theirs = train(plain, optimizer, data, clip=0.5)
    assert train(model, paged, data, session, clip=0.5) == theirs
    assert_same(model.state_dict(), plain.state_dict())
    assert_same_state(paged.state_dict(), optimizer.state_dict())
    session.close()
    assert_same(model.state_dict(), plain.state_dict())


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


GROUPS = {
    "lr and decay": [{"lr": 3e-2, "weight_decay": 0.5}, {"lr": 1e-3}],
    "betas": [{"betas": (0.5, 0.6)}, {"betas": (0.8, 0.99), "eps": 1e-3}],
    "amsgrad": [{"amsgrad": True}, {"amsgrad": False}],
    "maximize": [{"maximize": True}, {}],
}


@pytest.mark.parametrize("plan", ["all paged", "mixed"])
@pytest.mark.parametrize("groups", GROUPS)
def test_every_group_keeps_its_hyperparameters(groups: str, plan: str) -> None:
    def grouped(model: nn.Module) -> torch.optim.AdamW:
        params = list(model.parameters())
        # every chunk has members of both groups
        split = [params[0::2], params[1::2]]
        return torch.optim.AdamW(
            [
                {"params": members, **values}
                for members, values in zip(split, GROUPS[groups], strict=True)
            ],
            fused=True,
        )

    model = stack()
    plain = twin(model)
    session = open_session(model, **PLANS[plan])
    optimizer, paged = grouped(plain), session.wrap_optimizer(grouped(model))
    data = [batches(1, seed) for seed in range(3)]
    assert train(model, paged, data, session) == train(plain, optimizer, data)
    assert_same(model.state_dict(), plain.state_dict())
    assert_same_state(paged.state_dict(), optimizer.state_dict())
    session.close()


def test_the_scheduler_reaches_the_host() -> None:
    model = stack()
    plain, optimizer, session, paged = pair(model, "mixed")
    factors = [lambda step: 1 / (step + 1), lambda step: 0.1 * step]
    for own, used, run in ((plain, optimizer, None), (model, paged, session)):
        scheduler = torch.optim.lr_scheduler.LambdaLR(used, factors)
        for seed in range(4):
            train(own, used, [batches(1, seed)], run)
            scheduler.step()
        assert [g["lr"] for g in used.param_groups] == scheduler.get_last_lr()
    assert_same(model.state_dict(), plain.state_dict())
    assert_same_state(paged.state_dict(), optimizer.state_dict())
    session.close()


def extra_in(model: Stack, used: list[int]) -> None:
    """Let the loss depend on `extra` of these layers only."""
    for index, layer in enumerate(model.layers):
        layer.use_extra = index in used


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_parameter_that_is_never_used_stays_as_it_is(dtype: torch.dtype) -> None:
    """No gradient: neither updated nor decayed, and without state."""
    model = stack(dtype=dtype)
    extra_in(model, [0, 3])
    plain, optimizer, session, paged = pair(model, weight_decay=0.3)
    for used in (optimizer, paged):
        for group in used.param_groups:
            group["weight_decay"] = 0.3
    before = model.layers[1].extra.shape, host_weight(session, "layers.1.extra").clone()
    data = [batches(2, seed) for seed in range(3)]
    assert train(model, paged, data, session) == train(plain, optimizer, data)
    assert_same(model.state_dict(), plain.state_dict())
    assert_same_state(paged.state_dict(), optimizer.state_dict())
    assert torch.equal(host_weight(session, "layers.1.extra"), before[1])
    session.close()


USED_IN = {
    "first only": [[0, 1], [], [], []],
    "second only": [[], [0, 1], [], []],
    "alternating": [[0, 2], [1, 2], [0, 2], [1, 2]],
    "last only": [[], [], [], [0, 1, 2, 3, 4, 5]],
    "growing": [[], [0], [0, 1], [0, 1, 2]],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", USED_IN)
def test_a_parameter_that_some_micro_batches_use(case: str, dtype: torch.dtype) -> None:
    """Sums in the order of the micro-batches, whichever chunk was complete when."""
    model = stack(dtype=dtype)
    plain, optimizer, session, paged = pair(model)
    for step in range(3):
        for own in (plain, model):
            for used, tokens in zip(USED_IN[case], batches(4, step), strict=True):
                extra_in(own, used)
                own(tokens).backward()
        for used in (optimizer, paged):
            used.step()
            used.zero_grad()
    assert_same_state(paged.state_dict(), optimizer.state_dict())
    assert_same(model.state_dict(), plain.state_dict())
    session.close()


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


@pytest.mark.parametrize(
    ("first", "then", "dtype"),
    pairwise(
        [
            point
            for point in product(
                ("plain", "all paged", "mixed"), [*PLANS, "plain"], DTYPES
            )
            if point[:2] != ("plain", "plain")
        ]
    ),
)
@pytest.mark.sampled(8)
def test_state_moves_between_plans(first: str, then: str, dtype: torch.dtype) -> None:
    """Two steps under one plan, two under another, as if nothing had happened."""
    model = stack(dtype=dtype)
    reference = twin(model)
    data = [batches(2, seed) for seed in range(4)]
    train(reference, expected := adamw(reference), data)

    state: dict[str, Any] | None = None
    for plan, half in ((first, data[:2]), (then, data[2:])):
        model = twin(model)
        session = None if plan == "plain" else open_session(model, **PLANS[plan])
        optimizer = adamw(model)
        if session is not None:
            optimizer = session.wrap_optimizer(optimizer)
        if state is not None:
            optimizer.load_state_dict(state)
        train(model, optimizer, half, session)
        state = optimizer.state_dict()
        if session is not None:
            session.close()
    assert_same(model.state_dict(), reference.state_dict())
    for group in state["param_groups"]:
        group.pop("param_names", None)
    assert_same_state(state, expected.state_dict())


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


def test_masters_keep_what_bf16_would_round_away() -> None:
    """The weights are those of a fp32 run from the same start, rounded."""
    model = stack(dtype=torch.bfloat16)
    session = open_session(
        model, fp32_master=True, outside=Placement.OPTIMIZER_OFFLOADED
    )
    paged = session.wrap_optimizer(adamw(model, lr=1e-6))
    data = [batches(1, seed) for seed in range(4)]
    before = weights(model)
    train(model, paged, data, session)
    state = paged.state_dict()
    moved = 0
    names = {id(param): name for name, param in model.named_parameters()}
    params = [p for group in paged.param_groups for p in group["params"]]
    for index, param in enumerate(params):
        name, master = names[id(param)], state["state"][index]["master"]
        assert master.dtype == torch.float32
        assert torch.equal(host_weight(session, name), master.bfloat16())
        moved += not torch.equal(master, before[name].float())
    assert moved > len(before) // 2
    session.close()

    plain = adamw(stack(dtype=torch.bfloat16))
    other = open_session(stack(dtype=torch.bfloat16), update=Update.HOST)
    without = other.wrap_optimizer(adamw(other.model))
    with pytest.raises(CheckpointError, match="protrain_fp32_master: true"):
        without.load_state_dict(state)
    assert not plain.state_dict()["state"]
    other.close()


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
