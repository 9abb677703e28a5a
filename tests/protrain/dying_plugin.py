"""An Axolotl plugin for the tests: one rank fails or is killed at a chosen moment.

The environment says which: `DIE` is `RANK:PHASE:HOW`, `DIED` a file that gets the time.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from axolotl.integrations.base import BasePlugin
from transformers import TrainerCallback

from axolotl.integrations.protrain import run
from axolotl.integrations.protrain.core.planner import job

WORDS = "this rank was told to fail"
STEP = 2
PHASES = (
    "loading",
    "planning",
    "opening",
    "forward",
    "backward",
    "update",
    "saving",
    "closing",
)


class DyingPlugin(BasePlugin):
    """To be listed after ProTrain."""

    def __init__(self) -> None:
        super().__init__()
        rank, self._phase, self._how = os.environ["DIE"].split(":")
        if rank != os.environ["RANK"]:
            self._phase = "never"

    def _die(self, *_: Any, **__: Any) -> None:
        Path(os.environ["DIED"]).write_text(str(time.time()))
        if self._how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError(WORDS)

    def post_model_load(self, cfg: Any, model: Any) -> None:
        if self._phase == "loading":
            self._die()

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        # what runs there on every rank
        if self._phase == "planning":
            job.build_layout = self._die
        if self._phase == "opening":
            run.open_device = self._die
        trainer.add_callback(_Moments(self._phase, self._die, trainer.model))


class _Moments(TrainerCallback):
    def __init__(self, phase: str, die: Callable[..., None], model: Any) -> None:
        self._phase, self._die, self._model = phase, die, model

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if state.global_step + 1 < STEP:
            return
        if self._phase == "forward":
            self._model.get_input_embeddings().register_forward_pre_hook(self._die)
        if self._phase == "backward":
            weights = [p for p in self._model.parameters() if p.requires_grad]
            weights[len(weights) // 2].register_hook(self._die)

    def on_pre_optimizer_step(self, _args: Any, state: Any, _c: Any, **_: Any) -> None:
        if self._phase == "update" and state.global_step + 1 == STEP:
            self._die()

    def on_step_end(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        if self._phase != "saving" or state.global_step < STEP:
            return
        if args.should_save:
            self._model.register_state_dict_pre_hook(self._die)
        else:
            # the other rank is about to save
            self._die()

    def on_train_end(self, *_args: Any, **_: Any) -> None:
        if self._phase == "closing":
            self._die()
