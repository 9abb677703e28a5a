"""Axolotl plugins for the tests: the second rank is another machine than the first."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import torch
from axolotl.integrations.base import BasePlugin

from axolotl.integrations.protrain.core.profile import cache, hardware


class OddRank(BasePlugin):
    """To be listed before ProTrain. Changes are undone when training has ended."""

    def __init__(self) -> None:
        super().__init__()
        self._undo = ExitStack()

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        if os.environ["RANK"] == "1":
            self.change(cfg)

    def post_train(self, cfg: Any, model: Any) -> None:
        self._undo.close()

    def change(self, cfg: Any) -> None:
        raise NotImplementedError

    def replace(self, owner: Any, name: str, value: Any) -> None:
        self._undo.enter_context(patch.object(owner, name, value))


class OtherCache(OddRank):
    def change(self, cfg: Any) -> None:
        cfg.protrain_cache_dir = str(Path(cfg.output_dir) / "cache")


class OtherDefaultCache(OddRank):
    def change(self, cfg: Any) -> None:
        folder = str(Path(cfg.output_dir).absolute() / "cache")
        self._undo.enter_context(patch.dict(os.environ, XDG_CACHE_HOME=folder))


class OtherThreads(OddRank):
    def change(self, cfg: Any) -> None:
        self._undo.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(2)


class OtherProcessor(OddRank):
    def change(self, cfg: Any) -> None:
        for module in (cache, hardware):
            self.replace(module, "cpu_name", lambda: "another processor")


class LessHostMemory(OddRank):
    def change(self, cfg: Any) -> None:
        memory = SimpleNamespace(available=3 << 30, total=4 << 30)
        self.replace(psutil, "virtual_memory", lambda: memory)


class FasterClock(OddRank):
    """Every rate that it measures is a third of the others'."""

    def change(self, cfg: Any) -> None:
        real = time.perf_counter
        self.replace(time, "perf_counter", lambda: 3 * real())


class OtherKey(OddRank):
    def change(self, cfg: Any) -> None:
        cfg.protrain_capacity_bytes //= 2
