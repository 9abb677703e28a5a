"""Tables of a benchmark, for a terminal and as dated files."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from machine import command, commit, package_version
from rich.console import Console
from rich.table import Table

from axolotl.integrations.protrain.core.planner.hardware import cpu_name


@dataclass(frozen=True)
class Page:
    """A table, for a terminal and for a results file."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def show(self, console: Console) -> None:
        table = Table(title=self.title)
        for column in self.columns:
            table.add_column(column)
        for row in self.rows:
            table.add_row(*row)
        console.print(table)

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        return f"## {self.title}\n\n{table}\n"


def spread(values: Sequence[float]) -> str:
    low, median, high = statistics.quantiles(values, n=4)
    return f"{median:.3f} ({low:.3f} to {high:.3f})"


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median is with 95 % confidence, whatever the distribution."""
    rank = max(0, int(len(values) / 2 - 0.98 * len(values) ** 0.5))
    ordered = sorted(values)
    return ordered[rank], ordered[-1 - rank]


def environment(device: torch.device) -> dict[str, str]:
    """What the figures depend on; no path and no host name."""
    cpus = f"{len(os.sched_getaffinity(0))} cores of {cpu_name()}"
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return {
        "date": date.today().isoformat(),
        "commit": commit(),
        "hardware": ", ".join(filter(None, [gpu, cpus])),
        "load": f"{os.getloadavg()[0]:.1f} (1 minute, at the end)",
        "threads": str(torch.get_num_threads()),
        "versions": ", ".join(
            [
                f"Python {platform.python_version()}",
                *(
                    f"{name} {package_version(name)}"
                    for name in ("torch", "transformers")
                ),
            ]
        ),
        "command": command(),
    }


def write(
    folder: Path, name: str, facts: dict[str, str], pages: Sequence[Page], raw: object
) -> None:
    """`<date>-<name>.md` and `.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{facts['date']}-{name}"
    head = "".join(f"- {key}: {value}\n" for key, value in facts.items())
    body = "\n".join(page.markdown() for page in pages)
    (folder / f"{stem}.md").write_text(f"# {name}\n\n{head}\n{body}", "utf-8")
    text = json.dumps({**facts, "results": rounded(raw)}, separators=(",", ":"))
    (folder / f"{stem}.json").write_text(f"{text}\n", "utf-8")


def rounded(raw: Any) -> Any:
    """Five digits of every number, wherever it is."""
    if isinstance(raw, float):
        return float(f"{raw:.5g}")
    if isinstance(raw, dict):
        return {key: rounded(value) for key, value in raw.items()}
    return [rounded(v) for v in raw] if isinstance(raw, (list, tuple)) else raw
