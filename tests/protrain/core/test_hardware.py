"""Presets of GPUs, measurements on this machine, block times and their cache."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import re
import resource
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist
from fork_server import Fork
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import (
    AutoModel,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
)
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer

from axolotl.integrations.protrain.core.engine.ranks import Ranks
from axolotl.integrations.protrain.core.errors import ConfigError
from axolotl.integrations.protrain.core.host import (
    host_memory,
    mapped_bytes,
    memory_nodes,
    node_of,
    processors,
)
from axolotl.integrations.protrain.core.layout import find_blocks
from axolotl.integrations.protrain.core.planner.block_times import (
    BlockSample,
    measure_blocks,
    time_block,
    time_outside,
)
from axolotl.integrations.protrain.core.planner.cache import (
    cached,
    cached_hardware,
    default_folder,
    measurement_key,
)
from axolotl.integrations.protrain.core.planner.cards import (
    GPUS,
    LINKS,
    OWN_FIGURES,
    Gpu,
    gpu_hardware,
)
from axolotl.integrations.protrain.core.planner.hardware import (
    device_name,
    measure_collectives,
    measure_hardware,
    weakest,
)
from axolotl.integrations.protrain.core.planner.meta import meta_copy
from axolotl.integrations.protrain.core.planner.trace import trace_step
from axolotl.integrations.protrain.core.types import Hardware

CPU = torch.device("cpu")
HOST_BYTES = 64 << 30
VERSIONS = {"transformers": "5.16"}
RATES = (
    "flops_16",
    "flops_32",
    "attention_16",
    "memory_bytes_s",
    "fetch_bytes_s",
    "offload_bytes_s",
    "fetch_both_bytes_s",
    "offload_both_bytes_s",
    "adam_bytes_s",
)


def card(text: str, link: str | None = None) -> Hardware:
    return gpu_hardware(text, link, HOST_BYTES)


# cards


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_every_row_is_complete(gpu: Gpu) -> None:
    hardware = card(gpu.name)
    assert all(getattr(hardware, rate) > 0 for rate in RATES)
    assert hardware.flops_16 < gpu.tflops_16 * 1e12
    assert hardware.flops_32 < gpu.tflops_32 * 1e12
    assert gpu.tflops_32 <= gpu.tflops_tf32 < gpu.tflops_16
    assert hardware.memory_bytes_s < gpu.memory_gb_s * 1e9
    assert hardware.fetch_both_bytes_s < hardware.fetch_bytes_s
    # a copy inside of one memory reads and writes it
    slower = 2 if gpu.one_memory else 5
    assert hardware.fetch_bytes_s <= hardware.memory_bytes_s / slower
    assert 0 < hardware.unseen_bytes < hardware.device_bytes / 4
    assert hardware.device_bytes == gpu.device_bytes
    own = gpu.device_bytes if gpu.one_memory else HOST_BYTES
    assert hardware.host_bytes == own and hardware.one_memory is gpu.one_memory
    assert hardware.overlaps
    assert gpu.source in hardware.source
    assert "assumed" in hardware.source


def test_consumer_cards_halve_16_bit_products_summed_in_fp32() -> None:
    """Their tensor cores give twice the fp32 rate; four times is the fp16-sum figure."""
    for gpu in GPUS:
        if re.match(r"RTX [3-9]\d{3}\b(?! Ada)", gpu.name):
            assert gpu.tflops_16 / gpu.tflops_32 == pytest.approx(2, rel=0.01)
            assert gpu.tflops_tf32 == gpu.tflops_32


@pytest.mark.parametrize(
    ("more", "less", "fields"),
    [
        ("H200", "H100", ("device_bytes", "memory_bytes_s")),
        ("H100", "H100 PCIe", ("flops_16", "flops_32", "memory_bytes_s")),
        ("H100 PCIe", "A100-80GB", ("flops_16", "flops_32", "fetch_bytes_s")),
        ("A100-80GB", "A100-40GB", ("device_bytes", "memory_bytes_s")),
        ("A100-40GB", "RTX 4090", ("flops_16", "memory_bytes_s", "device_bytes")),
        ("L40S", "A100-80GB", ("flops_32",)),
        ("RTX 5090", "RTX 4090", (*RATES[:5], "device_bytes")),
        ("RTX 4090", "RTX 3090", ("flops_16", "flops_32", "memory_bytes_s")),
        ("RTX 4090", "RTX 4080", ("flops_16", "flops_32", "memory_bytes_s")),
        ("RTX 3090", "RTX 4080", ("memory_bytes_s", "device_bytes")),
        ("RTX 3090", "RTX 3060 12GB", ("flops_16", "flops_32", "memory_bytes_s")),
    ],
)
def test_rows_beside_each_other(more: str, less: str, fields: tuple[str, ...]) -> None:
    smaller = card(less)
    for field in fields:
        assert getattr(card(more), field) > getattr(smaller, field), field


def test_a_card_by_its_figures() -> None:
    own = card("Arc B60:24GiB:197TFLOPs:456 GB/s")
    assert own == card("Arc B60:24:197:456") == card("Arc B60:24576MiB:197:456")
    assert (own.name, own.device_bytes, own.link) == ("Arc B60", 24 << 30, "pcie5x16")
    assert own.attention_16 < own.flops_16 < 197e12
    assert own.memory_bytes_s == pytest.approx(456e9 * 0.9)


def test_what_a_card_computes_follows_its_architecture() -> None:
    """CUDA's compute capability: 7.x computes no bf16, 8.9 is Ada, AMD has none."""
    capability = {gpu.name: card(gpu.name).capability for gpu in GPUS}
    old = {name for name, number in capability.items() if 0 < number < 80}
    assert old == {"RTX 2080 Ti", "T4", "V100-32GB"}
    assert {n for n, number in capability.items() if not number} == {
        "RX 7900 XTX",
        "MI300X",
        "Strix Halo",
    }
    for name, number in capability.items():
        if re.match(r"RTX 40|RTX .* Ada|L4", name):
            assert number == 89, name
    assert card("Arc B60:24GiB:197TFLOPs:456GB/s").capability == 0


def test_links() -> None:
    assert LINKS["pcie4x16"].bytes_s == pytest.approx(31.5e9, rel=0.01)
    for pcie in (3, 4, 5):
        assert LINKS[f"pcie{pcie}x16"].bytes_s == 2 * LINKS[f"pcie{pcie}x8"].bytes_s
    rates = [card("H200", link).fetch_bytes_s for link in ("pcie3x16", "PCIe 4 x16")]
    assert rates[1] == pytest.approx(2 * rates[0], rel=0.1)
    assert card("H200").fetch_bytes_s == pytest.approx(2 * rates[1], rel=0.1)
    assert "pcie4x16" in card("RTX 3090").source


def test_tf32_changes_fp32_products_alone() -> None:
    plain = card("A100-80GB")
    tf32 = gpu_hardware("A100-80GB", None, HOST_BYTES, tf32=True)
    # of the sheet eight times; published runs reach less of it
    assert 5 < tf32.flops_32 / plain.flops_32 < 8
    assert dataclasses.replace(tf32, flops_32=plain.flops_32) == plain


@pytest.mark.parametrize(
    ("text", "name"),
    [
        *((gpu.name, gpu.name) for gpu in GPUS),
        *((gpu.name.lower().replace(" ", ""), gpu.name) for gpu in GPUS),
        *((alias, gpu.name) for gpu in GPUS for alias in gpu.aliases),
        ("4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("rtx-4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("a100-80gb", "A100-80GB"),
        ("A100 80GB", "A100-80GB"),
        ("h100", "H100"),
        ("h100_pcie", "H100 PCIe"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090 Laptop"),
        ("3060", "RTX 3060 12GB"),
        ("NVIDIA GB10", "DGX Spark"),
        ("Jetson AGX Orin", "Jetson AGX Orin 64GB"),
    ],
)
def test_names(text: str, name: str) -> None:
    assert card(text).name == name
    assert card(f"{text}:16") == dataclasses.replace(
        card(name),
        device_bytes=16 << 30,
        host_bytes=16 << 30 if card(name).one_memory else HOST_BYTES,
        unseen_bytes=card(f"{name}:16").unseen_bytes,
        desktop_bytes=0,
    )


def test_memory_given_by_hand_may_be_a_fraction() -> None:
    small, whole = card("4090:11.5"), card("4090")
    assert small.device_bytes == 23 << 29 == card("4090:11.5gib").device_bytes
    assert card("4090:24GB").device_bytes == 24 * 10**9
    assert small.unseen_bytes < whole.unseen_bytes


@pytest.mark.parametrize(
    ("text", "link", "parts"),
    [
        ("a100", None, ("--gpu", "'a100'", "A100-40GB or A100-80GB")),
        ("rtx", None, ("--gpu 'rtx' is not known", "4090")),
        # other cards, slower than those that their names begin
        ("h20", None, ("--gpu", "'h20'", "nearest: H200")),
        ("l4s", None, ("--gpu", "'l4s'", "nearest: L40S")),
        ("rtx 4900", None, ("--gpu", "'rtx 4900'", "nearest: RTX 4090")),
        ("h300", None, ("--gpu", "nearest: H200", "H100")),
        ("2x4090", None, ("several cards: write --gpu 4090 --gpus 2",)),
        ("H100 x 8", None, ("several cards: write --gpu h100 --gpus 8",)),
        ("", None, ("--gpu", "as 4090 or", "NAME:GiB", OWN_FIGURES)),
        (":24", None, ("--gpu", "as 4090 or", "NAME:GiB")),
        *(
            (name, None, (f"--gpu '{name}' cannot be planned", "mps", "not train"))
            for name in ("M3 Max", "m4", "MacBook")
        ),
        ("Jetson Nano", None, ("cannot be planned", "--cards", "`one_memory: true`")),
        ("jetson", None, ("ambiguous", "Jetson AGX Thor or Jetson AGX Orin 64GB")),
        ("dgx spark", "pcie5x16", ("--link", "more than the DGX Spark", "memory")),
        ("GB200", None, ("cannot be planned", "NVLink", "--gpu B200")),
        ("gh200", "pcie5x16", ("--link", "more than the GH200", "allowed: c2c")),
        *(
            (f"4090:{gib}", None, ("--gpu", f"'{gib}'", "1 to 1024", "RTX 4090:24"))
            for gib in ("", "0", "-8", "0.5", "2000", "nan", "inf", "24G", "2TiB")
        ),
        ("4090:1:2", None, ("--gpu", "'4090:1:2'", OWN_FIGURES)),
        (":24GiB:197:456", None, ("--gpu ':24GiB:197:456'", OWN_FIGURES)),
        (
            "Arc:24GiB:-1TFLOPs:456GB/s",
            None,
            ("--gpu", "'-1TFLOPs'", "to 100000 TFLOPs"),
        ),
        ("Arc:24GiB:197:fast", None, ("--gpu", "'fast'", "to 100000 GB/s")),
        ("4090", "", ("--link", "''", "pcie3x8")),
        ("4090", "nvlink", ("--link", "'nvlink'", "pcie3x8, pcie3x16, pcie4x8")),
        ("h100", "pcie5x4", ("--link", "nearest: pcie5x")),
        ("4090", "pcie5x16", ("--link", "RTX 4090", "pcie4x8, pcie4x16")),
        ("4060 ti", "pcie4x16", ("--link", "4060 Ti 16GB can use", "pcie3x8, pcie4x8")),
    ],
)
def test_refused_names(text: str, link: str | None, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refusal:
        card(text, link)
    message = str(refusal.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_a_machine_with_one_memory_has_one_gpu() -> None:
    """Several would share what is counted for each."""
    with pytest.raises(ConfigError, match="--gpus 2: a DGX Spark .* Leave --gpus out"):
        gpu_hardware("DGX Spark", None, HOST_BYTES, num_gpus=2)


def test_a_plan_for_several_machines_counts_the_one_memory_of_any() -> None:
    """The least of each figure would take the word of those that have two."""
    spark, other = card("DGX Spark"), card("H200")
    for machines in ([spark, other], [other, spark]):
        both = weakest(machines)
        assert both.one_memory and both.device_bytes == spark.device_bytes


@pytest.mark.parametrize(
    ("text", "link"), [("foo", None), ("4090", "nvlink"), ("Radeon Pro", None)]
)
def test_what_resembles_nothing_has_no_nearest(text: str, link: str | None) -> None:
    with pytest.raises(ConfigError, match="^--(?!.*nearest).* is not known") as refusal:
        card(text, link)
    # the names of all cards are no answer
    assert len(str(refusal.value)) < 200


# measured hardware


@pytest.fixture(scope="module")
def measured() -> Hardware:
    return measure_hardware(CPU, matmul=(128, 512, 512))


def median_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def test_memory_is_not_measured_and_a_cpu_hides_nothing(measured: Hardware) -> None:
    assert measured.host_bytes == measured.device_bytes == 0
    assert measured.unseen_bytes == 0
    assert not measured.overlaps
    assert measured.fetch_both_bytes_s == measured.fetch_bytes_s
    assert measured.offload_both_bytes_s == measured.offload_bytes_s
    assert measured.name == device_name(CPU) != ""


def test_copies_and_elementwise_agree_with_a_plain_copy(measured: Hardware) -> None:
    """An order of magnitude either way: a wrong unit is a factor of 1000."""
    source, target = bytearray(b"1" * (32 << 20)), bytearray(32 << 20)
    seconds = median_s(lambda: memoryview(target).__setitem__(slice(None), source))
    plain = len(source) / seconds
    for rate in (
        measured.fetch_bytes_s,
        measured.offload_bytes_s,
        measured.memory_bytes_s,
    ):
        assert plain / 10 < rate < plain * 10


@pytest.mark.parametrize(
    ("dtype", "field"), [(torch.float32, "flops_32"), (torch.bfloat16, "flops_16")]
)
def test_products_agree_with_a_layer(
    measured: Hardware, dtype: torch.dtype, field: str
) -> None:
    layer = nn.Linear(512, 512, bias=False, dtype=dtype)
    inputs = torch.ones(512, 512, dtype=dtype, requires_grad=True)
    seconds = median_s(lambda: layer(inputs).backward(inputs.detach()))
    plain = 3 * 2 * 512**3 / seconds
    assert plain / 10 < getattr(measured, field) < plain * 10


def test_host_adam_is_slower_than_a_copy_and_not_absurdly(measured: Hardware) -> None:
    """It moves seven bytes for each byte it updates."""
    assert measured.fetch_bytes_s / 200 < measured.adam_bytes_s
    assert measured.adam_bytes_s < measured.fetch_bytes_s * 2


def test_an_operator_costs_microseconds(measured: Hardware) -> None:
    assert 1e-7 < measured.kernel_s < 1e-3


def test_measuring_changes_neither_random_state_nor_threads() -> None:
    random, threads = torch.get_rng_state(), torch.get_num_threads()
    measure_hardware(CPU, matmul=(8, 8, 8), weight_dtype=torch.float32)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.get_num_threads() == threads


# block times


def hidden(*shape: int, requires_grad: bool = True) -> Tensor:
    return torch.empty(*shape, device="meta", requires_grad=requires_grad)


LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_implementation": "sdpa",
}


def llama() -> tuple[nn.Module, BlockSample]:
    rotary = hidden(1, 32, 16, requires_grad=False)
    return LlamaDecoderLayer(LlamaConfig(**LLAMA), 0), BlockSample(
        (hidden(2, 32, 64),),
        {"position_embeddings": (rotary, rotary), "attention_mask": None},
    )


def gpt2() -> tuple[nn.Module, BlockSample]:
    config = GPT2Config(n_embd=64, n_head=4, attn_implementation="eager")
    mask = hidden(1, 1, 32, 32, requires_grad=False).expand(2, 1, 32, 32)
    return GPT2Block(config, 0), BlockSample(
        (hidden(2, 32, 64),), {"attention_mask": mask, "use_cache": False}
    )


def mixtral() -> tuple[nn.Module, BlockSample]:
    config = MixtralConfig(**LLAMA, num_local_experts=4, head_dim=16)
    config._experts_implementation = "eager"
    layer = MixtralDecoderLayer(config, 0)
    for parameter in layer.parameters():
        # a model initialises its experts, a layer alone does not
        nn.init.normal_(parameter, std=0.02)
    rotary = torch.rand(1, 32, 16)
    return layer, BlockSample(
        (hidden(2, 32, 64),), {"position_embeddings": (rotary, rotary)}
    )


def everything_of(module: nn.Module) -> dict[str, Any]:
    """Values, flags, hooks and the names of attributes."""
    return {
        "state": {k: v.clone() for k, v in module.state_dict().items()},
        "params": [
            (p.data_ptr(), p.requires_grad, p.grad) for p in module.parameters()
        ],
        "modes": [m.training for m in module.modules()],
        "hooks": [
            (key, dict(value))
            for m in module.modules()
            for key, value in vars(m).items()
            if key.endswith("_hooks")
        ],
        "attributes": [sorted(vars(m)) for m in module.modules()],
    }


@pytest.mark.parametrize("autocast_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("make", [llama, gpt2, mixtral])
def test_real_blocks_are_timed_and_left_as_they_were(
    make: Callable[[], tuple[nn.Module, BlockSample]],
    autocast_dtype: torch.dtype | None,
) -> None:
    module, sample = make()
    module.train()
    next(module.parameters()).requires_grad_(False)
    before, random = everything_of(module), torch.get_rng_state()
    with torch.no_grad():
        times = time_block(module, sample, CPU, autocast_dtype)
        assert not torch.is_grad_enabled()
    assert 1e-5 < times.forward_s < 5
    assert 1e-5 < times.backward_s < 5
    after = everything_of(module)
    for name, value in before.pop("state").items():
        assert torch.equal(after["state"][name], value)
    assert after.items() >= before.items()
    assert torch.equal(torch.get_rng_state(), random)
    assert sample.args[0].is_meta
    assert sample.args[0].grad is None


FORWARD_S, BACKWARD_S = 0.005, 0.02


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(BACKWARD_S)
        return gradient


class Recorder(nn.Module):
    """Takes known times and keeps what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.made: list[Tensor] = []
        self.register_buffer("count", torch.zeros(()))

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.calls.append(((hidden, *args), kwargs))
        self.count += 1
        self.made.append(self.linear(_Sleep.apply(hidden)))
        return {"hidden": self.made[-1], "more": [hidden.detach(), 3]}


def test_forward_and_backward_are_told_apart() -> None:
    module = Recorder()
    sample = BlockSample((hidden(2, 4),), {})
    start = time.perf_counter()
    times = time_block(module, sample, CPU, None, repeats=5)
    total_s = time.perf_counter() - start
    # and so often under a checkpoint, which calls it twice
    assert len(module.calls) == 3 * 6
    forward_s, backward_s = times.forward_s, times.backward_s
    assert times.recompute_s is not None
    assert FORWARD_S <= times.recompute_s < backward_s
    # a CPU's kernels run as they are queued
    assert times.queue_backward_s == backward_s
    assert FORWARD_S <= forward_s < backward_s
    assert BACKWARD_S <= backward_s
    # neither counts the other's time too; noise makes the total longer, not medians
    assert 12 * (forward_s + backward_s) < 1.1 * total_s


def test_a_block_that_cannot_be_recomputed_is_timed_without() -> None:
    class Forgets(nn.Module):
        num_calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.num_calls += 1
            # every second call saves less for backward
            return x.sin() if self.num_calls % 2 == 0 else x.sin().cos()

    times = time_block(Forgets(), BlockSample((hidden(2, 4),), {}), CPU, None)
    assert times.backward_s > 0
    assert times.recompute_s is None


def test_inputs_are_what_the_sample_says() -> None:
    module = Recorder()
    twice = hidden(3, requires_grad=False)
    given = torch.arange(3)
    strided = torch.empty(4, 8, 2, device="meta").permute(2, 0, 1)[:, ::2]
    expanded = torch.empty(1, 5, dtype=torch.bfloat16, device="meta").expand(6, 5)
    tokens = torch.empty(2, 3, dtype=torch.long, device="meta")
    mask = torch.empty(2, 3, dtype=torch.bool, device="meta")
    empty = torch.empty(0, 3, device="meta")
    time_block(
        module,
        BlockSample(
            (hidden(2, 4), [twice, {"again": twice}], given),
            {"a": (strided, expanded), "b": [tokens, mask, empty], "c": "text"},
        ),
        CPU,
        None,
        repeats=1,
    )
    (first, (one, other), passed), kwargs = module.calls[0]
    assert first.requires_grad and first.is_leaf and first.grad is None
    assert 0 < first.abs().max() < 1
    assert other["again"] is one
    assert not one.requires_grad
    assert torch.equal(passed, given) and passed.data_ptr() != given.data_ptr()
    for made, asked in zip(kwargs["a"], (strided, expanded), strict=True):
        assert (made.shape, made.stride()) == (asked.shape, asked.stride())
        assert made.dtype is asked.dtype and made.device == CPU
    assert not kwargs["b"][0].any() and kwargs["b"][0].dtype is torch.long
    assert kwargs["b"][1].all()
    assert kwargs["b"][2].shape == (0, 3)
    assert kwargs["c"] == "text"


def test_no_gradient_is_accumulated() -> None:
    module = Recorder()
    module.linear.bias.grad = kept = torch.ones(4)
    accumulated: list[Tensor] = []
    module.linear.weight.register_post_accumulate_grad_hook(accumulated.append)
    time_block(module, BlockSample((hidden(2, 4),), {}), CPU, None)
    assert not accumulated
    assert module.linear.weight.grad is None
    assert module.linear.bias.grad is kept
    assert torch.equal(kept, torch.ones(4))


def test_a_failing_block_draws_no_number_either() -> None:
    module = Recorder()
    random = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="shapes"):
        time_block(module, BlockSample((hidden(2, 5),), {}), CPU, None)
    assert torch.equal(torch.get_rng_state(), random)


def test_autocast_is_on_when_asked_and_off_when_not() -> None:
    module = Recorder()
    sample = BlockSample((hidden(2, 4),), {})
    time_block(module, sample, CPU, torch.bfloat16, repeats=1)
    with torch.autocast("cpu", torch.bfloat16):
        time_block(module, sample, CPU, None, repeats=1)
    dtypes = [output.dtype for output in module.made]
    # a recomputation ends before its output is made
    assert dtypes == [torch.bfloat16] * 4 + [torch.float32] * 4


def test_without_gradients_there_is_no_backward() -> None:
    module = Recorder().requires_grad_(False)
    sample = BlockSample((hidden(2, 4, requires_grad=False),), {})
    times = time_block(module, sample, CPU, None)
    assert times.forward_s >= FORWARD_S
    assert times.backward_s == 0.0


def test_frozen_blocks_still_pass_gradients_on() -> None:
    module = Recorder().requires_grad_(False)
    times = time_block(module, BlockSample((hidden(2, 4),), {}), CPU, None)
    assert times.backward_s >= BACKWARD_S


class Outside(nn.Module):
    """Embedding, blocks, and a head that takes known times."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([Recorder(), Recorder()])
        self.head = nn.Linear(4, 8)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)["hidden"]
        return self.head(_Sleep.apply(torch.dropout(hidden, 0.5, True))).mean()


@pytest.mark.parametrize("trained", ["embedding", "layers", "head"])
def test_outside_the_blocks_no_block_is_run(trained: str) -> None:
    # whatever trains, backward goes through the head
    model = Outside().requires_grad_(False)
    model.get_submodule(trained).requires_grad_()
    output = {"hidden": hidden(2, 4), "more": [hidden(2, 4, requires_grad=False), 3]}
    given = hidden(2, 4, requires_grad=trained == "embedding")
    sample = BlockSample((given,), {}, output)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    samples = {"layers.0": sample, "layers.1": sample}
    batch = {"ids": torch.tensor([1, 2])}
    seconds = time_outside(model, samples, batch, lambda m, given: m(**given), CPU)
    assert FORWARD_S <= seconds.forward_s < seconds.backward_s
    assert BACKWARD_S <= seconds.backward_s
    assert all(param.grad is None for param in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert_close(model.state_dict(), before, rtol=0, atol=0)


# cache


@dataclasses.dataclass
class Made:
    value: int
    rate: float
    waited_s: float = 0.0


class Maker:
    """Makes another `Made` each time."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self) -> Made:
        self.num_calls += 1
        return Made(self.num_calls, 1.5)


SILENT = pytest.mark.filterwarnings("error")
KEY = {"device": "some GPU", "shape": (1, 2), "kernels": {"b": True, "a": None}}


@SILENT
def test_a_key_is_measured_once(tmp_path: Path) -> None:
    make, folder = Maker(), tmp_path / "not" / "there yet"
    first = cached(folder, KEY, make, Made)
    assert first == Made(1, 1.5, 0.0)
    reordered = {"kernels": {"a": None, "b": True}, "shape": [1, 2]}
    assert cached(folder, {**reordered, "device": "some GPU"}, make, Made) == first
    assert make.num_calls == 1


@pytest.mark.parametrize(("device", "made"), {"cpu": 2, "some GPU": 1}.items())
def test_figures_of_a_busy_processor_are_for_now_only(
    device: str, made: int, tmp_path: Path
) -> None:
    """Kept, a block that took 1.9 s once instead of 0.06 had every later plan wrong."""
    make = Maker()

    def waits() -> Made:
        time.sleep(0.3)
        return make()

    values = [cached(tmp_path, {"device": device}, waits, Made).value for _ in "ab"]
    assert values == [1, made]


def test_a_folder_of_the_users_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none here that is called `~`."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    cached("~/kept", KEY, Maker(), Made)
    assert len([*(tmp_path / "home/kept").iterdir()]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


@SILENT
def test_a_changed_key_is_measured_beside_the_other(tmp_path: Path) -> None:
    make = Maker()
    for key in (KEY, {**KEY, "shape": (2, 1)}, {**KEY, "kernels": {}}, {}):
        cached(tmp_path, key, make, Made)
    assert make.num_calls == 4 and len(list(tmp_path.iterdir())) == 1
    assert cached(tmp_path, KEY, make, Made).value == 1


def cut(file: Path) -> None:
    file.write_text(file.read_text()[:-20])


def empty(file: Path) -> None:
    file.write_text("")


def by_hand(file: Path) -> None:
    file.write_text(file.read_text().replace("1.5", "0.0"))


def no_object(file: Path) -> None:
    file.write_text("[1, 2]")


def foreign(file: Path) -> None:
    file.write_text(json.dumps({"key": {}, "value": {"value": 99}}))


def not_text(file: Path) -> None:
    file.write_bytes(b"\xff\xfe\x00")


def deep(file: Path) -> None:
    file.write_text("[" * 100_000 + "]" * 100_000)


@SILENT
@pytest.mark.parametrize(
    "damage", [cut, empty, by_hand, no_object, foreign, not_text, deep]
)
def test_a_damaged_file_is_measured_again_and_replaced(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    make = Maker()
    cached(tmp_path, KEY, make, Made)
    (file,) = tmp_path.iterdir()
    damage(file)
    with pytest.warns(UserWarning, match="damaged") as caught:
        assert cached(tmp_path, KEY, make, Made).value == 2
    assert str(file) in str(caught[0].message)
    assert list(tmp_path.iterdir()) == [file]
    assert cached(tmp_path, KEY, make, Made).value == 2


def hardware_in(folder: Path) -> None:
    cached_hardware(folder, CPU, 1, 2, VERSIONS)


def blocks_in(folder: Path) -> None:
    sample = BlockSample((hidden(2, 4),), {})
    model = nn.ModuleList([nn.Linear(4, 4)])
    key = partial(measurement_key, "block", CPU, VERSIONS)
    measure_blocks(model, ["0"], {0: sample}, CPU, None, folder, key)


ATTENTION = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 8,
}
WINDOWS = ["sliding_attention", "full_attention"] * 2


@pytest.mark.parametrize(
    ("config", "num_kinds"),
    [
        # the third layer's number is that of its heads for each pair of keys and values
        (LlamaConfig(**ATTENTION), 1),
        (Gemma3TextConfig(**ATTENTION, sliding_window=2, layer_types=WINDOWS), 2),
    ],
    ids=["layer_idx", "sliding_window"],
)
def test_blocks_that_differ_in_an_attribute_are_timed_each(
    config: PreTrainedConfig, num_kinds: int, tmp_path: Path
) -> None:
    """Only this sees windows of one layer timed for all of them."""
    model = AutoModel.from_config(config)
    copied, ids = meta_copy(model), torch.zeros(1, 4, dtype=torch.long, device="meta")
    blocks = find_blocks(copied)
    step = trace_step(
        copied, blocks, lambda: copied(ids, use_cache=False)[0].float().sum()
    )
    timed = []

    def key(block: Any) -> dict[str, Any]:
        timed.append(block)
        return {"block": block}

    names, samples = step.trace.blocks, step.samples
    times = measure_blocks(model, names, samples, CPU, None, tmp_path, key)
    assert (len(timed), len(times)) == (num_kinds, 4)


def kept(folder: Path, number: int, measure: Callable[[], Any]) -> Any:
    """What `measure` returns once others leave it the processor and it is kept, as the
    last of this `number`."""
    while True:
        value = measure()
        for file in folder.iterdir():
            if len(json.loads(file.read_text())["measured"]) == number:
                return value


@pytest.mark.parametrize("measure", [hardware_in, blocks_in])
def test_all_that_is_measured_is_read_back(
    tmp_path: Path, measure: Callable[[Path], None]
) -> None:
    kept(tmp_path, 1, partial(measure, tmp_path))
    (file,) = tmp_path.iterdir()
    first = file.read_text()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measure(tmp_path)
    assert file.read_text() == first


@SILENT
def test_a_folder_that_cannot_be_made_is_refused_before_measuring(
    tmp_path: Path,
) -> None:
    make, file = Maker(), tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "below"):
        with pytest.raises(ConfigError, match="protrain_cache_dir") as refusal:
            cached(folder, KEY, make, Made)
        assert str(folder) in str(refusal.value)
    assert make.num_calls == 0


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cache"

    def make() -> Made:
        shutil.rmtree(folder)
        return Made(1, 1.5)

    with pytest.raises(ConfigError, match="protrain_cache_dir"):
        cached(folder, KEY, make, Made)


def test_a_failed_measurement_leaves_nothing(tmp_path: Path) -> None:
    def make() -> Made:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cached(tmp_path, KEY, make, Made)
    with pytest.raises(ValueError):
        cached(tmp_path, KEY, lambda: Made(1, math.nan), Made)
    assert not list(tmp_path.iterdir())


def test_the_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_folder() == tmp_path / "xdg" / "axolotl-protrain"
    cached(None, KEY, Maker(), Made)
    assert len(list(default_folder().iterdir())) == 1
    for unusable in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert default_folder() == tmp_path / ".cache" / "axolotl-protrain"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == tmp_path / ".cache" / "axolotl-protrain"


def test_keys_name_what_changes_the_figures() -> None:
    key = measurement_key("block", CPU, VERSIONS, attention="sdpa")
    others = [
        measurement_key("hardware", CPU, VERSIONS, attention="sdpa"),
        measurement_key("block", CPU, {"transformers": "5.17"}, attention="sdpa"),
        measurement_key("block", CPU, VERSIONS, attention="eager"),
    ]
    assert key not in others
    assert {torch.__version__, device_name(CPU)} <= {*map(str, key.values())}


def test_the_number_of_threads_is_in_the_key() -> None:
    before, threads = measurement_key("", CPU, VERSIONS), torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert measurement_key("", CPU, VERSIONS) != before
    finally:
        torch.set_num_threads(threads)
    assert measurement_key("", CPU, VERSIONS) == before


def test_rates_come_from_the_cache_and_memory_from_now(tmp_path: Path) -> None:
    def of(host_bytes: int, device_bytes: int, *also: Any) -> Hardware:
        return cached_hardware(tmp_path, CPU, host_bytes, device_bytes, VERSIONS, *also)

    first = kept(tmp_path, 1, partial(of, 1, 2))
    later = of(3, 4)
    assert later == dataclasses.replace(first, host_bytes=3, device_bytes=4)
    (file,) = tmp_path.iterdir()
    (value,) = json.loads(file.read_text())["measured"].values()
    assert value["host_bytes"] == value["device_bytes"] == value["unseen_bytes"] == 0
    file.unlink()
    assert kept(tmp_path, 1, partial(of, 1, 2)) != first
    # links that two processes share and another dtype of weights are measured anew
    kept(tmp_path, 2, partial(of, 1, 2, 2))
    kept(tmp_path, 3, partial(of, 1, 2, 1, torch.float32))


# memory of the host


def cgroup(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


GIB = 1 << 30


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("path", ["/slice/job", "/of/the/host"])
def test_the_tightest_cgroup_counts(tmp_path: Path, version: int, path: str) -> None:
    own, mounted = tmp_path / "own", tmp_path / "mounted"
    own.write_text(f"9:name=x:/\n4:memory:{path}\n" if version == 1 else f"0::{path}\n")
    root = mounted / "memory" if version == 1 else mounted
    limit, used, prefix, without = (
        ("memory__limit_in_bytes", "memory__usage_in_bytes", "total_", 2**63 - 4096)
        if version == 1
        else ("memory__max", "memory__current", "", "max")
    )
    pages = f"{prefix}active_file {GIB // 4}\n{prefix}inactive_file {GIB // 4}\nanon 1"

    def free(given_back: int = 0) -> int:
        return host_memory(mounted, own, given_back)

    unlimited = free()
    cgroup(root, **{limit: without, used: 5 * GIB, "memory__stat": pages})
    assert free() == pytest.approx(unlimited, abs=GIB // 2)
    cgroup(root, **{limit: 4 * GIB, used: 2 * GIB})
    # what is in files is given up, and a reserve is left to the system
    assert free() == 4 * GIB - 2 * GIB + GIB // 2 - GIB
    job = root / "slice" / "job"
    cgroup(job, **{limit: without, used: 3 * GIB, "memory__stat": pages})
    cgroup(job.parent, **{limit: 3 * GIB, used: 2 * GIB, "memory__stat": pages})
    tighter = GIB if path == "/slice/job" else 0
    left = 4 * GIB - 2 * GIB + GIB // 2 - GIB - tighter
    assert free() == left and free(5) == left + 5
    limits = resource.getrlimit(resource.RLIMIT_AS)
    size = psutil.Process().memory_info().vms + GIB + GIB // 4
    resource.setrlimit(resource.RLIMIT_AS, (size, limits[1]))
    try:
        # addresses are free again only afterwards
        assert free() == free(5) == min(left, GIB // 4)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_quota_counts(tmp_path: Path, version: int) -> None:
    """A container shows all processors of its host."""
    own, mounted = tmp_path / "own", tmp_path / "mounted"
    own.write_text("3:cpu,cpuacct:/pod/job\n" if version == 1 else "0::/pod/job\n")
    root = mounted / "cpu" if version == 1 else mounted

    def limit(folder: Path, quota: str) -> None:
        quota = {1: {"max": "-1"}.get(quota, quota), 2: quota}[version]
        if version == 1:
            cgroup(folder, cpu__cfs_quota_us=quota, cpu__cfs_period_us=50_000)
        else:
            cgroup(folder, cpu__max=f"{quota} 50000")

    with (
        patch("os.sched_getaffinity", lambda _: set(range(96))),
        patch("psutil.cpu_count", lambda logical: 48),
    ):
        assert processors(mounted, own) == 48
        limit(root / "pod" / "job", "max")
        assert processors(mounted, own) == 48
        limit(root / "pod", "382500")
        assert processors(mounted, own) == 7
        limit(root / "pod" / "job", "20000")
        assert processors(mounted, own) == 1


def test_a_device_is_on_the_memory_node_that_the_system_says(tmp_path: Path) -> None:
    pci = tmp_path / "bus/pci/devices"
    for node in (0, 1, 10):
        (tmp_path / f"devices/system/node/node{node}").mkdir(parents=True)
    for address, node in {"0000:65:00.0": 10, "0000:01:00.0": -1, "old": 7}.items():
        (pci / address).mkdir(parents=True)
        (pci / address / "numa_node").write_text(f"{node}\n")
    assert memory_nodes(tmp_path) == [0, 1, 10]
    found = [node_of(at, tmp_path) for at in (*sorted(os.listdir(pci)), "absent")]
    assert found == [None, 10, None, None]


def test_pages_of_files_are_told_from_memory(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(1 << 20))
    mapped = torch.from_file(str(file), size=1 << 20, dtype=torch.uint8)
    rest = torch.ones(1 << 20, dtype=torch.uint8)
    assert mapped_bytes([mapped[-10:], rest, mapped[:20], rest[:5]]) == 30
    file.unlink()
    assert mapped_bytes([mapped]) == 0


# several ranks


def test_cards_exchange_over_their_fastest_way() -> None:
    def pair(text: str, num_gpus: int) -> Hardware:
        return gpu_hardware(text, None, 64 << 30, num_gpus=num_gpus)

    assert card("4090") == pair("4090", 1)
    assert (pair("4090", 1).gather_bytes_s, pair("4090", 1).reduce_bytes_s) == (0, 0)
    two, four = pair("A6000", 2), pair("A6000", 4)
    # in a ring all but the own part travels: half of two, three quarters of four
    assert two.gather_bytes_s == pytest.approx(2 * two.fetch_both_bytes_s)
    assert four.gather_bytes_s == pytest.approx(4 / 3 * two.fetch_both_bytes_s)
    # which takes the link from their copies
    assert two.shares_link and not pair("H100", 2).shares_link
    assert not pair("A6000", 1).shares_link and not pair("A6000", 1).gather_bytes_s
    assert (
        "through host memory" in two.source and "over NVLink" in pair("H100", 2).source
    )
    assert pair("H100", 2).gather_bytes_s > 5 * pair("H100 PCIe", 2).gather_bytes_s
    assert four.adam_bytes_s == pytest.approx(card("A6000").adam_bytes_s / 4)
    assert two.across_bytes_s == 0


def test_several_consumer_cards_are_on_a_desktops_board() -> None:
    """Eight lanes each and two channels of memory for all, unless a link is named."""

    def cards(text: str, num_gpus: int, link: str | None = None) -> Hardware:
        return gpu_hardware(text, link, 64 << 30, num_gpus=num_gpus)

    one, two, four = (cards("4090", n) for n in (1, 2, 4))
    named = cards("4090", 2, "pcie4x16")
    assert (one.link, two.link, named.link) == ("pcie4x16", "pcie4x8", "pcie4x16")
    assert "a desktop's board" in two.source and "desktop" not in named.source
    assert two.fetch_bytes_s == pytest.approx(one.fetch_bytes_s / 2)
    assert named.fetch_bytes_s == one.fetch_bytes_s
    assert named.fetch_both_bytes_s == one.fetch_both_bytes_s
    # what all cards move, both ways at once, passes the host's memory
    memory = 51.2e9 * 0.7
    assert 4 * two.fetch_both_bytes_s <= memory * (1 + 1e-9)
    assert 4 * four.fetch_bytes_s == pytest.approx(memory)
    assert cards("A6000", 2).link == "pcie4x16" and cards("7900 XTX", 2).link[-1] == "8"


def test_the_weakest_of_several() -> None:
    first, other = card("4090"), card("3090", "pcie3x8")
    weak = weakest([first, other, first])
    assert weak.name == "RTX 4090 (1 of 3 differ)"
    assert weak.flops_16 == other.flops_16 < first.flops_16
    assert weak.fetch_bytes_s == other.fetch_bytes_s
    assert weak.device_bytes == min(first.device_bytes, other.device_bytes)
    slow = dataclasses.replace(
        first, kernel_s=1.0, unseen_bytes=9 << 30, overlaps=False, host_bytes=5
    )
    weak = weakest([first, slow])
    assert weak == slow and weakest([first]) == first
    assert weakest([slow, first]) == slow


def rates_of(rank: int, size: int, folder: Path) -> None:
    start = f"file://{folder / 'start'}"
    dist.init_process_group("gloo", init_method=start, rank=rank, world_size=size)
    ranks = Ranks("cpu")
    rates = measure_collectives(ranks, CPU)
    (folder / f"{rank}.json").write_text(json.dumps(rates))
    ranks.close()
    dist.destroy_process_group()


def test_collectives_are_measured_by_all_ranks(tmp_path: Path) -> None:
    forks = [Fork(rates_of, rank, 2, tmp_path) for rank in range(2)]
    assert [fork.wait(60) for fork in forks] == [0, 0]
    for rank in range(2):
        rates = json.loads((tmp_path / f"{rank}.json").read_text())
        gather, reduce, across = rates
        assert 1e6 < gather < 1e12 and 1e6 < reduce < 1e12 and across == 0
