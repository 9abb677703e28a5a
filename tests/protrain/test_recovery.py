"""A run whose device runs out of memory once is the run that had enough."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
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
from failing_plugin import ASKED_BYTES, STEP, UNSEEN_BYTES
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


FAILURES = {
    "lora-forward": lora("forward", {}),
    "lora-backward": lora("backward", {}),
    "lora-clipping": lora("clipping", {}),
    "lora-paged": lora("backward", overrides(1, 2, 1)),
    "full-forward": full("forward", overrides(2, 2, 1)),
    "full-backward": full("backward", overrides(2, 2, 1)),
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


@pytest.mark.parametrize(
    "num_ranks", [1, pytest.param(2, marks=pytest.mark.full)], ids=["alone", "two"]
)
def test_evaluation_after_a_shortage_and_after_training(
    run: Run, num_ranks: int
) -> None:
    """Hooks and places that a replan has changed serve passes without a backward."""
    jobs = lora("backward", overrides(1, 2, 1))
    plugins = [*failing("backward")["plugins"], "recording_plugin.AfterPlugin"]
    paged = jobs.paged.but(EVALUATED, {"plugins": plugins})
    plain = jobs.plain.but(EVALUATED, {"plugins": [*plugins[:2], plugins[3]]})
    both = [run(replace(one, num_ranks=num_ranks)) for one in (paged, plain)]
    assert_equal(*both)
    assert len(both[0].report["notches"]) == 1
    for rank in range(num_ranks):
        ours, theirs = (r.output / f"{rank}-{AFTER_FILE}" for r in both)
        assert ours.read_text() == theirs.read_text()


MODES = {
    "A-lora": (lora, {}),
    "A": (full, {}),
    "B-lora": (lora, overrides(1, 2, 1)),
    "B": (full, overrides(2, 2, 1)),
    "C-lora": (lora, {**overrides(1, 2, 1), "protrain_zero3_shard": True}),
    "C": (full, {**overrides(2, 2, 1), "protrain_zero3_shard": True}),
}
PLACES = "inputs entry forward turn backward late clipping".split()
WHO = {"rank 0": "OfRank0", "rank 1": "OfRank1", "both": ""}
DEFAULT = ("C-late-rank 1",)
OF_RANKS = {
    f"{mode}-{place}-{who}": on_two(make(place + suffix, plan))
    for mode, (make, plan) in MODES.items()
    for place in PLACES
    for who, suffix in WHO.items()
    # what is first in a model of which adapters train has no gradient
    if (make, place) != (lora, "late")
}


@pytest.mark.parametrize(
    "jobs",
    [
        pytest.param(jobs, id=name, marks=[] if name in DEFAULT else pytest.mark.full)
        for name, jobs in OF_RANKS.items()
    ],
)
def test_all_ranks_repeat_what_one_had_no_room_for(run: Run, jobs: Pair) -> None:
    """Those that wait for it in DDP's reductions, or in ours, get there."""
    paged, plain = run(jobs.paged), run(jobs.plain)
    assert_equal(paged, plain)
    (notch,) = paged.report["notches"]
    assert notch["step"] == STEP and notch["from"] != notch["to"]
    if "OfRank" in jobs.paged.yaml:
        assert notch["rank"] == ("OfRank1" in jobs.paged.yaml)


@pytest.mark.parametrize(
    "jobs",
    [
        lora("thrice", overrides(4, 0)),
        on_two(lora("thriceOfRank1", overrides(4, 0))),
    ],
    ids=["one rank", "two ranks"],
)
def test_others_may_take_more_and_more(run: Run, jobs: Pair) -> None:
    """Plan after plan is smaller, and each time the step is the same.

    A rank of two fails in its last micro-batch, then in the first.
    """
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
    peaks = [r.report["compared"]["device peak bytes"] for r in (first, second, last)]
    assert peaks[0]["measured"] > BUDGET_MIB << 20 >= peaks[1]["measured"]
    for peak in peaks[1:]:
        assert peak["measured"] == pytest.approx(peak["predicted"], rel=0.01)
    plans = [r.report["plan"]["block_policies"] for r in (first, second, last)]
    assert plans[0] == plans[2] != plans[1]
    assert_equal(third, run(job("llama", long, {"max_steps": 5})))
    (faster,) = third.report["notches"]
    assert faster["step"] == 5 and faster["unneeded_bytes"] == UNSEEN_BYTES
    assert faster["from"]["placements"] == faster["to"]["placements"]
    assert faster["from"]["n_checkpoint"] > faster["to"]["n_checkpoint"]
    assert plans[0] == third.report["plan"]["block_policies"]
    assert third.report["plan"]["origin"] == "measured"
    assert third.report["measured"]["device_peak_bytes"] == peaks[2]["measured"]
    notes = [" ".join(r.report["notes"]) for r in (first, second, third)]
    assert "goes on under a faster plan" in notes[2]
    assert "protrain_learn_peak" not in notes[0] and "1.0 MiB" in notes[1]
    assert "The next run of this model and these rows plans with it." in notes[2]


def test_an_evaluation_to_come_is_no_room_to_spare(run: Run) -> None:
    """The largest part of the prediction, which the first steps do not show."""
    later = {**EVALUATED, "eval_steps": 6, "eval_batch_size": 8}
    keys = {"protrain_learn_peak": True, "protrain_cache_dir": "evaluations"}
    steps = {"sequence_len": 256, "micro_batch_size": 1, "max_steps": 5}
    result = run(job("llama", LORA, steps, later, PAGED, keys))
    phases = result.report["device_bytes"]["phases"]
    assert phases["evaluation"] > 1.2 * phases["backward"]
    assert not result.report["notches"]
    assert not [note for note in result.report["notes"] if "device peak" in note]
    kept = (result.folder.parents[1] / "evaluations").glob("*.json")
    measured = {json.loads(file.read_text())["key"]["measures"] for file in kept}
    assert "hardware" in measured and "peak" not in measured


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
    (file,) = (
        file
        for file in (after.folder.parents[1] / "shortages").glob("*.json")
        if json.loads(file.read_text())["key"]["measures"] == "peak"
    )
    learned = json.loads(file.read_text())["value"]["beyond_bytes"]
    assert UNSEEN_BYTES <= learned < 2 * UNSEEN_BYTES


SHARED_ERRORS = {
    "FailFourTimesOfRank1": ("under a smaller plan already, 3 times", (0, 1)),
    "FailUpdateOfRank1": ("half done", (1,)),
    "FailBeforeOfRank0": ("do together was under way", (0,)),
}


@pytest.mark.full
@pytest.mark.parametrize("plugin", SHARED_ERRORS)
def test_no_rank_waits_for_what_cannot_be_repeated(run: Run, plugin: str) -> None:
    """Where all know of it they say the same; else the others notice who is gone."""
    why, who = SHARED_ERRORS[plugin]
    plugins = {"plugins": [PROTRAIN, SEEDING, f"failing_plugin.{plugin}"]}
    (pages, _) = on_two(pair("llama", LORA, STEPS, plan=plugins)).jobs
    result = run(pages)
    assert all(result.errors)
    assert all(why in result.errors[rank] for rank in who)
