"""Lets torch's allocator have what a run of `gpu.sh` may use, as a smaller card would."""

from __future__ import annotations

from typing import Any

import torch
from axolotl.integrations.base import BasePlugin


class CapPlugin(BasePlugin):
    """Holds the process to `protrain_capacity_bytes`."""

    def pre_model_load(self, cfg: Any) -> None:
        if not torch.cuda.is_available():
            # the dry run before the base is loaded sees no card
            return
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(cfg.protrain_capacity_bytes / whole)
