"""The cells of docs/compatibility.md: what is trained for each, and what must come out.

Every `matrix_….py` beside this file gives its cells as `CELLS`. A cell trains the same
YAML paged and plain and compares them, or trains it paged and expects a refusal.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import distributions

from axolotl_jobs import Job, Pair


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
