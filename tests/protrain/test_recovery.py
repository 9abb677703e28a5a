"""A run whose device runs out of memory once is the run that had enough."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
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
    job,
    overrides,
    pair,
)
from failing_plugin import ASKED_BYTES, STEP, UNSEEN_BYTES
from matrix_composition import LISA, SAMPLING
from recording_plugin import AFTER_FILE

Run = Callable[[Job], Result]

BUDGET_MIB = 4
STEPS = {"gradient_accumulation_steps": 2, "max_steps": 4}


def failing(where: str) -> dict[str, list[str]]:
    plugin = f"failing_plugin.Fail{where[0].upper()}{where[1:]}"
    return {"plugins": [PROTRAIN, SEEDING, plugin]}


def lora(where: str, plan: dict[str, int]) -> Pair:
    """Dropout, because a repeated step must draw the same numbers again."""
    settings = {**LORA, "lora_dropout": 0.1, "include_tkps": True}
    return pair("llama", settings, STEPS, plan={**plan, **failing(where)})


def full(where: str, plan: dict[str, int]) -> Pair:
    return pair("llama", STEPS, plan={**plan, **failing(where)})


SCALED = [PROTRAIN, SEEDING, "scaling_plugin.ScalingPlugin"]
TWICE = {"trl": SAMPLING["trl"] | {"num_iterations": 2}}
FAILURES = {
    "lora-forward": lora("forward", {}),
    "lora-backward": lora("backward", {}),
    "lora-clipping": lora("clipping", {}),
    "lora-paged": lora("backward", overrides(1, 2, 1)),
    "full-forward": full("forward", overrides(2, 2, 1)),
    "full-backward": full("backward", overrides(2, 2, 1)),
    # a scaler unscales gradients once a step
    "fp16": pair(
        "llama",
        LORA | STEPS | {"fp16": True, "plugins": SCALED},
        plan=overrides(1, 2, 1) | {"plugins": [*SCALED, "failing_plugin.FailProbe"]},
    ),
    # blocks are frozen while hooks are made anew
    "lisa": pair("llama", LISA, STEPS, plan=overrides(2, 2, 1) | failing("backward")),
    # counts micro-batches, by which it takes answers
    "grpo": pair(
        "llama",
        SAMPLING | LORA | STEPS | TWICE,
        plan=overrides(2, 2, 1) | failing("activation"),
    ),
}


@pytest.mark.parametrize("jobs", FAILURES.values(), ids=FAILURES.keys())
@pytest.mark.sampled(3)
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
    assert "repeated under a smaller plan" in " ".join(paged.report["notes"])


def on_two(jobs: Pair) -> Pair:
    return Pair(*(replace(one, num_ranks=2) for one in jobs.jobs))


EVALUATED = {"val_set_size": 0.2, "eval_strategy": "steps", "eval_steps": 1}


def test_evaluation_after_a_shortage_and_after_training(run: Run) -> None:
    """Hooks and places that a replan has changed serve passes without a backward."""
    jobs = lora("backward", overrides(1, 2, 1))
    plugins = [*failing("backward")["plugins"], "recording_plugin.AfterPlugin"]
    paged = jobs.paged.but(EVALUATED, {"plugins": plugins})
    plain = jobs.plain.but(EVALUATED, {"plugins": [*plugins[:2], plugins[3]]})
    both = [run(one) for one in (paged, plain)]
    assert_equal(*both)
    assert len(both[0].report["notches"]) == 1
    ours, theirs = (r.output / f"0-{AFTER_FILE}" for r in both)
    assert ours.read_text() == theirs.read_text()


def beside(callback: str, failure: str) -> Pair:
    """A shortage in a run with a callback of somebody else's."""
    listed = [PROTRAIN, SEEDING, f"failing_plugin.{callback}"]
    plan = {"plugins": [*listed, f"failing_plugin.{failure}"], **overrides(2, 2, 1)}
    return pair("llama", STEPS, {"plugins": listed}, plan=plan)


HARMLESS = {
    "draws": beside("DrawBetween", "FailBackward"),
    "reads": beside("ReadBetween", "FailForward"),
    "clamps before the update": beside("ClampBefore", "FailProbe"),
}
CHANGING = {
    "ScaleBetween": "on_substep_end of _ScaleBetween changed weights or gradients",
    "WriteBetween": "on_substep_end of _WriteBetween changed weights or gradients",
    "FreezeBetween": "which weights train was changed",
    "CountForwards": "a hook (failing_plugin._CountForwards.on_train_begin",
    "ChangeBuffer": "a forward changed buffer ",
}


@pytest.mark.parametrize("jobs", HARMLESS.values(), ids=HARMLESS.keys())
def test_a_callback_between_two_attempts_is_called_once(run: Run, jobs: Pair) -> None:
    """What it did is there: random numbers it drew, gradients it changed."""
    paged, plain = run(jobs.paged), run(jobs.plain)
    assert_equal(paged, plain)
    assert [notch["step"] for notch in paged.report["notches"]] == [STEP]


@pytest.mark.parametrize("callback", CHANGING)
@pytest.mark.sampled(3)
def test_what_others_changed_in_a_step_is_not_lost(run: Run, callback: str) -> None:
    """They would not do it again: the step is refused, and says whose doing it is."""
    result = run(beside(callback, "FailBackward").paged)
    message = result.error[result.error.rindex("DeviceMemoryError") :]
    assert f"Step {STEP}" in message and CHANGING[callback] in message
    assert not result.report["notches"]


MODES = {
    "A-lora": (lora, {}),
    "A": (full, {}),
    "B-lora": (lora, overrides(1, 2, 1)),
    "B": (full, overrides(2, 2, 1)),
    "C-lora": (lora, {**overrides(1, 2, 1), "protrain_zero3_shard": True}),
    "C": (full, {**overrides(2, 2, 1), "protrain_zero3_shard": True}),
}
PHASES = {
    **dict.fromkeys(("inputs", "before", "entry", "forward"), "forward"),
    **dict.fromkeys(("turn", "backward", "late"), "backward"),
    **dict.fromkeys(("clipping", "probe", "update"), "update"),
}
DEFAULT = ("A-lora-forward-0", "C-backward-1", "C-lora-forward-1", "B-update-0")
OF_RANKS = {
    f"{mode}-{place}-{rank}": (
        on_two(make(f"{place}OfRank{rank}", plan)).paged,
        PHASES[place],
        rank,
    )
    for mode, (make, plan) in MODES.items()
    for place in PHASES
    for rank in range(2)
    # what is first in a model of which adapters train has no gradient
    if (make, place) != (lora, "late")
}


@pytest.mark.parametrize(
    "failing, phase, rank",
    [
        pytest.param(*case, id=name, marks=[] if name in DEFAULT else pytest.mark.full)
        for name, case in OF_RANKS.items()
    ],
)
def test_every_rank_ends_with_the_error_of_one(
    run: Run, failing: Job, phase: str, rank: int
) -> None:
    """Also who waits for it in DDP's reductions or in ours, long before gloo gives up."""
    result = run(failing)
    last = [error.strip().splitlines()[-1] for error in result.errors]
    assert all("DeviceMemoryError: " in line for line in last), "\n".join(result.errors)
    said = [line[line.index("DeviceMemoryError: ") :] for line in last]
    assert len(said) == 2 and said[0] == said[1]
    for part in (
        f"out of device memory in {phase} on rank {rank}: ",
        "or less, or lower",
    ):
        assert part in said[0]
    for log in ("log.txt", "log-1.txt"):
        assert "out of device memory" in (result.folder / log).read_text()


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_shortage_of_one_rank_is_a_lesson_for_all(run: Run, rank: int) -> None:
    """The next launch plans with it."""
    keys = {"protrain_learn_peak": True, "protrain_cache_dir": f"shortage-of-{rank}"}
    failed = on_two(full(f"backwardOfRank{rank}", keys)).paged
    result = run(failed)
    assert "The next run plans with what was missing" in result.error
    after = run(failed.but({"plugins": [PROTRAIN, SEEDING]}))
    assert not after.error, after.error
    (note,) = (n for n in after.report["notes"] if "protrain_learn_peak" in n)
    assert "MiB of device memory more than traced" in note


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
    "FailBesideGradients": ("in forward", "it began with gradients", 0),
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


def measured_in(folder: Path) -> dict[str, Any]:
    """Values by what was measured; the last one of each."""
    (file,) = folder.glob("*.json")
    measured = json.loads(file.read_text())["measured"]
    return {name.split()[0]: value for name, value in measured.items()}


def test_a_run_plans_with_the_peak_of_an_earlier_one(run: Run) -> None:
    """Upward, where it took what no trace sees, and back once it does not."""
    keys = {"protrain_learn_peak": True, "protrain_cache_dir": "lessons"}
    keys["protrain_capacity_bytes"] = f"{BUDGET_MIB}MiB"
    taking = {"plugins": [PROTRAIN, SEEDING, "failing_plugin.TakeUnseen"]}
    long = {**LORA, "sequence_len": 256}
    first, second, third, last = (
        run(job("llama", long, PAGED, keys, more, {"max_steps": steps}))
        for steps, more in ((3, taking), (4, taking), (5, {}), (6, {}))
    )
    compared = "device peak bytes"
    peaks = [r.report["compared"][compared] for r in (first, second, last)]
    assert peaks[0]["measured"] > BUDGET_MIB << 20 >= peaks[1]["measured"]
    for peak, result in zip(peaks[1:], (second, last), strict=True):
        planned = result.report["plan"], result.report["notes"], peaks
        assert peak["measured"] == pytest.approx(peak["predicted"], rel=0.01), planned
    plans = [r.report["plan"]["block_policies"] for r in (first, second, last)]
    assert plans[0] == plans[2] != plans[1]
    assert_equal(third, run(job("llama", long, {"max_steps": 5})))
    assert not third.report["notches"]
    # the lesson of the second is the plan of the third
    assert plans[1] == third.report["plan"]["block_policies"]
    notes = [" ".join(r.report["notes"]) for r in (first, second, third)]
    assert "protrain_learn_peak" not in notes[0] and "1.0 MiB" in notes[1]
    assert "The next run of this model and these rows plans with it." in notes[2]


def test_an_evaluation_to_come_is_no_room_to_spare(run: Run) -> None:
    """The largest part of the prediction; the one after the first step has fewer rows."""
    later = {**EVALUATED, "eval_steps": 6, "eval_batch_size": 8}
    keys = {"protrain_learn_peak": True, "protrain_cache_dir": "evaluations"}
    steps = {"sequence_len": 256, "micro_batch_size": 1, "max_steps": 5}
    # by hand: rates that are measured on a busy machine lead to others
    plan = overrides(1, 2, 0)
    result = run(job("llama", LORA, steps, later, PAGED, keys, plan))
    phases = result.report["device_bytes"]["phases"]
    assert phases["evaluation"] > 1.2 * phases["backward"]
    assert not result.report["notches"]
    kept = measured_in(result.folder.parents[1] / "evaluations")
    assert "hardware" in kept and "peak" not in kept


def test_a_shortage_is_a_lesson_and_one_that_nothing_fits_beside_is_none(
    run: Run,
) -> None:
    keys = {"protrain_learn_peak": True, "protrain_cache_dir": "shortages"}
    small = {"plugins": [PROTRAIN, SEEDING, "failing_plugin.TakeUnseen"]}
    large = {"plugins": [PROTRAIN, SEEDING, "failing_plugin.FailWithoutMeasure"]}
    refused, after = (
        run(job("llama", LORA, STEPS, PAGED, keys, more)) for more in (large, small)
    )
    assert "DeviceMemoryError" in refused.error
    assert not after.error and not after.report["notches"]
    kept = measured_in(after.folder.parents[1] / "shortages")
    learned = kept["peak"]["beyond_bytes"]
    assert UNSEEN_BYTES <= learned < 2 * UNSEEN_BYTES
