"""Updates on the device, as late as the weights are used: what the plain run computes.

Every optimizer, what may happen between a step and its updates, and errors and interrupts
at each of their lines.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import bitsandbytes
import pytest
import schedulefree
import torch
import torchao.optim
import transformers
from core_models import (
    ALL,
    HOST_STATE,
    adamw,
    assert_same,
    batches,
    open_session,
    stack,
    train,
    twin,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from axolotl.integrations.protrain.core.errors import ConfigError
from axolotl.integrations.protrain.core.session import Session
from axolotl.utils.optimizers.adopt import ADOPT

SIZES: dict[str, Any] = {"num_layers": 3, "width": 64, "inner": 64}
"""Matrices are large enough for 8-bit and 4-bit states."""

PAGED: dict[str, Any] = {"n_buffer": 2}
MIXED: dict[str, Any] = {
    "resident": [1],
    "inside": HOST_STATE,
    "n_buffer": 1,
    "outside": HOST_STATE,
}
STAYS: dict[str, Any] = {
    "resident": ALL[:3],
    "inside": HOST_STATE,
    "outside": HOST_STATE,
}

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def of(kind: Any, **defaults: Any) -> Make:
    return lambda groups: kind(groups, **{"lr": 1e-2, **defaults})


def small(name: str, **defaults: Any) -> Make:
    """One of bitsandbytes, with 8-bit state for small tensors too."""
    return of(getattr(bitsandbytes.optim, name), min_8bit_size=16, **defaults)


def at_a_tensor_lr(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    own = [{**group, "lr": torch.tensor(1e-2)} for group in groups]
    return torch.optim.AdamW(own, fused=True)


OPTIMIZERS: dict[str, Make] = {
    "fused": of(torch.optim.AdamW, fused=True),
    "foreach": of(torch.optim.AdamW, foreach=True),
    "amsgrad": of(torch.optim.AdamW, amsgrad=True, foreach=False),
    "tensor lr": at_a_tensor_lr,
    "Adam": of(torch.optim.Adam, weight_decay=0.1),
    "SGD": of(torch.optim.SGD),
    "momentum": of(torch.optim.SGD, momentum=0.9, nesterov=True),
    "RMSprop": of(torch.optim.RMSprop, momentum=0.9, centered=True),
    # has state before its first step
    "Adagrad": of(torch.optim.Adagrad),
    "Adadelta": of(torch.optim.Adadelta),
    "Adamax": of(torch.optim.Adamax),
    "NAdam": of(torch.optim.NAdam, decoupled_weight_decay=True),
    "RAdam": of(torch.optim.RAdam),
    "Rprop": of(torch.optim.Rprop),
    "torch Adafactor": of(torch.optim.Adafactor),
    "AdamW8bit": small("AdamW8bit"),
    "PagedAdamW8bit": small("PagedAdamW8bit"),
    "PagedAdamW32bit": small("PagedAdamW32bit"),
    "Lion8bit": small("Lion8bit"),
    "AdEMAMix8bit": small("AdEMAMix8bit"),
    "RMSprop8bit": small("RMSprop8bit"),
    "LAMB": small("LAMB8bit"),
    "Adafactor": of(
        transformers.Adafactor, relative_step=False, scale_parameter=False, beta1=0.9
    ),
    # the size of a step is that of the weights, and goes with their number
    "relative Adafactor": of(
        transformers.Adafactor, lr=None, relative_step=True, warmup_init=True
    ),
    "torchao 8-bit": of(torchao.optim.AdamW8bit),
    "torchao 4-bit": of(torchao.optim.AdamW4bit, block_size=64),
    "schedule-free": of(schedulefree.AdamWScheduleFree, warmup_steps=3),
    "ADOPT": of(ADOPT),
}


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    matrices = [p for p in params if p.ndim > 1]
    others = [p for p in params if p.ndim <= 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]


def leaves(value: Any) -> Any:
    """A state with tensors made of tensors as dicts of them."""
    if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        return {name: leaves(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {key: leaves(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [leaves(item) for item in value]
    return value


def assert_same_content(ours: Any, theirs: Any, at: str = "") -> None:
    """Equal structure, types and bits."""
    assert type(ours) is type(theirs), at
    if isinstance(ours, dict):
        assert list(ours) == list(theirs), at
        for key, value in ours.items():
            assert_same_content(value, theirs[key], f"{at}.{key}")
    elif isinstance(ours, list):
        assert len(ours) == len(theirs), at
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_same_content(*pair, f"{at}.{number}")
    elif isinstance(ours, Tensor):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), at
        assert torch.equal(ours, theirs), at
    else:
        assert ours == theirs, at


def assert_same_state(
    ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer
) -> None:
    assert_same_content(leaves(ours.state_dict()), leaves(theirs.state_dict()))


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """torchao compiles its step, which takes a minute and changes no number."""
    with torch.compiler.set_stance("force_eager"):
        yield


DATA = [batches(2, seed, length=6) for seed in range(6)]


class Run:
    """A model with its optimizer, plain or paged; `plan` is for `open_session`."""

    def __init__(
        self, model: Any, make: Make, plan: dict[str, Any] | None = None, **options: Any
    ) -> None:
        self.model = model
        self.session: Session | None = None
        if plan is not None:
            self.session = open_session(model, **plan, **options)
        self.optimizer = make(grouped(model))
        if self.session is not None:
            self.optimizer = self.session.wrap_optimizer(self.optimizer)
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def step(self, number: int, clip: float | None = 0.5) -> list[float]:
        return train(self.model, self.optimizer, [DATA[number]], self.session, clip)

    def close(self) -> None:
        if self.session is not None:
            self.session.close()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_the_plain_one(name: str) -> None:
    """Also what is saved, and goes on from there under another plan, or under none."""
    position = list(OPTIMIZERS).index(name)
    dtype = (torch.float32, torch.bfloat16)[position % 2]
    model, make = stack(dtype=dtype, **SIZES), OPTIMIZERS[name]
    plain, ours = Run(twin(model), make), Run(model, make, MIXED)
    schedules = [
        LambdaLR(run.optimizer, lambda step: 1 / (step + 1)) for run in (plain, ours)
    ]
    for number in range(3):
        assert ours.step(number) == plain.step(number)
        for schedule in schedules:
            schedule.step()
    file = io.BytesIO()
    torch.save(ours.optimizer.state_dict(), file)
    assert file.tell() < 1.2 * sum(
        x.nbytes for x in torch.utils._pytree.tree_leaves(leaves(plain.optimizer.state))
        if isinstance(x, Tensor)
    ) + 40_000
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert_same_content(leaves(saved), leaves(plain.optimizer.state_dict()))
    weights = copy.deepcopy(model.state_dict())
    ours.close()
    assert_same(model.state_dict(), plain.model.state_dict())
    others = [Run(stack(seed=7, dtype=dtype, **SIZES), make, p) for p in (STAYS, None)]
    for other in others:
        other.model.load_state_dict(weights)
        other.optimizer.load_state_dict(copy.deepcopy(saved))
    for number in (3, 4):
        expected = plain.step(number, clip=None)
        for other in others:
            assert other.step(number, clip=None) == expected
    for other in others:
        assert_same_state(other.optimizer, plain.optimizer)
        other.close()
        assert_same(other.model.state_dict(), plain.model.state_dict())
