"""4-bit weights of bitsandbytes: packed bytes and scales page together, exactly."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from core_models import batches, checked, host_weight, open_session
from odd_models import DOUBLE, FORMATS, quantise, quantised_llama
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from axolotl.integrations.protrain.core.engine.session import Session
from axolotl.integrations.protrain.core.errors import LayoutError
from axolotl.integrations.protrain.core.layout import ALIGNMENT_BYTES, build_layout
from axolotl.integrations.protrain.core.layout.shards import PAGE_BYTES
from axolotl.integrations.protrain.core.types import Chunk, Placement

NUM_BLOCKS = 4
BLOCKS = range(NUM_BLOCKS)

PLANS: dict[str, dict[str, Any]] = {
    "two slots": {"n_buffer": 2},
    "half resident": {"resident": (1, 3), "n_buffer": 2},
    "resident": {"resident": BLOCKS},
}


def adapters(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def linears(model: nn.Module) -> dict[str, Any]:
    """Every layer in few bits by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt)
    }


def parts(layer: Any) -> dict[str, Tensor]:
    """Packed bytes and scales, named one by one: the code under test finds them."""
    if isinstance(layer, bnb.nn.Linear8bitLt):
        owner = layer.weight if layer.state.CB is None else layer.state
        assert owner.CB.data_ptr() == layer.weight.data_ptr()
        return {"weight": layer.weight.data, "scales": owner.SCB}
    state = layer.weight.quant_state
    found = {"weight": layer.weight.data, "absmax": state.absmax, "code": state.code}
    if state.nested:
        found["offset"] = state.offset
        found["absmax2"] = state.state2.absmax
        found["code2"] = state.state2.code
    return found


def all_parts(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{name}.{part}": tensor
        for name, layer in linears(model).items()
        for part, tensor in parts(layer).items()
    }


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def assert_same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        other = theirs[name]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
        bits = (t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, other))
        assert torch.equal(*bits), name


def steps(model: Any, num: int = 3) -> Iterator[tuple[float, dict[str, Tensor]]]:
    """Two micro-batches a step; after each step its loss and adapter gradients."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, fused=True)
    model.train()
    for step in range(num):
        total = 0.0
        for tokens in batches(2, step):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            total += loss.item()
        gradients = {name: p.grad.clone() for name, p in trained.items()}
        optimizer.step()
        optimizer.zero_grad()
        yield total, gradients


def assert_trains_the_same(model: Any, plain: Any) -> None:
    """Also when called again: the comparison goes on from where both are."""
    assert_same_steps(list(steps(model)), list(steps(plain)))
    assert_same_bits(model.state_dict(), plain.state_dict())


def assert_same_steps(ours: list[Any], theirs: list[Any]) -> None:
    for (loss, gradients), (wanted, plain) in zip(ours, theirs, strict=True):
        assert loss == wanted
        assert any(gradient.any() for gradient in plain.values())
        assert_same_bits(gradients, plain)


def frozen_chunk(session: Session, block: int) -> Chunk:
    (index,) = session.layout.blocks[block].chunks
    return session.layout.chunks[index]


def test_the_module_and_its_weight_keep_one_quant_state() -> None:
    model = quantised_llama(**DOUBLE)
    states = {name: layer.quant_state for name, layer in linears(model).items()}
    session = open_session(model, adapters(model))
    for _ in range(2):
        for name, layer in linears(model).items():
            assert layer.quant_state is layer.weight.quant_state is states[name]
        session.close()


# where the bytes are


@pytest.mark.parametrize("quantised_as", FORMATS)
def test_a_chunk_holds_packed_bytes_and_scales(quantised_as: str) -> None:
    model = quantised_llama(**FORMATS[quantised_as])
    wanted = [
        sum(
            t.nbytes for layer in linears(block).values() for t in parts(layer).values()
        )
        + sum(p.nbytes for n, p in block.named_parameters() if "norm" in n)
        for block in model.base_model.model.model.layers
    ]
    session = open_session(model, adapters(model))
    chunks = [frozen_chunk(session, block) for block in BLOCKS]
    assert [chunk.payload_bytes for chunk in chunks] == wanted
    num_tensors = sum(len(chunk.tensors) for chunk in chunks)
    gaps = session.measured().host_arena_bytes - sum(wanted)
    assert 0 <= gaps < num_tensors * ALIGNMENT_BYTES + len(chunks) * PAGE_BYTES
    names = [spec.name for chunk in chunks for spec in chunk.tensors]
    assert len(set(names)) == len(names)
    session.close()


@pytest.mark.parametrize("quantised_as", ["nf4-double", "int8"])
def test_nothing_of_a_paged_block_lies_outside_the_slots(quantised_as: str) -> None:
    model = quantised_llama(**FORMATS[quantised_as])
    # bitsandbytes itself keeps the one codebook of all double quantisations
    codebook = storage(bnb.functional.name2qmap["dynamic"])
    originals = [
        StorageWeakRef(tensor.untyped_storage())
        for tensor in all_parts(model).values()
        if storage(tensor) != codebook
    ]
    session = open_session(model, adapters(model), n_buffer=2, recompute=(0, 3))
    gc.collect()
    assert originals and all(original.expired() for original in originals)

    opened = {name: tensor.data_ptr() for name, tensor in all_parts(model).items()}
    slots = {storage(tensor) for tensor in all_parts(model).values()}
    assert len(slots) == 2
    seen = []

    def look(*_: Any) -> None:
        held = all_parts(model)
        assert {name: tensor.data_ptr() for name, tensor in held.items()} == opened
        seen.append({storage(tensor) for tensor in held.values()} == slots)

    handles = [layer.register_forward_hook(look) for layer in linears(model).values()]
    handles += [
        layer.register_full_backward_hook(look) for layer in linears(model).values()
    ]
    list(steps(model))
    model.state_dict()
    look()
    for handle in handles:
        handle.remove()
    assert len(seen) > 3 * 2 * len(linears(model)) and all(seen)
    session.close()
    assert not slots & {storage(tensor) for tensor in all_parts(model).values()}


def test_a_slot_without_its_chunk_is_poison_to_the_last_scale() -> None:
    model = quantised_llama(**DOUBLE)
    session = open_session(model, adapters(model))
    for name, tensor in all_parts(model).items():
        assert (tensor.reshape(-1).view(torch.uint8) == 0xFF).all(), name
    session.close()


def test_resident_weights_take_their_scales_along() -> None:
    model = quantised_llama(**DOUBLE)
    loaded = all_parts(model)
    original = copied(loaded)
    layout = build_layout(model, adapters(model))
    session = open_session(model, adapters(model), resident=BLOCKS)
    placed_at = {storage(tensor) for tensor in all_parts(model).values()}
    assert not placed_at & {storage(tensor) for tensor in loaded.values()}
    assert_same_bits(all_parts(model), original)
    placed = sum(chunk.payload_bytes for chunk in layout.chunks)
    fixed = layout.fixed_frozen_bytes + layout.fixed_trainable_bytes
    assert session.measured().device_peak_bytes == placed + fixed
    session.close()


def test_quantised_weights_outside_blocks_are_fixed_with_their_scales() -> None:
    model = quantised_llama(adapter=False, **DOUBLE)
    before = build_layout(model)
    dense = model.lm_head.weight.nbytes
    model.lm_head = quantise(model.lm_head, **DOUBLE)
    after = build_layout(model)
    wanted = sum(tensor.nbytes for tensor in parts(model.lm_head).values())
    assert after.chunks == before.chunks
    assert after.fixed_frozen_bytes == before.fixed_frozen_bytes - dense + wanted


@pytest.mark.parametrize("quantised_as", FORMATS)
def test_the_layout_needs_no_weights(quantised_as: str) -> None:
    real = quantised_llama(adapter=False, **FORMATS[quantised_as])
    with torch.device("meta"):
        meta = quantised_llama(adapter=False, **FORMATS[quantised_as])
    assert {tensor.device.type for tensor in all_parts(meta).values()} == {"meta"}
    assert build_layout(meta) == build_layout(real)


# reading the state


def test_the_state_is_that_of_the_host_at_any_moment() -> None:
    """Double quantisation saves its offset as a number, read while it is asked for."""
    plain = quantised_llama(**DOUBLE)
    model = quantised_llama(**DOUBLE)
    session = open_session(model, adapters(model), n_buffer=2)
    frozen = {
        name: tensor.clone()
        for name, tensor in plain.state_dict().items()
        if "lora_" not in name
    }
    assert any(name.endswith("quant_state.bitsandbytes__nf4") for name in frozen)
    seen = []

    def read(*_: Any) -> None:
        state = model.state_dict()
        assert_same_bits({name: state[name] for name in frozen}, frozen)
        seen.append(state)

    layers = model.base_model.model.model.layers
    handles = [layer.mlp.register_forward_hook(read) for layer in layers]
    handles += [layer.mlp.register_full_backward_hook(read) for layer in layers]
    assert_trains_the_same(model, plain)
    for handle in handles:
        handle.remove()
    assert len(seen) == 3 * 2 * 2 * NUM_BLOCKS
    held = seen[-1]
    slots = {storage(tensor) for tensor in all_parts(model).values()}
    assert not slots & {storage(tensor) for tensor in held.values()}
    session.close()
    # a state that was read outlives the session
    assert_same_bits({name: held[name] for name in frozen}, frozen)


def test_the_state_of_one_layer_and_every_host_weight() -> None:
    model = quantised_llama(**DOUBLE)
    original = copied(all_parts(model))
    session = open_session(model, adapters(model))
    assert_same_bits(
        {
            spec.name: host_weight(session, spec.name)
            for block in BLOCKS
            for spec in frozen_chunk(session, block).tensors
            if spec.name.endswith("absmax") and "state2" not in spec.name
        },
        {
            f"{name.removesuffix('.absmax')}.weight.quant_state.absmax": tensor
            for name, tensor in original.items()
            if name.endswith(".absmax")
        },
    )
    name, layer = next(iter(linears(model).items()))
    state = layer.state_dict()
    assert torch.equal(state["weight.nested_absmax"], original[f"{name}.absmax2"])
    session.close()


def test_a_saved_base_loads_again(tmp_path: Any) -> None:
    model = quantised_llama(adapter=False, **DOUBLE)
    trained = "model.norm.weight"
    model.get_parameter(trained).requires_grad = True
    wanted = copied(model.state_dict())
    session = open_session(model, [trained])
    model.save_pretrained(tmp_path)
    session.close()
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "model.safetensors")
    assert_same_bits(
        dict(sorted(saved.items())),
        dict(sorted((name, wanted[name]) for name in saved)),
    )
    assert set(wanted) - set(saved) == set()


# what bitsandbytes binds anew by itself


def test_a_bias_that_is_cast_in_forward_stays_on_the_device() -> None:
    plain = quantised_llama(torch.bfloat16, bias=True, **DOUBLE)
    model = quantised_llama(torch.bfloat16, bias=True, **DOUBLE)
    biases = {name for name, _ in model.named_parameters() if name.endswith(".bias")}
    fp32 = {name: p.data for name, p in model.named_parameters() if name in biases}
    assert len(biases) == 4 * NUM_BLOCKS
    session = open_session(model, adapters(model), n_buffer=2)
    paged = {spec.name for b in BLOCKS for spec in frozen_chunk(session, b).tensors}
    assert paged and not paged & biases
    assert_trains_the_same(model, plain)
    session.close()
    for name, old in fp32.items():
        # bitsandbytes did bind it anew: were it paged, it would be lost
        assert torch.equal(model.get_parameter(name).data, old.bfloat16())


def evaluate(model: Any) -> list[float]:
    model.eval()
    with torch.no_grad():
        return [model(input_ids=t, labels=t).loss.item() for t in batches(2, 9)]


def let_repack(model: nn.Module, may: bool = True) -> None:
    """What `Linear4bit` finds on a CPU with AVX512-BF16, or without."""
    for layer in linears(model).values():
        layer.support_avx512bf16_for_cpu = may


@pytest.mark.parametrize("plan", PLANS)
def test_evaluation_on_a_cpu_does_not_repack(plan: str) -> None:
    plain = quantised_llama(**DOUBLE)
    model = quantised_llama(**DOUBLE)
    let_repack(plain, False)
    let_repack(model)
    original = copied(all_parts(model))
    session = open_session(model, adapters(model), **PLANS[plan])
    addresses = {name: t.data_ptr() for name, t in all_parts(model).items()}
    for _ in range(2):
        assert_trains_the_same(model, plain)
        assert evaluate(model) == evaluate(plain)
        assert {n: t.data_ptr() for n, t in all_parts(model).items()} == addresses
    session.close()
    assert_same_bits(all_parts(model), original)
    assert all(layer.support_avx512bf16_for_cpu for layer in linears(model).values())


def repacked() -> Any:
    model = quantised_llama(adapter=False, **DOUBLE)
    layer = next(iter(linears(model).values()))
    layer.support_avx512bf16_for_cpu = True
    layer.eval()
    with torch.no_grad():
        layer(torch.ones(1, layer.in_features))
    return model


def with_one_state_for_two() -> Any:
    model = quantised_llama(adapter=False, **DOUBLE)
    one, other, *_ = linears(model).values()
    other.weight.quant_state = one.weight.quant_state
    return model


def with_a_trained_one() -> Any:
    model = quantised_llama(adapter=False, storage=torch.bfloat16, **DOUBLE)
    next(iter(linears(model).values())).weight.requires_grad = True
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (repacked, r"layers.0.*q_proj.weight: bitsandbytes has repacked"),
        (with_one_state_for_two, r"k_proj.weight and .*q_proj.weight share one"),
        (with_a_trained_one, r"q_proj.weight: a quantised weight is trainable"),
    ],
)
def test_what_cannot_follow_its_weight_is_refused(build: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        build_layout(build())


def test_adapters_alone_are_trained() -> None:
    """No paged chunk of these models has a gradient or an optimizer state."""
    model = quantised_llama(**DOUBLE)
    session = open_session(model, adapters(model))
    for block in BLOCKS:
        chunk = frozen_chunk(session, block)
        assert not chunk.trainable
        assert session.plan.placements[chunk.index] is Placement.PARAM_OFFLOADED
    session.close()


@pytest.mark.parametrize("quantised_as", FORMATS.values(), ids=FORMATS)
def test_watching_does_not_change_a_product(quantised_as: dict[str, Any]) -> None:
    """A layer that computes in fp32 under bf16 autocast, as of a base saved in 4 bits:
    bitsandbytes' kernel calls aten, which casts unless a mode is in the way."""
    layer = quantise(nn.Linear(64, 32, bias=False), **quantised_as)
    rows = torch.randn(3, 64)

    def product() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(rows)

    unwatched, device = product(), checked()
    with device.watch(already=0):
        watched = product()
    assert torch.equal(watched, unwatched)
    assert not torch.equal(watched, layer(rows))
