"""Axolotl plugins for the tests: a second adapter, and a switch between the two."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from peft import LoraConfig
from transformers import TrainerCallback

SECOND = "second"


class SecondAdapterPlugin(BasePlugin):
    """Adds an adapter that nothing trains."""

    def post_lora_load(self, cfg: Any, model: Any) -> None:
        model.add_adapter(SECOND, LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))


class SwitchingPlugin(SecondAdapterPlugin):
    """Trains both, in turn: the first in odd steps, the second in even ones."""

    def post_lora_load(self, cfg: Any, model: Any) -> None:
        super().post_lora_load(cfg, model)
        model.base_model.set_adapter(["default", SECOND])

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[TrainerCallback]:
        return [_Switch()]


class _Switch(TrainerCallback):
    def on_step_begin(
        self, _args: Any, state: Any, _control: Any, model: Any, **_kwargs: Any
    ) -> None:
        model.set_adapter(SECOND if state.global_step % 2 else "default")


class LLMCompressorPlugin(BasePlugin):
    """Has the name of Axolotl's, which wants a package that is seldom installed."""
