"""Recompute a block's activations in backward: torch's non-reentrant checkpoint.

It is around the block's call, as `GradientCheckpointingLayer` of transformers has it: it
keeps the arguments as they were given, and whatever hooks the call runs run again, from
the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import __file__ as CHECKPOINT_FILE, checkpoint

from ..layout import CACHES
from .calls import AroundCall
from .side_effects import Buffers, SideEffects
from .swap import Swap


class Recompute(AroundCall):
    """Keep only a block's inputs for backward; RNG state and autocast are replayed.

    Make it after whatever must also be around the recomputation.

    Args:
        block: The module.
        index: Its number.
        device: Computes.
        swap: Sends its inputs to the host; None keeps them as they are.
    """

    def __init__(
        self,
        block: nn.Module,
        index: int,
        device: torch.device,
        swap: Swap | None = None,
    ) -> None:
        self._index, self._swap = index, swap
        self._on_device = torch.empty(0, device=device)
        self._buffers, self._others = Buffers(block), SideEffects(block)
        super().__init__(block)

    def around(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        caches = [name for name in CACHES if kwargs.get(name) is not None]
        if not torch.is_grad_enabled() or (caches and not self._module.training):
            # generation needs the cache; the block keeps its tensors
            return call(*args, **kwargs)
        # the recomputation would find what the forward wrote there, unless it only reads
        if getattr(self._module, "_can_checkpoint_with_cache", False):
            caches = []
        kwargs = {**kwargs, **dict.fromkeys(caches)}
        run = self._buffers.around(partial(call, **kwargs))
        run = self._others.around(run, args, kwargs)
        if self._swap is not None:
            with self._swap.saving(self._index):
                saved = _SavedArguments(args)
            run, args = partial(saved.passed_to, run), ()
        try:
            return checkpoint(
                lambda _on_device, *given: run(*given),
                # torch replays random numbers of devices of which a positional argument is
                self._on_device,
                *args,
                use_reentrant=False,
            )
        except BaseException as error:
            _end_checkpoint(error)
            raise


def _end_checkpoint(error: BaseException) -> None:
    """Take back what `checkpoint` does to all tensors that are saved.

    Torch 2.11 leaves that to the end of a generator, which lives as long as the traceback.
    """
    for frame, _ in walk_tb(error.__traceback__):
        code = frame.f_code
        if (code.co_filename, code.co_name) == (CHECKPOINT_FILE, "checkpoint"):
            frame.clear()


class _SavedArguments:
    """A block's positional arguments, its tensors saved as a node of the graph does."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self._given: tuple[Any, ...] | None = args
        tensors = [value for value in args if isinstance(value, Tensor)]
        self._others = [None if isinstance(v, Tensor) else (v,) for v in args]
        anchor = torch.empty(0, requires_grad=True)
        # kept, as up to torch 2.11 a node lets go of what it saved with its output
        self._output: Any = _Save.apply(anchor, *tensors)

    def passed_to(self, run: Callable[..., Any]) -> Any:
        """Run with the arguments, in the forward those that were given."""
        given, self._given = self._given, None
        if given is None:
            return run(*self._restored())
        versions = _versions(given)
        output = run(*given)
        if _versions(given) != versions:
            # as torch says it of what it saves itself
            raise RuntimeError(
                "an input of a recomputed block, which is needed for gradient "
                "computation, has been modified by an inplace operation in its forward"
            )
        return output

    def _restored(self) -> list[Any]:
        tensors = iter(self._output.grad_fn.saved_tensors)
        return [next(tensors) if o is None else o[0] for o in self._others]


def _versions(args: tuple[Any, ...]) -> list[int]:
    return [value._version for value in args if isinstance(value, Tensor)]


class _Save(torch.autograd.Function):
    """Saves tensors and computes nothing; its backward is never run."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)
