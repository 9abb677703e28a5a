"""Recompute a block's activations in backward: torch's non-reentrant checkpoint.

Bound with hooks, so that names, `state_dict` keys and the block itself stay as they
are (the way of `torch.distributed._composable.checkpoint`, with removable handles).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from ..layout import CACHES
from .hooks import AroundForward


class Recompute(AroundForward):
    """Keep only a block's inputs for backward; RNG state and autocast are replayed.

    Attach before any hook that must also run around the recomputation.

    Args:
        block: The module.
        saving: Context in which its inputs are saved; None keeps them as they are.
    """

    def __init__(
        self,
        block: nn.Module,
        saving: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> None:
        self._saving = saving
        self._recomputing = _Flag()
        super().__init__(block)

    def around(
        self, block: nn.Module, args: Any, kwargs: Any
    ) -> Generator[Any, None, None]:
        if self._recomputing.set or not torch.is_grad_enabled():
            return
        caches = [name for name in CACHES if kwargs.get(name) is not None]
        if caches and not block.training:
            # generation needs it; the block keeps its tensors
            return
        # the recomputation would find what the forward wrote there
        kwargs = {**kwargs, **dict.fromkeys(caches)}
        given = args
        run: Callable[..., Any] = block
        if self._saving is not None:
            with self._saving():
                saved = _SavedArguments(args)
            args = (saved.on_device,)

            def run(_on_device: Tensor, **kwargs: Any) -> Any:
                return block(*saved.restore(), **kwargs)

        checkpointed = checkpoint._checkpoint_without_reentrant_generator(
            run, True, self._contexts, "default", False, True, *args, **kwargs
        )
        with closing(checkpointed):
            next(checkpointed)
            yield given, kwargs
            # its last part leaves the saved-tensor context
            next(checkpointed, None)

    def _contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        return nullcontext(), self._recomputing


class _SavedArguments:
    """A block's positional arguments, its tensors saved as a node of the graph does.

    Attributes:
        on_device: Empty; tells torch whose random state to replay.
    """

    def __init__(self, args: tuple[Any, ...]) -> None:
        tensors = [value for value in args if isinstance(value, Tensor)]
        self._others = [None if isinstance(v, Tensor) else (v,) for v in args]
        self.on_device = tensors[0].new_empty(0) if tensors else torch.empty(0)
        anchor = torch.empty(0, requires_grad=True)
        self._node: Any = _Save.apply(anchor, *tensors).grad_fn

    def restore(self) -> list[Any]:
        tensors = iter(self._node.saved_tensors)
        return [next(tensors) if o is None else o[0] for o in self._others]


class _Save(torch.autograd.Function):
    """Saves tensors and computes nothing; its backward is never run."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)


class _Flag:
    """Set inside its context; entered once for every backward through the block."""

    set = False

    def __enter__(self) -> None:
        self.set = True

    def __exit__(self, *_error: object) -> None:
        self.set = False
