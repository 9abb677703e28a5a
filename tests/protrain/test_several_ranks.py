"""Several ranks of Axolotl on gloo train as plain DistributedDataParallel does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from axolotl_jobs import (
    LORA,
    PAGED,
    PROTRAIN,
    SEEDING,
    Job,
    Pair,
    Result,
    assert_equal,
    history_differences,
    job,
    overrides,
    pair,
    weight_differences,
)
from compatibility import state_differences
from tiny_models import random_model
from torch import nn

from axolotl.integrations.protrain.core.checkpoint import STAGING
from axolotl.integrations.protrain.core.engine.data_parallel import ignore_in_ddp

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
"""Sums of more than two numbers depend on their order."""
UNPLANNED = 0.002
"""Of a device peak: norms, and the sum of losses."""


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
@pytest.mark.sampled(2)
def test_paged_weights(run: Run, jobs: Pair) -> None:
    """Also where nothing that trains is left for DDP."""
    paged, plain = run(jobs.paged), run(jobs.plain)
    assert_equal(paged, plain)
    assert all(rank["num_reduces"] > 0 for rank in paged.report["ranks"])
    assert max(paged.peak_errors) < UNPLANNED


QLORA = {**LORA, "adapter": "qlora", "load_in_4bit": True}
QUANTISED = {
    "qlora": pair("llama", QLORA, plan=PLANS["C-some"], num_ranks=RANKS),
    "8_bits": pair(
        "llama",
        LORA,
        {"load_in_8bit": True},
        plan=PLANS["C-some"],
        num_ranks=RANKS,
    ),
    "dora": pair(
        "llama", QLORA, {"peft_use_dora": True}, plan=PLANS["B-some"], num_ranks=RANKS
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("jobs", QUANTISED.values(), ids=QUANTISED.keys())
def test_a_base_that_ranks_quantise_together(run: Run, jobs: Pair) -> None:
    """Each its part, unless adapters begin with what they read from the base."""
    assert_equal(run(jobs.paged), run(jobs.plain))


CLIPPED_FULL = pair("llama", ACCUMULATE, plan=PLANS["B-some"], num_ranks=RANKS)


@pytest.mark.parametrize("jobs", [CLIPPED_FULL], ids=["full"])
def test_clipping(run: Run, jobs: Pair) -> None:
    paged = run(jobs.paged)
    assert_equal(paged, run(jobs.plain))
    assert max(paged.peak_errors) < UNPLANNED


SAVES = {"save_strategy": "steps", "save_steps": 2}
OTHERS = {
    name: pair(
        "llama",
        ACCUMULATE | SAVES,
        {"optimizer": name, **keys},
        plan=PLANS[plan],
        num_ranks=RANKS,
    )
    for name, plan, keys in (
        ("adamw_bnb_8bit", "C-all", BF16),
        ("adafactor", "B-some", {}),
        ("lion_8bit", "B-some", BF16),
        ("schedule_free_adamw", "C-all", {}),
    )
}


@pytest.mark.parametrize(
    "jobs",
    [
        pytest.param(
            jobs, id=name, marks=() if name == "adamw_bnb_8bit" else pytest.mark.full
        )
        for name, jobs in OTHERS.items()
    ],
)
def test_optimizers(run: Run, jobs: Pair) -> None:
    """And the first rank saves the state of all, as the plain one writes it."""
    paged, plain = run(jobs.paged), run(jobs.plain)
    assert_equal(paged, plain)
    assert not state_differences(paged.output, plain.output)
    assert max(paged.peak_errors) < UNPLANNED


ODD_RANKS = (
    "OtherCache",
    "OtherDefaultCache",
    "OtherThreads",
    "OtherProcessor",
    "LessHostMemory",
    "FasterClock",
    "CachedBandwidth",
    "CachedProducts",
    "OtherVersions",
    "OtherEnvironment",
)


def odd(name: str) -> dict[str, Any]:
    return {"plugins": [f"odd_rank_plugin.{name}", PROTRAIN, SEEDING]}


@pytest.mark.parametrize(
    "jobs",
    [
        pytest.param(
            pair(
                "llama",
                LORA,
                plan={**PLANS["B-searched"], **odd(name)},
                num_ranks=RANKS,
            ),
            id=name,
            marks=() if name == "LessHostMemory" else pytest.mark.full,
        )
        for name in ODD_RANKS
    ],
)
def test_ranks_on_unequal_machines_run_one_plan(run: Run, jobs: Pair) -> None:
    odd_one, plain = run(jobs.paged), run(jobs.plain)
    assert_equal(odd_one, plain)
    assert len({rank["plan"] for rank in odd_one.report["ranks"]}) == 1


def test_ranks_with_other_keys_are_refused(run: Run) -> None:
    """Every rank raises it."""
    result = run(replace(job("llama", LORA, PAGED, odd("OtherKey")), num_ranks=RANKS))
    assert len(result.errors) == RANKS
    for error in result.errors:
        assert "ConfigError: protrain_capacity_bytes: 536870912 on rank 1" in error


@pytest.mark.parametrize("loads", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_plan_that_fits_nowhere_is_every_ranks_error(
    run: Run, tmp_path: Path, loads: bool
) -> None:
    keys = {"protrain_capacity_bytes": "100KiB"}
    if not loads:
        random_model("llama").config.save_pretrained(tmp_path)
        keys["base_model"] = str(tmp_path)
    result = run(replace(job("llama", LORA, PAGED, keys), num_ranks=RANKS))
    first, second = (error.splitlines()[-1] for error in result.errors)
    assert "BudgetError" in first
    assert second == first.replace("BudgetError: ", "BudgetError: rank 0: ")
    assert all(("require_plan" in error) != loads for error in result.errors)


SAVED = {
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 2,
    "val_set_size": 4,
    "eval_steps": 2,
    "load_best_model_at_end": True,
    "include_tkps": True,
}
KEPT = {
    "adapter": pair("llama", LORA, SAVED, plan=PLANS["B-some"], num_ranks=RANKS),
    "full": pair("llama", UNCLIPPED, SAVED, plan=PLANS["C-some"], num_ranks=RANKS),
}


KEPT_CASES = [
    pytest.param(jobs, id=kind, marks=pytest.mark.full if kind == "adapter" else ())
    for kind, jobs in KEPT.items()
]


@pytest.mark.parametrize("jobs", KEPT_CASES)
def test_evaluation_and_the_best_of_its_checkpoints(run: Run, jobs: Pair) -> None:
    paged, plain = run(jobs.paged), run(jobs.plain)
    assert_equal(paged, plain)
    assert any("eval_loss" in entry for entry in paged.history)


@pytest.mark.parametrize("jobs", KEPT_CASES)
def test_resume(run: Run, jobs: Pair) -> None:
    """From its own second step and a plain run's it ends as if it had not stopped.

    Plain ranks cannot resume without a GPU: transformers then loads to `cpu:0`.
    """
    plain = run(jobs.plain)
    for stopped in (run(jobs.paged), plain):
        checkpoint = f"jobs/{stopped.folder.name}/out/checkpoint-2"
        saved = {path.name for path in (stopped.folder / "out/checkpoint-2").iterdir()}
        assert {f"rng_state_{rank}.pth" for rank in range(RANKS)} < saved
        assert not (stopped.folder / "out" / STAGING).exists()
        result = run(jobs.paged.but({"resume_from_checkpoint": checkpoint}))
        assert not result.error, result.error
        assert not weight_differences(result.weights, plain.weights, tolerance=0)


UNEVEN = {
    "max_steps": None,
    "num_epochs": 1,
    "micro_batch_size": 3,
    "gradient_accumulation_steps": 4,
}


@pytest.mark.parametrize(
    "jobs",
    [
        pytest.param(pair("llama", UNEVEN, plan=PLANS["C-some"], num_ranks=RANKS)),
        pytest.param(
            pair("llama", LORA, UNEVEN, plan=PLANS["B-some"], num_ranks=RANKS),
            marks=pytest.mark.full,
        ),
    ],
    ids=["full", "adapter"],
)
def test_an_epoch_that_no_number_divides(run: Run, jobs: Pair) -> None:
    """Its last step has fewer micro-batches, and its last batch fewer rows."""
    paged, plain = run(jobs.paged), run(jobs.plain)
    assert not paged.error and not plain.error
    assert not weight_differences(paged.weights, plain.weights, ROUNDING)
    assert not history_differences(paged.history, plain.history, ROUNDING)


STEPS = {
    "max_steps": 6,
    "save_strategy": "steps",
    "save_steps": 1,
    "save_total_limit": 9,
}
ALONE = {**STEPS, **ACCUMULATE}
CHAIN = [
    (1, {**ALONE, **overrides(1, 2, 1)}),
    (2, {**STEPS, **PLANS["B-some"]}),
    (1, {**ALONE, **overrides(0, 2, 0)}),
    (2, {**STEPS, **PLANS["C-some"]}),
    (2, {**STEPS, **RESIDENT}),
]


@pytest.mark.full
def test_one_curve_over_ranks_and_modes(run: Run) -> None:
    """Each run goes on from a step of the one before; all see the same batches."""
    losses = {
        e["step"]: e["loss"] for e in run(job("llama", ALONE)).history if "loss" in e
    }
    checkpoint = ""
    for step, (num_ranks, settings) in enumerate(CHAIN, start=1):
        resumed = {"resume_from_checkpoint": checkpoint} if checkpoint else {}
        result = run(
            replace(job("llama", PAGED, settings, resumed), num_ranks=num_ranks)
        )
        assert not result.error, result.error
        own = {e["step"]: e["loss"] for e in result.history if "loss" in e}
        assert set(own) == set(losses)
        assert max(abs(own[n] - losses[n]) for n in own) <= ROUNDING
        checkpoint = f"jobs/{result.folder.name}/out/checkpoint-{step}"


def test_what_ddp_ignores_is_put_back() -> None:
    """Another plugin's entries count too."""
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("one", "two", "three")})
    for others in (None, ["three.bias"]):
        if others is not None:
            model._ddp_params_and_buffers_to_ignore = others
        with ignore_in_ddp(model, ["one.weight", "two.weight"]):
            assert set(model._ddp_params_and_buffers_to_ignore) == {
                "one.weight",
                "two.weight",
                *(others or ()),
            }
        assert vars(model).get("_ddp_params_and_buffers_to_ignore") is others
