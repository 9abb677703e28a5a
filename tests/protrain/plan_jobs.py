"""`axolotl protrain plan`, run many times without importing Axolotl as often.

Run as a script this is a server: it imports once and answers each line, a command, from
a fork of its own, because what Axolotl patches for one YAML stays in a process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import yaml

NUM_AT_ONCE = 2
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "AXOLOTL_DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    # the same answers on a machine with a GPU
    "CUDA_VISIBLE_DEVICES": "",
}
PROTRAIN = "axolotl.integrations.protrain.ProTrainPlugin"
BASE: dict[str, Any] = {
    "plugins": [PROTRAIN],
    "datasets": [{"path": "none.jsonl", "ds_type": "json", "type": "completion"}],
    "dataset_prepared_path": "prepared",
    "output_dir": "out",
    "protrain_cache_dir": "cache",
    "sequence_len": 256,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 1,
    "learning_rate": 1e-4,
    "lr_scheduler": "cosine",
    "optimizer": "adamw_torch_fused",
    "bf16": True,
    "attn_implementation": "sdpa",
    "sample_packing": False,
}


@dataclass(frozen=True)
class Answer:
    """What a command printed."""

    exit_code: int
    out: str
    err: str
    folder: Path

    @cached_property
    def json(self) -> Any:
        """Standard output, all of it, as JSON."""
        return json.loads(self.out)


class Plans:
    """Commands in `folder`, `NUM_AT_ONCE` at a time, in the order of `add`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._answers: dict[str, Future[Answer]] = {}
        self._lock = Lock()
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            cwd=folder,
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "server.log").open("w"),
            text=True,
        )
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def __getitem__(self, name: str) -> Answer:
        return self._answers[name].result()

    def close(self) -> None:
        """End the server; commands that run end by themselves."""
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def add(
        self,
        name: str,
        model: str | Mapping[str, Any],
        settings: Mapping[str, Any],
        *arguments: str,
    ) -> None:
        """Plan for a YAML: `settings` over `BASE`, None drops a key.

        Args:
            name: Of the command.
            model: config.json, or a folder of the base model.
            settings: Keys of the YAML.
            arguments: Beside the YAML.
        """
        base_model = model if isinstance(model, str) else self._model(name, model)
        keys = {**BASE, "base_model": base_model, **settings}
        keys = {key: value for key, value in keys.items() if value is not None}
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(keys))
        self.command(name, path.name, *arguments)

    def command(self, name: str, *arguments: str, folder: Path | None = None) -> None:
        """Add `axolotl protrain plan` with these arguments."""
        assert name not in self._answers, name
        self._answers[name] = Future()
        request = [name, str(folder or self.folder), ["plan", *arguments]]
        assert self._process.stdin is not None
        with self._lock:
            print(json.dumps(request), file=self._process.stdin, flush=True)

    def _model(self, name: str, config: Mapping[str, Any]) -> str:
        folder = self.folder / f"{name}-model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            name, folder, code = json.loads(line)
            out, err = (
                (self.folder / f"{name}.{stream}").read_text()
                for stream in ("out", "err")
            )
            self._answers[name].set_result(Answer(code, out, err, Path(folder)))
        log = (self.folder / "server.log").read_text()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(RuntimeError(f"the server ended:\n{log[-3000:]}"))


def serve() -> None:
    """Answer the lines of standard input until it ends."""
    # imported before the first fork, and what it imports late
    from axolotl.integrations.protrain import dry_run  # noqa: F401
    from axolotl.integrations.protrain.report import page, text  # noqa: F401

    home = Path.cwd()
    running = 0
    for line in sys.stdin:
        if running == NUM_AT_ONCE:
            os.wait()
            running -= 1
        running += 1
        if os.fork():
            continue
        name, folder, argv = json.loads(line)
        child = os.fork()
        if not child:
            _run(home / name, folder, argv)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os.write(1, f"{json.dumps([name, folder, code])}\n".encode())
        os._exit(0)


def _run(log: Path, folder: str, argv: list[str]) -> None:
    """Become the command; does not return."""
    from axolotl.integrations.protrain.cli import protrain

    # a command in a terminal ends with the terminal
    signal.alarm(300)
    for standard, stream in ((1, "out"), (2, "err")):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(f"{log}.{stream}", flags), standard)
    os.chdir(folder)
    try:
        protrain(argv, prog_name="axolotl protrain")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve()
