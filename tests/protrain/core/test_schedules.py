"""No kernel ever reads wrong bytes, in whatever order things are done and copies come.

The model has no arithmetic: a kernel that a layer queues checks that it reads exactly the
bytes that its weights should have by then. Copies come at moments that a seed decides, or
as late as events allow; kernels too, where nothing is updated on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from core_models import HOST_STATE, checked, make_plan
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from simulated import DeferredDevice
from torch import Tensor, nn

from axolotl.integrations.protrain.core.engine.session import Session
from axolotl.integrations.protrain.core.layout import build_layout
from axolotl.integrations.protrain.core.types import SMALLEST_SWAP_BYTES, Update

VALUES = st.integers(1, 99).map(float)
"""Every tensor is full of one number."""


class Truth(SimpleNamespace):
    """What kernels of the model should find, and what they have found instead."""

    values: dict[str, float]
    sums: dict[str, float]
    absent: set[str]
    queue: Callable[[Callable[[], object]], object]
    wrong: list[str]

    def expect(self, what: str, tensor: Tensor, value: float) -> None:
        """Queue a kernel that reads a tensor."""

        def read() -> None:
            if not bool((tensor == value).all()):
                self.wrong.append(
                    f"{what}: {tensor.view(-1)[:4].tolist()}, not {value}"
                )

        self.queue(read)

    def fill(self, tensor: Tensor, value: float) -> None:
        # another tensor on its memory, with a version of its own: autograd takes a
        # gradient that nobody else has, and a fill may come in the middle of a hook
        self.queue(partial(_fill, tensor.data, value))


@torch.inference_mode()
def _fill(tensor: Tensor, value: float) -> None:
    tensor.fill_(value)


class Reads(torch.autograd.Function):
    """Reads the weights of a layer, saves activations, and gives gradients of weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Layer, *weights: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.value = layer.read()
        kept = torch.full((SMALLEST_SWAP_BYTES // 4,), float("nan"))
        layer.truth.fill(kept, ctx.value)
        ctx.save_for_backward(kept[8:])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer, (kept,) = ctx.layer, ctx.saved_tensors
        value = layer.read()
        layer.truth.expect("saved", kept, ctx.value)
        if layer.fails:
            raise RuntimeError("on purpose")
        given: list[Tensor | None] = []
        for number, (name, param) in enumerate(layer.named):
            given.append(None)
            # a node may give none
            if ctx.needs_input_grad[2 + number] and name not in layer.truth.absent:
                given[-1] = torch.full(param.shape, float("nan"))
                layer.truth.fill(given[-1], value)
                sums = layer.truth.sums
                sums[name] = sums.get(name, 0.0) + value
        return grad, None, *given


class Layer(nn.Module):
    """Some weights; `read` queues kernels that read all of them."""

    def __init__(self, truth: Truth, sizes: list[tuple[int, bool]], name: str) -> None:
        super().__init__()
        self.truth, self.fails, self.adds = truth, False, True
        # a block has children
        self.own = nn.ParameterList(
            nn.Parameter(torch.empty(size), requires_grad=trains)
            for size, trains in sizes
        )
        self.named = [(f"{name}.{own}", p) for own, p in self.named_parameters()]

    def read(self) -> float:
        for name, param in self.named:
            self.truth.expect(name, param.data, self.truth.values[name])
        return float(len(self.named) + len(self.truth.values))

    def forward(self, x: Tensor) -> Tensor:
        weights = [p if self.adds else p.detach() for _, p in self.named]
        return Reads.apply(x, self, *weights)


class Model(nn.Module):
    """Calls its layers in the order that it is given."""

    def __init__(self, truth: Truth, blocks: list[list[tuple[int, bool]]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Layer(truth, own, f"layers.{number}") for number, own in enumerate(blocks)
        )

    def forward(self, order: list[int]) -> Tensor:
        x = torch.ones(2, requires_grad=torch.is_grad_enabled())
        for index in order:
            x = self.layers[index](x)
        return x.sum()


TENSORS = st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=3)


class Schedules(RuleBasedStateMachine):
    """A session whose calls come in any order."""

    session: Session | None = None

    @initialize(
        data=st.data(),
        blocks=st.lists(TENSORS, min_size=1, max_size=5),
        seed=st.none() | st.integers(0, 99),
        queued=st.booleans(),
    )
    def opens(self, data: Any, blocks: Any, seed: int | None, queued: bool) -> None:
        device = DeferredDevice(seed, queue_compute=queued)
        self.draw, self.queued = data.draw, queued
        self.truth = Truth(
            values={}, sums={}, absent=set(), wrong=[], queue=lambda kernel: kernel()
        )
        if queued:
            self.truth.queue = device.launch
        self.model = Model(self.truth, blocks)
        for number, (name, param) in enumerate(self.model.named_parameters()):
            self.truth.values[name] = float(number)
            nn.init.constant_(param, number)
        layout = build_layout(self.model)
        resident = data.draw(st.sets(st.sampled_from(range(len(layout.chunks)))))
        paged = [set(b.chunks) - resident for b in layout.blocks]
        most = sum(map(len, paged))
        numbers = st.sets(st.sampled_from(range(len(blocks))))
        plan = make_plan(
            layout,
            resident,
            n_buffer=data.draw(st.integers(max(map(len, paged)), most)) if most else 0,
            recompute=data.draw(numbers),
            swap=data.draw(numbers),
            inside=HOST_STATE,
            # a kernel of an update would not be queued
            update=Update.HOST if queued else data.draw(st.sampled_from(Update)),
        )
        self.session = Session(self.model, layout, plan, checked(device))
        self.kept = self.session.host_kept
        params = [p for p in self.model.parameters() if p.requires_grad]
        plain = torch.optim.SGD(params or [torch.ones(1)], lr=1.0)
        self.optimizer = self.session.wrap_optimizer(plain)
        self.addresses = self.places()
        self.losses: list[Tensor] = []

    def places(self) -> list[int]:
        return [param.data_ptr() for param in self.model.parameters()]

    def orders(self) -> list[int]:
        """Some blocks, in any order."""
        every = range(len(self.model.layers))
        numbers = st.sampled_from(every)
        rising = st.sets(numbers, min_size=1).map(sorted)
        any_order = st.lists(numbers, min_size=1, unique=True)
        return self.draw(st.just([*every]) | rising | any_order)

    @rule()
    def goes_forward(self) -> None:
        # what is added to a sum is added at once
        adds = not (self.queued and (self.truth.sums or self.losses))
        for layer in self.model.layers:
            layer.adds = adds
        names = st.sets(st.sampled_from([*self.truth.values]), max_size=2)
        self.truth.absent = self.draw(st.just(set()) | names)
        self.losses.append(self.model(self.orders()))

    @precondition(lambda self: self.losses)
    @rule(fails=st.integers(0, 9), last=st.booleans())
    def goes_backward(self, fails: int, last: bool) -> None:
        loss = self.losses.pop(-1 if last else 0)
        if fails >= len(self.model.layers):
            loss.backward()
            return
        self.model.layers[fails].fails = True
        try:
            loss.backward()
        except RuntimeError as error:
            if "on purpose" not in str(error):
                raise
            self.losses.clear()
            self.session.forget_gradients()
            self.truth.sums.clear()
        self.model.layers[fails].fails = False

    @rule()
    def forgets_a_forward(self) -> None:
        self.losses = self.losses[1:]

    @rule(mode=st.sampled_from([torch.no_grad, torch.inference_mode]))
    def evaluates(self, mode: Any) -> None:
        order = self.orders()
        with mode():
            self.model([*order, *order])

    @rule(micro_batches=st.integers(0, 2))
    def steps(self, micro_batches: int) -> None:
        for _ in range(micro_batches):
            self.goes_forward()
            self.losses.pop().backward()
        self.losses.clear()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for name, total in self.truth.sums.items():
            self.truth.values[name] -= total
        self.truth.sums.clear()

    @rule(drops=st.booleans())
    def looks(self, drops: bool) -> None:
        with self.session.full_params():
            for name, param in self.model.named_parameters():
                total = self.truth.sums.get(name)
                if param.grad is not None or total is not None:
                    assert bool((param.grad == total).all()), name
                if name in self.kept:
                    assert bool((param == self.truth.values[name]).all()), name
            if drops:
                self.optimizer.zero_grad()
                self.truth.sums.clear()

    @rule(value=VALUES)
    def writes(self, value: float) -> None:
        self.losses.clear()
        names = self.draw(st.sets(st.sampled_from([*self.truth.values])))
        with self.session.full_params(), torch.no_grad():
            for name in names:
                self.model.get_parameter(name).fill_(value)
        self.truth.values.update(dict.fromkeys(names, value))

    @rule()
    def reads_the_state(self) -> None:
        state = self.model.state_dict()
        for name in self.kept:
            assert bool((state[name] == self.truth.values[name]).all()), name

    @rule(value=VALUES)
    def loads_the_state(self, value: float) -> None:
        self.losses.clear()
        state = self.model.state_dict()
        loaded = {n: torch.full_like(state[n], value) for n in self.kept}
        self.model.load_state_dict(loaded, strict=False)
        self.truth.values.update(dict.fromkeys(loaded, value))

    @invariant()
    def has_read_what_it_should(self) -> None:
        if self.session is not None:
            assert not self.truth.wrong, self.truth.wrong
            assert self.places() == self.addresses

    def teardown(self) -> None:
        if self.session is None:
            return
        self.losses.clear()
        self.session.close()
        assert not self.truth.wrong, self.truth.wrong
        for name, param in self.model.named_parameters():
            assert bool((param == self.truth.values[name]).all()), name


def run(examples: int, length: int) -> None:
    how = settings(
        max_examples=examples, stateful_step_count=length, report_multiple_bugs=False
    )
    run_state_machine_as_test(Schedules, settings=how)


def test_schedules() -> None:
    run(100, 25)


def test_gradients_wait_for_sums_that_a_failed_backward_has_fetched() -> None:
    """Nobody takes those sums any more, and what they are read from is written next."""
    machine = Schedules()
    drawn = iter([set(), 1, set(), set(), *4 * (set(), [0])])
    data = SimpleNamespace(draw=lambda _: next(drawn))
    machine.opens(data=data, blocks=[[(1, True)]], seed=None, queued=True)
    machine.goes_forward()
    machine.goes_backward(fails=1, last=False)
    machine.goes_forward()
    machine.goes_backward(fails=0, last=False)
    machine.goes_forward()
    machine.goes_backward(fails=1, last=False)
    machine.teardown()


@pytest.mark.full
@pytest.mark.timeout(3_600)  # ten minutes are too few on a slow machine
def test_many_schedules() -> None:
    run(3_000, 60)
