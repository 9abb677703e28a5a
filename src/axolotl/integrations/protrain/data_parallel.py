"""What accelerate and torch's DistributedDataParallel are told about host-kept weights.

DDP reduces what stays on the device with its state, and must neither broadcast to,
reduce nor look at anything that the host keeps.

# Note [A rank that has no room]

Ranks meet once the inputs of a micro-batch are there and after it, and where one had no
memory all repeat the step. To come there the others need it in the collectives of their
forward and backward, so it takes part in those that are left, with zeros: nobody uses the
sums. DDP broadcasts buffers before a forward and reduces a bucket once each of its
parameters has a gradient, so what is owed is what follows its forward, unless that has
ended, and a backward of the parameters without a gradient. Where the last one had its
gradient DDP cannot end: all ranks come there, and raise the same error.
Gathers of weights and reductions of gradients that are left (`Session.sit_out`) wait for
none of DDP's. A trainer whose loss is more than one forward is not repeated: how many are
left is not known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .core.errors import ConfigError
from .core.types import Layout

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
    """Whether anything is left that trains and that DDP does not ignore."""
    ignored = set(vars(model).get(IGNORED, ()))
    return any(
        param.requires_grad and name not in ignored
        for name, param in model.named_parameters()
    )


@contextmanager
def without_ddp(accelerator: Any, model: nn.Module) -> Iterator[None]:
    """Let `accelerator` prepare `model` for autocast alone: DDP refuses to reduce none.

    What DDP would have broadcast from rank 0, if it differs by rank, is broadcast here.
    """
    ignored = set(vars(model).get(IGNORED, ()))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in ignored:
            dist.broadcast(tensor.detach(), src=0)
    alone = partial(accelerator.prepare_model, evaluation_mode=True)
    with patch.object(accelerator, "prepare_model", alone):
        yield


class Owed:
    """What a rank owes DDP in a micro-batch; see Note [A rank that has no room].

    Args:
        wrapped: The model as it is trained, under DDP or not.

    `close` removes its hooks.
    """

    def __init__(self, wrapped: nn.Module) -> None:
        self._ddp = wrapped if isinstance(wrapped, DistributedDataParallel) else None
        model = self._ddp.module if self._ddp else wrapped
        ignored = set(vars(model).get(IGNORED, ()))
        self._params = [
            param
            for name, param in model.named_parameters()
            if self._ddp and param.requires_grad and name not in ignored
        ]
        self._handles = [
            *(
                p.register_post_accumulate_grad_hook(lambda p: self._done.add(p))
                for p in self._params
            ),
            model.register_forward_pre_hook(self._entered, prepend=True),
            wrapped.register_forward_hook(self._left),
        ]
        self.begin()

    def begin(self) -> None:
        """A micro-batch begins, of one forward."""
        self._done: set[Tensor] = set()
        self.has_entered = self._has_left = False

    def loss(self) -> Tensor | None:
        """Of a forward in place of one that has failed; its backward reduces what the
        others wait for, None if nothing is left."""
        if self._has_left or self._ddp is None:
            left = [param for param in self._params if param not in self._done]
            return _Zeros(left)() if left else None
        # the forward that has failed has broadcast buffers
        self._ddp.require_forward_param_sync = False
        with patch.object(self._ddp, "module", _Zeros(self._params)):
            return self._ddp()

    @property
    def is_spent(self) -> bool:
        """DDP has reduced all, and the pass has failed before it could end."""
        return bool(self._params) and len(self._done) == len(self._params)

    def close(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _entered(self, *_: Any) -> None:
        self.has_entered = True

    def _left(self, *_: Any) -> None:
        self._has_left = True


class _Zeros(nn.Module):
    """A loss of 0 that depends on parameters of others."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        super().__init__()
        # in a tuple they are not its own
        self._read = tuple(params)

    def forward(self) -> Tensor:
        parts = [param.flatten()[:1].sum().float() for param in self._read]
        return torch.stack(parts).sum() * 0


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
