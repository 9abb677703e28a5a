"""A model of packed weights trains paged as its unpacked twin does plain, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from core_models import (
    ALL,
    adamw,
    assert_same,
    batches,
    checked,
    make_plan,
    open_session,
    packed_stack,
    train,
    wrapped,
)
from simulated import DeferredDevice
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from axolotl.integrations.protrain.core.engine.host_pool import HostPool
from axolotl.integrations.protrain.core.engine.session import Session
from axolotl.integrations.protrain.core.engine.slots import Slot, Transport
from axolotl.integrations.protrain.core.errors import AccessError, LayoutError
from axolotl.integrations.protrain.core.layout import (
    build_layout,
    moves as moves_module,
    padded_bytes,
)
from axolotl.integrations.protrain.core.layout.packed import (
    Packed,
    stored_bytes,
)

PLANS: dict[str, dict[str, Any]] = {
    "fewest slots": {"n_buffer": 2},
    "more slots": {"n_buffer": 5},
    "recompute": {"n_buffer": 3, "recompute": ALL},
    "swap": {"n_buffer": 2, "swap": (0, 1, 2)},
    "some stay": {"n_buffer": 2, "resident": (0, 1, 4), "recompute": (1, 3)},
    "all stay": {"n_buffer": 0, "resident": range(12)},
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most weights come in several pieces."""
    monkeypatch.setattr(moves_module, "PIECE_NUMEL", 700)


def packed_names(of: nn.Module) -> set[str]:
    return {name for name, param in of.named_parameters() if isinstance(param, Packed)}


def plain(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in state.items()}


def assert_trains_the_same(
    own: Any, session: Session, steps: int = 3, other: Any = None
) -> None:
    other = other or packed_stack(False)
    optimizer, others = wrapped(session), adamw(other)
    data = [batches(2, seed) for seed in range(steps)]
    wanted = train(other, others, data, clip=0.5)
    assert train(own, optimizer, data, session, clip=0.5) == wanted
    assert_same(plain(own.state_dict()), other.state_dict())
    for ours, theirs in zip(
        optimizer.state_dict()["state"].values(),
        others.state_dict()["state"].values(),
        strict=True,
    ):
        assert_same(ours, theirs)


@pytest.mark.parametrize("plan", PLANS)
def test_it_trains_as_its_unpacked_twin(plan: str) -> None:
    own = packed_stack()
    session = open_session(own, **PLANS[plan])
    assert not packed_names(own)
    assert_trains_the_same(own, session)
    session.close()


@pytest.mark.parametrize("seed", range(3))
def test_copies_and_unpacking_may_come_late(seed: int) -> None:
    """Each piece is unpacked before its scratch buffer has the next, however late it is."""
    own, device = packed_stack(), DeferredDevice(seed)
    session = open_session(own, device=device, n_buffer=3, recompute=(1, 4))
    assert_trains_the_same(own, session, 2)
    session.close()
    device.close()


def test_the_host_and_the_link_have_packed_bytes_only() -> None:
    own = packed_stack()
    layout = build_layout(own)
    frozen = [chunk for chunk in layout.chunks if not chunk.trainable]
    stored = sum(chunk.in_pool.nbytes for chunk in frozen)
    weights = [p for p in own.parameters() if isinstance(p, Packed)]
    saved = sum(weight.nbytes - stored_bytes(weight) for weight in weights)
    assert sum(chunk.in_pool.payload_bytes for chunk in frozen) == (
        sum(chunk.payload_bytes for chunk in frozen) - saved
    )
    session = open_session(own, n_buffer=2)
    trained = sum(padded_bytes(c, 1) for c in layout.chunks if c.block is not None)
    trained -= sum(chunk.nbytes for chunk in frozen)
    assert session.measured().host_arena_bytes < stored + trained + 4096 * 12
    before = session.measured().fetched_bytes
    with torch.no_grad():
        own(batches(1)[0])
    fetched = session.measured().fetched_bytes - before
    assert fetched == stored + trained
    session.close()


def test_a_closed_model_is_packed_as_it_came() -> None:
    own, other = packed_stack(), packed_stack()
    names = packed_names(own)
    session = open_session(own, n_buffer=2, resident=(0,))
    train(own, wrapped(session), [batches(1)], session)
    session.close()
    assert packed_names(own) == names == packed_names(other)
    for name in names:
        ours, theirs = own.get_parameter(name), other.get_parameter(name)
        assert torch.equal(ours.contiguous(), theirs.contiguous())
    # and may be opened again
    session = open_session(own, n_buffer=2)
    train(own, wrapped(session), [batches(1)], session)
    session.close()


def test_slots_are_gone_once_a_session_is_closed() -> None:
    """Though who keeps the session keeps the parameters that have seen them."""
    own, slots = packed_stack(), []

    def look(layer: Any, *_: Any) -> None:
        slots.append(StorageWeakRef(layer.up.weight.untyped_storage()))

    for layer in own.layers:
        layer.register_forward_hook(look)
    session = open_session(own, n_buffer=2)
    with torch.no_grad():
        own(batches(1)[0])
    session.close()
    assert slots and all(slot.expired() for slot in slots)


def test_a_replan_brings_packed_bytes_back_to_the_host() -> None:
    own = packed_stack()
    session = open_session(own, n_buffer=2, resident=range(4))
    optimizer = wrapped(session)
    other = packed_stack(False)
    others = adamw(other)
    data = [batches(2, seed) for seed in range(2)]
    assert train(own, optimizer, data, session) == train(other, others, data)
    session.replan(make_plan(session.layout, n_buffer=3, recompute=(2,)))
    assert train(own, optimizer, data, session) == train(other, others, data)
    assert_same(plain(own.state_dict()), other.state_dict())
    session.close()


# what others see


def during(own: Any) -> Iterator[dict[str, Tensor]]:
    """The state while blocks compute, forward and backward."""
    seen = []
    handles = [
        layer.register_forward_hook(lambda *_: seen.append(own.state_dict()))
        for layer in own.layers
    ]
    loss = own(batches(1)[0])
    loss.backward()
    for handle in handles:
        handle.remove()
    yield from seen


def test_the_state_is_true_at_any_moment_and_takes_no_room() -> None:
    own, other = packed_stack(), packed_stack(False)
    session = open_session(own, n_buffer=2)
    wanted = other.state_dict()
    for state in (own.state_dict(), *during(own)):
        assert {n for n, t in state.items() if isinstance(t, Packed)} == packed_names(
            packed_stack()
        )
        assert_same(plain(state), wanted)
    kept = own.state_dict(keep_vars=True)
    assert_same({n: t.detach().contiguous() for n, t in kept.items()}, wanted)
    session.close()


def test_full_params_show_values_and_take_no_writes() -> None:
    own, other = packed_stack(), packed_stack(False)
    session = open_session(own, n_buffer=2)
    with session.full_params():
        shown = {n: p.detach().contiguous() for n, p in own.named_parameters()}
        assert_same(shown, {n: p.detach() for n, p in other.named_parameters()})
        with pytest.raises(LayoutError, match="packed"), torch.no_grad():
            own.layers[0].mix.mul_(2)
    assert_trains_the_same(own, session, 2)
    session.close()


def test_another_tensor_in_place_of_a_packed_weight_is_refused() -> None:
    own = packed_stack()
    session = open_session(own, n_buffer=2)
    with pytest.raises(AccessError, match=r"layers\.1\.mix: somebody put another"):
        with session.full_params():
            own.layers[1].mix = nn.Parameter(torch.ones(2, 32, 64).bfloat16())
    session.close()


def test_data_that_somebody_sets_is_refused() -> None:
    own = packed_stack()
    session = open_session(own, n_buffer=2)
    with pytest.raises(AccessError, match=r"layers\.1\.mix: somebody put another"):
        with session.full_params():
            own.layers[1].mix.data = own.layers[1].mix.data * 2
    assert_trains_the_same(own, session, 1)
    session.close()


def test_a_weight_that_stays_may_be_written_and_is_plain_afterwards() -> None:
    own, other = packed_stack(), packed_stack(False)
    session = open_session(own, n_buffer=0, resident=range(12))
    for each in (own, other):
        with session.full_params(), torch.no_grad():
            each.layers[1].mix.mul_(2)
    assert_trains_the_same(own, session, 1, other)
    session.close()
    assert_same(plain(own.state_dict()), other.state_dict())
    assert packed_names(own) == packed_names(packed_stack()) - {"layers.1.mix"}


def test_a_copy_of_a_paged_model_is_packed_and_computes_the_same() -> None:
    own = packed_stack()
    session = open_session(own, n_buffer=2)
    wanted = own(batches(1)[0])
    copied = deepcopy(own)
    assert packed_names(copied) == packed_names(packed_stack())
    assert torch.equal(copied(batches(1)[0]), wanted)
    assert_trains_the_same(own, session, 2)
    session.close()


def test_packed_bytes_have_no_gradient() -> None:
    own = packed_stack()
    own.layers[2].up.weight.requires_grad = True
    with pytest.raises(LayoutError, match=r"layers\.2\.up\.weight: a packed weight"):
        build_layout(own)


def test_a_slot_that_is_taken_before_its_use_is_unpacked_in_order() -> None:
    """A chunk that was fetched ahead and is not wanted leaves no piece behind."""
    own = packed_stack()
    first, second = (c for c in build_layout(own).pageable[:4] if not c.trainable)
    device, pool = checked(DeferredDevice()), HostPool()
    pool.add([first, second])
    weights = dict(own.named_parameters())
    for chunk in (first, second):
        for spec in chunk.tensors:
            home: Any = pool.tensor(chunk.index, spec)
            weight: Any = weights[spec.name]
            pairs = [(home, weight)] if spec.form is None else weight.copies_to(home)
            for target, source in pairs:
                target.copy_(source.detach())
    transport = Transport(device)
    transport.reserve([first, second])
    slot = Slot(device.allocate(first.nbytes), device, transport)
    for number, chunk in enumerate((second, first, second)):
        slot.fetch(chunk.index, pool.share(chunk), [*moves_module.moves_of(chunk)])
        if number == 0:
            slot.begin_use()
            slot.end_use()
    slot.begin_use()
    for spec in second.tensors:
        there = slot.buffer[spec.offset : spec.offset + spec.nbytes].view(spec.dtype)
        wanted = weights[spec.name].detach().contiguous().view(-1)
        assert torch.equal(there, wanted), spec.name
    slot.end_use()
