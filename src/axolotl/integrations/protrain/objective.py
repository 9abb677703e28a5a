"""The trainer's objective in a micro-batch: its own loss, on a batch of its collator.

Preference training runs pairs of answers, and the model again as its own reference or
another one beside it; distillation compares with a teacher's logits. All of that is in
the trainer's `compute_loss`, so that is what a trace runs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from types import CellType, FunctionType
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from axolotl.core.trainers.base import AxolotlTrainer
from datasets import Dataset
from torch import Tensor, nn
from transformers import Trainer, TrainerState

from .core.errors import FOREIGN_ERRORS
from .core.planner.meta import meta_copy
from .core.types import Served
from .generation import Asked, asked_of, generates, sampled_batch, served_by
from .offline.fake_kernels import picks_all

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
        sampled: Sequences that it generates before that; None for none, or where a server
            does.
        served: What that server is sent.
    """

    batch: Mapping[str, Any]
    others: Mapping[str, nn.Module]
    _trainer: Trainer
    sampled: Asked | None = None
    served: Served | None = None

    def loss(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """Compute the loss of a batch, by a copy of the model on the meta device;
        changes nothing."""
        copied: Any = object.__new__(type(self._trainer))
        models = {"model": model, "model_wrapped": model, **self.others}
        # who holds the trainer or a model of its has the copies
        memo: dict[int, Any] = {id(self._trainer): copied}
        for name, value in vars(self._trainer).items():
            if name in models:
                memo[id(value)] = models[name]
        for name, value in vars(self._trainer).items():
            if name not in models:
                setattr(copied, name, _own(value, memo))
        # callbacks and the log see training alone
        copied.log = _nothing
        # the training loop sets it
        steps = self._trainer.args.gradient_accumulation_steps
        copied.current_gradient_accumulation_steps = steps
        accelerator = copy.copy(self._trainer.accelerator)
        accelerator.__class__ = _Alone
        vars(copied).update(models, accelerator=accelerator)
        moved = {
            key: value.to(_META) if isinstance(value, Tensor) else value
            for key, value in batch.items()
        }
        # a function for a loss picks the tokens that count
        with picks_all() if self._trainer.compute_loss_func else nullcontext():
            return copied.compute_loss(model, moved)


def objective_of(
    trainer: Trainer, dataset: Any, collate: Collate, length: int | None = None
) -> Objective | None:
    """Return the objective of a trainer which computes more than one forward, or whose
    loss is a function that its YAML does not name, else None.

    Args:
        trainer: About to train.
        dataset: What `collate` takes rows of.
        collate: Makes a batch.
        length: Of all rows; None for that of the longest.
    """
    function = trainer.compute_loss_func
    function = function.func if isinstance(function, partial) else function
    home = getattr(function, "__module__", None) or "axolotl"
    known = home.partition(".")[0] == "axolotl"
    plain = type(trainer).compute_loss in _PLAIN and known
    if plain or getattr(trainer.args, "sample_packing", False):
        return None
    sampled = None
    if generates(trainer):
        sampled = asked_of(trainer, dataset, length)
        batch = sampled_batch(trainer, sampled)
    else:
        # it may count, or draw from a generator of its own
        own_collate = _own(collate, {id(trainer): trainer})
        batch = own_collate(_longest_rows(dataset, trainer.args.train_batch_size))
    for name, value in () if sampled else batch.items():
        if length is not None and isinstance(value, Tensor) and value.ndim == 2:
            times = math.ceil(length / value.shape[1])
            batch[name] = value = value.repeat(1, times)[:, :length]
        if name.endswith("attention_mask"):
            # rows differ in length, for which models build a mask
            value[-1, -1] = 0
    # those too that judge answers
    judges = getattr(trainer, "reward_funcs", None) if sampled else None
    held = {
        **vars(trainer),
        **{f"reward_funcs_{n}": j for n, j in enumerate(judges or ())},
    }
    others = {
        name: meta_copy(value)
        for name, value in held.items()
        if hasattr(value, "config")
        and isinstance(value, nn.Module)
        and name not in ("model", "model_wrapped")
    }
    served = served_by(trainer) if sampled else None
    return Objective(batch, others, trainer, None if served else sampled, served)


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


_SHARED = frozenset(
    "accelerate axolotl datasets peft tokenizers transformers trl".split()
)
"""Packages whose objects a loss does not change, but for `TrainerState`."""


def _own(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of what a loss may count in: containers, tensors, generators, objects of
    somebody else's. What cannot be copied is shared."""
    if isinstance(value, dict):
        own = copy.copy(value)
        own.update((key, _own(item, memo)) for key, item in value.items())
        return own
    if isinstance(value, list):
        return [_own(item, memo) for item in value]
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, FunctionType) and value.__closure__:
        return _own_function(value, memo)
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    if isinstance(value, (type, FunctionType, nn.Module)) or (
        package in _SHARED and not isinstance(value, TrainerState)
    ):
        return value
    try:
        return copy.deepcopy(value, memo)
    except FOREIGN_ERRORS:
        return value


def _own_function(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """A copy of a function that has a copy of what it encloses."""
    if id(function) not in memo:
        cells = tuple(CellType() for _ in function.__closure__ or ())
        own = FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            cells,
        )
        own.__kwdefaults__ = function.__kwdefaults__
        # it may enclose itself
        memo[id(function)] = own
        for cell, enclosed in zip(cells, function.__closure__ or (), strict=True):
            try:
                contents = enclosed.cell_contents
            except ValueError:
                continue  # it is empty
            cell.cell_contents = _own(contents, memo)
    return memo[id(function)]


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Stands for `log`."""


class _Alone(Accelerator):
    """One rank: the others take no part in a trace. What is only logged is zero: its value
    would be worked out from drawn logits."""

    device = _META

    def gather(self, tensor: Any) -> Any:
        return _logged(tensor)

    def gather_for_metrics(self, input_data: Any, *_: Any, **__: Any) -> Any:
        return _logged(input_data)

    def reduce(self, tensor: Any, *_: Any, **__: Any) -> Any:
        return _logged(tensor)


def _logged(value: Any) -> Any:
    if isinstance(value, Tensor) and not value.requires_grad:
        return torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    return value
