"""When each lane of a device works in a step, noted as work is queued on its streams."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

COMPUTE = "compute"
NARROWEST = 1e-3
"""Share of the step below which a gap in a lane is left out."""


class Span(NamedTuple):
    """What a lane did without a pause, in seconds since the step began."""

    begin_s: float
    end_s: float
    what: str


@dataclass(frozen=True)
class LaneTimes:
    """One step as it was.

    Attributes:
        busy_s: By lane, how long it worked; compute while it did not wait.
        spans: By lane, in order; those of compute are forward, backward and update, with
            what it waits in them, those of the host may end after the step.
    """

    step_s: float
    busy_s: dict[str, float]
    spans: dict[str, list[Span]]


class LaneClock:
    """Notes when work begins and ends; the device is idle when it is made and read.

    Args:
        moment: Now, on compute: a second of `time.perf_counter`, which host work has
            too, or a CUDA event that keeps its time.
    """

    def __init__(self, moment: Callable[[], Any]) -> None:
        self._moment = moment
        self._begun_s, self._begun = time.perf_counter(), moment()
        self._recorded: list[tuple[str, Any, Any]] = []
        self._phases: list[tuple[str, Any]] = []

    def note(self, lane: str, begin: Any, end: Any) -> None:
        """A lane works between two moments."""
        self._recorded.append((lane, begin, end))

    def phase(self, name: str) -> None:
        """Compute begins with this, unless it is in the middle of it."""
        if not self._phases or self._phases[-1][0] != name:
            self._phases.append((name, self._moment()))

    def read(self, end: Any, stalled_s: float) -> LaneTimes:
        """The times until `end`; compute has waited `stalled_s` of them."""
        step_s = self._seconds(end)
        spans: dict[str, list[Span]] = defaultdict(list)
        for (what, begin), (_, until) in pairwise([*self._phases, ("", end)]):
            between = self._seconds(begin), self._seconds(until)
            spans[COMPUTE].append(Span(*between, what))
        busy_s = {COMPUTE: step_s - stalled_s}
        for lane, *moments in self._recorded:
            begin_s, end_s = map(self._seconds, moments)
            busy_s[lane] = busy_s.get(lane, 0.0) + end_s - begin_s
            shown = spans[lane]
            if shown and begin_s - shown[-1].end_s < NARROWEST * step_s:
                begin_s = shown.pop().begin_s
            shown.append(Span(begin_s, end_s, ""))
        return LaneTimes(step_s, busy_s, dict(spans))

    def _seconds(self, moment: Any) -> float:
        if isinstance(moment, float):
            return moment - self._begun_s
        return self._begun.elapsed_time(moment) / 1000
