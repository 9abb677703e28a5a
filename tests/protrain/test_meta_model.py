"""A meta model is the model that Axolotl would train, and it runs without weights."""

from __future__ import annotations

import importlib.util
import json
import math
import resource
import shutil
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from axolotl.monkeypatch.attention import sdpa_varlen
from axolotl.utils.dict import DictDefault
from axolotl.utils.schemas.config import AxolotlInputConfig
from fork_server import call
from huggingface_hub import constants
from matrix_composition import SAMPLING
from published_models import LLAMA_8B, LLAMA_70B, LLAVA, QWEN_VL
from shrunk_models import shrunk_config
from tiny_models import (
    MODEL_NAMES,
    TOKENIZER,
    VOCABULARY,
    build_inputs,
    build_model,
    model_path,
    random_model,
)
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Mamba2Config,
    Mamba2ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaMLP

from axolotl.integrations.protrain.core.errors import ConfigError
from axolotl.integrations.protrain.core.layout.tensors import tensors_in
from axolotl.integrations.protrain.core.planner.cards import gpu_hardware
from axolotl.integrations.protrain.core.planner.emulation import (
    Emulation,
    autocast_on_meta,
    outputs_as_fp32,
)
from axolotl.integrations.protrain.core.planner.meta import MetaMode
from axolotl.integrations.protrain.core.planner.operators import work_of
from axolotl.integrations.protrain.core.planner.seconds import work_s
from axolotl.integrations.protrain.core.types import Work
from axolotl.integrations.protrain.job import autocast_dtype, traced_job
from axolotl.integrations.protrain.offline.batches import (
    DOCUMENTS_PER_ROW,
    sample_batch,
)
from axolotl.integrations.protrain.offline.fake_kernels import (
    _delta_rule,
    fake_kernels,
    make_experts_traceable,
)
from axolotl.integrations.protrain.offline.meta_model import MetaModel, load_meta_model

BATCH, LENGTH = 2, 128
UNFUSED = {
    "lora_mlp_kernel": False,
    "lora_qkv_kernel": False,
    "lora_o_kernel": False,
    "lora_embedding_kernel": False,
}
LORA = {
    "adapter": "lora",
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "lora_target_linear": True,
}
QLORA = LORA | {"adapter": "qlora", "load_in_4bit": True}
VISION_LORA = {
    **LORA,
    **UNFUSED,
    "lora_target_linear": False,
    "lora_target_modules": r".*language_model.*\.(q|k|v|o|up|down|gate)_proj",
}
IMAGES = {
    "processor_type": "AutoProcessor",
    "skip_prepare_dataset": True,
    "remove_unused_columns": False,
    "sample_packing": False,
    "chat_template": "tokenizer_default",
    "datasets": [{"path": "none.jsonl", "ds_type": "json", "type": "chat_template"}],
}
LIGER = {
    "plugins": ["axolotl.integrations.liger.LigerPlugin"],
    "liger_rope": True,
    "liger_rms_norm": True,
    "liger_glu_activation": True,
    "liger_fused_linear_cross_entropy": True,
}
CUT_CROSS_ENTROPY = {
    "plugins": [
        "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin",
    ],
    "cut_cross_entropy": True,
}


def write_yaml(folder: Path, base_model: Path, keys: Mapping[str, Any]) -> Path:
    defaults = {
        "base_model": str(base_model),
        "datasets": [{"path": "none.jsonl", "ds_type": "json", "type": "completion"}],
        "dataset_prepared_path": str(folder / "prepared"),
        "output_dir": str(folder / "out"),
        "sequence_len": LENGTH,
        "micro_batch_size": BATCH,
        "gradient_accumulation_steps": 1,
        "max_steps": 1,
        "learning_rate": 1e-4,
        "lr_scheduler": "cosine",
        "optimizer": "adamw_torch",
        "bf16": True,
        "attn_implementation": "sdpa",
    }
    file = folder / "config.yml"
    written = {k: v for k, v in (defaults | dict(keys)).items() if v is not None}
    file.write_text(yaml.safe_dump(written))
    return file


def configuration_of(folder: Path, model: str | Mapping[str, Any]) -> Path:
    """A folder with nothing but a config.json: of a tiny family, or as given."""
    base_model = folder / "model"
    base_model.mkdir(parents=True)
    if isinstance(model, str):
        random_model(model).config.save_pretrained(base_model)
    else:
        (base_model / "config.json").write_text(json.dumps(model))
    return base_model


def meta_model_of(
    folder: Path, model: str | Mapping[str, Any], keys: Mapping[str, Any]
) -> MetaModel:
    base_model = configuration_of(folder, model)
    return load_meta_model(write_yaml(folder, base_model, keys), "cuda")


@dataclass
class Run:
    """What one forward and backward did: shapes and dtypes, no tensors."""

    saved: list[tuple[tuple[int, ...], torch.dtype]] = field(default_factory=list)
    made: set[tuple[int, ...]] = field(default_factory=set)
    without_gradient: list[str] = field(default_factory=list)
    fakes: list[str] = field(default_factory=list)
    flops: int = 0


class _Watch(MetaMode):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def ran(self, func: Any, args: Any, output: Any) -> None:
        outputs = output if isinstance(output, (list, tuple)) else [output]
        for tensor in outputs:
            if isinstance(tensor, Tensor):
                self.run.made.add(tuple(tensor.shape))
        made = list(tensors_in(output))
        work = work_of(func, args, output, list(tensors_in(args)), made)
        self.run.flops += work.flops_16 + work.flops_32


def noting(run: Run) -> saved_tensors_hooks:
    """What autograd saves meanwhile."""

    def pack(tensor: Tensor) -> Tensor:
        run.saved.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    return saved_tensors_hooks(pack, lambda tensor: tensor)


def run_on_meta(meta: MetaModel) -> Run:
    run = Run()
    emulation = Emulation("cuda", autocast_dtype(meta.cfg))
    with fake_kernels("cuda", meta.model) as used, _Watch(run), autocast_on_meta():
        with emulation, noting(run):
            outputs = meta.model(**batch_of(meta))
        loss = outputs_as_fp32(outputs)["loss"]
        loss.backward()
    assert loss.is_meta and not loss.shape
    for name, param in meta.model.named_parameters():
        if not param.requires_grad:
            assert param.grad is None, name
        elif param.grad is None:
            run.without_gradient.append(name)
        else:
            assert (param.grad.shape, param.grad.device) == (param.shape, param.device)
    run.fakes = used
    return run


def batch_of(meta: MetaModel) -> dict[str, Tensor]:
    return sample_batch(meta.cfg, meta.model, [])


def assert_without_weights(meta: MetaModel) -> None:
    for name, param in meta.model.named_parameters():
        assert param.is_meta, name
        for tensor in quantisation_of(param).values():
            assert not isinstance(tensor, Tensor) or tensor.is_meta, name
    assert all(buffer.is_meta for buffer in meta.model.buffers())
    for name, tensor in batch_of(meta).items():
        assert tensor.is_meta == tensor.is_floating_point(), name


def quantisation_of(param: Tensor) -> dict[str, Any]:
    state = getattr(param, "quant_state", None)
    if state is None:
        return {}
    values = {key: value for key, value in vars(state).items() if key != "state2"}
    if state.state2 is not None:
        values |= {f"nested_{key}": v for key, v in vars(state.state2).items()}
    return values


# ------------------------------------------------------------------- running it


FULL = ("llama", "qwen3", "gemma3", "mixtral", "qwen3_moe", "phi3", "gpt2")
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "dora": LORA | {"peft_use_dora": True},
    "qlora": QLORA,
    "in_8_bits": LORA | {"load_in_8bit": True},
    "qlora_dora": QLORA | {"peft_use_dora": True},
    "saved_modules": LORA | {"lora_modules_to_save": ["lm_head"]},
    "pissa": LORA | {"peft_init_lora_weights": "pissa"},
}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FULL},
    **{name: ("llama", keys | UNFUSED) for name, keys in ADAPTERS.items()},
}


@pytest.mark.parametrize("name", RUNS)
def test_forward_and_backward_run(name: str, tmp_path: Path) -> None:
    meta = meta_model_of(tmp_path, *RUNS[name])
    assert_without_weights(meta)
    assert autocast_dtype(meta.cfg) is torch.bfloat16
    assert meta.cfg.optimizer == "adamw_torch"
    assert any(f"{VOCABULARY} tokens" in line for line in meta.assumptions)
    run = run_on_meta(meta)
    assert not run.without_gradient
    assert (BATCH, LENGTH, VOCABULARY) in run.made


@pytest.mark.parametrize("target", ["cuda", "cpu"])
def test_products_of_4_bit_weights_are_counted(target: str, tmp_path: Path) -> None:
    """bitsandbytes multiplies in one operator, of which torch knows no formula."""
    works = {}
    for name, keys in {"lora": LORA, "qlora": QLORA}.items():
        folder = tmp_path / name
        folder.mkdir()
        meta = meta_model_of(
            folder, LLAMA_8B | {"num_hidden_layers": 2}, keys | UNFUSED
        )
        subject = traced_job(meta.cfg, meta.model, target)
        assert subject.traced.uncounted == ()
        segments = subject.traced.trace.segments
        works[name] = [
            sum((s.work for s in segments if s.backward is backward), Work())
            for backward in (False, True)
        ]
    linear = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    weights = linear + 4096 * 128256
    card = replace(gpu_hardware("4090", None, 0), kernel_s=0.0)
    for plain, packed in zip(works["lora"], works["qlora"], strict=True):
        assert plain.flops_16 > 2 * BATCH * LENGTH * weights
        assert (packed.flops_16, packed.flops_32) == (plain.flops_16, plain.flops_32)
        assert packed.attention_16 == plain.attention_16
        # each weight is read in 4 bits and written in 16 before it is multiplied
        assert packed.moved_bytes - plain.moved_bytes > 2.5 * linear
        assert work_s(packed, card) > work_s(plain, card)


def test_documents_of_a_packed_row_attend_to_themselves(tmp_path: Path) -> None:
    """Not to the whole row, whose attention would take as many times longer."""
    works = []
    for packs in (False, True):
        folder = tmp_path / str(packs)
        folder.mkdir()
        keys = {"attn_implementation": "flash_attention_2", "micro_batch_size": 1}
        keys |= {"sample_packing": packs, "pad_to_sequence_len": packs}
        meta = meta_model_of(folder, "llama", keys)
        trace = traced_job(meta.cfg, meta.model, "cuda").traced.trace
        works.append(sum((s.work for s in trace.segments), Work()))
    whole, packed = works
    assert packed.attention_16 == whole.attention_16 / DOCUMENTS_PER_ROW > 0
    assert packed.flops_16 == whole.flops_16


def test_fp32_has_no_autocast(tmp_path: Path) -> None:
    meta = meta_model_of(tmp_path, "llama", {"bf16": False, "fp16": False})
    assert autocast_dtype(meta.cfg) is None
    assert {p.dtype for p in meta.model.parameters()} == {torch.float32}
    run_on_meta(meta)


@pytest.mark.parametrize(("device", "dtype"), [("cuda", torch.float16), ("cpu", None)])
def test_fp16_has_autocast_on_a_gpu_alone(
    device: str, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    """Its adapters are in fp32, and what else would train cannot be scaled."""
    keys: dict[str, Any] = LORA | UNFUSED | {"fp16": True, "bf16": "auto"}
    config = write_yaml(tmp_path, configuration_of(tmp_path, "llama"), keys)
    meta = load_meta_model(config, device)
    assert autocast_dtype(meta.cfg) is dtype
    found = {(p.dtype, p.requires_grad) for p in meta.model.parameters()}
    assert found == {(torch.float32, True), (torch.float16, False)}
    traced_job(meta.cfg, meta.model, device)
    meta.model.get_input_embeddings().requires_grad_(True)
    with (
        pytest.raises(ConfigError, match="^fp16: .*embed_tokens")
        if dtype
        else (nullcontext())
    ):
        traced_job(meta.cfg, meta.model, device)


@pytest.mark.parametrize("keys", [{"bf16": "auto"}, {"bf16": None}])
def test_precision_left_to_axolotl_is_that_of_the_target(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    config = write_yaml(tmp_path, configuration_of(tmp_path, "llama"), keys)
    # on a CPU Axolotl would take fp16, which is refused
    for device in ("cuda", "cpu"):
        assert autocast_dtype(load_meta_model(config, device).cfg) is torch.bfloat16


@pytest.mark.parametrize(
    "attention", ["flash_attention_2", "flex_attention", "xformers", "sage"]
)
def test_fused_attention_saves_what_a_flash_kernel_saves(
    attention: str, tmp_path: Path
) -> None:
    keys = {"attn_implementation": attention, "sample_packing": False}
    if attention == "sage":
        keys |= LORA | UNFUSED  # Axolotl takes it for nothing else
    meta = meta_model_of(tmp_path, "qwen3", keys)
    run = run_on_meta(meta)
    heads, kv_heads, dim = 3, 1, 12
    assert ((BATCH, heads, LENGTH), torch.float32) in run.saved
    assert ((BATCH, heads, LENGTH, dim), torch.bfloat16) in run.saved
    assert ((BATCH, kv_heads, LENGTH, dim), torch.bfloat16) in run.saved
    assert not any(shape[-2:] == (LENGTH, LENGTH) for shape in run.made)
    assert any(attention in line for line in meta.assumptions)


@pytest.mark.parametrize(
    ("family", "asked", "taken"),
    [
        ("gpt_oss", "flash_attention_2", "kernels-community/vllm-flash-attn3"),
        ("gpt_oss", "flex_attention", "flex_attention"),
        ("gpt_oss", None, "eager"),
        ("llama", None, "sdpa"),
    ],
)
def test_the_attention_is_the_one_that_transformers_takes(
    family: str, asked: str | None, taken: str, tmp_path: Path
) -> None:
    keys = {"attn_implementation": asked, "sample_packing": False}
    meta = meta_model_of(tmp_path, family, keys)
    assert meta.model.config._attn_implementation == taken
    (line,) = (x for x in meta.assumptions if x.startswith(f"attention {taken}"))
    given = asked or "sdpa"
    assert (f"in place of {given} here" in line) == (taken != given)
    run = run_on_meta(meta)
    scores = any(shape[-2:] == (LENGTH, LENGTH) for shape in run.made)
    # sdpa has a mask, for these rows are padded
    assert scores == (taken in ("eager", "sdpa"))


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention", "sdpa"])
def test_attention_that_a_model_does_not_support_is_refused(
    attention: str, tmp_path: Path
) -> None:
    codegen = {"model_type": "codegen", "n_embd": 64, "n_layer": 2, "n_head": 4}
    keys = {"attn_implementation": attention, "sample_packing": False}
    with pytest.raises(ConfigError, match="CodeGenForCausalLM does not support"):
        meta_model_of(tmp_path, codegen | {"rotary_dim": 8}, keys)


def test_experts_in_mxfp4_are_said_to_be_unpacked(tmp_path: Path) -> None:
    family, keys = SAME["dequantised"]
    packed = {"quantization_config": {"quant_method": "mxfp4"}}
    model = random_model(family).config.to_dict() | packed
    meta = meta_model_of(tmp_path, model, keys)
    (line,) = (x for x in meta.assumptions if "MXFP4" in x)
    assert "of experts in bf16" in line


def test_rows_have_padding_unless_packed(tmp_path: Path) -> None:
    batch = batch_of(meta_model_of(tmp_path, "llama", {"sample_packing": False}))
    padding = batch["attention_mask"] == 0
    assert padding.any(1).all() and (batch["labels"][padding] == -100).all()


def test_rows_are_padded_to_a_multiple(tmp_path: Path) -> None:
    base_model = configuration_of(tmp_path, "llama")
    for padded, length in (({}, 128), ({"pad_to_sequence_len": False}, 100)):
        config = write_yaml(tmp_path, base_model, {"sequence_len": 100, **padded})
        batch = batch_of(load_meta_model(config, "cuda"))
        assert batch["input_ids"].shape == (BATCH, length)


@pytest.mark.parametrize("attention", ["flash_attention_2", "sdpa", "eager"])
def test_packed_rows(attention: str, tmp_path: Path) -> None:
    keys = {"attn_implementation": attention, "sample_packing": True}
    meta = meta_model_of(tmp_path, "llama", keys | {"pad_to_sequence_len": True})
    batch = batch_of(meta)
    assert "attention_mask" not in batch or attention == "eager"
    assert batch["input_ids"].numel() == BATCH * LENGTH
    assert (batch["position_ids"] == 0).sum() > len(batch["input_ids"])
    run = run_on_meta(meta)
    # on CUDA Axolotl sends packed rows to a flash kernel under sdpa too
    length = batch["input_ids"].shape[1]
    square = any(shape[-2:] == (length, length) for shape in run.made)
    assert square == (attention == "eager")


def test_packed_rows_of_a_model_that_axolotl_has_patched(tmp_path: Path) -> None:
    """As in training, where Axolotl has put its own sdpa in the place of the other."""
    keys = {"sample_packing": True, "pad_to_sequence_len": True, "sdpa_varlen": False}
    meta = meta_model_of(tmp_path, "llama", keys)
    assert meta.model.config._attn_implementation == "sdpa"
    assert sdpa_varlen.patch_sdpa_varlen()
    try:
        made = run_on_meta(meta).made
    finally:
        sdpa_varlen.unpatch_sdpa_varlen()
    assert not any(shape[-2:] == (LENGTH, LENGTH) for shape in made)


LINEAR = "qwen3_5_text", "qwen3_next", "olmo_hybrid", "glm5_next"
"""Families with linear attention, of four heads."""


def linear_model(family: str) -> torch.nn.Module:
    is_tiny = family in MODEL_NAMES
    config = random_model(family).config if is_tiny else shrunk_config(family)
    images = family == "glm5_next"
    loader = AutoModelForImageTextToText if images else AutoModelForCausalLM
    with torch.device("meta"):
        model = loader.from_config(config, dtype=torch.bfloat16).train()
    make_experts_traceable(model, [])
    return model


def run_linear(model: torch.nn.Module) -> Run:
    run = Run()
    ids = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 97
    with fake_kernels("cuda", model) as used, _Watch(run), Emulation("cuda", None):
        with noting(run):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    run.fakes = used
    return run


@pytest.mark.parametrize("family", LINEAR)
def test_linear_attention_is_that_of_the_kernel(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that transformers or kernels moves ends here."""
    model = linear_model(family)
    run = run_linear(model)
    # where that can be imported, its own code is traced, and its Triton kernels counted
    assert "kernels of flash-linear-attention" in run.fakes[0]
    chunks = (BATCH, LENGTH, 4, 64)
    assert (chunks, torch.bfloat16) in run.saved
    assert not has_chunks(run)
    assert all(
        param.grad is not None
        for name, param in model.named_parameters()
        if "in_proj" in name or "linear_attn" in name
    )
    if "fla.ops" in sys.modules:
        # the model has its functions already
        return
    find_spec = importlib.util.find_spec

    def without_fla(name: str, package: str | None = None) -> Any:
        return None if name == "fla" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_fla)
    slow = run_linear(model)
    assert any("torch's own operators" in line for line in slow.fakes)
    assert has_chunks(slow)
    assert numel_of(slow.saved) > 2 * numel_of(run.saved)


def has_chunks(run: Run) -> bool:
    """Whether each chunk's tokens met each other in a tensor."""
    return any(len(shape) == 5 and shape[-2:] == (64, 64) for shape in run.made)


def numel_of(saved: list[tuple[tuple[int, ...], torch.dtype]]) -> int:
    return sum(math.prod(shape) for shape, _ in saved)


def test_a_scan_without_a_kernel_is_said_to_be_slow() -> None:
    # by their classes: flash-linear-attention registers others for this type
    sizes = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2}
    config = Mamba2Config(num_heads=4, head_dim=32, n_groups=1, state_size=16, **sizes)
    with torch.device("meta"):
        model = Mamba2ForCausalLM(config).train()
    run = run_linear(model)
    assert any("mamba-ssm" in line and "torch's own" in line for line in run.fakes)


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "chunk_kda"])
def test_the_kernel_is_as_the_code_of_its_package_has_it(name: str) -> None:
    try:
        ops = importlib.import_module("fla.ops")
    except (ImportError, ValueError) as error:
        pytest.skip(f"flash-linear-attention cannot be imported here: {error}")

    def run_of(function: Any) -> tuple[Run, int]:
        run, moved = Run(), [0]

        class Launches(_Watch):
            def ran(self, func: Any, args: Any, output: Any) -> None:
                if "launch" in str(func):
                    moved[0] += sum(tensor.nbytes for tensor in args[0])

        sizes = (2, 4096, 8, 128)
        made = [torch.empty(sizes, dtype=torch.bfloat16, device="meta") for _ in "qkv"]
        by_channel = sizes if name == "chunk_kda" else sizes[:3]
        made.append(torch.empty(by_channel, device="meta"))
        made.append(torch.empty(sizes[:3], dtype=torch.bfloat16, device="meta"))
        inputs = [tensor.requires_grad_() for tensor in made]
        with fake_kernels("cuda", torch.nn.Identity()), Launches(run):
            with noting(run):
                query, key, value, g, beta = inputs
                given = {"g": g, "beta": beta, "use_qk_l2norm_in_kernel": True}
                output, _ = function(query, key, value, **given)
            output.backward(torch.empty_like(output))
        assert all(tensor.grad is not None for tensor in inputs)
        return run, moved[0]

    (own, own_bytes), (ours, our_bytes) = map(run_of, (getattr(ops, name), _delta_rule))
    assert numel_of(ours.saved) == pytest.approx(numel_of(own.saved), rel=0.05)
    assert our_bytes == pytest.approx(own_bytes, rel=0.2)


def test_experts_that_look_at_values_are_traced_otherwise(tmp_path: Path) -> None:
    keys = {"experts_implementation": "eager"}
    meta = meta_model_of(tmp_path, "mixtral", keys)
    assert not run_on_meta(meta).without_gradient
    assert any("experts_implementation eager" in x for x in meta.assumptions)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_cut_cross_entropy_has_no_logits(family: str, tmp_path: Path) -> None:
    """Of models with experts too, which call their loss in another way."""
    meta = meta_model_of(tmp_path, family, CUT_CROSS_ENTROPY)
    run = run_on_meta(meta)
    assert not run.without_gradient
    assert not any(shape[-1:] == (VOCABULARY,) for shape in run.made)
    assert any("cut_cross_entropy" in line for line in meta.assumptions)
    plain = run_on_meta(meta_model_of(tmp_path / "plain", family, {}))
    # backward makes the logits once more
    logits = BATCH * LENGTH * VOCABULARY
    assert run.flops - plain.flops == 2 * logits * meta.model.config.hidden_size


# ---------------------------------------------------------------------- images


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2"])
def test_qwen_images(attention: str, tmp_path: Path) -> None:
    keys = VISION_LORA | IMAGES | {"attn_implementation": attention}
    base_model = configuration_of(tmp_path, QWEN_VL)
    settings = {"size": {"shortest_edge": 3136, "longest_edge": 112 * 112}}
    (base_model / "preprocessor_config.json").write_text(json.dumps(settings))
    meta = load_meta_model(write_yaml(tmp_path, base_model, keys), "cuda")
    batch = batch_of(meta)
    assert batch["image_grid_thw"].tolist() == [[1, 8, 8]] * BATCH
    assert batch["pixel_values"].shape == (BATCH * 64, 3 * 2 * 14 * 14)
    assert (batch["input_ids"] == 292).sum(1).tolist() == [16] * BATCH
    assert (batch["labels"] == -100).sum(1).tolist() == [16 + 1] * BATCH
    assert_without_weights(meta)
    assert not run_on_meta(meta).without_gradient


def test_the_largest_image_need_not_be_square(tmp_path: Path) -> None:
    meta = meta_model_of(tmp_path, QWEN_VL, VISION_LORA | IMAGES)
    grid = batch_of(meta)["image_grid_thw"]
    assert (grid.prod(1) == 1280 * 2 * 2).all()
    assert batch_of(meta)["input_ids"].shape[1] > LENGTH


def test_a_tower_that_gives_what_the_text_model_does_not_take(tmp_path: Path) -> None:
    tower = QWEN_VL["vision_config"] | {"out_hidden_size": 32}
    meta = meta_model_of(
        tmp_path, QWEN_VL | {"vision_config": tower}, IMAGES | VISION_LORA
    )
    with pytest.raises(
        ConfigError, match="out_hidden_size 32 must be the hidden_size 48"
    ):
        batch_of(meta)


@pytest.mark.parametrize("family", ["ernie4_5_vl_moe", "kimi_k25", "qwen3_vl"])
def test_towers_that_name_their_sizes_otherwise(family: str) -> None:
    config = shrunk_config(family)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    notes: list[str] = []
    cfg = DictDefault(
        micro_batch_size=1, sequence_len=32, processor_type="x", is_multimodal=True
    )
    batch = sample_batch(cfg, model, notes)
    assert ("pixel_values" in batch) == (family != "kimi_k25")
    assert ("are not known here" in notes[0]) == (family == "kimi_k25")
    if family == "kimi_k25":
        return
    make_experts_traceable(model, [])
    with MetaMode(), Emulation("cuda", None):
        model(**batch, use_cache=False).loss.backward()
    assert all(
        p.grad is not None for n, p in model.named_parameters() if "patch_embed" in n
    )


def test_a_flash_kernel_keeps_images_apart(tmp_path: Path) -> None:
    """And attends in both directions, as the tower does with torch's operators."""
    works = []
    for attention in ("sdpa", "flash_attention_2"):
        folder = tmp_path / attention
        folder.mkdir()
        keys = (
            VISION_LORA | IMAGES | {"attn_implementation": attention, "image_size": 112}
        )
        meta = meta_model_of(folder, QWEN_VL, keys)
        traced = traced_job(meta.cfg, meta.model, "cuda").traced.trace
        tower = {n for n, name in enumerate(traced.blocks) if "visual" in name}
        assert tower
        segments = [s for s in traced.segments if s.block in tower]
        works.append(sum((s.work for s in segments), Work()).attention_16)
    assert works[0] == works[1] > 0


def test_images_of_a_fixed_size(tmp_path: Path) -> None:
    meta = meta_model_of(tmp_path, LLAVA, VISION_LORA | IMAGES)
    assert batch_of(meta)["pixel_values"].shape == (BATCH, 3, 56, 56)
    assert (batch_of(meta)["input_ids"] == 299).sum(1).tolist() == [16] * BATCH
    assert not run_on_meta(meta).without_gradient


def test_the_image_size_of_the_yaml_bounds_the_image(tmp_path: Path) -> None:
    keys = VISION_LORA | IMAGES | {"image_size": 56}
    meta = meta_model_of(tmp_path, QWEN_VL, keys)
    assert batch_of(meta)["image_grid_thw"].tolist() == [[1, 4, 4]] * BATCH


def test_text_for_a_vision_model(tmp_path: Path) -> None:
    meta = meta_model_of(tmp_path, QWEN_VL, {"freeze_mm_modules": True})
    assert "pixel_values" not in batch_of(meta)
    frozen = {n for n, p in meta.model.named_parameters() if not p.requires_grad}
    assert frozen and all("visual" in name for name in frozen)
    assert not run_on_meta(meta).without_gradient


# ---------------------------------------- kernels that patch classes for good


@dataclass
class Patched:
    """What a fresh process reports of a meta model."""

    run: Run
    mlp_forward: str
    assumptions: list[str]
    peak_bytes: int


def report_patched(folder: Path, model: Any, keys: dict[str, Any]) -> Patched:
    meta = meta_model_of(folder, model, keys)
    assert_without_weights(meta)
    base = meta.model
    if hasattr(base, "get_base_model"):
        base = base.get_base_model()
    run = run_on_meta(meta)
    return Patched(
        run,
        base.model.layers[0].mlp.forward.__name__,
        meta.assumptions + run.fakes,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def test_fused_lora_kernels_are_on_as_on_the_target(
    tmp_path: Path,
) -> None:
    for name, keys in {"lora": LORA, "qlora": QLORA}.items():
        folder = tmp_path / name
        folder.mkdir()
        patched = call(report_patched, folder, "llama", keys)
        assert patched.mlp_forward == "apply_lora_mlp_swiglu"
        assert not patched.run.without_gradient
        four_bit = any("4-bit" in line for line in patched.assumptions)
        assert four_bit == (name == "qlora")


def test_liger_has_no_logits(tmp_path: Path) -> None:
    patched = call(report_patched, tmp_path, "llama", LIGER)
    assert not patched.run.without_gradient
    assert any("swiglu_forward_kernel" in line for line in patched.assumptions)
    # as many chunks as the vocabulary is wider than the hidden size
    assert (BATCH * LENGTH // 8, VOCABULARY) in patched.run.made
    assert (BATCH * LENGTH, VOCABULARY) not in patched.run.made
    assert (BATCH, LENGTH, VOCABULARY) not in patched.run.made


@pytest.mark.full
def test_seventy_billion_parameters(tmp_path: Path) -> None:
    patched = call(report_patched, tmp_path, LLAMA_70B, QLORA)
    assert patched.peak_bytes < 2.5e9


# -------------------------------------------------- the same model as Axolotl's


def parts_of(model: torch.nn.Module) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    for name, param in model.named_parameters():
        parts[name] = (tuple(param.shape), param.dtype, param.requires_grad)
        for key, value in quantisation_of(param).items():
            if isinstance(value, Tensor):
                value = tuple(value.shape), value.dtype
            parts[f"{name}: {key}"] = value
    for name, buffer in model.named_buffers():
        parts[name] = tuple(buffer.shape), buffer.dtype
    return parts


PRECISION = {"bf16": {"bf16": True}, "fp32": {"bf16": False, "fp16": False}}
SAME: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("llama", {}),
    "full_tied": ("llama-tied", {}),
    "full_flagged": ("qwen3", {"unfrozen_parameters": [r"model.layers.[1-3]\..*"]}),
    "full_gemma3": ("gemma3", {}),
    "full_moe": ("mixtral", {}),
    "lora": ("llama", LORA),
    "lora_moe": (
        "qwen3_moe",
        LORA
        | {
            "lora_target_linear": False,
            "lora_target_modules": ["q_proj", "v_proj"],
            "lora_target_parameters": ["mlp.experts.gate_up_proj"],
        },
    ),
    "lora_embeddings": (
        "qwen3",
        LORA | {"lora_modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "dora": ("qwen3", LORA | {"peft_use_dora": True, "peft_use_rslora": True}),
    "qlora": ("llama", QLORA),
    "in_8_bits": ("llama", LORA | {"load_in_8bit": True}),
    "dequantised": (
        "gpt_oss-mxfp4",
        {
            "attn_implementation": "eager",
            "model_quantization_config": "Mxfp4Config",
            "model_quantization_config_kwargs": {"dequantize": True},
        },
    ),
    "qlora_gemma3": ("gemma3", QLORA),
    "qlora_flat": (
        "qwen3",
        QLORA | {"bnb_config_kwargs": {"bnb_4bit_use_double_quant": False}},
    ),
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    build_inputs(root)
    return root


@pytest.mark.parametrize(
    "precision", ["bf16", pytest.param("fp32", marks=pytest.mark.full)]
)
@pytest.mark.parametrize("name", SAME)
@pytest.mark.sampled(5)
def test_the_model_is_the_one_that_axolotl_loads(
    name: str, precision: str, weights: Path, tmp_path: Path
) -> None:
    family, keys = SAME[name]
    if name == "qlora_flat" and precision == "bf16":
        keys = keys | {"gradient_checkpointing": True}
    build_model(weights, family)
    keys = {
        **UNFUSED,
        **keys,
        **PRECISION[precision],
        "tokenizer_config": str(weights / TOKENIZER),
        "resize_token_embeddings_to_32x": True,
    }
    config = write_yaml(tmp_path, weights / model_path(family), keys)
    assert parts_of(load_meta_model(config, "cuda").model) == real_parts(config)


def real_parts(config: Path) -> dict[str, Any]:
    from axolotl.cli.config import load_cfg
    from axolotl.train import setup_model_and_tokenizer

    return parts_of(setup_model_and_tokenizer(load_cfg(str(config)))[0])


def test_a_configuration_alone_gives_the_same_model(
    weights: Path, tmp_path: Path
) -> None:
    build_model(weights, "llama")
    alone = meta_model_of(tmp_path, "llama", LORA | UNFUSED)
    config = write_yaml(tmp_path, weights / model_path("llama"), LORA | UNFUSED)
    assert parts_of(alone.model) == parts_of(load_meta_model(config, "cuda").model)


def test_a_preference_is_a_pair_and_its_reference(tmp_path: Path) -> None:
    """Two rows for each pair, as long as the YAML allows, and the model twice."""
    build_inputs(tmp_path)
    keys = LORA | {"rl": "dpo", "tokenizer_config": str(tmp_path / TOKENIZER)}
    meta = meta_model_of(tmp_path, "llama", keys)
    longer = {"sequence_len": 2 * meta.cfg.sequence_len}
    for change in ({}, longer, {"micro_batch_size": 3}):
        with meta.changed(change):
            objective = meta.objective()
            assert objective is not None
            shape = 2 * meta.cfg.micro_batch_size, meta.cfg.sequence_len
            assert objective.batch["input_ids"].shape == shape
    subject = traced_job(meta.cfg, meta.model, "cuda", objective=meta.objective())
    passes = [s.backward for s in subject.traced.trace.segments if s.block == 0]
    assert passes == [False, False, True]


def test_answers_and_judges_are_those_of_a_yaml_with_other_rows(tmp_path: Path) -> None:
    """A reward is code, or a model that is on the device."""
    build_inputs(tmp_path)
    judge = configuration_of(tmp_path / "judge", "llama-reward")
    rewards = ["answers.vowels", str(judge), "nobody/has-it"]
    trl = SAMPLING["trl"] | {"reward_funcs": rewards, "generation_batch_size": 8}
    keys = LORA | SAMPLING | {"tokenizer_config": str(tmp_path / TOKENIZER)}
    meta = meta_model_of(tmp_path / "given", "llama", keys | {"trl": trl})
    objective = meta.objective()
    assert objective is not None and [*objective.others] == ["reward_funcs_1"]
    (note,) = (line for line in meta.assumptions if "reward_funcs" in line)
    assert "nobody/has-it is a model, whose bytes are not counted" in note

    def rows(num_ranks: int = 1) -> int:
        objective = meta.objective(num_ranks)
        assert objective is not None and objective.sampled is not None
        return objective.sampled.rows

    assert (rows(), rows(num_ranks=2)) == (8, 4)
    finer = {"micro_batch_size": 1, "gradient_accumulation_steps": 8}
    with meta.changed(finer):
        assert rows() == 8
    meta = meta_model_of(tmp_path / "followed", "llama", keys)
    assert rows() == 4
    with meta.changed(finer):
        assert rows() == 8


def test_another_rank_is_that_of_experts_too(tmp_path: Path) -> None:
    """Their adapters have so many rows for each of them."""
    keys = LORA | UNFUSED | {"lora_target_parameters": ["mlp.experts.gate_up_proj"]}
    meta, other = (
        meta_model_of(tmp_path / str(rank), "mixtral", keys | {"lora_r": rank})
        for rank in (4, 8)
    )
    wanted = parts_of(other.model)
    before = parts_of(meta.model)
    with meta.changed({"lora_r": 8}):
        assert parts_of(meta.model) == wanted != before
    assert parts_of(meta.model) == before


def test_a_revision_is_asked_for_throughout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Config and tokenizer are in the cache under that name alone."""
    build_inputs(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    commit, repository = "a" * 40, tmp_path / "hub/models--owner--name"
    snapshot = repository / "snapshots" / commit
    shutil.copytree(tmp_path / TOKENIZER, snapshot)
    shutil.copy(configuration_of(tmp_path, "llama") / "config.json", snapshot)
    (repository / "refs").mkdir()
    (repository / "refs/v1").write_text(commit)
    config = write_yaml(tmp_path, Path("owner/name"), {"revision_of_model": "v1"})
    meta = load_meta_model(config, "cuda")
    assert not any("no tokenizer" in line for line in meta.assumptions)


def test_a_model_for_several_ranks_is_moved_nowhere(tmp_path: Path) -> None:
    """A YAML may ask Axolotl to move it to a GPU, as one without weights cannot be."""
    keys = {"ddp": True, "experimental_skip_move_to_device": False}
    meta = meta_model_of(tmp_path, "llama", keys)
    assert {param.device.type for param in meta.model.parameters()} == {"meta"}


def test_weights_made_anew_take_no_memory(tmp_path: Path) -> None:
    """A dry run would draw all of them."""
    meta = meta_model_of(tmp_path, "llama", {"reinit_weights": True})
    assert {param.device.type for param in meta.model.parameters()} == {"meta"}


def report_hosted(folder: Path, keys: dict[str, Any]) -> bool:
    meta = meta_model_of(folder, "llama", keys)
    chunks = traced_job(meta.cfg, meta.model, "cuda").layout.chunks
    return any(chunk.trainable for chunk in chunks)


def test_state_of_dora_under_kernels_stays_on_the_device(tmp_path: Path) -> None:
    """They keep norms by versions of weights, which other updates count otherwise."""
    hosted = []
    for kernels in (False, True):
        folder = tmp_path / str(kernels)
        folder.mkdir()
        keys = LORA | {"peft_use_dora": True, "lora_qkv_kernel": kernels}
        # elsewhere: Axolotl patches the class of the attention for good
        hosted.append(call(report_hosted, folder, LORA | UNFUSED | keys))
    assert hosted == [True, False]


def test_a_dry_run_starts_no_run_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server would count one for each plan that is asked for."""
    begun: list[dict[str, Any]] = []
    swanlab: Any = ModuleType("swanlab")
    swanlab.__version__, swanlab.init = "0.6.0", lambda **how: begun.append(how)
    monkeypatch.setitem(sys.modules, "swanlab", swanlab)
    plugin = "axolotl.integrations.swanlab.SwanLabPlugin"
    keys = {"plugins": [plugin], "use_swanlab": True, "swanlab_project": "one"}
    meta_model_of(tmp_path, "llama", keys | {"swanlab_mode": "local"})
    assert not begun


@pytest.mark.parametrize("loss", ["use_eaft", "use_dft"])
def test_a_loss_of_logits_is_counted(loss: str, tmp_path: Path) -> None:
    """Axolotl's trainer computes it in the place of the model's, of copies of logits."""
    if loss not in AxolotlInputConfig.model_fields:
        pytest.skip("not in this version of Axolotl")
    totals = []
    for keys in ({}, {loss: True}):
        meta = meta_model_of(tmp_path / str(len(totals)), "llama", keys)
        subject = traced_job(meta.cfg, meta.model, "cuda")
        totals.append(max(s.peak_bytes for s in subject.traced.trace.segments))
    assert totals[1] > totals[0]


def test_a_dry_run_leaves_room_for_a_reference_model(tmp_path: Path) -> None:
    """It is on the device already where training asks what is left."""
    build_inputs(tmp_path)
    keys = {"rl": "dpo", "tokenizer_config": str(tmp_path / TOKENIZER)}
    meta = meta_model_of(tmp_path, "llama", keys)
    whole = sum(param.nbytes for param in meta.model.parameters())
    for real, headroom in ((None, whole), (meta.model, 0)):
        subject = traced_job(
            meta.cfg, meta.model, "cuda", real=real, objective=meta.objective()
        )
        assert subject.headroom_bytes == headroom


# --------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "keys, names",
    [
        ({"sequence_len": "long"}, "sequence_len"),
        ({"rl": "dpo"}, "rl"),
        ({"plugins": ["axolotl.integrations.nothing.Plugin"]}, "plugins"),
        (LORA | {"adapter": "qlora", "load_in_4bit": False}, "load_in_4bit"),
        (LORA | {"lora_r": None, "lora_rank": 8}, "^lora_r: .* `lora_rank` is no key"),
    ],
)
def test_a_bad_key_is_named(keys: dict[str, Any], names: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=names) as caught:
        meta_model_of(tmp_path, "llama", keys)
    assert "\n" not in str(caught.value)


OF_OTHERS = {
    "broken.Plugin": "broken.Plugin cannot be imported here: RuntimeError: no GPU",
    "misspelt.Plugin": "misspelt.Plugin cannot be imported here: SyntaxError: ",
    "planning_plugin.AsksForAGpu": "planning_plugin.AsksForAGpu.register does not run "
    "without weights and a GPU, which a plan needs: ",
    "planning_plugin.LooksAtWeights": "planning_plugin.LooksAtWeights.post_model_build "
    "does not run without weights and a GPU, which a plan needs: RuntimeError: ",
}


@pytest.mark.parametrize("plugin", OF_OTHERS)
def test_a_plugin_that_cannot_be_planned_with_is_named(
    plugin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the base, and no traceback."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken.py").write_text("raise RuntimeError('no GPU')")
    (tmp_path / "misspelt.py").write_text("class Plugin(:\n")
    with pytest.raises(ConfigError) as caught:
        meta_model_of(tmp_path, "llama", {"plugins": [plugin]})
    assert str(caught.value).startswith(f"plugins: {OF_OTHERS[plugin]}")


@pytest.fixture
def tiling(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Keys of a tiled MLP; Axolotl's patch of its class ends with the test."""
    pytest.importorskip(
        "deepspeed", reason="Axolotl takes one of its classes from there"
    )
    monkeypatch.setattr(LlamaMLP, "forward", LlamaMLP.forward)
    return LORA | UNFUSED | {"tiled_mlp": True}


def test_blocks_that_lisa_would_choose_train(tmp_path: Path) -> None:
    """Only this sees an error of the engine's at the first step, when all is loaded."""
    keys = {
        "lisa_n_layers": 1,
        "lisa_step_interval": 2,
        "lisa_layers_attribute": "model.layers",
        "unfrozen_parameters": ["lm_head"],
    }
    meta = meta_model_of(tmp_path, "llama", keys)
    said = "^lisa_n_layers: model.layers.0.* is frozen when"
    with pytest.raises(ConfigError, match=said):
        traced_job(meta.cfg, meta.model, "cuda")


def test_copies_of_weights_in_tiles_are_refused(
    tiling: dict[str, Any], tmp_path: Path
) -> None:
    """Only this sees an error of the engine's at the first step, when all is loaded."""
    keys = {
        "lora_target_linear": None,
        "lora_target_modules": ["q_proj"],
        "lora_modules_to_save": ["down_proj"],
    }
    meta = meta_model_of(tmp_path, "llama", tiling | keys)
    said = "^tiled_mlp: it adds up the gradient of .*layers.0.mlp.down_proj"
    with pytest.raises(ConfigError, match=said):
        traced_job(meta.cfg, meta.model, "cuda")


def test_gradients_that_tiles_add_up_stay_on_the_device(
    tiling: dict[str, Any], tmp_path: Path
) -> None:
    """Only this sees an error of the engine's where state of adapters has no room."""
    hosted = []
    for tiled in (False, True):
        folder = tmp_path / str(tiled)
        folder.mkdir()
        meta = meta_model_of(folder, "llama", tiling | {"tiled_mlp": tiled})
        chunks = traced_job(meta.cfg, meta.model, "cuda").layout.chunks
        hosted.append(any(chunk.trainable for chunk in chunks))
    assert hosted == [True, False]


def test_a_bad_base_model_is_named(tmp_path: Path) -> None:
    """What else is no model is in `yaml_faults.BASES`."""
    config = write_yaml(
        tmp_path, configuration_of(tmp_path, {"model_type": "unheard_of"}), {}
    )
    with pytest.raises(ConfigError, match="base_model: .*unheard_of"):
        load_meta_model(config, "cuda")


@pytest.mark.parametrize(
    "keys",
    [
        {"pad_token_id": 999},
        {"hidden_act": "no such function"},
        {"num_attention_heads": 0},
        {"hidden_size": "large"},
        {"hidden_size": 35},
    ],
    ids=str,
)
def test_a_configuration_that_contradicts_itself(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    folder = configuration_of(tmp_path, "llama")
    whole = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(whole | keys))
    with pytest.raises(ConfigError, match="base_model: config.json of") as caught:
        load_meta_model(write_yaml(tmp_path, folder, {}), "cuda")
    assert "\n" not in str(caught.value)


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    folder = configuration_of(tmp_path, "llama")
    (folder / "tokenizer.json").write_text('{"version":"1.0","model":{"type":"XYZ"}}')
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="^tokenizer_config: .* gives no tokenizer: "):
        load_meta_model(write_yaml(tmp_path, folder, {}), "cuda")


REWARDS = {
    "reward_model": ("llama-reward", 2 * BATCH),
    "process_reward_model": ("qwen3-steps", BATCH),
}


@pytest.mark.parametrize("key", REWARDS)
def test_reward_models_are_built(key: str, tmp_path: Path) -> None:
    """The rows of a preference are two; a head has no weights to look at."""
    family, rows = REWARDS[key]
    meta = meta_model_of(tmp_path, family, {key: True})
    assert batch_of(meta)["input_ids"].shape == (rows, LENGTH)
    traced_job(meta.cfg, meta.model, "cuda")


# ------------------------------------------------------------------ fake kernels


def test_fake_kernels_leave_nothing_behind() -> None:
    from axolotl.kernels import quantize
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from triton.runtime.jit import JITFunction

    def state() -> list[Any]:
        return [
            dict(ALL_ATTENTION_FUNCTIONS),
            dict(ALL_MASK_ATTENTION_FUNCTIONS),
            vars(quantize).copy(),
            JITFunction.run,
            torch.equal,
        ]

    def own(*_args: Any) -> None:
        """As Axolotl puts xformers in the place of another."""

    model = torch.nn.Identity()
    ALL_ATTENTION_FUNCTIONS["flash_attention_3"] = own
    try:
        before = state()
        with pytest.raises(ZeroDivisionError), fake_kernels("cuda", model):
            assert state() != before
            _ = 1 / 0
        assert state() == before
        with fake_kernels("cpu", model):
            assert state() == before
    finally:
        del ALL_ATTENTION_FUNCTIONS["flash_attention_3"]
    assert ALL_ATTENTION_FUNCTIONS["flash_attention_3"] is not own
