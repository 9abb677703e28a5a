"""Tie the pager to a model with torch's hooks; nothing is wrapped or patched.

Forward: a pre-hook opens a block's window, a post-hook closes it. Backward: a hook on
the block's outputs opens it, the next block's opening closes it. Under recompute the
forward pre-hook fires again inside the backward pass and finds the window open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .pager import Pager
from .schedule import Direction


def attach_block(block: nn.Module, index: int, pager: Pager) -> list[RemovableHandle]:
    """Open and close a block's window around its forward and backward."""

    def open_backward(_grad: Tensor) -> None:
        pager.open(index, Direction.BACKWARD)

    def before_forward(_module: nn.Module, _args: Any) -> None:
        pager.open(index, _direction())

    def after_forward(_module: nn.Module, _args: Any, output: Any) -> None:
        if _inside_backward():
            return
        pager.close(index, _direction())
        if torch.is_grad_enabled():
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(open_backward)

    return [
        block.register_forward_pre_hook(before_forward, prepend=True),
        # always_call: an exception in the block must not leave its window open
        block.register_forward_hook(after_forward, always_call=True),
    ]


def attach_entry(
    modules: Sequence[nn.Module],
    ready: Callable[[], None],
    settle: Callable[[], None],
) -> list[RemovableHandle]:
    """Call `ready` before any of `modules` runs, `settle` before it is read out."""

    def before_forward(_module: nn.Module, _args: Any) -> None:
        ready()

    def before_state_dict(_module: nn.Module, _prefix: str, _keep_vars: bool) -> None:
        settle()

    return [
        handle
        for module in modules
        for handle in (
            module.register_forward_pre_hook(before_forward),
            module.register_state_dict_pre_hook(before_state_dict),
        )
    ]


def attach_state_dict(
    owner: nn.Module,
    host: Mapping[str, Tensor],
    before_write: Callable[[], None],
    written: Callable[[], None],
) -> list[RemovableHandle]:
    """Let reads and writes of a module's state reach the host copies.

    Args:
        owner: The module whose parameters are paged.
        host: Host tensors by parameter name relative to `owner`.
        before_write: Called before a load changes them.
        written: Called after it, which has also written through the parameters
            into whatever slot they point at.
    """

    def read(
        _module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any
    ) -> None:
        for name, tensor in host.items():
            if prefix + name in state:
                state[prefix + name] = tensor

    @torch.no_grad()
    def write(
        _module: nn.Module, state: Mapping[str, Any], prefix: str, *_rest: Any
    ) -> None:
        before_write()
        for name, tensor in host.items():
            if prefix + name in state:
                tensor.copy_(state[prefix + name])

    def after_write(_module: nn.Module, _incompatible: Any) -> None:
        written()

    return [
        owner.register_state_dict_post_hook(read),
        owner.register_load_state_dict_pre_hook(write),
        owner.register_load_state_dict_post_hook(after_write),
    ]


def _direction() -> Direction:
    if _inside_backward():
        return Direction.BACKWARD
    return Direction.FORWARD if torch.is_grad_enabled() else Direction.INFERENCE


def _inside_backward() -> bool:
    """True on a thread that the autograd engine is running (as in torch.utils.checkpoint)."""
    return torch._C._current_graph_task_id() != -1


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
