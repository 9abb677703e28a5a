"""An Axolotl plugin for `overhead.py --axolotl`: what each step takes, and its loss."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from axolotl.integrations.base import BasePlugin
from transformers import TrainerCallback


class StepClock(BasePlugin):
    """Writes `steps.json` into the output folder when training ends."""

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[TrainerCallback]:
        return [_Clock(Path(cfg.output_dir))]


class _Clock(TrainerCallback):
    """Times from the beginning of a step to that of the next one, logging included."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._wall: list[float] = []
        self._cpu: list[float] = []

    def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
        self._wall.append(time.perf_counter())
        self._cpu.append(time.process_time())

    def on_train_end(
        self, _args: Any, state: Any, _control: Any, **_kwargs: Any
    ) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        steps = {
            "wall_s": [b - a for a, b in zip(self._wall, self._wall[1:], strict=False)],
            "cpu_s": [b - a for a, b in zip(self._cpu, self._cpu[1:], strict=False)],
            "loss": [entry["loss"] for entry in state.log_history if "loss" in entry],
        }
        (self._folder / "steps.json").write_text(json.dumps(steps), "utf-8")
