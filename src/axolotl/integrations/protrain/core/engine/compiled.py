"""Compile the forward of each block by itself, between the hooks that page its weights.

Dynamo stops at a hook, so a whole model cannot be compiled while one pages. A block's
forward can: the hooks run around it, and blocks of one class with equal shapes share a
graph, which takes their weights as inputs.

# Note [Weights that a graph saves]

AOTAutograd saves a weight, or a view of it, for backward as eager autograd does: by its
address. That is right for the same reason: the block is in use in backward,
and its weights lie where they lay (Note [Stable addresses] in slots.py). What a graph
saves passes the saved-tensor hooks, so recompute and swap see it. CUDA graphs would not
be right: they keep results in memory of their own, which the next replay overwrites.

# Note [Compiled under DDP]

Inside a forward of DDP, Dynamo cuts graphs where DDP's buckets end, so that reductions
begin earlier. DDP reduces no paged weight, and the process aborts when a graph that was
cut is followed by another trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, cast

import torch
from torch import nn


class CompiledForward:
    """A block's forward, compiled, until `remove`.

    Args:
        block: Gets this object as its `forward`, which a copy of it does not take along.
        how: Keyword arguments of `torch.compile`.
    """

    def __init__(self, block: nn.Module, how: Mapping[str, Any]) -> None:
        self._block = block
        self._own: Callable[..., Any] | None = vars(block).get("forward")
        # a recomputation has to find the graph that its forward ran (pytorch#166926)
        cast(Any, torch._C._dynamo.eval_frame)._set_lru_cache(False)
        self._call = torch.compile(block.forward, **how)
        block.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # see Note [Compiled under DDP]
        with torch._dynamo.config.patch(optimize_ddp=False):
            return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        if self._own is not None:
            return self._own
        # or the copy would compute with the weights of this block
        block = memo.get(id(self._block), self._block)
        return MethodType(type(block).forward, block)

    def remove(self) -> None:
        """Give the block its own forward back."""
        if self._own is not None:
            self._block.forward = self._own
        else:
            del self._block.forward
