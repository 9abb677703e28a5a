"""Run one block of each kind; the others only pass tensors of the right shape on.

A stack of 80 equal layers is traced as fast as one of three.

Note [When one block stands for another]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Two calls are of one kind if blocks and inputs agree in everything that a forward can
depend on but weights: classes, plain attributes, shapes and strides of parameters and
buffers, shapes and known values of the arguments. An attribute that is the block's
number in all blocks of its list (`layer_idx`) does not count. What is neither plain nor
a tensor is compared by identity: a cache is the same object for every block, and what
differs runs.

The last block of a list always runs, because what comes next reads its output otherwise
than a block would. So does the first, for itself alone: a forward may tell it by its
number. A skipped block's output depends on its inputs as autograd sees it, so backward
passes through it, its segments are there, and the trace fills them with what the block
that ran has shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..layout.tensors import map_tensors, tensors_in
from .meta import value_of

_META = torch.device("meta")


@contextmanager
def skipping_repeats(
    blocks: Sequence[tuple[str, nn.Module]],
    running: Callable[[], Any],
    skipped: Callable[[Any], None],
) -> Iterator[None]:
    """Inside, forwards of blocks whose kind has run before are stood in for.

    `skipped` is called inside the forward of a block that is skipped, with what
    `running` returned inside the one that ran in its place.
    """
    known: dict[Any, tuple[Any, Any]] = {}
    lists = [name.rpartition(".")[0] for name, _ in blocks]
    first = {lists.index(name) for name in lists}
    # the next one reads its output otherwise than a block would
    last = {lists.index(name) + lists.count(name) - 1 for name in lists}

    def placeholder(
        index: int, static: Any, inner: Callable[..., Any]
    ) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            inputs = list(tensors_in((args, kwargs)))
            kind = (static, _described((args, kwargs)), torch.is_grad_enabled())
            ran = known.get(kind)
            if ran is None or index in first or index in last:
                run = running()
                output = inner(*args, **kwargs)
                if index not in first:
                    known.setdefault(kind, (run, _form(output, inputs)))
                return output
            skipped(ran[0])
            return _output(ran[1], inputs)

        return forward

    with ExitStack() as undo:
        numbers = _numbers(blocks)
        for index, (name, block) in enumerate(blocks):
            static = _static(block, numbers[name.rpartition(".")[0]])
            forward = placeholder(index, static, block.forward)
            undo.enter_context(patch.object(block, "forward", forward))
        yield


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


@dataclass(frozen=True)
class _Made:
    """In place of a tensor in an output: an input, by its number, or a new one."""

    input_number: int | None
    numel: int
    place: tuple[Any, ...]
    dtype: torch.dtype
    requires_grad: bool

    def make(self) -> Tensor:
        """A new tensor of this form."""
        whole = torch.empty(self.numel, dtype=self.dtype, device=_META)
        return whole.as_strided(*self.place)


def _form(output: Any, inputs: Sequence[Tensor]) -> Any:
    """The structure of an output without its tensors."""
    numbers = {id(tensor): number for number, tensor in enumerate(inputs)}

    def described(tensor: Tensor) -> _Made:
        numel = tensor.untyped_storage().nbytes() // tensor.itemsize
        place = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        # it may not keep the tensor
        form = numel, place, tensor.dtype, tensor.requires_grad
        return _Made(numbers.get(id(tensor)), *form)

    return map_tensors(output, described)


def _output(form: Any, inputs: Sequence[Tensor]) -> Any:
    """A new output of this form, which depends on `inputs`."""
    sources = [tensor for tensor in inputs if tensor.requires_grad]
    # none, if a block trains although nothing before it does
    sources = sources or [torch.zeros((), device=_META, requires_grad=True)]

    def filled(item: _Made) -> Tensor:
        if item.input_number is not None:
            return inputs[item.input_number]
        if not item.requires_grad:
            return item.make()
        return _Skipped.apply(item.make, *sources)

    return map_tensors(form, filled, _Made)


_PLAIN = (bool, int, float, str, type(None))


def plain_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and values of what a module itself knows beside tensors and objects."""
    return (item for item in vars(module).items() if type(item[1]) in _PLAIN)


def _numbers(
    blocks: Sequence[tuple[str, nn.Module]],
) -> dict[str, set[tuple[str, str]]]:
    """Modules and attributes that have the block's number, in all blocks of a list."""
    found: dict[str, set[tuple[str, str]]] = {}
    others: dict[str, set[tuple[str, str]]] = {}
    for name, block in blocks:
        place, _, position = name.rpartition(".")
        own, other = (each.setdefault(place, set()) for each in (found, others))
        for path, module in block.named_modules():
            for key, value in plain_attributes(module):
                if type(value) is int:
                    (own if str(value) == position else other).add((path, key))
    return {place: own - others[place] for place, own in found.items()}


def _static(block: nn.Module, numbers: Set[tuple[str, str]]) -> Any:
    """Everything plain that a block knows, but for its number in the list."""
    modules: list[Any] = []
    own = {id(part): name for name, part in _parts(block)}
    for name, module in block.named_modules():
        attributes: list[Any] = []
        links: list[Any] = []
        for key, value in vars(module).items():
            # 1 and True are equal, their types are not
            if (kind := type(value)) in _PLAIN:
                known = None if (name, key) in numbers else value
                attributes.append((key, kind, known))
            elif key not in _OF_EVERY_MODULE:
                linked = tuple(own.get(id(part), id(part)) for part in _linked(value))
                links.append((key, linked))
        kind = type(module)
        if parametrize.is_parametrized(module):
            # a class of its own; what it computes is in modules of its own too
            kind = kind.__bases__[0]
        modules.append((name, kind, tuple(attributes), tuple(links)))
    tensors = tuple(
        (name, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)
        for name, tensor in (*block.named_parameters(), *block.named_buffers())
    )
    return tuple(modules), tensors


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def _parts(block: nn.Module) -> Iterator[tuple[str, nn.Module | Tensor]]:
    yield from block.named_modules()
    yield from block.named_parameters()
    yield from block.named_buffers()


def _linked(value: Any) -> Iterator[nn.Module | Tensor]:
    """Modules and tensors that an attribute holds as no part of its module, which may be
    another block's."""
    if isinstance(value, (nn.Module, Tensor)):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _linked(item)
    elif isinstance(value, dict):
        yield from _linked([*value.values()])


def _described(value: Any) -> Any:
    """Describe what a forward can see of its arguments, small values included."""
    if isinstance(value, Tensor):
        known, values = value_of(value), None
        if known is not None:
            # numpy has no bfloat16
            flat = known.reshape(-1).contiguous().view(torch.uint8)
            values = flat.numpy(force=True).tobytes()
        shape, stride = value.shape, value.stride()
        return shape, stride, value.dtype, value.requires_grad, values
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    if isinstance(value, dict):
        return tuple((key, _described(item)) for key, item in value.items())
    if isinstance(value, _PLAIN):
        return repr(value)
    # a cache, for example: the same object for every block
    return id(value)
