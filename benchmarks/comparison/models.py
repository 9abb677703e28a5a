"""The same model and the same batches for every system, from sizes and seeds alone.

Weights are pieces of one pool of normal numbers, so that 70 billion of them are made at
the speed of a copy and do not depend on who makes them where.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from accelerate import init_empty_weights
from bitsandbytes.nn import Linear4bit, Params4bit
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM, MixtralForCausalLM

from .cases import SHAPES, Case

_POOL_NUMEL = 4_194_301
"""A prime, so that rows of a weight do not repeat."""
_STD = 0.02
_RANK = 16
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def weight_dtype(case: Case) -> torch.dtype:
    """Of the base."""
    return _DTYPES[case.precision]


def build(case: Case, home: torch.device, quantises_on: torch.device) -> nn.Module:
    """The model with what trains marked as such.

    Args:
        case: What to build.
        home: Where its weights go.
        quantises_on: Where 4-bit weights are made, one at a time.
    """
    shape = SHAPES[case.shape]
    kind: Any = MixtralForCausalLM if shape.experts else LlamaForCausalLM
    experts = {"num_local_experts": shape.experts} if shape.experts else {}
    config = kind.config_class(
        **experts,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocab,
        max_position_embeddings=max(case.length, 2048),
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    dtype = weight_dtype(case)
    with init_empty_weights():
        model = kind(config)
    if case.method == "qlora":
        first, *others = model.model.layers
        _quantise_linears(first, quantises_on, dtype)
        for layer in others:
            # minutes faster for 70 billion than quantising each
            _copy_quantised(first, layer)
        model.is_loaded_in_4bit = True
    _fill(model, home, dtype)
    model.to(home)
    model.train()
    if case.method == "full":
        return model
    model.requires_grad_(False)
    adapters = LoraConfig(
        r=_RANK, lora_alpha=2 * _RANK, target_modules="all-linear", bias="none"
    )
    with init_empty_weights():
        adapted = get_peft_model(model, adapters)
    # in fp32, as PEFT keeps them under autocast
    _fill(adapted, home, torch.float32)
    return adapted


def _fill(model: nn.Module, home: torch.device, dtype: torch.dtype) -> None:
    """Give each parameter on the meta device its values."""
    for index, module in enumerate(model.modules()):
        for name, param in module.named_parameters(recurse=False):
            if param.device.type != "meta":
                continue
            if param.ndim == 1:
                value = torch.ones(param.shape, dtype=dtype)
            else:
                value = normal(param.shape, dtype, seed=index)
            filled = nn.Parameter(value.to(home), requires_grad=param.requires_grad)
            module.register_parameter(name, filled)


def normal(shape: torch.Size, dtype: torch.dtype, seed: int) -> Tensor:
    """On the host, standard deviation 0.02, the same for the same seed."""
    value = torch.empty(shape, dtype=dtype)
    flat, pool = value.view(-1), _pool(dtype)
    start = (seed * 7919) % _POOL_NUMEL
    done = 0
    while done < flat.numel():
        part = pool[start : start + flat.numel() - done]
        flat[done : done + part.numel()].copy_(part)
        done, start = done + part.numel(), 0
    return value


@cache
def _pool(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(_POOL_NUMEL, generator=generator) * _STD).to(dtype)


def _quantise_linears(
    layer: nn.Module, device: torch.device, dtype: torch.dtype
) -> None:
    linears = [
        (name, module)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    ]
    for index, (name, linear) in enumerate(linears):
        quantised = Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=False,
            compute_dtype=dtype,
            quant_type="nf4",
            device="meta",
        )
        value = normal(linear.weight.shape, dtype, seed=1000 + index)
        weight = Params4bit(value, requires_grad=False, quant_type="nf4").to(device)
        # back at once: the next one is made where this one was
        quantised.weight = weight.to("cpu")
        parent, _, child = name.rpartition(".")
        setattr(layer.get_submodule(parent), child, quantised)


def _copy_quantised(source: nn.Module, layer: nn.Module) -> None:
    """Give a layer 4-bit linears with the weights of another one's."""
    for name, module in source.named_modules():
        if isinstance(module, Linear4bit):
            parent, _, child = name.rpartition(".")
            setattr(layer.get_submodule(parent), child, copy.deepcopy(module))


def batch(case: Case, step: int, device: torch.device) -> dict[str, Tensor]:
    """Input ids, which are the labels too, of shape [rows, length].

    Small ids are more frequent, so that there is something to learn.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    drawn = torch.rand(case.rows, case.length, generator=generator) ** 3
    ids = (drawn * SHAPES[case.shape].vocab).long().to(device)
    return {"input_ids": ids, "labels": ids}
