"""Writes README.md into a folder of `gpu.sh`: what passed, predicted beside measured.

python benchmarks/gpu_summary.py FOLDER
"""

from __future__ import annotations

import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

from machine import describe

GIB = 1 << 30


def summary(folder: Path) -> str:
    """The page, from the files that the parts have left."""
    facts = "; ".join(f"{name} {value}" for name, value in describe().items())
    ends = (folder / "parts.txt").read_text("utf-8").splitlines()
    pages = sorted(folder.glob("*compare*.md"))
    return "\n".join(
        [
            f"# `bash benchmarks/gpu.sh`, {date.today()}\n\n{facts}\n\n## Parts\n",
            "| part | end | last line |\n| --- | --- | --- |",
            *(_part(folder, *line.partition(": ")[::2]) for line in ends),
            "\n## Predicted and measured\n",
            "Peaks as torch's allocator counts, without the context.\n",
            "| run | peak, GiB: predicted | measured | step, s: predicted | measured |",
            "| --- | --- | --- | --- | --- |",
            *(_run(path) for path in sorted(folder.glob("*.json")) if _is_report(path)),
            "\n## Beside others\n",
            *(f"* [{page.stem}]({page.name})" for page in pages),
            "",
        ]
    )


def _part(folder: Path, name: str, end: str) -> str:
    text = (folder / f"{name}.txt").read_text("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1].replace("|", "/")[:80] if lines else ""
    return f"| [{name}]({name}.txt) | {end} | {last} |"


def _is_report(path: Path) -> bool:
    return "compared" in json.loads(path.read_text("utf-8"))


def _run(path: Path) -> str:
    report: dict[str, Any] = json.loads(path.read_text("utf-8"))
    compared = report["compared"]
    context = report["device_bytes"]["terms"]["context and workspaces"]
    peak, step = compared["device peak bytes"], compared["step seconds"]
    cells = [path.stem, *_pair(peak, GIB, context), *_pair(step)]
    return f"| {' | '.join(cells)} |"


def _pair(row: dict[str, float], unit: int = 1, unseen: int = 0) -> tuple[str, str]:
    predicted, measured = row["predicted"] - unseen, row["measured"]
    off = f" ({measured / predicted - 1:+.1%})" if predicted else ""
    return f"{predicted / unit:.2f}", f"{measured / unit:.2f}{off}"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    (target / "README.md").write_text(summary(target), "utf-8")
