"""Tell accelerate and torch's DistributedDataParallel about host-kept weights.

DDP reduces what stays on the device with its state, and must neither broadcast to,
reduce nor look at anything that the host keeps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import nn

from ..errors import ConfigError
from ..types import Layout

IGNORED = "_ddp_params_and_buffers_to_ignore"
"""DDP reads this attribute of the very module that it wraps; names are from there."""


def ignore_in_ddp(
    model: nn.Module, names: Collection[str]
) -> AbstractContextManager[object]:
    """Inside, DDP, which will get `model`, stays away from parameters, by all their names,
    and from what others had it ignore."""
    ignored = [*vars(model).get(IGNORED, ()), *sorted(names)]
    return patch.object(model, IGNORED, ignored, create=True)


def reduced_by_ddp(model: nn.Module) -> bool:
    """Tell whether anything is left that trains and that DDP does not ignore."""
    ignored = set(vars(model).get(IGNORED, ()))
    return any(
        param.requires_grad and name not in ignored
        for name, param in model.named_parameters()
    )


def spread_rest(model: nn.Module) -> None:
    """Broadcast from rank 0 what DDP would have."""
    ignored = set(vars(model).get(IGNORED, ()))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in ignored:
            dist.broadcast(tensor.detach(), src=0)


@contextmanager
def without_ddp(accelerator: Any, model: nn.Module) -> Iterator[None]:
    """Let `accelerator` prepare `model` for autocast alone: DDP refuses to reduce none.

    What DDP would have broadcast from rank 0, if it differs by rank, is broadcast here.
    """
    spread_rest(model)
    alone = partial(accelerator.prepare_model, evaluation_mode=True)
    with patch.object(accelerator, "prepare_model", alone):
        yield


def require_same(own: Layout, first: Layout) -> None:
    """Compare this rank's model with that of rank 0; name the first difference."""
    for ours, theirs in zip_longest(_facts(own), _facts(first), fillvalue="nothing"):
        if ours != theirs:
            raise ConfigError(
                f"base_model: this rank has {ours} where rank 0 has {theirs}. Give every "
                "rank the same files and the same YAML."
            )


def require_same_keys(ranks: Sequence[Mapping[str, Any]]) -> None:
    """Compare the keys as each rank has read them; name the first that differs."""
    for rank, keys in enumerate(ranks):
        for key, value in keys.items():
            if value != ranks[0][key]:
                raise ConfigError(
                    f"{key}: {value!r} on rank {rank} and {ranks[0][key]!r} on rank 0. "
                    "Give every rank the same YAML."
                )


def _facts(layout: Layout) -> Iterator[str]:
    for block in layout.blocks:
        yield f"block {block.name} with chunks {block.chunks}"
    for chunk in layout.chunks:
        trains = "trainable" if chunk.trainable else "frozen"
        for spec in chunk.tensors:
            yield f"{trains} {spec.name} {spec.shape} {spec.dtype}"
    yield (
        f"{layout.fixed_frozen_bytes:,} frozen and {layout.fixed_trainable_bytes:,} "
        "trainable bytes outside the chunks"
    )
