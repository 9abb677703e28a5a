"""The report of a run beside its forecast: a table, a last line, report.json."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from ..core.engine.session import Measured
from ..core.errors import FOREIGN_ERRORS, ConfigError
from ..core.planner.planner import Forecast
from ..core.sizes import format_bytes
from .forecast import (
    answer_dict,
    forecast_dict,
    format_seconds,
    format_speed,
    knobs_dict,
    speed,
)
from .page import report_page
from .text import forecast_text, report_text

WATCHED_STEPS = 3
"""First steps in which the CPU device counts every allocation, which slows them: the
optimizer's state appears in the first one, and the second one is like all others."""

REPORT_FILE = Path("protrain") / "report.json"
REPORT_KEYS = frozenset(
    "about alternatives assumptions blocks compared device_bytes hardware host_bytes "
    "losses measured notes plan step_s timeline verdict".split()
)
"""Keys that showing a report needs, which other versions may not have written."""


@dataclass
class Generated:
    """Answers that a run has sampled.

    Attributes:
        phases: Calls of `generate`, each in so many `waves`.
        tokens: New ones, padding after the end of a sequence included.
        device_bytes: Of the device, at most in the first of them.
    """

    phases: int = 0
    waves: int = 0
    sequences: int = 0
    tokens: int = 0
    seconds: float = 0.0
    device_bytes: int = 0


@dataclass
class Sent:
    """Weights that a run has sent to a server which answers.

    Attributes:
        times: All of them, `nbytes` in all.
        device_bytes: Of the device, at most in the first of them.
    """

    times: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    device_bytes: int = 0


@dataclass
class RunReport:
    """Everything that report.json says, filled in as the run goes on.

    Attributes:
        watched_steps: The first ones, and the first ones of the plan that runs.
        evaluation_bytes: Of the device, at most in the first batches of an evaluation.
    """

    forecast: Forecast
    device: str
    notes: list[str]
    about: dict[str, Any] = field(default_factory=dict)
    losses: list[tuple[int, float]] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    watched_steps: int = WATCHED_STEPS
    notches: list[dict[str, Any]] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    evaluation_bytes: int = 0
    generated: Generated = field(default_factory=Generated)
    sent: Sent = field(default_factory=Sent)

    def table(self) -> str:
        """The plan and its prediction, as `plan` shows them."""
        return "\n".join([forecast_text(self.forecast, self.device), *self.notes])

    def replanned(self, step: int, why: Mapping[str, Any], forecast: Forecast) -> None:
        """From this step on the run is under another forecast's plan."""
        before, after = (
            {**knobs_dict(plan), "placements": [at.value for at in plan.placements]}
            for plan in (self.forecast.plan, forecast.plan)
        )
        self.notches.append({"step": step, **why, "from": before, "to": after})
        self.forecast = forecast

    def summary(self, measured: Measured, output_dir: Path) -> str:
        """The last line of a run: its pace and its peak beside what was predicted."""
        parts, predicted = [], self.forecast.step.total_s
        if seconds := self.median_step_s():
            made = {
                "measured": {"step_s": seconds},
                "generated": asdict(self.generated),
            }
            rate = speed({**forecast_dict(self.forecast), **made})
            parts = [
                f"{format_seconds(seconds)}/step ({format_seconds(predicted)} predicted)",
                format_speed(rate),
            ]
        peak, most = measured.device_peak_bytes, self.forecast.budget.device_bytes
        parts.append(f"peak {format_bytes(peak)} of {format_bytes(most)}")
        return f"ProTrain: {', '.join(parts)}. Details: axolotl-protrain report {output_dir}"

    def host_bytes(self, seen: Measured) -> float:
        """Bytes that a plan's host bytes predict, over all ranks of a node; without the
        process, its libraries and its loader."""
        names = ("host_optimizer_bytes", "host_swap_bytes")
        return seen.host_arena_bytes + sum(self._of_a_node(n, seen) for n in names)

    def write(self, output_dir: Path, measured: Measured, host_peak: int) -> Path:
        """Write report.json under `output_dir` and return its path."""
        path = output_dir / REPORT_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.as_dict(measured, host_peak), indent=2) + "\n")
        return path

    def as_dict(self, measured: Measured, host_peak: int) -> dict[str, Any]:
        """The content of report.json; bytes and seconds."""
        return {
            **answer_dict(self.forecast),
            "about": self.about,
            "alternatives": [],
            "assumptions": self.notes,
            "losses": self.losses,
            "steps": self.step_s,
            "compared": {
                name: {"predicted": predicted, "measured": seen}
                for name, (predicted, seen) in self._compared(measured).items()
            },
            "measured": {
                **asdict(measured),
                "host_peak_bytes": host_peak,
                "num_steps": len(self.step_s),
                "step_s": self.median_step_s(),
            },
            "lanes": None,
            "ranks": self.ranks,
            "generated": asdict(self.generated),
            "sent": asdict(self.sent),
            "device": self.device,
            "notches": self.notches,
            "notes": self.notes,
        }

    def median_step_s(self) -> float | None:
        """Return the median of the steps of this plan that were not watched, if there
        are any."""
        timed = self.step_s[self.watched_steps :] or self.step_s
        return statistics.median(timed) if timed else None

    def _compared(self, seen: Measured) -> dict[str, tuple[Any, Any]]:
        """Each predicted term and what was measured of it."""
        device, host = self.forecast.device, self.forecast.host.states
        step, moved = self.forecast.step, self.forecast.moved
        states, peak = device.states, device.peak
        # DDP makes its buckets once the plugin has placed everything
        rising = peak.operands + peak.gradients + peak.activations + peak.working
        rising += states.buckets
        placed, moments = seen.device_placed_bytes, seen.device_optimizer_bytes
        risen = seen.device_peak_bytes - placed - moments
        micro, steps = self.forecast.workload.accumulation, max(len(self.step_s), 1)
        host_optimizer = self._of_a_node("host_optimizer_bytes", seen)
        host_swap = self._of_a_node("host_swap_bytes", seen)
        out, back = (micro * sum(way) for way in (moved.out, moved.back))
        exposed_s = sum(s for lane, s in step.exposed_s.items() if lane != "compute")
        waited_s = seen.stall_s + seen.disk_wait_s
        a_step: dict[str, tuple[float, float]] = {}
        # counters hold what these moved too, which is no step's
        if not (self.evaluation_bytes or self.generated.phases or self.sent.times):
            a_step = {
                "fetched bytes": (step.fetched_bytes, seen.fetched_bytes),
                "offloaded bytes": (step.offloaded_bytes, seen.offloaded_bytes),
                "swapped out bytes": (out, seen.swapped_out_bytes),
                "swapped in bytes": (back, seen.swapped_in_bytes),
                "waits of compute, seconds": (exposed_s, waited_s),
            }
        evaluated = {}
        if self.evaluation_bytes:
            predicted = device.phases.get("evaluation", 0)
            evaluated["evaluation peak bytes"] = predicted, self.evaluation_bytes
        return {
            "device peak bytes": (device.peak_bytes, seen.device_peak_bytes),
            **evaluated,
            "weights and slots": (states.weights - states.buckets, placed),
            "optimizer state on the device": (states.moments, moments),
            "gradients and activations": (rising, risen),
            "host arena": (host.host_pool, seen.host_arena_bytes),
            "host gradients, masters and moments": (
                host.gradients + host.masters + host.moments,
                host_optimizer,
            ),
            "host memory of swapped activations": (host.swapped, host_swap),
            **{f"{name} a step": (p, s / steps) for name, (p, s) in a_step.items()},
            "step seconds": (step.total_s, self.median_step_s()),
        }

    def _of_a_node(self, figure: str, seen: Measured) -> float:
        """Over all ranks of one, as the host's bytes are predicted."""
        if not self.ranks:
            return getattr(seen, figure)
        num_nodes = self.forecast.workload.world.num_nodes
        return sum(rank[figure] for rank in self.ranks) / num_nodes


def read_reports(runs: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The report.json of each run, by the shortest name that tells them apart.

    Args:
        runs: An `output_dir`, or the file itself.

    Raises:
        ConfigError: There is none, or it is not of this version.
    """
    reports = {}
    for run in runs:
        file = run if run.is_file() else run / REPORT_FILE
        try:
            report = json.loads(file.read_text("utf-8"))
            lacking = sorted(REPORT_KEYS - report.keys())
            if not lacking:
                # what cannot be shown is nobody's, or damaged
                report_text({str(run): report})
                report_page({str(run): report})
        except (OSError, TemplateError, *FOREIGN_ERRORS) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"{file}: no report of a finished run ({why}). Give the output_dir of "
                "one that trained with protrain_auto_memory."
            ) from error
        if lacking:
            raise ConfigError(
                f"{file}: lacks {', '.join(lacking)}, as another version wrote it. Train "
                "a step again with this one."
            )
        name = run.resolve().name if run.is_dir() else str(run)
        reports[name if name not in reports else str(run)] = report
    return reports
