"""Several ranks of Axolotl on gloo train as plain DistributedDataParallel does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from axolotl_jobs import LORA, Job, Pair, Result, assert_equal, overrides, pair

Run = Callable[[Job], Result]

RANKS = 2
RESIDENT = {"protrain_force_all_persistent": True}
ACCUMULATE = {"gradient_accumulation_steps": 2}

RESIDENT_PAIRS = {
    "lora": pair("llama", LORA, ACCUMULATE, plan=RESIDENT, num_ranks=RANKS),
    "full": pair("llama", ACCUMULATE, plan=RESIDENT, num_ranks=RANKS),
}


@pytest.mark.parametrize("jobs", RESIDENT_PAIRS.values(), ids=RESIDENT_PAIRS.keys())
def test_resident(run: Run, jobs: Pair) -> None:
    """Mode A is DDP, under one plan."""
    resident, plain = run(jobs.paged), run(jobs.plain)
    assert_equal(resident, plain)
    assert resident.report["plan"]["mode"] == "A"
    ranks = resident.report["ranks"]
    assert len(ranks) == RANKS and len({rank["plan"] for rank in ranks}) == 1


PAGED_PAIRS = {
    "lora": pair("llama", LORA, ACCUMULATE, plan=overrides(1, 2, 1), num_ranks=RANKS),
    "full": pair("llama", ACCUMULATE, plan=overrides(1, 2, 1), num_ranks=RANKS),
}


@pytest.mark.parametrize("jobs", PAGED_PAIRS.values(), ids=PAGED_PAIRS.keys())
def test_paged(run: Run, jobs: Pair) -> None:
    """Mode B."""
    paged, plain = run(jobs.paged), run(jobs.plain)
    assert_equal(paged, plain)
    assert paged.report["plan"]["mode"] == "B"
    assert all(rank["num_fetches"] > 0 for rank in paged.report["ranks"])
