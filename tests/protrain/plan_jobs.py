"""`axolotl protrain plan`, run many times without importing Axolotl as often.

Each command is a process, because what Axolotl patches for one YAML stays there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from fork_server import Fork

NUM_AT_ONCE = 2
SLOWEST_COMMAND_S = 300
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

    def __init__(self, folder: Path, documents: int | None = None) -> None:
        """`documents` of equal length are in a packed row, instead of as many as usual."""
        self.folder, self.documents = folder, documents
        self._pool = ThreadPoolExecutor(NUM_AT_ONCE)
        self._answers: dict[str, Future[Answer]] = {}

    def __getitem__(self, name: str) -> Answer:
        return self._answers[name].result()

    def close(self) -> None:
        """Let commands that run end, and forget the others."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def add(
        self,
        name: str,
        model: str | Mapping[str, Any],
        settings: Mapping[str, Any],
        *arguments: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Plan for a YAML: `settings` over `BASE`, None drops a key.

        Args:
            name: Of the command.
            model: config.json, or a folder of the base model.
            settings: Keys of the YAML.
            arguments: Beside the YAML.
            environment: Variables that are set besides.
        """
        base_model = model if isinstance(model, str) else self._model(name, model)
        keys = {**BASE, "base_model": base_model, **settings}
        keys = {key: value for key, value in keys.items() if value is not None}
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(keys))
        self.command(name, path.name, *arguments, environment=environment)

    def command(
        self,
        name: str,
        *arguments: str,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Add `axolotl protrain plan` with these arguments."""
        assert name not in self._answers, name
        argv = ["plan", *arguments]
        self._answers[name] = self._pool.submit(
            self._run, name, folder or self.folder, argv, environment
        )

    def _run(
        self,
        name: str,
        folder: Path,
        argv: list[str],
        environment: Mapping[str, str] | None,
    ) -> Answer:
        out, err = (self.folder / f"{name}.{stream}" for stream in ("out", "err"))
        with out.open("w") as stdout, err.open("w") as stderr:
            files = {"stdout": stdout, "stderr": stderr}
            fork = Fork(
                run_command,
                argv,
                self.documents,
                folder=folder,
                environment=environment,
                **files,
            )
        code = fork.wait(SLOWEST_COMMAND_S)
        return Answer(code, out.read_text(), err.read_text(), folder)

    def _model(self, name: str, config: Mapping[str, Any]) -> str:
        folder = self.folder / f"{name}-model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)


def run_command(argv: list[str], documents: int | None = None) -> None:
    """Become `axolotl protrain`; ends with its exit code."""
    from axolotl.integrations.protrain.cli import protrain

    # of a test that ran when this was forked
    os.environ.pop("COLUMNS", None)
    if documents is not None:
        from axolotl.integrations.protrain.offline import batches

        batches.DOCUMENTS_PER_ROW = documents

    protrain(argv, prog_name="axolotl protrain")
