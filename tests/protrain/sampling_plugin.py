"""Axolotl plugins for the tests: `generate` in parts, and without room for all rows."""

from __future__ import annotations

import sys
from typing import Any

import torch
from axolotl.integrations.base import BasePlugin
from torch.nn.functional import pad

from axolotl.integrations.protrain.core.engine.device import CpuDevice

MOST, AT = 2, 3
"""Rows for which there is room, and the forward in which that shows."""


class InPartsPlugin(BasePlugin):
    """Samples so many rows at once, by plain calls of `generate`."""

    rows: int

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        model, most = trainer.model, self.rows
        plain = model.generate

        def generate(**given: Any) -> torch.Tensor:
            ids = given["input_ids"]
            made = []
            for first in range(0, len(ids), most):
                part = {
                    k: v[first : first + most] if isinstance(v, torch.Tensor) else v
                    for k, v in given.items()
                }
                made.append(plain(**part))
            longest = max(each.shape[1] for each in made)
            filler = given["generation_config"].pad_token_id
            return torch.cat(
                [pad(m, (0, longest - m.shape[1]), value=filler) for m in made]
            )

        model.generate = generate


class InTwos(InPartsPlugin):
    rows = 2


class InFours(InPartsPlugin):
    rows = 4


class InEights(InPartsPlugin):
    rows = 8


class TorchScores(BasePlugin):
    """Scores are TRL's own: Axolotl's need Triton on whatever calls itself CUDA. Adapters
    begin the same each time."""

    def pre_lora_load(self, cfg: Any, model: Any) -> None:
        torch.manual_seed(11)

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        from axolotl.monkeypatch.trainer import utils
        from trl.trainer import grpo_trainer

        own: Any = grpo_trainer
        own.selective_log_softmax = utils.selective_log_softmax_original
        own.entropy_from_logits = _entropies


def _entropies(logits: torch.Tensor, **_: Any) -> torch.Tensor:
    logps = torch.log_softmax(logits, dim=-1)
    return -(logps.exp() * logps).sum(-1)


class NoRoomToHold(BasePlugin):
    """A chunk that is to be held finds no memory."""

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        real = CpuDevice.allocate

        def allocate(device: CpuDevice, nbytes: int) -> torch.Tensor:
            frame: Any = sys._getframe(1)
            for _ in range(3):
                if frame.f_code.co_name == "hold":
                    raise torch.OutOfMemoryError(f"Tried to allocate {nbytes} bytes.")
                frame = frame.f_back
            return real(device, nbytes)

        CpuDevice.allocate = allocate  # type: ignore[method-assign]
        self._undo = lambda: setattr(CpuDevice, "allocate", real)

    def post_train(self, cfg: Any, model: Any) -> None:
        self._undo()


class NoRoomPlugin(BasePlugin):
    """More than `MOST` rows find no memory once some tokens are drawn."""

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        forwards = 0

        def fail(_model: Any, _args: Any, given: dict[str, Any]) -> None:
            nonlocal forwards
            rows = given["input_ids"].shape[0]
            if torch.is_grad_enabled() or rows <= MOST or not given.get("use_cache"):
                return
            forwards += 1
            if forwards == AT:
                forwards = 0
                raise torch.OutOfMemoryError("Tried to allocate 4096 bytes.")

        # `generate` of an adapter calls the model below it
        base = trainer.model.get_base_model()
        base.register_forward_pre_hook(fail, with_kwargs=True)
