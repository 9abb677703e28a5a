"""Answers of a server: what it is sent is what a plain run sends, to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from axolotl_jobs import (
    LORA,
    PAGED,
    PROTRAIN,
    SHARDED,
    Job,
    Result,
    assert_equal,
    job,
    overrides,
    pair,
)
from matrix_composition import ASKING, HALF
from peft import LoraConfig, get_peft_model
from plan_jobs import Plans
from tiny_models import (
    TOKENIZER,
    build_inputs,
    build_model,
    model_path,
    random_model,
)

from axolotl.integrations.protrain.generation import units_of
from axolotl.integrations.protrain.pushing import Push

Run = Callable[[Job], Result]


def record(result: Result) -> dict[str, Any]:
    """What the server of a training got and gave."""
    return json.loads((result.output / "served.json").read_text())


BASES: dict[str, dict[str, Any]] = {
    "full": {},
    "full, tied": {"family": "llama-tied"},
    "full, bf16": {"bf16": True},
    "LoRA": LORA,
    "LoRA, bf16": LORA | {"bf16": True},
    "LoRA, all, tied, bf16": LORA
    | {
        "family": "llama-tied",
        "bf16": True,
        "lora_target_modules": ["embed_tokens", "lm_head", "q_proj"],
        "lora_target_linear": False,
    },
    "LoRA on experts, bf16": LORA
    | {
        "family": "mixtral",
        "bf16": True,
        "lora_target_linear": False,
        "lora_target_modules": ["q_proj"],
        "lora_target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        # newer TRL ends where it copies such an adapter as its own reference
        "trl": ASKING["trl"] | {"beta": 0.0},
    },
    "DoRA": LORA | {"peft_use_dora": True},
    "LoRA, own copies": LORA | {"lora_modules_to_save": ["lm_head"]},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_the_server_gets_the_weights_of_the_plain_run(
    run: Run, base: dict[str, Any]
) -> None:
    """Only this sees placeholders on the wire, and a base that merging rounded otherwise."""
    keys = ASKING | base
    family = keys.pop("family", "llama")
    both = pair(family, keys, plan=HALF)
    paged, plain = run(both.paged), run(both.plain)
    assert_equal(paged, plain)
    got, wanted = record(paged), record(plain)
    assert got == wanted
    assert len(got["syncs"]) == 3 and got["syncs"][0] != got["syncs"][-1]
    sent = paged.report["sent"]
    assert paged.report["generation"] is None and sent["times"] == 3
    assert sent["nbytes"] == 3 * paged.report["served"]["sent_bytes"]
    # counters hold what sending moved too
    assert "fetched bytes a step" not in paged.report["compared"]
    peak = paged.report["device_bytes"]["phases"]["sending"]
    assert 0.8 < sent["device_bytes"] / peak < 1.05


def test_amid_a_step_accumulated_and_evaluated(run: Run) -> None:
    """Only this sees gradients of a step that has begun lost to a push."""
    keys: dict[str, Any] = {
        "trl": ASKING["trl"] | {"num_iterations": 2, "beta": 0.0},
        "gradient_accumulation_steps": 3,
        "max_steps": 4,
        "val_set_size": 0.2,
        "eval_steps": 2,
        "eval_batch_size": 4,
    }
    both = pair("llama", ASKING | LORA | keys, plan=HALF)
    paged, plain = run(both.paged), run(both.plain)
    assert_equal(paged, plain)
    assert record(paged) == record(plain)


def test_what_merging_has_rounded_amid_a_step_is_not_repeated(run: Run) -> None:
    """Only this sees a micro-batch repeated over a base that it did not see before."""
    keys: dict[str, Any] = {
        "trl": ASKING["trl"] | {"generation_batch_size": 8, "beta": 0.0},
        "gradient_accumulation_steps": 3,
        "plugins": [*ASKING["plugins"], "failing_plugin.FailSampled"],
    }
    result = run(job("llama", ASKING | LORA | PAGED | keys, overrides(2, 2, 1)))
    assert "merging adapters for the server changed weights" in result.error


def test_what_has_no_room_to_be_merged_is_not_left_half_merged() -> None:
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=2, target_modules=[], target_parameters=targets)
    model = get_peft_model(random_model("mixtral"), config)
    device = SimpleNamespace(synchronize=lambda: None)
    session: Any = SimpleNamespace(
        visiting=lambda *_, **__: nullcontext(), device=device
    )
    push = Push(session, SimpleNamespace(model=model))
    unit = next(unit for unit in units_of(model) if len(unit.layers) > 1)

    def walk() -> None:
        model.merge_adapter()
        push._enter(unit)

    no_room = patch.object(unit.layers[-1], "merge", side_effect=torch.OutOfMemoryError)
    with no_room, pytest.raises(torch.OutOfMemoryError):
        push.run(walk)
    assert not any(layer.merged for layer in unit.layers)


def test_gdpo(run: Run) -> None:
    both = pair("llama", ASKING | {"rl": "gdpo"}, plan=HALF)
    paged, plain = run(both.paged), run(both.plain)
    assert_equal(paged, plain)
    assert record(paged) == record(plain)


@pytest.mark.parametrize("mode", [{}, SHARDED], ids=["B", "C"])
@pytest.mark.parametrize("base", [{}, LORA | {"bf16": True}], ids=["full", "LoRA"])
@pytest.mark.sampled(2)
def test_two_ranks(run: Run, base: dict[str, Any], mode: dict[str, Any]) -> None:
    """Only this sees a base that each rank of a node rounds once more."""
    keys = ASKING | base | {"gradient_accumulation_steps": 2}
    if not base:
        keys = keys | {"max_grad_norm": 0.0}
    both = pair("llama", keys, plan=overrides(0, 2, 1) | mode, num_ranks=2)
    paged, plain = run(both.paged), run(both.plain)
    assert_equal(paged, plain)
    assert record(paged) == record(plain)
    assert paged.report["plan"]["mode"] == ("C" if mode else "B")


def test_a_plan_says_that_a_server_answers(tmp_path: Path) -> None:
    """Only this sees a dry run that waits for the server, or holds chunks for answers."""
    build_inputs(tmp_path)
    build_model(tmp_path, "llama")
    trl = ASKING["trl"] | {"vllm_server_host": "nowhere.invalid"}
    paths = {"tokenizer_config": str(tmp_path / TOKENIZER), "output_dir": "out"}
    model = str(tmp_path / model_path("llama"))
    plans = Plans(tmp_path)
    asking = ASKING | LORA | {"trl": trl, "plugins": [PROTRAIN]} | paths
    plans.add("served", model, asking, "--gpu", "4090", "--json")
    plans.add("words", model, asking, "--gpu", "4090")
    answer = plans["served"].json
    assert answer["generation"] is None and answer["served"]["sent_bytes"] > 100_000
    assert "Answers: a server gives them" in plans["words"].out
    plans.close()
