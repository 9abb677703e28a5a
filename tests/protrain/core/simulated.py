"""CPU devices whose copies come later, beside compute: for tests and benchmarks.

Both carry out what was queued on a copy stream in order, after the events it was told
to wait for, so a read without a wait on the copy really reads what is not there yet.
`SimulatedDevice` has a thread for each stream and takes the time that a link takes.
`DeferredDevice` has no thread and no clock: copies come at moments that a seed decides,
or as late as the events allow.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from axolotl.integrations.protrain.core.engine.device import (
    CpuDevice,
    Event,
    Stream,
    _ImmediateStream,
)

Delay = Callable[[int], float]
"""Seconds that a copy of so many bytes takes."""


def at_rate(bytes_s: float) -> Delay:
    """A link of fixed bandwidth."""
    return lambda nbytes: nbytes / bytes_s


def at_random(seed: int, longest_s: float) -> Delay:
    """Anything from 0 to `longest_s`, the same sequence for each seed."""
    # delays, not secrets
    generator = random.Random(seed)  # nosec B311
    return lambda _nbytes: generator.uniform(0, longest_s)


class SimulatedDevice(CpuDevice):
    """A `CpuDevice` with real queues of copies. Whoever makes one closes it.

    Args:
        fetch: Delay of copies to the device.
        offload: Delay of copies from it.
    """

    def __init__(self, fetch: Delay, offload: Delay) -> None:
        super().__init__()
        self._queues = (
            _QueuedStream("protrain-fetch", fetch),
            _QueuedStream("protrain-offload", offload),
            _QueuedStream("protrain-communicate", lambda _nbytes: 0.0),
        )
        self.fetch, self.offload, self.communicate = self._queues
        self._on_caller = _CallerStream(self, fetch)

    @property
    def compute(self) -> Stream:
        return self._on_caller

    def wait_stalled(self, event: Event) -> None:
        start = time.perf_counter()
        event.synchronize()
        self.stall_s += time.perf_counter() - start

    def synchronize(self) -> None:
        for queue in self._queues:
            queue.record().synchronize()

    def close(self) -> None:
        """Carry out what is queued and end the threads."""
        for queue in self._queues:
            queue.close()


class DeferredDevice(CpuDevice):
    """A `CpuDevice` whose copies happen when somebody waits for them, the same each run.

    Args:
        seed: Of random moments before that at which heads of the queues are carried
            out, at any call; None for as late as the events allow.
        queue_compute: Compute is a queue too, for kernels that are `launch`ed; autograd
            computes at once.

    Raises:
        RuntimeError: From any call, once memory has ended that a queued copy needs.
    """

    def __init__(self, seed: int | None = None, queue_compute: bool = False) -> None:
        super().__init__()
        # moments, not secrets
        self._moments = None if seed is None else random.Random(seed)  # nosec B311
        self.lock = threading.RLock()
        self.ended: list[str] = []
        self._queues = [_DeferredStream(self) for _ in range(3 + queue_compute)]
        self.fetch, self.offload, self.communicate = self._queues[:3]
        self._on_caller = _ImmediateStream(self)
        self._opener = threading.current_thread()

    @property
    def compute(self) -> Stream:
        return self._queues[3] if len(self._queues) > 3 else self._on_caller

    def launch(self, kernel: Callable[[], object]) -> None:
        """Queue a kernel on compute, which must be a queue."""
        self._queues[3].launch(kernel)

    def synchronize(self) -> None:
        for queue in self._queues:
            queue.record().synchronize()

    def a_call(self) -> None:
        """Somebody uses the device: the moment for what has not been waited for."""
        if self.ended:
            raise RuntimeError(self.ended[0])
        moments = self._moments
        if moments is None or threading.current_thread() is not self._opener:
            # draws of another thread would come in another order each run
            return
        while moments.random() < 0.6:
            moments.choice(self._queues).carry_out_head()

    def close(self) -> None:
        """Carry out what is queued."""
        self.synchronize()


class _DeferredStream:
    """A queue that others carry out, under the lock of the device."""

    def __init__(self, device: DeferredDevice) -> None:
        self._device = device
        self._queue: deque[_DeferredEvent | _DeferredCopy | Callable[[], object]] = (
            deque()
        )
        self._num_queued = 0
        self.num_done = 0

    def wait(self, event: Event) -> None:
        if isinstance(event, _DeferredEvent):
            self._add(event)
            if self is self._device.compute:
                event.keep_copies()

    def record(self) -> Event:
        with self._device.lock:
            self._device.a_call()
            return _DeferredEvent(self._device, self, self._num_queued)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._add(_DeferredCopy(self._device.ended, target, source))

    def fill(self, target: Tensor, byte: int) -> None:
        value = torch.full_like(target, byte)
        copy = _DeferredCopy(self._device.ended, target, value)
        copy.source.keep()
        self._add(copy)

    def launch(self, kernel: Callable[[], object]) -> None:
        self._add(kernel)

    def call(self, work: Callable[[], None], memory: Sequence[Tensor]) -> None:
        def apart() -> None:
            # no operators of whoever waits for them
            with torch.no_grad(), _disable_current_modes():
                work()

        self._add(apart)

    def carry_out(self, position: int) -> None:
        """Everything up to a position, and what that waits for."""
        while self.num_done < position:
            head = self._queue[0]
            if isinstance(head, _DeferredEvent):
                head.carry_out()
            self.carry_out_head()

    def carry_out_head(self) -> None:
        """The next work, unless there is none or it waits for another stream's."""
        if not self._queue:
            return
        head = self._queue[0]
        if not isinstance(head, _DeferredEvent):
            head()
        elif not head.is_done():
            return
        self._queue.popleft()
        self.num_done += 1

    def keep_copies(self, position: int) -> None:
        """Compute waits up to there: memory that ends now is reused only after it."""
        for work in list(self._queue)[: max(0, position - self.num_done)]:
            if isinstance(work, _DeferredCopy):
                work.target.keep()
                work.source.keep()

    def _add(self, work: _DeferredEvent | _DeferredCopy | Callable[[], object]) -> None:
        with self._device.lock:
            self._device.a_call()
            self._queue.append(work)
            self._num_queued += 1


class _DeferredEvent:
    def __init__(
        self, device: DeferredDevice, stream: _DeferredStream, position: int
    ) -> None:
        self._device = device
        self._stream = stream
        self._position = position

    def synchronize(self) -> None:
        with self._device.lock:
            self._device.a_call()
            self.carry_out()

    def query(self) -> bool:
        with self._device.lock:
            self._device.a_call()
            return self.is_done()

    def is_done(self) -> bool:
        return self._stream.num_done >= self._position

    def carry_out(self) -> None:
        self._stream.carry_out(self._position)

    def keep_copies(self) -> None:
        self._stream.keep_copies(self._position)


class _DeferredCopy:
    """A copy that does not keep its memory alive, as on a device."""

    def __init__(self, ended: list[str], target: Tensor, source: Tensor) -> None:
        self.target = _WeakTensor(ended, target)
        self.source = _WeakTensor(ended, source)

    def __call__(self) -> None:
        # a device's copies are no operators of whoever waits for them
        with torch.no_grad(), _disable_current_modes():
            self.target.get().copy_(self.source.get())


class _WeakTensor:
    """A tensor that notes in `ended` when its memory does."""

    def __init__(self, ended: list[str], tensor: Tensor) -> None:
        self._dtype = tensor.dtype
        self._strides = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._error = error = f"a copy of {list(tensor.shape)} outlives its memory"
        storage = tensor.untyped_storage()
        self._storage = weakref.ref(storage, lambda _: ended.append(error))
        self._kept: torch.UntypedStorage | None = None

    def keep(self) -> None:
        self._kept = self._storage()

    def get(self) -> Tensor:
        storage = self._storage()
        if storage is None:
            raise RuntimeError(self._error)
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._strides)


class _QueuedStream:
    """A thread that works through what was queued; a failed copy fails all later."""

    def __init__(self, name: str, delay: Delay) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._delay = delay
        self._last: Future[None] = Future()
        self._last.set_result(None)

    def wait(self, event: Event) -> None:
        self._queue(event.synchronize)

    def record(self) -> Event:
        return _QueuedEvent(self._last)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._queue(partial(_copy, target, source, self._delay(source.nbytes)))

    def fill(self, target: Tensor, byte: int) -> None:
        self._queue(partial(target.fill_, byte))

    def call(self, work: Callable[[], None], memory: Sequence[Tensor]) -> None:
        self._queue(work)

    def close(self) -> None:
        self._pool.shutdown(wait=True)

    def _queue(self, work: Callable[[], object]) -> None:
        self._last = self._pool.submit(_carry_out, work, self._last)


def _carry_out(work: Callable[[], object], before: Future[None]) -> None:
    before.result()
    # what an evaluation has made is an inference tensor
    with torch.inference_mode():
        work()


class _QueuedEvent:
    def __init__(self, last: Future[None]) -> None:
        self._last = last

    def synchronize(self) -> None:
        self._last.result()

    def query(self) -> bool:
        return self._last.done()


class _CallerStream(_ImmediateStream):
    """Compute: the caller's own thread, which copies to the device at the link's rate."""

    def __init__(self, device: SimulatedDevice, delay: Delay) -> None:
        super().__init__(device)
        self._delay = delay

    def wait(self, event: Event) -> None:
        self._device.wait_stalled(event)

    def copy(self, target: Tensor, source: Tensor) -> None:
        start = time.perf_counter()
        _copy(target, source, self._delay(source.nbytes))
        self._device.stall_s += time.perf_counter() - start


def _copy(target: Tensor, source: Tensor, seconds: float) -> None:
    time.sleep(seconds)
    with torch.inference_mode():
        target.copy_(source)
