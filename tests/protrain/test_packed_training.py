"""A base that stays packed trains from its YAML as its unpacked twin does plain."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from axolotl_jobs import LORA, PROTRAIN, SEEDING, overrides
from fork_server import call
from matrix_bases import EVALUATED, ON_EXPERTS
from recording_plugin import AFTER_FILE
from saving_jobs import PAGED, Jobs, difference, load, weights
from test_packed_bases import BASES, load as load_base
from tiny_models import NUM_BLOCKS, build_model, model_path
from transformers import AutoConfig, AutoModelForCausalLM

from axolotl.integrations.protrain.core.layout import (
    aligned,
    build_layout,
    spread_order,
)
from axolotl.integrations.protrain.core.layout.shards import PAGE_BYTES
from axolotl.integrations.protrain.offline.worker import Worker

EXPERTS = {**LORA, "lora_target_linear": None, "lora_target_modules": ["q_proj"]}
EXPERTS |= ON_EXPERTS
TRAINED = {**LORA, "lora_target_linear": None, "lora_target_modules": ["q_proj"]}
TRAINED |= {"lora_modules_to_save": ["up_proj"]}
AFTER = {"plugins": [PROTRAIN, SEEDING, "recording_plugin.AfterPlugin"]}
PLANS: dict[str, dict[str, Any]] = {
    "gpt_oss-mxfp4": {**EXPERTS, **overrides(0, 2, NUM_BLOCKS)},
    "qwen3-fp8": {**LORA, **overrides(0, 2, 2)},
    "deepseek_v3-fp8": {**EXPERTS, **EVALUATED, **AFTER, **overrides(1, 2, 1, 2)},
}


def twin_of(family: str) -> Path:
    path = model_path(family)
    return path.with_name(f"{path.name}-unpacked")


def build_twin(root: Path, family: str) -> None:
    """Save the values that transformers unpacks, as a base that was never packed."""
    build_model(root, family)
    values = load_base(root, family).state_dict()
    config = AutoConfig.from_pretrained(root / model_path(family))
    del config.quantization_config
    twin = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, tensor in twin.state_dict().items():
        tensor.copy_(values[name])
    twin.save_pretrained(root / twin_of(family))


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    jobs = Jobs(tmp_path_factory.mktemp("packed"))
    for family, config in BASES.items():
        build_twin(jobs.folder, family)
        own = {
            "bf16": True,
            "attn_implementation": "eager",
            "model_quantization_config": config.__name__,
            "model_quantization_config_kwargs": {"dequantize": True},
        }
        keys = PLANS[family]
        plan = {key: keys[key] for key in keys if key.startswith("protrain")}
        lora = {key: keys[key] for key in keys if key not in plan}
        plain = {"bf16": True, "attn_implementation": "eager"}
        plain["base_model"] = str(twin_of(family))
        paged = {**own, "base_model": str(model_path(family))}
        jobs.train(f"plain-{family}", lora, plain)
        jobs.train(f"paged-{family}", lora, paged, PAGED, plan)
        if family == "qwen3-fp8":
            # weights of the base train beside the adapters, as copies
            jobs.train("plain-trained", lora, TRAINED, plain)
            jobs.train("paged-trained", lora, TRAINED, paged, PAGED)
        if family == "gpt_oss-mxfp4":
            jobs.train("plain-full", plain)
            jobs.train("paged-full", paged, PAGED)
            half = {"resume_from_checkpoint": f"paged-{family}/checkpoint-2"}
            after = [f"paged-{family}"]
            jobs.train("resumed", lora, paged, PAGED, plan, half, after=after)
    yield jobs
    jobs.close()


@pytest.mark.parametrize("family", [*BASES, "trained", "full"])
def test_a_packed_base_trains_as_its_unpacked_twin(jobs: Jobs, family: str) -> None:
    paged, plain = (jobs[f"{name}-{family}"].finished for name in ("paged", "plain"))
    assert paged.paged and not plain.paged
    assert paged.history == plain.history
    last = [outcome.folder / "checkpoint-4" for outcome in (paged, plain)]
    for read in (weights, lambda folder: load(folder / "optimizer.pt")):
        assert difference(*map(read, last)) is None
    assert difference(weights(paged.folder), weights(plain.folder)) is None


def test_a_trained_model_evaluates_and_generates_as_plain(jobs: Jobs) -> None:
    ours, plain = (
        json.loads(
            (jobs[f"{name}-deepseek_v3-fp8"].folder / f"0-{AFTER_FILE}").read_text()
        )
        for name in ("paged", "plain")
    )
    assert ours == plain


def test_a_merged_model_is_that_of_the_unpacked_base(jobs: Jobs) -> None:
    for family in BASES:
        assert jobs[f"paged-{family}"].finished
    assert not call(merged_otherwise, jobs.folder, at=jobs.folder)


def merged_otherwise(root: Path) -> list[str]:
    """In a process of its own: what examples/merge_packed.py gives other bits than PEFT."""
    sys.path.append(str(Path(__file__).parents[2] / "examples"))
    from merge_packed import merge
    from peft import PeftModel

    found = []
    for family in BASES:
        merge(str(root / model_path(family)), f"merged-{family}", f"paged-{family}")
        twin = AutoModelForCausalLM.from_pretrained(
            root / twin_of(family), dtype=torch.bfloat16
        )
        wanted: Any = PeftModel.from_pretrained(twin, f"paged-{family}")
        ours = AutoModelForCausalLM.from_pretrained(f"merged-{family}")
        states = ours.state_dict(), wanted.merge_and_unload().state_dict()
        if (wrong := difference(*states)) is not None:
            found.append(f"{family}{wrong}")
    return found


def test_a_resumed_run_ends_as_the_plain_one(jobs: Jobs) -> None:
    ours, plain = jobs["resumed"].finished, jobs["plain-gpt_oss-mxfp4"].finished
    assert ours.history == plain.history
    last = [outcome.folder / "checkpoint-4" for outcome in (ours, plain)]
    for read in (weights, lambda folder: load(folder / "optimizer.pt")):
        assert difference(*map(read, last)) is None


@pytest.mark.parametrize("family", BASES)
def test_its_report_counts_packed_bytes(jobs: Jobs, family: str) -> None:
    """Host and device hold what was predicted, and the host less than values take."""
    folder = jobs[f"paged-{family}"].finished.folder
    compared = json.loads((folder / "protrain/report.json").read_text())["compared"]
    for what in ("weights and slots", "host arena"):
        assert compared[what]["predicted"] == compared[what]["measured"], what
    twin = weights(jobs.folder / twin_of(family))
    values = sum(tensor.nbytes for name, tensor in twin.items() if "layers" in name)
    assert compared["host arena"]["measured"] < 0.9 * values


@pytest.mark.parametrize("family", BASES)
def test_a_dry_run_counts_packed_bytes(
    jobs: Jobs, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From config.json alone, what the host pool of the training had."""
    folder = jobs[f"paged-{family}"].finished.folder
    compared = json.loads((folder / "protrain/report.json").read_text())["compared"]
    monkeypatch.chdir(jobs.folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    with Worker("test_packed_training:frozen_bytes") as worker:
        (found,) = worker.ask([f"paged-{family}.yaml"], 120)
    stay = spread_order(NUM_BLOCKS)[: PLANS[family]["protrain_n_persist_override"]]
    paged = sum(nbytes for block, nbytes in enumerate(found) if block not in stay)
    assert paged == compared["host arena"]["measured"]


def frozen_bytes(config: str) -> list[int]:
    """In a process of its own: what each block's frozen weights take on the host."""
    from axolotl.integrations.protrain.offline.meta_model import load_meta_model

    layout = build_layout(load_meta_model(Path(config), "cpu").model)
    frozen = (chunk for chunk in layout.pageable if not chunk.trainable)
    return [aligned(chunk.in_pool.nbytes, PAGE_BYTES) for chunk in frozen]
