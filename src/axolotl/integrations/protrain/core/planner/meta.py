"""Run a model without weights: tensors on the meta device, values found when read.

Note [Values]
~~~~~~~~~~~~~
Shapes decide what a model does, except where it looks at token ids, masks or grid sizes,
or asks a router which experts it chose. So each tensor that an operator makes on meta
knows how it was made, and when somebody reads it, or when a shape depends on it
(`nonzero`, an index by a mask), the operators before it run on real values. What nobody
can know without weights is drawn: the outcome of a matrix product, and of whatever reads
a parameter, is normally distributed, as random weights would have it. That costs the
router, not the block, and what follows from one drawn value agrees with it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from ..layout.packed import Packed
from ..layout.tensors import (
    bindings,
    data_again,
    map_tensors,
    own_quant_states,
    tensors_in,
)
from .operators import multiplies

_aten = torch.ops.aten
_META = torch.device("meta")

KNOWN_NUMEL = 1 << 20
"""Integer and boolean tensors up to this size tell one call of a block from another."""

_CHECKS = (
    _aten._assert_async.default,
    _aten._assert_async.msg,
    _aten._assert_scalar.default,
)
_READS = (_aten._local_scalar_dense.default, _aten.equal.default)

LIBRARIES = frozenset(
    "torch transformers transformers_modules peft accelerate trl bitsandbytes torchao "
    "axolotl".split()
)
"""Packages whose module hooks are part of a model: outputs of embeddings that require
gradients (transformers, PEFT, TRL), outputs that are captured (transformers), weights
that are unpacked once per forward (bitsandbytes, Axolotl), weight norms (torch)."""
_HOOK_TABLES = [name for name in vars(nn.Module()) if name.endswith("_hooks")]


def meta_copy(
    model: nn.Module, instead: Callable[[str, Tensor], Tensor] | None = None
) -> nn.Module:
    """A copy of `model` whose parameters are on the meta device; copies no weight.

    Patched methods, buffers and module hooks of `LIBRARIES` come along. No other hook
    does: what it counts or keeps is shared with the model. Parameters keep class, dtype,
    strides, `requires_grad` and being shared, quantised ones their quant state. They are
    what `instead` gives, if it is there, for the name of a binding and its tensor.
    """
    of = instead or (lambda _name, tensor: empty_like(tensor))
    own_quant_states(model)
    memo: dict[int, Any] = {}
    tables = [
        (table, type(table)())
        for module in model.modules()
        for name in _HOOK_TABLES
        if (table := vars(module).get(name))
    ]
    # deepcopy takes what it finds here for the copy
    memo.update((id(table), own) for table, own in tables)
    copies = []
    for name, param in model.named_parameters():
        data, *side = bindings(name, param)
        # the trace sees the weight that a packed one becomes
        kind = nn.Parameter if isinstance(param, Packed) else type(param)
        copied = torch.Tensor._make_subclass(
            kind, of(name, data.tensor), param.requires_grad
        )
        memo[id(param)] = copied
        memo.update(
            (id(binding.tensor), of(binding.name, binding.tensor)) for binding in side
        )
        if (again := data_again(data)) is not None:
            memo[id(again.CB)] = copied.data
        copies.append((param, copied))
    for param, copied in copies:
        # the module that owns a quantised weight is among these
        own = {"form": param.form} if isinstance(param, Packed) else vars(param)
        vars(copied).update(copy.deepcopy(own, memo))
    for table, own in tables:
        kept = {key: hook for key, hook in table.items() if _of_library(hook)}
        own.update(copy.deepcopy(kept, memo))
    copied_model = copy.deepcopy(model, memo)
    for module in copied_model.modules():
        if parametrize.is_parametrized(module):
            _own_properties(module)
    return copied_model


def _of_library(hook: Any) -> bool:
    """Tell whether all code of a hook, its wrappers included, is of `LIBRARIES`."""
    while hook is not None:
        if isinstance(hook, partial):
            hook = hook.func
            continue
        # `functools.wraps` gives a function the module of another
        owners = {str(getattr(hook, "__module__", None))}
        if isinstance(hook, MethodType):
            owners.add(type(hook.__self__).__module__)
        elif isinstance(hook, FunctionType):
            owners.add(hook.__globals__["__name__"])
        else:
            owners.add(type(hook).__module__)
        if not {owner.partition(".")[0] for owner in owners} <= LIBRARIES:
            return False
        hook = getattr(hook, "__wrapped__", None)
    return True


@contextmanager
def without_global_hooks() -> Iterator[None]:
    """Inside, no hook is called that is registered for all modules or all optimizers."""
    with ExitStack() as undo:
        for kind in (nn.Module, torch.optim.Optimizer):
            for name, table in vars(sys.modules[kind.__module__]).items():
                if name.startswith("_global_") and name.endswith("_hooks"):
                    undo.enter_context(patch.dict(table, clear=True))
        yield


def _own_properties(module: Any) -> None:
    """A copy's parametrized tensors are cached under the id of the module it is of."""
    module.__class__ = module.__class__.__bases__[0]
    parametrize._inject_new_class(module)
    for name in module.parametrizations:
        parametrize._inject_property(module, name)


def empty_like(tensor: Tensor) -> Tensor:
    """On the meta device, with the strides of `tensor` even where it is expanded."""
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META
    )


class MetaMode(TorchDispatchMode):
    """Lets CPU tensors meet meta tensors, and answers questions about values.

    Subclasses watch the operators by overriding `ran`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seeded = _NOISE.manual_seed(0).get_state()

    @property
    def drew(self) -> bool:
        """Tell whether anybody read what depends on weights."""
        return not torch.equal(_NOISE.get_state(), self._seeded)

    def ran(self, func: Any, args: Any, output: Any) -> None:
        """Called after each operator that ran on the meta device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = list(tensors_in(args))
        if kwargs:
            tensors += tensors_in(kwargs.values())
        on_meta = [t for t in tensors if t.device == _META]
        device = kwargs.get("device")
        goes_there = device is not None and torch.device(device) == _META
        if not on_meta and not goes_there:
            with suppress(NotImplementedError):
                return func(*args, **kwargs)
        if func in _CHECKS:
            return None
        if func in _READS:
            return _read(func, args)
        if func is _aten._to_copy.default and device is not None:
            kwargs = {**kwargs, "device": _META}
        later = _Later(func, args, kwargs)
        if func in _BY_VALUE:
            output = map_tensors(later.outcome(), empty_like)
        else:
            if func is _aten.index.Tensor:
                args = (args[0], _as_positions(args[1]), *args[2:])
            if len(on_meta) < len(tensors) and (on_meta or not goes_there):
                args, kwargs = _to_meta(args), _to_meta(kwargs)
            output = _shaped(func, args, kwargs)
        later.attach(output)
        if on_meta or not tensors:
            # what was moved is on the device already in a real run
            self.ran(func, args, output)
        return output


def _shaped(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operator's shape rule on the meta device."""
    if func is _aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
        # kernels take other types, the shape rule does not
        as_16_bit = map_tensors(
            args, lambda t: t.bfloat16() if t.is_floating_point() else t
        )
        return func(*as_16_bit, **kwargs).to(args[0].dtype)
    return func(*args, **kwargs)


_RANDOM = {
    _aten.bernoulli_.float,
    _aten.bernoulli.default,
    _aten.randint.default,
    _aten.randint.low,
    _aten.randperm.default,
    _aten.multinomial.default,
}
_FACTORIES = {
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.full_like.default,
    _aten.new_zeros.default,
    _aten.new_ones.default,
    _aten.new_full.default,
}
_EMPTY = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.set_.source_Storage_storage_offset,
}
# what these give has a shape that depends on values
_BY_VALUE = {
    _aten.nonzero.default,
    _aten._unique2.default,
    _aten.unique_consecutive.default,
    _aten.unique_dim.default,
    _aten.repeat_interleave.Tensor,
    _aten.masked_select.default,
    _aten.bincount.default,
}
_NOISE = torch.Generator()


@dataclass(eq=False)
class _Value:
    """The values that a tensor on the meta device stands for; `drawn` if that depends
    on weights."""

    find: Callable[[], Tensor]
    drawn: bool


def known(tensor: Tensor) -> Tensor:
    """The values of a tensor, drawn where they depend on weights."""
    return _value(tensor).find()


def _read(func: Any, args: Any) -> Any:
    """A number; 1.0 for a float that depends on weights: no shape follows from a metric,
    and to draw it may take all logits."""
    if func is _READS[0] and args[0].is_floating_point() and _value(args[0]).drawn:
        return 1.0
    return func(*map_tensors(args, known))


def value_of(tensor: Tensor) -> Tensor | None:
    """The values of a small integer tensor that does not depend on weights."""
    if tensor.device != _META:
        return tensor
    if tensor.numel() > KNOWN_NUMEL or tensor.is_floating_point():
        return None
    value = _value(tensor)
    return None if value.drawn or tensor.is_complex() else value.find()


def _value(tensor: Tensor) -> _Value:
    if tensor.device != _META:
        return _Value(lambda: tensor, drawn=False)
    base = getattr(tensor._base, "_value", None)
    if base is not None:
        # the base knows of writes through other views
        place = tensor.shape, tensor.stride(), tensor.storage_offset()
        return _Value(lambda: base.find().as_strided(*place), base.drawn)
    found = getattr(tensor, "_value", None)
    if found is None:
        found = tensor._value = _unknown(tensor)  # type: ignore[attr-defined]
    return found


def _unknown(tensor: Tensor) -> _Value:
    return _Value(cache(partial(_draw, tensor.shape, tensor.dtype)), drawn=True)


def _draw(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    return torch.empty(shape).normal_(generator=_NOISE).to(dtype)


class _Later:
    """One call of an operator, made on real values if somebody asks."""

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self._func, self._drawn = func, func in _RANDOM
        self._reads_weights = func in _EMPTY or multiplies(func)
        self._inputs: Any = None
        if not self._reads_weights:
            self._inputs = map_tensors((args, kwargs), self._take)
        self._outcome: Any = None

    def _take(self, tensor: Tensor) -> _Value | Tensor:
        if isinstance(tensor, nn.Parameter):
            self._reads_weights = True
            return tensor
        value = _value(tensor)
        self._drawn |= value.drawn and self._func not in _FACTORIES
        return value

    def outcome(self) -> Any:
        """Return an operator's result on real values."""
        if self._outcome is None:
            self._outcome = self._run()
            self._inputs = None
        return self._outcome

    def _run(self) -> Any:
        func, mutable = self._func, self._func._schema.is_mutable

        def found(value: _Value) -> Tensor:
            # others may have read it before it was changed
            return value.find().clone() if mutable else value.find()

        args, kwargs = map_tensors(self._inputs, found, _Value)
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            # `torch.manual_seed` would seed the generators of GPUs too
            torch.default_generator.manual_seed(0)
            try:
                return func(*args, **kwargs)
            except NotImplementedError:
                # CPU kernels take fewer types than those of a GPU
                return func(*map_tensors(args, Tensor.double), **kwargs)

    def attach(self, output: Any) -> None:
        """Tell tensors on meta how to find their values."""
        if self._reads_weights and not self._func._schema.is_mutable:
            return
        for number, tensor in enumerate(tensors_in(output)):
            find = partial(self._find, number, tensor.stride(), tensor.dtype)
            value = _Value(find, self._drawn)
            if self._reads_weights:
                value = _unknown(tensor)
            base = tensor._base
            if base is None:
                tensor._value = value  # type: ignore[attr-defined]
            else:
                base._value = _written(base, tensor, value)  # type: ignore[attr-defined]

    def _find(self, number: int, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        outcome = self.outcome()
        real = list(tensors_in(outcome))[number]
        if self._func.is_view or (real.stride(), real.dtype) == (stride, dtype):
            return real
        return torch.empty_strided(real.shape, stride, dtype=dtype).copy_(real)


def _written(base: Tensor, view: Tensor, value: _Value) -> _Value:
    """Return the values of `base` when a view of it has become `value`."""
    before, place = _value(base), (view.shape, view.stride(), view.storage_offset())

    @cache
    def find() -> Tensor:
        whole = before.find().clone()
        whole.as_strided(*place).copy_(value.find())
        return whole

    return _Value(find, before.drawn or value.drawn)


def _as_positions(indices: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Boolean masks as positions: their number is a shape."""
    positions: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            positions.append(index)
        else:
            positions += [p.to(_META) for p in known(index).nonzero(as_tuple=True)]
    return positions


def _to_meta(value: Any) -> Any:
    return map_tensors(value, lambda t: t if t.device == _META else t.to(_META))
