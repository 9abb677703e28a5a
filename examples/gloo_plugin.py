"""An Axolotl plugin for `make demo-2`: several plain ranks without a GPU."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin

from axolotl.integrations.protrain.versions import skip_peer_check


class GlooPlugin(BasePlugin):
    """Without it Axolotl 0.19 would load the model of rank N to GPU number N."""

    def register(self, cfg: Any) -> None:
        skip_peer_check()

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        cfg.device_map = "cpu"

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        return {"use_cpu": True}
