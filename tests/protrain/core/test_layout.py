"""Parameters into chunks, and how many slots the chunks need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from core_models import layouts
from hypothesis import given, strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn

from axolotl.integrations.protrain.core.errors import ConfigError, LayoutError
from axolotl.integrations.protrain.core.layout import (
    ALIGNMENT_BYTES,
    build_layout,
    check_slots,
    find_blocks,
    has_vision_tower,
    slot_bytes,
    slot_floor,
    spread_order,
)
from axolotl.integrations.protrain.core.types import Layout, Placement


class Leaf(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


@st.composite
def parameters(draw: st.DrawFn) -> nn.Parameter:
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=3))
    if draw(st.integers(0, 9)) == 0:
        shape = [0]
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.uint8]
    dtype = draw(st.sampled_from(dtypes))
    trainable = dtype.is_floating_point and draw(st.booleans())
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=trainable)


@st.composite
def module_trees(draw: st.DrawFn, tie_outside: bool) -> nn.Module:
    """Leaves in blocks, in lists inside blocks and outside, some of them tied.

    Tied: another module with the same parameter, or the same module once more.
    """
    made: list[Leaf] = []

    def leaf(inside: bool) -> Leaf:
        may_tie = made and (inside or tie_outside)
        if may_tie and draw(st.integers(0, 4)) == 0:
            other = draw(st.sampled_from(made))
            return other if draw(st.booleans()) else Leaf(other.weight)
        module = Leaf(draw(parameters()))
        if inside or tie_outside:
            made.append(module)
        return module

    def block() -> nn.Module:
        module = nn.Module()
        for n in range(draw(st.integers(1, 4))):
            module.add_module(f"leaf{n}", leaf(True))
        if draw(st.booleans()):
            experts = [nn.Sequential(leaf(True)) for _ in range(2)]
            module.experts = nn.ModuleList(experts)
        return module

    model = nn.Module()
    model.embed = leaf(False)
    model.body = nn.Module()
    model.body.layers = nn.ModuleList(block() for _ in range(draw(st.integers(1, 4))))
    model.body.register_buffer("table", torch.zeros(draw(st.integers(0, 9))))
    if draw(st.booleans()):
        model.more = nn.ModuleList(block() for _ in range(draw(st.integers(1, 2))))
    model.head = leaf(False)
    return model


def registered_in(model: nn.Module) -> dict[int, set[str]]:
    """Names of all the modules that register each parameter, by its id."""
    owners: dict[int, set[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for param in module.parameters(recurse=False):
            owners.setdefault(id(param), set()).add(name)
    return owners


@given(module_trees(tie_outside=True), st.data())
def test_every_parameter_is_in_one_place(model: nn.Module, data: st.DataObject) -> None:
    params = dict(model.named_parameters())
    trained = sorted(name for name, p in params.items() if p.requires_grad)
    keep = data.draw(st.sets(st.sampled_from(trained)) if trained else st.just(set()))
    layout = build_layout(model, keep)

    specs = [spec for chunk in layout.chunks for spec in chunk.tensors]
    names = [spec.name for spec in specs]
    assert len(names) == len(set(names))
    assert not keep & set(names)
    for spec in specs:
        assert spec.shape == tuple(params[spec.name].shape)
        assert spec.dtype == params[spec.name].dtype
        assert spec.nbytes == params[spec.name].nbytes > 0

    fixed = {False: 0, True: 0}
    for name, param in params.items():
        if name not in names:
            fixed[param.requires_grad] += param.nbytes
            assert not param.requires_grad or name in keep or param.numel() == 0
    buffers = sum(b.nbytes for b in model.buffers())
    assert layout.fixed_frozen_bytes == fixed[False] + buffers
    assert layout.fixed_trainable_bytes == fixed[True]


@given(module_trees(tie_outside=True))
def test_chunks_are_uniform_and_aligned(model: nn.Module) -> None:
    params = dict(model.named_parameters())
    layout = build_layout(model)
    for position, chunk in enumerate(layout.chunks):
        assert chunk.index == position
        assert {params[s.name].requires_grad for s in chunk.tensors} == {
            chunk.trainable
        }
        end = 0
        for spec in chunk.tensors:
            assert spec.offset % ALIGNMENT_BYTES == 0
            assert end <= spec.offset < end + ALIGNMENT_BYTES
            end = spec.offset + spec.nbytes
        assert chunk.nbytes == end
        assert chunk.payload_bytes == sum(s.nbytes for s in chunk.tensors)


@given(module_trees(tie_outside=True))
def test_chunks_follow_the_blocks(model: nn.Module) -> None:
    layout = build_layout(model)
    in_blocks = [index for block in layout.blocks for index in block.chunks]
    assert in_blocks == list(range(len(layout.pageable)))
    for number, block in enumerate(layout.blocks):
        assert block.index == number
        assert all(layout.chunks[index].block == number for index in block.chunks)
    outside = layout.chunks[len(in_blocks) :]
    assert all(c.block is None and c.trainable for c in outside)
    assert all(len(c.tensors) == 1 for c in outside)


def assert_pages_only_its_own(model: nn.Module, layout: Layout) -> None:
    params = dict(model.named_parameters())
    owners = registered_in(model)
    for chunk in layout.pageable:
        inside = f"{layout.blocks[chunk.block].name}."
        for spec in chunk.tensors:
            assert all(
                owner.startswith(inside) for owner in owners[id(params[spec.name])]
            )


@given(module_trees(tie_outside=False))
def test_what_blocks_share_is_not_paged(model: nn.Module) -> None:
    assert_pages_only_its_own(model, build_layout(model))


@given(module_trees(tie_outside=True))
def test_what_is_read_outside_its_block_is_not_paged(model: nn.Module) -> None:
    assert_pages_only_its_own(model, build_layout(model))


TINY = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
}


def meta(name: str, config: Any) -> nn.Module:
    with torch.device("meta"):
        return getattr(transformers, name)(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_embd=16, n_layer=3, n_head=2, vocab_size=64)
    return meta("GPT2LMHeadModel", config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=64
    )
    return meta("T5ForConditionalGeneration", config)


def llava() -> nn.Module:
    vision = transformers.CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=transformers.LlamaConfig(**TINY)
    )
    return meta("LlavaForConditionalGeneration", config)


def lora() -> nn.Module:
    model = meta("LlamaForCausalLM", transformers.LlamaConfig(**TINY))
    return get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))


def text(name: str, config: str, **more: Any) -> Any:
    return lambda: meta(name, getattr(transformers, config)(**{**TINY, **more}))


def rows(prefix: str, count: int) -> list[str]:
    return [f"{prefix}.{n}" for n in range(count)]


MODELS = {
    "llama": (text("LlamaForCausalLM", "LlamaConfig"), rows("model.layers", 3)),
    "qwen3": (text("Qwen3ForCausalLM", "Qwen3Config"), rows("model.layers", 3)),
    "mistral": (text("MistralForCausalLM", "MistralConfig"), rows("model.layers", 3)),
    "gemma3": (
        text("Gemma3ForCausalLM", "Gemma3TextConfig"),
        rows("model.layers", 3),
    ),
    "phi3": (text("Phi3ForCausalLM", "Phi3Config"), rows("model.layers", 3)),
    "gpt2": (gpt2, rows("transformer.h", 3)),
    "mixtral": (
        text("MixtralForCausalLM", "MixtralConfig", num_local_experts=4),
        rows("model.layers", 3),
    ),
    "qwen3-moe": (
        text("Qwen3MoeForCausalLM", "Qwen3MoeConfig", num_experts=4),
        rows("model.layers", 3),
    ),
    "t5": (t5, rows("encoder.block", 2) + rows("decoder.block", 2)),
    "llava": (
        llava,
        rows("model.vision_tower.encoder.layers", 2)
        + rows("model.language_model.layers", 3),
    ),
    "lora": (lora, rows("base_model.model.model.layers", 3)),
}


@pytest.mark.parametrize("name", MODELS)
def test_blocks_of_known_models(name: str) -> None:
    build, expected = MODELS[name]
    model = build()
    found = find_blocks(model)
    assert [block for block, _ in found] == expected
    modules = dict(model.named_modules())
    assert all(modules[block] is module for block, module in found)

    layout = build_layout(model)
    assert_pages_only_its_own(model, layout)
    chunked = {s.name for c in layout.chunks for s in c.tensors if c.pageable}
    in_blocks = {
        param
        for param, _ in model.named_parameters()
        if any(param.startswith(f"{block}.") for block in expected)
    }
    assert chunked == in_blocks
    assert has_vision_tower(model) == (name == "llava")


def test_lora_keeps_its_adapters_when_told() -> None:
    model = lora()
    adapters = {name for name, p in model.named_parameters() if p.requires_grad}
    layout = build_layout(model, adapters)
    assert not any(chunk.trainable for chunk in layout.chunks)
    assert len(layout.pageable) == len(layout.blocks) == 3
    assert layout.fixed_trainable_bytes == sum(
        p.nbytes for name, p in model.named_parameters() if name in adapters
    )


def test_adapters_whose_state_may_wait_are_a_chunk_of_each_block() -> None:
    model = lora()
    adapters = {name for name, p in model.named_parameters() if p.requires_grad}
    layout = build_layout(model, adapters=adapters)
    own = [chunk for chunk in layout.chunks if chunk.adapter]
    assert {spec.name for chunk in own for spec in chunk.tensors} == adapters
    assert [layout.blocks[c.block].chunks[-1] for c in own] == [c.index for c in own]
    assert not any(chunk.pageable for chunk in own) and len(layout.pageable) == 3
    assert layout.fixed_trainable_bytes == layout.num_fixed_trainable == 0


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]),
        nn.ModuleList([nn.Sequential(nn.ReLU()), nn.Sequential(nn.Tanh())]),
    ],
    ids=["no list", "list of leaves", "no parameters"],
)
def test_a_model_without_blocks_is_refused(model: nn.Module) -> None:
    with pytest.raises(LayoutError, match="protrain_auto_memory: false"):
        build_layout(model)


@given(st.integers(0, 100), st.floats(0.1, 1.0))
def test_every_prefix_of_the_order_is_spread(total: int, share: float) -> None:
    order = spread_order(total)
    assert sorted(order) == list(range(total))
    chosen = sorted(order[: max(1, int(share * total))])
    ends = [-1, *chosen, total]
    widest = max(b - a for a, b in zip(ends, ends[1:], strict=False))
    # no stretch is longer than three times the average
    assert widest <= 3 * (total + 1) / (len(chosen) + 1) + 1


@st.composite
def placed_layouts(draw: st.DrawFn) -> tuple[Layout, tuple[Placement, ...]]:
    layout = draw(layouts())
    return layout, tuple(
        draw(st.sampled_from([Placement.RESIDENT, Placement.PARAM_OFFLOADED]))
        if chunk.pageable
        else Placement.RESIDENT
        for chunk in layout.chunks
    )


def runs(layout: Layout, placements: tuple[Placement, ...], n_buffer: int) -> bool:
    """Whether each block's chunks sit in different slots, by looking at every pair."""
    numbers = {
        chunk.index: number
        for number, chunk in enumerate(
            c for c in layout.chunks if placements[c.index] is Placement.PARAM_OFFLOADED
        )
    }
    for block in layout.blocks:
        used = [numbers[c] % n_buffer for c in block.chunks if c in numbers]
        if len(used) != len(set(used)):
            return False
    return True


@given(placed_layouts())
def test_slot_floor_is_the_fewest_that_run(
    placed: tuple[Layout, tuple[Placement, ...]],
) -> None:
    layout, placements = placed
    floor = slot_floor(layout, placements)
    num_paged = placements.count(Placement.PARAM_OFFLOADED)
    if not num_paged:
        assert floor == 0
        return
    running = [n for n in range(1, num_paged + 1) if runs(layout, placements, n)]
    assert running[0] == floor
    assert running == list(range(floor, num_paged + 1))


@given(placed_layouts(), st.integers(0, 20))
def test_check_slots_allows_what_runs(
    placed: tuple[Layout, tuple[Placement, ...]], n_buffer: int
) -> None:
    layout, placements = placed
    num_paged = placements.count(Placement.PARAM_OFFLOADED)
    if num_paged:
        legal = 0 < n_buffer <= num_paged and runs(layout, placements, n_buffer)
    else:
        legal = n_buffer == 0
    if legal:
        check_slots(layout, placements, n_buffer)
        return
    floor = slot_floor(layout, placements)
    with pytest.raises(ConfigError, match=f"range {floor} to {num_paged}"):
        check_slots(layout, placements, n_buffer)


@given(placed_layouts(), st.integers(1, 20))
def test_slot_bytes_hold_the_largest_of_each_slot(
    placed: tuple[Layout, tuple[Placement, ...]], n_buffer: int
) -> None:
    layout, placements = placed
    largest = [0] * n_buffer
    number = 0
    for chunk, placement in zip(layout.chunks, placements, strict=True):
        if placement is Placement.PARAM_OFFLOADED:
            slot = number % n_buffer
            largest[slot] = max(largest[slot], chunk.nbytes)
            number += 1
    assert slot_bytes(layout, placements, n_buffer) == tuple(largest)


@given(placed_layouts(), st.integers(1, 20), st.integers(2, 9))
def test_slots_of_shards_are_whole_shards_of_pages(
    placed: tuple[Layout, tuple[Placement, ...]], n_buffer: int, shards: int
) -> None:
    layout, placements = placed
    whole = slot_bytes(layout, placements, n_buffer)
    for plain, shared in zip(
        whole, slot_bytes(layout, placements, n_buffer, shards), strict=True
    ):
        assert shared % (4096 * shards) == 0
        assert plain <= shared < plain + 4096 * shards
    assert slot_bytes(layout, placements, n_buffer, 1) == whole
