"""An Axolotl plugin for `start_up.py`: seconds from a process's start to its first step, on the
clock and of the processor."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import psutil
from axolotl.integrations.base import BasePlugin
from transformers import TrainerCallback


class FirstStep(BasePlugin):
    """Writes the file that `FIRST_STEP` names when the first step begins."""

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[TrainerCallback]:
        return [_Clock()]


class _Clock(TrainerCallback):
    def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
        seconds = time.time() - psutil.Process().create_time()
        # of this process and of those that it has waited for
        busy = sum(os.times()[:4])
        Path(os.environ["FIRST_STEP"]).write_text(json.dumps([seconds, busy]))
