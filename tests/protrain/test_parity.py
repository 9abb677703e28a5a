"""Paged training is plain training: losses, gradient norms, rates and weights.

Every cell trains a tiny model twice with Axolotl, paged and plain, and compares all of
it bit by bit. Slots are filled with NaN bytes before each copy, so a weight that is read
too early or too late does not go unnoticed. The rest of the file is about the comparison
itself, and about trainings of which no plain one exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import compatibility
import matrix_plans
import pytest
import torch
from axolotl_jobs import (
    KERNELS,
    LORA,
    PAGED,
    PROTRAIN,
    SEEDING,
    Job,
    Result,
    assert_equal,
    differences,
    history_differences,
    job,
    overrides,
    pair,
    weight_differences,
)
from matrix import Cell, problems, state_differences
from matrix_families import IMAGES, MARKS, MASKS, PLAN as WITH_IMAGES
from matrix_optimizers import CLIPPED_SUMS, OPTIMIZERS, TABLE
from matrix_plans import (
    ACCUMULATE,
    ALL_PAGED,
    BF16,
    EVALUATE,
    PLANS,
    QLORA,
    RESIDENT,
    SUMS,
    Point,
    odd,
)
from safetensors.torch import save_file
from tiny_models import NUM_BLOCKS, random_model
from torch import nn

from axolotl.integrations.protrain.core.checkpoint import STAGING
from axolotl.integrations.protrain.core.engine.data_parallel import ignore_in_ddp

Run = Callable[[Job], Result]
FULL = pytest.mark.full

QUICK = {
    "Model families/Llama/full",
    "Model families/Qwen3-Next (hybrid)/full",
    "Model families/T5 (encoder and decoder)/LoRA",
    "Vision-language models/LLaVA/full",
    "Reward models/Llama, `reward_model`/full",
    "Other bases/NF4 on the disk/QLoRA",
    "Adapters/DoRA (`peft_use_dora`)/LoRA",
    "Fused LoRA kernels/Llama, blocks keep/LoRA fp32",
    "Trainers with a loss of their own/rl: dpo/full",
    *(
        f"{TABLE}/`{cell}"
        for cell in (
            "adamw_bnb_8bit`/full, clipped sums",
            "adafactor`/full",
            "lion_8bit`/full",
            "adamw_torch_8bit`/full, clipped sums",
        )
    ),
}
"""Of the document: tables and stacks of their own, and optimizer state of each kind:
blocks of 8 bits, rows and columns, made of tensors."""
CELLS = (*matrix_plans.CELLS, *compatibility.CELLS)
GATED = {"Qwen3-Next (hybrid)", "Qwen3.5 (hybrid)"}
NO_GPU = "0 active drivers"
"""Triton's words where it can be imported: elsewhere these layers run in torch."""


def parameters() -> list[Any]:
    """All cells, the quick ones first."""
    quick = [cell.quick or cell.name in QUICK for cell in CELLS]
    return [
        pytest.param(cell, id=cell.name, marks=() if now else FULL)
        for wanted in (True, False)
        for cell, now in zip(CELLS, quick, strict=True)
        if now is wanted
    ]


@pytest.mark.parametrize("cell", parameters())
@pytest.mark.sampled(60)
def test_paged_is_plain(run: Run, cell: Cell) -> None:
    if not cell.is_possible:
        pytest.skip(f"{cell.needs} is not installed")
    if cell.row in GATED and NO_GPU in run(cell.trainings.plain).error:
        pytest.skip("plain runs fail too: flash-linear-attention asks for a GPU")
    found = problems(cell, run)
    assert not found, "\n".join(found)


def test_no_two_cells_have_one_place() -> None:
    names = [cell.name for cell in CELLS]
    assert len(set(names)) == len(names)
    assert set(names) >= QUICK


def test_the_quick_cells_cover_the_grid() -> None:
    quick, points = matrix_plans.QUICK, matrix_plans.POINTS
    for one, other in combinations(range(len(matrix_plans.AXES)), 2):
        seen = {(p[one], p[other]) for p in quick}
        assert seen == {(p[one], p[other]) for p in points}
    assert len(quick) < len(points) / 20


# ------------------------------------------------------- what tells two runs apart

ORIGIN = Point("llama", "full", 1, 0.0, (0, 2), "fp32", "off")
AXIS_CHANGES = {
    "accumulation": {"accumulation": 3},
    "clip": {"clip": 0.1},
    "precision": {"precision": "bf16"},
    "base": {"base": "lora"},
}


@pytest.mark.parametrize("axis", AXIS_CHANGES)
def test_the_axes_matter(run: Run, axis: str) -> None:
    """A key that Axolotl ignores would make its cells equal for nothing."""
    changed = run(replace(ORIGIN, **AXIS_CHANGES[axis]).pair().plain)
    assert history_differences(changed.history, run(ORIGIN.pair().plain).history, 0.0)


def test_a_4_bit_base_is_another(run: Run) -> None:
    bases = (replace(ORIGIN, base=base).pair().plain for base in ("lora", "qlora"))
    one, other = map(run, bases)
    assert history_differences(one.history, other.history, 0.0)


def test_a_perturbed_run_is_caught(run: Run) -> None:
    """A ten-thousandth more of the learning rate shows in rates, losses and weights."""
    perturbed = run(job("llama", {"learning_rate": 0.01 * (1 + 1e-4)}))
    found = differences(perturbed, run(job("llama")))
    for what in ("learning_rate", "loss", "grad_norm", "model.norm.weight"):
        assert any(what in line for line in found), found


def test_a_failed_run_is_caught(tmp_path: Path) -> None:
    failed = Result(tmp_path / "one", "Traceback: …", 0.0)
    assert "Traceback" in differences(failed, failed)[0]


LOGGED = [{"step": 1.0, "loss": 2.0, "grad_norm": 0.5}, {"step": 2.0, "loss": 1.0}]
OTHER_LOGS = {
    "loss": [LOGGED[0] | {"loss": 2.0000000000000004}, LOGGED[1]],
    "nan": [LOGGED[0] | {"loss": float("nan")}, LOGGED[1]],
    "no-loss": [LOGGED[0], {"step": 2.0, "grad_norm": 0.5}],
    "a-step-less": LOGGED[:1],
}


@pytest.mark.parametrize("kind", OTHER_LOGS)
def test_a_changed_log_is_caught(kind: str) -> None:
    other = OTHER_LOGS[kind]
    assert history_differences(LOGGED, LOGGED, 0.0) == []
    assert history_differences(other, LOGGED, 0.0)
    assert history_differences(LOGGED, other, 0.0)
    assert history_differences([], [], 0.0)


WEIGHTS = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([[2.0]])}
OTHER_WEIGHTS = {
    "sign-of-zero": {"a": torch.tensor([1.0, -0.0])},
    "last-bit": {"a": torch.tensor([1.0 + 2**-23, 0.0])},
    "shape": {"b": torch.tensor([2.0])},
    "dtype": {"b": torch.tensor([[2.0]], dtype=torch.bfloat16)},
    "one-more": {"c": torch.tensor([2.0])},
}


@pytest.mark.parametrize("kind", OTHER_WEIGHTS)
def test_changed_weights_are_caught(kind: str, tmp_path: Path) -> None:
    """What is compared is what lies on the disk, read through `Result`."""
    found = []
    for name, weights in {"one": WEIGHTS, "two": WEIGHTS | OTHER_WEIGHTS[kind]}.items():
        (tmp_path / name / "out").mkdir(parents=True)
        save_file(weights, tmp_path / name / "out" / "adapter_model.safetensors")
        found.append(Result(tmp_path / name, "", 0.0).weights)
    assert weight_differences(found[0], found[0], 0.0) == []
    assert weight_differences(*found, 0.0) and weight_differences(*found[::-1], 0.0)


FUSED = {
    "swiglu": ("llama", LORA),
    "geglu": ("gemma3", LORA),
    "nf4": ("llama", QLORA),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=FULL if k != "swiglu" else ()) for k in FUSED]
)
def test_fused_kernels_in_torch_are_a_fair_reference(run: Run, kind: str) -> None:
    """They train as layers without them do."""
    family, keys = FUSED[kind]
    got, wanted = run(job(family, keys, KERNELS)), run(job(family, keys))
    assert not got.error and not wanted.error, got.error + wanted.error
    assert not history_differences(got.history, wanted.history, 1e-4)
    # another order of operations: equal bits would say that nothing was replaced
    assert history_differences(got.history, wanted.history, 0.0)


@FULL
@pytest.mark.parametrize("key", MASKS)
def test_each_key_masks_something_else(run: Run, key: str) -> None:
    """And without boundaries all text is learnt, as under train_on_inputs."""

    def masked(keys: dict[str, Any]) -> Result:
        return run(pair("llava-vision", IMAGES, LORA, keys, plan=WITH_IMAGES).paged)

    for other in ("", *MASKS):
        same = key == other or (key, other) == ("train_on_inputs", "")
        one, two = masked(MASKS[key]), masked(MASKS.get(other, {}))
        assert bool(history_differences(one.history, two.history, 0.0)) is not same
    assert MARKS in MASKS.values()


WIDE: dict[str, Any] = {
    "max_steps": 6,
    "plugins": [PROTRAIN, SEEDING, "scaling_plugin.WideWeightsPlugin"],
}
SCALED = {
    "clipped": {},
    "not clipped": {"max_grad_norm": 0.0},
    "sums, not fused": {"gradient_accumulation_steps": 2, "optimizer": "adamw_torch"},
}


@pytest.mark.parametrize("how", SCALED)
def test_a_scaler_finds_gradients_of_paged_weights(run: Run, how: str) -> None:
    """Some steps overflow, some do not; both runs leave out the same ones."""
    jobs = pair("llama", WIDE, SCALED[how], plan=overrides(1, 2, 2))
    paged, plain = run(jobs.paged), run(jobs.plain)
    assert_equal(paged, plain)
    assert paged.report["measured"]["host_optimizer_bytes"]
    steps = [entry for entry in plain.history if "learning_rate" in entry]
    assert 0 < sum("grad_norm" in step for step in steps) < len(steps) == 6


# ------------------------------------------------------------- plans and what they say

OFFLOADS = pair(
    "llama",
    {"gradient_checkpointing": "offload", "gpu_memory_limit": 1},
    plan=overrides(1, 2, 2, n_swap=1) | {"protrain_capacity_bytes": None},
)


def test_what_the_plan_answers_instead_is_said(run: Run) -> None:
    report = run(OFFLOADS.paged).report
    said = "`gradient_checkpointing: offload`, `gpu_memory_limit: 1`"
    assert (
        f"Taken over: {said}. 2 of {NUM_BLOCKS} blocks recompute, 1 swap."
        in report["notes"]
    )
    assert report["device_bytes"]["budget"] == 2**30


def test_a_plan_beyond_the_budget_is_refused(run: Run) -> None:
    keys = {"protrain_capacity_bytes": "880KiB"} | overrides(NUM_BLOCKS, 0)
    refused = run(job("llama", SUMS, LORA, PAGED, keys))
    assert "BudgetError: protrain_capacity_bytes" in refused.error


MASTER: dict[str, Any] = BF16 | ACCUMULATE | {"protrain_fp32_master": True}


@pytest.mark.parametrize("plan", [(2, 2, NUM_BLOCKS), (NUM_BLOCKS, 0)], ids=str)
def test_fp32_masters_do_not_depend_on_the_plan(
    run: Run, plan: tuple[int, ...]
) -> None:
    """Axolotl has no plain run with masters; core/test_masters.py has one by hand."""
    one, other = (
        run(job("llama", PAGED, MASTER, keys)) for keys in (ALL_PAGED, overrides(*plan))
    )
    assert_equal(one, other)
    without = run(job("llama", PAGED, BF16, ACCUMULATE, ALL_PAGED))
    assert history_differences(one.history, without.history, 0.0)


TIGHT = {
    "frozen": pair("llama", LORA, SUMS, EVALUATE, plan=ALL_PAGED),
    "ranks": pair("llama", LORA, SUMS, plan=ALL_PAGED, num_ranks=2),
    "4 bits": pair("llama", QLORA, EVALUATE, BF16, SUMS, plan=ALL_PAGED),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=FULL if k == "frozen" else ()) for k in TIGHT]
)
def test_the_host_looks_up_an_embedding_for_which_there_is_no_room(
    run: Run, kind: str
) -> None:
    """Byte by byte less than with it on the device."""
    trainings = TIGHT[kind]
    paged = run(trainings.paged)
    while "rows" not in paged.report["plan"]["placements"]:
        less = f"{paged.report['device_bytes']['peak'] - 1}B"
        paged = run(trainings.paged.but({"protrain_capacity_bytes": less}))
    assert_equal(paged, run(trainings.plain))
    if kind == "ranks":
        assert max(paged.peak_errors) < 0.002


# ---------------------------------------------------------------------- two ranks


def two(*keys: dict[str, Any]) -> Job:
    return replace(job("llama", *keys), num_ranks=2)


def test_ranks_with_other_keys_are_refused(run: Run) -> None:
    """Every rank raises it."""
    result = run(two(LORA, PAGED, odd("OtherKey")))
    assert len(result.errors) == 2
    for error in result.errors:
        assert "ConfigError: protrain_capacity_bytes: 536870912 on rank 1" in error


@pytest.mark.parametrize("loads", [True, pytest.param(False, marks=FULL)])
def test_a_plan_that_fits_nowhere_is_every_ranks_error(
    run: Run, tmp_path: Path, loads: bool
) -> None:
    keys = {"protrain_capacity_bytes": "100KiB"}
    if not loads:
        random_model("llama").config.save_pretrained(tmp_path)
        keys["base_model"] = str(tmp_path)
    result = run(two(LORA, PAGED, keys))
    first, second = (error.splitlines()[-1] for error in result.errors)
    assert "BudgetError" in first
    assert second == first.replace("BudgetError: ", "BudgetError: rank 0: ")
    assert all(("require_plan" in error) != loads for error in result.errors)


@pytest.mark.parametrize("column", [pytest.param("LoRA", marks=FULL), "full"])
def test_two_ranks_resume(run: Run, column: str) -> None:
    """From its own second step and a plain run's it ends as if it had not stopped.

    Plain ranks cannot resume without a GPU: transformers then loads to `cpu:0`.
    """
    (jobs,) = (
        cell.trainings
        for cell in matrix_plans.RANKS
        if cell.column == f"{column}, the best"
    )
    assert jobs is not None
    plain = run(jobs.plain)
    for stopped in (run(jobs.paged), plain):
        checkpoint = f"jobs/{stopped.folder.name}/out/checkpoint-2"
        saved = {path.name for path in (stopped.folder / "out/checkpoint-2").iterdir()}
        assert {f"rng_state_{rank}.pth" for rank in range(2)} < saved
        assert not (stopped.folder / "out" / STAGING).exists()
        result = run(jobs.paged.but({"resume_from_checkpoint": checkpoint}))
        assert not result.error, result.error
        assert not weight_differences(result.weights, plain.weights, tolerance=0)


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
    (1, {**ALONE, **ALL_PAGED}),
    (2, {**STEPS, **PLANS["C-some"]}),
    (2, {**STEPS, **RESIDENT}),
]


@FULL
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
        assert max(abs(own[n] - losses[n]) for n in own) <= 1e-6
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


# ------------------------------------------- optimizers that are resumed, plain or paged

SIX_STEPS = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
OTHER_PLAN = PAGED | overrides(1, 3, 2)


def six_steps(name: str, **keys: Any) -> Job:
    """Of one optimizer in one go, plain."""
    if not Cell("", "", "", needs=OPTIMIZERS[name].needs).is_possible:
        pytest.skip(f"{OPTIMIZERS[name].needs} is not installed")
    # in fp32: torch casts the state that it loads to the dtype of the weight
    keys = (
        CLIPPED_SUMS | {"optimizer": name, "bf16": False} | OPTIMIZERS[name].keys | keys
    )
    # a run that goes on evaluates once more where it begins
    return job("llama", keys, SIX_STEPS, {"val_set_size": 0.0, "eval_steps": None})


def go_on(run: Run, first: Job, step: int, settings: dict[str, Any]) -> Job:
    """Train on from a checkpoint of another run."""
    assert not run(first).error
    folder = f"{first.settings['output_dir']}/checkpoint-{step}"
    plain = dict.fromkeys(OTHER_PLAN) | {"protrain_auto_memory": False}
    return first.but(plain, {"resume_from_checkpoint": folder}, settings)


def assert_same_curve(got: Result, wanted: Result) -> None:
    found = differences(got, wanted) or state_differences(got.output, wanted.output)
    assert not found, "\n".join(found)


OBJECTS = ("apollo_adamw", "galore_adamw")
"""transformers does not let torch read their own objects: plain runs cannot resume."""


@pytest.mark.parametrize(
    "name",
    [
        "adamw_bnb_8bit",
        *(
            pytest.param(name, marks=FULL)
            for name in ("adafactor", "schedule_free_adamw", "muon", *OBJECTS)
        ),
    ],
)
def test_plain_paged_and_plain_again_are_one_curve(run: Run, name: str) -> None:
    plain = six_steps(name)
    paged = go_on(run, plain, 2, OTHER_PLAN)
    last = PAGED | ALL_PAGED if name in OBJECTS else {}
    for result in (paged, go_on(run, paged, 4, last)):
        assert_same_curve(run(result), run(plain))
    if name in OBJECTS:
        assert "weights_only" in run(go_on(run, plain, 2, {})).error


@FULL
def test_a_state_is_cast_as_the_plain_run_does(run: Run) -> None:
    plain = six_steps("adafactor", bf16=True)
    paged, again = (go_on(run, plain, 2, keys) for keys in (OTHER_PLAN, {}))
    assert_same_curve(run(paged), run(again))
    assert differences(run(again), run(plain))
