"""Axolotl plugins for the tests: what a run trained on, and what its model does next."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from axolotl.integrations.base import BasePlugin

BATCHES_FILE = "batches.pt"
"""In the job's output folder: what each forward of the model got, in order."""
AFTER_FILE = "after.json"
"""There too: what the model says once it is trained."""
FIELDS = ("input_ids", "labels", "attention_mask")


class RecordingPlugin(BasePlugin):
    """Writes `BATCHES_FILE` anew with each batch."""

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        batches: list[dict[str, torch.Tensor]] = []

        def record(_model: Any, _args: Any, given: dict[str, Any]) -> None:
            batches.append({key: given[key].clone() for key in FIELDS})
            torch.save(batches, Path(cfg.output_dir) / BATCHES_FILE)

        trainer.model.register_forward_pre_hook(record, with_kwargs=True)


class AfterPlugin(BasePlugin):
    """Writes `AFTER_FILE` on each rank: `trainer.evaluate()` and what is generated."""

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        self._trainer = trainer

    def post_train(self, cfg: Any, model: Any) -> None:
        trainer, self._trainer = self._trainer, None
        if trainer is None:
            # Axolotl comes by twice
            return
        path = Path(cfg.output_dir) / f"{trainer.args.process_index}-{AFTER_FILE}"
        loss = trainer.evaluate()["eval_loss"]
        prompt = torch.arange(1, 5)[None]
        made = trainer.model.generate(
            input_ids=prompt, max_new_tokens=5, do_sample=False
        )
        path.write_text(json.dumps([loss, made.tolist()]))
