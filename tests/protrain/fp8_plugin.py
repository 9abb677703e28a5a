"""An Axolotl plugin that lets a plain run load an FP8 base, at which transformers 5.16.1 fails."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer


class Fp8Plugin(BasePlugin):
    """Leaves out a plan for tensors that several cards share, which nobody does here."""

    def pre_model_load(self, cfg: Any) -> None:
        quantizer: Any = FineGrainedFP8HfQuantizer
        quantizer.update_tp_plan = lambda _self, config: config
