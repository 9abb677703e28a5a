"""Repeat a step that ran out of device memory from its start, under a smaller plan.

All that a step does runs through `StepRecovery.attempt`, which remembers it: a smaller plan
is taken, and each part of the step is done again, with the random numbers it began with.

# Note [What is not done again]

Callbacks and other code of users ran between two parts of the step, and run once. A step is
repeated only where the repeated parts come to the same numbers without them. Random numbers
that they drew do no harm. Weights and gradients are shown to them in `TrainingRun.weights`,
which compares both before and after; which weights train is compared as parts begin. Hooks
on modules and parameters see a repeated part twice, and what they keep is not known, so
those of packages that are not in `_STATELESS` are refused. What a forward does to a buffer
is not undone. Room for the update is looked for before the last callbacks that change
gradients (`on_pre_optimizer_step`): after them nothing is repeated.

Several ranks repeat nothing. The error of the one that has no room is raised on all of them
(`Alarm`), and the next run plans with what was missing.
"""

from __future__ import annotations

import gc
import json
import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Trainer
from xxhash import xxh3_64_intdigest

from .args import ProTrainArgs
from .core.engine.device import asked_bytes, is_shortage
from .core.engine.ranks import Alarm, Ranks
from .core.engine.session import Session
from .core.errors import BudgetError, DeviceMemoryError
from .core.planner.memory import GENERATION
from .core.planner.planner import Forecast, Planner
from .core.sizes import format_bytes
from .report.run import RunReport
from .versions import COUNTERS

Result = TypeVar("Result")
Rewind = Callable[[], object]

MAX_REPEATS = 3
"""Repeats of one step: what else uses the device may take more meanwhile."""
_PLAIN = bool, int, float, str
_REPEATED = "the step was under a smaller plan already"
_STATELESS = frozenset(
    "accelerate axolotl bitsandbytes liger_kernel peft torch transformers trl".split()
)
"""Packages whose hooks keep nothing from one forward for another."""
_MODULE_HOOKS = (
    "_forward_pre_hooks _forward_hooks _backward_pre_hooks _backward_hooks".split()
)
_GLOBAL_HOOKS = tuple(f"_global{kind}" for kind in _MODULE_HOOKS)
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@dataclass(frozen=True)
class Shortage:
    """A device that had no room in forward, backward, update or outside a step.

    Attributes:
        in_use_bytes: Allocated at that moment, as a prediction counts it.
        asked_bytes: What could not be allocated; 0 if the error does not say.
        predicted_bytes: The plan's peak.
        rank: That had no room; None if it is alone.
    """

    phase: str
    in_use_bytes: int
    asked_bytes: int
    predicted_bytes: int
    rank: int | None = None

    @property
    def unplanned_bytes(self) -> int:
        """Beyond the prediction; negative where others took the memory."""
        return self.in_use_bytes + self.asked_bytes - self.predicted_bytes

    def __str__(self) -> str:
        why = "less than the plan may take, so others use the device too"
        if self.unplanned_bytes > 0:
            why = f"{format_bytes(self.unplanned_bytes)} were not planned"
        where = "" if self.rank is None else f" on rank {self.rank}"
        return (
            f"out of device memory in {self.phase}{where}: {format_bytes(self.in_use_bytes)} "
            f"in use and {format_bytes(self.asked_bytes)} asked for, "
            f"{format_bytes(self.predicted_bytes)} predicted at most; {why}"
        )


class Run(Protocol):
    """A training run, as far as a recovery asks it."""

    args: ProTrainArgs
    log: Any
    session: Session | None
    ranks: Ranks
    alarm: Alarm | None

    def replan(self, forecast: Forecast) -> None:
        """Go on with the step under another plan."""


class ServedStep:
    """Stands for the trainer in a step of the service: it is counted and scales nothing."""

    def __init__(self, steps_before: int) -> None:
        self.state = SimpleNamespace(global_step=steps_before)
        self.accelerator = SimpleNamespace(scaler=None)


class StepRecovery:
    """Remembers one optimizer step, which draws random numbers of host and device.

    Args:
        device: Where it runs.
        measure: What an error of a phase says, while its frames hold their tensors.
        lower: Takes a smaller plan, or raises where the step cannot be repeated.
    """

    def __init__(
        self,
        device: torch.device,
        measure: Callable[[RuntimeError, str], Shortage],
        lower: Callable[[Shortage], None],
    ) -> None:
        self._device, self._measure, self._lower = device, measure, lower
        self.begin(None)

    def begin(self, trainer: Trainer | ServedStep | None) -> None:
        """A step of `trainer` begins, or nothing of one is needed any longer."""
        self._trainer = trainer
        self._done: list[tuple[Callable[[], Any], list[Rewind]]] = []

    def attempt(
        self, act: Callable[[], Result], phase: str, counts: bool = True
    ) -> Result:
        """`act`'s result, if need be under a smaller plan, which may fail as well.

        Where `act` `counts` nothing, no counter is copied, which takes memory.
        """
        rewinds = _rewinds(self._device, self._trainer if counts else None)
        before: list[tuple[Callable[[], Any], list[Rewind]]] = []
        again = False
        while True:
            try:
                for done, start in before:
                    _call_all(start)
                    done()
                if again:
                    _call_all(rewinds)
                result = act()
            except RuntimeError as error:
                if not is_shortage(error):
                    raise
                shortage = self._measure(error, phase)
                traceback.clear_frames(error.__traceback__)
            else:
                self._done.append((act, rewinds))
                return result
            self._let_go()
            self._lower(shortage)
            before, again = self._done, True

    def _let_go(self) -> None:
        """The error is gone, and with it the tensors that its traceback held."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


class Recovery(StepRecovery):
    """Repeats a step of a run whose device had no room, or says why not.

    Args:
        run: Whose session goes on under a smaller plan.
        report: Its forecast is of the plan that runs.
        device: Where it trains.
        planner: Makes another plan; the first rank's.

    Attributes:
        unplanned_bytes: The most that an attempt wanted beyond its trace; 0 for none.
        has_gradients: Whether the step began with some that nobody can make again, as
            after an epoch of unknown length that has ended between two updates.
    """

    def __init__(
        self,
        run: Run,
        report: RunReport,
        device: torch.device,
        planner: Planner | None,
    ) -> None:
        self._run, self._report, self._planner = run, report, planner
        self._repeats, self._updating = 0, False
        self.unplanned_bytes = 0
        super().__init__(device, self._shortage, self._smaller)

    def begin(
        self, trainer: Trainer | ServedStep | None, has_gradients: bool = False
    ) -> None:
        """An optimizer step begins, or the last one has ended."""
        super().begin(trainer)
        self.has_gradients = has_gradients
        self._changed = ""
        self._updated = False
        self._trained: list[bool] = []
        self._set: list[Any] = []
        self._buffers: list[tuple[str, Tensor, int]] = []
        self._step = trainer.state.global_step + 1 if trainer else 0
        if trainer is not None:
            self._repeats = 0

    def attempt(
        self, act: Callable[[], Result], phase: str, counts: bool = True
    ) -> Result:
        """See `StepRecovery.attempt`; several ranks repeat nothing."""
        session = self._run.session
        if session is not None and not self._is_shared:
            model = session.model
            trained = [param.requires_grad for param in model.parameters()]
            if not self._done:
                buffers = model.named_buffers()
                self._buffers = [(name, b, b._version) for name, b in buffers]
            elif trained != self._trained:
                self._changed = "which weights train was changed"
            elif phase == "forward" and not self._changed:
                now = _settings(model)
                pairs = zip(self._set, now, strict=False)
                other = next((new for old, new in pairs if old != new), None)
                if other is not None:
                    of = ".".join(str(part) for part in other[:3] if part != "")
                    self._changed = f"{of} was changed"
            self._trained = trained
            result = super().attempt(act, phase, counts)
            self._set = _settings(model) if phase == "forward" else []
            return result
        return super().attempt(act, phase, counts)

    @contextmanager
    def showing(self, whom: str) -> Iterator[None]:
        """Weights and gradients are plain tensors inside, and shown to somebody; see Note
        [What is not done again]."""
        if self._run.session is None or not self._done or self._is_shared:
            yield
            return
        params = [*self._run.session.model.parameters()]
        before = [*map(_marks, params)]
        yield
        if [*map(_marks, params)] != before:
            self.changed(whom)

    def changed(self, whom: str) -> None:
        """Repeat no step of which a part came before somebody changed weights."""
        if self._done:
            self._changed = f"{whom} changed weights or gradients"

    def probe_update(self) -> None:
        """Look for the room of an update while its step can be repeated."""
        self.attempt(self._probe_update, "update", counts=False)

    def guard(self, optimizer: torch.optim.Optimizer) -> list[RemovableHandle]:
        """Know when an update changes weights: nothing is repeated from then on."""

        def before(*_: Any) -> None:
            self._updating = self._updated = True

        def after(*_: Any) -> None:
            self._updating = False

        before_step = optimizer.register_step_pre_hook(before)
        return [before_step, optimizer.register_step_post_hook(after)]

    def explain(self, error: RuntimeError) -> None:
        """Raise the shortage that an error means, of this rank or of another."""
        self.raise_heard()
        if not is_shortage(error):
            return
        phase, why = "forward", _REPEATED
        if self._updating:
            phase, why = "update", "the update was half done, so it cannot be repeated"
        elif not self._repeats:
            phase = "what is no training step" if self._run.session else "loading"
            why = "only forward, backward and update can be repeated"
        shortage = self._shortage(error, phase)
        # they hold what the device has no room for
        traceback.clear_frames(error.__traceback__)
        self._refuse(shortage, why, error)

    def raise_heard(self) -> None:
        """Raise the shortage of another rank: what this one waited for went with it."""
        alarm = self._run.alarm
        if alarm is not None and alarm.words is not None:
            raise DeviceMemoryError(json.loads(alarm.words)["error"]) from None

    @property
    def _is_shared(self) -> bool:
        return self._run.ranks.world.size > 1

    def _probe_update(self) -> None:
        session = self._run.session
        assert session is not None
        timeline = self._report.forecast.device.timeline
        update = next(point for point in timeline if point.phase == "update")
        made = session.device_optimizer_bytes()
        session.device.probe(max(update.moments - made, 0) + update.working)

    def _shortage(self, error: RuntimeError, phase: str) -> Shortage:
        """Read what an error says; `forward` may have been backward too."""
        ran = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
        if phase == "forward" and torch.autograd.backward.__code__ in ran:
            phase = "backward"
        session, forecast = self._run.session, self._report.forecast
        in_use = session.device.used_bytes() if session else 0
        in_use += forecast.hardware.unseen_bytes
        phases = forecast.device.phases
        # whatever else has room is for what is sampled
        peak_bytes = max(n for name, n in phases.items() if name != GENERATION)
        rank = self._run.ranks.rank if self._is_shared else None
        shortage = Shortage(phase, in_use, asked_bytes(error), peak_bytes, rank)
        self.unplanned_bytes = max(self.unplanned_bytes, shortage.unplanned_bytes)
        return shortage

    def _smaller(self, shortage: Shortage) -> None:
        """Take the fastest plan that has room for what was missing, if there is one."""
        if why := self._obstacle():
            self._refuse(shortage, why)
        session = self._run.session
        assert session is not None
        all_resident = self._run.args.protrain_force_all_persistent
        assert self._planner is not None
        try:
            forecast = self._planner.replan(
                self._report.forecast.plan,
                shortage.unplanned_bytes,
                shortage.asked_bytes,
                frozenset() if all_resident else session.movable,
            )
        except BudgetError as error:
            self._refuse(shortage, "no smaller plan leaves that room", error)
        self._repeats += 1
        self._run.replan(forecast)
        self._report.replanned(self._step, asdict(shortage), forecast)
        line = f"Step {self._step}: {shortage}. It is repeated under a smaller plan."
        self._run.log.warning(f"{line}\n{self._report.table()}")
        self._report.notes.append(line)

    def _obstacle(self) -> str:
        """Why the step cannot be repeated; empty if it can."""
        if self._is_shared:
            return "several ranks do not repeat a step"
        if self._repeats == MAX_REPEATS:
            return f"{_REPEATED}, {MAX_REPEATS} times"
        if self.has_gradients:
            return "it began with gradients of an earlier epoch, which cannot be made again"
        if self._updated:
            return "its weights were updated already, so it cannot be repeated"
        assert self._run.session is not None
        hook = _foreign_hook(self._run.session.model)
        changed = [
            f"buffer {n}" for n, b, version in self._buffers if b._version != version
        ]
        why = self._changed
        if not why and changed:
            why = f"a forward changed {changed[0]}"
        elif not why and hook:
            why = f"a hook ({hook}) may have changed something"
        elif not why and (own := _foreign_loss(self._trainer)):
            why = f"{own} may have changed something"
        return f"{why} in it, which is not done again or undone" if why else ""

    def _refuse(
        self, shortage: Shortage, why: str, cause: Exception | None = None
    ) -> NoReturn:
        forecast, alarm = self._report.forecast, self._run.alarm
        largest, nbytes = max(forecast.device.terms.items(), key=lambda term: term[1])
        missing = max(shortage.unplanned_bytes, shortage.asked_bytes, 1)
        where = f"Step {self._step}" if self._step else "Outside the steps"
        learns = self._run.args.protrain_learn_peak and shortage.unplanned_bytes > 0
        lesson = (
            "The next run plans with what was missing. Else set" if learns else "Set"
        )
        error = (
            f"protrain_capacity_bytes: {where}: {shortage}, and {why}. The largest part "
            f"is {largest}, {format_bytes(nbytes)}. {lesson} protrain_capacity_bytes "
            f"to {forecast.budget.device_bytes - missing:,} or less, or lower "
            "micro_batch_size, sequence_len or the adapter's rank."
        )
        if alarm is not None:
            said = {"error": error, "unplanned_bytes": shortage.unplanned_bytes}
            error = json.loads(alarm.tell(json.dumps(said)))["error"]
        raise DeviceMemoryError(error) from cause


def _call_all(rewinds: list[Rewind]) -> None:
    for rewind in rewinds:
        rewind()


def _marks(param: nn.Parameter) -> tuple[object, ...]:
    """Marks by which a change of a weight that trains, or of a gradient, is seen."""
    grad = param.grad
    weight = _digest(param) if param.requires_grad else None
    return (
        param.requires_grad,
        param._version,
        weight,
        None if grad is None else _digest(grad),
    )


def _digest(tensor: Tensor) -> int:
    # not a version: writes through `.data` leave none
    host = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    values: Any = host.numpy()
    return xxh3_64_intdigest(values)


def _foreign_hook(model: nn.Module) -> str:
    """Name of a hook of somebody else's that a forward or backward calls, if there is one."""
    for owner, kinds in (
        (torch.nn.modules.module, _GLOBAL_HOOKS),
        *((module, _MODULE_HOOKS) for module in model.modules()),
        *((param, _TENSOR_HOOKS) for param in model.parameters()),
    ):
        for kind in kinds:
            for hook in (getattr(owner, kind) or {}).values():
                if name := _foreign(hook):
                    return name
    return ""


def _foreign_loss(trainer: Trainer | ServedStep | None) -> str:
    """Name of what computes the loss, where that is somebody else's, if it is."""
    if trainer is None:
        return ""
    names = "training_step", "compute_loss", "compute_loss_func"
    acts: list[Any] = [getattr(trainer, name, None) for name in names]
    for kind in type(trainer).__mro__:
        own = vars(kind)
        acts += [own.get("training_step"), own.get("compute_loss")]
    found = (_foreign(act) for act in acts if callable(act))
    return next((name for name in found if name), "")


def _foreign(act: Any) -> str:
    """Name of code of a package that may keep something, if it is."""
    while isinstance(act, partial):
        act = act.func
    home = getattr(act, "__module__", None) or type(act).__module__
    if home.partition(".")[0] in _STATELESS:
        return ""
    return f"{home}.{getattr(act, '__qualname__', type(act).__qualname__)}"


def _settings(model: nn.Module) -> list[Any]:
    """Collect what a forward may go by beside tensors: plain attributes of modules, and
    what is plain in their mappings."""
    found: list[Any] = []
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, dict):
                items = value.items()
                found += [(name, key, k, v) for k, v in items if isinstance(v, _PLAIN)]
            elif isinstance(value, _PLAIN):
                found.append((name, key, "", value))
    return found


def _rewinds(
    device: torch.device, trainer: Trainer | ServedStep | None
) -> list[Rewind]:
    """Put random numbers and counters back to what they are now."""

    def recount(owner: Any, before: dict[str, Any]) -> None:
        for name in COUNTERS:
            vars(owner).pop(name, None)
        vars(owner).update(_copied(before))

    rewinds: list[Rewind] = [
        partial(random.setstate, random.getstate()),
        partial(np.random.set_state, np.random.get_state()),
        partial(torch.set_rng_state, torch.get_rng_state()),
    ]
    if device.type == "cuda":
        own = torch.cuda.get_rng_state(device)
        rewinds.append(partial(torch.cuda.set_rng_state, own, device))
    owners = (trainer, trainer.state, trainer.accelerator.scaler) if trainer else ()
    for owner in filter(None, owners):
        counted = {name: vars(owner)[name] for name in COUNTERS if name in vars(owner)}
        rewinds.append(partial(recount, owner, _copied(counted)))
    return rewinds


def _copied(value: Any) -> Any:
    """A copy down to the tensors; of a long list of numbers in no time."""
    if isinstance(value, dict):
        copied = copy(value)
        copied.update((key, _copied(item)) for key, item in value.items())
        return copied
    if isinstance(value, list):
        return [*value]
    return value.clone() if isinstance(value, Tensor) else value
