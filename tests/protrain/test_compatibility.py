"""docs/compatibility.md says what the tests found, and what they find today."""

from __future__ import annotations

from dataclasses import replace

import matrix_plans
from compatibility import (
    CELLS,
    DOCUMENT,
    Entry,
    entry,
    fingerprint,
    read_record,
    refused_keys,
    render,
)


def test_the_record_is_of_these_cells() -> None:
    """If not, run `make matrix`."""
    _, recorded = read_record()
    assert recorded == [entry(cell) for cell in CELLS]


def test_the_document_is_the_rendering_of_the_record() -> None:
    """If not, it was edited by hand: change cells and run `make matrix`."""
    assert DOCUMENT.read_text() == render(*read_record()) + refused_keys()


def test_a_cell_is_a_training_or_a_refusal_with_its_reason() -> None:
    for cell in (*CELLS, *matrix_plans.CELLS):
        assert (cell.trainings is None) != (cell.refused is None), cell.name
        assert bool(cell.refused) == bool(cell.message), cell.name
        if cell.refused or cell.tolerance:
            assert cell.reason, cell.name


def test_a_fingerprint_changes_with_any_key() -> None:
    cell = next(cell for cell in CELLS if cell.trainings is not None)
    assert cell.trainings is not None
    paged = cell.trainings.paged.but({"learning_rate": 0.02})
    other = replace(cell, trainings=replace(cell.trainings, paged=paged))
    assert fingerprint(other) != fingerprint(cell)
    assert fingerprint(replace(cell, tolerance=1e-3)) != fingerprint(cell)


def test_a_document_has_a_table_for_each_heading() -> None:
    entries = [
        Entry("Bases", "NF4", "kept", "", "exact", ""),
        Entry("Bases", "NF4", "recomputed", "", "within 1e-06", "It rounds."),
        Entry("Bases", "LLM.int8", "kept", "", "refused", "It moves."),
        Entry("Adapters", "DoRA", "LoRA", "", "exact", ""),
    ]
    text = render({"torch": "2.13.0"}, entries)
    assert "with torch 2.13.0." in text
    assert text.endswith(
        "## Bases\n\n"
        "|  | kept | recomputed |\n"
        "| --- | --- | --- |\n"
        "| NF4 | exact | within 1e-06 [1] |\n"
        "| LLM.int8 | refused [2] |  |\n"
        "\n1. It rounds.\n2. It moves.\n"
        "\n## Adapters\n\n"
        "|  | LoRA |\n"
        "| --- | --- |\n"
        "| DoRA | exact |\n"
    )
