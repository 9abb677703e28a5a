"""Who looks at weights and gradients between two passes sees and changes the true ones."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from core_models import (
    ALL,
    HOST_STATE,
    adamw,
    assert_same,
    batches,
    before_updates,
    freeze,
    make_plan,
    open_session,
    slowly,
    stack,
    train,
    twin,
    weights,
    wrapped,
)
from simulated import DeferredDevice
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from axolotl.integrations.protrain.core.engine.device import CpuDevice
from axolotl.integrations.protrain.core.engine.host_chunks import (
    GradPlaceholders,
    HostChunk,
    HostMemory,
    OffloadedGrad,
)
from axolotl.integrations.protrain.core.engine.host_pool import HostPool
from axolotl.integrations.protrain.core.engine.session import Session
from axolotl.integrations.protrain.core.errors import (
    AccessError,
    ConfigError,
    ProTrainError,
)
from axolotl.integrations.protrain.core.layout import build_layout
from axolotl.integrations.protrain.core.types import Update

PLANS: dict[str, dict[str, Any]] = {
    "paged": {"n_buffer": 2},
    "head on the host": {"n_buffer": 2, "outside": HOST_STATE, "recompute": (0, 2)},
    "weights stay": {"resident": (0, 2, 5), "inside": HOST_STATE},
    "all weights stay": {"resident": ALL, "inside": HOST_STATE, "outside": HOST_STATE},
}

MOMENTS = {
    "event of a callback": "Shown: weights, gradients and state are true, writes count. On "
    "several ranks state is refused outside of `gathered_state`.",
    "hook of an optimizer's step": "Shown, before and after a step, global hooks too.",
    "scheduler of somebody else's": "Shown while it is made and in its steps.",
    "closure of a step": "Refused.",
    "hook of an optimizer's state": "Refused where the host has state: those of "
    "`state_dict` and `load_state_dict`.",
    "hook of a tensor": "Sees and may change the gradient of a micro-batch, and sees its "
    "block's weights, unless the tensor is what the block returns. A computation with "
    "`.grad`, the sum so far, is refused.",
    "hook of an accumulated gradient": "Refused, at opening or where it computes.",
    "hook of a module, forward or backward": "Sees the weights of its block and those "
    "outside of blocks. `full_params` is refused, and so is a write to a paged weight; "
    "weights of other blocks are not there, which nobody notices.",
    "any other code between passes": "Has to enter `full_params`. A write outside is an "
    "error in the next pass, a read is not noticed.",
}
"""Moments at which code of users may run while weights, gradients or state are not true,
and what it finds then; see Note [Who looks between two passes]."""

Act = Callable[[Any], Any]


def every_norm(model: nn.Module) -> list[float]:
    return [p.norm().item() for p in model.parameters()]


def decay(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.mul_(0.9)


@torch.no_grad()
def decay_in_place(model: nn.Module) -> None:
    for param in model.parameters():
        param.mul_(0.9)


def exchange_blocks(model: Any) -> None:
    pairs = zip(model.layers[0].parameters(), model.layers[3].parameters(), strict=True)
    for one, other in pairs:
        one.data, other.data = other.data, one.data


def run_it(model: nn.Module) -> float:
    """Numbers of a forward, and weights after it."""
    with torch.no_grad():
        loss = model(batches(1, seed=7)[0]).item()
    return loss + sum(every_norm(model))


def train_once(model: Any) -> list[float]:
    """A step of somebody's own, in the middle of the run's."""
    optimizer = model.optimizer[0]
    loss = model(batches(1, seed=9)[0])
    before = every_norm(model)
    loss.backward()
    numbers = [loss.item(), *before, *every_norm(model)]
    optimizer.step()
    numbers += every_norm(model)
    optimizer.zero_grad()
    return numbers


def ask_for_gradients(model: nn.Module) -> list[float]:
    """Without a backward pass that adds to them: for a penalty, a saliency map."""
    loss = model(batches(1, seed=8)[0])
    grads = torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)
    return [grad.norm().item() for grad in grads if grad is not None]


def one_block(model: Any) -> list[float]:
    """The numbers of a layer alone, and weights after it, which are written then."""
    with torch.no_grad():
        total = model.layers[2](torch.ones(1, 2, 16)).sum().item()
    norms = every_norm(model)
    decay(model)
    return [total, *norms]


def transpose(model: Any) -> None:
    """Other values at the same address."""
    for layer in model.layers:
        layer.up.weight.data = layer.up.weight.data.reshape(16, 32).t()


def load(model: nn.Module) -> None:
    model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})


def enlarge(model: Any) -> None:
    """Another module and parameter, as `resize_token_embeddings` makes them."""
    before = model.embed.weight
    model.embed = nn.Embedding(len(before) + 1, before.shape[1])
    with torch.no_grad():
        model.embed.weight.fill_(0.1)[:-1] = before


def functional(model: Any) -> float:
    """With weights given for a call."""
    given = {"weight": torch.ones_like(model.embed.weight)}
    tokens = batches(1)[0]
    return torch.func.functional_call(model.embed, given, (tokens,)).sum().item()


def copied(model: nn.Module) -> list[float]:
    """A copy that trains by itself, and is none of the original's business."""
    other = copy.deepcopy(model)
    loss = other(batches(1, seed=5)[0])
    loss.backward()
    state = other.state_dict()
    other.load_state_dict({name: value * 0 for name, value in state.items()})
    assert not any(every_norm(other))
    return [loss.item(), *every_norm(model)]


def gradient_norms(model: nn.Module) -> list[float | None]:
    grads = [p.grad for p in model.parameters()]
    return [g.norm().item() if g is not None else None for g in grads]


def clip_by_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def clip_by_norm(model: nn.Module) -> float:
    return nn.utils.clip_grad_norm_(model.parameters(), 1e-2).item()


def noise(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    for param in model.parameters():
        if param.grad is not None:
            param.grad.data.add_(torch.randn(param.shape, generator=generator))


def replace(model: Any) -> None:
    """Two gradients are others, one is none, one comes without backward."""
    model.layers[1].up.weight.grad = model.layers[1].up.weight.grad * 2
    model.head.weight.grad = torch.ones_like(model.head.weight)
    model.layers[2].norm.bias.grad = None
    model.layers[3].extra.grad = torch.ones_like(model.layers[3].extra)


def exchange_gradients(model: Any) -> None:
    one, other = model.layers[1].up.weight, model.layers[4].up.weight
    one.grad, other.grad = other.grad, one.grad


READS: dict[str, Act] = {
    "norms": every_norm,
    "forward": run_it,
    "functional": functional,
    "copy": copied,
    "gradients": ask_for_gradients,
}
WRITES: dict[str, Act] = {
    "decay": decay,
    "in place": decay_in_place,
    "exchange": exchange_blocks,
    "load": load,
    "one block": one_block,
    "transpose": transpose,
    "enlarge": enlarge,
    "train": train_once,
}
GRADIENTS: dict[str, Act] = {
    "norms": gradient_norms,
    "by value": clip_by_value,
    "by norm": clip_by_norm,
    "noise": noise,
    "replace": replace,
    "exchange": exchange_gradients,
}


def steps(
    model: Any,
    optimizer: torch.optim.Optimizer,
    acts: dict[str, Act],
    session: Session | None = None,
) -> list[Any]:
    """Two steps of two micro-batches, with acts at their moments; all numbers seen."""
    seen: list[Any] = []
    # a list, which is no part of the model's state
    model.optimizer = [optimizer]

    def at(moment: str) -> None:
        if moment not in acts:
            return
        if session is None:
            seen.append(acts[moment](model))
            return
        with session.full_params():
            seen.append(acts[moment](model))

    for step in range(2):
        at("begin")
        for tokens in batches(2, seed=step):
            model.layers[3].use_extra = False
            loss = model(tokens) / 2
            loss.backward()
            seen.append(loss.item())
            at("micro-batch")
        norm = session.clip_grad_norm(0.5) if session else None
        if norm is None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        seen.append(norm.item())
        at("gradients")
        optimizer.step()
        at("updated")
        model.zero_grad()
        at("end")
    return seen


def assert_like_plain(plan: str, acts: dict[str, Act]) -> None:
    model = stack()
    plain = twin(model)
    session = open_session(model, device=DeferredDevice(), **PLANS[plan])
    theirs = steps(plain, adamw(plain), acts)
    assert steps(model, wrapped(session), acts, session) == theirs
    assert_same(weights(model), weights(plain))
    session.close()
    assert_same(weights(model), weights(plain))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("act", READS)
@pytest.mark.sampled(10)
def test_what_is_read_is_true(act: str, plan: str) -> None:
    moments = ("begin", "micro-batch", "gradients", "updated", "end")
    assert_like_plain(plan, dict.fromkeys(moments, READS[act]))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("act", WRITES)
@pytest.mark.sampled(16)
def test_what_is_written_counts(act: str, plan: str) -> None:
    moments = ("begin", "end") if act == "train" else ("begin", "updated", "end")
    assert_like_plain(plan, dict.fromkeys(moments, WRITES[act]))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("act", GRADIENTS)
@pytest.mark.sampled(12)
def test_gradients_are_seen_and_changed(act: str, plan: str) -> None:
    acts = {"gradients": GRADIENTS[act], "end": gradient_norms}
    if act not in ("replace", "exchange"):
        acts |= {"micro-batch": GRADIENTS[act], "updated": GRADIENTS[act]}
    assert_like_plain(plan, acts)


def test_what_stays_on_the_device_is_current_once_a_session_has_settled() -> None:
    """Only this reads blocks that lie on the device and that the host updates."""
    model = stack()
    plain = twin(model)
    session = open_session(
        model, resident=(1, 4), inside=HOST_STATE, update=Update.HOST
    )
    with before_updates(slowly):
        train(model, wrapped(session), [batches(1)], session)
        session.settle()
        found = {n: p.clone() for n, p in model.layers[1].named_parameters()}
    train(plain, adamw(plain), [batches(1)])
    assert_same(found, dict(plain.layers[1].named_parameters()))
    session.close()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.sampled(2)
def test_a_master_keeps_its_low_bits_where_nobody_writes(plan: str) -> None:
    """Looking is nothing; a weight that is written is the master's new value."""
    runs = []
    reads = {"begin": every_norm, "gradients": gradient_norms}
    for acts, update in product(({}, reads), Update):
        model = stack(dtype=torch.bfloat16)
        session = open_session(model, fp32_master=True, update=update, **PLANS[plan])
        optimizer = wrapped(session, lr=1e-4)
        steps(model, optimizer, acts, session)
        up = model.layers[0].up.weight
        with session.full_params():
            up.data[0] = 3.0
        every = [p for group in optimizer.param_groups for p in group["params"]]
        (number,) = (n for n, param in enumerate(every) if param is up)
        master = optimizer.state_dict()["state"][number]["master"]
        assert (master[0] == 3.0).all() and (master[1] != master[1].bfloat16()).any()
        train(model, optimizer, [batches(1)], session)
        session.close()
        assert ((model.layers[0].up.weight[0] - 3.0).abs() < 0.1).all()
        runs.append(weights(model))
    for other in runs[1:]:
        assert_same(runs[0], other)


def test_what_is_written_into_a_frozen_base_is_fetched_again() -> None:
    """No update makes its slots stale."""
    model = stack()
    session = open_session(model, keep=freeze(model))
    wrapped(session)
    plain = twin(model)
    numbers = []
    for net in (model, plain):
        with torch.no_grad():
            net(batches(1)[0])
            with session.full_params():
                decay(net)
            numbers.append(net(batches(1)[0]).item())
    assert numbers[0] == numbers[1]
    session.close()


def test_a_foreign_hook_of_gradients_is_refused() -> None:
    """It would see those of one micro-batch, not their sum."""
    model = stack()
    handle = model.layers[1].up.weight.register_post_accumulate_grad_hook(print)
    with pytest.raises(AccessError, match=r"layers\.1\.up\.weight: .*hook"):
        open_session(model)
    handle.remove()


def test_a_copy_outside_of_weights_is_true() -> None:
    model = stack()
    plain = twin(model)
    session = open_session(model, outside=HOST_STATE)
    optimizer, theirs = wrapped(session), adamw(plain)
    for step in range(2):
        data = [batches(2, seed=step)]
        train(model, optimizer, data, session)
        train(plain, theirs, data)
        assert_same(weights(copy.deepcopy(model)), weights(plain))
        block = copy.deepcopy(model.layers[4])
        assert_same(weights(block), weights(plain.layers[4]))
        assert not any(p.isnan().any() for p in block.parameters())
        train(model, optimizer, data, session)
        train(plain, theirs, data)
        for net, step in ((model, optimizer), (plain, theirs)):
            net(data[0][0]).backward()
            copy.deepcopy(net)
            step.step()
            step.zero_grad()
        with pytest.raises(AccessError, match=r"layers\.4\.up\.weight.*cannot be"):
            copy.deepcopy(model.layers[4].up)
    session.close()
    assert_same(weights(model), weights(plain))


OUTSIDE: dict[str, Act] = {
    "in place": lambda model: model.layers[2].up.weight.mul_(0.5),
    "replaced": lambda model: setattr(
        model.layers[2].up.weight, "data", torch.ones(32, 16)
    ),
    "cast": lambda model: model.layers[2].double(),
}


@pytest.mark.parametrize("act", OUTSIDE)
def test_a_write_that_would_be_lost_is_an_error(act: str) -> None:
    model = stack()
    session = open_session(model)
    with torch.no_grad():
        OUTSIDE[act](model)
    for _ in range(2):
        # who catches it and goes on has lost it all the same
        with pytest.raises(AccessError, match=r"layers\.2\.\S+: somebody changed"):
            model(batches(1)[0])
    session.close()


@pytest.mark.parametrize("update", Update)
def test_a_weight_that_is_read_before_its_update_is_an_error(update: Update) -> None:
    """Between a step and the next forward a weight of a block is one step old."""
    model = stack()
    stays = {"resident": ALL, "inside": HOST_STATE, "outside": HOST_STATE}
    session = open_session(model, **stays, update=update)
    optimizer = wrapped(session)
    tokens = batches(1)[0]
    model(tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    penalty = model.layers[1].up.weight.pow(2).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (model(tokens) + penalty).backward()
    session.close()


def test_weights_change_in_value_only() -> None:
    model = stack()
    session = open_session(model)
    with (
        pytest.raises(AccessError, match="torch.float64 of shape"),
        session.full_params(),
    ):
        model.double()
    session.close()


def test_weights_are_shown_after_an_interrupt() -> None:
    """No hook says that the forward has ended, so a block in `full_params` is alone."""
    model = stack()
    session, (tokens,) = open_session(model, n_buffer=1), batches(1)
    before = [param.sum().item() for param in twin(model).parameters()]

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.norm.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(tokens)
    handle.remove()
    with session.full_params(), torch.no_grad():
        model.layers[0](model.embed(tokens))
        assert [param.sum().item() for param in model.parameters()] == before
    # and the next steps are whole
    model(tokens).backward()
    session.close()


USES: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda grad: grad.norm(),
    "data": lambda grad: grad.data.clamp_(-1, 1),
    "zeros": lambda grad: grad.zero_(),
}


@pytest.mark.parametrize("use", USES)
def test_a_gradient_on_the_host_is_no_number_elsewhere(use: str) -> None:
    model = stack()
    session = open_session(model)
    wrapped(session)
    model(batches(1)[0]).backward()
    grad = model.layers[1].up.weight.grad
    assert grad is not None and grad.shape == (32, 16)
    with pytest.raises(AccessError, match=r"layers\.1\.up\.weight: the gradient"):
        USES[use](grad)
    session.close()


def test_a_gradient_that_somebody_keeps_is_an_error() -> None:
    """A plain run's would stay what it is; here the next one takes its memory."""
    model = stack()
    session = open_session(model)
    optimizer, kept = wrapped(session), []
    model(batches(1)[0]).backward()
    with pytest.raises(AccessError, match=r"layers\.1\.\S+: somebody keeps"):
        with session.full_params():
            kept.append(model.layers[1].up.weight.grad.view(-1))
    kept.clear()
    optimizer.step()
    session.close()


def test_what_is_set_to_none_is_forgotten() -> None:
    """By `zero_grad` of the model between two micro-batches, outside of `full_params`, of
    the first block, too, for whose last gradient the others still wait on the device."""
    numbers = []
    for paged in (True, False):
        model = stack()
        model.layers[0].use_extra = False
        session = open_session(model, outside=HOST_STATE) if paged else None
        optimizer = wrapped(session) if session else adamw(model)
        for micro_batch, tokens in enumerate(batches(3)):
            model(tokens).backward()
            if micro_batch == 0:
                model.layers[2].up.weight.grad = model.layers[0].up.weight.grad = None
            if micro_batch == 1:
                model.zero_grad()
        model.layers[1].up.weight.grad = None
        optimizer.step()
        numbers.append(weights(model))
        if session:
            session.close()
    assert_same(*numbers)


def test_a_block_that_is_called_inside_computes_on_the_device() -> None:
    """The first one too, which backward leaves in use; on the host, a GPU could not."""
    model, seen = stack(), []
    session = open_session(model)
    layer = model.layers[0]
    layer.up.register_forward_pre_hook(lambda up, _: seen.append(up.weight.data_ptr()))
    model(batches(1)[0]).backward()
    with session.full_params():
        shown = layer.up.weight.data_ptr()
        layer(torch.ones(1, 16))
    assert len(seen) == 2 and shown not in seen
    session.close()


def test_nobody_looks_inside_a_pass() -> None:
    model = stack()
    session = open_session(model)

    def look(*_: Any) -> None:
        with session.full_params():
            pass

    handle = model.layers[1].up.register_forward_hook(look)
    with pytest.raises(AccessError, match="between two passes"):
        model(batches(1)[0])
    handle.remove()
    model(batches(1)[0]).backward()
    session.close()


def run_micro_batches(
    between: Callable[[Any, torch.optim.Optimizer], Any], plan: dict[str, Any]
) -> None:
    """Like plain, with an act of somebody between two micro-batches of each step."""
    numbers = []
    for paged in (True, False):
        model = stack()
        session = (
            open_session(model, device=DeferredDevice(), **plan) if paged else None
        )
        optimizer = wrapped(session) if session else adamw(model)
        for layer in model.layers:
            layer.use_extra = False
        for step in range(2):
            first, second = batches(2, seed=step)
            model(first).backward()
            between(model, optimizer)
            model(second).backward()
            optimizer.step()
            optimizer.zero_grad()
        numbers.append(weights(model))
        if session:
            session.close()
    assert_same(*numbers)


def set_all(model: nn.Module, *_: Any) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)


def update_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """No backward comes between two updates, of which one may still run."""
    optimizer.step()
    optimizer.zero_grad()
    set_all(model)
    optimizer.step()
    optimizer.zero_grad()


BETWEEN = {
    "asked for": lambda model, _: ask_for_gradients(model),
    "set": set_all,
    "by hand": update_by_hand,
}


@pytest.mark.parametrize("act", BETWEEN)
@pytest.mark.parametrize("plan", ("paged", "head on the host"))
def test_gradients_between_micro_batches_are_those_of_plain(
    act: str, plan: str
) -> None:
    run_micro_batches(BETWEEN[act], PLANS[plan])


AGAIN: dict[str, Act] = {
    "backward": lambda model: model(batches(1)[0]).backward(),
    "step": lambda model: model.optimizer[0].step(),
}


@pytest.mark.parametrize("act", AGAIN)
def test_a_gradient_is_used_by_one_update(act: str) -> None:
    """A plain run would add to it, or use it again; on the host it is gone."""
    model = stack()
    session = open_session(model)
    model.optimizer = [wrapped(session)]
    model(batches(1)[0]).backward()
    model.optimizer[0].step()
    with pytest.raises(AccessError, match=r"layers\.\d\.\S+: the gradient of the last"):
        AGAIN[act](model)
    session.close()


def test_a_gradient_of_a_gradient_is_refused() -> None:
    """It reads weights of blocks after their window."""
    model = stack()
    session = open_session(model)
    loss = model(batches(1)[0])
    with pytest.raises(AccessError, match="block 5 .*create_graph"):
        torch.autograd.grad(
            loss, [model.head.weight, model.embed.weight], create_graph=True
        )
    session.close()


def test_a_refused_write_leaves_the_others_counted() -> None:
    """Only this sees slots that keep what they had before a write."""
    model = stack()
    plain = twin(model)
    session = open_session(model)
    with torch.no_grad():
        model(batches(1)[0])
        # one of those that the slots still have
        with pytest.raises(AccessError, match="float64"), session.full_params():
            model.layers[3].up.weight.data = model.layers[3].up.weight.double()
            for layer in model.layers:
                layer.down.weight.mul_(3)
        for layer in plain.layers:
            layer.down.weight.mul_(3)
        assert model(batches(1)[0]).item() == plain(batches(1)[0]).item()
    session.close()


def test_gradients_of_a_pass_inside_are_numbers_where_all_blocks_stay() -> None:
    model = stack()
    plain = twin(model)
    session = open_session(model, resident=ALL, outside=HOST_STATE)
    wrapped(session)
    with session.full_params():
        for each in (model, plain):
            each(batches(1)[0]).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
    session.close()


def test_another_plan_while_something_is_shown() -> None:
    """What moves then is not where it was shown."""
    model = stack()
    plain = twin(model)
    session = open_session(model)
    optimizer, theirs = wrapped(session), adamw(plain)
    for recompute in ((1,), (2,)):
        plan = make_plan(session.layout, outside=HOST_STATE, recompute=recompute)
        copy.deepcopy(model)
        session.replan(plan)
        data = [batches(1)]
        assert train(model, optimizer, data, session) == train(plain, theirs, data)
        with session.full_params():
            session.replan(plan)
            assert every_norm(model) == every_norm(plain)
    session.close()
    assert_same(weights(model), weights(plain))


@pytest.mark.parametrize("plan", PLANS)
def test_gradients_are_clipped_where_they_are_shown(plan: str) -> None:
    model = stack()
    plain = twin(model)
    session = open_session(model, **PLANS[plan])
    wrapped(session)
    model(batches(1)[0]).backward()
    plain(batches(1)[0]).backward()
    with session.full_params():
        norm = session.clip_grad_norm(0.1)
        assert norm == nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert gradient_norms(model) == gradient_norms(plain)
        decay(model)
        # what is written counts, though nobody has left yet
        session.close()
    decay(plain)
    assert_same(weights(model), weights(plain))


def test_a_stand_in_is_where_its_parameter_is() -> None:
    """Weights of a GPU are on the host while they are shown, and torch takes no `.grad`
    of another device."""
    model = stack()
    chunk = build_layout(model).chunks[0]
    arena = HostPool()
    arena.add([chunk])
    memory = HostMemory(arena, CpuDevice())
    memory.add([chunk])
    shown = GradPlaceholders(HostChunk(chunk, dict(model.named_parameters()), memory))
    for index, (stand_in, param) in enumerate(
        zip(shown.placeholders, shown.host.params, strict=True)
    ):
        shown.placeholders[index] = OffloadedGrad(
            stand_in.parameter_name, param.to("meta")
        )
        shown.put(index)
        assert param.grad is shown.placeholders[index]


class Hooks:
    """What the hooks of somebody's have seen, in a run with or without a session."""

    def __init__(self, paged: bool, **plan: Any) -> None:
        self.model: Any = stack()
        self.plain = adamw(self.model)
        self.session: Session | None = None
        self.seen: list[Any] = []
        self.handles: list[Any] = []
        if paged:
            self.session = open_session(self.model, device=DeferredDevice(), **plan)
            self.session.wrap_optimizer(self.plain)

    def state(self) -> list[float]:
        # in the order in which the plain run has them
        return [s["exp_avg"].norm().item() for s in self.plain.state.values()]

    def look(self, *_: Any) -> None:
        self.seen += [every_norm(self.model), gradient_norms(self.model), self.state()]

    @torch.no_grad()
    def write(self, *_: Any) -> None:
        for own in self.plain.state.values():
            own["exp_avg"].mul_(0.5)
        decay_in_place(self.model)

    def train(self) -> list[Any]:
        for step in range(3):
            for tokens in batches(2, seed=step):
                self.model(tokens).backward()
            self.plain.step()
            self.plain.zero_grad()
        if self.session is not None:
            self.session.close()
        for handle in self.handles:
            handle.remove()
        return [*self.seen, *every_norm(self.model), self.state()]


def before_and_after(hooks: Hooks) -> None:
    hooks.plain.register_step_pre_hook(hooks.look)
    hooks.plain.register_step_post_hook(hooks.look)


def globally(hooks: Hooks) -> None:
    register = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
    hooks.handles += [one(hooks.look) for one in register]


def writing(hooks: Hooks) -> None:
    hooks.plain.register_step_post_hook(hooks.write)
    hooks.plain.register_step_post_hook(hooks.look)


def scaling_gradients(hooks: Hooks) -> None:
    def scale(*_: Any) -> None:
        for param in hooks.model.parameters():
            param.grad.mul_(0.1)

    hooks.plain.register_step_pre_hook(scale)


def averaging(hooks: Hooks) -> None:
    """As packages for moving averages do it."""
    averages: list[Tensor] = []

    @torch.no_grad()
    def average(*_: Any) -> None:
        if not averages:
            averages.extend(p.clone() for p in hooks.model.parameters())
        for mean, param in zip(averages, hooks.model.parameters(), strict=True):
            mean.lerp_(param, 0.1)
        hooks.seen.append([mean.norm().item() for mean in averages])

    hooks.plain.register_step_post_hook(average)


def looking_explicitly(hooks: Hooks) -> None:
    def look(*_: Any) -> None:
        with hooks.session.full_params() if hooks.session else nullcontext():
            hooks.look()

    hooks.plain.register_step_post_hook(look)


STEP_HOOKS: dict[str, Callable[[Hooks], None]] = {
    "before and after": before_and_after,
    "global": globally,
    "writing": writing,
    "scaling": scaling_gradients,
    "averaging": averaging,
    "explicitly": looking_explicitly,
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("hooks", STEP_HOOKS)
@pytest.mark.sampled(10)
def test_hooks_of_a_step_are_shown_all(hooks: str, plan: str) -> None:
    runs = []
    for paged in (True, False):
        run = Hooks(paged, **PLANS[plan])
        STEP_HOOKS[hooks](run)
        runs.append(run.train())
    assert runs[0] == runs[1]


@pytest.mark.parametrize("update", Update, ids=str)
@pytest.mark.parametrize("first", ("scheduler", "session"))
def test_a_step_that_a_scheduler_has_wrapped(first: str, update: Update) -> None:
    def run(paged: bool) -> list[Any]:
        model = stack()
        plain = adamw(model)
        if first == "scheduler":
            scheduler = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
        session = open_session(model, update=update) if paged else None
        if session is not None:
            assert session.wrap_optimizer(plain) is plain
        if first == "session":
            scheduler = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
        seen: list[Any] = []
        plain.register_step_post_hook(lambda *_: seen.append(every_norm(model)))
        with warnings.catch_warnings():
            # of a scheduler that has not seen the step
            warnings.simplefilter("error")
            for step in range(2):
                model(batches(1, seed=step)[0]).backward()
                plain.step()
                plain.zero_grad()
                scheduler.step()
        if session is not None:
            session.close()
            assert type(plain) is torch.optim.AdamW
        return [seen, every_norm(model), scheduler.get_last_lr()]

    assert run(True) == run(False)


def test_a_step_that_somebody_has_replaced_is_refused() -> None:
    model = stack()
    session, plain = open_session(model), adamw(model)
    plain.step = lambda: None
    with pytest.raises(ConfigError, match="`step` was replaced"):
        session.wrap_optimizer(plain)
    session.close()


def test_hooks_of_a_step_are_shown_a_frozen_base() -> None:
    """The optimizer is the plain one, of adapters that stay on the device."""

    def run(paged: bool) -> list[Any]:
        model = stack()
        keep = freeze(model)
        session = open_session(model, keep=keep) if paged else None
        plain = adamw(model)
        if session is not None:
            session.wrap_optimizer(plain)
        seen: list[Any] = []
        plain.register_step_post_hook(lambda *_: seen.append(every_norm(model)))
        train(model, plain, [batches(1)] * 2)
        if session is not None:
            session.close()
        return [seen, every_norm(model)]

    assert run(True) == run(False)


def test_who_looks_at_no_weights_costs_nothing() -> None:
    model = stack()
    session = open_session(model)
    paged = wrapped(session)

    class Blind:
        looks_at_weights = False

        def __call__(self, *_: Any) -> None:
            assert session._step.full_params.shown is None

    paged.register_step_pre_hook(Blind())
    paged.register_step_post_hook(Blind())
    train(model, paged, [batches(1)])
    session.close()


def in_closure(session: Session, paged: torch.optim.Optimizer) -> None:
    paged.step(lambda: 0.0)


def in_state(session: Session, paged: torch.optim.Optimizer) -> None:
    paged.register_state_dict_post_hook(lambda *_: None)
    paged.state_dict()


def in_load(session: Session, paged: torch.optim.Optimizer) -> None:
    state = paged.state_dict()
    paged.register_load_state_dict_pre_hook(lambda *_: None)
    paged.load_state_dict(state)


def accumulated(session: Session, paged: torch.optim.Optimizer) -> None:
    """Added while the session is open."""
    up: Any = session.model.get_parameter("layers.1.up.weight")
    up.register_post_accumulate_grad_hook(lambda param: param.grad.norm())
    session.model(batches(1)[0]).backward()


def sum_so_far(session: Session, paged: torch.optim.Optimizer) -> None:
    up: Any = session.model.get_parameter("layers.1.up.weight")
    up.register_hook(lambda _: up.grad.norm() if up.grad is not None else None)
    for tokens in batches(2):
        session.model(tokens).backward()


def inside_a_pass(session: Session, paged: torch.optim.Optimizer) -> None:
    def look(*_: Any) -> None:
        with session.full_params():
            pass

    session.model.get_submodule("layers.1.up").register_forward_hook(look)
    session.model(batches(1)[0])


def state_inside_a_pass(session: Session, paged: torch.optim.Optimizer) -> None:
    session.model.layers[1].register_forward_hook(lambda *_: paged.state_dict())
    session.model(batches(1)[0])


def between_passes(session: Session, paged: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        session.model.get_parameter("layers.2.up.weight").mul_(0.5)
    session.model(batches(1)[0])


REFUSED: dict[str, Any] = {
    "closure": (in_closure, "closure of a step", "a closure cannot"),
    "state": (
        in_state,
        "hook of an optimizer's state",
        "register_state_dict_post_hook",
    ),
    "load": (in_load, "hook of an optimizer's state", "register_load_state_dict_pre"),
    "accumulated": (
        accumulated,
        "hook of an accumulated gradient",
        r"1\.up\.weight: the",
    ),
    "sum so far": (
        sum_so_far,
        "hook of a tensor",
        r"layers\.1\.up\.weight: the gradient",
    ),
    "in a pass": (
        inside_a_pass,
        "hook of a module, forward or backward",
        "between two",
    ),
    "state in a pass": (
        state_inside_a_pass,
        "hook of a module, forward or backward",
        "between two",
    ),
    "between": (between_passes, "any other code between passes", "somebody changed"),
}


@pytest.mark.parametrize("act", REFUSED)
def test_who_would_not_see_the_truth_is_refused(act: str) -> None:
    model = stack()
    session = open_session(model, outside=HOST_STATE)
    optimizer = wrapped(session)
    train(model, optimizer, [batches(1)], session)
    does, moment, words = REFUSED[act]
    assert moment in MOMENTS
    with pytest.raises(ProTrainError, match=words):
        does(session, optimizer)
    session.close()


def look_at_block(hooks: Hooks, block: Any) -> None:
    weight, head = block.up.weight, hooks.model.head.weight

    def on_gradient(grad: Tensor) -> Tensor:
        hooks.seen.append([weight.norm().item(), grad.norm().item()])
        return grad * 0.5

    def in_module(*_: Any) -> None:
        hooks.seen.append([weight.norm().item(), head.norm().item()])

    weight.register_hook(on_gradient)
    for module in (block.up, block):
        module.register_forward_pre_hook(in_module)
        module.register_forward_hook(in_module)
    block.up.register_full_backward_hook(in_module)


@pytest.mark.parametrize("plan", ("paged", "weights stay", "all weights stay"))
def test_hooks_in_a_pass_see_their_block_and_change_gradients(plan: str) -> None:
    runs = []
    for paged in (True, False):
        run = Hooks(paged, **PLANS[plan])
        for layer in run.model.layers:
            look_at_block(run, layer)
        runs.append(run.train())
    assert runs[0] == runs[1] and len(runs[0]) > 100


def trial_step(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    """What the step would give, tried on copies."""
    own, trial = copy.deepcopy((model, optimizer))
    trial.step()
    return [p.norm().item() for p in own.parameters()]


def another_of_its_class(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    own = copy.deepcopy(model)
    trial = type(optimizer)(own.parameters(), lr=0.1)
    trial.step()
    trial.zero_grad()
    return [p.norm().item() for p in own.parameters()]


def saved_whole(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    own = pickle.loads(pickle.dumps(optimizer))
    assert type(own) is torch.optim.AdamW
    params = [param for group in own.param_groups for param in group["params"]]
    return [own.state[p]["exp_avg"].norm().item() for p in params if own.state.get(p)]


APART = {f.__name__: f for f in (trial_step, another_of_its_class, saved_whole)}


@pytest.mark.parametrize("plan", ("paged", "all weights stay", "resident"))
@pytest.mark.parametrize("act", APART)
@pytest.mark.parametrize("skips", (False, True))
def test_another_optimizer_of_this_class_is_a_plain_one(
    act: str, plan: str, skips: bool
) -> None:
    """Whoever has a copy of the run's steps that alone."""
    runs = []
    for paged in (True, False):
        model = stack()
        how = {"resident": ALL} if plan == "resident" else PLANS[plan]
        session = open_session(model, **how) if paged else None
        optimizer = wrapped(session) if session else adamw(model)
        seen: list[Any] = []
        for step in range(3):
            model(batches(1, seed=step)[0]).backward()
            norm = session.clip_grad_norm(0.5) if session else None
            if norm is None:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            with session.full_params() if session else nullcontext():
                seen.append(APART[act](model, optimizer))
                if skips:
                    model.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
        if session:
            session.close()
        runs.append([*seen, every_norm(model)])
    assert runs[0] == runs[1]


class GivesNone(torch.autograd.Function):
    """Takes a weight and gives no gradient of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@pytest.mark.parametrize("earlier", (False, True))
def test_a_weight_whose_node_gives_no_gradient_keeps_what_it_has(earlier: bool) -> None:
    model = stack()
    session = open_session(model)
    optimizer = wrapped(session)
    # the second pass adds to what the first has left
    train(model, optimizer, [batches(2)], session)
    layer = model.layers[1]
    if earlier:
        model(batches(1)[0]).backward()
        with session.full_params():
            before = layer.extra.grad.clone()
    layer.use_extra = False
    layer.register_forward_hook(lambda *args: GivesNone.apply(args[2], layer.extra))
    model(batches(1)[0]).backward()
    with session.full_params():
        assert (
            torch.equal(layer.extra.grad, before)
            if earlier
            else (layer.extra.grad is None)
        )
    session.close()
