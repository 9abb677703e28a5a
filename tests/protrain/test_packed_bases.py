"""Bases as they are published: read packed, with the values of the plain run."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import build_model, model_path
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from axolotl.integrations.protrain.core.errors import ConfigError
from axolotl.integrations.protrain.core.host import mapped_bytes
from axolotl.integrations.protrain.core.layout.packed import Packed, from_fp8
from axolotl.integrations.protrain.loading import keep_packed, unpack_unpaged

FP8 = (torch.float8_e4m3fn,)
BASES = {
    "gpt_oss-mxfp4": Mxfp4Config,
    "qwen3-fp8": FineGrainedFP8Config,
    "deepseek_v3-fp8": FineGrainedFP8Config,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    for family in BASES:
        build_model(folder, family)
    return folder


def load(root: Path, family: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    # for plain loads too: transformers 5.16.1 fails in it over any FP8 base
    no_plan = patch.object(FineGrainedFP8HfQuantizer, "update_tp_plan", lambda _, c: c)
    with no_plan:
        return AutoModelForCausalLM.from_pretrained(
            root / model_path(family),
            dtype=dtype,
            quantization_config=BASES[family](dequantize=True),
            device_map={"": "cpu"},
        )


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def packed_weights(model: Any) -> dict[str, Packed]:
    return {n: p for n, p in model.named_parameters() if isinstance(p, Packed)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", BASES)
def test_a_base_that_stays_packed_has_the_values_of_one_that_is_unpacked(
    root: Path, family: str, dtype: torch.dtype
) -> None:
    plain = load(root, family, dtype)
    with keep_packed():
        own = load(root, family, dtype)
    wanted, weights = dict(plain.named_parameters()), dict(own.named_parameters())
    assert wanted.keys() == weights.keys()
    for name, weight in weights.items():
        assert weight.requires_grad == wanted[name].requires_grad, name
        assert weight.dtype == wanted[name].dtype, name
        assert torch.equal(bits(weight), bits(wanted[name])), name
    packed = packed_weights(own).values()
    read = load_file(root / model_path(family) / "model.safetensors")
    codes = (t for n, t in read.items() if n.endswith("blocks") or t.dtype in FP8)
    published = sum(t.numel() * (1 + (t.dtype not in FP8)) for t in codes)
    assert sum(weight.numel() for weight in packed) == published > 0
    tokens = torch.arange(12)[None]
    assert torch.equal(own(tokens).logits, plain(tokens).logits)


@pytest.mark.parametrize("family", BASES)
def test_packed_weights_are_pages_of_their_files(root: Path, family: str) -> None:
    """Neither merging experts nor widening codes has made a copy of them."""
    with keep_packed():
        packed = packed_weights(load(root, family)).values()
    parts = [*chain.from_iterable(weight.parts for weight in packed)]
    codes = [codes for codes, _ in parts]
    assert mapped_bytes(codes) == sum(tensor.nbytes for tensor in codes) > 0
    scales = [scales for _, scales in parts]
    assert mapped_bytes(scales) == sum(tensor.nbytes for tensor in scales)


def test_other_loads_unpack_as_before(root: Path) -> None:
    with keep_packed():
        pass
    assert not packed_weights(load(root, "qwen3-fp8"))


def test_what_is_outside_of_blocks_or_trains_is_unpacked(root: Path) -> None:
    with keep_packed():
        model = load(root, "qwen3-fp8")
    codes = torch.randn(288, 36).to(torch.float8_e4m3fn)
    head = from_fp8(codes, torch.rand(72, 9), torch.bfloat16)
    model.lm_head.weight = torch.nn.Parameter(head, requires_grad=False)
    trained = model.model.layers[1].mlp.up_proj.weight.requires_grad_()
    # as Axolotl converts embeddings and routers
    model.model.layers[2].mlp.up_proj.float()
    model.requires_grad_(False)
    trained.requires_grad_()
    packed, value = packed_weights(model), head.unpacked()
    unpack_unpaged(model)
    assert torch.equal(model.lm_head.weight, value)
    gone = {
        "lm_head.weight",
        *(f"model.layers.{n}.mlp.up_proj.weight" for n in (1, 2)),
    }
    assert packed_weights(model).keys() == packed.keys() - gone
    assert model.model.layers[2].mlp.up_proj.weight.dtype == torch.float32


def test_codes_without_a_scale_are_refused_by_name(root: Path) -> None:
    with keep_packed():
        model = load(root, "qwen3-fp8")
    layer = model.model.layers[1].mlp.up_proj
    codes = torch.zeros(layer.weight.shape, dtype=torch.float8_e4m3fn)
    layer.weight = torch.nn.Parameter(codes, requires_grad=False)
    with pytest.raises(
        ConfigError, match=r"base_model: model\.layers\.1\.mlp\.up_proj"
    ):
        unpack_unpaged(model)
