"""Losses of a part of the text only, with images: each key changes what is learnt.

That a paged run masks as a plain one does is in the compatibility matrix for all keys,
and here for the one that Axolotl cannot read without help.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from axolotl_jobs import (
    LORA,
    Job,
    Pair,
    Result,
    assert_equal,
    history_differences,
    pair,
)
from matrix_families import IMAGES, MARKS, MASKS, PLAN, Settings

Run = Callable[[Job], Result]


def masked(*settings: Settings) -> Pair:
    return pair("llava-vision", IMAGES, LORA, *settings, plan=PLAN)


@pytest.mark.parametrize("trainings", [pytest.param(masked(MARKS), id="LLaVA")])
def test_role_boundaries_are_read(run: Run, trainings: Pair) -> None:
    paged = run(trainings.paged)
    assert_equal(paged, run(trainings.plain))
    assert paged.report["measured"]["fetched_bytes"] > 0


@pytest.mark.full
@pytest.mark.parametrize(
    "trainings",
    [
        # without boundaries all text is learnt, as under train_on_inputs
        pytest.param(Pair(masked(keys).paged, masked(others).paged), id=f"{key}-{n}")
        for key, keys in MASKS.items()
        for n, others in enumerate([{}, *MASKS.values()])
        if keys != others and not (key == "train_on_inputs" and not others)
    ],
)
def test_each_key_masks_something_else(run: Run, trainings: Pair) -> None:
    one, other = run(trainings.paged), run(trainings.plain)
    assert history_differences(one.history, other.history, 0.0)


@pytest.mark.full
@pytest.mark.parametrize(
    "trainings",
    [
        pytest.param(
            Pair(masked(MASKS["train_on_inputs"]).paged, masked({}).paged), id="inputs"
        )
    ],
)
def test_train_on_inputs_is_all_text(run: Run, trainings: Pair) -> None:
    assert_equal(run(trainings.paged), run(trainings.plain))
