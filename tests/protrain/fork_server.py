"""Processes that begin with everything imported.

Importing Axolotl takes as long as twenty of these trainings, so one process of a test
session imports it, and a `Fork` is a process that calls a function as a fork of that
one: `subprocess.Popen` otherwise. All pytest processes of a session share the server.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

OWNER = "PROTRAIN_TESTS_OWNER"
"""Variable with the id of the process with which the server ends."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "AXOLOTL_DO_NOT_TRACK": "1",
    # equal bits are promised for equal kernels, which only a CPU repeats throughout
    "CUDA_VISIBLE_DEVICES": "",
    # no process pools: each of their processes would import axolotl again
    "AXOLOTL_DATASET_NUM_PROC": "0",
    "OMP_NUM_THREADS": "1",
    # by default MKL rounds a product of up to three rows by where its operands lie
    "MKL_CBWR": "COMPATIBLE",
    "TOKENIZERS_PARALLELISM": "false",
}
PRELOAD = (
    "axolotl.cli.config",
    "axolotl.common.datasets",
    "axolotl.evaluate",
    "axolotl.integrations.protrain.cli",
    "axolotl.integrations.protrain.cli.plan",
    "axolotl.integrations.protrain.report.page",
    "axolotl.integrations.protrain.report.text",
    "axolotl.integrations.protrain.run",
    "axolotl.kernels.lora",
    "axolotl.monkeypatch.lora_kernels",
    "axolotl.monkeypatch.relora",
    "axolotl.processing_strategies",
    "axolotl.train",
    "bitsandbytes",
    "evaluate",
    "peft.utils.transformers_weight_conversion",
    "torch._dynamo",
    "torch.distributed.optim",
    "torch.profiler",
    "transformers.models.llama.modeling_llama",
    "transformers.pipelines",
    "trl.trainer.dpo_config",
    "trl.trainer.reward_trainer",
    "trl.trainer.utils",
    "wandb",
)
"""Heavy, and without what Axolotl builds once from the plugins that are listed."""
TESTS = Path(__file__).parent
PYTHON = f"""#!{sys.executable}
import os, sys
sys.path.insert(0, {str(TESTS)!r})
import fork_server
if sys.argv[1:2] == ["-c"]:
    fork = fork_server.Fork(
        fork_server.run_code, sys.argv[2], environment=os.environ, stdin=0, stdout=1, stderr=2
    )
    os._exit(fork.wait() % 256)
os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
"""
"""What a fork takes for Python: `-c` is a fork too, instead of importing Axolotl again."""


class Fork:
    """Calls `target(*arguments)`; the exit code is as if a script had done so.

    Args:
        target: A function of a module that `import` finds.
        arguments: What it is called with.
        folder: Where it runs.
        environment: Added to that of the server.
        stdin, stdout, stderr: Files, `subprocess.PIPE`, or None for /dev/null.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        *arguments: Any,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        stdin: IO[str] | int | None = None,
        stdout: IO[str] | int | None = None,
        stderr: IO[str] | int | None = None,
    ) -> None:
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        self.returncode: int | None = None
        self._lock = threading.Lock()
        given: list[int] = []
        if stdin == subprocess.PIPE:
            stdin, ours = os.pipe()
            self.stdin = os.fdopen(ours, "w")
            given.append(stdin)
        if stdout == subprocess.PIPE:
            ours, stdout = os.pipe()
            self.stdout = os.fdopen(ours)
            given.append(stdout)
        request = (str(folder or Path.cwd()), dict(environment or {}))
        with open(os.devnull, "r+b") as nothing:
            files = [(nothing if f is None else f) for f in (stdin, stdout, stderr)]
            numbers = [f if isinstance(f, int) else f.fileno() for f in files]
            self._server = _connect()
            message = json.dumps(request).encode() + b"\n"
            message += pickle.dumps((target, arguments))
            socket.send_fds(self._server, [message], numbers)
        for descriptor in given:
            os.close(descriptor)
        self.pid = int(self._answer())

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; negative is a signal."""
        if self.returncode is None:
            ready, _, _ = select.select([self._server], [], [], timeout)
            if not ready:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0)
            with self._lock:
                if self.returncode is None:
                    self.returncode = int(self._answer())
        return self.returncode

    def kill(self) -> None:
        """End it at once."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _answer(self) -> bytes:
        try:
            answer = self._server.recv(64)
        except ConnectionResetError:
            answer = b""
        if not answer:
            log = (_folder() / "log.txt").read_text(errors="replace")
            raise RuntimeError(f"the fork server ended:\n{log[-3000:]}")
        return answer


def run_code(code: str) -> None:
    """As `python -c`."""
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


def call(target: Callable[..., Any], *arguments: Any, at: Path | None = None) -> Any:
    """What `target(*arguments)` returns in a fork, which runs in the folder `at`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "log.txt").open("w") as log:
            given = folder / "result", target, arguments
            fork = Fork(_store, *given, folder=at, stdout=log, stderr=log)
            code = fork.wait()
        assert code == 0, (folder / "log.txt").read_text(errors="replace")[-6000:]
        return pickle.loads((folder / "result").read_bytes())


def _store(path: Path, target: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    path.write_bytes(pickle.dumps(target(*arguments)))


def _owner() -> int:
    return int(os.environ.setdefault(OWNER, str(os.getpid())))


def _folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"protrain-tests-{os.getuid()}-{_owner()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _connect() -> socket.socket:
    """The server, which the first of all pytest processes starts."""
    folder = _folder()
    path = str(folder / "socket")
    ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            ours.connect(path)
        except OSError:
            Path(path).unlink(missing_ok=True)
            _start(path, folder / "log.txt")
            ours.connect(path)
    return ours


def _start(path: str, log: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(path)
        listening.listen(64)
        number = listening.fileno()
        python_path = [str(TESTS), str(TESTS / "core"), os.environ.get("PYTHONPATH")]
        with log.open("w") as words:
            subprocess.Popen(
                [sys.executable, __file__, str(number)],
                env=os.environ
                | ENVIRONMENT
                | {"PYTHONPATH": os.pathsep.join(filter(None, python_path))},
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                pass_fds=[number],
                # Ctrl-C is for pytest
                start_new_session=True,
            )


def serve(number: int) -> None:
    """Fork for each connection, until the owner ends."""
    # a shell has what it starts in the background ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for module in PRELOAD:
        importlib.import_module(module)
    # built from the plugins of the first YAML that a process reads
    assert "axolotl.core.training_args" not in sys.modules
    python = _folder() / "python"
    python.write_text(PYTHON)
    python.chmod(0o700)
    sys.executable = str(python)
    # without it each collection of a fork looks through all these objects
    gc.collect()
    gc.freeze()
    listening = socket.socket(fileno=number)
    running: dict[int, socket.socket] = {}
    while Path(f"/proc/{_owner()}").exists():
        ready, _, _ = select.select([listening], [], [], 0.01 if running else 1.0)
        if ready:
            asking, _ = listening.accept()
            message, files, _, _ = socket.recv_fds(asking, 2**18, 3)
            process_id = os.fork()
            if not process_id:
                for held in (listening, asking, *running.values()):
                    held.close()
                _become(message, files)
            for file in files:
                os.close(file)
            running[process_id] = asking
            _tell(asking, process_id)
        for process_id in list(running):
            ended, status = os.waitpid(process_id, os.WNOHANG)
            if ended:
                with running.pop(process_id) as asking:
                    _tell(asking, os.waitstatus_to_exitcode(status))
    shutil.rmtree(_folder(), ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _tell(asking: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):
        asking.send(str(number).encode())


def _become(message: bytes, files: list[int]) -> None:
    """Call what is asked for, and end."""
    for standard, file in enumerate(files):
        os.dup2(file, standard)
        os.close(file)
    code = 1
    try:
        keys, _, called = message.partition(b"\n")
        folder, environment = json.loads(keys)
        os.chdir(folder)
        os.environ.update(environment)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        target, arguments = pickle.loads(called)
        target(*arguments)
        threading._shutdown()  # type: ignore[attr-defined]
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
