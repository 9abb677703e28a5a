"""Updates that take a chunk in pieces: large tensors are cut where the optimizer allows it."""

from __future__ import annotations

import importlib
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from core_models import (
    adamw,
    assert_same,
    batches,
    before_updates,
    open_session,
    slowly,
    stack,
    train,
    twin,
    wrapped,
)
from hypothesis import given, strategies as st
from simulated import DeferredDevice
from test_failures import FaultyDevice

from axolotl.integrations.protrain.core.engine.staging import views_of
from axolotl.integrations.protrain.core.errors import AccessError, LayoutError
from axolotl.integrations.protrain.core.layout import build_layout, pieces
from axolotl.integrations.protrain.core.types import Placement, Update

NUMEL = 192
"""Most matrices of the model are cut, and not into equal parts."""

OFFLOADED: dict[str, Any] = {"n_buffer": 1, "outside": Placement.OPTIMIZER_OFFLOADED}

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW, fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW, foreach, amsgrad": (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    "AdamW, capturable": (torch.optim.AdamW, {"foreach": False}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Rprop": (torch.optim.Rprop, {}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "SGD without state": (torch.optim.SGD, {}),
    # whole matrices: their rows and columns count
    "Adafactor": (torch.optim.Adafactor, {}),
}

SEVERAL: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"dtype": torch.bfloat16},
    "masters": {"dtype": torch.bfloat16, "fp32_master": True},
    "on the host": {"update": Update.HOST},
}


def optimizer_of(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    kind, options = OPTIMIZERS[name]
    made: Any = kind
    return made(model.parameters(), lr=1e-2, **options)


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, "fp32") for name in OPTIMIZERS]
    + [("AdamW, fused", how) for how in SEVERAL if how != "fp32"]
    + [("AdamW, foreach, amsgrad", "masters")],
)
@pytest.mark.sampled(9)
def test_training_in_pieces_is_training(name: str, how: str) -> None:
    """Losses, norms, weights and optimizer state, three steps and then a load of it."""
    options = dict(SEVERAL[how])
    dtype = options.pop("dtype", torch.float32)
    model = stack(width=24, dtype=dtype)
    plain = twin(model)
    masters = options.get("fp32_master", False)
    update = options.pop("update", Update.DEVICE)
    session = open_session(
        model, piece_numel=NUMEL, update=update, **OFFLOADED, **options
    )
    whole = twin(model) if masters else None
    ours = session.wrap_optimizer(optimizer_of(name, model))
    data = [batches(2, seed) for seed in range(4)]
    if whole is not None:
        # masters have no plain run: it is that of whole chunks
        other = open_session(whole, fp32_master=True, **OFFLOADED)
        theirs = other.wrap_optimizer(optimizer_of(name, whole))
        wanted = train(whole, theirs, data, other, clip=0.5)
        plain = whole
    else:
        theirs = optimizer_of(name, plain)
        wanted = train(plain, theirs, data, clip=0.5)
    assert train(model, ours, data, session, clip=0.5) == wanted
    assert_same(model.state_dict(), plain.state_dict())
    states, others = ours.state_dict()["state"], theirs.state_dict()["state"]
    assert list(states) == list(others)
    for index, state in states.items():
        assert_same(state, others[index])
    ours.load_state_dict(deepcopy(theirs.state_dict()))
    extra = [batches(1, 9)]
    again = train(plain, theirs, extra, other if whole is not None else None)
    assert train(model, ours, extra, session) == again
    session.close()
    assert_same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("fails_at", [1, 2, 7, 19, 20])
@pytest.mark.parametrize("paged", [True, False])
def test_a_piece_that_fails_is_made_again_alone(fails_at: int, paged: bool) -> None:
    """Pieces before it keep their update, and none is made twice."""
    model = stack(width=24)
    plain = twin(model)
    resident = () if paged else range(6)
    where = {**OFFLOADED, "resident": resident, "inside": Placement.OPTIMIZER_OFFLOADED}
    session = open_session(model, piece_numel=NUMEL, device=DeferredDevice(), **where)
    ours = session.wrap_optimizer(optimizer_of("AdamW, fused", model))
    theirs = optimizer_of("AdamW, fused", plain)
    data = [batches(1, seed) for seed in range(4)]
    wanted = train(plain, theirs, data)
    got = train(model, ours, data[:2], session)
    module = importlib.import_module(torch.optim.Adam.__module__)
    calls, kernel = 0, module.adam

    def adam(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            # some of the piece is updated, as when a temporary finds no room
            args[0][0].data.add_(1)
            raise torch.OutOfMemoryError("no room")
        kernel(*args, **kwargs)

    with patch.object(module, "adam", adam):
        with pytest.raises(torch.OutOfMemoryError):
            train(model, ours, data[2:], session)
        session.forget_gradients()
        got += train(model, ours, data[2:], session)
    assert got == wanted
    assert_same(model.state_dict(), plain.state_dict())
    for mine, other in zip(ours.state.values(), theirs.state.values(), strict=True):
        assert_same(mine, other)
    session.close()


def test_sums_that_were_added_to_make_room_for_the_next() -> None:
    """Only this sees a ring that is full of them, and memory that is taken beside it."""
    model, device = stack(width=24), FaultyDevice()
    session = open_session(model, device=device, piece_numel=NUMEL, **OFFLOADED)
    train(model, wrapped(session), [batches(2)], session)
    model(batches(1)[0]).backward()
    loss = model(batches(1)[0])
    device.arm("allocate", 1, RuntimeError("beside the ring"))
    loss.backward()
    session.close()


@given(st.integers(1, 500), st.booleans(), st.data())
def test_pieces_cover_a_span_once(numel: int, cuts: bool, data: st.DataObject) -> None:
    """Each element of a span is in one piece, in order, and no piece is larger than it
    has to be."""
    chunks = build_layout(stack()).chunks
    chunk = data.draw(st.sampled_from(chunks))
    start = data.draw(st.integers(0, len(chunk.tensors)))
    span = range(start, data.draw(st.integers(start, len(chunk.tensors))))
    found = pieces(chunk, span, cuts, numel)
    covered = []
    for piece in found:
        sizes = [chunk.tensors[index].numel for index in piece.span]
        if piece.elements is None:
            covered += [
                (i, slice(0, n)) for i, n in zip(piece.span, sizes, strict=True)
            ]
            assert sum(sizes) <= numel or len(sizes) == 1 and not cuts
        else:
            assert len(sizes) == 1
            covered.append((piece.span.start, piece.elements))
            assert piece.is_last == (piece.elements.stop == sizes[0])
    at = {index: 0 for index in span}
    for index, elements in covered:
        assert elements.start == at[index]
        at[index] = elements.stop
    assert [*at.values()] == [chunk.tensors[index].numel for index in span]
    assert [index for index, _ in covered] == sorted(index for index, _ in covered)


def test_an_update_on_the_host_waits_for_copies_that_compute_makes() -> None:
    """A load brings weights that stay to the device on compute's stream, which may still
    read the host copy when the next step's update writes it."""
    model = stack(width=24)
    plain = twin(model)
    session = open_session(
        model,
        device=DeferredDevice(),
        resident=range(6),
        inside=Placement.OPTIMIZER_OFFLOADED,
        update=Update.HOST,
        **OFFLOADED,
    )
    ours, theirs = wrapped(session), adamw(plain)
    for own, optimizer in ((model, ours), (plain, theirs)):
        own(batches(1)[0]).backward()
        own.load_state_dict({k: v.clone() for k, v in plain.state_dict().items()})
        optimizer.step()
    assert_same(model.state_dict(), plain.state_dict())
    session.close()


@pytest.mark.parametrize("update", Update, ids=str)
def test_a_last_piece_of_one_element(update: Update) -> None:
    """A count of steps has as many elements, and is no part of the parameter's."""
    model = stack(width=129, num_layers=2, inner=8)
    plain = twin(model)
    session = open_session(model, piece_numel=128, update=update, **OFFLOADED)
    ours, theirs = wrapped(session), adamw(plain)
    data = [batches(1, seed) for seed in range(3)]
    assert train(model, ours, data, session) == train(plain, theirs, data)
    for mine, other in zip(ours.state.values(), theirs.state.values(), strict=True):
        assert_same(mine, other)
    session.close()
    assert_same(model.state_dict(), plain.state_dict())


State = dict[str, Any]


def in_bf16(state: State) -> None:
    state["momentum_buffer"] = state["momentum_buffer"].bfloat16()


def in_fp64_in_place(state: State) -> None:
    state["momentum_buffer"].data = state["momentum_buffer"].double()


def other_memory(state: State) -> None:
    state["momentum_buffer"].data = state["momentum_buffer"] * 3
    state["momentum_buffer"].set_(state["momentum_buffer"] * 2)


def forgotten(state: State) -> None:
    state.clear()


def one_more(state: State) -> None:
    state["mine"] = torch.ones_like(state["momentum_buffer"])
    state["numbers"] = [torch.ones(3)]


CHANGES = in_bf16, in_fp64_in_place, other_memory, forgotten, one_more


@pytest.mark.parametrize("update", Update, ids=str)
@pytest.mark.parametrize("numel", [NUMEL, None], ids=["cut", "whole"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_somebody_puts_into_a_state_counts(
    change: Any, numel: int | None, update: Update
) -> None:
    """Of another dtype, in other memory, or where nothing was, as in the plain run."""
    model = stack(width=24)
    plain = twin(model)
    cut = {"piece_numel": numel} if numel else {}
    session = open_session(model, update=update, **cut, **OFFLOADED)
    results = []
    for own in (model, plain):
        options = {"lr": 1e-2, "momentum": 0.9, "foreach": False}
        used: Any = torch.optim.SGD(own.parameters(), **options)
        used = session.wrap_optimizer(used) if own is model else used
        losses = train(own, used, [batches(1), batches(1, 2)])
        for state in used.state.values():
            change(state)
        held = [state.get("momentum_buffer") for state in used.state.values()]
        losses += train(own, used, [batches(1, 3), batches(1, 4)])
        states = used.state_dict()["state"].values()
        results.append((losses, [*map(deepcopy, states)], held))
    (ours, mine, held), (theirs, others, kept) = results
    assert ours == theirs
    for state, other in zip(mine, others, strict=True):
        for name in state.keys() - {"numbers"}:
            assert_same({name: state[name]}, {name: other[name]})
    # as in the plain run the tensor itself is what is updated
    for tensor, other in zip(held, kept, strict=True):
        assert tensor is other is None or torch.equal(tensor, other)
    session.close()
    assert_same(model.state_dict(), plain.state_dict())


def test_one_tensor_for_two_parameters_is_refused() -> None:
    model = stack(width=24)
    session = open_session(model, **OFFLOADED)
    optimizer = wrapped(session)
    train(model, optimizer, [batches(1)])
    first, second = (
        optimizer.state[model.layers[number].up.weight] for number in (1, 2)
    )
    first["exp_avg"] = second["exp_avg"]
    with pytest.raises(AccessError, match="'exp_avg'|in two places"):
        train(model, optimizer, [batches(1, 2), batches(1, 3)])


@pytest.mark.parametrize("update", Update, ids=str)
@pytest.mark.parametrize("key", ["exp_avg", "step"])
def test_a_state_that_somebody_holds(key: str, update: Update) -> None:
    """A write counts once `state` has been asked for; before, it would come too early."""
    model = stack(width=24)
    plain = twin(model)
    session = open_session(model, update=update, piece_numel=NUMEL, **OFFLOADED)
    ours, theirs = wrapped(session), adamw(plain)
    for own, used in ((model, ours), (plain, theirs)):
        train(own, used, [batches(1)])
        held = [state[key] for state in used.state.values()]
        train(own, used, [batches(1, 2)])
        assert used.state
        for tensor in held:
            tensor.fill_(2.0)
        train(own, used, [batches(1, 3)])
    assert_same(model.state_dict(), plain.state_dict())
    held = [state[key] for state in ours.state.values()]
    with pytest.raises(AccessError, match=rf"'{key}'.*`optimizer.state`"):
        with before_updates(slowly):
            train(model, ours, [batches(1, 4)])
            for tensor in held:
                tensor.fill_(1.0)
            session.settle()


SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64])


@given(st.lists(st.tuples(SHAPES, DTYPES), min_size=1, max_size=6), st.integers(0, 3))
def test_views_are_the_bytes_at_their_places(
    tensors: list[tuple[tuple[int, ...], torch.dtype]], skipped: int
) -> None:
    """Only this sees a view that goes on in the bytes of another tensor."""
    places, end = [], 0
    for shape, dtype in tensors:
        places.append((end, shape, None, dtype))
        stop = end + torch.Size(shape).numel() * dtype.itemsize
        end = -(-stop // 16) * 16
    every = torch.arange(skipped * 16 + end + 64).to(torch.uint8)
    memory = every[skipped * 16 :][:stop]
    for (start, shape, _, dtype), found in zip(
        places, views_of(memory, places), strict=True
    ):
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        assert found.shape == shape and found.is_contiguous()
        own = found.reshape(-1).view(torch.uint8) if nbytes else memory[:0]
        assert torch.equal(own, memory[start:][:nbytes])
        assert not nbytes or found.data_ptr() == memory[start:].data_ptr()
    if stop > places[-1][0]:
        with pytest.raises(LayoutError, match="end later"):
            views_of(memory[:-1], places)
