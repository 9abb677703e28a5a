"""Tracing without weights: what is skipped, carried along, emulated and left behind."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from core_models import CPU, Stack, batches, freeze, hook_counts, stack
from tiny_models import FAMILIES, random_model
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from axolotl.integrations.protrain.core.layout import build_layout, find_blocks
from axolotl.integrations.protrain.core.planner import trace as trace_module
from axolotl.integrations.protrain.core.planner.emulation import (
    Emulation,
    autocast_on_meta,
    outputs_as_fp32,
)
from axolotl.integrations.protrain.core.planner.memory import MemoryModel
from axolotl.integrations.protrain.core.planner.meta import MetaMode, meta_copy
from axolotl.integrations.protrain.core.planner.operators import launch
from axolotl.integrations.protrain.core.planner.plans import make_plan
from axolotl.integrations.protrain.core.planner.repeats import skipping_repeats
from axolotl.integrations.protrain.core.planner.trace import TracedStep, trace_step
from axolotl.integrations.protrain.core.types import Segment, Trace, Workload

BF16 = torch.bfloat16


def run_trace(
    copied: nn.Module, loss_of: Callable[[], Tensor], every_block: bool
) -> TracedStep:
    """With `every_block`, those of a kind that has run before run too."""

    def repeats(blocks: Any, *told: Callable) -> AbstractContextManager[None]:
        return skipping_repeats(() if every_block else blocks, *told)

    with mock.patch.object(trace_module, "skipping_repeats", repeats):
        return trace_step(copied, find_blocks(copied), loss_of)


def trace(
    model: nn.Module,
    batch: dict[str, Tensor],
    autocast: torch.dtype | None = None,
    every_block: bool = False,
) -> TracedStep:
    """Of a model of transformers, as for the CPU."""
    copied = meta_copy(model)

    def loss_of() -> Tensor:
        with Emulation("cpu", autocast):
            return outputs_as_fp32(copied(**batch))["loss"]

    return run_trace(copied, loss_of, every_block)


def trace_stack(model: nn.Module, every_block: bool = False) -> Trace:
    copied = meta_copy(model)
    tokens = batches(1)[0]
    return run_trace(copied, lambda: copied(tokens), every_block).trace


def text(rows: int = 2, length: int = 24, padding: int = 0) -> dict[str, Tensor]:
    ids = torch.arange(rows * length).view(rows, length) % 50 + 3
    mask = torch.ones_like(ids)
    mask[0, length - padding :] = 0
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask}


# one block of each kind stands for all


def assert_same_trace(short: Trace, whole: Trace) -> None:
    """Equal in every number; lifetimes of one fate may be listed in parts."""
    assert short.blocks == whole.blocks
    assert len(short.segments) == len(whole.segments)
    for ours, theirs in zip(short.segments, whole.segments, strict=True):
        # what all blocks share is given up by the one that comes last
        assert replace(ours, operators=()) == replace(theirs, operators=())
        assert names(ours) == names(theirs)
    assert fates(short) == fates(whole)


def names(segment: Segment) -> list[str]:
    return [name for name, _bytes in segment.operators]


def fates(trace: Trace) -> Counter:
    bytes_of: Counter = Counter()
    for lifetime in trace.lifetimes:
        saves = frozenset(lifetime.saves)
        fate = lifetime.made, lifetime.forgotten, saves, lifetime.large
        bytes_of[fate] += lifetime.nbytes
    return bytes_of


def walks(model: nn.Module, trace: Trace) -> list[int]:
    """Device bytes at every moment of a few plans."""
    layout = build_layout(model, order=trace.blocks)
    memory = MemoryModel(layout, trace, Workload(accumulation=2), CPU)
    num_chunks, num_blocks = len(layout.pageable), len(layout.blocks)
    plans = [
        make_plan(layout, n_persist, 0 if n_persist else 2, 0, n_checkpoint, False)
        for n_persist, n_checkpoint in (
            (0, 0),
            (0, num_blocks // 2),
            (num_chunks, num_blocks),
        )
    ]
    return [point.total for plan in plans for point in memory.device(plan).timeline]


def assert_one_block_is_enough(
    model: nn.Module, batch: dict[str, Tensor], autocast: torch.dtype | None = None
) -> None:
    model.train()
    short = trace(model, batch, autocast).trace
    whole = trace(model, batch, autocast, every_block=True).trace
    assert_same_trace(short, whole)
    assert walks(model, short) == walks(model, whole)


@pytest.mark.parametrize("autocast", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sampled(8)
def test_one_block_of_a_kind_stands_for_all(
    family: str, autocast: torch.dtype | None
) -> None:
    # two kinds of layers in turn in gemma3, so four would run nearly all
    model = random_model(family)
    model.config.use_cache = False
    assert_one_block_is_enough(model, text(padding=3), autocast)


def encoder_decoder() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=64,
        d_model=24,
        d_kv=12,
        d_ff=40,
        num_layers=4,
        num_decoder_layers=5,
        num_heads=2,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config)


def longer_gemma() -> nn.Module:
    from transformers import AutoModelForCausalLM

    config = random_model("gemma3").config
    config.num_hidden_layers = 7
    sliding, full = "sliding_attention", "full_attention"
    config.layer_types = [sliding, sliding, full, sliding, sliding, full, sliding]
    config.use_cache = False
    return AutoModelForCausalLM.from_config(config)


def with_one_block(change: Callable[[nn.Module], object]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = random_model("llama")
        model.config.use_cache = False
        change(model.model.layers[1])
        return model

    return build


def half_frozen(block: nn.Module) -> None:
    block.mlp.requires_grad_(False)


def in_bf16(block: nn.Module) -> None:
    block.mlp.to(BF16)
    block.mlp.register_forward_pre_hook(lambda _m, args: (args[0].to(BF16),))
    block.mlp.register_forward_hook(lambda _m, _a, output: output.float())


def from_the_second_block_on() -> nn.Module:
    """Nothing in front of the second block takes a gradient."""
    model = random_model("llama")
    model.config.use_cache = False
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    return model


def with_a_first_one() -> nn.Module:
    """The first block computes something else, and knows that by its number alone."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    class Numbered(LlamaDecoderLayer):
        number: int

        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            output = super().forward(*args, **kwargs)
            return output if self.number else output.sin()

    model = random_model("llama")
    model.config.use_cache = False
    for number, layer in enumerate(model.model.layers):
        layer.__class__, layer.number = Numbered, number
    return model


@pytest.mark.parametrize(
    "build",
    [
        encoder_decoder,
        longer_gemma,
        from_the_second_block_on,
        with_a_first_one,
        with_one_block(half_frozen),
        with_one_block(in_bf16),
        with_one_block(lambda block: block.requires_grad_(False)),
    ],
    ids=[
        "t5",
        "gemma3",
        "frozen start",
        "first",
        "half frozen",
        "another dtype",
        "frozen",
    ],
)
def test_blocks_that_differ_are_of_another_kind(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    assert_one_block_is_enough(build(), text())


@pytest.mark.parametrize("recurring", [False, True])
def test_repeats_of_plain_modules(recurring: bool) -> None:
    model = stack(num_layers=5, inner=[32, 32, 48, 32, 32])
    if recurring:
        freeze(model, ["extra"])
    assert_same_trace(trace_stack(model), trace_stack(model, every_block=True))


class Rounds(Stack):
    """More than one round through its layers, the first without a graph, as in HRM."""

    num_rounds = 1

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            super().forward(tokens)
        return sum(super(Rounds, self).forward(tokens) for _ in range(self.num_rounds))


@pytest.mark.parametrize("num_rounds", [1, 2])
def test_rounds_through_the_same_blocks(num_rounds: int) -> None:
    model = Rounds()
    model.num_rounds = num_rounds
    assert_same_trace(trace_stack(model), trace_stack(model, every_block=True))


@pytest.mark.parametrize("unpacked", [False, True])
def test_the_depth_of_a_stack_costs_no_operators(unpacked: bool) -> None:
    """Nor where each block has a class of its own, as experts in 4 bits have."""
    ran = []
    for depth in (6, 14):
        model = stack(num_layers=depth)
        for number, layer in enumerate(model.layers):
            # one of them is the number of one block
            layer.number, layer.num_heads = number, 3
        for layer in model.layers if unpacked else ():
            parametrize.register_parametrization(layer.down, "weight", nn.Identity())
        copied = meta_copy(model)
        calls = [0]

        def count(*_: Any, calls: list[int] = calls) -> None:
            calls[0] += 1

        for layer in copied.layers:
            layer.up.register_forward_hook(count)
        tokens = batches(1)[0]
        trace_step(copied, find_blocks(copied), lambda t=copied, x=tokens: t(x))
        ran.append(calls[0])
    # the first block, one that stands for all others, and the last one, whose output is
    # read by the head
    assert ran == 2 * [3]


# what is not touched


def test_a_meta_copy_takes_no_memory() -> None:
    made = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            output = func(*args, **(kwargs or {}))
            if isinstance(output, Tensor) and not output.is_meta and not func.is_view:
                made.append(output.nbytes)
            return output

    model = stack(width=512, inner=1024)
    with Watch():
        trace_stack(model)
    weights = sum(p.nbytes for p in model.parameters())
    assert weights > 2**24
    # token ids and nothing else
    assert sum(made) < 2**14


def state_of(model: nn.Module) -> Any:
    return (
        {name: (id(p), p.data_ptr(), p.requires_grad) for name, p in held(model)},
        {name: p.grad for name, p in model.named_parameters()},
        {name: set(vars(module)) for name, module in model.named_modules()},
        {name: module.training for name, module in model.named_modules()},
        hook_counts(model),
    )


def held(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def test_tracing_leaves_the_model_as_it_was() -> None:
    model = random_model("llama")
    model.model.layers[0].register_forward_hook(lambda *_: None)
    patched = model.model.layers[1]
    patched.forward = own = patched.forward
    before = state_of(model)
    trace(model, text())
    assert state_of(model) == before
    assert patched.forward is own


def test_tracing_leaves_its_meta_copy_as_it_was() -> None:
    model = stack()
    copied = meta_copy(model)
    copied.layers[2].forward = own = copied.layers[2].forward
    before = state_of(copied)
    tokens = batches(1)[0]
    trace_step(copied, find_blocks(copied), lambda: copied(tokens))
    assert state_of(copied) == before
    assert copied.layers[2].forward is own


def test_a_meta_copy_has_the_ties_and_strides_of_the_model() -> None:
    model = stack(tie=True)
    model.layers[0].up.weight.data = model.layers[0].up.weight.data.t().clone().t()
    copied = meta_copy(model)
    assert copied.head.weight is copied.embed.weight
    for (name, ours), (_, theirs) in zip(held(copied), held(model), strict=True):
        assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride()), name
        assert (ours.dtype, ours.requires_grad) == (theirs.dtype, theirs.requires_grad)
    assert {p.device.type for p in copied.parameters()} == {"meta"}


class Broken(Exception):
    pass


@pytest.mark.parametrize("where", ["raise_in_forward", "raise_in_backward"])
def test_a_trace_that_fails_leaves_nothing_behind(where: str) -> None:
    copied = meta_copy(stack())
    before = state_of(copied)
    setattr(copied.layers[3], where, Broken())
    setattr(copied.layers[5], where, Broken())
    tokens = batches(1)[0]
    with pytest.raises(Broken):
        trace_step(copied, find_blocks(copied), lambda: copied(tokens))
    for layer in copied.layers:
        layer.raise_in_forward = layer.raise_in_backward = None
    assert state_of(copied) == before
    # neither a dispatch mode nor a saved-tensors hook is still active
    x = torch.ones(3, requires_grad=True)
    (x * x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    trace_step(copied, find_blocks(copied), lambda: copied(tokens))


@pytest.mark.parametrize("nth", [1, 4, 10])
def test_an_interrupt_amid_what_follows_an_end_arrives(
    nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raised in a finalizer it would be printed, and the trace would go on."""
    settle, calls = trace_module._Recorder._settle, [0]

    def interrupted(self: Any) -> None:
        calls[0] += bool(self._ended)
        if calls[0] == nth:
            raise KeyboardInterrupt
        settle(self)

    monkeypatch.setattr(trace_module._Recorder, "_settle", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trace_stack(stack())


def test_a_trace_keeps_no_model_alive() -> None:
    model = stack()
    copied = meta_copy(model)
    tokens = batches(1)[0]
    traced = trace_step(copied, find_blocks(copied), partial(copied, tokens))
    gone = weakref.ref(copied)
    del copied
    gc.collect()
    assert gone() is None
    assert traced.samples


def test_a_sample_has_the_positions_of_the_model() -> None:
    """Zeros would be timed as packed rows of one token each."""

    class Rotating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(4, 4)

        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            return self.proj(x) * positions.unsqueeze(-1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 4)
            self.layers = nn.ModuleList(Rotating() for _ in range(2))

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            positions = torch.arange(tokens.shape[1], device=x.device).unsqueeze(0)
            for layer in self.layers:
                x = layer(x, positions=positions % 3)
            return x.sum()

    copied = meta_copy(Model())
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    traced = trace_step(copied, find_blocks(copied), lambda: copied(tokens))
    given = traced.samples[1].kwargs["positions"]
    assert given.tolist() == [[0, 1, 2, 0, 1]]


# what a segment says


def test_the_order_is_that_of_first_use() -> None:
    model = stack()
    model.order = [4, 2, 0, 1]
    trace = trace_stack(model)
    used = [f"layers.{index}" for index in (4, 2, 0, 1)]
    assert trace.blocks == (*used, "layers.3", "layers.5")
    forward = [
        s.block for s in trace.segments if not s.backward and s.block is not None
    ]
    backward = [s.block for s in trace.segments if s.backward and s.block is not None]
    assert forward == [0, 1, 2, 3]
    assert backward == [3, 2, 1, 0]
    prefixes = [
        {name.rsplit(".", 2)[0] if "extra" not in name else name[:-6] for name in names}
        for names in (
            [name for name, _ in s.gradients]
            for s in trace.segments
            if s.backward and s.block is not None
        )
    ]
    assert prefixes == [{f"layers.{index}"} for index in (1, 0, 2, 4)]


def test_flops_of_a_llama_block() -> None:
    model = random_model("llama")
    config = model.config
    rows, length = 2, 32
    tokens = rows * length
    width, inner = config.hidden_size, config.intermediate_size
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    dim = width // heads
    # query, output; key, value; gate, up, down: two operations for each weight
    linear = 2 * tokens * (2 * width * heads * dim + 2 * width * kv * dim)
    linear += 2 * tokens * 3 * width * inner
    # two products; of each half the pairs, for the mask is causal
    attention = 2 * 2 * rows * heads * length**2 * dim / 2
    traced = trace(model, text(rows, length)).trace
    for segment in traced.segments:
        if segment.block is None:
            continue
        done = segment.work.flops_32
        assert segment.work.flops_16 == 0
        if segment.backward:
            # once more for inputs, once more for weights; attention recomputes scores
            assert done == 2 * linear + 2.5 * attention
        else:
            assert done == linear + attention
    in_bf16 = trace(model.to(BF16), text(rows, length)).trace
    assert [
        s.work.flops_16 + s.work.attention_16
        for s in in_bf16.segments
        if s.block is not None
    ] == [s.work.flops_32 for s in traced.segments if s.block is not None]


@pytest.mark.parametrize("trained", [True, False])
def test_weights_that_a_loss_reads_are_named(trained: bool) -> None:
    """A penalty reads them outside of their block, where paging would not bring them."""
    copied = meta_copy(stack())
    weight = copied.layers[2].up.weight.requires_grad_(trained)
    tokens = batches(1)[0]
    found = run_trace(copied, lambda: copied(tokens) + weight.pow(2).sum(), False)
    assert found.read_outside == {"layers.2.up.weight"}
    assert not run_trace(copied, lambda: copied(tokens), False).read_outside


class Leaving(nn.Module):
    """Leaves a part of its loss behind, as experts do, or has its output written."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.how == "in place":
                x.mul_(1.1)
        aux = sum(layer.aux for layer in self.layers) if self.how == "aux" else 0
        return x.sum() + aux


@pytest.mark.parametrize("how", ["aux", "in place"])
def test_what_a_skipped_block_cannot_give_is_run(how: str) -> None:
    """And random numbers of others are those that training draws."""
    copied = meta_copy(Leaving(how))

    def leave(layer: Any, _args: Any, output: Tensor) -> None:
        layer.aux = output.mean() * random.random() + float(np.random.rand())

    plain = [layer.forward for layer in copied.layers]
    for layer, forward in zip(copied.layers, plain, strict=True):

        def forward_and_leave(
            x: Tensor, own: Any = layer, run: Any = forward
        ) -> Tensor:
            output = run(x)
            leave(own, x, output)
            return output

        layer.forward = forward_and_leave
    states = random.getstate(), np.random.get_state()[1].tolist()
    blocks = [(f"layers.{n}", layer) for n, layer in enumerate(copied.layers)]
    found = trace_step(copied, blocks, lambda: copied(torch.ones(4, 8, device="meta")))
    assert len({s.block for s in found.trace.segments}) == 5
    assert states == (random.getstate(), np.random.get_state()[1].tolist())


class HandsOnWeight(nn.Module):
    """Gives a frozen weight to who comes next, in its output or as an attribute."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.ones(8, 8), requires_grad=False)
        self.before: list[HandsOnWeight] = []

    def forward(
        self, x: Tensor, given: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        for block in self.before:
            given = block.weight
        x = torch.tanh(self.inner(x if given is None else x @ given))
        return x, self.weight.t() if self.how == "output" else None


class HandsOnWeights(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(HandsOnWeight(how) for _ in range(5))
        for number in range(1, 5) if how == "list" else ():
            self.layers[number].before.append(self.layers[number - 1])

    def forward(self, x: Tensor) -> Tensor:
        given = None
        for layer in self.layers:
            x, given = layer(x, given)
        return x.sum()


@pytest.mark.parametrize("how", ["output", "list"])
def test_weights_that_blocks_hand_on_are_named(how: str) -> None:
    """Those of blocks too for which another one was run."""
    copied = meta_copy(HandsOnWeights(how))
    blocks = [(f"layers.{n}", layer) for n, layer in enumerate(copied.layers)]
    x = torch.ones(4, 8, device="meta")
    found = trace_step(copied, blocks, lambda: copied(x))
    assert found.read_outside == {f"layers.{n}.weight" for n in range(4)}


class OwnKernel(torch.autograd.Function):
    """A product by an operator of which torch knows nothing but the shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return torch.ops.protrain_tests.product(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.saved_tensors[0], None


class WithOwnKernel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2)
        )
        self.weight = nn.Parameter(torch.ones(8, 8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        decayed = self.weight * 2 + self.weight.to(BF16).t().float()
        # as fused kernels for adapters and for the MLP do
        x = x.repeat(1, 1).addmm_(x, self.weight) + self.weight.repeat(2, 1).sum()
        return OwnKernel.apply(x, self.weight).sum() + decayed.sum()


def test_an_operator_without_a_count_is_named() -> None:
    library = torch.library.Library("protrain_tests", "DEF")
    library.define("product(Tensor x, Tensor weight) -> Tensor")
    library.impl("product", lambda x, weight: x.new_empty(x.shape), "Meta")
    model = meta_copy(WithOwnKernel())
    x = torch.empty(2, 8, device="meta")
    traced = trace_step(model, find_blocks(model), lambda: model(x))
    library._destroy()
    assert traced.uncounted == ("protrain_tests::product",)
    after_blocks = [s for s in traced.trace.segments if not s.backward][-1]
    assert (
        "addmm_" in names(after_blocks)
    ) and after_blocks.work.flops_32 == 2 * 2 * 8**2


def test_a_kernel_nobody_sees_inside_takes_the_time_of_its_bytes() -> None:
    def moved(times: int) -> int:
        model = meta_copy(stack())
        x = torch.zeros(2, 8, dtype=torch.long, device="meta")

        def loss() -> Tensor:
            for _ in range(times):
                launch([x, x])
            return model(x).sum()

        traced = trace_step(model, find_blocks(model), loss).trace
        return sum(segment.work.moved_bytes for segment in traced.segments)

    assert moved(3) - moved(0) == 3 * 2 * 2 * 8 * 8


class FlashBlock(nn.Module):
    """Its backward is that of a flash kernel, and next to nothing else."""

    def __init__(self, num_kv_heads: int) -> None:
        super().__init__()
        self.scale, self.num_kv_heads = nn.LayerNorm(1), num_kv_heads

    def forward(self, x: Tensor) -> Tensor:
        query = x * self.scale.weight
        key = query[:, : self.num_kv_heads]
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, key, 0.0, True)[0]


class FlashStack(nn.Module):
    def __init__(self, num_kv_heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FlashBlock(num_kv_heads) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def test_workspaces_of_flash_attention() -> None:
    x = torch.empty(1, 4, 1024, 64, device="meta", dtype=BF16)
    rises = []
    for num_kv_heads in (4, 1):
        model = meta_copy(FlashStack(num_kv_heads).to(BF16))
        traced = trace_step(model, find_blocks(model), partial(model, x)).trace
        last = next(s for s in traced.segments if s.block == 1 and s.backward)
        rises.append(last.peak_bytes)
    # gradients of query, key and value, that of the query in fp32 too, and a sum a row;
    # one head for four: those of key and value are small, and made for each of the four
    rows = 4 * x.numel() // x.shape[-1]
    assert rises == [5 * x.nbytes + rows, 5.5 * x.nbytes + rows]


def test_gradients_are_those_of_the_real_step() -> None:
    model = stack(tie=True)
    freeze(model, ["embed", "norm", "extra"])
    trace = trace_stack(model)
    found = {name: nbytes for s in trace.segments for name, nbytes in s.gradients}
    model(batches(1)[0]).backward()
    real = {n: p.grad.nbytes for n, p in model.named_parameters() if p.grad is not None}
    assert found == real
    assert all(s.backward for s in trace.segments if s.gradients)


# values


class Asks(nn.Module):
    """A block list, and a question put to the tokens or to the weights."""

    def __init__(self, ask: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)
        )
        self.ask = ask

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.ask(tokens, x).sum()


TOKENS = torch.tensor([[1, 2, 0, 3], [4, 0, 0, 5]])


def on_device(tokens: Tensor, x: Tensor) -> Tensor:
    """The tokens where the model is, as a model moves them."""
    return tokens.to(x.device)


def by_position(tokens: Tensor, x: Tensor) -> Tensor:
    rows, columns = on_device(tokens, x).nonzero(as_tuple=True)
    return x[rows, columns]


def by_mask(tokens: Tensor, x: Tensor) -> Tensor:
    return x[on_device(tokens, x) != 0]


def by_count(tokens: Tensor, x: Tensor) -> Tensor:
    mask = (on_device(tokens, x) != 0).cumsum(-1)
    return x[:, : int(mask.max())]


def by_cpu(tokens: Tensor, x: Tensor) -> Tensor:
    lengths = (on_device(tokens, x) != 0).sum(-1).to("cpu").tolist()
    return torch.cat([row[:length] for row, length in zip(x, lengths, strict=True)])


def by_made(tokens: Tensor, x: Tensor) -> Tensor:
    ends = torch.tensor([0, 2, 3], device=x.device).tolist()
    return torch.cat([x[:, first:last] for first, last in pairwise(ends)], 1)


def by_branch(tokens: Tensor, x: Tensor) -> Tensor:
    return x[:1] if torch.equal(on_device(tokens, x)[0], TOKENS[0]) else x


def by_unique(tokens: Tensor, x: Tensor) -> Tensor:
    return x.flatten(0, 1)[: on_device(tokens, x).unique().numel()]


def emulated(copied: nn.Module) -> Tensor:
    with Emulation("cpu", None):
        return copied(TOKENS)


@pytest.mark.parametrize(
    "ask", [by_position, by_mask, by_count, by_cpu, by_made, by_branch, by_unique]
)
def test_small_integers_are_known(ask: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = Asks(ask)
    shapes = []
    model.ask = lambda tokens, x: shapes.append(ask(tokens, x).shape) or ask(tokens, x)
    model(TOKENS)
    copied = meta_copy(model)
    trace_step(copied, find_blocks(copied), lambda: emulated(copied))
    real, traced = shapes
    assert real == traced


def routed(_tokens: Tensor, x: Tensor) -> Tensor:
    """Rows by expert, their numbers from a mask that was written through a view."""
    rows = x.flatten(0, 1)
    chosen = torch.zeros(len(rows), 5, dtype=torch.long, device=x.device)
    chosen[:, 1:].scatter_(1, rows.topk(2).indices, 1)
    sizes = chosen.sum(0).tolist()
    assert sizes[0] == 0 and min(sizes[1:]) > 0
    return torch.cat(rows.repeat(2, 1).split(sizes))


def branching(_tokens: Tensor, x: Tensor) -> Tensor:
    x = x if x.sum() > 0 else -x
    return x[:, : int(x.argmax()) + 1] * x.max().item() + sum(x.flatten().tolist())


@pytest.mark.parametrize("ask", [routed, branching, lambda _tokens, x: x[x > 0]])
def test_a_value_of_the_weights_is_drawn(ask: Any) -> None:
    copied = meta_copy(Asks(ask))
    before, rng = state_of(copied), torch.get_rng_state()
    first, second = (
        trace_step(copied, find_blocks(copied), lambda: emulated(copied))
        for _ in range(2)
    )
    assert first.drew and first.trace == second.trace
    assert state_of(copied) == before and torch.equal(rng, torch.get_rng_state())


def test_what_no_weight_decides_is_not_drawn() -> None:
    copied = meta_copy(Asks(by_unique))
    traced = trace_step(copied, find_blocks(copied), lambda: emulated(copied))
    assert not traced.drew


# autocast and attention


class Tensors(TorchDispatchMode):
    """Shapes and dtypes of what operators make, casts apart."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []
        self.casts: Counter = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        note(self, func, output)
        return output


class MetaTensors(MetaMode):
    """The same for a run without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []
        self.casts: Counter = Counter()

    def ran(self, func: Any, args: Any, output: Any) -> None:
        note(self, func, output)


def note(seen: Tensors | MetaTensors, func: Any, output: Any) -> None:
    if func.is_view:
        return
    outputs = output if isinstance(output, (tuple, list)) else (output,)
    described = tuple(
        (tuple(t.shape), t.dtype) for t in outputs if isinstance(t, Tensor)
    )
    if func is torch.ops.aten._to_copy.default:
        # operands may be cast in any order, and before or after they are reshaped
        seen.casts[outputs[0].numel(), outputs[0].dtype] += 1
    else:
        seen.made.append((func, described))


class Multiheaded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class Calls(nn.Module):
    """A function of the input and one weight [16, 16]."""

    def __init__(self, call: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, self.weight)


def attend(x: Tensor, weight: Tensor, **settings: Any) -> Tensor:
    q, k, v = (x @ weight).unflatten(-1, (4, 4)).transpose(1, 2).expand(3, 2, 4, 6, 4)
    return F.scaled_dot_product_attention(q, k, v, **settings)


def causal_mask(dtype: torch.dtype, device: torch.device) -> Tensor:
    mask = torch.ones(6, 6, dtype=torch.bool, device=device).tril()
    if dtype == torch.bool:
        return mask
    empty = torch.zeros(6, 6, dtype=dtype, device=device)
    return empty.masked_fill(~mask, -torch.inf)


CALLS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(16, 8),
    "two uses of a weight": lambda: Calls(lambda x, w: x @ w @ w),
    "matmul": lambda: Calls(torch.matmul),
    "bmm": lambda: Calls(lambda x, w: torch.bmm(x, w.expand(2, 16, 16))),
    "baddbmm": lambda: Calls(lambda x, w: torch.baddbmm(x, x, w.expand(2, 16, 16))),
    "einsum": lambda: Calls(lambda x, w: torch.einsum("bsi,io->bso", x, w)),
    "softmax": lambda: Calls(lambda x, w: F.softmax(x @ w, -1)),
    "log_softmax": lambda: Calls(lambda x, w: F.log_softmax(x @ w, -1)),
    "layer_norm": lambda: nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)),
    "rms_norm": lambda: Calls(
        lambda x, w: (x @ w) * (x @ w).pow(2).mean(-1, True).rsqrt()
    ),
    "gelu": lambda: nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)),
    "cross_entropy": lambda: Calls(
        lambda x, w: F.cross_entropy(
            (x @ w).flatten(0, 1), torch.arange(12, device=x.device) % 16
        )
    ),
    "mse": lambda: Calls(lambda x, w: F.mse_loss(x @ w, x)),
    "mixed sum": lambda: Calls(lambda x, w: (x @ w) + x),
    "conv": lambda: Calls(
        lambda x, w: F.conv1d(x.transpose(1, 2), w[:, :, None], padding=0)
    ),
    "multihead": Multiheaded,
    "attention": lambda: Calls(attend),
    "causal attention": lambda: Calls(lambda x, w: attend(x, w, is_causal=True)),
    "masked attention": lambda: Calls(
        lambda x, w: attend(x, w, attn_mask=causal_mask(torch.bool, x.device))
    ),
    "biased attention": lambda: Calls(
        lambda x, w: attend(x, w, attn_mask=causal_mask(x.dtype, x.device))
    ),
    "attention with dropout": lambda: Calls(lambda x, w: attend(x, w, dropout_p=0.1)),
}


@pytest.mark.parametrize("autocast", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("call", CALLS)
def test_operators_are_those_of_real_autocast(
    call: str, autocast: torch.dtype | None
) -> None:
    """The same operators, shapes and dtypes, forward and backward."""
    model = CALLS[call]()
    copied = meta_copy(model)
    x = torch.randn(2, 6, 16)
    real = Tensors()
    with real:
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            output = model(x)
        output.float().sum().backward()
    meta = x.to("meta")
    traced = MetaTensors()
    with traced:
        with Emulation("cpu", autocast):
            output = copied(meta)
        output.float().sum().backward()
    assert traced.made == real.made
    assert traced.casts == real.casts


def test_a_weight_is_cast_once_in_a_region() -> None:
    layer = nn.Linear(16, 16, bias=False)
    copied = meta_copy(layer)
    x = torch.empty(2, 16, device="meta", dtype=BF16)
    seen = MetaTensors()
    emulation = Emulation("cpu", BF16)
    with seen:
        with emulation:
            copied(copied(copied(x)))
        with emulation:
            copied(x)
    # once a region
    assert seen.casts == Counter({(256, BF16): 2})
    frozen = meta_copy(layer.requires_grad_(False))
    seen = MetaTensors()
    with seen, emulation:
        frozen(frozen(x))
    # what takes no gradient is cast at every use, as torch does
    assert seen.casts == Counter({(256, BF16): 2})


SHAPES = [
    # heads, heads of keys, dim, dim of values
    (4, 4, 8, 8),
    (4, 2, 8, 8),
    (4, 4, 8, 16),
    (4, 1, 12, 12),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mask", [None, torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_keeps_what_torch_keeps(
    shape: tuple[int, ...], mask: torch.dtype | None, dropout: float, causal: bool
) -> None:
    """The kernel is the same if operators and saved bytes are."""
    if causal and mask is not None:
        mask = None
    heads, kv_heads, dim, value_dim = shape
    real = [
        torch.randn(2, *size, requires_grad=True)
        for size in ((heads, 6, dim), (kv_heads, 6, dim), (kv_heads, 6, value_dim))
    ]
    traced = [t.detach().to("meta").requires_grad_() for t in real]
    settings = {
        "dropout_p": dropout,
        "is_causal": causal,
        "enable_gqa": heads != kv_heads,
    }
    found = []
    for (q, k, v), mode in ((real, Tensors()), (traced, MetaTensors())):
        given = causal_mask(mask, q.device) if mask is not None else None
        saved: list[int] = []

        def pack(tensor: Tensor, saved: list[int] = saved) -> Tensor:
            saved.append(tensor.nbytes)
            return tensor

        keep = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
        with mode, keep, Emulation("cpu", None):
            F.scaled_dot_product_attention(q, k, v, given, **settings).sum()
        found.append((mode.made, sorted(saved)))
    assert found[0] == found[1]


class Positions(nn.Module):
    """Blocks that get one tensor by position, one by name, and one both ways."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: Tensor, both: Tensor, *, again: Tensor, named: Tensor):
            small = x[:1, :1].sin().cos()
            return self.linear(x + both + again + named).sin() * small

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x, both, named = x + 1, x + 2, x + 3
        for layer in self.layers:
            x = layer(x, both, again=both, named=named)
        return x.sum()


def test_what_can_be_swapped_is_told() -> None:
    with torch.device("meta"):
        model = Positions()
        rows = torch.ones(64, 32)
    trace = trace_step(model, find_blocks(model), lambda: model(rows)).trace
    inputs = [s for lifetime in trace.lifetimes for s in lifetime.saves if s.as_input]
    assert Counter((s.block, s.by_position) for s in inputs) == {
        (0, True): 1,
        (0, False): 1,
        (1, True): 1,
        (1, False): 1,
    }
    assert {lifetime.large for lifetime in trace.lifetimes} == {True, False}
    whole = rows.numel() * 4
    assert all(x.large == (x.nbytes >= whole) for x in trace.lifetimes)
    forward = next(s for s in trace.segments if s.block == 1)
    assert forward.dropped_peak_bytes < forward.swapped_peak_bytes < forward.peak_bytes


@pytest.mark.parametrize(
    ("enabled", "dtype"), [(False, torch.float32), (True, BF16)], ids=["off", "on"]
)
def test_a_region_on_meta_is_one_of_the_emulation(
    enabled: bool, dtype: torch.dtype
) -> None:
    """torch refuses it; libraries ask a tensor for the device of the region."""
    here = torch.ones(4, 4, device="meta")
    torch_own = torch.autocast
    with autocast_on_meta():
        with Emulation("cpu", BF16):
            with torch.autocast(device_type="meta", enabled=enabled):
                assert (here @ here).dtype is dtype
            assert (here @ here).dtype is BF16
        with torch.autocast(device_type="meta", enabled=enabled):
            assert (here @ here).dtype is torch.float32
        with torch.autocast("cpu", BF16):
            assert (torch.ones(4, 4) @ torch.ones(4, 4)).dtype is BF16
    assert torch.autocast is torch_own


class Chunked(nn.Module):
    """A loss with gradients of its own, compiled, as chunked losses have them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = stack()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.body.embed(tokens)
        for block in self.body.layers:
            hidden = block(hidden)
        # what layers that are skipped at random draw
        assert torch.rand([]) < 2

        def loss_of(hidden: Tensor) -> Tensor:
            return hidden.square().sum()

        @torch.compile(backend="eager")
        def gradient_and_loss(hidden: Tensor) -> tuple[Tensor, Tensor]:
            return torch.func.grad_and_value(loss_of)(hidden)

        return _Given.apply(hidden, *gradient_and_loss(hidden.detach()))


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, gradient: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0], None, None


def test_a_loss_with_its_own_gradient_is_traced_and_draws_nothing() -> None:
    copied = meta_copy(Chunked()).train()
    before = torch.get_rng_state()
    step = trace_step(
        copied, find_blocks(copied), lambda: copied(batches(1)[0].to("meta"))
    )
    assert torch.equal(before, torch.get_rng_state())
    assert sum(segment.backward for segment in step.trace.segments) > 1
    kept = sum(life.nbytes for life in step.trace.lifetimes if life.saves)
    assert kept > 0
