"""One training beside another: the cells that are trained, and the runner of all of them.

Every `matrix_….py` beside this file gives its cells as `CELLS`. A cell trains the same
YAML paged and plain and compares them, or trains it paged and expects a refusal. Those
of docs/compatibility.md are in `compatibility.CELLS`, the others in `matrix_plans`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

import torch
from axolotl_jobs import Job, Pair, Result, differences, history_differences
from saving_jobs import difference


@dataclass(frozen=True)
class Cell:
    """A statement about one combination, and the trainings that prove it.

    Attributes:
        table: Heading in the document: "Model families", "Adapters", …
        row: What is combined, in a reader's words: "Qwen3-MoE", "DoRA", …
        column: With what: "full", "LoRA", "QLoRA", …
        trainings: Paged and plain; None for a refusal.
        tolerance: Largest relative difference of losses, norms and weights; 0 for bits.
        refused: Ends with one message; None where the combination works.
        reason: For people: why it is refused, or why bits cannot be equal.
        message: Part of the refusal's text.
        called: What a refusal is called in the document: there are others than ours.
        needs: Distribution that has to be installed to find out.
        without: A plain training that must come out different: without what the
            cell is about. Where Axolotl ignored that, equal would mean nothing.
        check: Asserts what the paged run has done, beside being equal to the plain one;
            by default that it paged.
        quick: Not only in the whole set.
    """

    table: str
    row: str
    column: str
    trainings: Pair | None = None
    tolerance: float = 0.0
    refused: Job | None = None
    reason: str = ""
    message: str = ""
    called: str = "refused"
    needs: str = ""
    without: Job | None = None
    check: Callable[[Result], object] | None = None
    quick: bool = False

    @property
    def name(self) -> str:
        """Unique, for tests and for the record of results."""
        return f"{self.table}/{self.row}/{self.column}"

    @property
    def is_possible(self) -> bool:
        """Whether what it needs is installed."""
        return not self.needs or next(distributions(name=self.needs), None) is not None

    @property
    def jobs(self) -> tuple[Job, ...]:
        """All that has to be trained to know whether it holds."""
        pair = self.trainings
        jobs = (pair.paged, pair.plain) if pair is not None else ()
        return (
            *jobs,
            *(job for job in (self.without, self.refused) if job is not None),
        )


def problems(cell: Cell, run: Callable[[Job], Result]) -> list[str]:
    """Why a cell does not hold, as lines to read; none if it does."""
    if cell.refused is not None:
        error = run(cell.refused).error
        if cell.message in " ".join(error.split()):
            return []
        return [f"refused with other words than {cell.message!r}:\n{error or 'not'}"]
    assert cell.trainings is not None, cell.name
    paged, plain = run(cell.trainings.paged), run(cell.trainings.plain)
    found = differences(paged, plain, cell.tolerance)
    if not found:
        found = state_differences(paged.output, plain.output)
    if not found and cell.check is not None:
        cell.check(paged)
    elif not found and not paged.report["measured"]["fetched_bytes"]:
        found.append("nothing was paged")
    if not found and cell.without is not None:
        without = run(cell.without)
        if without.error or not history_differences(plain.history, without.history, 0):
            found.append(f"trains the same without what it is about {without.error}")
    return found


def state_differences(got: Path, wanted: Path) -> list[str]:
    """What differs first in each optimizer.pt that the first one of two runs has."""
    files = [
        {p.relative_to(folder) for p in folder.glob("checkpoint-*/optimizer.pt")}
        for folder in (got, wanted)
    ]
    found = [f"{path}: only in one of them" for path in files[0] - files[1]]
    if files[1] and not files[0]:
        found.append("no optimizer.pt")
    for path in sorted(files[0] & files[1]):
        states = (
            torch.load(f / path, weights_only=False)  # nosec B614 - written just now
            for f in (got, wanted)
        )
        found.append(difference(*states, str(path)))
    return [line for line in found if line is not None]
