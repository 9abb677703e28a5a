"""A server of the training service in a process, and clients of the package index."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import service_http_jobs
from fork_server import ENVIRONMENT, Fork

TINKER_NEEDS = "distro sniffio orjson h2 hpack hyperframe pyqwest".split()
"""What that client needs and Axolotl does not bring; its zstandard is another one."""
OPENAI_NEEDS = "httpx2 httpcore2 jiter truststore".split()


def installed(folder: Path, *packages: str) -> Path:
    """A folder with unmodified packages of the index; the test is skipped without."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
    asked = [*pip, "--target", str(folder), *packages]
    ended = subprocess.run(asked, capture_output=True, text=True, check=False)
    if ended.returncode:
        pytest.skip(f"no {packages[0]} to be had: {ended.stderr[-300:]}")
    return folder


def by_client(
    script: str, folder: Path, given: Mapping[str, str], *arguments: str
) -> dict[str, Any]:
    """What a script of a client prints, in a process that has its package."""
    path = Path(__file__).with_name(script)
    ended = subprocess.run(
        [sys.executable, str(path), *arguments],
        env={**os.environ, **ENVIRONMENT, **given, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout)


@contextmanager
def server(path: Path, *options: str, host: str = "127.0.0.1") -> Iterator[str]:
    """The address of a server, which ends by SIGTERM."""
    log = path.with_name("server.log")
    with log.open("w") as words:
        running = Fork(
            service_http_jobs.serve,
            path,
            *options,
            folder=path.parent,
            stdout=subprocess.PIPE,
            stderr=words,
        )
    assert running.stdout is not None
    line = running.stdout.readline()
    try:
        assert line.startswith(f"listening on http://{host}:"), log.read_text()
        yield line.split()[-1]
        os.kill(running.pid, signal.SIGTERM)
        assert running.wait(60) == 0, log.read_text()[-3000:]
    finally:
        running.kill()
