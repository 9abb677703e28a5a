"""A run whose device runs out of memory once is the run that had enough."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

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
    job,
    overrides,
    pair,
)
from failing_plugin import ASKED_BYTES, STEP

Run = Callable[[Job], Result]

STEPS = {"gradient_accumulation_steps": 2, "max_steps": 4}


def failing(where: str) -> dict[str, list[str]]:
    plugin = f"failing_plugin.Fail{where.capitalize()}"
    return {"plugins": [PROTRAIN, SEEDING, plugin]}


def lora(where: str, plan: dict[str, int]) -> Pair:
    """Dropout, because a repeated step must draw the same numbers again."""
    settings = {**LORA, "lora_dropout": 0.1, "include_tkps": True}
    return pair("llama", settings, STEPS, plan={**plan, **failing(where)})


def full(where: str, plan: dict[str, int]) -> Pair:
    return pair("llama", STEPS, plan={**plan, **failing(where)})


FAILURES = {
    "lora-forward": lora("forward", {}),
    "lora-backward": lora("backward", {}),
    "lora-clipping": lora("clipping", {}),
    "lora-paged": lora("backward", overrides(1, 2, 1)),
    "full-forward": full("forward", overrides(2, 2, 1)),
    "full-backward": full("backward", overrides(2, 2, 1)),
}


@pytest.mark.parametrize("jobs", FAILURES.values(), ids=FAILURES.keys())
def test_training_goes_on(run: Run, jobs: Pair) -> None:
    paged, plain = run(jobs.paged), run(jobs.plain)
    assert_equal(paged, plain)
    # counted once, though they were seen twice
    tokens = ([e.get("tokens/total") for e in r.history] for r in (paged, plain))
    assert len(set(map(tuple, tokens))) == 1
    (notch,) = paged.report["notches"]
    assert notch["step"] == STEP and notch["asked_bytes"] == ASKED_BYTES
    assert notch["from"] != notch["to"]
    assert paged.report["plan"].items() >= notch["to"].items()
    assert paged.report["plan"]["origin"] == "notch"
    assert "ProTrain plan (notch)" in paged.log


def test_others_may_take_more_and_more(run: Run) -> None:
    """Plan after plan is smaller, and each time the step is the same."""
    jobs = lora("thrice", overrides(4, 0))
    paged, plain = run(jobs.paged), run(jobs.plain)
    assert_equal(paged, plain)
    notches = paged.report["notches"]
    assert [notch["step"] for notch in notches] == [STEP] * 3
    plans = [notch["from"] for notch in notches] + [notches[-1]["to"]]
    assert all(one != next for one, next in pairwise(plans))


ERRORS = {
    "FailUpdate": ("in update", "half done", 0),
    "FailFourTimes": ("in forward", "under a smaller plan already, 3 times", 3),
    "FailWithoutMeasure": ("in backward", "no smaller plan", 0),
}


@pytest.mark.parametrize("plugin", ERRORS)
def test_what_cannot_be_repeated_is_an_error(run: Run, plugin: str) -> None:
    """It says when, how much, why not again, what is largest, and what to do."""
    phase, why, num_notches = ERRORS[plugin]
    plugins = {"plugins": [PROTRAIN, SEEDING, f"failing_plugin.{plugin}"]}
    result = run(job("llama", LORA, STEPS, PAGED, plugins))
    message = result.error[result.error.rindex("DeviceMemoryError") :]
    for part in (f"Step {STEP}", phase, why, "largest part is", "micro_batch_size"):
        assert part in message
    assert len(result.report["notches"]) == num_notches
