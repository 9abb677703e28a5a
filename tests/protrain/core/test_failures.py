"""Failures everywhere: the same training, or one error, and nothing left behind."""

from __future__ import annotations

import gc
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from core_models import (
    ALL,
    HOST_STATE,
    adamw,
    assert_same,
    batches,
    before_updates,
    hook_counts,
    make_plan,
    open_session,
    slowly,
    stack,
    train,
    twin,
    weights,
    wrapped,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from axolotl.integrations.protrain.core.engine.device import (
    CpuDevice,
    asked_bytes,
    is_shortage,
)
from axolotl.integrations.protrain.core.engine.gradients import Gradients
from axolotl.integrations.protrain.core.engine.session import Session
from axolotl.integrations.protrain.core.errors import CheckpointError, ProTrainError
from axolotl.integrations.protrain.core.layout import build_layout
from axolotl.integrations.protrain.core.types import Update
from axolotl.integrations.protrain.recovery import Shortage, StepRecovery

DATA = [batches(2, seed) for seed in range(3)]


class FaultyDevice(CpuDevice):
    """Raises where it is armed, and counts what is page-locked."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[int] = []
        self._armed: dict[str, tuple[int, BaseException]] = {}
        self.fetch = FaultyStream(self, "fetch", self.fetch)
        self.offload = FaultyStream(self, "offload", self.offload)

    def arm(self, action: str, nth: int, error: BaseException) -> None:
        """The `nth` action from now on raises."""
        self._armed[action] = (nth, error)

    def act(self, action: str) -> None:
        left, error = self._armed.pop(action, (0, None))
        if left == 1 and error is not None:
            raise error
        if error is not None:
            self._armed[action] = (left - 1, error)

    def allocate(self, nbytes: int) -> Tensor:
        self.act("allocate")
        return super().allocate(nbytes)

    def place(self, tensor: Tensor) -> Tensor:
        self.act("place")
        return super().place(tensor)

    def probe(self, nbytes: int) -> None:
        self.act("probe")

    def pin(self, host: Tensor) -> None:
        self.act("pin")
        self.pinned.append(host.data_ptr())

    def unpin(self, host: Tensor) -> None:
        self.pinned.remove(host.data_ptr())
        self.act("unpin")

    def synchronize(self) -> None:
        self.act("synchronize")


class FaultyStream:
    """A stream of a `FaultyDevice`."""

    def __init__(self, device: FaultyDevice, name: str, stream: Any) -> None:
        self._device = device
        self._name = name
        self.wait, self.fill = stream.wait, stream.fill
        self._copy = stream.copy

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._device.act(self._name)
        self._copy(target, source)

    def record(self) -> Any:
        return self

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            self._device.act(f"{self._name} event")


class FaultyOperators(TorchDispatchMode):
    """The first operators of a name raise, from inside backward if they are to."""

    def __init__(
        self, name: str, errors: list[BaseException], backward: bool = False
    ) -> None:
        super().__init__()
        self._name = name
        self._errors = errors
        self._backward = backward

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        inside = torch._C._current_graph_task_id() != -1
        if func.overloadpacket.__name__ == self._name and inside is self._backward:
            if self._errors:
                raise self._errors.pop()
        return func(*args, **(kwargs or {}))


@dataclass
class Run:
    """A session between its first step and the one that fails."""

    model: nn.Module
    device: Any
    session: Session
    optimizer: torch.optim.Optimizer
    faults: ExitStack
    loss: Callable[[Tensor], Tensor] = torch.clone

    def micro_batch(self, tokens: Tensor) -> float:
        loss = self.loss(self.model(tokens)) / len(DATA[0])
        loss.backward()
        return loss.item()

    def step(self, data: list[Tensor], after: Any) -> list[float]:
        """As the trainer's loop; `after` are the plans to go on with."""

        def lower(_: Shortage) -> None:
            if (plan := next(after, None)) is None:
                raise torch.OutOfMemoryError("no smaller plan")
            self.session.replan(make_plan(self.session.layout, **plan))

        recovery = StepRecovery(
            torch.device("cpu"),
            lambda error, phase: Shortage(phase, 0, asked_bytes(error), 0),
            lower,
        )
        numbers = [
            recovery.attempt(partial(self.micro_batch, tokens), "forward")
            for tokens in data
        ]
        clip = partial(self.session.clip_grad_norm, 0.5)
        numbers.append(recovery.attempt(clip, "update").item())
        recovery.attempt(partial(self.device.probe, 1), "update")
        self.optimizer.step()
        self.optimizer.zero_grad()
        return numbers


def no_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("Tried to allocate 4096 bytes.")


def broken() -> RuntimeError:
    return RuntimeError("on purpose")


def stopped() -> KeyboardInterrupt:
    return KeyboardInterrupt("on purpose")


Arm = Callable[[Run], None]


def device(action: str, nth: int, error: Callable[[], BaseException]) -> Arm:
    return lambda run: run.device.arm(action, nth, error())


def operator(
    name: str,
    error: Callable[[], BaseException],
    backward: bool = False,
    times: int = 1,
) -> Arm:
    def arm(run: Run) -> None:
        errors = [error() for _ in range(times)]
        run.faults.enter_context(FaultyOperators(name, errors, backward))

    return arm


def both(*arms: Arm) -> Arm:
    def arm(run: Run) -> None:
        for each in arms:
            each(run)

    return arm


def raises(error: Callable[[], BaseException]) -> Callable[..., Any]:
    def act(*_: Any) -> Any:
        raise error()

    return act


def host_update(run: Run) -> None:
    errors = iter([broken()])

    def fail() -> None:
        for error in errors:
            raise error

    run.faults.enter_context(before_updates(fail))


def forward_hook(run: Run) -> None:
    handle = run.model.layers[2].register_forward_hook(raises(broken))
    run.faults.callback(handle.remove)


def gradient_hook(run: Run) -> None:
    handle = run.model.layers[2].up.weight.register_hook(raises(broken))
    run.faults.callback(handle.remove)


def loss_function(run: Run) -> None:
    run.loss = raises(broken)


WIDTH = 48
"""What blocks save is large enough to be swapped then."""

PAGED: dict[str, Any] = {"resident": [1, 4], "outside": HOST_STATE}
ON_HOST: dict[str, Any] = {**PAGED, "update": Update.HOST}
RECOMPUTED: dict[str, Any] = {**PAGED, "recompute": ALL}
SWAPPED: dict[str, Any] = {**PAGED, "swap": [0, 2, 3], "recompute": [3]}
NOTCHED: dict[str, Any] = {"resident": [4], "recompute": [0], "outside": HOST_STATE}


@dataclass(frozen=True)
class Failure:
    """Something that goes wrong in the second step."""

    arm: Arm
    plan: dict[str, Any]


SURVIVED = {
    "forward": Failure(operator("gelu", no_memory), PAGED),
    "backward": Failure(operator("gelu_backward", no_memory, True), PAGED),
    "recompute": Failure(operator("gelu", no_memory, True), RECOMPUTED),
    "fetch": Failure(device("fetch", 2, no_memory), PAGED),
    "fetch-backward": Failure(device("fetch", 4, no_memory), PAGED),
    "offload": Failure(device("offload", 110, no_memory), PAGED),
    "swap-out": Failure(device("offload", 50, no_memory), SWAPPED),
    "swap-in": Failure(operator("empty", no_memory, True), SWAPPED),
    "swapped-backward": Failure(operator("gelu_backward", no_memory, True), SWAPPED),
    "clipping": Failure(operator("_foreach_mul_", no_memory), PAGED),
    "update": Failure(device("probe", 1, no_memory), PAGED),
    "deferred-update": Failure(operator("_fused_adamw_", no_memory), PAGED),
}

FATAL = {
    "out-of-memory-twice": Failure(operator("gelu", no_memory, times=2), PAGED),
    "no-room-for-the-notch": Failure(
        both(operator("gelu", no_memory), device("allocate", 2, no_memory)), PAGED
    ),
    "no-pin-for-the-notch": Failure(
        both(operator("gelu", no_memory), device("pin", 1, broken)), PAGED
    ),
    "fetch": Failure(device("fetch", 2, broken), PAGED),
    "fetch-backward": Failure(device("fetch", 4, broken), PAGED),
    "offload": Failure(device("offload", 110, broken), PAGED),
    "forward-hook": Failure(forward_hook, PAGED),
    "gradient-hook": Failure(gradient_hook, RECOMPUTED),
    "loss": Failure(loss_function, PAGED),
    "interrupt-forward": Failure(operator("gelu", stopped), RECOMPUTED),
    "interrupt-backward": Failure(operator("gelu_backward", stopped, True), PAGED),
    "interrupt-recompute": Failure(operator("gelu", stopped, True), RECOMPUTED),
    "interrupt-fetch": Failure(device("fetch", 3, stopped), PAGED),
    "interrupt-offload": Failure(device("offload", 110, stopped), PAGED),
    "swap-out": Failure(device("offload", 50, broken), SWAPPED),
    "swap-in": Failure(operator("empty", broken, True), SWAPPED),
    "interrupt-swap": Failure(device("offload", 50, stopped), SWAPPED),
    "interrupt-swapped": Failure(operator("gelu", stopped), SWAPPED),
    "interrupt-deferred-update": Failure(operator("_fused_adamw_", stopped), PAGED),
    "interrupt-probe": Failure(device("probe", 1, stopped), PAGED),
}

HALF_DONE = {
    "host-update": Failure(host_update, ON_HOST),
    "device-update": Failure(operator("_fused_adamw_", no_memory), PAGED),
    "interrupt-update": Failure(operator("_fused_adamw_", stopped), PAGED),
}

LOADING = {
    "slot": Failure(device("allocate", 2, no_memory), PAGED),
    "own-memory": Failure(device("allocate", 3, no_memory), PAGED),
    "weight": Failure(device("place", 5, no_memory), PAGED),
    "pin": Failure(device("pin", 2, broken), PAGED),
    "interrupt": Failure(device("place", 5, stopped), PAGED),
}

CLOSING = {
    "copies": Failure(device("synchronize", 1, broken), PAGED),
    "unpin": Failure(device("unpin", 1, broken), PAGED),
}


def caught(act: Callable[[], object]) -> str:
    """Name of what `act` raised; the exception and its frames are gone."""
    try:
        act()
    except (Exception, KeyboardInterrupt) as error:
        return type(error).__name__
    return ""


@pytest.fixture(scope="module", autouse=True)
def only_own_objects() -> Iterator[None]:
    """A census need not look through what other tests have imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def nothing_unraisable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No error of a thread, finalizer or generator goes unheard."""
    unheard: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unheard.append)
    monkeypatch.setattr(threading, "excepthook", unheard.append)
    yield
    gc.collect()
    assert not unheard


class Census:
    """What must be the same before a session and after it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = self._count()

    def _count(self) -> Any:
        # again for what autograd's nodes let go of: the first pass cannot see through them
        gc.collect()
        gc.collect()
        tensors = [thing for thing in gc.get_objects() if isinstance(thing, Tensor)]
        return {
            "hooks": hook_counts(self._model),
            "threads": set(threading.enumerate()),
            "graphs": [type(t.grad_fn) for t in tensors if t.grad_fn is not None],
            "gradients": [t.shape for t in tensors if t.is_leaf and t.grad is not None],
            "modes": torch.utils._python_dispatch._len_torch_dispatch_stack(),
            "saved": torch._C._autograd._top_saved_tensors_default_hooks(True),
        }

    def check(self, device: FaultyDevice, session: weakref.ref[Session]) -> None:
        assert self._count() == self._before
        assert not device.pinned
        assert session() is None


def opened(failure: Failure, model: nn.Module, device: FaultyDevice) -> Run:
    layout = build_layout(model)
    plan = make_plan(layout, **failure.plan)
    session = Session(model, layout, plan, device)
    optimizer = session.wrap_optimizer(adamw(model))
    return Run(model, device, session, optimizer, ExitStack())


@pytest.mark.parametrize("failure", SURVIVED.values(), ids=SURVIVED.keys())
def test_training_goes_on(failure: Failure) -> None:
    model, faulty = stack(width=WIDTH), FaultyDevice()
    plain = twin(model)
    theirs = train(plain, adamw(plain), DATA, clip=0.5)
    census = Census(model)
    run = opened(failure, model, faulty)
    plans = iter([NOTCHED])
    ours = run.step(DATA[0], plans)
    with run.faults:
        failure.arm(run)
        ours += run.step(DATA[1], plans)
    ours += run.step(DATA[2], plans)
    assert ours == theirs
    assert not list(plans), "nothing failed"
    run.session.close()
    assert_same(model.state_dict(), plain.state_dict())
    session = weakref.ref(run.session)
    del run
    census.check(faulty, session)


@pytest.mark.parametrize("failure", FATAL.values(), ids=FATAL.keys())
@pytest.mark.sampled(12)
def test_training_ends(failure: Failure) -> None:
    """With the error itself and the weights of the last step that was whole."""
    model, faulty = stack(width=WIDTH), FaultyDevice()
    plain = twin(model)
    train(plain, adamw(plain), DATA[:1], clip=0.5)
    census = Census(model)
    run = opened(failure, model, faulty)
    plans = iter([NOTCHED])
    run.step(DATA[0], plans)
    with run.faults:
        failure.arm(run)
        raised = caught(partial(run.step, DATA[1], plans))
    assert raised in ("OutOfMemoryError", "RuntimeError", "KeyboardInterrupt")
    assert caught(run.session.close) == ""
    assert caught(run.session.close) == ""
    assert_same(model.state_dict(), plain.state_dict())
    session = weakref.ref(run.session)
    del run
    census.check(faulty, session)


@pytest.mark.parametrize("failure", HALF_DONE.values(), ids=HALF_DONE.keys())
def test_an_update_ends_half_done(failure: Failure) -> None:
    """It is raised once, by the step or by what waits for it."""
    model, faulty = stack(width=WIDTH), FaultyDevice()
    census = Census(model)
    run = opened(failure, model, faulty)
    run.step(DATA[0], iter(()))
    run.session.settle()
    with run.faults:
        failure.arm(run)
        raised = [
            caught(partial(run.step, DATA[1], iter(()))),
            caught(run.session.settle),
            caught(run.session.close),
        ]
    assert len([name for name in raised if name]) == 1
    session = weakref.ref(run.session)
    del run
    census.check(faulty, session)


def test_an_update_that_is_made_again_is_waited_for() -> None:
    """Only this reads weights while the host makes what has failed before."""
    model = stack()
    plain = twin(model)
    session = open_session(model, update=Update.HOST)
    errors = [broken()]

    def fail() -> None:
        slowly()
        if errors:
            raise errors.pop()

    train(plain, adamw(plain), DATA[:1])
    with before_updates(fail):
        train(model, wrapped(session), DATA[:1], session)
        assert caught(session.settle) == "RuntimeError"
        assert_same(weights(model), weights(plain))
    session.close()


@pytest.mark.parametrize("error", [broken, no_memory])
@pytest.mark.parametrize("nth", [1, 3])
def test_an_update_that_does_not_come_home_ends_the_run(nth: int, error: Any) -> None:
    """No step is repeated; some of the chunk is old on the host, so its name is said."""
    model, faulty = stack(width=WIDTH), FaultyDevice()
    census = Census(model)
    failure = Failure(device("offload", nth, error), PAGED)
    run = opened(failure, model, faulty)
    run.step(DATA[0], iter(()))
    failure.arm(run)
    # those outside of blocks are updated with the step
    says = (
        r"layers\.0\.extra: its update could not be copied to the host .* Resume from"
    )
    with pytest.raises(ProTrainError, match=says) as raised:
        run.step(DATA[1], iter([NOTCHED]))
    assert not is_shortage(raised.value)
    del raised
    run.model.zero_grad()
    assert caught(run.session.close) == ""
    session = weakref.ref(run.session)
    del run
    census.check(faulty, session)


@pytest.mark.parametrize("failure", LOADING.values(), ids=LOADING.keys())
def test_a_model_that_could_not_be_loaded_is_untouched(failure: Failure) -> None:
    model, faulty = stack(width=WIDTH), FaultyDevice()
    before = weights(model)
    census = Census(model)
    failure.arm(Run(model, faulty, None, None, ExitStack()))
    assert caught(lambda: opened(failure, model, faulty)) != ""
    assert_same(model.state_dict(), before)
    census.check(faulty, lambda: None)
    opened(failure, model, faulty).session.close()


def test_buffers_for_gradients_that_do_not_fit(monkeypatch: Any) -> None:
    """Several ranks take them last, when all blocks have their hooks."""
    model = stack()
    hooks = hook_counts(model)
    monkeypatch.setattr(Gradients, "attach", raises(no_memory))
    with pytest.raises(torch.OutOfMemoryError):
        open_session(model, swap=[0], recompute=[1])
    assert hook_counts(model) == hooks


@pytest.mark.parametrize("failure", CLOSING.values(), ids=CLOSING.keys())
def test_closing_goes_on_after_an_error(failure: Failure) -> None:
    model, faulty = stack(width=WIDTH), FaultyDevice()
    before = hook_counts(model)
    census = Census(model)
    run = opened(failure, model, faulty)
    with run.faults:
        failure.arm(run)
        run.step(DATA[0], iter(()))
        assert caught(run.session.close) == "RuntimeError"
    assert caught(run.session.close) == ""
    assert hook_counts(model) == before
    session = weakref.ref(run.session)
    del run
    census.check(faulty, session)


def test_an_interrupted_save_changes_nothing() -> None:
    model, faulty = stack(width=WIDTH), FaultyDevice()
    census = Census(model)
    run = opened(Failure(host_update, PAGED), model, faulty)
    run.step(DATA[0], iter(()))
    before = weights(model)
    handle = model.layers[3].register_state_dict_pre_hook(raises(stopped))
    assert caught(model.state_dict) == "KeyboardInterrupt"
    handle.remove()
    run.session.close()
    assert_same(model.state_dict(), before)
    session = weakref.ref(run.session)
    del run
    census.check(faulty, session)


def test_state_that_does_not_fit_is_not_taken() -> None:
    """Training goes on as if nobody had tried to load it."""
    model, faulty = stack(width=WIDTH), FaultyDevice()
    plain = twin(model)
    theirs = train(plain, adamw(plain), DATA, clip=0.5)
    census = Census(model)
    run = opened(Failure(host_update, ON_HOST), model, faulty)
    ours = run.step(DATA[0], iter(()))
    state = run.optimizer.state_dict()
    # of a run with masters
    state["state"][0]["master"] = torch.ones(1)
    raised = caught(partial(run.optimizer.load_state_dict, state))
    assert raised == CheckpointError.__name__
    del state
    ours += run.step(DATA[1], iter(())) + run.step(DATA[2], iter(()))
    assert ours == theirs
    run.session.close()
    session = weakref.ref(run.session)
    del run
    census.check(faulty, session)


def test_a_budget_that_the_plan_exceeds() -> None:
    """One byte less than the plan takes, on a device that keeps to its capacity."""
    roomy, model = stack(inner=256), stack(inner=256)
    session = open_session(roomy, **PAGED)
    theirs = train(roomy, wrapped(session), DATA[:1], session, clip=0.5)
    peak_bytes = session.measured().device_peak_bytes
    session.close()
    small = CpuDevice(capacity_bytes=peak_bytes - 1)
    session = open_session(model, device=small, **PAGED)
    run = Run(model, small, session, wrapped(session), ExitStack())
    plans = iter([RECOMPUTED])
    with session.watch():
        assert run.step(DATA[0], plans) == theirs
    assert not list(plans)
    assert session.measured().device_peak_bytes < peak_bytes
    session.close()
    assert_same(model.state_dict(), roomy.state_dict())


def test_a_repeated_part_draws_what_it_drew() -> None:
    """Numbers that others have drawn between two parts are not drawn again."""

    def draw() -> tuple[float, float, float]:
        return torch.rand(1).item(), random.random(), float(np.random.rand())

    def step(errors: list[RuntimeError]) -> list[list[tuple[float, float, float]]]:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(7)
        drawn: list[list[tuple[float, float, float]]] = [[], [], []]

        def part(number: int) -> None:
            drawn[number].append(draw())
            if number == 2 and errors:
                raise errors.pop()

        recovery = StepRecovery(
            torch.device("cpu"),
            lambda error, phase: Shortage(phase, 0, asked_bytes(error), 0),
            lambda _: None,
        )
        for number in range(3):
            recovery.attempt(partial(part, number), "forward")
            draw()
        return [*drawn, [draw()]]

    plain = step([])
    *repeated, after = step([no_memory(), no_memory()])
    assert repeated == [3 * numbers for numbers in plain[:3]]
    assert after == plain[3]
