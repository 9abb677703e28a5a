"""One background thread for host work on chunks: gradient sums and optimizer updates.

Work runs in the order it was queued. A failed update is raised on the caller's thread
by the next wait for its chunk or by `drain`, a failed sum by its future.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


class HostWorker:
    """Runs one task after another and remembers the last update of each chunk.

    Args:
        threads: Intra-op threads of its tasks; None leaves torch's own number.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._pool = ThreadPoolExecutor(
            1,
            thread_name_prefix="protrain-host",
            initializer=partial(torch.set_num_threads, threads) if threads else None,
        )
        self._last: dict[int, Future[Any]] = {}
        self.waited_s = 0.0

    def submit(
        self, task: Callable[[], Result], changes: int | None = None
    ) -> Future[Result]:
        """Queue work; `changes` names the chunk whose weights it changes, if any."""
        if changes is not None:
            self.wait(changes)
        future = self._pool.submit(task)
        if changes is not None:
            self._last[changes] = future
        return future

    def pending(self, chunk: int) -> bool:
        """True while an update of the chunk is queued or running; raise its failure."""
        future = self._last.get(chunk)
        if future is None:
            return False
        if future.done():
            self.wait(chunk)
            return False
        return True

    def wait(self, chunk: int) -> None:
        """Block until the chunk's update is done; raise what it raised."""
        future = self._last.get(chunk)
        if future is None:
            return
        if not future.done():
            start = time.perf_counter()
            future.exception()
            self.waited_s += time.perf_counter() - start
        # forgotten only now: a signal handler may wait for the same chunk meanwhile
        self._last.pop(chunk, None)
        future.result()

    def drain(self) -> None:
        """Block until all updates are done; raise the first failure."""
        for chunk in list(self._last):
            self.wait(chunk)

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._pool.shutdown(wait=True)
