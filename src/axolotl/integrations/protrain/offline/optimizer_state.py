"""The optimizer of a YAML without weights: what it holds, and what its update takes.

Axolotl and transformers build the very optimizer that they would for training, over
parameters on the meta device.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any
from unittest.mock import patch

import bitsandbytes as bnb
from torch import nn
from transformers.training_args import OptimizerNames

from ..core.planner import optimizer_bytes as probe
from ..core.planner.optimizer_bytes import OptimizerBytes
from ..versions import require_later


def optimizer_bytes(
    cfg: Any,
    model: nn.Module,
    device_type: str,
    assumptions: list[str],
    mastered: Collection[str] = (),
) -> OptimizerBytes:
    """Measure the optimizer of `cfg` over what trains of `model`, on the meta device."""
    # what is missing there would pass for an optimizer that cannot be built
    require_later("axolotl.core.builders")
    make, name = partial(plain_optimizer, cfg, model), cfg.optimizer
    # it notes embeddings by `id`, which may be those of others later
    with patch.object(bnb.optim.GlobalOptimManager, "_instance", None):
        return probe.optimizer_bytes(
            make,
            getattr(name, "value", name),
            model,
            device_type == "cpu",
            assumptions,
            mastered,
        )


def plain_optimizer(cfg: Any, model: nn.Module) -> Any:
    """Build the optimizer that `axolotl train` would build for this model.

    No trainer is made: its constructor would look for a dataset and an accelerator.
    """
    # made of the plugins that are registered when they are imported
    from axolotl.core.builders import HFCausalTrainerBuilder
    from axolotl.core.trainers import AxolotlTrainer
    from axolotl.core.training_args import AxolotlTrainingArguments

    builder = object.__new__(HFCausalTrainerBuilder)
    builder.cfg, builder.model = cfg, model
    builder._train_dataset = builder._eval_dataset = None
    given, of_trainer = builder._set_base_training_args(1)
    # what follows from them looks for devices
    with patch.object(AxolotlTrainingArguments, "__post_init__"):
        args = AxolotlTrainingArguments()
    # those of another trainer too
    vars(args).update(given)
    args.optim = OptimizerNames(args.optim)
    trainer: Any = object.__new__(AxolotlTrainer)
    trainer.model, trainer.args, trainer.optimizer = model, args, None
    trainer.optimizer_cls_and_kwargs = of_trainer.get("optimizer_cls_and_kwargs")
    return trainer.create_optimizer()
