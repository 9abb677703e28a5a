"""The host thread, the pool of host memory and devices, nothing mocked."""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from core_models import checked, layouts
from hypothesis import given

from axolotl.integrations.protrain.core.engine.device import (
    CpuDevice,
    CudaDevice,
    allocator_note,
    asked_bytes,
    expand_segments,
    open_device,
)
from axolotl.integrations.protrain.core.engine.host_pool import HostPool
from axolotl.integrations.protrain.core.engine.worker import HostWorker
from axolotl.integrations.protrain.core.errors import ConfigError
from axolotl.integrations.protrain.core.layout.shards import PAGE_BYTES
from axolotl.integrations.protrain.core.types import Chunk, Layout, TensorSpec

WAIT_S = 20.0
"""Longer than anything here takes: what would hang fails instead."""


class Broken(Exception):
    pass


def broken() -> None:
    raise Broken


@pytest.fixture
def worker() -> Iterator[HostWorker]:
    worker = HostWorker(checked())
    yield worker
    worker.close()


# host worker


def test_the_worker_keeps_the_order(worker: HostWorker) -> None:
    done: list[int] = []
    gate = threading.Event()
    worker.submit(lambda: done.append(-1) if gate.wait(WAIT_S) else None)
    for number in range(20):
        chunk = number if number % 2 else None
        worker.submit(lambda number=number: done.append(number), changes=chunk)
    assert [worker.pending(chunk) for chunk in range(4)] == [False, True] * 2
    assert done == []
    gate.set()
    worker.wait(19)
    assert done == [-1, *range(20)]
    assert not any(worker.pending(chunk) for chunk in range(20))


def test_waiting_is_counted(worker: HostWorker) -> None:
    worker.wait(0)
    assert worker.waited_s == 0
    gate = threading.Event()
    worker.submit(lambda: None if gate.wait(WAIT_S) else None, changes=0)
    timer = threading.Timer(0.05, gate.set)
    timer.start()
    worker.wait(0)
    assert 0.01 < worker.waited_s < WAIT_S
    timer.join()


def test_a_failure_is_raised_by_the_wait_for_its_chunk(worker: HostWorker) -> None:
    worker.submit(broken, changes=3)
    worker.submit(lambda: None, changes=4)
    worker.wait(4)
    with pytest.raises(Broken):
        worker.wait(3)


def test_a_failure_is_not_passed_over_by_looking_ahead(worker: HostWorker) -> None:
    worker.submit(broken, changes=3)
    worker.submit(lambda: None).result()
    with pytest.raises(Broken):
        worker.pending(3)


class LostPeer:
    """What gloo gives where another rank has died: complete, and no success."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        raise Broken


@pytest.mark.parametrize("look", [HostWorker.wait, HostWorker.pending])
def test_a_rank_that_has_died_has_updated_nothing(
    look: Callable[[HostWorker, int], object], worker: HostWorker
) -> None:
    worker.submit(LostPeer, changes=3).result()
    with pytest.raises(Broken):
        look(worker, 3)


def test_a_failed_sum_is_raised_by_its_future(worker: HostWorker) -> None:
    future = worker.submit(broken)
    with pytest.raises(Broken):
        future.result()


def test_close_finishes_the_queue_and_ends_the_thread() -> None:
    before = set(threading.enumerate())
    worker = HostWorker(checked())
    done: list[int] = []
    for number in range(5):
        worker.submit(lambda number=number: done.append(number), changes=0)
    assert set(threading.enumerate()) > before
    worker.close()
    assert done == list(range(5))
    assert set(threading.enumerate()) == before
    worker.close()
    with pytest.raises(RuntimeError):
        worker.submit(lambda: None)


# pool, device


@given(layouts())
def test_a_pool_keeps_chunks_apart(layout: Layout) -> None:
    pool = HostPool()
    pool.add(layout.chunks)
    for chunk in layout.chunks:
        pool.chunk(chunk.index).fill_(chunk.index + 1)
    for chunk in layout.chunks:
        whole = pool.chunk(chunk.index)
        assert whole.numel() == chunk.nbytes
        assert (whole == chunk.index + 1).all()
        for spec in chunk.tensors:
            tensor = pool.tensor(chunk.index, spec)
            assert tensor.shape == spec.shape and tensor.dtype == spec.dtype
            assert tensor.data_ptr() == whole.data_ptr() + spec.offset
            assert tensor.untyped_storage().nbytes() == spec.nbytes
    gaps = pool.nbytes - sum(c.nbytes for c in layout.chunks)
    assert 0 <= gaps <= PAGE_BYTES * len(layout.chunks)


def test_a_pool_lives_as_long_as_its_tensors() -> None:
    spec = TensorSpec("weight", (1 << 16,), torch.float32, 0)
    chunk = Chunk(0, 0, False, (spec,), spec.nbytes)
    pool = HostPool()
    pool.add([chunk])
    tensor = pool.tensor(0, spec).fill_(3.0)
    del pool
    assert (tensor == 3.0).all()


def test_the_cpu_device_counts_its_peak() -> None:
    device = CpuDevice()
    buffer = device.allocate(100)
    placed = device.place(torch.zeros(10))
    unseen = torch.zeros(1000)
    with device.watch(already=60):
        made = placed + placed
        assert device.used_bytes() == 100 + 40 + 60 + 40
        view = made.view(2, 5).t()
        view.add_(1)
        placed.mul_(2)
        assert device.used_bytes() == 240
        made = view = view + unseen[:5].view(5, 1)
        assert device.used_bytes() == 240
    del made, view
    assert device.used_bytes() == 200
    assert device.peak_bytes() == 280
    del buffer, placed
    assert device.used_bytes() == 60


def test_the_end_of_counted_memory_runs_no_python() -> None:
    """Python that runs then would lose what a signal handler raises, as Ctrl-C does."""
    device = CpuDevice()
    called: list[str] = []
    with device.watch(already=0):
        kept = [torch.ones(25), device.allocate(100)]
    sys.setprofile(lambda frame, event, _: called.append(f"{event} {frame}"))
    kept.clear()
    sys.setprofile(None)
    assert not [entry for entry in called if entry.startswith("call")]
    assert device.used_bytes() == 0


def test_a_cpu_device_keeps_to_its_capacity() -> None:
    """What did not fit is not there: as much as before still fits."""
    device = CpuDevice(capacity_bytes=1000)
    buffer = device.allocate(600)
    with pytest.raises(torch.OutOfMemoryError, match="600 of 1000") as raised:
        device.place(torch.zeros(101))
    assert asked_bytes(raised.value) == 404
    with device.watch(already=0):
        ones = torch.ones(50)
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(100)
        device.probe(200)
        with pytest.raises(torch.OutOfMemoryError):
            device.probe(201)
    assert device.used_bytes() == buffer.nbytes + ones.nbytes == 800


@pytest.mark.parametrize(
    "said, nbytes",
    [
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has", 20 * 2**20),
        ("Tried to allocate 1.50 GiB.", 3 * 2**29),
        ("Tried to allocate 512 bytes.", 512),
        ("out of memory", 0),
    ],
)
def test_what_was_asked_for_is_read_off_the_error(said: str, nbytes: int) -> None:
    assert asked_bytes(torch.OutOfMemoryError(said)) == nbytes


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    """What of it can be had without one."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    return CudaDevice(0)


def test_the_peak_of_a_gpu_survives_resets_by_others(
    gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = iter([50, 190, 101, 20])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(seen))
    assert [gpu.peak_bytes() for _ in range(4)] == [50, 190, 190, 190]


def test_what_cannot_be_locked_stays_pageable(
    gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves no error behind for the next operator."""
    left: list[str] = []
    locked: list[int] = []
    sizes: dict[int, int] = {}

    class Runtime:
        def cudaHostRegister(self, address: int, nbytes: int, _: int) -> int:
            if sum(map(sizes.__getitem__, locked)) + nbytes > 20:
                left.append("CUDA error: out of memory")
                return 2
            sizes[address] = nbytes
            locked.append(address)
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            locked.remove(address)
            return 0

    def launch(nbytes: int) -> torch.Tensor:
        if left:
            raise RuntimeError(left.pop())
        return torch.empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(gpu, "allocate", launch)
    pieces = [torch.empty(n, dtype=torch.uint8) for n in (8, 16, 4, 64)]
    for piece in pieces:
        gpu.pin(piece)
        assert not left
    assert gpu.pageable_bytes == 16 + 64
    assert locked == [pieces[0].data_ptr(), pieces[2].data_ptr()]
    for piece in pieces:
        gpu.unpin(piece)
    assert not locked and gpu.pageable_bytes == 0


def test_only_known_devices_open() -> None:
    assert open_device(torch.device("cpu")).torch_device == torch.device("cpu")
    for kind in ("meta", "xpu", "mps"):
        with pytest.raises(ConfigError, match=f"not train on {kind}. .* cuda.* cpu"):
            open_device(torch.device(kind))


@pytest.mark.parametrize(
    "build, release, said, asks",
    [
        ("12.8", "6.8.0-generic", {}, True),
        (None, "6.8.0-generic", {}, False),
        ("12.8", "5.15.90.1-microsoft-standard-WSL2", {}, False),
        ("12.8", "6.8.0-generic", {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, False),
    ],
    ids=["CUDA", "no CUDA", "WSL2", "said"],
)
def test_segments_grow_where_nobody_has_said_otherwise(
    monkeypatch: pytest.MonkeyPatch,
    build: str | None,
    release: str,
    said: dict[str, str],
    asks: bool,
) -> None:
    environment = dict(said)
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(platform, "release", lambda: release)
    expand_segments()
    wanted = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if asks else {}
    assert environment == said | wanted
    assert ("do not grow" in allocator_note(environment)) == (not asks)
