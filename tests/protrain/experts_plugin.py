"""Axolotl plugins for experts: quantised as Axolotl does on a GPU alone, and all saved."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from axolotl.monkeypatch.moe_quant import replace_parameter_8bit
from bitsandbytes.nn.parametrize import replace_parameter_4bit


class ExpertsPlugin(BasePlugin):
    """What `quantize_moe_experts` does while a base loads to a GPU, once it has loaded."""

    def post_model_build(self, cfg: Any, model: Any) -> None:
        for module in list(model.modules()):
            for name, param in list(module.named_parameters(recurse=False)):
                if param.ndim == 3 and cfg.load_in_8bit:
                    replace_parameter_8bit(module, name)
                elif param.ndim == 3:
                    replace_parameter_4bit(module, name, compress_statistics=True)


class SavedExpertsPlugin(BasePlugin):
    """transformers 5.16 saves the unpacked experts of an MXFP4 base all under one name, so
    that one layer's are left."""

    def post_model_load(self, cfg: Any, model: Any) -> None:
        model._weight_conversions = None
