"""Several ranks of Axolotl on gloo train as plain DistributedDataParallel does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from axolotl_jobs import (
    LORA,
    Job,
    Pair,
    Result,
    assert_equal,
    history_differences,
    overrides,
    pair,
    weight_differences,
)

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


SHARDED = {"protrain_zero3_shard": True}
PLANS: dict[str, dict[str, Any]] = {
    "B-some": overrides(1, 2, 1),
    "C-all": {**overrides(0, 2, 1), **SHARDED},
    "C-some": {**overrides(1, 2, 1), **SHARDED},
    "B-all": overrides(0, 2, 1),
    "C-searched": SHARDED,
    "B-searched": {"protrain_force_replicated_cpu_offload": True},
}
BY_DEFAULT = ("B-some", "C-all")
BF16 = {"bf16": True}
UNCLIPPED = {"max_grad_norm": 0.0}
ROUNDING = 1e-6
"""Ranks add up the squares of their own shards, in another order than plain clipping."""


def cases(*settings: dict[str, Any]) -> list[Any]:
    """A pair for each plan; most of them are marked."""
    return [
        pytest.param(
            pair("llama", ACCUMULATE, *settings, plan=plan, num_ranks=RANKS),
            id=name,
            marks=() if name in BY_DEFAULT else pytest.mark.full,
        )
        for name, plan in PLANS.items()
    ]


@pytest.mark.parametrize("jobs", cases(LORA))
def test_adapters_over_a_paged_base(run: Run, jobs: Pair) -> None:
    paged, plain = run(jobs.paged), run(jobs.plain)
    assert_equal(paged, plain)
    is_sharded = bool(jobs.paged.settings.get("protrain_zero3_shard"))
    assert paged.report["plan"]["mode"] == ("C" if is_sharded else "B")
    for rank in paged.report["ranks"]:
        assert rank["num_fetches"] > 0
        assert (rank["num_gathers"] > 0) is is_sharded


@pytest.mark.parametrize("jobs", [*cases(UNCLIPPED), *cases(UNCLIPPED, BF16)])
def test_paged_weights(run: Run, jobs: Pair) -> None:
    """Also where nothing that trains is left for DDP."""
    paged, plain = run(jobs.paged), run(jobs.plain)
    assert not weight_differences(paged.weights, plain.weights, tolerance=0)
    assert not history_differences(paged.history, plain.history, ROUNDING)
    assert all(rank["num_reduces"] > 0 for rank in paged.report["ranks"])


CLIPPED_FULL = pair("llama", ACCUMULATE, plan=PLANS["B-some"], num_ranks=RANKS)


@pytest.mark.parametrize("jobs", [CLIPPED_FULL], ids=["full"])
def test_clipping(run: Run, jobs: Pair) -> None:
    assert_equal(run(jobs.paged), run(jobs.plain), ROUNDING)
