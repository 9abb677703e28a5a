"""What a run does beside what was predicted of it: a table, a last line, report.json."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..core.planner import Forecast
from ..core.session import Measured
from .forecast import forecast_dict, format_bytes, knobs_dict
from .text import forecast_table

WATCHED_STEPS = 3
"""First steps in which the CPU device counts every allocation, which slows them: the
optimizer's state appears in the first one, and the second one is like all others."""

REPORT_FILE = Path("protrain") / "report.json"


@dataclass
class RunReport:
    """Everything that report.json says, filled in as the run goes on."""

    forecast: Forecast
    device: str
    notes: list[str]
    step_s: list[float] = field(default_factory=list)
    notches: list[dict[str, Any]] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)

    def table(self) -> str:
        """The plan and its prediction in one short table."""
        return "\n".join([forecast_table(self.forecast, self.device), *self.notes])

    def replanned(
        self, step: int, shortage: Mapping[str, Any], forecast: Forecast
    ) -> None:
        """A step ran out of memory and goes on under another forecast's plan."""
        before, after = knobs_dict(self.forecast.plan), knobs_dict(forecast.plan)
        self.notches.append({"step": step, **shortage, "from": before, "to": after})
        self.forecast = forecast

    def summary(self, measured: Measured) -> str:
        """One line for the end of the run."""
        return (
            f"ProTrain: fetched {format_bytes(measured.fetched_bytes)}, "
            f"offloaded {format_bytes(measured.offloaded_bytes)}, "
            f"swapped {format_bytes(measured.swapped_out_bytes)}, "
            f"stalled {measured.stall_s:.2f} s; "
            f"device peak {format_bytes(measured.device_peak_bytes)} of "
            f"{format_bytes(self.forecast.budget.device_bytes)}"
        )

    def write(self, output_dir: Path, measured: Measured, host_peak: int) -> Path:
        """Write report.json under `output_dir` and return its path."""
        path = output_dir / REPORT_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.as_dict(measured, host_peak), indent=2) + "\n")
        return path

    def as_dict(self, measured: Measured, host_peak: int) -> dict[str, Any]:
        """The content of report.json; bytes and seconds."""
        return {
            **forecast_dict(self.forecast),
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
            "ranks": self.ranks,
            "device": self.device,
            "notches": self.notches,
            "notes": self.notes,
        }

    def median_step_s(self) -> float | None:
        """Of the steps that were not watched, if there are any."""
        timed = self.step_s[WATCHED_STEPS:] or self.step_s
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
        return {
            "device peak bytes": (device.peak_bytes, seen.device_peak_bytes),
            "weights and slots": (states.weights - states.buckets, placed),
            "optimizer state on the device": (states.moments, moments),
            "gradients and activations": (rising, risen),
            "host arena": (host.arena, seen.host_arena_bytes),
            "host gradients, masters and moments": (
                host.gradients + host.masters + host.moments,
                host_optimizer,
            ),
            "fetched bytes a step": (step.fetched_bytes, seen.fetched_bytes / steps),
            "offloaded bytes a step": (
                step.offloaded_bytes,
                seen.offloaded_bytes / steps,
            ),
            "swapped out bytes a step": (out, seen.swapped_out_bytes / steps),
            "swapped in bytes a step": (back, seen.swapped_in_bytes / steps),
            "host memory of swapped activations": (host.swapped, host_swap),
            "step seconds": (step.total_s, self.median_step_s()),
        }

    def _of_a_node(self, figure: str, seen: Measured) -> float:
        """Over all ranks of one, as the host's bytes are predicted."""
        if not self.ranks:
            return getattr(seen, figure)
        num_nodes = self.forecast.workload.world.num_nodes
        return sum(rank[figure] for rank in self.ranks) / num_nodes
