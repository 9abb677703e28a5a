"""Writes docs/compatibility.md: trains every cell of the matrix, records what came out.

`make matrix` runs it. The record, docs/compatibility.json, holds each cell's outcome and
a fingerprint of what was trained; the document is a rendering of the record alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import matrix_adapters
import matrix_bases
import matrix_composition
import matrix_families
import matrix_kernels
import matrix_optimizers
from axolotl_jobs import Workers
from checked_device import CHECKED
from matrix import Cell, problems

from axolotl.integrations.protrain.refusals import EXCLUDED, PLACES

CELLS: tuple[Cell, ...] = (
    *matrix_families.CELLS,
    *matrix_bases.CELLS,
    *matrix_adapters.CELLS,
    *matrix_kernels.CELLS,
    *matrix_composition.CELLS,
    *matrix_optimizers.CELLS,
)
DOCS = Path(__file__).parents[2] / "docs"
RECORD = DOCS / "compatibility.json"
DOCUMENT = DOCS / "compatibility.md"
fill = partial(textwrap.fill, width=100, break_on_hyphens=False, break_long_words=False)
"""As wide as tools/pages.py lets lines be."""
LIBRARIES = ("axolotl", "torch", "transformers", "peft", "bitsandbytes", "trl")


@dataclass(frozen=True)
class Entry:
    """What the record says of a cell: its place, what was trained, what came out."""

    table: str
    row: str
    column: str
    fingerprint: str
    outcome: str
    reason: str


def fingerprint(cell: Cell) -> str:
    """Changes with the YAML of any of its trainings and with what is expected."""
    # without a cache of its own no training has lessons of others
    own = [(job.family, dict(job.settings)) for job in cell.jobs]
    for _, settings in own:
        # nor does it matter where a run lies, or that its accesses are checked
        for key in ("protrain_learn_peak", "output_dir", CHECKED):
            settings.pop(key, None)
    parts = {
        "jobs": own,
        "expected": [expected(cell), cell.message, cell.reason],
    }
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def expected(cell: Cell) -> str:
    """The outcome that a cell states."""
    if cell.refused is not None:
        return cell.called
    return f"within {cell.tolerance:.0e}" if cell.tolerance else "exact"


def entry(cell: Cell) -> Entry:
    """What the record must say of a cell that holds."""
    return Entry(
        cell.table,
        cell.row,
        cell.column,
        fingerprint(cell),
        expected(cell),
        cell.reason,
    )


def read_record() -> tuple[dict[str, str], list[Entry]]:
    """Versions and entries of the record."""
    record = json.loads(RECORD.read_text())
    return record["versions"], [Entry(*entry) for entry in record["cells"]]


def write(versions: Mapping[str, str], entries: Iterable[Entry]) -> None:
    """Write record and document."""
    entries = list(entries)
    # a line for each cell, so that a change is seen where it is
    cells = ",\n".join(json.dumps(astuple(entry)) for entry in entries)
    RECORD.write_text(
        f'{{"versions": {json.dumps(versions)},\n"cells": [\n{cells}\n]}}\n'
    )
    DOCUMENT.write_text(render(versions, entries) + refused_keys())


WRITTEN = (
    "Written by `make matrix` from docs/compatibility.json: do not edit. Every cell was "
    "trained on the CPU device with tiny models, paged and plain, with {}. Cells of an "
    "optimizer whose package is not installed are kept from their last training."
)
HEADER = """\
# What works together

{written}

* `exact`: losses, gradient norms, learning rates and weights are those of the plain run,
  bit for bit; of optimizers the contents of each optimizer.pt, too.
* `within 1e-06`: the largest relative difference of any of them.
* `refused`: ends before training with one message that says why and the way out.
* `CUDA only`, `not in Axolotl`: the plain run ends so on a CPU, or everywhere.

Optimizers: `full` and adapters are in fp32, with no clipping and no accumulation; with
*clipped sums* they are in bf16, clip at a tenth and accumulate two micro-batches.
"""


def render(versions: Mapping[str, str], entries: Iterable[Entry]) -> str:
    """The document of a record: a table for each heading, reasons below it."""
    tables: dict[str, list[Entry]] = {}
    for entry in entries:
        tables.setdefault(entry.table, []).append(entry)
    named = ", ".join(f"{name} {number}" for name, number in versions.items())
    parts = [HEADER.format(written=fill(WRITTEN.format(named)))]
    for heading, cells in tables.items():
        parts.append(f"## {heading}\n\n{_table(cells)}")
    return "\n".join(parts)


REFUSED_KEYS = """
## Keys that are refused

With any value, or with some, which the message then names; what decides where weights
live is ProTrain's to decide.

| key | why | way out |
| --- | --- | --- |
"""


def refused_keys() -> str:
    """The table behind the refusals, keys of one reason together."""
    keys: dict[tuple[str, str], list[str]] = {}
    for row in EXCLUDED:
        keys.setdefault((row.why, row.way_out), []).append(f"`{row.key}`")
    keys["decides where weights live", "Remove the key"] = [f"`{k}`" for k in PLACES]
    rows = [f"| {', '.join(k)} | {' | '.join(why)} |\n" for why, k in keys.items()]
    return REFUSED_KEYS + "".join(rows)


def _table(cells: list[Entry]) -> str:
    columns = list(dict.fromkeys(cell.column for cell in cells))
    rows = list(dict.fromkeys(cell.row for cell in cells))
    reasons = list(dict.fromkeys(cell.reason for cell in cells if cell.reason))
    texts = {
        (cell.row, cell.column): cell.outcome
        + (f" [{reasons.index(cell.reason) + 1}]" if cell.reason else "")
        for cell in cells
    }
    lines = [["", *columns], ["---"] * (len(columns) + 1)]
    lines += [[row, *(texts.get((row, c), "") for c in columns)] for row in rows]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    notes = "".join(
        "\n" + fill(text, initial_indent=f"{number}. ", subsequent_indent="   ")
        for number, text in enumerate(reasons, 1)
    )
    return f"{table}{notes}\n" if notes else table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--stale",
        action="store_true",
        help="train only cells that the record does not hold as they are",
    )
    args = parser.parse_args()
    versions = {name: version(name) for name in LIBRARIES}
    recorded, entries = read_record() if RECORD.exists() else ({}, [])
    known = set(entries)
    kept = known if args.stale and recorded == versions else set()
    wanted, cells = [], []
    for cell in CELLS:
        if cell.is_possible or entry(cell) in known:
            cells.append(cell)
        if not cell.is_possible:
            print(f"as recorded {cell.name}: {cell.needs} is not installed")
        elif entry(cell) not in kept:
            wanted.append(cell)
    num_failed = 0
    # jobs import this package from where it lies, whatever they change directory to
    with TemporaryDirectory() as folder:
        workers = Workers(Path(folder))
        workers.expect(job for cell in wanted for job in cell.jobs)
        try:
            for cell in wanted:
                found = problems(cell, workers.run)
                num_failed += bool(found)
                lines = "".join(f"\n    {line}" for line in found)
                print(f"{'FAILED' if found else 'holds '} {cell.name}{lines}")
        finally:
            workers.close()
    if num_failed:
        print(f"{num_failed} of {len(wanted)} cells fail: nothing was written")
        return 1
    write(versions, map(entry, cells))
    kept_as = f"{len(cells) - len(wanted)} as recorded"
    print(f"{len(wanted)} cells hold, {kept_as}: {os.path.relpath(DOCUMENT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
