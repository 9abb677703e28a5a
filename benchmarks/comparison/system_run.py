"""One system on one case in a process of its own, which waits for its turn to step."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .cases import Case

EXTENSIONS = Path.home() / ".cache" / "protrain-benchmarks" / "torch_extensions"
"""Where peers build their kernels on first use, apart from what others build."""

NOT_IN_TIME = "not done in time: raise --minutes"
"""Excuse of a system that says nothing about it."""
READY, MEASURED = "ready", "measured"
"""What a process says before each step, and at its end."""


def prepare(device_type: str) -> None:
    """Start the server that all processes fork from, with the environment of now.

    On a CPU it has the libraries loaded that all systems need, which saves minutes; a
    GPU must be opened in the process that uses it, so there nothing is loaded before.
    """
    multiprocessing.set_start_method("forkserver")
    if device_type == "cpu":
        # the server finds installed modules only, and says nothing of others
        multiprocessing.set_forkserver_preload(
            ["bitsandbytes", "peft", "transformers.models.llama.modeling_llama"]
        )


def build(system: str, device_type: str) -> None:
    """Compile what a system compiles when it is first used, outside of any time limit.

    An error is left to the system's own run, which reports it.
    """
    process = multiprocessing.Process(target=_build, args=(system, device_type))
    process.start()
    process.join()


class SystemRun:
    """A process of `comparison.measure`.

    Args:
        case: What it trains.
        system: Key of `LABELS`.
        device_type: cpu or cuda.

    Attributes:
        peak_bytes: Device memory so far, as it says before each step; None if unknown.
    """

    peak_bytes: int | None = None

    def __init__(self, case: Case, system: str, device_type: str) -> None:
        self._key = {"case": asdict(case), "system": system}
        self._folder = tempfile.TemporaryDirectory()
        self._said = Path(self._folder.name) / "said"
        self._excuse = ""
        self._measured: dict[str, Any] | None = None
        self._connection, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.Process(
            target=_measure,
            args=(system, case, device_type, time.time(), theirs, self._said),
        )
        self._process.start()
        theirs.close()

    @property
    def _over(self) -> bool:
        return bool(self._excuse) or self._measured is not None

    def begin_step(self) -> None:
        """Let it step once; does nothing if it has ended."""
        if not self._over:
            self._connection.send(READY)

    def wait(self, deadline: float) -> None:
        """Until it is ready for a step, or has ended.

        Args:
            deadline: Of `time.monotonic`; it is ended then.
        """
        if self._over:
            return
        if not self._connection.poll(max(deadline - time.monotonic(), 0)):
            self._excuse = NOT_IN_TIME
            self._kill()
            return
        try:
            said = self._connection.recv()
        except EOFError:
            self._process.join()
            text = self._said.read_text(errors="replace")
            self._excuse = own_words(text, self._process.exitcode or 0)
            return
        if said[0] == READY:
            self.peak_bytes = said[1]
        else:
            self._measured = said[1]

    def record(self) -> dict[str, Any]:
        """What it has measured, or why it has not."""
        return self._measured or {**self._key, "excuse": self._excuse}

    def close(self) -> None:
        """End it, whatever it does."""
        self._kill()
        self._connection.close()
        self._folder.cleanup()

    def _kill(self) -> None:
        if self._process.pid is None or not self._process.is_alive():
            return
        # builds of extensions have children of their own
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # it may not have made its group yet
        self._process.kill()
        self._process.join()
        for lock in EXTENSIONS.rglob("lock"):
            # of a build that was ended with it; the next would wait forever
            lock.unlink()


def _build(system: str, device_type: str) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for standard in (1, 2):
        os.dup2(nowhere, standard)
    importlib.import_module(f"comparison.systems.{system}").build(device_type == "cpu")
    # process groups of some systems never end
    os._exit(0)


def _measure(
    system: str,
    case: Case,
    device_type: str,
    started: float,
    connection: Connection,
    said: Path,
) -> None:
    """What runs in the process."""
    os.setsid()
    # if the host's memory is not enough, this process ends and not the others
    Path("/proc/self/oom_score_adj").write_text("1000")
    descriptor = os.open(said, os.O_WRONLY | os.O_CREAT)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    # imports torch, which the parent has no use for
    from .measure import measure

    def wait_for_turn(peak_bytes: int | None) -> None:
        connection.send((READY, peak_bytes))
        connection.recv()

    measured = measure(system, case, device_type, started, wait_for_turn)
    connection.send((MEASURED, measured))
    sys.stdout.flush()
    # process groups and worker threads of some systems never end
    os._exit(0)


def own_words(said: str, exit_code: int) -> str:
    """The last exception of an output; a signal if there is none."""
    said = re.sub(r"^\[rank\d+\]: ?", "", said, flags=re.MULTILINE)
    errors = re.findall(r"^[\w.]*(?:Error|Exception)\b.*", said, re.MULTILINE)
    if errors:
        return f"`{errors[-1][:500]}`"
    if exit_code < 0:
        return f"ended by {signal.Signals(-exit_code).name}"
    last = (said.strip().splitlines() or ["nothing"])[-1]
    return f"exit code {exit_code}: `{last[:500]}`"
