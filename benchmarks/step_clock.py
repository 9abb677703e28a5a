"""An Axolotl plugin for `overhead.py --axolotl`: what each step takes, and its loss.

Two processes may take turns, step by step: each reads a token from one pipe before a
step and writes it to another pipe after it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from axolotl.integrations.base import BasePlugin
from transformers import TrainerCallback

TURNS = "STEP_CLOCK_TURNS"
"""Environment variable: the descriptors to read from and to write to, with a comma."""


class StepClock(BasePlugin):
    """Writes `steps.json` into the output folder when training ends."""

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[TrainerCallback]:
        turns = os.environ.get(TURNS)
        pipes = tuple(map(int, turns.split(","))) if turns else None
        return [_Clock(Path(cfg.output_dir), pipes)]


class _Clock(TrainerCallback):
    """Times from the beginning of a step to that of the next one, logging included."""

    def __init__(self, folder: Path, pipes: tuple[int, ...] | None) -> None:
        self._folder = folder
        self._pipes = pipes
        self._began: tuple[float, float] | None = None
        self._steps: list[tuple[float, float]] = []

    def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
        if self._began is not None:
            wall_s, cpu_s = _now()
            self._steps.append((wall_s - self._began[0], cpu_s - self._began[1]))
        if self._pipes is not None:
            own, others = self._pipes
            if self._began is not None:
                os.write(others, b"t")
            # empty once the other has ended, which has no use for a turn
            os.read(own, 1)
        self._began = _now()

    def on_train_end(
        self, _args: Any, state: Any, _control: Any, **_kwargs: Any
    ) -> None:
        if self._pipes is not None:
            os.close(self._pipes[1])
        self._folder.mkdir(parents=True, exist_ok=True)
        steps = {
            "wall_s": [wall_s for wall_s, _ in self._steps],
            "cpu_s": [cpu_s for _, cpu_s in self._steps],
            "loss": [entry["loss"] for entry in state.log_history if "loss" in entry],
        }
        (self._folder / "steps.json").write_text(json.dumps(steps), "utf-8")


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()
