"""Axolotl plugins for the tests: the second rank is another machine than the first."""

from __future__ import annotations

import dataclasses
import os
import random
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import torch
from axolotl.integrations.base import BasePlugin

from axolotl.integrations.protrain.core.planner import cache, hardware, job


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


class _OtherRates(OddRank):
    """What it has measured, alone in a cache of its own, is a tenth in some rates."""

    rates: tuple[str, ...]

    def change(self, cfg: Any) -> None:
        cfg.protrain_cache_dir = str(Path(cfg.output_dir) / type(self).__name__)
        measure = cache.measure_hardware

        def slow(*args: Any, **kwargs: Any) -> Any:
            found = measure(*args, **kwargs)
            tenths = {name: getattr(found, name) / 10 for name in self.rates}
            return dataclasses.replace(found, **tenths)

        self.replace(cache, "measure_hardware", slow)


class CachedBandwidth(_OtherRates):
    rates = "fetch_bytes_s", "offload_bytes_s", "fetch_both_bytes_s"


class CachedProducts(_OtherRates):
    rates = "flops_16", "flops_32", "adam_bytes_s"


class OtherVersions(OddRank):
    def change(self, cfg: Any) -> None:
        self.replace(job, "library_versions", lambda: {"python": "3.99"})


class OtherEnvironment(OddRank):
    def change(self, cfg: Any) -> None:
        others = {"LANG": "de_DE.UTF-8", "TZ": "Asia/Tokyo", "COLUMNS": "20"}
        self._undo.enter_context(patch.dict(os.environ, others))
        random.seed(7)


class OtherKey(OddRank):
    def change(self, cfg: Any) -> None:
        cfg.protrain_capacity_bytes //= 2
