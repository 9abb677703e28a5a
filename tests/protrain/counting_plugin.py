"""An Axolotl plugin for the tests: counts the device's bytes while a run trains.

Knows nothing of the plan: what lies there when the first step begins is read off the
model's storages, everything else is seen as operators make it.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from axolotl.integrations.base import BasePlugin
from counted_steps import Counter, model_bytes
from transformers import TrainerCallback

COUNTED_FILE = "counted.json"
"""In the job's output folder: `step` and `evaluation`, highest bytes in either."""


class CountingPlugin(BasePlugin):
    """Writes `COUNTED_FILE` when training ends."""

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[TrainerCallback]:
        return [_Count(Path(cfg.output_dir) / COUNTED_FILE)]


class _Count(TrainerCallback):
    """Inside every step, and from a step that is followed by an evaluation to its end.

    Between, the loader makes batches, which are not the device's.
    """

    # shown to it, weights would be on the host when it counts them
    looks_at_weights = False

    def __init__(self, file: Path) -> None:
        self._file = file
        self._counter: Counter | None = None
        self._inside = ExitStack()
        self._peaks = {"step": 0, "evaluation": 0}

    def on_step_begin(
        self, _args: Any, _state: Any, _control: Any, **kwargs: Any
    ) -> None:
        if self._counter is None:
            self._counter = Counter(model_bytes(kwargs["model"]))
        self._inside.enter_context(self._counter)

    def on_step_end(self, _args: Any, _state: Any, control: Any, **_kw: Any) -> None:
        self._leave("step")
        if control.should_evaluate and self._counter is not None:
            self._inside.enter_context(self._counter)

    def on_evaluate(self, *_args: Any, **_kwargs: Any) -> None:
        self._leave("evaluation")

    def on_train_end(self, *_args: Any, **_kwargs: Any) -> None:
        self._leave("step")
        self._file.write_text(json.dumps(self._peaks))

    def _leave(self, phase: str) -> None:
        self._inside.close()
        if self._counter is not None:
            highest = self._counter.restart()
            self._peaks[phase] = max(self._peaks[phase], highest)
