"""One background thread for updates of chunks: it makes them, or waits until they landed.

Work runs in the order it was queued. A failed update is raised on the caller's thread
by the next wait for its chunk, other work by its task.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from .device import Device, Event

Result = TypeVar("Result")


class HostTask(Generic[Result]):
    """Work queued on the host thread. Who waits for it has seen what it did."""

    def __init__(
        self, pool: ThreadPoolExecutor, device: Device, work: Callable[[], Result]
    ) -> None:
        self._end = queued = device.mark()
        self._future = pool.submit(self._run, device, queued, work)

    def _run(self, device: Device, queued: Event, work: Callable[[], Result]) -> Result:
        queued.synchronize()
        try:
            return work()
        finally:
            self._end = device.mark()

    def wait(self) -> None:
        """Block until it has run, whether or not it failed."""
        self._future.exception()
        self._end.synchronize()

    @property
    def done(self) -> bool:
        """True once it has run, or failed."""
        return self._future.done()

    def everywhere(self) -> bool:
        """True once it has run, here and on the ranks that its result stands for."""
        if not self._future.done():
            return False
        others = self._others()
        return others is None or others.is_completed()

    def wait_everywhere(self) -> None:
        """Block until then; raise what has become of the others."""
        others = self._others()
        if others is not None:
            others.wait()

    def _others(self) -> Any:
        return None if self._future.exception() else self._future.result()

    def result(self) -> Result:
        """Block until it has run; raise what it raised."""
        self.wait()
        return self._future.result()


class HostWorker:
    """Runs one task after another, and remembers the last update of each chunk."""

    def __init__(self, device: Device) -> None:
        threads = device.host_threads
        self._device = device
        self._pool = ThreadPoolExecutor(
            1,
            thread_name_prefix="protrain-host",
            initializer=partial(torch.set_num_threads, threads) if threads else None,
        )
        self._last: dict[int, HostTask[Any]] = {}
        self._newest: HostTask[Any] | None = None
        self.waited_s = 0.0

    def submit(
        self, task: Callable[[], Result], changes: int | None = None
    ) -> HostTask[Result]:
        """Queue work; `changes` names the chunk whose weights it changes, if any, for
        whose update before somebody has waited.

        Such work may return what is done once other ranks have changed it too.
        """
        queued = self._newest = HostTask(self._pool, self._device, task)
        if changes is not None:
            self._last[changes] = queued
        return queued

    def pending(self, chunk: int) -> bool:
        """True while an update of the chunk is queued or running; raise its failure."""
        update = self._last.get(chunk)
        if update is not None and not update.everywhere():
            return True
        self.wait(chunk)
        return False

    def wait(self, chunk: int) -> None:
        """Block until the chunk's update is done; raise what it raised."""
        update = self._last.get(chunk)
        if update is None:
            return
        is_done, start = update.everywhere(), time.perf_counter()
        # gloo calls a barrier complete that has failed, which waiting for it raises
        update.wait_everywhere()
        if not is_done:
            self.waited_s += time.perf_counter() - start
        # forgotten only now: a signal handler may wait for the same chunk meanwhile
        self._last.pop(chunk, None)
        update.result()

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._pool.shutdown(wait=True)
        if self._newest is not None:
            # after a failure nobody has waited for what came later
            self._newest.wait()
