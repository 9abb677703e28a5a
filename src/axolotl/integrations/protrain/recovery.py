"""A step that ran out of device memory is taken again from its start, under a smaller plan;
one that leaves much of it goes on under a faster one.

All that a step does runs through `StepRecovery.attempt`, which remembers it: random
numbers go back, a smaller plan is taken, and all of it is done again, by several ranks
together: Note [A rank that has no room] in data_parallel.py.
"""

from __future__ import annotations

import gc
import random
import traceback
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import Trainer

from .core.errors import BudgetError, DeviceMemoryError
from .core.planner import Forecast, Planner
from .core.runtime import asked_bytes, is_shortage
from .core.sizes import format_bytes
from .data_parallel import Owed
from .report.forecast import format_seconds
from .report.run import RunReport
from .versions import COUNTERS

if TYPE_CHECKING:
    from .run import TrainingRun

Result = TypeVar("Result")

MAX_REPEATS = 3
"""Of one step: what else uses the device may take more meanwhile."""
_REPEATED = "the step was under a smaller plan already"
FASTER = 0.02
"""Of a step's seconds, that are worth another plan while a run is under way."""


@dataclass(frozen=True)
class Shortage:
    """What the device had no room for in forward, backward, update or outside a step.

    Attributes:
        in_use_bytes: Allocated at that moment, as a prediction counts it.
        asked_bytes: What could not be allocated; 0 if the error does not say.
        predicted_bytes: The plan's peak.
        rank: That had no room, if all ranks know of it and can repeat what they did.
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


class SharedShortage(torch.OutOfMemoryError):
    """What a rank had no room for, on all of them."""

    def __init__(self, shortage: Shortage) -> None:
        super().__init__(str(shortage))
        self.shortage = shortage


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

    def begin(self, trainer: Trainer | None) -> None:
        """A step of `trainer` begins, or nothing of one is needed any longer."""
        self._trainer = trainer
        self._done: list[Callable[[], Any]] = []
        self._rewinds: list[Callable[[], None]] = []

    def attempt(self, act: Callable[[], Result], phase: str) -> Result:
        """`act`'s result, if need be under a smaller plan, which may fail as well."""
        if not self._rewinds:
            self._rewinds = _rewinds(self._device, self._trainer)
        before: list[Callable[[], Any]] = []
        while True:
            try:
                for again in before:
                    again()
                result = act()
            except RuntimeError as error:
                if not is_shortage(error):
                    raise
                shortage = self._measure(error, phase)
                traceback.clear_frames(error.__traceback__)
            else:
                self._done.append(act)
                return result
            self._let_go()
            self._lower(shortage)
            before = self._done
            for rewind in self._rewinds:
                rewind()

    def _let_go(self) -> None:
        """The error is gone, and with it the tensors that its traceback held."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


class Recovery(StepRecovery):
    """What a run does about a device that has no room, or more than was planned with.

    Args:
        run: Whose session goes on under a smaller plan.
        report: Its forecast is of the plan that runs.
        device: Where it trains.
        planner: Makes another plan; the first rank's.
        repeats: Whether the ranks know what one of them leaves out.

    Attributes:
        unplanned_bytes: The most that an attempt wanted beyond its trace; 0 for none.
        has_gradients: Whether the step began with some that nobody can make again, as
            after an epoch of unknown length that has ended between two updates.
    """

    def __init__(
        self,
        run: TrainingRun,
        report: RunReport,
        device: torch.device,
        planner: Planner | None,
        repeats: bool,
    ) -> None:
        self._may_repeat = repeats
        self._owed: Owed | None = None
        self._run, self._report, self._planner = run, report, planner
        self._repeats, self._updating = 0, False
        self.unplanned_bytes = 0
        super().__init__(device, self._shortage, self._smaller)

    def begin(self, trainer: Trainer | None, has_gradients: bool = False) -> None:
        """An optimizer step begins, or the last one has ended."""
        super().begin(trainer)
        self.has_gradients = has_gradients
        self._step = trainer.state.global_step + 1 if trainer else 0
        if trainer is not None:
            self._repeats = 0

    def use_room(self, unseen_bytes: int) -> None:
        """Between steps, with no gradients: go on under a faster plan, if there is one for
        a device that takes that much beside what is traced.

        Only with what a search chose, and alone: other ranks may need their memory.
        """
        session, before = self._run.session, self._report.forecast
        searched = before.plan.origin == "search"
        if not searched or self._planner is None or self._run.ranks.world.size > 1:
            return
        assert session is not None
        try:
            planner, after = self._planner.faster(before.plan, unseen_bytes)
            if after.step.total_s > (1 - FASTER) * before.step.total_s:
                return
            grows = after.device.states.weights - before.device.states.weights
            session.device.probe(max(grows, 0))
        except BudgetError:
            return
        except RuntimeError as error:
            if not is_shortage(error):
                raise
            return
        self._planner = planner
        self._run.replan(after)
        freed = before.hardware.unseen_bytes - unseen_bytes
        why = {"phase": "between steps", "unneeded_bytes": freed}
        self._report.replanned(self._step, why, after)
        seconds = (format_seconds(f.step.total_s) for f in (before, after))
        line = (
            f"Step {self._step}: the device needs {format_bytes(freed)} less than was "
            f"planned with. The run goes on under a faster plan: {' -> '.join(seconds)} "
            "a step."
        )
        self._run.log.info(f"{line}\n{self._report.table()}")
        self._report.notes.append(line)

    def guard(self, optimizer: torch.optim.Optimizer) -> list[RemovableHandle]:
        """Look for room before an update, not while it changes weights."""

        def before(*_: Any) -> None:
            self.together(self._probe_update, "update")
            self._updating = True

        def after(*_: Any) -> None:
            self._updating = False

        before_step = optimizer.register_step_pre_hook(before)
        return [before_step, optimizer.register_step_post_hook(after)]

    def together(self, act: Callable[[], Result], phase: str) -> Result:
        """An `attempt` of all ranks."""
        return self.attempt(partial(self.met, act, phase), phase)

    def met(
        self,
        act: Callable[[], Result],
        phase: str,
        rest: Callable[[], bool] | None = None,
    ) -> Result:
        """`act`'s result, once all ranks have it.

        Args:
            act: No rank waits in it for one that fails, but for what is in `rest`.
            phase: Which it is.
            rest: What other ranks wait for, after `act` has failed; whether the step can
                be repeated then.

        Raises:
            SharedShortage: A rank had no room for it.
        """
        ranks = self._run.ranks
        if ranks.world.size == 1 or not self._may_repeat:
            return act()
        shortage: Shortage | None = None
        try:
            result = act()
        except RuntimeError as error:
            if isinstance(error, SharedShortage) or not is_shortage(error):
                raise
            if rest is not None and self._owed and not self._owed.has_entered:
                # who knows what others do together before it
                raise
            shortage = replace(self._shortage(error, phase), rank=ranks.rank)
            traceback.clear_frames(error.__traceback__)
        if shortage is not None:
            self._let_go()
            if rest is not None and not rest():
                shortage = replace(shortage, rank=None)
        if ranks.maximum(torch.tensor([shortage is not None], dtype=torch.uint8)).any():
            short = [one for one in ranks.collect(shortage) if one is not None]
            # who needs more yet says so when the step is repeated
            short.sort(key=lambda one: (one.rank is None, one.unplanned_bytes))
            raise SharedShortage(short[-1])
        return result

    def met_after(
        self, pass_: Callable[[], Result], model: nn.Module, synchronises: bool
    ) -> Result:
        """The same of a micro-batch's forward and backward of `model`, as the trainer has
        wrapped it, in which the ranks reduce gradients if it `synchronises`."""
        session = self._run.session
        if session is None or self._run.ranks.world.size == 1:
            return pass_()
        if self._owed is None:
            self._owed = Owed(model)
        owed = self._owed
        owed.begin()

        def rest() -> bool:
            repeats = not (synchronises and owed.is_spent)
            loss = owed.loss()
            session.sit_out()
            if loss is not None and synchronises:
                loss.backward()
            return repeats

        return self.met(pass_, "forward", rest)

    def close(self) -> None:
        """Remove what was hooked."""
        if self._owed is not None:
            self._owed.close()

    def explain(self, error: RuntimeError) -> NoReturn:
        """Raise what an error means that no smaller plan has averted."""
        phase, why = "forward", _REPEATED
        if self._updating:
            phase, why = "update", "the update was half done, so it cannot be repeated"
        elif not self._repeats:
            phase = "what is no training step" if self._run.session else "loading"
            why = "only forward, backward and update can be repeated"
        shortage = self._shortage(error, phase)
        # they hold what the device has no room for
        traceback.clear_frames(error.__traceback__)
        raise self._refusal(shortage, why) from error

    def _probe_update(self) -> None:
        session = self._run.session
        assert session is not None
        timeline = self._report.forecast.device.timeline
        update = next(point for point in timeline if point.phase == "update")
        made = session.device_optimizer_bytes()
        session.device.probe(max(update.moments - made, 0) + update.working)

    def _shortage(self, error: RuntimeError, phase: str) -> Shortage:
        """What an error says; `forward` may have been backward too."""
        if isinstance(error, SharedShortage):
            unplanned = error.shortage.unplanned_bytes
            self.unplanned_bytes = max(self.unplanned_bytes, unplanned)
            return error.shortage
        ran = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
        if phase == "forward" and torch.autograd.backward.__code__ in ran:
            phase = "backward"
        session, forecast = self._run.session, self._report.forecast
        in_use = session.device.used_bytes() if session else 0
        in_use += forecast.hardware.unseen_bytes
        peak_bytes = forecast.device.peak_bytes
        shortage = Shortage(phase, in_use, asked_bytes(error), peak_bytes)
        self.unplanned_bytes = max(self.unplanned_bytes, shortage.unplanned_bytes)
        return shortage

    def _smaller(self, shortage: Shortage) -> None:
        """Take the fastest plan that has room for what was missing, if there is one."""
        if self._repeats == MAX_REPEATS:
            raise self._refusal(shortage, f"{_REPEATED}, {MAX_REPEATS} times")
        if self.has_gradients:
            why = "it began with gradients of an earlier epoch, which cannot be made again"
            raise self._refusal(shortage, why)
        if self._run.ranks.world.size > 1 and shortage.rank is None:
            why = "what all ranks do together was under way, so it cannot be repeated"
            raise self._refusal(shortage, why)
        session = self._run.session
        assert session is not None
        all_resident = self._run.args.protrain_force_all_persistent

        def replan() -> Forecast:
            assert self._planner is not None
            return self._planner.replan(
                self._report.forecast.plan,
                shortage.unplanned_bytes,
                shortage.asked_bytes,
                frozenset() if all_resident else session.movable,
            )

        try:
            forecast = self._run.ranks.from_first(replan)
        except BudgetError as error:
            raise self._refusal(shortage, "no smaller plan leaves that room") from error
        self._repeats += 1
        self._run.replan(forecast)
        self._report.replanned(self._step, asdict(shortage), forecast)
        line = f"Step {self._step}: {shortage}. It is repeated under a smaller plan."
        self._run.log.warning(f"{line}\n{self._report.table()}")
        self._report.notes.append(line)

    def _refusal(self, shortage: Shortage, why: str) -> DeviceMemoryError:
        forecast = self._report.forecast
        largest, nbytes = max(forecast.device.terms.items(), key=lambda term: term[1])
        missing = max(shortage.unplanned_bytes, shortage.asked_bytes, 1)
        where = f"Step {self._step}" if self._step else "Outside the steps"
        return DeviceMemoryError(
            f"protrain_capacity_bytes: {where}: {shortage}, and {why}. The largest part "
            f"is {largest}, {format_bytes(nbytes)}. Set protrain_capacity_bytes "
            f"to {forecast.budget.device_bytes - missing:,} or less, or lower "
            "micro_batch_size, sequence_len or the adapter's rank."
        )


def _rewinds(device: torch.device, trainer: Trainer | None) -> list[Callable[[], None]]:
    """Put random numbers and counters back to what they are now."""

    def recount(owner: Any, before: dict[str, Any]) -> None:
        for name in COUNTERS:
            vars(owner).pop(name, None)
        vars(owner).update(deepcopy(before))

    rewinds: list[Callable[[], None]] = [
        partial(random.setstate, random.getstate()),
        partial(np.random.set_state, np.random.get_state()),
        partial(torch.set_rng_state, torch.get_rng_state()),
    ]
    if device.type == "cuda":
        own = torch.cuda.get_rng_state(device)
        rewinds.append(partial(torch.cuda.set_rng_state, own, device))
    for owner in (trainer, trainer.state) if trainer else ():
        counted = {name: vars(owner)[name] for name in COUNTERS if name in vars(owner)}
        rewinds.append(partial(recount, owner, deepcopy(counted)))
    return rewinds
