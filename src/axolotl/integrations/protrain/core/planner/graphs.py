"""Run blocks as the graphs that inductor makes of them, on the meta device.

AOTAutograd traces a block's forward and backward together and cuts them where the least
has to be saved. Inside a graph operators run one by one here, where inductor joins them
in kernels. Dynamo is not asked: a block that it would cut in several graphs is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.fx import Interpreter
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten


@contextmanager
def as_graphs(blocks: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, the forward of each block runs as graphs."""
    with ExitStack() as undo:
        for block in blocks:
            undo.enter_context(patch.object(block, "forward", _graphed(block)))
        yield


class _Forward(nn.Module):
    """The forward that a block has now, without its hooks."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.run = block, block.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


def _graphed(block: nn.Module) -> Callable[..., Any]:
    forward, known = _Forward(block), {}

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, form = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        weights = {**dict(forward.named_parameters()), **dict(forward.named_buffers())}
        given = [*(leaves[place] for place in places), *weights.values()]
        made: list[Any] = []

        def flat(*tensors: Tensor) -> list[Any]:
            inputs = dict(zip(places, tensors, strict=False))
            own = [inputs.get(i, leaf) for i, leaf in enumerate(leaves)]
            args, kwargs = tree_unflatten(own, form)
            bound = dict(zip(weights, tensors[len(places) :], strict=True))
            result = functional_call(forward, bound, args, kwargs)
            outputs, form_of_outputs = tree_flatten(result)
            made[:] = [form_of_outputs]
            return outputs

        described = [(t.shape, t.stride(), t.dtype, t.requires_grad) for t in given]
        kind = torch.is_grad_enabled(), tuple(described)
        if kind not in known:
            known[kind] = _compiled(flat, given), made
            # what is kept of the call may not keep its tensors
            leaves.clear()
        call, (outputs,) = known[kind]
        return tree_unflatten(list(call(*given)), outputs)

    return run


def _compiled(flat: Callable[..., Any], given: list[Tensor]) -> Callable[..., Any]:
    # imported here: they take seconds
    from functorch.compile import (  # type: ignore[import-untyped]
        aot_function,
        min_cut_rematerialization_partition,
    )
    from torch._inductor.decomposition import select_decomp_table

    def one_by_one(gm: Any, example_inputs: Any) -> Any:
        def run(args: list[Any]) -> Any:
            # lets go of what comes in once it is read, as inductor's code does
            return Interpreter(gm).boxed_run(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    call = aot_function(
        flat,
        one_by_one,
        one_by_one,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )
    # the first call traces, of which nobody may see anything
    with _disable_current_modes(), saved_tensors_hooks(lambda t: t, lambda t: t):
        call(*(t.detach().requires_grad_(t.requires_grad) for t in given))
    return call
