"""Axolotl's `layer_offloading`: frozen weights of all blocks wait on the host."""

from __future__ import annotations

import logging

from axolotl.core.trainers.mixins.layer_offloading import (
    LOG,
    LayerOffloadManager,
    _LayerOffloadContext,
)
from torch import Tensor

from ..setup import Batch, CannotRunError, Setup, Training


class _Said(logging.Handler):
    """Keeps what the manager warns of: it disables itself without an error."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def open(setup: Setup) -> Training:
    model = setup.model(setup.device)
    if setup.case.recompute:
        setup.recompute(model)
    said = _Said()
    LOG.logger.addHandler(said)
    manager = LayerOffloadManager(model, num_prefetch=1)
    if not manager.enabled:
        raise CannotRunError("; ".join(said.lines))
    manager.setup_hooks()
    step = setup.step(model, setup.optimizer(model))

    def offloaded(batches: list[Batch]) -> Tensor:
        # as LayerOffloadingMixin.training_step does
        with _LayerOffloadContext(manager):
            return step(batches)

    return Training(offloaded, {"num_prefetch": 1, "recompute": setup.case.recompute})
