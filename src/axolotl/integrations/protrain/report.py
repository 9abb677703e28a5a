"""What the run will do and what it did: a table for people, JSON for programs."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .core.cost import StateBytes
from .core.layout import slot_bytes
from .core.session import Measured
from .core.types import Budget, Chunk, Layout, Plan

REPORT_FILE = Path("protrain") / "report.json"


def format_bytes(nbytes: float) -> str:
    """`nbytes` with a binary unit, three or four significant digits."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


@dataclass
class RunReport:
    """Everything that report.json says, filled in as the run goes on."""

    layout: Layout
    plan: Plan
    budget: Budget
    predicted: StateBytes
    predicted_host_bytes: int
    device: str
    notes: list[str]
    step_s: list[float] = field(default_factory=list)

    def table(self) -> str:
        """The plan in one short table."""
        plan, layout = self.plan, self.layout
        resident = [c.index for c in layout.pageable if c.index not in plan.paged]
        table = Table(title=f"ProTrain plan ({plan.origin})", title_justify="left")
        table.add_column("what")
        table.add_column("value", justify="right")
        table.add_column("detail")
        for row in (
            ("mode", plan.mode, "A resident, B paged from a host copy"),
            (
                "resident chunks",
                f"{plan.n_persist} of {len(layout.pageable)}",
                _ranges(resident),
            ),
            (
                "slots",
                str(plan.n_buffer),
                format_bytes(sum(slot_bytes(layout, plan.placements, plan.n_buffer))),
            ),
            (
                "recompute",
                f"{sum(plan.recompute)} of {len(layout.blocks)}",
                "blocks; the others keep their activations",
            ),
            (
                "outside blocks",
                ", ".join(
                    sorted({plan.placements[c.index].value for c in self._outside()})
                )
                or "frozen, resident",
                f"{len(self._outside())} trainable",
            ),
            ("host", format_bytes(self.predicted_host_bytes), "arena and optimizer"),
            (
                f"device budget ({self.device})",
                format_bytes(self.budget.device_bytes),
                f"{format_bytes(self.budget.reserve_bytes)} left free by the states",
            ),
            (
                "predicted states",
                format_bytes(self.predicted.total),
                ", ".join(
                    f"{name.replace('_', ' ')} {format_bytes(value)}"
                    for name, value in asdict(self.predicted).items()
                    if value
                ),
            ),
        ):
            table.add_row(*row)
        text = StringIO()
        Console(file=text, width=110).print(table)
        return "\n".join([text.getvalue().rstrip(), *self.notes])

    def write(self, output_dir: Path, measured: Measured, host_peak: int) -> Path:
        """Write report.json under `output_dir` and return its path."""
        path = output_dir / REPORT_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.as_dict(measured, host_peak), indent=2) + "\n")
        return path

    def as_dict(self, measured: Measured, host_peak: int) -> dict[str, Any]:
        """The content of report.json; bytes and seconds."""
        plan, layout = self.plan, self.layout
        return {
            "plan": {
                "n_persist": plan.n_persist,
                "n_buffer": plan.n_buffer,
                "n_swap": plan.n_swap,
                "n_checkpoint": plan.n_checkpoint,
                "mode": plan.mode,
                "origin": plan.origin,
                "num_blocks": len(layout.blocks),
                "num_chunks": len(layout.pageable),
                "placements": [placement.value for placement in plan.placements],
                "recompute_blocks": [i for i, r in enumerate(plan.recompute) if r],
            },
            "budget": asdict(self.budget),
            "predicted": {
                "device_bytes": {
                    **asdict(self.predicted),
                    "total": self.predicted.total,
                },
                "host_bytes": self.predicted_host_bytes,
            },
            "measured": {
                **asdict(measured),
                "host_peak_bytes": host_peak,
                "num_steps": len(self.step_s),
                "step_s": statistics.median(self.step_s) if self.step_s else None,
            },
            "device": self.device,
            "notes": self.notes,
        }

    def _outside(self) -> list[Chunk]:
        return [c for c in self.layout.chunks if not c.pageable]


def summary(measured: Measured, report: RunReport) -> str:
    """One line for the end of the run."""
    return (
        f"ProTrain: fetched {format_bytes(measured.fetched_bytes)}, offloaded "
        f"{format_bytes(measured.offloaded_bytes)}, stalled {measured.stall_s:.2f} s; "
        f"device peak {format_bytes(measured.device_peak_bytes)} of "
        f"{format_bytes(report.budget.device_bytes)}"
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


__all__ = ["REPORT_FILE", "RunReport", "format_bytes", "summary"]
