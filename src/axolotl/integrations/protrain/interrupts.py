"""Signals that end a training wait for the end of the step that they come in.

Weights, gradients and optimizer state are true between two passes. A handler that saves the
model, as Axolotl's of Ctrl-C does, is called there; a second signal calls it at once.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = signal.SIGINT, signal.SIGTERM


class DeferredSignals:
    """Holds SIGINT and SIGTERM back while a step runs.

    Args:
        log: Says that a signal waits.
    """

    def __init__(self, log: logging.Logger | logging.LoggerAdapter[Any]) -> None:
        self._log = log
        self._handlers: dict[int, Any] = {}
        self._waiting: int | None = None
        self._holds = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Stand before the handlers that are there, inside; in the main thread alone, where
        Python has them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        found = {number: signal.getsignal(number) for number in SIGNALS}
        # one that no Python has installed cannot be put back
        self._handlers = {n: h for n, h in found.items() if h is not None}
        for number in self._handlers:
            signal.signal(number, self._arrives)
        try:
            yield
        finally:
            for taken, handler in self._handlers.items():
                signal.signal(taken, handler)
            # a step that an error ended has not taken it
            self.release()

    def hold(self) -> None:
        """A step begins."""
        self._holds = True

    def release(self) -> None:
        """A step has ended: call the handler of a signal that came in it."""
        self._holds = False
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._call(waiting, None)

    def _arrives(self, number: int, frame: FrameType | None) -> None:
        if not self._holds or self._waiting is not None:
            self._waiting = None
            self._call(number, frame)
            return
        self._waiting = number
        self._log.warning(
            f"{signal.Signals(number).name}: the run ends after this step, when all weights "
            "are written back. Send it again to end at once, without that."
        )

    def _call(self, number: int, frame: FrameType | None) -> None:
        handler = self._handlers.get(number)
        if callable(handler):
            handler(number, frame)
        elif handler == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
