"""What the run will do and what it did: a table for people, JSON for programs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import StringIO
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .core.planner import Forecast
from .core.session import Measured
from .core.types import Plan

WATCHED_STEPS = 2
"""First steps in which the CPU device counts every allocation, which slows them: the
optimizer's state appears in the first one, and the second one is like all others."""

POLICY_LETTERS = {"keep": "K", "recompute": "R", "swap": "S", "swap-input": "I"}

MODES = {
    "A": "everything on the device",
    "B": "from a copy on the host, whole chunks to each device",
    "C": "from a copy on the host, to each device a shard, gathered there",
}
"""In words, the values of `Plan.mode`."""

MAX_RUNS = 3
"""Of blocks with the same policy, which are written in words."""

REPORT_FILE = Path("protrain") / "report.json"


def format_bytes(nbytes: float) -> str:
    """`nbytes` with a binary unit, three or four significant digits."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


def policy_row(policies: Sequence[str]) -> str:
    """`keep keep recompute` as `2 keep, 1 recompute`; many runs as `2(SRR) 4K`."""
    runs = [f"{len(list(run))} {name}" for name, run in groupby(policies)]
    if len(runs) <= MAX_RUNS:
        return ", ".join(runs)
    rest, parts = "".join(POLICY_LETTERS[policy] for policy in policies), []
    while rest:
        # what comes again and reaches furthest, else one letter
        sizes = range(1, len(rest) // 2 + 1)
        size = max(sizes, key=lambda size: _reach(rest, size), default=1)
        number = max(1, _reach(rest, size) // size)
        unit = rest[:size] if size == 1 else f"({rest[:size]})"
        parts.append(f"{number}{unit}" if number > 1 else unit)
        rest = rest[number * size :]
    legend = (
        f"{POLICY_LETTERS[policy]} {policy}" for policy in dict.fromkeys(policies)
    )
    return f"{' '.join(parts)}; {', '.join(legend)}"


def _reach(text: str, size: int) -> int:
    """How far the first `size` letters come again and again; 0 if not at all."""
    number = 1
    while text.startswith(text[:size], number * size):
        number += 1
    return number * size if number > 1 else 0


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

    def notch(self, step: int, shortage: Mapping[str, Any], forecast: Forecast) -> None:
        """A step ran out of memory and goes on under another forecast's plan."""
        self.notches.append(
            {
                "step": step,
                **shortage,
                "from": _knobs_dict(self.forecast.plan),
                "to": _knobs_dict(forecast.plan),
            }
        )
        self.forecast = forecast

    def write(self, output_dir: Path, measured: Measured, host_peak: int) -> Path:
        """Write report.json under `output_dir` and return its path."""
        path = output_dir / REPORT_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.as_dict(measured, host_peak), indent=2) + "\n")
        return path

    def as_dict(self, measured: Measured, host_peak: int) -> dict[str, Any]:
        """The content of report.json; bytes and seconds."""
        forecast = self.forecast
        step_s = self.median_step_s()
        return {
            **forecast_dict(forecast),
            "compared": self._compared(measured, step_s),
            "measured": {
                **asdict(measured),
                "host_peak_bytes": host_peak,
                "num_steps": len(self.step_s),
                "step_s": step_s,
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

    def _of_a_node(self, figure: str, measured: Measured) -> float:
        """Over all ranks of one, as the host's bytes are predicted."""
        if not self.ranks:
            return getattr(measured, figure)
        num_nodes = self.forecast.workload.world.num_nodes
        return sum(rank[figure] for rank in self.ranks) / num_nodes

    def _compared(self, measured: Measured, step_s: float | None) -> dict[str, Any]:
        """Each predicted term beside what was measured of it."""
        forecast = self.forecast
        states, host = forecast.device.states, forecast.host.states
        peak = forecast.device.peak
        rows = {
            "device peak bytes": (
                forecast.device.peak_bytes,
                measured.device_peak_bytes,
            ),
            # DDP makes its buckets once the plugin has placed everything
            "weights and slots": (
                states.weights - states.buckets,
                measured.device_placed_bytes,
            ),
            "optimizer state on the device": (
                states.moments,
                measured.device_optimizer_bytes,
            ),
            "gradients and activations": (
                peak.gradients + peak.activations + peak.working + states.buckets,
                measured.device_peak_bytes
                - measured.device_placed_bytes
                - measured.device_optimizer_bytes,
            ),
            "host arena": (host.arena, measured.host_arena_bytes),
            "host gradients, masters and moments": (
                host.gradients + host.masters + host.moments,
                self._of_a_node("host_optimizer_bytes", measured),
            ),
            "fetched bytes a step": (
                forecast.step.fetched_bytes,
                measured.fetched_bytes / max(len(self.step_s), 1),
            ),
            "offloaded bytes a step": (
                forecast.step.offloaded_bytes,
                measured.offloaded_bytes / max(len(self.step_s), 1),
            ),
            "swapped out bytes a step": (
                forecast.workload.accumulation * sum(forecast.moved.out),
                measured.swapped_out_bytes / max(len(self.step_s), 1),
            ),
            "swapped in bytes a step": (
                forecast.workload.accumulation * sum(forecast.moved.back),
                measured.swapped_in_bytes / max(len(self.step_s), 1),
            ),
            "host memory of swapped activations": (
                forecast.host.states.swapped,
                self._of_a_node("host_swap_bytes", measured),
            ),
            "step seconds": (forecast.step.total_s, step_s),
        }
        return {
            name: {"predicted": predicted, "measured": seen}
            for name, (predicted, seen) in rows.items()
        }


def forecast_table(forecast: Forecast, device: str) -> str:
    """A plan and what it will cost, for people."""
    plan, layout = forecast.plan, forecast.layout
    resident = [c.index for c in layout.pageable if c.index not in plan.paged]
    outside = [c for c in layout.chunks if not c.pageable]
    step, world = forecast.step, forecast.workload.world
    table = Table(title=f"ProTrain plan ({plan.origin})", title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("detail")
    for row in (
        ("mode", plan.mode, MODES[plan.mode]),
        ("ranks", str(world.size), f"{world.local_size} on each node"),
        (
            "resident chunks",
            f"{plan.n_persist} of {len(layout.pageable)}",
            _ranges(resident),
        ),
        ("slots", str(plan.n_buffer), format_bytes(forecast.device.states.slots)),
        (
            "activations",
            f"n_swap {plan.n_swap}, n_checkpoint {plan.n_checkpoint}",
            f"of {len(layout.blocks)} blocks: "
            + policy_row([policy.value for policy in plan.policies]),
        ),
        (
            "outside blocks",
            ", ".join(sorted({plan.placements[c.index].value for c in outside}))
            or "frozen, resident",
            f"{len(outside)} trainable",
        ),
        (
            f"device ({device})",
            format_bytes(forecast.device.peak_bytes),
            f"of {format_bytes(forecast.budget.usable_bytes)}, at "
            f"{forecast.device.peak.label}: {_listed(forecast.device.terms)}",
        ),
        (
            "host (all its ranks)" if world.local_size > 1 else "host",
            format_bytes(forecast.host.peak_bytes),
            f"of {format_bytes(forecast.budget.host_bytes)}: "
            f"{_listed(forecast.host.terms)}",
        ),
        (
            "step",
            f"{step.total_s:.3g} s",
            f"{forecast.tokens_per_s:.4g} tokens/s, bound by {step.limiter}; "
            + ", ".join(f"{lane} {s:.3g} s" for lane, s in step.busy_s.items() if s),
        ),
    ):
        table.add_row(*row)
    text = StringIO()
    Console(file=text, width=110).print(table)
    return text.getvalue().rstrip()


def _listed(terms: Mapping[str, int]) -> str:
    return ", ".join(
        f"{name} {format_bytes(nbytes)}" for name, nbytes in terms.items() if nbytes
    )


def forecast_dict(forecast: Forecast) -> dict[str, Any]:
    """A plan and what it will cost, for programs; bytes and seconds."""
    plan, layout, step = forecast.plan, forecast.layout, forecast.step
    world = forecast.workload.world
    return {
        "plan": {
            **_knobs_dict(plan),
            "mode": plan.mode,
            "num_ranks": world.size,
            "num_nodes": world.num_nodes,
            "origin": plan.origin,
            "num_blocks": len(layout.blocks),
            "num_chunks": len(layout.pageable),
            "resident_chunks": [
                c.index for c in layout.pageable if c.index not in plan.paged
            ],
            "placements": [placement.value for placement in plan.placements],
            "block_policies": [policy.value for policy in plan.policies],
        },
        "device_bytes": {
            "peak": forecast.device.peak_bytes,
            "budget": forecast.budget.usable_bytes,
            "reserve": forecast.budget.reserve_bytes,
            "terms": forecast.device.terms,
            "phases": forecast.device.phases,
        },
        "host_bytes": {
            "peak": forecast.host.peak_bytes,
            "budget": forecast.budget.host_bytes,
            "terms": forecast.host.terms,
            "phases": forecast.host.phases,
        },
        "step_s": {
            "total": step.total_s,
            "lanes": dict(step.busy_s),
            "exposed": dict(step.exposed_s),
            "recompute": step.recompute_s,
            "limiter": step.limiter,
            "tokens_per_s": forecast.tokens_per_s,
            "measured_blocks": forecast.times.measured,
        },
    }


def _knobs_dict(plan: Plan) -> dict[str, int]:
    return {
        knob: getattr(plan, knob)
        for knob in ("n_persist", "n_buffer", "n_swap", "n_checkpoint")
    }


def page_dict(forecast: Forecast) -> dict[str, Any]:
    """What the page of a plan shows beside `forecast_dict`."""
    plan, times = forecast.plan, forecast.times
    return {
        "timeline": [
            {
                "label": point.label,
                "phase": point.phase,
                "bytes": {
                    "weights": point.weights,
                    "slots": point.slots,
                    "optimizer": point.moments,
                    "gradients": point.gradients,
                    "activations": point.activations,
                    "working set": point.working,
                },
            }
            for point in forecast.device.timeline
        ],
        "blocks": [
            {
                "name": block.name,
                "policy": plan.policies[block.index].value,
                "chunks": [
                    {
                        "bytes": forecast.layout.chunks[chunk].nbytes,
                        "placement": plan.placements[chunk].value,
                    }
                    for chunk in block.chunks
                ],
                "forward_s": times.forward_s[block.index],
                "backward_s": times.backward_s[block.index],
            }
            for block in forecast.layout.blocks
        ],
    }


def summary(measured: Measured, report: RunReport) -> str:
    """One line for the end of the run."""
    return (
        f"ProTrain: fetched {format_bytes(measured.fetched_bytes)}, offloaded "
        f"{format_bytes(measured.offloaded_bytes)}, swapped "
        f"{format_bytes(measured.swapped_out_bytes)}, stalled {measured.stall_s:.2f} s; "
        f"device peak {format_bytes(measured.device_peak_bytes)} of "
        f"{format_bytes(report.forecast.budget.device_bytes)}"
    )


def _ranges(numbers: list[int]) -> str:
    """`[0, 1, 2, 5]` as `0-2, 5`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


__all__ = [
    "REPORT_FILE",
    "RunReport",
    "forecast_dict",
    "forecast_table",
    "format_bytes",
    "page_dict",
    "summary",
]
