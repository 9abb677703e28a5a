"""An Axolotl plugin for the tests: what makes two runs comparable at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from axolotl.integrations.base import BasePlugin
from checked_device import CHECKED, check_runs
from transformers import TrainerCallback

from axolotl.integrations.protrain.versions import skip_peer_check

MAY_REPACK = "support_avx512bf16_for_cpu"
"""What bitsandbytes' 4-bit layers know of the CPU."""


class SeedingPlugin(BasePlugin):
    """Seeds the adapters, allows bf16 on a CPU, and writes the Trainer's log."""

    def register(self, cfg: Any) -> None:
        skip_peer_check()
        check_runs(bool(cfg.get(CHECKED)))

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        # in plain runs too: Axolotl cannot read its own mappings there
        if cfg.role_boundaries:
            cfg.role_boundaries = [dict(item) for item in cfg.role_boundaries]
        if (cfg.world_size or 1) > 1:
            # Axolotl would load to GPU number LOCAL_RANK, without looking for one
            cfg.device_map = "cpu"

    def pre_lora_load(self, cfg: Any, model: Any) -> None:
        # Axolotl initialises adapters before anything is seeded
        torch.manual_seed(11)
        # a plain run that has evaluated with repacked 4-bit weights loses gradients;
        # on any CPU it is one that does not repack, and a paged one that would
        for module in model.modules():
            if hasattr(module, MAY_REPACK):
                setattr(module, MAY_REPACK, bool(cfg.protrain_auto_memory))

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        return {"use_cpu": True}

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[TrainerCallback]:
        # TRL's trainers initialise them themselves
        torch.manual_seed(11)
        return [_WriteLog(Path(cfg.output_dir))]


class _WriteLog(TrainerCallback):
    """Saves the log, which otherwise only a checkpoint holds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_end(
        self, _args: Any, state: Any, _control: Any, **_kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            state.save_to_json(str(self._folder / "trainer_state.json"))
