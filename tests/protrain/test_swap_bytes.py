"""Activation bytes of every policy, predicted and counted on the CPU device."""

from __future__ import annotations

import pytest
from counted_steps import Step, peaks

ROWS = {
    "keep": {},
    "recompute": {"recompute": "all"},
    "swap": {"swap": "all"},
    "swap and keep": {"swap": "half"},
    "swap and recompute": {"swap": "half", "recompute": "half"},
    "swap inputs": {"swap": "all", "recompute": "all"},
    "swap inputs and recompute": {"swap": "half", "recompute": "all"},
}


MIXED = ("swap and recompute", "swap inputs")


@pytest.mark.parametrize(
    ("family", "row"),
    [
        pytest.param(
            family,
            row,
            marks=[] if family == "llama" or row in MIXED else pytest.mark.full,
        )
        for family in ("llama", "mixtral", "gpt2")
        for row in ROWS
    ],
)
@pytest.mark.sampled(6)
def test_peak_of_each_policy_is_exact(family: str, row: str) -> None:
    # the longest rows in which what is saved is most of the peak
    step = Step(family, "lora", 2, 128, **ROWS[row])
    found = peaks(step)
    assert found.predicted_bytes == found.counted_bytes, found
