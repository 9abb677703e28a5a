"""A device that proves: no byte is read before it arrives or overwritten while in use.

`CheckedDevice` wraps any device and keeps a vector clock for each *lane*: compute,
fetch, offload and every host thread. Queueing work hands the thread's clock to the
stream, an event keeps the stream's, whoever waits for it takes that over. Each access
is compared with the last write and the last reads of the same bytes; two that nothing
orders raise `RaceError`, also when timing happened to be kind.

How memory becomes known, by address:

* `Device.allocate` (until `free` or the end of its storage): counts as written by
  compute until now, which may have used the same addresses before;
* `Device.pin` (until `unpin`);
* any other tensor at its first access (until the end of its storage); on the device it
  counts as written by the latest known work of compute.

How accesses become known:

* `Stream.copy` and `Stream.fill` say it themselves;
* kernels of the model: `begin_use(buffer)` .. `end_use(buffer)` for what was allocated,
  `reads([tensor], device.compute)` and `writes(…)` for anything else, at the moment at
  which the kernels have been queued;
* host threads: `reads([tensor])` and `writes([tensor])`, `HostWorker` for the order.

Memory may end once what was queued on it is done for the thread that lets go or, on the
device, for compute: the allocator gives it to later work of compute. The end of a
storage cannot raise, so its race is raised by the next call.

Inside `watch`, operators are looked at too: none may touch a buffer that has windows
while none is open.

All compute streams of the caller count as one lane, and autograd's threads as the
caller's, who waits for them.
"""

from __future__ import annotations

import importlib
import sys
import threading
import weakref
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils import _python_dispatch

from axolotl.integrations.protrain.core.engine.device import (
    POISON_BYTE,
    Device,
    Event,
    OperatorMode,
    Stream,
    call_operator,
    open_device,
)
from axolotl.integrations.protrain.core.layout.tensors import tensors_in


class RaceError(RuntimeError):
    """Two lanes use the same bytes and nothing orders them: a fault of ProTrain."""


CHECKED = "tests_check_accesses"
"""A key that `SeedingPlugin` alone knows: the run is on a `CheckedDevice`."""
_RUN = "axolotl.integrations.protrain.run"


def check_runs(on: bool) -> None:
    """Let runs of this process open their device checked from now on, or as it is."""
    if on or _RUN in sys.modules:
        run = importlib.import_module(_RUN)
        run.open_device = _open_checked if on else open_device


def _open_checked(torch_device: torch.device) -> CheckedDevice:
    return CheckedDevice(open_device(torch_device))


class _Lane:
    """What runs in order. Its clock holds the newest access of each lane it knows of."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: dict[_Lane, int] = {self: 0}

    def join(self, clock: _Clock) -> None:
        for lane, time in clock.items():
            if time > self.clock.get(lane, 0):
                self.clock[lane] = time

    def tick(self) -> int:
        self.clock[self] += 1
        return self.clock[self]


_Clock = dict[_Lane, int]


@dataclass(eq=False)
class _Part:
    """Consecutive bytes with the same history: their last write, the reads since."""

    start: int
    written: _Clock
    read: _Clock

    def check(self, clock: _Clock, act: str, writes: bool, memory: _Memory) -> None:
        """Raise unless whoever has this clock knows of the write, and of the reads."""
        for what, access in (("write", self.written), ("read", self.read)):
            for lane, time in access.items():
                if (what == "write" or writes) and clock.get(lane, 0) < time:
                    raise RaceError(
                        f"{memory.name}, from byte {self.start - memory.start}: {act}, "
                        f"but nothing orders this after the last {what} by {lane.name}. "
                        f"Missing is a wait for a point of {lane.name} after it."
                    )


class _Memory:
    """A range of addresses, in parts that split where accesses begin and end."""

    def __init__(
        self, start: int, end: int, name: str, on_device: bool, written: _Clock
    ) -> None:
        self.start, self.end = start, end
        self.name = name
        self.on_device = on_device
        self.has_windows = self.in_use = False
        self._parts = [_Part(start, written, {})]

    def parts(self, start: int, end: int) -> list[_Part]:
        """Those from address `start` to `end`, which become bounds."""
        first = self._bound(start)
        return self._parts[first : self._bound(end)]

    def check_end(self, clock: _Clock, act: str) -> None:
        if self.in_use:
            raise RaceError(f"{self.name}: {act}, but compute has not ended its use")
        for part in self._parts:
            part.check(clock, act, True, self)

    def _bound(self, address: int) -> int:
        if address == self.end:
            return len(self._parts)
        at = bisect_left(self._parts, address, key=_start)
        if at == len(self._parts) or self._parts[at].start != address:
            before = self._parts[at - 1]
            self._parts.insert(at, _Part(address, before.written, dict(before.read)))
        return at


_start = attrgetter("start")


class CheckedDevice(Device):
    """Another device with every access checked. Costs microseconds a call.

    Each fetch into a buffer that has windows finds it full of NaN bytes.

    Raises:
        RaceError: From any method, and from those of its streams.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.lock = threading.RLock()
        self._local = threading.local()
        self._caller = self._local.lane = _Lane("the calling thread")
        names = ("compute", "fetch", "offload", "communicate")
        self._lanes = tuple(map(_Lane, names))
        self._compute, fetch, offload, communicate = self._lanes
        self.fetch = _CheckedStream(self, device.fetch, fetch)
        self.offload = _CheckedStream(self, device.offload, offload)
        self.communicate = _CheckedStream(self, device.communicate, communicate)
        self._known: list[_Memory] = []
        self._ended: deque[tuple[_Memory, _Clock]] = deque()
        self._num_buffers = 0

    @property
    def compute(self) -> Stream:
        return _CheckedStream(self, self._device.compute, self._compute)

    def watch(self, already: int) -> AbstractContextManager[Any]:
        both = ExitStack()
        both.enter_context(self._device.watch(already))
        both.enter_context(_Operators(self))
        return both

    # memory

    def allocate(self, nbytes: int) -> Tensor:
        buffer = self._device.allocate(nbytes)
        with self.queueing(self._compute):
            self._compute.tick()
            if nbytes:
                self._new(buffer, self._name("device"), on_device=True)
        return buffer

    def free(self, buffer: Tensor) -> None:
        if buffer.numel():
            self._end(buffer, "frees")
        self._device.free(buffer)

    def pin(self, host: Tensor) -> None:
        self._device.pin(host)
        with self._settled():
            self._add(_Memory(*_span(host), self._name("pinned"), False, {}))

    def unpin(self, host: Tensor) -> None:
        self._end(host, "unpins")
        self._device.unpin(host)

    # order

    def mark(self) -> Event:
        with self.lock:
            return _CheckedEvent(self, self._device.mark(), dict(self.thread().clock))

    def wait_stalled(self, event: Event) -> None:
        assert isinstance(event, _CheckedEvent)
        self._device.wait_stalled(event.inner)
        with self.queueing(self._compute):
            self._compute.join(event.clock)

    def synchronize(self) -> None:
        self._device.synchronize()
        with self._settled():
            for lane in self._lanes:
                self.thread().join(lane.clock)

    def thread(self) -> _Lane:
        """The lane of the calling thread."""
        # threads that no one here has started (torch's, gloo's) act for the caller
        foreign = threading.current_thread().name.startswith("Dummy-")
        if foreign or torch._C._current_graph_task_id() != -1:
            return self._caller
        if not hasattr(self._local, "lane"):
            self._local.lane = _Lane(f"the thread {threading.current_thread().name}")
        return self._local.lane

    @contextmanager
    def queueing(self, lane: _Lane) -> Iterator[None]:
        """The calling thread queues something on the stream of a lane."""
        with self._settled():
            lane.join(self.thread().clock)
            yield

    def learn(self, event: _CheckedEvent) -> None:
        """The calling thread has waited for an event."""
        with self._settled():
            self.thread().join(event.clock)

    # accesses

    def reads(self, memory: Iterable[Tensor], stream: Stream | None = None) -> None:
        self._declared(memory, stream, writes=False)

    def writes(self, memory: Iterable[Tensor], stream: Stream | None = None) -> None:
        self._declared(memory, stream, writes=True)

    def begin_use(self, buffer: Tensor) -> None:
        with self.queueing(self._compute):
            memory = self.access(self._compute, buffer, False, True)
            if memory.in_use:
                raise RaceError(f"{memory.name}: its use begins a second time")
            memory.in_use = memory.has_windows = True

    def end_use(self, buffer: Tensor) -> None:
        with self.queueing(self._compute):
            memory = self.access(self._compute, buffer, False, True)
            if not memory.in_use:
                raise RaceError(f"{memory.name}: its use ends but has not begun")
            memory.in_use = False

    def access(
        self, lane: _Lane, tensor: Tensor, writes: bool, on_device: bool
    ) -> _Memory:
        """A lane reads or writes memory on the device or the host."""
        start, end = _span(tensor)
        memory = self._at(start, end)
        if memory is None:
            name = f"a tensor {list(tensor.shape)} of {tensor.dtype}"
            memory = self._new(tensor, name, on_device)
        act = f"{lane.name} {'writes' if writes else 'reads'} it"
        if writes and memory.in_use:
            raise RaceError(f"{memory.name}: {act}, but compute has not ended its use")
        time = lane.tick()
        for part in memory.parts(max(start, memory.start), min(end, memory.end)):
            part.check(lane.clock, act, writes, memory)
            if writes:
                part.written, part.read = {lane: time}, {}
            else:
                part.read[lane] = time
        return memory

    def has_windows(self, tensor: Tensor, closed: bool = False) -> bool:
        """True for memory that has windows; with `closed` if none is open now."""
        with self.lock:
            memory = self._at(*_span(tensor))
            if memory is None or (closed and memory.in_use):
                return False
            return memory.has_windows

    def _declared(
        self, memory: Iterable[Tensor], stream: Stream | None, writes: bool
    ) -> None:
        assert stream is None or isinstance(stream, _CheckedStream)
        lane = self.thread() if stream is None else stream.lane
        with self.queueing(lane):
            for tensor in filter(Tensor.numel, memory):
                self.access(lane, tensor, writes, on_device=stream is not None)

    def _at(self, start: int, end: int) -> _Memory | None:
        """What is there, or page-locked of it from another address on: memory may begin in
        the shard of another rank."""
        at = bisect_right(self._known, start, key=_start)
        near = self._known[max(at - 1, 0) : at + 1]
        return next((m for m in near if start < m.end and m.start < end), None)

    def _new(self, tensor: Tensor, name: str, on_device: bool) -> _Memory:
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        # an allocator hands out what compute may just have used
        compute = self._compute
        written = {compute: compute.clock[compute]} if on_device else {}
        memory = _Memory(start, start + storage.nbytes(), name, on_device, written)
        self._add(memory)
        weakref.finalize(storage, self._storage_ends, memory).atexit = False
        return memory

    def _add(self, memory: _Memory) -> None:
        self._known = [
            other
            for other in self._known
            if other.end <= memory.start or memory.end <= other.start
        ]
        insort(self._known, memory, key=_start)

    def _storage_ends(self, memory: _Memory) -> None:
        # runs in the middle of anything: only note it, with what is known now
        self._ended.append((memory, self._known_by(memory)))

    def _known_by(self, memory: _Memory) -> _Clock:
        """The clock of whoever gets the memory next."""
        heir = _Lane("")
        heir.join(dict(self.thread().clock))
        if memory.on_device:
            heir.join(dict(self._compute.clock))
        return heir.clock

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """Under the lock, once the ends of storages have been looked at."""
        with self.lock:
            while self._ended:
                memory, clock = self._ended.popleft()
                if memory in self._known:
                    self._known.remove(memory)
                    memory.check_end(clock, "its storage ends")
            yield

    def _end(self, tensor: Tensor, verb: str) -> None:
        with self._settled():
            memory = self._at(*_span(tensor))
            name = self.thread().name
            if memory is None:
                raise RaceError(f"{name} {verb} memory that nobody has taken")
            memory.check_end(self._known_by(memory), f"{name} {verb} it")
            self._known.remove(memory)

    def _name(self, kind: str) -> str:
        self._num_buffers += 1
        return f"{kind} buffer {self._num_buffers - 1}"


def _of_inner(name: str) -> property:
    return property(
        lambda checked: getattr(checked._device, name),
        lambda checked, value: setattr(checked._device, name, value),
    )


for _name in {*vars(Device), *Device.__annotations__} - {*vars(CheckedDevice)}:
    if not _name.startswith("__") and _name not in ("fetch", "offload", "communicate"):
        setattr(CheckedDevice, _name, _of_inner(_name))


@dataclass
class _CheckedStream:
    device: CheckedDevice
    inner: Stream
    lane: _Lane
    filled: set[int] = field(default_factory=set)
    """Addresses of buffers that are being fetched into, until the next event."""

    def wait(self, event: Event) -> None:
        assert isinstance(event, _CheckedEvent)
        self.inner.wait(event.inner)
        with self.device.queueing(self.lane):
            self.lane.join(event.clock)

    def record(self) -> Event:
        self.filled.clear()
        inner = self.inner.record()
        with self.device.queueing(self.lane):
            return _CheckedEvent(self.device, inner, dict(self.lane.clock))

    def copy(self, target: Tensor, source: Tensor) -> None:
        if target.numel():
            to_device = self.lane.name != "offload"
            self._access(source, False, not to_device)
            self._poison(target)
            self._access(target, True, to_device)
            self._queue(self.inner.copy, target, source)

    def fill(self, target: Tensor, byte: int) -> None:
        if target.numel():
            self._access(target, True, True)
            self._queue(self.inner.fill, target, byte)

    def call(self, work: Callable[[], object], memory: Sequence[Tensor]) -> None:
        for tensor in memory:
            self._poison(tensor)
            self._access(tensor, True, True)
        self._queue(self.inner.call, work, memory)

    def _poison(self, target: Tensor) -> None:
        """A stale read finds neither this chunk nor the one before."""
        storage = target.untyped_storage()
        if self.lane.name != "fetch" or storage.data_ptr() in self.filled:
            return
        if self.device.has_windows(target):
            self.filled.add(storage.data_ptr())
            buffer = torch.empty(0, dtype=torch.uint8, device=target.device)
            self.fill(buffer.set_(storage), POISON_BYTE)

    def _access(self, tensor: Tensor, writes: bool, on_device: bool) -> None:
        with self.device.queueing(self.lane):
            self.device.access(self.lane, tensor, writes, on_device)

    def _queue(self, act: Callable[..., None], *args: Any) -> None:
        # its operators have been checked
        with _python_dispatch._disable_current_modes():
            act(*args)


@dataclass
class _CheckedEvent:
    device: CheckedDevice
    inner: Event
    clock: _Clock

    def synchronize(self) -> None:
        self.inner.synchronize()
        self.device.learn(self)

    def query(self) -> bool:
        if done := self.inner.query():
            self.device.learn(self)
        return done


class _Operators(OperatorMode):
    """Looks at the memory of every operator, on autograd's threads too."""

    def __init__(self, device: CheckedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not func.is_view:
            for tensor in tensors_in((args, kwargs)):
                if self._device.has_windows(tensor, closed=True):
                    raise RaceError(f"{func} touches a buffer outside its window")
        return call_operator(func, args, kwargs)


def _span(tensor: Tensor) -> tuple[int, int]:
    """First address and the one after the last."""
    start = tensor.data_ptr()
    last = sum(
        (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return start, start + (last + 1) * tensor.element_size()
