"""Answers that are sampled between steps: in waves, in halves, evaluated, by two ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from axolotl_jobs import (
    LORA,
    PAGED,
    PROTRAIN,
    SEEDING,
    SHARDED,
    Job,
    Result,
    assert_equal,
    job,
    overrides,
    pair,
)
from matrix_composition import HALF, SAMPLING
from tiny_models import random_model
from transformers import GenerationConfig

from axolotl.integrations.protrain.core.engine.device import CpuDevice
from axolotl.integrations.protrain.core.planner.meta import meta_copy
from axolotl.integrations.protrain.generation import Asked
from axolotl.integrations.protrain.report.text import report_text

Run = Callable[[Job], Result]


def listed(name: str) -> dict[str, Any]:
    return {"plugins": [PROTRAIN, SEEDING, f"sampling_plugin.{name}"]}


EIGHT = {"micro_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 2}
"""Answers each time, of which two are trained at once."""
NARROW = {"protrain_capacity_bytes": "484KiB"}
"""Room for a micro-batch, and for four answers with one chunk held."""
APART = 0.35, 0.04
"""By how much a prediction of bytes may be above and below what is taken."""


def test_as_many_as_fit_are_sampled_at_once(run: Run) -> None:
    """Only this sees waves that are put together in another order or padded otherwise."""
    both = pair(
        "llama",
        SAMPLING | LORA | EIGHT,
        plan=overrides(0, 2, 4) | NARROW,
        plain=listed("InFours"),
    )
    paged = run(both.paged)
    assert_equal(paged, run(both.plain))
    planned, made = paged.report["generation"], paged.report["generated"]
    assert (planned["at_once"], planned["waves"], planned["sequences"]) == (4, 2, 8)
    assert planned["held"]
    assert any("in 2 waves" in note for note in paged.report["notes"])
    assert (made["phases"], made["waves"], made["sequences"]) == (2, 4, 16)
    shown = report_text({"run": paged.report})
    assert "answers, tokens/s" in shown
    # counters hold what answers moved too
    assert "fetched bytes a step" not in paged.report["compared"]
    peak = paged.report["device_bytes"]["phases"]["generation"]
    assert 0.9 < made["device_bytes"] / peak < 1.05


def test_keys_and_values_wait_on_the_host(run: Run) -> None:
    """Only this sees a plan whose cache is elsewhere than the plan has it."""
    long = {"trl": SAMPLING["trl"] | {"max_completion_length": 48}}
    one = {"micro_batch_size": 1, "gradient_accumulation_steps": 8, "max_steps": 2}
    room = {"protrain_capacity_bytes": "500KiB"}
    both = pair("llama", SAMPLING | LORA | long | one, plan=overrides(0, 2, 4) | room)
    paged = run(both.paged)
    assert_equal(paged, run(both.plain))
    planned, made = paged.report["generation"], paged.report["generated"]
    assert planned["host_cache_bytes"] and not planned["cache_bytes"]
    assert (planned["at_once"], made["waves"]) == (8, 2)
    assert made["device_bytes"] < paged.report["device_bytes"]["phases"]["generation"]


def test_answers_without_a_longest_length_are_refused(run: Run) -> None:
    """Only this sees a plan that ends with a TypeError of its own."""
    trl = {k: v for k, v in SAMPLING["trl"].items() if k != "max_completion_length"}
    error = run(job("llama", SAMPLING | LORA, PAGED, {"trl": trl})).error
    assert "trl.max_completion_length: it is not set" in error


def test_a_wave_without_room_is_sampled_in_halves(run: Run) -> None:
    """Only this sees tokens that were drawn before the memory ran out counted twice."""
    both = pair("llama", SAMPLING | LORA, plan=HALF, plain=listed("InTwos"))
    four = pair("llama", SAMPLING | LORA, plan=HALF | listed("NoRoomPlugin"))
    paged = run(four.paged)
    assert_equal(paged, run(both.plain))
    assert paged.report["generated"]["waves"] == 2 * paged.report["generated"]["phases"]
    assert any("No room for 4 sequences" in note for note in paged.report["notes"])


def test_without_room_to_hold_nothing_is_held(run: Run) -> None:
    """Only this sees a run that ends because its plan was too bold between two steps."""
    both = pair(
        "llama",
        SAMPLING | LORA | EIGHT,
        plan=overrides(0, 2, 4) | NARROW | listed("NoRoomToHold"),
        plain=listed("InFours"),
    )
    paged = run(both.paged)
    assert_equal(paged, run(both.plain))
    notes = paged.report["notes"]
    assert len([note for note in notes if "nothing is held any longer" in note]) == 1


def test_conversations_are_as_long_as_their_template_makes_them(run: Run) -> None:
    """Only this sees a plan of prompts without what the template puts around them."""
    (data,) = SAMPLING["datasets"]
    keys = {
        "chat_template": "chatml",
        "datasets": [data | {"type": "answers.turns"}],
        "dataset_prepared_path": "prepared-turns",
        "trl": SAMPLING["trl"] | {"reward_funcs": ["answers.vowels"]},
    }
    both = pair("llama", SAMPLING | LORA | keys, plan=HALF)
    paged = run(both.paged)
    assert_equal(paged, run(both.plain))
    assert paged.report["generation"]["prompt_tokens"] > 9 + len("<|im_start|>")


def test_what_is_evaluated_is_sampled_too(run: Run) -> None:
    keys = {"val_set_size": 0.2, "eval_steps": 1, "eval_batch_size": 4}
    both = pair("llama", SAMPLING | keys, plan=HALF)
    paged = run(both.paged)
    assert_equal(paged, run(both.plain))
    assert any("eval_reward" in entry for entry in paged.history)


@pytest.mark.parametrize("mode", [{}, SHARDED], ids=["B", "C"])
@pytest.mark.parametrize("base", [{}, LORA], ids=["full", "LoRA"])
@pytest.mark.sampled(2)
def test_two_ranks(run: Run, base: dict[str, Any], mode: dict[str, Any]) -> None:
    """Only this sees ranks whose answers differ in length wait for each other for ever."""
    keys = SAMPLING | base | {"gradient_accumulation_steps": 2}
    if not base:
        keys = keys | {"max_grad_norm": 0.0}
    both = pair("llama", keys, plan=overrides(0, 2, 1) | mode, num_ranks=2)
    paged = run(both.paged)
    assert_equal(paged, run(both.plain))
    assert paged.report["plan"]["mode"] == ("C" if mode else "B")


@pytest.mark.full
def test_nothing_of_trl_is_imported_before_axolotl_has_changed_it() -> None:
    """Only this sees scores by TRL's operators where the plain run has Axolotl's kernels:
    the module of the trainer keeps what it finds when it is imported."""
    program = """
import sys
from axolotl.integrations.protrain import ProTrainPlugin
from axolotl.integrations.protrain import generation, objective, trainer, waves
from axolotl.utils.dict import DictDefault
ProTrainPlugin().register(DictDefault())
print("trl.trainer.grpo_trainer" in sys.modules)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout.split()[-1] == "False"


SIZES = [(8, 64, 64), (32, 16, 64), (4, 256, 16)]


@pytest.mark.parametrize("family", ["llama-wide", "qwen3", "gemma3"])
@pytest.mark.parametrize("rows, prompt, new", SIZES)
def test_bytes_are_foreseen(family: str, rows: int, prompt: int, new: int) -> None:
    """Only this sees a cache, or what a token is drawn from, that nobody counts."""
    model = random_model(family).eval()
    asked = Asked(rows, prompt, new, amid_step=False, steps=1.0)
    traced = asked.traced(meta_copy(model), "cpu", None)
    device = CpuDevice(None)
    ids = torch.randint(5, 200, (rows, prompt))
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    config = GenerationConfig(
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=True,
        top_k=20,
        top_p=0.9,
        pad_token_id=0,
        eos_token_id=2,
        disable_compile=True,
    )
    with device.watch(0), torch.no_grad():
        device.restart_peak()
        model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        peak = device.peak_since()
    above, below = APART
    assert -below < rows * traced.row_bytes / peak - 1 < above
    assert 0 < traced.cache_bytes < traced.row_bytes
