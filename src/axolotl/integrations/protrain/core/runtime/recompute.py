"""Recompute a block's activations in backward: torch's non-reentrant checkpoint.

Bound with hooks, so that names, `state_dict` keys and the block itself stay as they
are (the way of `torch.distributed._composable.checkpoint`, with removable handles).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import _checkpoint_without_reentrant_generator


class Recompute:
    """Keep only a block's inputs for backward; RNG state and autocast are replayed.

    Attach before any hook that must also run around the recomputation.
    """

    def __init__(self, block: nn.Module) -> None:
        self._running: Generator[None, None, None] | None = None
        self._recomputing = _Flag()
        self._handles = [
            block.register_forward_pre_hook(self._begin, with_kwargs=True),
            block.register_forward_hook(self._end, prepend=True, always_call=True),
        ]

    def remove(self) -> None:
        """Undo the binding."""
        self.unwind()
        for handle in self._handles:
            handle.remove()

    def unwind(self) -> None:
        """Leave a forward that an interruption left half done.

        torch calls no hook of a module that a KeyboardInterrupt passes through.
        """
        running, self._running = self._running, None
        if running is not None:
            running.close()

    def _begin(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        if self._recomputing.set or not torch.is_grad_enabled():
            return
        self._running = _checkpoint_without_reentrant_generator(
            block, True, self._contexts, "default", False, True, *args, **kwargs
        )
        next(self._running)

    def _end(self, _block: nn.Module, _args: Any, _output: Any) -> None:
        running, self._running = self._running, None
        if running is not None:
            # the generator's last part leaves the saved-tensor context
            next(running, None)

    def _contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        return nullcontext(), self._recomputing


class _Flag:
    """Set inside its context; entered once for every backward through the block."""

    set = False

    def __enter__(self) -> None:
        self.set = True

    def __exit__(self, *_error: object) -> None:
        self.set = False
