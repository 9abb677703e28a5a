"""The simulated device: its queues, the same numbers under any delay, its use as proof
that `simulate` predicts what a session really takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from core_models import (
    HOST_STATE,
    adamw,
    assert_same,
    batches,
    checked,
    freeze,
    make_plan,
    stack,
    weights,
)
from simulated import DeferredDevice, SimulatedDevice, at_random, at_rate
from torch import Tensor

from axolotl.integrations.protrain.core.engine.device import CpuDevice, Device
from axolotl.integrations.protrain.core.engine.session import Options, Session
from axolotl.integrations.protrain.core.engine.slots import Slot
from axolotl.integrations.protrain.core.layout import build_layout
from axolotl.integrations.protrain.core.types import Update


def at_once(_nbytes: int) -> float:
    return 0.0


def bytes_of(value: int, size: int = 4) -> Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def test_a_deferred_copy_waits_until_something_after_it_is_wanted() -> None:
    device = DeferredDevice()
    first, second, third = bytes_of(0), bytes_of(0), bytes_of(0)
    one, two, three = bytes_of(1), bytes_of(2), bytes_of(3)
    device.fetch.copy(first, one)
    device.fetch.copy(second, two)
    event = device.fetch.record()
    device.fetch.copy(third, three)
    assert (first[0], second[0], third[0]) == (0, 0, 0)
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert (first[0], second[0], third[0]) == (1, 2, 0)
    device.synchronize()
    assert third[0] == 3


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_a_stream_waits_for_events_of_another(seed: int | None) -> None:
    device = DeferredDevice(seed)
    start, middle, end = bytes_of(7), bytes_of(0), bytes_of(0)
    device.offload.copy(middle, start)
    device.fetch.wait(device.offload.record())
    device.fetch.copy(end, middle)
    device.fetch.record().synchronize()
    assert end[0] == 7


def test_kernels_run_in_their_queue() -> None:
    """Between the copies that compute waits for and those that wait for compute."""
    device = DeferredDevice(queue_compute=True)
    given, slot, result = bytes_of(3), bytes_of(0), bytes_of(0)
    device.fetch.copy(slot, given)
    device.wait_stalled(device.fetch.record())
    device.launch(lambda: slot.mul_(2))
    device.offload.wait(device.compute.record())
    device.offload.copy(result, slot)
    assert slot[0] == result[0] == 0
    device.offload.record().synchronize()
    assert slot[0] == result[0] == 6


def test_random_moments_repeat_with_their_seed() -> None:
    def moments(seed: int) -> list[int]:
        device = DeferredDevice(seed)
        source, target = bytes_of(1, 1), bytes_of(0, 20)
        for part in target:
            device.fetch.copy(part[None], source)
        return target.tolist()

    # some are done before anybody waits, not all, and in order
    assert moments(1) == sorted(moments(1), reverse=True)
    assert 0 < sum(moments(1)) < 20
    assert len({sum(moments(seed)) for seed in range(20)}) > 1


@pytest.mark.parametrize("ended", ["source", "target"])
def test_a_queued_copy_whose_memory_ends_is_an_error(ended: str) -> None:
    device = DeferredDevice()
    memory = {"source": bytes_of(1), "target": bytes_of(0)}
    device.fetch.copy(memory["target"], memory["source"])
    del memory[ended]
    with pytest.raises(RuntimeError, match="outlives its memory"):
        device.fetch.record()


def test_memory_may_end_once_compute_waits_for_its_copy() -> None:
    """An allocator gives it to later work of compute, which comes after the copy."""
    device = DeferredDevice(queue_compute=True)
    source, target = bytes_of(4), bytes_of(0)
    device.offload.copy(target, source)
    device.compute.wait(device.offload.record())
    del source
    device.synchronize()
    assert target[0] == 4


def test_a_read_without_a_wait_finds_poison_and_one_with_a_wait_the_chunk() -> None:
    device = DeferredDevice()
    slot, chunk = Slot(device.allocate(4), device), bytes_of(5)
    slot.fetch(0, chunk)
    assert slot.buffer.tolist() == [255] * 4
    slot.begin_use()
    assert slot.buffer.tolist() == [5] * 4


def test_copies_of_both_ways_run_beside_each_other_and_the_caller() -> None:
    device = SimulatedDevice(at_rate(100), at_rate(100))
    with closing(device):
        start = time.perf_counter()
        for stream in (device.fetch, device.offload):
            stream.copy(bytes_of(0, 10), bytes_of(1, 10))
            stream.copy(bytes_of(0, 10), bytes_of(1, 10))
        queued = time.perf_counter() - start
        device.wait_stalled(device.fetch.record())
        device.synchronize()
        took = time.perf_counter() - start
    assert queued < 0.1
    assert 0.2 <= took < 0.35
    assert 0.2 - queued <= device.stall_s <= took


@pytest.mark.parametrize(
    "device", [DeferredDevice(), DeferredDevice(0), SimulatedDevice(at_once, at_once)]
)
def test_another_thread_may_wait(device: Any) -> None:
    source, target = bytes_of(9), bytes_of(0)
    device.offload.copy(target, source)
    seen = []
    event = device.offload.record()

    def wait() -> None:
        event.synchronize()
        seen.append(int(target[0]))

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(timeout=10)
    device.close()
    assert seen == [9]


def test_a_failed_copy_is_raised_by_every_wait_after_it() -> None:
    device = SimulatedDevice(at_once, at_once)
    with closing(device):
        device.fetch.copy(bytes_of(0, 4), bytes_of(1, 3))
        device.fetch.copy(bytes_of(0), bytes_of(1))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="size"):
                device.synchronize()


def test_close_carries_out_what_is_queued_and_ends_the_threads() -> None:
    before = threading.active_count()
    device = SimulatedDevice(at_once, at_once)
    target = bytes_of(0)
    device.offload.copy(target, bytes_of(4))
    device.close()
    assert target[0] == 4
    assert threading.active_count() == before


def test_random_delays_repeat_with_their_seed() -> None:
    first, again, other = (at_random(seed, 0.5) for seed in (1, 1, 2))
    drawn = [first(8) for _ in range(20)]
    assert drawn == [again(8) for _ in range(20)]
    assert drawn != [other(8) for _ in range(20)]
    assert 0 <= min(drawn) < max(drawn) <= 0.5


# The same numbers, whenever the copies come.

DEVICES: dict[str, Callable[[], Any]] = {
    "fixed": lambda: SimulatedDevice(at_rate(4e6), at_rate(2e6)),
    "slow offload": lambda: SimulatedDevice(at_once, at_rate(1e6)),
    "random": lambda: SimulatedDevice(at_random(1, 0.003), at_random(2, 0.003)),
    "latest": lambda: DeferredDevice(),
    "any moment": lambda: DeferredDevice(3),
}
RUNS: dict[str, dict[str, Any]] = {
    "frozen": {"frozen": True, "n_buffer": 2, "recompute": {1, 2}},
    "full": {"n_buffer": 3, "outside": HOST_STATE},
    "full, host-state": {
        "n_buffer": 1,
        "resident": {2, 3},
        "inside": HOST_STATE,
        "outside": HOST_STATE,
        "recompute": {0, 3},
    },
    "full, updated on the host": {
        "n_buffer": 3,
        "outside": HOST_STATE,
        "update": Update.HOST,
    },
    "masters": {
        "n_buffer": 2,
        "outside": HOST_STATE,
        "fp32_master": True,
        "update": Update.HOST,
    },
}


def trained_on(
    device: Device, frozen: bool = False, fp32_master: bool = False, **plan: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and grad norms of three steps of two micro-batches, and the weights."""
    model = stack(dtype=torch.bfloat16 if fp32_master else torch.float32)
    keep = freeze(model) if frozen else set()
    layout = build_layout(model, keep)
    options = Options(fp32_master=fp32_master)
    session = Session(model, layout, make_plan(layout, **plan), device, options)
    numbers = []
    try:
        optimizer = session.wrap_optimizer(adamw(model))
        for _ in range(3):
            for tokens in batches(2):
                loss = model(tokens) / 2
                loss.backward()
                numbers.append(loss.item())
            norm = session.clip_grad_norm(0.5)
            if norm is not None:
                numbers.append(norm.item())
            optimizer.step()
            optimizer.zero_grad()
        return numbers, weights(model)
    finally:
        session.close()


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("delays", DEVICES)
@pytest.mark.sampled(10)
def test_delays_change_no_number(delays: str, run: str) -> None:
    plain, expected = trained_on(CpuDevice(), **RUNS[run])
    with closing(DEVICES[delays]()) as device:
        numbers, trained = trained_on(checked(device), **RUNS[run])
    assert numbers == plain
    assert_same(trained, expected)


# What the time model predicts is what a session takes.
