"""QLoRA: a 4-bit base pages like any other, scales included, and trains the same.

Axolotl quantises while it loads. Every cell trains twice, paged and plain, and compares
losses, gradient norms, rates and adapters bit by bit; freed slots are poisoned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from axolotl_jobs import LORA, Job, Pair, Result, assert_equal, overrides, pair
from saving_jobs import MODEL, PAGED, Jobs, difference, load, weights
from tiny_models import NUM_BLOCKS
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

Run = Callable[[Job], Result]

QLORA = {**LORA, "adapter": "qlora", "load_in_4bit": True}
KINDS: dict[str, dict[str, Any]] = {
    # Axolotl's default is NF4 with double quantisation
    "nf4-double": {},
    "nf4": {"bnb_config_kwargs": {"bnb_4bit_use_double_quant": False}},
    "fp4": {"bnb_config_kwargs": {"bnb_4bit_quant_type": "fp4"}},
    "bytes": {"bnb_config_kwargs": {"bnb_4bit_quant_storage": "uint8"}},
    "dora": {"peft_use_dora": True},
    "evaluated": {"val_set_size": 0.2, "eval_strategy": "steps", "eval_steps": 1},
}


def qlora_pair(
    family: str, kind: str, n_persist: int, recompute: bool, bf16: bool, steps: int
) -> Pair:
    """Paged in two slots with `n_persist` resident chunks, and plain."""
    settings = {
        **QLORA,
        **KINDS[kind],
        "bf16": bf16,
        "gradient_accumulation_steps": steps,
        "gradient_checkpointing": recompute,
        "max_grad_norm": 0.1,
    }
    plan = overrides(n_persist, 2, (NUM_BLOCKS - n_persist) * recompute)
    plain = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
    return pair(family, settings, plan=plan, plain=plain if recompute else {})


GRID = list(
    product(
        ("llama", "mistral"),
        ("nf4-double", "nf4"),
        (0, NUM_BLOCKS // 2),
        (False, True),
        (True, False),
        (1, 3),
    )
)
MORE = [
    # biases that bitsandbytes casts, experts, norms in fp32, other packings
    ("qwen2", "nf4-double", 0, True, True, 1),
    ("mixtral", "nf4-double", 0, True, True, 3),
    ("gemma3", "nf4", NUM_BLOCKS // 2, False, True, 1),
    ("llama", "fp4", 0, False, True, 1),
    ("llama", "bytes", 0, True, False, 1),
    ("llama", "dora", 0, True, True, 1),
    ("llama", "evaluated", 0, False, True, 1),
]
QUICK = [cell for number, cell in enumerate(GRID) if number % 9 == 0]


@pytest.mark.parametrize(
    "trainings",
    [
        pytest.param(
            qlora_pair(*cell),
            id="-".join(map(str, cell)),
            marks=() if cell in QUICK + MORE else pytest.mark.full,
        )
        for cell in GRID + MORE
    ],
)
def test_paged_is_plain(run: Run, trainings: Pair) -> None:
    paged, plain = run(trainings.paged), run(trainings.plain)
    assert_equal(paged, plain)
    plan, measured = paged.report["plan"], paged.report["measured"]
    assert plan["mode"] == "B"
    assert measured["fetched_bytes"] > 0
    assert measured["offloaded_bytes"] == 0


@pytest.mark.parametrize(
    "bases",
    [
        pytest.param(
            Pair(
                *(
                    pair("llama", {**base, "bf16": True}, plan=overrides(0, 2)).paged
                    for base in (QLORA, LORA)
                )
            ),
            id="bf16",
        )
    ],
)
def test_a_4_bit_base_is_smaller(run: Run, bases: Pair) -> None:
    """Otherwise nothing of this file is about 4 bits.

    By little: codebooks and alignment gaps weigh as much as rows this short.
    """
    four, sixteen = (
        run(job).report["measured"]["host_arena_bytes"]
        for job in (bases.paged, bases.plain)
    )
    assert four < sixteen


# ------------------------------------------------------- saving, resuming, other bases

PLAN = {**PAGED, "protrain_capacity_bytes": "1GiB", **overrides(0, 2, NUM_BLOCKS)}
FOUR = Path("models") / "four"
EIGHT = Path("models") / "eight"
ON_DISK = {"base_model": str(FOUR)}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    jobs = Jobs(tmp_path_factory.mktemp("qlora"))
    jobs.train("plain", QLORA)
    jobs.train("paged", QLORA, PLAN)
    second_half = {"resume_from_checkpoint": "paged/checkpoint-2"}
    jobs.train("resumed", QLORA, PLAN, second_half, after=["paged"])
    for name in ("plain", "paged"):
        jobs.command(
            f"merge_{name}",
            "merge_lora",
            {**QLORA, **(PLAN if name == "paged" else {}), "lora_model_dir": name},
            after=[name],
        )
    jobs.train("four_plain", QLORA, ON_DISK, before=save_quantised)
    jobs.train("four_paged", QLORA, ON_DISK, PLAN, after=["four_plain"])
    jobs.train("eight", LORA, PLAN, {"base_model": str(EIGHT)}, before=save_8bit)
    yield jobs
    jobs.close()


def save_quantised(folder: Path) -> None:
    """A base that is already in 4 bits on the disk."""
    save_as(folder, FOUR, BitsAndBytesConfig(load_in_4bit=True))


def save_8bit(folder: Path) -> None:
    save_as(folder, EIGHT, BitsAndBytesConfig(load_in_8bit=True))


def save_as(folder: Path, target: Path, config: BitsAndBytesConfig) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        folder / MODEL, quantization_config=config, device_map={"": "cpu"}
    )
    model.save_pretrained(folder / target)


@pytest.mark.parametrize(
    ("ours", "wanted"),
    [("paged", "plain"), ("resumed", "plain"), ("four_paged", "four_plain")],
)
def test_a_run_that_saves_is_the_plain_one(jobs: Jobs, ours: str, wanted: str) -> None:
    paged, plain = jobs[ours].finished, jobs[wanted].finished
    assert paged.paged and not plain.paged
    assert paged.history == plain.history
    last = [outcome.folder / "checkpoint-4" for outcome in (paged, plain)]
    for read in (weights, lambda folder: load(folder / "optimizer.pt")):
        assert difference(*map(read, last)) is None
    assert difference(weights(paged.folder), weights(plain.folder)) is None


def test_an_adapter_merges(jobs: Jobs) -> None:
    ours, plain = (
        weights(jobs[name].finished.folder / "merged")
        for name in ("merge_paged", "merge_plain")
    )
    assert difference(ours, plain) is None
    base = weights(jobs.folder / MODEL)
    assert ours.keys() == base.keys()
    assert any(not torch.equal(ours[name], base[name]) for name in base)


def test_another_quantisation_on_the_disk_is_refused(jobs: Jobs) -> None:
    refused = jobs["eight"]
    assert refused.exit_code == 1
    message = f"base_model: {EIGHT} holds weights quantised by bitsandbytes in 8 bits"
    assert message in refused.log
