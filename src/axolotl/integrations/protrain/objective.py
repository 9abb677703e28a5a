"""What a trainer computes in a micro-batch: its own loss, on a batch of its collator.

Preference training runs pairs of answers, and the model again as its own reference or
another one beside it; distillation compares with a teacher's logits. All of that is in
the trainer's `compute_loss`, so that is what a trace runs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from axolotl.core.trainers.base import AxolotlTrainer
from datasets import Dataset
from torch import Tensor, nn
from transformers import Trainer

from .core.planner.meta import meta_copy

Collate = Callable[[list[dict[str, Any]]], Any]
_META = torch.device("meta")
_PLAIN = (Trainer.compute_loss, AxolotlTrainer.compute_loss)
"""One forward of the model, whose output has the loss."""


@dataclass(frozen=True)
class Objective:
    """A trainer's loss.

    Attributes:
        batch: The largest that its collator makes, on the host.
        others: Models that it holds beside the one that trains, by attribute, on the meta
            device.
    """

    batch: Mapping[str, Any]
    others: Mapping[str, nn.Module]
    _trainer: Trainer

    def loss(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """Of a batch, by a copy of the model on the meta device; changes nothing."""
        stand_in: Any = object.__new__(type(self._trainer))
        for name, value in vars(self._trainer).items():
            setattr(stand_in, name, _own_containers(value))
        accelerator = copy.copy(self._trainer.accelerator)
        accelerator.__class__ = _Alone
        models = {"model": model, "model_wrapped": model, **self.others}
        vars(stand_in).update(models, accelerator=accelerator)
        moved = {
            key: value.to(_META) if isinstance(value, Tensor) else value
            for key, value in batch.items()
        }
        return stand_in.compute_loss(model, moved)


def objective_of(
    trainer: Trainer, dataset: Any, collate: Collate, length: int | None = None
) -> Objective | None:
    """That of a trainer which computes more than one forward, else None.

    Args:
        trainer: About to train.
        dataset: What `collate` takes rows of.
        collate: Makes a batch.
        length: Of all rows; None for that of the longest.
    """
    if type(trainer).compute_loss in _PLAIN or getattr(
        trainer.args, "sample_packing", False
    ):
        return None
    batch = collate(_longest_rows(dataset, trainer.args.train_batch_size))
    for name, value in batch.items():
        if length is not None and isinstance(value, Tensor) and value.ndim == 2:
            times = math.ceil(length / value.shape[1])
            batch[name] = value = value.repeat(1, times)[:, :length]
        if name.endswith("attention_mask"):
            # rows differ in length, for which models build a mask
            value[-1, -1] = 0
    others = {
        name: meta_copy(value)
        for name, value in vars(trainer).items()
        if hasattr(value, "config")
        and isinstance(value, nn.Module)
        and name not in ("model", "model_wrapped")
    }
    return Objective(batch, others, trainer)


def _longest_rows(dataset: Any, num_rows: int) -> list[dict[str, Any]]:
    """The first rows, each list the longest of its column where all columns are there."""
    rows = [dict(row) for row in islice(cycle(dataset), num_rows)]
    for name, value in rows[0].items() if isinstance(dataset, Dataset) else ():
        if isinstance(value, list):
            column = dataset.data.column(name)
            lengths = [chunk.value_lengths() for chunk in column.chunks]
            longest = column[int(np.concatenate(lengths).argmax())].as_py()
            for row in rows:
                row[name] = longest
    return rows


def _own_containers(value: Any) -> Any:
    """Metrics are appended to lists in mappings; what is in these is shared."""
    if isinstance(value, dict):
        own = copy.copy(value)
        own.update((key, _own_containers(item)) for key, item in value.items())
        return own
    return list(value) if isinstance(value, list) else value


class _Alone(Accelerator):
    """One rank: the others take no part in a trace."""

    device = _META

    def gather(self, tensor: Any) -> Any:
        return tensor

    def gather_for_metrics(self, input_data: Any, *_: Any, **__: Any) -> Any:
        return input_data

    def reduce(self, tensor: Any, *_: Any, **__: Any) -> Any:
        return tensor
