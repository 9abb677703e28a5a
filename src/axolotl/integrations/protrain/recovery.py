"""A step that ran out of device memory is taken again from its start, once.

All that a step does runs through `StepRecovery.attempt`, which remembers it. When a
part of it raises `torch.OutOfMemoryError`, random numbers go back to where they were
when the step began, a smaller plan is taken, and all of it is done again.
"""

from __future__ import annotations

import gc
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from .core.planner import Forecast
from .core.runtime import asked_bytes
from .report.forecast import format_bytes

Result = TypeVar("Result")


@dataclass(frozen=True)
class Shortage:
    """What the device had no room for.

    Attributes:
        phase: What ran: forward, backward, update, or what is no step.
        in_use_bytes: Allocated at that moment, as a prediction counts it.
        asked_bytes: What could not be allocated; 0 if the error does not say.
        predicted_bytes: The plan's peak.
    """

    phase: str
    in_use_bytes: int
    asked_bytes: int
    predicted_bytes: int

    @classmethod
    def of(
        cls,
        error: torch.OutOfMemoryError,
        forecast: Forecast,
        in_use_bytes: int,
        phase: str,
    ) -> Shortage:
        """Read off an error; `phase` is forward where it may have been backward too."""
        ran = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
        if phase == "forward" and torch.autograd.backward.__code__ in ran:
            phase = "backward"
        return cls(
            phase,
            in_use_bytes + forecast.hardware.unseen_bytes,
            asked_bytes(error),
            forecast.device.peak_bytes,
        )

    @property
    def unplanned_bytes(self) -> int:
        """Beyond the prediction; negative where others took the memory."""
        return self.in_use_bytes + self.asked_bytes - self.predicted_bytes

    def __str__(self) -> str:
        more = self.unplanned_bytes
        return (
            f"out of device memory in {self.phase}: {format_bytes(self.in_use_bytes)} "
            f"in use and {format_bytes(self.asked_bytes)} asked for, "
            f"{format_bytes(self.predicted_bytes)} predicted at most; "
            + (
                f"{format_bytes(more)} were not planned"
                if more > 0
                else "less than the plan may take, so others use the device too"
            )
        )


class StepRecovery:
    """Remembers one optimizer step.

    Args:
        device: Whose random numbers the step draws, beside those of the host.
        measure: What an error says that was raised in a phase, while its frames still
            hold their tensors.
        lower: Takes a smaller plan, or raises where the step cannot be repeated.
    """

    def __init__(
        self,
        device: torch.device,
        measure: Callable[[torch.OutOfMemoryError, str], Shortage],
        lower: Callable[[Shortage], None],
    ) -> None:
        self._device = device
        self._measure = measure
        self._lower = lower
        self.begin(None)

    def begin(self, state: Any) -> None:
        """A step begins, or nothing of one is needed any longer.

        Args:
            state: The Trainer's, where Axolotl counts tokens as it computes losses.
        """
        self._state = state
        self._done: list[Callable[[], Any]] = []
        self._rewinds: list[Callable[[], None]] = []

    def attempt(self, act: Callable[[], Result], phase: str) -> Result:
        """`act`'s result, if need be under a smaller plan.

        Raises:
            torch.OutOfMemoryError: It failed again.
        """
        if not self._rewinds:
            self._rewinds = [*_random_states(self._device), _tokens(self._state)]
        try:
            result = act()
        except torch.OutOfMemoryError as error:
            shortage = self._measure(error, phase)
            traceback.clear_frames(error.__traceback__)
        else:
            self._done.append(act)
            return result
        # the error is gone, and with it the tensors that its traceback held
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._lower(shortage)
        for rewind in self._rewinds:
            rewind()
        for again in (*self._done, act):
            result = again()
        self._done.append(act)
        return result


def _random_states(device: torch.device) -> list[Callable[[], None]]:
    python, numbers = random.getstate(), np.random.get_state()
    host = torch.get_rng_state()
    rewinds: list[Callable[[], None]] = [
        lambda: random.setstate(python),
        lambda: np.random.set_state(numbers),
        lambda: torch.set_rng_state(host),
    ]
    if device.type == "cuda":
        own = torch.cuda.get_rng_state(device)
        rewinds.append(lambda: torch.cuda.set_rng_state(own, device))
    return rewinds


def _tokens(state: Any) -> Callable[[], None]:
    tokens = dict(getattr(state, "tokens", ()))

    def rewind() -> None:
        if tokens:
            state.tokens = dict(tokens)
        elif hasattr(state, "tokens"):
            del state.tokens

    return rewind
