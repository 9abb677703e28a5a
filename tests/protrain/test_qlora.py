"""QLoRA: a 4-bit base pages like any other, scales included, and trains the same.

Axolotl quantises while it loads. Every cell trains twice, paged and plain, and compares
losses, gradient norms, rates and adapters bit by bit; slots are filled with NaN bytes before each copy.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from axolotl_jobs import LORA, Job, Pair, Result, assert_equal, overrides, pair
from peft import PeftModel
from saving_jobs import PAGED, Jobs, difference, load, weights
from tiny_models import NUM_BLOCKS, build_model, model_path
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.integrations.bitsandbytes import Bnb4bitQuantize

from axolotl.integrations.protrain.loading import quantise_on
from axolotl.integrations.protrain.run import NOT_REPACKED

Run = Callable[[Job], Result]

QLORA = {**LORA, "adapter": "qlora", "load_in_4bit": True}
KINDS: dict[str, dict[str, Any]] = {
    # Axolotl's default is NF4 with double quantisation
    "nf4-double": {},
    "nf4": {"bnb_config_kwargs": {"bnb_4bit_use_double_quant": False}},
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
    # biases that bitsandbytes casts, experts, norms in fp32
    ("qwen2", "nf4-double", 0, True, True, 1),
    ("mixtral", "nf4-double", 0, True, True, 3),
    ("gemma3", "nf4", NUM_BLOCKS // 2, False, True, 1),
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
@pytest.mark.sampled(5)
def test_paged_is_plain(run: Run, trainings: Pair) -> None:
    paged, plain = run(trainings.paged), run(trainings.plain)
    assert_equal(paged, plain)
    plan, measured = paged.report["plan"], paged.report["measured"]
    assert plan["mode"] == "B"
    assert measured["fetched_bytes"] > 0
    assert measured["offloaded_bytes"] == 0
    evaluates = bool(trainings.paged.settings["val_set_size"])
    assert (NOT_REPACKED in paged.report["notes"]) == evaluates


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

    By little: codebooks and alignment gaps weigh as much as rows this short, and less
    than the rest of the page on which a chunk ends.
    """
    four, sixteen = (
        run(job).report["measured"]["fetched_bytes"]
        for job in (bases.paged, bases.plain)
    )
    assert four < sixteen


# ---------------------------------------------------- saving, resuming, using an adapter

PLAN = {**PAGED, "protrain_capacity_bytes": "1GiB", **overrides(0, 2, NUM_BLOCKS)}
MERGES = ("legacy", "memory_efficient")
FAMILY = "llama-wide"
MODEL = model_path(FAMILY)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    jobs = Jobs(tmp_path_factory.mktemp("qlora"))
    build_model(jobs.folder, FAMILY)
    base = {**QLORA, "base_model": str(MODEL)}
    jobs.train("plain", base)
    jobs.train("paged", base, PLAN)
    second_half = {"resume_from_checkpoint": "paged/checkpoint-2"}
    jobs.train("resumed", base, PLAN, second_half, after=["paged"])
    for name, method in product(("plain", "paged"), MERGES):
        jobs.command(
            f"{method}_{name}",
            "merge_lora",
            base,
            PLAN if name == "paged" else {},
            {"lora_model_dir": name, "merge_method": method},
            after=[name],
        )
    yield jobs
    jobs.close()


@pytest.mark.parametrize("ours", ["paged", "resumed"])
def test_a_run_that_saves_is_the_plain_one(jobs: Jobs, ours: str) -> None:
    paged, plain = jobs[ours].finished, jobs["plain"].finished
    assert paged.paged and not plain.paged
    assert paged.history == plain.history
    last = [outcome.folder / "checkpoint-4" for outcome in (paged, plain)]
    for read in (weights, lambda folder: load(folder / "optimizer.pt")):
        assert difference(*map(read, last)) is None
    assert difference(weights(paged.folder), weights(plain.folder)) is None


@pytest.mark.parametrize("method", MERGES)
def test_an_adapter_merges(jobs: Jobs, method: str) -> None:
    ours, plain = (
        weights(jobs[f"{method}_{name}"].finished.folder / "merged")
        for name in ("paged", "plain")
    )
    assert difference(ours, plain) is None
    base = weights(jobs.folder / MODEL)
    assert ours.keys() == base.keys()
    assert any(not torch.equal(ours[name], base[name]) for name in base)


def test_an_adapter_works_without_axolotl(jobs: Jobs) -> None:
    """In transformers and PEFT alone, on a base in 4 bits, repacked if it can be."""
    base = AutoModelForCausalLM.from_pretrained(
        jobs.folder / MODEL,
        quantization_config=BitsAndBytesConfig(load_in_4bit=True),
        device_map={"": "cpu"},
    )
    rows = torch.arange(3, 35)[None]
    without = base(rows).logits
    model = PeftModel.from_pretrained(base, jobs["paged"].finished.folder)
    model.load_adapter(jobs["plain"].finished.folder, "plain")
    ours = model(rows).logits
    model.set_adapter("plain")
    assert torch.equal(ours, model(rows).logits)
    assert not torch.equal(ours, without)


# ------------------------------------------------------------------------------ loading


def test_quantising_elsewhere_changes_nothing(jobs: Jobs) -> None:
    assert jobs["plain"].finished

    def load_base() -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(
            jobs.folder / MODEL,
            quantization_config=BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_use_double_quant=True
            ),
            device_map={"": "cpu"},
        )

    plain, convert = load_base(), Bnb4bitQuantize.convert
    with quantise_on(torch.device("cpu")):
        assert Bnb4bitQuantize.convert is not convert
        model = load_base()
    assert Bnb4bitQuantize.convert is convert
    assert difference(model.state_dict(), plain.state_dict()) is None
    weight = model.get_parameter("model.layers.0.mlp.up_proj.weight")
    module = model.get_submodule("model.layers.0.mlp.up_proj")
    assert module.quant_state is weight.quant_state
    assert weight.quant_state.absmax.device == weight.device == torch.device("cpu")


@pytest.mark.full
def test_the_base_never_exists_in_16_bits() -> None:
    """A gigabyte in shards; see the benchmark for what is counted."""
    script = Path(__file__).parents[2] / "benchmarks" / "qlora_load.py"
    run = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("holds") == 3


def test_the_host_looks_up_an_embedding_for_which_there_is_no_room(run: Run) -> None:
    settings = {**QLORA, **KINDS["evaluated"], "bf16": True}
    settings["gradient_accumulation_steps"] = 3
    trainings = pair("llama", settings, plan=overrides(0, 2))
    paged = run(trainings.paged)
    while "rows" not in paged.report["plan"]["placements"]:
        less = f"{paged.report['device_bytes']['peak'] - 1}B"
        paged = run(trainings.paged.but({"protrain_capacity_bytes": less}))
    assert_equal(paged, run(trainings.plain))
