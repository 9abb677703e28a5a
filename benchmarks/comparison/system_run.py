"""One system on one case in a process of its own, which waits for its turn to step."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .cases import Case

EXTENSIONS = Path.home() / ".cache" / "protrain-benchmarks" / "torch_extensions"
"""Where peers build their kernels on first use, apart from what others build."""


class SystemRun:
    """A process of `comparison.measure`.

    Args:
        case: What it trains.
        system: Key of `LABELS`.
        device_type: cpu or cuda.
        environment: Of the process.
    """

    def __init__(
        self,
        case: Case,
        system: str,
        device_type: str,
        environment: Mapping[str, str],
    ) -> None:
        self._key = {"case": asdict(case), "system": system}
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self._written, self._said = folder / "measured.json", folder / "said"
        self._excuse = ""
        self._ready, ready = os.pipe()
        with self._said.open("w") as said:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "comparison.measure"),
                    *(system, case.name, device_type, str(self._written)),
                    *(str(time.time()), str(ready)),
                ],
                cwd=Path(__file__).parents[1],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.STDOUT,
                pass_fds=(ready,),
                start_new_session=True,
            )
        os.close(ready)

    def begin_step(self) -> None:
        """Let it step once; does nothing if it has ended."""
        assert self._process.stdin is not None
        if self._process.poll() is None and not self._excuse:
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()

    def wait(self, deadline: float) -> None:
        """Until it is ready for a step, or has ended.

        Args:
            deadline: Of `time.monotonic`; it is ended then.
        """
        if self._excuse:
            return
        left_s = max(deadline - time.monotonic(), 0)
        ready, _, _ = select.select([self._ready], [], [], left_s)
        if not ready:
            self._excuse = "not done in time: raise --minutes"
            self._kill()
        elif not os.read(self._ready, 1):
            self._process.wait()

    def record(self) -> dict[str, Any]:
        """What it has measured, or why it has not."""
        if not self._excuse and self._process.wait() == 0:
            return dict(json.loads(self._written.read_text()))
        said = self._said.read_text(errors="replace")
        excuse = self._excuse or own_words(said, self._process.returncode)
        return {**self._key, "excuse": excuse}

    def close(self) -> None:
        """End it, whatever it does."""
        self._kill()
        os.close(self._ready)
        self._folder.cleanup()

    def _kill(self) -> None:
        if self._process.poll() is None:
            # builds of extensions have children of their own
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            for lock in EXTENSIONS.rglob("lock"):
                # of a build that was ended with it; the next would wait forever
                lock.unlink()


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
