"""The state that a plan counts is the one that the optimizer of the YAML makes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from axolotl.utils.dict import DictDefault
from fork_server import call
from tiny_models import random_model
from torch import nn

from axolotl.integrations.protrain.core.engine.state import state_tensors
from axolotl.integrations.protrain.core.planner.meta import meta_copy
from axolotl.integrations.protrain.offline.optimizer_state import (
    OptimizerBytes,
    optimizer_bytes,
    plain_optimizer,
)

BASE = {"learning_rate": 1e-3, "weight_decay": 0.1, "val_set_size": 0}
LOW_RANK = {"optim_target_modules": "all-linear", "optim_args": "rank=4"}
INSTALLED: dict[str, dict[str, Any]] = {
    "adamw_torch": {},
    "adamw_torch_fused": {},
    "adamw_bnb_8bit": {},
    "adamw_8bit": {"embedding_lr": 1e-4},
    "paged_adamw_8bit": {},
    "paged_adamw_32bit": {},
    "lion_32bit": {},
    "lion_8bit": {},
    "paged_lion_8bit": {},
    "ademamix": {},
    "ademamix_8bit": {},
    "adafactor": {"lr_groups": [{"name": "a", "modules": ["q_proj"], "lr": 1e-5}]},
    "rmsprop": {"optim_args": "momentum=0.9,centered=true"},
    "rmsprop_bnb_8bit": {},
    "adagrad": {},
    "sgd": {"optim_args": "momentum=0.9"},
    "adamw_torch_8bit": {},
    "adamw_torch_4bit": {},
    "ao_adamw_fp8": {},
    "muon": {},
    "adopt_adamw": {},
    "adamc": {},
    "schedule_free_adamw": {},
}
OF_THE_USER = {
    "optimi_adamw": ("optimi", {}),
    "stable_adamw": ("optimi", {}),
    "came_pytorch": ("came_pytorch", {}),
    "apollo_adamw": ("apollo_torch", LOW_RANK),
}


def model() -> nn.Module:
    """Some of its weights are large enough for 8 bits, and embeddings are not tied."""
    made = random_model("llama").to(torch.bfloat16)
    made.model.norm.weight.requires_grad_(False)
    return made


def stepped(cfg: Any) -> dict[str, tuple[int, ...]]:
    """What the optimizer holds after a step on this CPU."""
    real = model()
    named = {n: p for n, p in real.named_parameters() if p.requires_grad}
    optimizer = plain_optimizer(cfg, real)
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    for group in optimizer.param_groups:
        if "triton" in group:
            # it looks whether the package is there, not for a GPU
            group["triton"] = False
    for param in named.values():
        param.grad = 0.01 * torch.randn_like(param)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    apart = ("state", "param_groups")
    own = {k: v for k, v in vars(optimizer).items() if k not in apart}
    shared = {tensor.data_ptr() for tensor in state_tensors(own).values()}
    found = {}
    for name, param in named.items():
        tensors = state_tensors(optimizer.state.get(param, {})).values()
        found[name] = tuple(t.nbytes for t in tensors if t.data_ptr() not in shared)
    return found


def counted(
    cfg: Any, device_type: str = "cpu", made: nn.Module | None = None
) -> tuple[OptimizerBytes, list[str]]:
    notes: list[str] = []
    meta = meta_copy(model()) if made is None else made
    return optimizer_bytes(cfg, meta, device_type, notes), notes


def both(every: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    found = {}
    for name, keys in every.items():
        cfg = DictDefault({**BASE, "optimizer": name, **copy.deepcopy(dict(keys))})
        found[name] = stepped(cfg), *counted(cfg)
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Of each optimizer that is there: what it held, what was counted, and notes."""
    there = {n: k for n, (p, k) in OF_THE_USER.items() if find_spec(p) is not None}
    return call(both, INSTALLED | there)


@pytest.mark.parametrize("name", [*INSTALLED, *OF_THE_USER])
def test_state_is_counted_to_the_byte(found: dict[str, Any], name: str) -> None:
    if name not in found:
        pytest.skip(f"{OF_THE_USER[name][0]} is not installed")
    real, probed, notes = found[name]
    assert probed.state_bytes == real
    assert any(map(sum, real.values())) and not notes


def twice() -> Any:
    """What the probe of an 8-bit optimizer leaves behind for the one that trains."""
    import bitsandbytes as bnb

    cfg = DictDefault({**BASE, "optimizer": "adamw_bnb_8bit"})
    manager = bnb.optim.GlobalOptimManager.get_instance()
    meta = meta_copy(model())
    counted(cfg, made=meta)
    gradients = [p.grad for p in meta.parameters() if p.grad is not None]
    return manager.module_weight_config_triple, manager.pid2config, gradients


def test_a_probe_leaves_nothing_behind() -> None:
    """bitsandbytes knows by `id` which weights have 32 bits: others may get that one."""
    assert call(twice) == ([], {}, [])


def on_a_gpu(keys: Mapping[str, Any]) -> Any:
    return counted(DictDefault({**BASE, **keys}), "cuda")


def test_what_a_gpu_holds_is_not_what_a_cpu_does() -> None:
    """Step counts that no kernel reads are the host's, and torch updates all at once."""
    plain, _ = call(on_a_gpu, {"optimizer": "adamw_torch"})
    fused, _ = call(on_a_gpu, {"optimizer": "adamw_torch_fused"})
    assert {len(sizes) for sizes in plain.state_bytes.values()} == {2}
    assert {sizes.count(4) for sizes in fused.state_bytes.values()} == {1}
    assert plain.update_copies == pytest.approx(1, abs=0.01)
    assert (fused.update_copies, fused.update_parameter_copies) == (0, 0)


def under_masters() -> list[Any]:
    """What is counted of a matrix with a master and without, and the probed dtypes."""
    cfg, meta = DictDefault({**BASE, "optimizer": "adamw_torch"}), meta_copy(model())
    name = "model.layers.0.mlp.up_proj.weight"
    found = [
        optimizer_bytes(cfg, meta, "cpu", [], mastered).state_bytes[name]
        for mastered in ((), (name,))
    ]
    return [*found, {p.dtype for p in meta.parameters()}]


def test_what_has_a_master_has_its_state_in_fp32() -> None:
    without, with_master, dtypes = call(under_masters)
    assert sorted(with_master) == sorted(n if n == 4 else 2 * n for n in without)
    # the trace that comes next is that of bf16 weights
    assert dtypes == {torch.bfloat16}


def test_what_cannot_be_built_is_as_large_as_adamw() -> None:
    probed, (note,) = call(on_a_gpu, {"optimizer": "polora"})
    assert probed.state_bytes is None
    assert "polora" in note and "as large as AdamW" in note
