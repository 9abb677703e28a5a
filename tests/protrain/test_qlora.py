"""QLoRA: what a paged run over 4 bits saves is what the plain one does, and loads as that."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from axolotl.monkeypatch import relora
from axolotl.monkeypatch.relora import lora_delta_weight, update_weights
from axolotl_jobs import LORA, overrides
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from peft import LoraConfig, PeftModel, get_peft_model
from saving_jobs import PAGED, Jobs, difference, load, weights
from tiny_models import NUM_BLOCKS, build_model, model_path
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.integrations.bitsandbytes import Bnb4bitQuantize

from axolotl.integrations.protrain.callbacks import merged_on_device
from axolotl.integrations.protrain.core.engine.device import CpuDevice
from axolotl.integrations.protrain.core.engine.session import Options, Session
from axolotl.integrations.protrain.core.layout import build_layout
from axolotl.integrations.protrain.core.planner.plans import make_plan
from axolotl.integrations.protrain.loading import quantise_on

QLORA = {**LORA, "adapter": "qlora", "load_in_4bit": True}
PLAN = {**PAGED, "protrain_capacity_bytes": "1GiB", **overrides(0, 2, NUM_BLOCKS)}
FAMILY = "llama-wide"
MODEL = model_path(FAMILY)
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    jobs = Jobs(tmp_path_factory.mktemp("qlora"))
    build_model(jobs.folder, FAMILY)
    base = {**QLORA, "base_model": str(MODEL)}
    jobs.train("plain", base)
    jobs.train("paged", base, PLAN)
    second_half = {"resume_from_checkpoint": "paged/checkpoint-2"}
    jobs.train("resumed", base, PLAN, second_half, after=["paged"])
    for name, plan in {"plain": {}, "paged": PLAN}.items():
        legacy = {"lora_model_dir": name, "merge_method": "legacy"}
        jobs.command(f"merge_{name}", "merge_lora", base, plan, legacy, after=[name])
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


def test_an_adapter_merges(jobs: Jobs) -> None:
    ours, plain = (
        weights(jobs[f"merge_{name}"].finished.folder / "merged")
        for name in ("paged", "plain")
    )
    assert difference(ours, plain) is None
    base = weights(jobs.folder / MODEL)
    assert ours.keys() == base.keys()
    assert any(not torch.equal(ours[name], base[name]) for name in base)


@pytest.mark.parametrize("bits", [4, 8])
def test_relora_does_not_quantise_what_it_merges(bits: int) -> None:
    """Why `relora: true` is refused on such bases: once this fails it may be tried again."""
    layer = nn.Linear(64, 64, bias=False)
    if bits == 4:
        made: Any = Linear4bit(64, 64, bias=False, compute_dtype=torch.float32)
    else:
        made = Linear8bitLt(64, 64, bias=False, has_fp16_weights=False)
    made.weight = type(made.weight)(layer.weight.data.clone(), requires_grad=False)
    model: Any = nn.Sequential(made)
    model = model.to("cpu")
    setattr(model, f"is_loaded_in_{bits}bit", True)
    rows = torch.randn(4, 64)
    before = model(rows)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["0"]))
    target = adapted.base_model.model[0]
    with torch.no_grad():
        target.lora_B["default"].weight.normal_()
        merged = layer.weight + lora_delta_weight(target, torch.device("cpu"))
        update_weights(target, merged, reinit=True, device=torch.device("cpu"))
    if bits == 4:
        with pytest.raises(AssertionError):
            adapted(rows)
    else:
        assert torch.equal(adapted(rows), before)


def test_relora_merges_where_the_adapter_is() -> None:
    """A GPU adds nothing of its own to a weight on the host."""
    base = LlamaForCausalLM(LlamaConfig(**SIZES))
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    for name, param in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param)
    plain = copy.deepcopy(model)
    layers = relora.find_lora_modules(model)
    names = {name for name, param in model.named_parameters() if param.requires_grad}
    layout = build_layout(model, names)
    plan = make_plan(layout, 0, 2, 0, 0, False)
    session = Session(model, layout, plan, CpuDevice(), Options())
    with session.full_params(), torch.no_grad():
        homes = {name: layer.weight.data_ptr() for name, layer in layers.items()}
        with merged_on_device(session):
            for name, layer in relora.find_lora_modules(model).items():
                assert layer.weight.data_ptr() != homes[name]
            torch.manual_seed(3)
            relora.merge_and_save(model, "", "", reinit=True)
        torch.manual_seed(3)
        relora.merge_and_save(plain, "", "", reinit=True)
    session.close()
    assert difference(model.state_dict(), plain.state_dict()) is None


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
