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
from .swap import Swap

SMALL_BYTES = 1 << 16
"""Size up to which a buffer is kept in each call, whether or not the block writes it."""


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
        self._buffers = _Buffers(block)
        super().__init__(block)

    def around(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        caches = [name for name in CACHES if kwargs.get(name) is not None]
        if not torch.is_grad_enabled() or (caches and not self._module.training):
            # generation needs the cache; the block keeps its tensors
            return call(*args, **kwargs)
        # the recomputation would find what the forward wrote there, unless it only reads
        if getattr(self._module, "_can_checkpoint_with_cache", False):
            caches = []
        given = partial(call, **{**kwargs, **dict.fromkeys(caches)})
        run = self._buffers.around(given)
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


class _Buffers:
    """Lets a recomputation find the buffers as its forward found them, and change none.

    A forward may write some, as a batch norm its running statistics. Small ones are kept
    in each call. Which large ones it writes the first call shows, in each state of
    `training` of the block's modules.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._written: dict[Any, set[tuple[int, str]]] = {}
        # in which mode a call has found none; the first one may register some
        self._without: dict[bool, int] = {}

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Surround the two runs of a call, the second of which is the recomputation."""
        trains = self._block.training
        if self._without.get(trains, 0) > 1:
            return run
        modules = [*self._block.modules()]
        found = [
            (module._buffers, name, buffer)
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        if not found:
            self._without[trains] = self._without.get(trains, 0) + 1
            return run
        mode = tuple(module.training for module in modules)
        written = self._written.get(mode)
        if written is not None:
            found = [
                (own, name, buffer)
                for own, name, buffer in found
                if buffer.nbytes <= SMALL_BYTES or (id(own), name) in written
            ]
        before = [buffer.clone() for *_, buffer in found]
        is_first = True

        def surrounded(*args: Any) -> Any:
            nonlocal is_first
            if is_first:
                is_first = False
                output = run(*args)
                if written is None:
                    self._written[mode] = {
                        (id(own), name)
                        for (own, name, buffer), kept in zip(found, before, strict=True)
                        if buffer.nbytes > SMALL_BYTES
                        # a batch norm leaves versions as they are
                        and (own[name] is not buffer or not buffer.equal(kept))
                    }
                return output
            now = [own[name] for own, name, _ in found]
            for (own, name, _), kept in zip(found, before, strict=True):
                own[name] = kept.clone()
            try:
                return run(*args)
            finally:
                for (own, name, _), buffer in zip(found, now, strict=True):
                    own[name] = buffer

        return surrounded


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
