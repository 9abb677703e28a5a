"""An Axolotl plugin for the tests: keeps the batches that a run trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from axolotl.integrations.base import BasePlugin

BATCHES_FILE = "batches.pt"
"""In the job's output folder: what each forward of the model got, in order."""
FIELDS = ("input_ids", "labels", "attention_mask")


class RecordingPlugin(BasePlugin):
    """Writes `BATCHES_FILE` anew with each batch."""

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        batches: list[dict[str, torch.Tensor]] = []

        def record(_model: Any, _args: Any, given: dict[str, Any]) -> None:
            batches.append({key: given[key].clone() for key in FIELDS})
            torch.save(batches, Path(cfg.output_dir) / BATCHES_FILE)

        trainer.model.register_forward_pre_hook(record, with_kwargs=True)
