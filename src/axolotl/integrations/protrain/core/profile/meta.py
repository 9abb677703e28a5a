"""Run a model without weights: tensors on the meta device, small integers real.

Note [Small integers are known]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Shapes decide what a model does, except where it looks at token ids, masks or grid
sizes. Those are small, so each integer tensor on meta carries a real one along, and an
operator all of whose tensors are known runs twice: on meta, where the trace sees it,
and on the real values. What has a shape that depends on values (`nonzero`, an index by
a mask) runs on these alone. A value that depends on weights is not known: reading it
ends the trace, because whatever is made up for it would be another model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import TraceError
from ..layout.tensors import (
    bindings,
    data_again,
    map_tensors,
    own_quant_states,
    tensors_in,
)

_aten = torch.ops.aten
_META = torch.device("meta")

KNOWN_NUMEL = 1 << 20
"""Integer and boolean tensors up to this size keep their values."""

_CHECKS = (
    _aten._assert_async.default,
    _aten._assert_async.msg,
    _aten._assert_scalar.default,
)
_READS = (_aten._local_scalar_dense.default, _aten.equal.default)


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy of `model` whose parameters are on the meta device; copies no weight.

    Hooks, patched methods and buffers come along; parameters keep class, dtype,
    strides, `requires_grad` and being shared, quantised ones their quant state.
    """
    own_quant_states(model)
    memo: dict[int, Any] = {}
    copies = []
    for name, param in model.named_parameters():
        data, *side = bindings(name, param)
        copied = torch.Tensor._make_subclass(
            type(param), empty_like(data.tensor), param.requires_grad
        )
        # deepcopy takes what it finds here for the copy
        memo[id(param)] = copied
        memo.update(
            (id(binding.tensor), empty_like(binding.tensor)) for binding in side
        )
        if (again := data_again(data)) is not None:
            memo[id(again.CB)] = copied.data
        copies.append((param, copied))
    for param, copied in copies:
        # the module that owns a quantised weight is among these
        vars(copied).update(copy.deepcopy(vars(param), memo))
    copied_model = copy.deepcopy(model, memo)
    for module in copied_model.modules():
        if parametrize.is_parametrized(module):
            _own_properties(module)
    return copied_model


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
    """Lets CPU tensors meet meta tensors, and answers questions about small values.

    Subclasses watch the operators by overriding `ran`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shapes: dict[Any, tuple[bool, list[Any]]] = {}
        self._in_place: set[Any] = set()

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
        if not on_meta:
            return self._make(func, args, kwargs, moved=tensors)
        if func in _CHECKS:
            return None
        if func in _READS:
            return func(*map_tensors(args, lambda t: known(t, func)))
        values = _known_values(tensors)
        if func is _aten._to_copy.default and _leaves_meta(kwargs):
            kwargs = {**kwargs, "device": _META}
        if values is not None and func not in _RANDOM:
            return self._carry(func, args, kwargs, values)
        if func is _aten.index.Tensor:
            args = (args[0], _as_positions(args[1]), *args[2:])
        if len(on_meta) != len(tensors):
            args, kwargs = _to_meta(args), _to_meta(kwargs)
        output = self._run(func, args, kwargs, tensors)
        self.ran(func, args, output)
        return output

    def _run(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Shape rules are slow and blocks are alike, so their answers are kept."""
        if func is _aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            # kernels take other types, the shape rule does not
            as_16_bit = map_tensors(
                args, lambda t: t.bfloat16() if t.is_floating_point() else t
            )
            return func(*as_16_bit, **kwargs).to(args[0].dtype)
        if func.is_view or func._schema.is_mutable or func in self._in_place:
            return func(*args, **kwargs)
        key = (func, _signature(args), _signature(tuple(kwargs.items())))
        try:
            shapes = self._shapes.get(key)
        except TypeError:
            # an argument that has no hash
            return func(*args, **kwargs)
        if shapes is not None:
            several, made = shapes
            fresh = tuple(
                torch.empty_strided(shape, stride, dtype=dtype, device=_META)
                for shape, stride, dtype in made
            )
            return fresh if several else fresh[0]
        output = func(*args, **kwargs)
        outputs = (output,) if isinstance(output, Tensor) else output
        if type(outputs) is tuple and all(isinstance(t, Tensor) for t in outputs):
            given = {t.untyped_storage()._cdata for t in tensors}
            if any(t.untyped_storage()._cdata in given for t in outputs):
                # not marked as a view, and one all the same
                self._in_place.add(func)
            else:
                made = [(t.shape, t.stride(), t.dtype) for t in outputs]
                self._shapes[key] = type(output) is tuple, made
        return output

    def _make(self, func: Any, args: Any, kwargs: Any, moved: list[Tensor]) -> Any:
        """A factory or a copy on to the meta device; integers keep their values."""
        output = func(*args, **kwargs)
        device = kwargs.get("device")
        if device is None or torch.device(device) != _META:
            return output
        has_values = func not in _RANDOM and func not in _EMPTY
        if has_values and isinstance(output, Tensor) and _is_small_integer(output):
            _know(output, func(*args, **{**kwargs, "device": "cpu"}))
        if not moved:
            # what was moved is on the device already in a real run
            self.ran(func, args, output)
        return output

    def _carry(self, func: Any, args: Any, kwargs: Any, known: dict[int, Any]) -> Any:
        """An operator all of whose tensors have known values."""
        if func in _BY_VALUE:
            return _as_meta(func(*_replace(args, known), **_replace(kwargs, known)))
        output = func(*_to_meta(args), **_to_meta(kwargs))
        outputs = [output] if isinstance(output, Tensor) else list(tensors_in(output))
        if all(_is_small_integer(t) for t in outputs):
            on_cpu = {**kwargs, "device": "cpu"} if "device" in kwargs else kwargs
            real = func(*_replace(args, known), **_replace(on_cpu, known))
            reals = [real] if isinstance(real, Tensor) else list(tensors_in(real))
            for tensor, value in zip(outputs, reals, strict=True):
                _know(tensor, value)
        self.ran(func, args, output)
        return output


_RANDOM = {
    _aten.bernoulli_.float,
    _aten.bernoulli.default,
    _aten.randint.default,
    _aten.randint.low,
    _aten.randperm.default,
    _aten.multinomial.default,
}
_EMPTY = {_aten.empty.memory_format, _aten.empty_strided.default}
# what these give has a shape that depends on values
_BY_VALUE = {
    _aten.nonzero.default,
    _aten.index.Tensor,
    _aten._unique2.default,
    _aten.unique_consecutive.default,
    _aten.unique_dim.default,
    _aten.repeat_interleave.Tensor,
    _aten.masked_select.default,
    _aten.bincount.default,
}


def known(tensor: Tensor, reader: object) -> Tensor:
    """The real values of a tensor.

    Raises:
        TraceError: They depend on weights.
    """
    value = value_of(tensor)
    if value is None:
        raise TraceError(
            f"the model reads a value ({reader}) that depends on its weights, so it "
            "cannot be planned without running it."
        )
    return value


def value_of(tensor: Tensor) -> Tensor | None:
    """The real values of a tensor, if they are known."""
    if tensor.device != _META:
        return tensor
    return getattr(tensor, "_known_value", None)


def _know(tensor: Tensor, value: Tensor) -> None:
    tensor._known_value = value  # type: ignore[attr-defined]


def _is_small_integer(tensor: Tensor) -> bool:
    return (
        tensor.numel() <= KNOWN_NUMEL
        and not tensor.is_floating_point()
        and not tensor.is_complex()
    )


def _known_values(tensors: Iterable[Tensor]) -> dict[int, Tensor] | None:
    """Values by `id` if all are known integers, else None."""
    known = {}
    for tensor in tensors:
        value = value_of(tensor)
        if value is None or not _is_small_integer(tensor):
            return None
        known[id(tensor)] = value
    return known


def _as_positions(indices: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Boolean masks of known values as positions: their number is a shape."""
    positions: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            positions.append(index)
            continue
        value = value_of(index)
        if value is None:
            raise TraceError(
                "the model selects with a mask that depends on its weights, so the "
                "size of what it selects is not known without running it."
            )
        positions += [p.to(_META) for p in value.nonzero(as_tuple=True)]
    return positions


def _signature(value: Any) -> Any:
    """Equal for arguments to which a shape rule gives equal answers."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_signature, value))
    # 1 and 1.0 and True are equal, their results are not
    return value, type(value)


def _leaves_meta(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device) != _META


def _to_meta(value: Any) -> Any:
    return map_tensors(value, lambda t: t if t.device == _META else t.to(_META))


def _replace(value: Any, known: dict[int, Any]) -> Any:
    return map_tensors(value, lambda t: known[id(t)])


def _as_meta(value: Any) -> Any:
    def carry(real: Tensor) -> Tensor:
        tensor = real.to(_META)
        if _is_small_integer(tensor):
            _know(tensor, real)
        return tensor

    return map_tensors(value, carry)
