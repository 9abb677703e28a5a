"""Run one block of each kind; the others only pass tensors of the right shape on.

A stack of 80 equal layers is traced as fast as one of three. Two calls are of one kind
if blocks and inputs agree in everything that a forward can depend on but weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..nested import map_tensors, tensors_in
from .meta import value_of

_META = torch.device("meta")


class Repeats:
    """Stands in for the forward of blocks whose kind has run before.

    Args:
        blocks: Names and modules.
        skipped: Told the number of the block that was skipped and that of the block
            that ran in its place; called inside the skipped block's forward.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[str, nn.Module]],
        skipped: Callable[[int, int], None],
    ) -> None:
        self._blocks = blocks
        self._skipped = skipped
        self._own: dict[str, Callable[..., Any]] = {}
        self._ran: dict[Any, tuple[int, Any]] = {}
        lists = [name.rpartition(".")[0] for name, _ in blocks]
        # the next one reads its output otherwise than a block would
        self._last = {lists.index(name) + lists.count(name) - 1 for name in lists}

    def __enter__(self) -> Repeats:
        for index, (name, block) in enumerate(self._blocks):
            position = name.rpartition(".")[2]
            static = _static(block, int(position) if position.isdigit() else None)
            if "forward" in vars(block):
                # patched on the instance, as fused kernels are
                self._own[name] = block.forward
            block.forward = self._forward(index, static, block.forward)
        return self

    def __exit__(self, *_error: object) -> None:
        for name, block in self._blocks:
            del block.forward
            if name in self._own:
                block.forward = self._own[name]

    def _forward(
        self, index: int, static: Any, inner: Callable[..., Any]
    ) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            inputs = list(tensors_in((args, kwargs)))
            kind = (static, _described((args, kwargs)), torch.is_grad_enabled())
            ran = self._ran.get(kind)
            if ran is None or index in self._last:
                output = inner(*args, **kwargs)
                self._ran.setdefault(kind, (index, _recipe(output, inputs)))
                return output
            self._skipped(index, ran[0])
            return _cook(ran[1], inputs)

        return forward


class _Skipped(torch.autograd.Function):
    """An output that depends on all `sources`, and takes gradients back to them."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], Tensor], *sources: Tensor) -> Tensor:
        ctx.like = [(s.shape, s.stride(), s.dtype) for s in sources]
        return make()

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> tuple[Tensor | None, ...]:
        made = (
            torch.empty_strided(shape, stride, dtype=dtype, device=_META)
            for shape, stride, dtype in ctx.like
        )
        return None, *made


def _recipe(output: Any, inputs: Sequence[Tensor]) -> Any:
    """The structure of an output, its tensors as an input's number or a maker."""
    positions = {id(tensor): number for number, tensor in enumerate(inputs)}

    def leaf(tensor: Tensor) -> tuple[str, Any]:
        if id(tensor) in positions:
            return ("input", positions[id(tensor)])
        nbytes = tensor.untyped_storage().nbytes()
        offset, shape, stride = (
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )
        dtype = tensor.dtype

        def make() -> Tensor:
            whole = torch.empty(nbytes // dtype.itemsize, dtype=dtype, device=_META)
            return whole.as_strided(shape, stride, offset)

        return ("made", (make, tensor.requires_grad))

    return map_tensors(output, leaf)


def _cook(recipe: Any, inputs: Sequence[Tensor]) -> Any:
    sources = [tensor for tensor in inputs if tensor.requires_grad]
    # none, if a block trains although nothing before it does
    sources = sources or [torch.zeros((), device=_META, requires_grad=True)]
    return _build(recipe, inputs, sources)


def _build(item: Any, inputs: Sequence[Tensor], sources: Sequence[Tensor]) -> Any:
    # not a closure: one that calls itself keeps what it sees until garbage is collected
    if isinstance(item, tuple) and item and item[0] == "input":
        return inputs[item[1]]
    if isinstance(item, tuple) and item and item[0] == "made":
        make, differentiable = item[1]
        return _Skipped.apply(make, *sources) if differentiable else make()
    if isinstance(item, (list, tuple)):
        return type(item)(_build(part, inputs, sources) for part in item)
    if isinstance(item, dict):
        return {key: _build(part, inputs, sources) for key, part in item.items()}
    return item


_PLAIN = {bool, int, float, str, type(None)}


def _static(block: nn.Module, position: int | None) -> Any:
    """Everything plain that a block knows, but for its own number in the list."""

    modules = []
    for name, module in block.named_modules():
        attributes = tuple(
            # 1 and True are equal, their types are not
            (key, kind, None if kind is int and value == position else value)
            for key, value in vars(module).items()
            if (kind := type(value)) in _PLAIN
        )
        modules.append((name, type(module), attributes))
    tensors = tuple(
        (name, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)
        for name, tensor in (*block.named_parameters(), *block.named_buffers())
    )
    return tuple(modules), tensors


def _described(value: Any) -> Any:
    """What a forward can see of its arguments, small values included."""
    if isinstance(value, Tensor):
        known = value_of(value)
        values = known.numpy(force=True).tobytes() if known is not None else None
        shape, stride = value.shape, value.stride()
        return shape, stride, value.dtype, value.requires_grad, values
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    if isinstance(value, dict):
        return tuple((key, _described(item)) for key, item in value.items())
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)
    # a cache, for example: the same object for every block
    return id(value)
