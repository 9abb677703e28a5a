"""Every kind of race raises, and sessions under any delay have none and equal plain."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import closing

import pytest
import torch
from checked_device import CheckedDevice, RaceError
from core_models import (
    ALL,
    adamw,
    assert_same,
    batches,
    before_updates,
    checked,
    make_plan,
    slowly,
    stack,
    train,
    twin,
    weights,
)
from simulated import DeferredDevice
from torch import Tensor

from axolotl.integrations.protrain.core.engine.session import Session
from axolotl.integrations.protrain.core.engine.slots import Slot
from axolotl.integrations.protrain.core.engine.worker import HostWorker
from axolotl.integrations.protrain.core.layout import build_layout


def bytes_of(value: int, size: int = 8) -> Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def on_thread(act: Callable[[], object]) -> None:
    """Run `act` on a thread that nothing orders after this one; raise what it raises."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except RaceError as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="other")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


class Rig:
    """A slot that holds a chunk and pinned memory, everything so far waited for."""

    def __init__(self) -> None:
        # copies are never done before somebody waits: no query is true by luck
        self.device = CheckedDevice(DeferredDevice())
        self.host, self.back = bytes_of(1), bytes_of(0)
        self.device.pin(self.host)
        self.device.pin(self.back)
        self.slot = Slot(self.device.allocate(8), self.device)
        self.slot.fetch(0, self.host)
        self.device.synchronize()


# Each does one thing right when told to, and otherwise leaves out what orders it.


def read_a_slot_before_its_copy(rig: Rig, right: bool) -> None:
    rig.slot.fetch(1, rig.host)
    if right:
        rig.device.compute.wait(rig.device.fetch.record())
    rig.device.begin_use(rig.slot.buffer)


def fetch_into_a_slot_after_its_last_use(rig: Rig, right: bool) -> None:
    rig.slot.begin_use()
    rig.device.end_use(rig.slot.buffer)
    if right:
        rig.device.fetch.wait(rig.device.compute.record())
    rig.device.fetch.copy(rig.slot.buffer, rig.host)


def fetch_into_a_window(rig: Rig, right: bool) -> None:
    rig.slot.begin_use()
    if right:
        rig.slot.end_use()
    rig.slot.fetch(1, rig.host)


def refresh_into_a_window(rig: Rig, right: bool) -> None:
    """Even on compute itself, whose order is never in doubt."""
    rig.slot.begin_use()
    if right:
        rig.slot.end_use()
    rig.device.compute.copy(rig.slot.buffer, rig.host)


def end_a_use_that_has_not_begun(rig: Rig, right: bool) -> None:
    if right:
        rig.slot.begin_use()
    rig.slot.end_use()


def begin_a_use_twice(rig: Rig, right: bool) -> None:
    rig.slot.begin_use()
    if right:
        rig.slot.end_use()
    rig.slot.begin_use()


def fetch_into_new_memory(rig: Rig, right: bool) -> None:
    """Compute may still use what lay at the same addresses before."""
    buffer = rig.device.allocate(8)
    if right:
        rig.device.fetch.wait(rig.device.compute.record())
    rig.device.fetch.copy(buffer, rig.host)
    rig.device.synchronize()


def offload_before_compute_is_done(rig: Rig, right: bool) -> None:
    gradient = bytes_of(3)
    rig.device.writes([gradient], rig.device.compute)
    if right:
        rig.device.offload.wait(rig.device.compute.record())
    rig.device.offload.copy(rig.back, gradient)
    rig.device.synchronize()


def read_on_the_host_before_the_offload_is_done(rig: Rig, right: bool) -> None:
    rig.device.offload.copy(rig.back, rig.slot.buffer)
    event = rig.device.offload.record()
    assert not event.query()
    if right:
        event.synchronize()
    rig.device.reads([rig.back])


def trust_a_query(rig: Rig, right: bool) -> None:
    rig.device.offload.copy(rig.back, rig.slot.buffer)
    event = rig.device.offload.record()
    if right:
        rig.device.offload.record().synchronize()
    event.query()
    rig.device.reads([rig.back])


def offload_twice_into_one_buffer(rig: Rig, right: bool) -> None:
    """The host adds up the first in the meantime."""
    worker = HostWorker(rig.device)
    try:
        rig.device.offload.copy(rig.back, rig.slot.buffer)
        event = rig.device.offload.record()
        over = threading.Event()

        def add() -> None:
            event.synchronize()
            rig.device.reads([rig.back])
            over.set()

        addition = worker.submit(add)
        # it is over, which nobody may rely on who has not waited for it
        assert over.wait(20)
        if right:
            addition.result()
        rig.device.offload.copy(rig.back, rig.slot.buffer)
    finally:
        worker.close()


def update_what_a_fetch_reads(rig: Rig, right: bool) -> None:
    worker = HostWorker(rig.device)
    try:
        rig.slot.fetch(0, rig.host)
        fetched = rig.device.fetch.record()

        def update() -> None:
            if right:
                fetched.synchronize()
            rig.device.writes([rig.host])

        worker.submit(update, changes=0)
        worker.wait(0)
    finally:
        worker.close()


def fetch_what_is_being_updated(rig: Rig, right: bool) -> None:
    worker = HostWorker(rig.device)
    try:
        over = threading.Event()

        def update() -> None:
            rig.device.writes([rig.host])
            over.set()

        worker.submit(update, changes=0)
        assert over.wait(20)
        if right:
            worker.wait(0)
        rig.slot.fetch(0, rig.host)
    finally:
        worker.close()


def write_from_another_thread(rig: Rig, right: bool) -> None:
    rig.device.writes([rig.host])
    mark = rig.device.mark()

    def write() -> None:
        if right:
            mark.synchronize()
        rig.device.writes([rig.host])

    on_thread(write)


def write_part_of_what_is_read(rig: Rig, right: bool) -> None:
    """Bytes decide, not tensors: the other half may be written."""
    rig.device.offload.copy(rig.back[4:], rig.slot.buffer[4:])
    rig.device.writes([rig.back[:4] if right else rig.back[3:5]])


def unpin_under_a_copy(rig: Rig, right: bool) -> None:
    rig.slot.fetch(0, rig.host)
    if right:
        rig.device.synchronize()
    rig.device.unpin(rig.host)


def unpin_twice(rig: Rig, right: bool) -> None:
    rig.device.unpin(rig.host)
    rig.device.unpin(rig.back if right else rig.host)


def free_under_a_copy(rig: Rig, right: bool) -> None:
    rig.slot.fetch(0, rig.host)
    if right:
        rig.device.compute.wait(rig.device.fetch.record())
    rig.slot.release()
    rig.device.synchronize()


def free_in_a_window(rig: Rig, right: bool) -> None:
    rig.slot.begin_use()
    if right:
        rig.slot.end_use()
    rig.slot.release()


def drop_a_gradient_under_its_copy(rig: Rig, right: bool) -> None:
    device = checked()
    gradient = bytes_of(3)
    device.writes([gradient], device.compute)
    device.offload.wait(device.compute.record())
    device.offload.copy(rig.back, gradient)
    if right:
        device.compute.wait(device.offload.record())
    del gradient
    device.synchronize()


MISUSES: dict[Callable[[Rig, bool], None], str] = {
    read_a_slot_before_its_copy: "device buffer 2, .*compute reads it.*write by fetch",
    fetch_into_a_slot_after_its_last_use: "fetch writes it.*last read by compute",
    fetch_into_a_window: "fetch writes it, but compute has not ended its use",
    refresh_into_a_window: "compute writes it, but compute has not ended its use",
    end_a_use_that_has_not_begun: "its use ends but has not begun",
    begin_a_use_twice: "begins a second time",
    fetch_into_new_memory: "device buffer 3, .*fetch writes it.*write by compute",
    offload_before_compute_is_done: r"tensor \[8\].*offload reads.*write by compute",
    read_on_the_host_before_the_offload_is_done: "calling thread reads.*by offload",
    trust_a_query: "pinned buffer 1, .*calling thread reads it.*write by offload",
    offload_twice_into_one_buffer: "offload writes.*(write|read) by the thread",
    update_what_a_fetch_reads: "thread protrain-host_0 writes it.*read by fetch",
    fetch_what_is_being_updated: "fetch reads it.*write by the thread protrain-host",
    write_from_another_thread: "thread other writes.*write by the calling thread",
    write_part_of_what_is_read: "from byte 4: .*writes it.*last write by offload",
    unpin_under_a_copy: "calling thread unpins it.*last read by fetch",
    unpin_twice: "unpins memory that nobody has taken",
    free_under_a_copy: "calling thread frees it.*last write by fetch",
    free_in_a_window: "frees it, but compute has not ended its use",
    drop_a_gradient_under_its_copy: "its storage ends.*last read by offload",
}


@pytest.mark.parametrize("misuse", MISUSES, ids=lambda misuse: misuse.__name__)
def test_what_nothing_orders_raises(misuse: Callable[[Rig, bool], None]) -> None:
    misuse(Rig(), True)
    with pytest.raises(RaceError, match=MISUSES[misuse]):
        misuse(Rig(), False)


# real sessions


def test_loading_while_weights_are_fetched_ahead() -> None:
    """The look ahead of an evaluation still reads the host when the load begins."""
    model = stack()
    session = Session(
        model,
        build_layout(model),
        make_plan(build_layout(model), n_buffer=4, recompute=ALL),
        CheckedDevice(DeferredDevice()),
    )
    with closing(session), torch.no_grad():
        other = stack(seed=9)
        model(batches(1)[0])
        model.load_state_dict(other.state_dict())
        assert model(batches(1)[0]) == other(batches(1)[0])


def test_loading_the_optimizer_waits_for_updates() -> None:
    model = stack()
    plain = twin(model)
    layout = build_layout(model)
    session = Session(model, layout, make_plan(layout), checked())
    data = [[batches(1, seed)] for seed in range(3)]
    with closing(session), before_updates(slowly):
        losses = []
        for own, optimizer in (
            (model, session.wrap_optimizer(adamw(model))),
            (plain, adamw(plain)),
        ):
            losses.append(train(own, optimizer, data[0]))
            saved = copy.deepcopy(optimizer.state_dict())
            losses[-1] += train(own, optimizer, data[1])
            optimizer.load_state_dict(saved)
            losses[-1] += train(own, optimizer, data[2])
    assert losses[0] == losses[1]
    assert_same(weights(model), weights(plain))


def test_zero_grad_forgets_what_is_not_sent_yet() -> None:
    """Chunk 0 still waits for a gradient that never comes."""
    model = stack()
    plain = twin(model)
    layout = build_layout(model)
    session = Session(model, layout, make_plan(layout), checked())
    losses = []
    with closing(session):
        for own, optimizer in (
            (model, session.wrap_optimizer(adamw(model))),
            (plain, adamw(plain)),
        ):
            own.layers[0].use_extra = False
            own(batches(1, 1)[0]).backward()
            optimizer.zero_grad()
            own.layers[0].use_extra = True
            losses.append(train(own, optimizer, [batches(1, 2), batches(1, 3)]))
    assert losses[0] == losses[1]
    assert_same(weights(model), weights(plain))
