"""Frozen embeddings that the host looks up, through Axolotl: the plain run's numbers.

Beside each is what else a limit of the device moves to the host: state of adapters, and
of weights outside blocks. Losses, norms, rates and weights are compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from axolotl_jobs import LORA, Job, Pair, Result, assert_equal, overrides, pair
from matrix_adapters import HEAD
from matrix_composition import COMPOSED, IN_TORCH, PREFERRED

Run = Callable[[Job], Result]

SUMS = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}
EVALUATED = {"val_set_size": 0.2, "eval_strategy": "steps", "eval_steps": 1}
WIDE = LORA | {"lora_r": 512, "lora_alpha": 1024}
FULL = pytest.mark.full
PAGED = overrides(0, 2)
CHUNKED = {"chunked_cross_entropy": True}
FUSED = {"liger_fused_linear_cross_entropy": True}
ON_HEAD = {"lora_target_linear": False, "lora_target_modules": ["q_proj", "lm_head"]}
ONE_ROW = {"micro_batch_size": 1}
"""Of more rows a micro-batch takes more than the table has."""
GENERATED = COMPOSED["Generation in evaluation"] | ONE_ROW
BOTH = ["host-state", "host-state"]
"""Trained ones and the head stay on the device."""


def case(
    limit: str,
    places: list[str],
    *settings: dict[str, Any],
    family: str = "llama",
    marks: Any = (),
) -> Any:
    """A limit that is too little for all state on the device, and where the chunks
    outside blocks are then."""
    plan = {**PAGED, "protrain_capacity_bytes": limit}
    trainings = pair(family, WIDE, *settings, plan=plan)
    return pytest.param(trainings, places, marks=marks)


WITH_ADAPTERS = {
    "chunked loss": case("20MiB", ["rows"], EVALUATED, CHUNKED),
    "adapter on the head": case("8000KiB", ["rows"], SUMS, ON_HEAD),
    "trained too": case("20MiB", BOTH, SUMS, HEAD, EVALUATED),
    # whose reference reads the rows that do not train
    "kto": case("17MiB", ["rows", *BOTH], PREFERRED["rl: kto"], HEAD),
    "tied": case("20MiB", [], SUMS, family="llama-tied"),
    "dpo": case("17MiB", ["rows"], PREFERRED["rl: dpo"], ONE_ROW, marks=FULL),
    "generation": case("29MiB", ["rows"], GENERATED, marks=FULL),
    "fused loss": case("16MiB", ["rows"], IN_TORCH, FUSED, marks=FULL),
    "scaled and tied": case("20MiB", [], SUMS, family="gemma3", marks=FULL),
}


@pytest.mark.parametrize(
    ("trainings", "places"), WITH_ADAPTERS.values(), ids=WITH_ADAPTERS
)
@pytest.mark.sampled(3)
def test_beside_the_state_of_adapters(
    run: Run, trainings: Pair, places: list[str]
) -> None:
    """Tied tables stay; what else is trained outside of blocks comes for its update."""
    paged = run(trainings.paged)
    assert_equal(paged, run(trainings.plain))
    plan = paged.report["plan"]
    after = plan["num_chunks"] + plan["num_blocks"]
    assert plan["adapters"] == "host-state"
    assert plan["placements"][after:] == places


TIGHT = {
    "frozen": pair("llama", LORA, SUMS, EVALUATED, plan=PAGED),
    "ranks": pair("llama", LORA, SUMS, plan=PAGED, num_ranks=2),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=FULL if k == "frozen" else ()) for k in TIGHT]
)
def test_where_the_whole_weight_has_no_room(run: Run, kind: str) -> None:
    """A byte less than with it on the device."""
    trainings = TIGHT[kind]
    roomy = run(trainings.paged).report
    less = {"protrain_capacity_bytes": f"{roomy['device_bytes']['peak'] - 1}B"}
    paged = run(trainings.paged.but(less))
    assert_equal(paged, run(trainings.plain))
    assert "rows" in paged.report["plan"]["placements"]
    if kind == "ranks":
        assert max(paged.peak_errors) < 0.002
