"""docs/compatibility.md says what the tests found, and what they find today."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from axolotl_jobs import Job, Result
from compatibility import (
    CELLS,
    DOCUMENT,
    Entry,
    entry,
    fingerprint,
    problems,
    read_record,
    refused_keys,
    render,
)
from matrix import Cell
from matrix_optimizers import TABLE as OPTIMIZERS

Run = Callable[[Job], Result]

QUICK = {
    *{
        cell.table: cell.name
        for cell in reversed(CELLS)
        # core/test_compiled.py compiles less
        if cell.table != "Compiled blocks"
    }.values(),
    "Model families/Qwen3-Next (hybrid)/full",
    "Model families/T5 (encoder and decoder)/LoRA",
    *(
        f"{OPTIMIZERS}/`{cell}"
        for cell in (
            "adamw_bnb_8bit`/full, clipped sums",
            "adafactor`/full",
            "lion_8bit`/full",
            "adamw_torch_8bit`/full, clipped sums",
        )
    ),
}
"""The first cell of each table, stacks that are not one chain of equal blocks, and state
of each kind: blocks of 8 bits, rows and columns, made of tensors."""

GATED = {"Qwen3-Next (hybrid)", "Qwen3.5 (hybrid)"}


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(
            cell,
            id=cell.name,
            marks=() if cell.name in QUICK else pytest.mark.full,
        )
        for cell in CELLS
    ],
)
@pytest.mark.sampled(6)
def test_cell(run: Run, cell: Cell) -> None:
    if not cell.is_possible:
        pytest.skip(f"{cell.needs} is not installed")
    if cell.row in GATED and find_spec("fla") and not torch.cuda.is_available():
        pytest.skip("plain runs fail too: flash-linear-attention asks for a GPU")
    found = problems(cell, run)
    assert not found, "\n".join(found)


def test_the_record_is_of_these_cells() -> None:
    """If not, run `make matrix`."""
    _, recorded = read_record()
    assert recorded == [entry(cell) for cell in CELLS]


def test_the_document_is_the_rendering_of_the_record() -> None:
    """If not, it was edited by hand: change cells and run `make matrix`."""
    assert DOCUMENT.read_text() == render(*read_record()) + refused_keys()


def test_no_two_cells_have_one_place() -> None:
    names = [cell.name for cell in CELLS]
    assert len(set(names)) == len(names)
    assert set(names) >= QUICK


def test_a_cell_is_a_training_or_a_refusal_with_its_reason() -> None:
    for cell in CELLS:
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
