"""Axolotl plugins for the tests: what a dry run is, or where it is, is in their way."""

from __future__ import annotations

from multiprocessing import parent_process
from typing import Any

import torch
from axolotl.integrations.base import BasePlugin


class AsksForAGpu(BasePlugin):
    """Before anything is known of the YAML."""

    def register(self, cfg: Any) -> None:
        torch.empty(0, device="cuda:99")


class LooksAtWeights(BasePlugin):
    """Of which there are none on the meta device."""

    def post_model_build(self, cfg: Any, model: Any) -> None:
        assert model.get_input_embeddings().weight.norm().item()


class RunsAlone(BasePlugin):
    """In no process that another has begun."""

    def pre_model_load(self, cfg: Any) -> None:
        if parent_process() is not None:
            raise ValueError("this process has a parent")
