"""An Axolotl plugin for the tests: the GradScaler that accelerate has on a GPU alone."""

from __future__ import annotations

import math
from typing import Any

import torch
from axolotl.integrations.base import BasePlugin
from transformers import TrainerCallback


class ScalingPlugin(BasePlugin):
    """Gives accelerate a scaler, and with it autocast, whatever the device; its scale grows
    every other step and begins high enough to overflow where `first_scale` says so."""

    first_scale = 2.0**16

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        kind = trainer.args.device.type
        scaler = torch.amp.GradScaler(kind, self.first_scale, growth_interval=2)
        trainer.accelerator.scaler, trainer.accelerator.native_amp = scaler, True
        trainer.add_callback(_NoteScale(scaler))


class OverflowingPlugin(ScalingPlugin):
    first_scale = 2.0**19


class WideWeightsPlugin(OverflowingPlugin):
    """In fp16 over weights in fp32, which no YAML asks for: gradients of all weights leave."""

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        super().post_trainer_create(cfg, trainer)
        trainer.accelerator.state._mixed_precision = "fp16"


class SeededPlugin(BasePlugin):
    """Seeds adapters, and nothing else."""

    def pre_lora_load(self, cfg: Any, model: Any) -> None:
        torch.manual_seed(11)


class OnTheHost(BasePlugin):
    """Refuses a model that is not there once it is loaded."""

    def post_model_load(self, cfg: Any, model: Any) -> None:
        (device,) = {param.device.type for param in model.parameters()}
        if device != "cpu":
            raise RuntimeError(f"the model was loaded to {device}")


class _NoteScale(TrainerCallback):
    """Logs the scale as one more loss, and takes norms out that are equal to nothing."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler

    def on_log(self, _args: Any, state: Any, _control: Any, **_kwargs: Any) -> None:
        entry = state.log_history[-1]
        if "grad_norm" in entry:
            if not math.isfinite(entry["grad_norm"]):
                del entry["grad_norm"]
            scale = self._scaler.get_scale()
            state.log_history.append({"step": entry["step"], "loss": scale})
