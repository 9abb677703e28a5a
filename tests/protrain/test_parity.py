"""Paged training is plain training: losses, gradient norms, rates and weights.

Every cell of the grid trains a tiny model twice with Axolotl, paged and plain, and
compares all of it bit by bit. Slots are filled with NaN bytes before each copy, so a weight that
is read too early or too late does not go unnoticed. The unmarked cells hold each
combination of values of any two axes; the rest of the grid is marked `full`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from axolotl_jobs import (
    LORA,
    PROTRAIN,
    SEEDING,
    Job,
    Pair,
    Result,
    assert_equal,
    differences,
    history_differences,
    job,
    overrides,
    pair,
    weight_differences,
)
from covering import covering
from safetensors.torch import save_file
from tiny_models import FAMILIES, NUM_BLOCKS

Run = Callable[[Job], Result]

AXES: dict[str, tuple[Any, ...]] = {
    "family": tuple(FAMILIES),
    "adapter": ("lora", "full"),
    "accumulation": (1, 3),
    "clip": (0.1, 0.0),
    "n_persist": (0, NUM_BLOCKS // 2),
    "precision": ("fp32", "bf16"),
    "recompute": ("off", "reentrant", "non-reentrant"),
}
CONV1D_LORA = {
    # GPT-2 keeps its weights transposed, in a class that lora_target_linear skips
    "lora_target_linear": False,
    "lora_target_modules": ["c_attn", "c_proj", "c_fc"],
    "lora_fan_in_fan_out": True,
}


@dataclass(frozen=True)
class Cell:
    """One point of the grid; the fields are the axes."""

    family: str
    adapter: str
    accumulation: int
    clip: float
    n_persist: int
    precision: str
    recompute: str

    @property
    def id(self) -> str:
        return "-".join(
            (
                self.family,
                self.adapter,
                f"accumulate{self.accumulation}",
                f"clip{self.clip:g}",
                f"resident{self.n_persist}",
                self.precision,
                f"recompute_{self.recompute}",
            )
        )

    def pair(self) -> Pair:
        settings: dict[str, Any] = {
            "gradient_accumulation_steps": self.accumulation,
            "max_grad_norm": self.clip,
            "bf16": self.precision == "bf16",
        }
        if self.adapter == "lora":
            settings |= LORA
            if self.family == "gpt2":
                settings |= CONV1D_LORA
        plain: dict[str, Any] = {}
        n_checkpoint = 0
        if self.recompute != "off":
            settings["gradient_checkpointing"] = True
            reentrant = self.recompute == "reentrant"
            plain["gradient_checkpointing_kwargs"] = {"use_reentrant": reentrant}
            n_checkpoint = NUM_BLOCKS - self.n_persist
        plan = overrides(self.n_persist, 2, n_checkpoint)
        return pair(self.family, settings, plan=plan, plain=plain)


def trainable_anywhere(cell: Cell) -> bool:
    """Axolotl gives GPT-2's layer norms two dtypes in bf16, which a CPU refuses."""
    return (cell.family, cell.adapter, cell.precision) != ("gpt2", "full", "bf16")


CELLS = [
    cell
    for values in product(*AXES.values())
    if trainable_anywhere(cell := Cell(**dict(zip(AXES, values, strict=True))))
]


QUICK = {Cell(*values) for values in covering([astuple(cell) for cell in CELLS])}


def grid() -> list[Any]:
    """All cells, the quick ones first."""
    return [
        pytest.param(
            cell, cell.pair(), id=cell.id, marks=() if quick else pytest.mark.full
        )
        for quick in (True, False)
        for cell in CELLS
        if (cell in QUICK) == quick
    ]


@pytest.mark.parametrize(("cell", "trainings"), grid())
def test_paged_is_plain(run: Run, cell: Cell, trainings: Pair) -> None:
    paged, plain = run(trainings.paged), run(trainings.plain)

    assert_equal(paged, plain)
    assert_paged_as_asked(paged, cell)
    if cell.clip:
        norms = [entry["grad_norm"] for entry in plain.history if "loss" in entry]
        assert min(norms) > cell.clip, "nothing was clipped"


def assert_paged_as_asked(paged: Result, cell: Cell) -> None:
    """An inert plugin is equal to anything: what it moved proves that it ran."""
    plan, measured = paged.report["plan"], paged.report["measured"]
    assert plan["mode"] == "B"
    assert plan["n_persist"] == cell.n_persist
    assert plan["placements"][:NUM_BLOCKS].count("paged") == NUM_BLOCKS - cell.n_persist
    assert measured["num_steps"] == 3
    assert measured["num_fetches"] > 0
    if cell.n_persist == 0:
        # four chunks in two slots: each micro-batch has to fetch the other half
        assert measured["num_fetches"] >= 2 * 3 * cell.accumulation
    assert (measured["offloaded_bytes"] > 0) == (cell.adapter == "full")


PLANS = [
    (n_persist, n_buffer, n_checkpoint)
    for n_persist in range(NUM_BLOCKS)
    for n_buffer in range(1, NUM_BLOCKS - n_persist + 1)
    for n_checkpoint in (0, NUM_BLOCKS - 1)
]


def plan_pair(adapter: str, plan: tuple[int, int, int]) -> Pair:
    settings = {
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
        **(LORA if adapter == "lora" else {}),
    }
    return pair("llama", settings, plan=overrides(*plan))


@pytest.mark.parametrize(
    "trainings",
    [
        pytest.param(
            plan_pair(adapter, plan),
            id=f"{adapter}-{plan}",
            marks=() if number % 2 == full else pytest.mark.full,
        )
        for full, adapter in enumerate(("lora", "full"))
        for number, plan in enumerate(PLANS)
    ],
)
@pytest.mark.sampled(4)
def test_every_plan_gives_the_same_weights(run: Run, trainings: Pair) -> None:
    """All numbers of resident chunks and slots that the model allows."""
    assert_equal(run(trainings.paged), run(trainings.plain))


@pytest.mark.parametrize(
    "trainings",
    [
        pytest.param(
            pair("llama", {"max_grad_norm": 2.5}, plan=overrides(0, 2)), id="full"
        )
    ],
)
def test_a_limit_between_the_norms(run: Run, trainings: Pair) -> None:
    """Some steps are clipped and some are not."""
    paged, plain = run(trainings.paged), run(trainings.plain)
    norms = [entry["grad_norm"] for entry in plain.history if "loss" in entry]
    assert min(norms) < 2.5 < max(norms)
    assert_equal(paged, plain)


ADAMW_TORCH = {"optimizer": "adamw_torch", "max_grad_norm": 0.1}


@pytest.mark.parametrize(
    "trainings",
    [
        pytest.param(pair(family, ADAMW_TORCH, plan=overrides(0, 2)), id=family)
        for family in ("llama", "qwen3", "mixtral")
    ],
)
def test_adamw_torch_is_close(run: Run, trainings: Pair) -> None:
    """The host update is torch's fused one, which rounds in another order.

    Not with GPT-2 and Gemma: weights that begin at zero are as small as the first
    steps, and rounding is large beside them.
    """
    paged, plain = run(trainings.paged), run(trainings.plain)
    assert_equal(paged, plain, tolerance=1e-6)


@pytest.mark.parametrize(
    "trainings",
    [pytest.param(pair("llama", ADAMW_TORCH, LORA, plan=overrides(0, 2)), id="lora")],
)
def test_adamw_torch_on_adapters_is_equal(run: Run, trainings: Pair) -> None:
    """Adapters stay on the device and keep the plain run's own optimizer."""
    assert_equal(run(trainings.paged), run(trainings.plain))


UNLISTED = {"plugins": [SEEDING], "protrain_auto_memory": None}
LISTED = {"plugins": [PROTRAIN, SEEDING]}


@pytest.mark.parametrize(
    "trainings",
    [
        pytest.param(Pair(job("llama", LISTED, s), job("llama", s, UNLISTED)), id=name)
        for name, s in {"lora": LORA, "full": {}}.items()
    ],
)
def test_the_reference_is_plain(run: Run, trainings: Pair) -> None:
    """Switched off, the plugin leaves no trace: the references of all other tests."""
    off, unlisted = run(trainings.paged), run(trainings.plain)
    assert_equal(off, unlisted)
    assert not (off.output / "protrain").exists()


PERTURBED = Pair(
    paged=job("llama", {"learning_rate": 0.01 * (1 + 1e-4)}), plain=job("llama")
)


@pytest.mark.parametrize("trainings", [pytest.param(PERTURBED, id="learning_rate")])
def test_a_perturbed_run_is_caught(run: Run, trainings: Pair) -> None:
    """A ten-thousandth more of the learning rate shows in rates, losses and weights."""
    found = differences(run(trainings.paged), run(trainings.plain))
    for what in ("learning_rate", "loss", "grad_norm", "model.norm.weight"):
        assert any(what in line for line in found), found


def test_a_failed_run_is_caught(tmp_path: Path) -> None:
    failed = Result(tmp_path / "one", "Traceback: …", 0.0)
    assert "Traceback" in differences(failed, failed)[0]


LOGGED = [{"step": 1.0, "loss": 2.0, "grad_norm": 0.5}, {"step": 2.0, "loss": 1.0}]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param([LOGGED[0] | {"loss": 2.0000000000000004}, LOGGED[1]], id="loss"),
        pytest.param([LOGGED[0] | {"loss": float("nan")}, LOGGED[1]], id="nan"),
        pytest.param([LOGGED[0], {"step": 2.0, "grad_norm": 0.5}], id="no-loss"),
        pytest.param(LOGGED[:1], id="a-step-less"),
    ],
)
def test_a_changed_log_is_caught(other: list[dict[str, float]]) -> None:
    assert history_differences(LOGGED, LOGGED, 0.0) == []
    assert history_differences(other, LOGGED, 0.0)
    assert history_differences(LOGGED, other, 0.0)


def test_an_empty_log_is_caught() -> None:
    assert history_differences([], [], 0.0)


WEIGHTS = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([[2.0]])}


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"a": torch.tensor([1.0, -0.0])}, id="sign-of-zero"),
        pytest.param({"a": torch.tensor([1.0 + 2**-23, 0.0])}, id="last-bit"),
        pytest.param({"b": torch.tensor([2.0])}, id="shape"),
        pytest.param({"b": torch.tensor([[2.0]], dtype=torch.bfloat16)}, id="dtype"),
        pytest.param({"c": torch.tensor([2.0])}, id="one-more"),
    ],
)
def test_changed_weights_are_caught(other: dict[str, torch.Tensor]) -> None:
    assert weight_differences(WEIGHTS, WEIGHTS, 0.0) == []
    assert weight_differences(WEIGHTS | other, WEIGHTS, 0.0)
    assert weight_differences(WEIGHTS, WEIGHTS | other, 0.0)


def test_a_swapped_adapter_file_is_caught(tmp_path: Path) -> None:
    """What is compared is what lies on the disk, read through `Result`."""
    for name, weights in {"one": WEIGHTS, "other": {"a": WEIGHTS["a"]}}.items():
        (tmp_path / name / "out").mkdir(parents=True)
        save_file(weights, tmp_path / name / "out" / "adapter_model.safetensors")
    one, other = (Result(tmp_path / name, "", 0.0) for name in ("one", "other"))
    assert weight_differences(one.weights, other.weights, 0.0) == [
        "b: only in one of them"
    ]


ORIGIN = Cell("llama", "full", 1, 0.0, 0, "fp32", "off")


@pytest.mark.parametrize(
    "trainings",
    [
        pytest.param(Pair(replace(ORIGIN, **change).pair().plain, ORIGIN.pair().plain))
        for change in (
            {"accumulation": 3},
            {"clip": 0.1},
            {"precision": "bf16"},
        )
    ],
    ids=["accumulation", "clip", "precision"],
)
def test_the_axes_matter(run: Run, trainings: Pair) -> None:
    """A key that Axolotl ignores would make its cells equal for nothing."""
    changed, origin = run(trainings.paged), run(trainings.plain)
    assert history_differences(changed.history, origin.history, 0.0)


def test_the_quick_cells_cover_the_grid() -> None:
    def pairs(cells: Iterable[Cell]) -> set[tuple[str, str]]:
        return {(cell.family, cell.recompute) for cell in cells}

    assert pairs(QUICK) == pairs(CELLS)
    assert len(QUICK) < len(CELLS) / 8
