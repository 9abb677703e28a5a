"""An Axolotl plugin for the tests: keeps the batches that a run trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from axolotl.integrations.base import BasePlugin

BATCHES_FILE = "batches.pt"
"""In the job's output folder: the collator's batches in order, one more at most than
was trained on."""


class RecordingPlugin(BasePlugin):
    """Writes `BATCHES_FILE` anew with each batch."""

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        collate, batches = trainer.data_collator, []

        def record(rows: Any) -> Any:
            batch = collate(rows)
            batches.append({key: value.clone() for key, value in batch.items()})
            torch.save(batches, Path(cfg.output_dir) / BATCHES_FILE)
            return batch

        trainer.data_collator = record
