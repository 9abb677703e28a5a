"""Fused kernels in torch are a fair reference: they train as layers without them do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from axolotl_jobs import KERNELS, LORA, Job, Result, history_differences, job

QLORA = LORA | {"adapter": "qlora", "load_in_4bit": True}


@pytest.mark.parametrize(
    "fused, layers",
    [
        pytest.param(job("llama", LORA, KERNELS), job("llama", LORA), id="swiglu"),
        pytest.param(
            job("gemma3", LORA, KERNELS),
            job("gemma3", LORA),
            id="geglu",
            marks=pytest.mark.full,
        ),
        pytest.param(
            job("llama", QLORA, KERNELS),
            job("llama", QLORA),
            id="nf4",
            marks=pytest.mark.full,
        ),
    ],
)
def test_the_same_losses(run: Callable[[Job], Result], fused: Job, layers: Job) -> None:
    got, wanted = run(fused), run(layers)
    assert not got.error and not wanted.error, got.error + wanted.error
    assert not history_differences(got.history, wanted.history, 1e-4)
    # another order of operations: equal bits would say that nothing was replaced
    assert history_differences(got.history, wanted.history, 0.0)
