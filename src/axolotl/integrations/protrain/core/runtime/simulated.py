"""A CPU device whose copies take time, beside compute: for tests and measurements.

Blocks compute on the caller's thread, as on `CpuDevice`. Each copy stream is a thread
that carries out what was queued on it in order, after the events it was told to wait
for, so a read without a wait on the copy really reads what is not there yet.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from .device import CpuDevice, Event, Stream, _ImmediateStream

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
        late: Carry out a copy only when somebody waits for it or for something later
            in its queue: as late as the events allow.
    """

    def __init__(self, fetch: Delay, offload: Delay, late: bool = False) -> None:
        super().__init__()
        self._queues = (
            _QueuedStream("protrain-fetch", fetch, late),
            _QueuedStream("protrain-offload", offload, late),
        )
        self.fetch, self.offload = self._queues
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


class _QueuedStream:
    """A thread that works through what was queued; a failed copy fails all later."""

    def __init__(self, name: str, delay: Delay, late: bool) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._delay = delay
        self._late = late
        self._queued = 0
        self._last: Future[None] = Future()
        self._last.set_result(None)
        self._wanted = 0
        self._wish = threading.Condition()

    def wait(self, event: Event) -> None:
        self._queue(event.synchronize)

    def record(self) -> Event:
        return _QueuedEvent(self, self._queued, self._last)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._queue(partial(_copy, target, source, self._delay(source.nbytes)))

    def fill(self, target: Tensor, byte: int) -> None:
        self._queue(partial(target.fill_, byte))

    def want(self, position: int) -> None:
        """Let everything up to there be carried out."""
        with self._wish:
            self._wanted = max(self._wanted, position)
            self._wish.notify_all()

    def close(self) -> None:
        self.want(self._queued)
        self._pool.shutdown(wait=True)

    def _queue(self, work: Callable[[], object]) -> None:
        self._queued += 1
        self._last = self._pool.submit(self._carry_out, work, self._queued, self._last)

    def _carry_out(
        self, work: Callable[[], object], position: int, before: Future[None]
    ) -> None:
        if self._late:
            with self._wish:
                self._wish.wait_for(lambda: self._wanted >= position)
        before.result()
        work()


class _QueuedEvent:
    def __init__(
        self, stream: _QueuedStream, position: int, last: Future[None]
    ) -> None:
        self._stream = stream
        self._position = position
        self._last = last

    def synchronize(self) -> None:
        self._stream.want(self._position)
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
    with torch.no_grad():
        target.copy_(source)
