"""A session from open to close: equal numbers, addresses, stale reads, hooks."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import transformers
from checked_device import RaceError
from core_models import (
    HOST_STATE,
    Stack,
    adamw,
    assert_same,
    batches,
    checked,
    freeze,
    hook_counts,
    make_plan,
    open_session,
    stack,
    train,
    twin,
    weights,
    wrapped,
)
from odd_models import TIES
from simulated import DeferredDevice
from torch import Tensor, nn

from axolotl.integrations.protrain.core.engine.session import Session
from axolotl.integrations.protrain.core.engine.step import Step
from axolotl.integrations.protrain.core.errors import AccessError
from axolotl.integrations.protrain.core.layout import (
    Direction,
    aligned,
    build_layout,
    slot_bytes,
)
from axolotl.integrations.protrain.core.layout.tensors import shared_bytes
from axolotl.integrations.protrain.core.types import Placement

# the same numbers


def test_gradients_that_have_arrived_leave_the_device_before_the_next_forward() -> None:
    model, device = stack(), DeferredDevice()
    session = open_session(model, device=device)
    chunk_bytes = min(chunk.payload_bytes for chunk in session.layout.chunks)
    with session.watch():
        model(batches(1)[0]).backward()
        kept = device.used_bytes()
        # copies are done now, but nobody has asked
        device.synchronize()
        assert device.used_bytes() == kept
        model(batches(1)[0]).detach_()
        assert device.used_bytes() < kept - chunk_bytes
    session.close()


def ties(model: nn.Module) -> list[list[int]]:
    return shared_bytes([*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("outside", [Placement.RESIDENT, HOST_STATE])
@pytest.mark.parametrize("tie", TIES)
def test_what_shares_bytes_goes_on_sharing_them(tie: str, outside: Placement) -> None:
    model, plain = stack(width=32), stack(width=32)
    for net in (model, plain):
        TIES[tie](net)
    assert len(ties(model)) == 1
    session = open_session(model, outside=outside)
    # predictions count shared bytes once
    assert session.measured().device_placed_bytes == placed_bytes(session)
    data = [batches(2, seed) for seed in range(3)]
    ours = train(model, wrapped(session), data, session, clip=0.5)
    assert ours == train(plain, adamw(plain), data, clip=0.5)
    assert_same(model.state_dict(), plain.state_dict())
    with session.full_params():
        model.embed.weight.data.mul_(0.5)
        model.layers[5].up.weight.data.mul_(0.5)
    session.close()
    plain.embed.weight.data.mul_(0.5)
    plain.layers[5].up.weight.data.mul_(0.5)
    assert_same(model.state_dict(), plain.state_dict())
    assert ties(plain) == ties(model)


def placed_bytes(session: Session) -> int:
    """As a prediction counts weights that are placed, and slots."""
    layout, plan = session.layout, session.plan
    fixed = layout.fixed_frozen_bytes + layout.fixed_trainable_bytes
    pairs = [(c, plan.placements[c.index]) for c in layout.chunks]
    stay = (Placement.RESIDENT, HOST_STATE)
    fixed += sum(c.nbytes for c, placement in pairs if placement in stay)
    return fixed + sum(slot_bytes(layout, plan.placements, plan.n_buffer))


def test_meta_tensors_share_storages() -> None:
    """A dry run has no addresses."""
    first = torch.empty(8, 8, device="meta")
    assert shared_bytes([first, torch.empty(8, 8, device="meta"), first.t()]) == [
        [0, 2]
    ]
    assert not shared_bytes([first[:4], first[4:]])


def test_the_number_of_fetches_is_the_closed_form() -> None:
    """C + (2 m - 1)(C - S), where weights are updated in their slots too; beside them
    come gradient and state for each update, and the sum in each later micro-batch."""
    num_slots, steps, accumulate = 2, 3, 2
    data = [batches(accumulate, seed) for seed in range(steps)]
    for frozen in (True, False):
        model = stack()
        keep = freeze(model, ["extra"]) if frozen else ()
        session = open_session(model, keep, n_buffer=num_slots)
        train(model, wrapped(session), data, session)
        # the last updates bring their chunks once more
        num_fetches = session.counters.num_fetches
        session.settle()
        measured = session.measured()
        chunks = [c for c in session.layout.chunks if c.pageable]
        spare, sweeps = len(chunks) - num_slots, 2 * accumulate * steps
        assert num_fetches == len(chunks) + (sweeps - 1) * spare
        assert measured.num_misses == 1
        trained = [p for c in chunks for p in trained_params(model, c)]
        sums = 0 if frozen else sum(c.nbytes for c in chunks)
        # two moments and the count of steps, which is on the device for a fused AdamW
        state = 0 if frozen else sum(2 * aligned(p.nbytes, 16) + 16 for p in trained)
        assert measured.fetched_bytes == (
            measured.num_fetches * chunks[0].nbytes
            + steps * sums
            + (steps - 1) * state
            + steps * (accumulate - 1) * sums
        )
        gradients = sum(p.nbytes for p in trained)
        # each update sends weights and state home, the first one without its padding
        updated = 0 if frozen else sum(c.nbytes for c in chunks)
        made = 0 if frozen else sum(2 * p.nbytes + 4 for p in trained)
        assert measured.offloaded_bytes == (
            gradients * accumulate * steps
            + steps * updated
            + made
            + (steps - 1) * state
        )
        session.close()


def trained_params(model: nn.Module, chunk: Any) -> list[nn.Parameter]:
    params = dict(model.named_parameters())
    return [params[s.name] for s in chunk.tensors if params[s.name].requires_grad]


# addresses


def addresses(session: Session) -> dict[str, int]:
    params = dict(session.model.named_parameters())
    return {
        spec.name: params[spec.name].data_ptr()
        for index in session.plan.paged
        for spec in session.layout.chunks[index].tensors
    }


# what a stale read gives


def test_a_read_outside_its_window_is_wrong_or_poison() -> None:
    """After a forward that trains, slot 0 holds layer 4, smaller than layers 0 and 2."""
    model = stack(inner=[32, 32, 32, 32, 8, 32])
    truth = weights(model)
    session = open_session(model, n_buffer=2)
    model(batches(1)[0])
    params = dict(model.named_parameters())
    for name in ("extra", "norm.bias", "up.bias", "down.weight"):
        stale = params[f"layers.0.{name}"].data
        assert torch.equal(params[f"layers.4.{name}"].data, truth[f"layers.4.{name}"])
        assert name == "norm.bias" or not torch.equal(stale, truth[f"layers.0.{name}"])
    assert torch.equal(params["layers.0.extra"].data, truth["layers.4.extra"])
    # while the truth, and what is saved, stays the truth
    assert_same(model.state_dict(), truth)
    session.close()


def test_slots_are_poisoned_before_their_first_fetch() -> None:
    model = stack()
    session = open_session(model, n_buffer=2)
    assert all(p.isnan().all() for p in model.layers.parameters())
    session.close()


Break = Callable[[Stack, pytest.MonkeyPatch], None]


def opening(patch: pytest.MonkeyPatch, backward: bool) -> None:
    """Windows open in backward alone, or in forwards alone."""
    real = Step.before_block

    def some(pager: Step, block: int, direction: Direction) -> None:
        if (direction is Direction.BACKWARD) == backward:
            real(pager, block, direction)

    patch.setattr(Step, "before_block", some)


def without_forward_window(_model: Stack, patch: pytest.MonkeyPatch) -> None:
    """The first forward then reads what was never fetched."""
    opening(patch, backward=True)


def without_backward_window(_model: Stack, patch: pytest.MonkeyPatch) -> None:
    """Backward then reads whatever its slots were left with."""
    opening(patch, backward=False)


@pytest.mark.parametrize(
    ("break_it", "frozen"),
    [
        (without_forward_window, True),
        (without_forward_window, False),
        (without_backward_window, True),
        (without_backward_window, False),
    ],
)
def test_a_broken_run_does_not_equal_plain(
    break_it: Break, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the parity tests can fail: one thing is taken away at a time."""
    model = stack()
    keep = freeze(model, ["extra", "embed"]) if frozen else ()
    plain = twin(model)
    session = open_session(model, keep)
    optimizer = wrapped(session)
    break_it(model, monkeypatch)
    data = [batches(1, seed) for seed in range(3)]
    ours: list[float] = []
    # not watched: operators outside a window would raise
    with suppress(AccessError):
        ours = train(model, optimizer, data)
    assert ours != train(plain, adamw(plain), data)
    session.close()


@pytest.mark.parametrize("break_it", [without_forward_window, without_backward_window])
def test_an_operator_outside_its_window_raises(
    break_it: Break, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stack()
    session = open_session(model, freeze(model, ["extra", "embed"]))
    optimizer = wrapped(session)
    break_it(model, monkeypatch)
    with pytest.raises(RaceError, match="outside its window"):
        train(model, optimizer, [batches(1)] * 2, session)
    session.close()


# nothing foreign is changed


def surface(model: nn.Module) -> list[Any]:
    """What other code can see of a model."""
    return [
        [(name, id(m), type(m)) for name, m in model.named_modules()],
        [(name, id(p), p.requires_grad) for name, p in model.named_parameters()],
        [(name, b.shape) for name, b in model.named_buffers()],
        [(name, t.shape, t.dtype) for name, t in model.state_dict().items()],
        # DESIGN.md, rule 9: a block's call
        [
            sorted(set(vars(m)) - {"training", "_compiled_call_impl"})
            for m in model.modules()
        ],
        [sorted(vars(p)) for p in model.parameters()],
    ]


def test_the_model_looks_the_same() -> None:
    model = stack(tie=True)
    before, hooks = surface(model), hook_counts(model)
    threads = set(threading.enumerate())
    session = open_session(model, recompute=(0, 1), outside=HOST_STATE)
    optimizer = wrapped(session)
    assert surface(model) == before
    train(model, optimizer, [batches(2)], session)
    assert surface(model) == before
    assert hook_counts(model) != hooks
    assert not session.closed
    session.close()
    session.close()
    assert session.closed
    assert surface(model) == before
    assert not any("_compiled_call_impl" in vars(m) for m in model.modules())
    assert hook_counts(model) == hooks
    assert set(threading.enumerate()) <= threads
    assert all(p.device.type == "cpu" and p.grad is None for p in model.parameters())


def test_close_frees_the_slots() -> None:
    """No tensor refers to their memory, though the session is still there."""

    def in_slots() -> int:
        return sum(
            type(item) in (Tensor, nn.Parameter)
            and item.device.type == "cpu"
            and item.untyped_storage().data_ptr() in slots
            for item in gc.get_objects()
        )

    model = stack()
    session = open_session(model)
    slots = {layer.up.weight.untyped_storage().data_ptr() for layer in model.layers}
    assert len(slots) == 2 and in_slots() > 0
    train(model, wrapped(session), [batches(1)], session)
    session.close()
    gc.collect()
    assert in_slots() == 0
    assert session.closed


# unusual blocks


# real models


def llama(**more: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        **more,
    )
    return transformers.LlamaForCausalLM(config)


def test_generate_equals_plain_and_moves_nothing() -> None:
    model = llama()
    plain = twin(model)
    session = open_session(model, outside=HOST_STATE)
    optimizer = wrapped(session)
    opened = addresses(session)
    (prompt,) = batches(1)
    outputs = []
    for own in (plain, model):
        own.eval()
        tokens = own.generate(prompt, max_new_tokens=5, do_sample=False)
        outputs.append(tokens)
    assert torch.equal(*outputs)
    assert addresses(session) == opened
    llama_step(model, optimizer)
    assert addresses(session) == opened
    session.close()


def llama_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    model.train()
    (tokens,) = batches(1)
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_layout_and_plan_must_fit() -> None:
    """A plan for another layout does not get as far as the model."""
    model, other = stack(), stack(num_layers=3)
    before = weights(model)
    layout = build_layout(model)
    with pytest.raises((ValueError, IndexError)):
        Session(model, layout, make_plan(build_layout(other)), checked())
    assert_same(model.state_dict(), before)
