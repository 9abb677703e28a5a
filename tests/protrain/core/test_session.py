"""A session from open to close: equal numbers, addresses, stale reads, hooks."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from checked_device import RaceError
from core_models import (
    ALL,
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
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
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

PLANS: dict[str, dict[str, Any]] = {
    "one slot": {"n_buffer": 1},
    "two slots": {"n_buffer": 2},
    "as many slots as chunks": {"n_buffer": 6},
    "mixed": {"resident": (0, 3), "n_buffer": 2},
    "recompute": {"n_buffer": 2, "recompute": ALL},
    "recompute some": {"n_buffer": 2, "resident": (1,), "recompute": (0, 1, 2)},
    "resident": {"resident": ALL, "recompute": (0, 5)},
    "resident, some state on the host": {"resident": (0, 2, 5), "inside": HOST_STATE},
}


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "full"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.sampled(10)
def test_training_equals_plain(plan: str, frozen: bool) -> None:
    model = stack()
    keep = freeze(model, ["extra"]) if frozen else ()
    plain = twin(model)
    session = open_session(model, keep, **PLANS[plan])
    optimizer = wrapped(session)
    data = [batches(2, seed) for seed in range(3)]
    theirs = train(plain, adamw(plain), data, clip=0.5)
    assert train(model, optimizer, data, session, clip=0.5) == theirs
    assert_same(model.state_dict(), plain.state_dict())
    session.close()
    assert_same(model.state_dict(), plain.state_dict())


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


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "full"])
def test_skipped_and_repeated_blocks_equal_plain(frozen: bool) -> None:
    """Layer drop, and a model that runs its layers twice, in any order."""
    model = stack()
    keep = freeze(model, ["extra"]) if frozen else ()
    plain = twin(model)
    session = open_session(model, keep, recompute=(1, 4))
    runs = ((plain, adamw(plain), None), (model, wrapped(session), session))
    drawn = random.Random(0)
    orders: list[list[int]] = [
        [n for n in ALL if drawn.random() < 0.6] for _ in "12345"
    ]
    orders += [[*ALL, *ALL], [3, 3, 0], drawn.sample(ALL, 6), list(ALL)]
    for step, order in enumerate(orders):
        numbers = []
        for own, optimizer, run in runs:
            own.order = order
            numbers.append(train(own, optimizer, [batches(2, step)], run))
        assert numbers[0] == numbers[1]
    assert_same(model.state_dict(), plain.state_dict())
    session.close()


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "full"])
def test_recompute_replays_what_forward_drew(frozen: bool) -> None:
    """Dropout and autocast, against a plain run that keeps its activations."""
    model = stack()
    for layer in model.layers:
        layer.norm = nn.Sequential(layer.norm, nn.Dropout(0.2))
    keep = freeze(model, ["extra"]) if frozen else ()
    plain = twin(model)
    session = open_session(model, keep, recompute=(0, 1, 4))
    numbers = []
    for own, optimizer in ((plain, adamw(plain)), (model, wrapped(session))):
        torch.manual_seed(3)
        losses = []
        for tokens in batches(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = own(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        numbers.append(losses)
    assert numbers[0] == numbers[1]
    assert_same(model.state_dict(), plain.state_dict())
    session.close()


@pytest.mark.parametrize("outside", [Placement.RESIDENT, HOST_STATE])
def test_tied_weights_are_stepped_once(outside: Placement) -> None:
    model = stack(tie=True)
    plain = twin(model)
    session = open_session(model, outside=outside)
    data = [batches(2, seed) for seed in range(3)]
    ours = train(model, wrapped(session), data, session, clip=0.5)
    assert ours == train(plain, adamw(plain), data, clip=0.5)
    assert model.head.weight is model.embed.weight
    assert_same(model.state_dict(), plain.state_dict())
    session.close()
    assert model.head.weight is model.embed.weight


def of_another(tensor: Tensor, requires_grad: bool = True) -> nn.Parameter:
    """A parameter of its own on bytes of another's."""
    return nn.Parameter(tensor.data, requires_grad)


def tie_whole(model: Any) -> None:
    """As Axolotl's `fix_untrained_tokens` leaves tied embeddings."""
    model.head.weight = of_another(model.embed.weight)


def tie_slice(model: Any) -> None:
    model.layers[1].up.weight = of_another(model.embed.weight[:32])


def tie_transpose(model: Any) -> None:
    model.layers[3].down.weight = of_another(model.layers[1].up.weight.t())


def tie_buffer(model: Any) -> None:
    model.register_buffer("scale", model.layers[0].extra.data[4:12])


def tie_frozen(model: Any) -> None:
    model.layers[4].up.weight = of_another(model.layers[5].up.weight, False)


def tie_both_frozen(model: Any) -> None:
    model.embed.weight.requires_grad = False
    model.head.weight = of_another(model.embed.weight, False)


def tie_expanded(model: Any) -> None:
    row = model.layers[2].up.bias[3:4].expand(16)
    model.layers[2].norm.bias = of_another(row, False)


TIES: dict[str, Callable[[Any], None]] = {
    "whole": tie_whole,
    "slice": tie_slice,
    "transpose": tie_transpose,
    "buffer": tie_buffer,
    "frozen": tie_frozen,
    "both frozen": tie_both_frozen,
    "expanded": tie_expanded,
}


def ties(model: nn.Module) -> list[list[int]]:
    return shared_bytes([*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("outside", [Placement.RESIDENT, HOST_STATE])
@pytest.mark.parametrize("tie", TIES)
def test_what_shares_bytes_goes_on_sharing_them(tie: str, outside: Placement) -> None:
    model, plain = stack(), stack()
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


@pytest.mark.parametrize("no_grad", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_steps_equals_plain(no_grad: Callable[[], Any]) -> None:
    model = stack()
    plain = twin(model)
    session = open_session(model, outside=HOST_STATE)
    runs = ((plain, adamw(plain), None), (model, wrapped(session), session))
    for step in range(3):
        numbers = []
        for own, optimizer, run in runs:
            losses = train(own, optimizer, [batches(1, step)], run)
            own.eval()
            with no_grad():
                losses += [own(tokens).item() for tokens in batches(2, 50 + step)]
            numbers.append(losses)
        assert numbers[0] == numbers[1]
    session.close()


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


def test_addresses_never_change() -> None:
    model = stack()
    session = open_session(model, recompute=(2, 3))
    optimizer = wrapped(session)
    opened = addresses(session)
    assert opened
    seen = []

    def look(*_: Any) -> None:
        seen.append(addresses(session) == opened)

    handles = [layer.register_forward_hook(look) for layer in model.layers]
    handles += [layer.up.register_full_backward_hook(look) for layer in model.layers]
    for step in range(2):
        train(model, optimizer, [batches(2, step)], session)
        with torch.no_grad():
            model(batches(1)[0])
        model.state_dict()
        model.load_state_dict(weights(model))
        look()
    for handle in handles:
        handle.remove()
    assert len(seen) > 40 and all(seen)
    session.close()
    assert not set(addresses(session).values()) & set(opened.values())


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
        # DESIGN.md, rule 10: a block's call
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


def test_a_closed_model_is_an_ordinary_one() -> None:
    model = stack()
    plain = twin(model)
    session = open_session(model)
    data = [batches(1, seed) for seed in range(4)]
    train(model, wrapped(session), data[:2], session)
    train(plain, adamw(plain), data[:2])
    session.close()
    assert train(model, adamw(model), data[2:]) == train(plain, adamw(plain), data[2:])
    assert_same(model.state_dict(), plain.state_dict())


def test_a_second_session_follows_the_first() -> None:
    model = stack()
    plain = twin(model)
    train(plain, adamw(plain), [batches(1)])
    train(plain, adamw(plain), [batches(1)])
    for plan in ({"n_buffer": 1}, {"n_buffer": 3, "recompute": ALL}):
        session = open_session(model, **plan)
        train(model, wrapped(session), [batches(1)], session)
        session.close()
    assert_same(model.state_dict(), plain.state_dict())


# unusual blocks


@pytest.mark.parametrize("recompute", [(), ALL], ids=["keep", "recompute"])
def test_parameters_of_a_block_that_are_read_outside_it(recompute: Any) -> None:
    """Head and norm are tied to weights of layer 0, one of them the layer's own."""

    def build() -> Stack:
        model = stack(width=16, inner=64)
        model.head.weight = model.layers[0].up.weight
        model.norm.weight = model.layers[0].extra
        return model

    model, plain = build(), build()
    session = open_session(model, n_buffer=1, recompute=recompute)
    data = [batches(1, seed) for seed in range(2)]
    ours = train(model, wrapped(session), data, session)
    assert ours == train(plain, adamw(plain), data)
    session.close()


class InPlace(nn.Module):
    """Writes into its input and returns it: the same tensor, made by another node."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.inner(x.clone()))


class HandOn(nn.Module):
    """Returns its input beside its output, as some models hand on a bias."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, given: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, first = given if isinstance(given, tuple) else (given, given)
        return self.inner(x + first), first


@pytest.mark.parametrize(
    ("kind", "recompute"),
    # a block that changes its input cannot be run again
    [(InPlace, ()), (HandOn, ()), (HandOn, ALL)],
)
def test_blocks_that_return_their_input(kind: type[nn.Module], recompute: Any) -> None:
    class Kinds(Stack):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            x = x[0] + x[1] if isinstance(x, tuple) else x
            return self.head(self.norm(x)).square().mean()

    torch.manual_seed(0)
    model = Kinds()
    model.layers = nn.ModuleList(kind(layer) for layer in model.layers)
    plain = twin(model)
    session = open_session(model, recompute=recompute)
    data = [batches(1, seed) for seed in range(3)]
    ours = train(model, wrapped(session), data, session)
    assert ours == train(plain, adamw(plain), data)
    session.close()


@dataclass
class Output:
    """Neither a tensor nor a tuple nor a mapping of them."""

    hidden: Tensor


class Boxed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor | Output) -> Output:
        return Output(self.inner(x.hidden if isinstance(x, Output) else x))


def test_blocks_may_return_a_dataclass() -> None:
    """Backward opens its windows where a block's tensors come out."""

    class Boxes(Stack):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.head(self.norm(x.hidden)).square().mean()

    torch.manual_seed(0)
    model = Boxes()
    model.layers = nn.ModuleList(Boxed(layer) for layer in model.layers)
    plain = twin(model)
    session = open_session(model)
    data = [batches(1, seed) for seed in range(3)]
    ours = train(model, wrapped(session), data, session)
    assert ours == train(plain, adamw(plain), data)
    session.close()


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


@pytest.mark.parametrize("recompute", [(), range(4)], ids=["keep", "recompute"])
def test_lora_equals_plain(recompute: Any) -> None:
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    models = [get_peft_model(twin(base), config) for base in (llama(), llama())]
    for model in models:
        torch.manual_seed(1)
        for name, param in model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(param, std=0.02)
    plain, model = models
    adapters = {n for n, p in model.named_parameters() if p.requires_grad}
    session = open_session(model, adapters, recompute=recompute)
    optimizers = adamw(plain), wrapped(session)
    for _ in range(3):
        theirs, ours = (
            llama_step(own, used) for own, used in zip(models, optimizers, strict=True)
        )
        assert ours == theirs
    assert session.measured().num_fetches > 0
    saved = [get_peft_model_state_dict(own) for own in (model, plain)]
    assert_same(*saved)
    # merging reads and writes the base's weights: an ordinary model again
    session.close()
    merged = [own.merge_and_unload().state_dict() for own in (model, plain)]
    assert_same(*merged)


def test_layout_and_plan_must_fit() -> None:
    """A plan for another layout does not get as far as the model."""
    model, other = stack(), stack(num_layers=3)
    before = weights(model)
    layout = build_layout(model)
    with pytest.raises((ValueError, IndexError)):
        Session(model, layout, make_plan(build_layout(other)), checked())
    assert_same(model.state_dict(), before)
