"""Slots, pager, arena and the host thread on the CPU device, nothing mocked."""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from axolotl.integrations.protrain.core.engine.pager import Pager
from core_models import checked, layouts
from hypothesis import given, strategies as st
from torch import Tensor

from axolotl.integrations.protrain.core.engine.device import (
    CpuDevice,
    CudaDevice,
    Device,
    allocator_note,
    asked_bytes,
    expand_segments,
    open_device,
)
from axolotl.integrations.protrain.core.engine.host_pool import HostPool
from axolotl.integrations.protrain.core.engine.slots import Slot
from axolotl.integrations.protrain.core.engine.worker import HostWorker
from axolotl.integrations.protrain.core.errors import LayoutError
from axolotl.integrations.protrain.core.layout import (
    Direction,
    Schedule,
)
from axolotl.integrations.protrain.core.layout.shards import PAGE_BYTES
from axolotl.integrations.protrain.core.types import Chunk, Layout, TensorSpec

WAIT_S = 20.0
"""Longer than anything here takes: what would hang fails instead."""


class Rig(NamedTuple):
    """A pager with everything that it needs."""

    device: Device
    pager: Pager
    schedule: Schedule
    slots: list[Slot]
    sources: list[Tensor]
    num_blocks: int

    def reads(self, chunk: int) -> Tensor:
        """What a kernel would read now."""
        slot = self.slots[self.schedule.slot_of(chunk)]
        return slot.buffer[: self.sources[chunk].numel()]

    def holds(self, chunk: int) -> bool:
        return self.slots[self.schedule.slot_of(chunk)].holds == chunk

    def nests(self, block: int, direction: Direction, forward_runs: bool) -> bool:
        """Whether a forward would begin inside that of another block."""
        other = self.pager.window not in (None, block)
        return other and forward_runs and direction is not Direction.BACKWARD

    def assert_readable(self, block: int) -> None:
        for chunk in self.schedule.needed(block):
            assert torch.equal(self.reads(chunk), self.sources[chunk])


def build(
    chunks: list[int],
    num_slots: int,
    sizes: list[int] | None = None,
    worker: HostWorker | None = None,
) -> Rig:
    """Chunk n is bytes of n + 1, which is nobody's poison."""
    ends = [sum(chunks[: n + 1]) for n in range(len(chunks))]
    blocks = [range(end - own, end) for end, own in zip(ends, chunks, strict=True)]
    sizes = sizes or [16] * sum(chunks)
    sources = [
        torch.full((size,), number + 1, dtype=torch.uint8)
        for number, size in enumerate(sizes)
    ]
    device = checked()
    slots = [
        Slot(device.allocate(max(sizes[n::num_slots], default=0)), device)
        for n in range(num_slots)
    ]
    schedule = Schedule(blocks, num_slots)
    pager = Pager(
        schedule,
        slots,
        sources,
        wait_update=worker.wait if worker else lambda chunk: None,
        update_pending=worker.pending if worker else lambda chunk: False,
    )
    return Rig(device, pager, schedule, slots, sources, len(chunks))


class Broken(Exception):
    pass


def broken() -> None:
    raise Broken


@pytest.fixture
def worker() -> Iterator[HostWorker]:
    worker = HostWorker(checked())
    yield worker
    worker.close()


@st.composite
def rigs(draw: st.DrawFn) -> Rig:
    chunks = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6).filter(any))
    num_slots = draw(st.integers(max(chunks), sum(chunks)))
    size = st.integers(1, 30)
    sizes = draw(st.lists(size, min_size=sum(chunks), max_size=sum(chunks)))
    return build(chunks, num_slots, sizes)


@given(rigs(), st.data())
def test_an_open_window_holds_its_bytes(rig: Rig, data: st.DataObject) -> None:
    """Any order of blocks and directions, windows left open, writes on the host.

    Only a forward inside another block's forward is refused: that window must stay.
    """
    addresses = [slot.buffer.data_ptr() for slot in rig.slots]
    forward_runs = False
    block = st.integers(0, rig.num_blocks - 1)
    chunk = st.integers(0, rig.schedule.num_chunks - 1)
    actions = st.sampled_from(["open", "close", "close, look ahead", "write", "load"])
    for action in data.draw(st.lists(actions, max_size=25)):
        direction = data.draw(st.sampled_from(Direction))
        if action == "open":
            opened, before = data.draw(block), rig.pager.window
            if rig.nests(opened, direction, forward_runs):
                with pytest.raises(LayoutError, match="called inside block"):
                    rig.pager.open(opened, direction)
                assert rig.pager.window == before
            else:
                rig.pager.open(opened, direction)
                assert rig.pager.window == opened
                if before != opened:
                    forward_runs = direction is not Direction.BACKWARD
        elif action == "close":
            rig.pager.close(data.draw(block))
        elif action == "close, look ahead":
            rig.pager.close(data.draw(block), direction)
        elif action == "write":
            written = data.draw(chunk)
            rig.pager.close_any()
            rig.sources[written].random_(0, 255)
            rig.pager.forget(written)
        else:
            rig.device.synchronize()
            for source in rig.sources:
                source.random_(0, 255)
            rig.pager.forget_all()
        if rig.pager.window is not None:
            rig.assert_readable(rig.pager.window)
    assert [slot.buffer.data_ptr() for slot in rig.slots] == addresses


@given(rigs(), st.data())
def test_counters(rig: Rig, data: st.DataObject) -> None:
    """Fetches, their bytes and misses, against slots that are a dict."""
    held: dict[int, int] = {}
    window, fetched, misses = None, [], 0
    visit = st.tuples(
        st.integers(0, rig.num_blocks - 1), st.sampled_from(Direction), st.booleans()
    )

    def fetch(chunk: int) -> bool:
        slot = rig.schedule.slot_of(chunk)
        if held.get(slot) == chunk:
            return False
        held[slot] = chunk
        fetched.append(chunk)
        return True

    for block, direction, close in data.draw(st.lists(visit, max_size=15)):
        if window != block:
            rig.pager.close_any()
            misses += sum(fetch(chunk) for chunk in rig.schedule.needed(block))
            for chunk in rig.schedule.ahead(block, direction):
                fetch(chunk)
        rig.pager.open(block, direction)
        window = block
        if close:
            rig.pager.close(block)
            window = None
        assert rig.pager.window == window
    assert rig.pager.counters.num_fetches == len(fetched)
    assert rig.pager.counters.fetched_bytes == sum(
        rig.sources[c].numel() for c in fetched
    )
    assert rig.pager.counters.num_misses == misses


def test_a_sweep_misses_only_once() -> None:
    """One slot more than a block needs hides every fetch but the first."""
    rig = build([1] * 6, num_slots=2)
    for _ in range(3):
        for block in range(6):
            rig.pager.open(block, Direction.FORWARD)
            rig.pager.close(block, Direction.FORWARD)
        for block in reversed(range(6)):
            rig.pager.open(block, Direction.BACKWARD)
    assert rig.pager.counters.num_misses == 1
    assert rig.pager.counters.num_fetches == 6 + 5 * 4


def test_close_is_idempotent() -> None:
    rig = build([1, 1, 1], num_slots=2)
    rig.pager.close_any()
    rig.pager.close(1)
    rig.pager.open(1, Direction.FORWARD)
    rig.pager.close(0)
    assert rig.pager.window == 1
    rig.pager.close(1)
    fetches = rig.pager.counters.num_fetches
    rig.pager.close(1, Direction.BACKWARD)
    rig.pager.close_any()
    assert rig.pager.window is None
    assert rig.pager.counters.num_fetches == fetches


def test_a_closed_window_reads_another_chunk_or_poison() -> None:
    """Why nothing may read outside a window, and how a test would notice."""
    rig = build([1, 1, 1], num_slots=1, sizes=[8, 8, 4])
    assert rig.reads(0).view(torch.float32).isnan().all()
    rig.pager.open(0, Direction.BACKWARD)
    rig.pager.open(1, Direction.BACKWARD)
    assert torch.equal(rig.reads(0), rig.sources[1])
    rig.pager.open(2, Direction.BACKWARD)
    assert torch.equal(rig.reads(0)[:4], rig.sources[2])
    assert rig.reads(0)[4:].view(torch.float32).isnan().all()


class Gate:
    """A host task that waits to be let through, then writes."""

    def __init__(self, target: Tensor, value: int) -> None:
        self.open = threading.Event()
        self.started = threading.Event()
        self._target, self._value = target, value

    def __call__(self) -> None:
        self.started.set()
        assert self.open.wait(WAIT_S)
        self._target.fill_(self._value)


def test_what_is_being_updated_is_not_fetched_ahead(worker: HostWorker) -> None:
    rig = build([1] * 4, num_slots=3, worker=worker)
    gate = Gate(rig.sources[1], 77)
    worker.submit(gate, changes=1)
    rig.pager.open(0, Direction.FORWARD)
    assert gate.started.wait(WAIT_S)
    # nor anything after it: the copies would overtake each other
    assert [rig.holds(chunk) for chunk in range(4)] == [True, False, False, False]

    gate.open.set()
    worker.drain()
    rig.pager.close(0, Direction.FORWARD)
    assert rig.holds(1) and rig.holds(2)
    assert rig.pager.counters.num_misses == 1
    assert torch.equal(rig.reads(1), torch.full((16,), 77, dtype=torch.uint8))


def test_a_fetch_waits_for_the_update(worker: HostWorker) -> None:
    rig = build([1, 1], num_slots=1, worker=worker)
    gate = Gate(rig.sources[1], 77)
    worker.submit(gate, changes=1)
    timer = threading.Timer(0.05, gate.open.set)
    timer.start()
    rig.pager.open(1, Direction.FORWARD)
    assert gate.open.is_set()
    rig.assert_readable(1)
    assert rig.reads(1)[0] == 77
    assert worker.waited_s > 0
    assert not worker.pending(1)
    timer.join()


def test_a_failed_update_does_not_leave_a_window_open(worker: HostWorker) -> None:
    rig = build([1, 1], num_slots=1, worker=worker)
    rig.pager.open(0, Direction.FORWARD)
    rig.pager.close(0)
    worker.submit(broken, changes=1)
    with pytest.raises(Broken):
        rig.pager.open(1, Direction.FORWARD)
    assert rig.pager.window is None
    rig.pager.open(1, Direction.FORWARD)
    rig.assert_readable(1)


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
    worker.drain()
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


def test_a_failure_is_not_passed_over(worker: HostWorker) -> None:
    """Neither by the next update of the chunk nor by looking ahead."""
    for notice in (
        lambda: worker.pending(3),
        lambda: worker.submit(lambda: None, changes=3),
    ):
        worker.submit(broken, changes=3)
        worker.submit(lambda: None).result()
        with pytest.raises(Broken):
            notice()


def test_a_failure_is_raised_by_drain(worker: HostWorker) -> None:
    worker.submit(lambda: None, changes=0)
    worker.submit(broken, changes=1)
    with pytest.raises(Broken):
        worker.drain()


def test_a_failed_sum_is_raised_by_its_future(worker: HostWorker) -> None:
    future = worker.submit(broken)
    worker.drain()
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


# arena, device


@given(layouts())
def test_arena_keeps_chunks_apart(layout: Layout) -> None:
    arena = HostPool()
    arena.add(layout.chunks)
    for chunk in layout.chunks:
        arena.chunk(chunk.index).fill_(chunk.index + 1)
    for chunk in layout.chunks:
        whole = arena.chunk(chunk.index)
        assert whole.numel() == chunk.nbytes
        assert (whole == chunk.index + 1).all()
        for spec in chunk.tensors:
            tensor = arena.tensor(chunk.index, spec)
            assert tensor.shape == spec.shape and tensor.dtype == spec.dtype
            assert tensor.data_ptr() == whole.data_ptr() + spec.offset
            assert tensor.untyped_storage().nbytes() == spec.nbytes
    gaps = arena.nbytes - sum(c.nbytes for c in layout.chunks)
    assert 0 <= gaps <= PAGE_BYTES * len(layout.chunks)


def test_an_arena_lives_as_long_as_its_tensors() -> None:
    spec = TensorSpec("weight", (1 << 16,), torch.float32, 0)
    chunk = Chunk(0, 0, False, (spec,), spec.nbytes)
    arena = HostPool()
    arena.add([chunk])
    tensor = arena.tensor(0, spec).fill_(3.0)
    del arena
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
    with pytest.raises(ValueError, match="meta"):
        open_device(torch.device("meta"))


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
