"""Tensors behind a parameter, and tensors inside arguments and outputs of modules.

Behind a parameter are its data and what a weight in few bits is read with.

bitsandbytes packs a 4-bit weight into the data of a `Params4bit` and keeps the scales
in `param.quant_state`: a plain object whose attributes are numbers, tensors (`absmax`,
`code`, `offset`) and, after double quantisation, one more object of its own class
(`state2`). Kernels read those attributes at each call, in backward too, so binding
them once to a slot is enough. Of a weight in 8 bits (LLM.int8) the layer has the scales
(`SCB`) in its `state`, and there the data once more (`CB`), to which each forward binds the
parameter. Of experts in 4 bits the parametrization that unpacks them has the quant state.
`own_quant_states` lets parameters name these objects as their own. This module is the only
place that knows the structure.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from ..errors import LayoutError
from .packed import Packed, form_of

_STATE = "quant_state"
_REPACKED = "packing_format_for_cpu"
_MAY_REPACK = "support_avx512bf16_for_cpu"
_IN_8_BITS = "init_8bit_state"
_DATA = "CB"
_OF_LAST_INPUT = "idx"
ALIGNMENT_BYTES = 256
"""Matrix libraries choose a kernel by the address of a weight, modulo these bytes:
a view must not be less aligned than the allocation that the plain run would have."""


@dataclass(frozen=True, eq=False)
class Binding:
    """A place that holds a tensor: `param.data`, or an attribute of a quant state.

    Its name is the parameter's own, or that and the path of the attribute:
    `….weight.quant_state.state2.absmax`.
    """

    name: str
    owner: Any
    attribute: str

    @property
    def tensor(self) -> Tensor:
        """The tensor that is bound now."""
        return getattr(self.owner, self.attribute)

    def bind(self, tensor: Tensor) -> None:
        """Let the owner read `tensor` from here on."""
        setattr(self.owner, self.attribute, tensor)
        if (again := data_again(self)) is not None:
            setattr(again, _DATA, tensor)


@dataclass(frozen=True, eq=False)
class PackedBinding(Binding):
    """The place of a weight that came packed.

    Its owner is a parameter of plain tensors, which modules register while one is bound;
    for a packed one they register another, as a parameter cannot become packed.
    """

    places: tuple[tuple[nn.Module, str], ...]

    @property
    def tensor(self) -> Tensor:
        module, key = self.places[0]
        shown: Any = module._parameters[key]
        if isinstance(shown, Packed) and shown.written is not None:
            return shown.written
        return shown.data

    def bind(self, tensor: Tensor) -> None:
        shown = self.owner
        if isinstance(tensor, Packed):
            shown = nn.Parameter(tensor, requires_grad=False)
        else:
            self.owner.data = tensor
        for module, key in self.places:
            module._parameters[key] = shown


def data_again(binding: Binding) -> Any:
    """Return what holds the data of a weight in 8 bits a second time, as `CB`; or
    None."""
    state = getattr(binding.owner, _STATE, None)
    return state if hasattr(state, _DATA) and binding.attribute == "data" else None


def own_quant_states(model: nn.Module) -> None:
    """Let weights in 8 bits, and experts in 4, name what they are read with.

    As from its first forward on a layer in 8 bits is the only owner of that.
    """
    for unpacked in model.modules():
        if isinstance(unpacked, ParametrizationList) and hasattr(unpacked[0], _STATE):
            setattr(unpacked.original, _STATE, getattr(unpacked[0], _STATE))
    for layer in _in_8_bits(model):
        if layer.weight.CB is not None:
            layer.init_8bit_state()
        setattr(layer.weight, _STATE, layer.state)


def quantisation_tables_apart() -> AbstractContextManager[Any]:
    """Keep what bitsandbytes caches on the device where it is first asked for.

    Its caller has imported bitsandbytes.
    """
    cached = sys.modules["bitsandbytes.functional"].name2qmap
    return patch.dict(cached, clear=True)


def _in_8_bits(model: nn.Module) -> list[Any]:
    return [
        module
        for module in model.modules()
        if hasattr(module, _IN_8_BITS) and module.weight.dtype == torch.int8
    ]


def is_quantised(param: nn.Parameter) -> bool:
    """True for a weight that cannot be read without its quant state."""
    return getattr(param, _STATE, None) is not None


def bindings(name: str, param: nn.Parameter) -> list[Binding]:
    """The data of a parameter and its side tensors, the data first.

    The order is that of the attributes, the same for a model on the meta device.
    """
    own = [Binding(name, param, "data")]
    if is_quantised(param):
        own += _side_tensors(f"{name}.{_STATE}", getattr(param, _STATE))
    return own


def parameter_name(binding: str) -> str:
    """Name of the parameter that a binding belongs to."""
    return binding.partition(f".{_STATE}.")[0]


def model_bindings(model: nn.Module) -> dict[str, Binding]:
    """Everything that parameters of `model` hold, by name; tied ones once."""
    own_quant_states(model)
    named = dict(model.named_parameters())
    found = {b.name: b for name, param in named.items() for b in bindings(name, param)}
    packed = {id(p): name for name, p in named.items() if isinstance(p, Packed)}
    places: dict[str, list[tuple[nn.Module, str]]] = {}
    for module in model.modules() if packed else ():
        for key, param in module._parameters.items():
            if id(param) in packed:
                places.setdefault(packed[id(param)], []).append((module, key))
    for name, registered in places.items():
        # nobody asks for values before it is bound
        none = torch.empty((), dtype=named[name].dtype, device="cpu").expand(
            named[name].shape
        )
        plain: Any = nn.Parameter(none, requires_grad=False)
        plain.form = form_of(named[name])
        found[name] = PackedBinding(name, plain, "data", tuple(registered))
    return found


def check_quantised(named: Mapping[str, nn.Parameter]) -> None:
    """Refuse quantised weights whose side tensors cannot follow their data.

    Raises:
        LayoutError: One is trainable, or shares its quant state with another, or was
            repacked for evaluation.
    """
    seen: dict[int, str] = {}
    for name, param in named.items():
        if form_of(param) is not None and param.requires_grad:
            raise LayoutError(
                f"{name}: a packed weight is trainable, but packed bytes have no "
                "gradient. Freeze it, or load the base unpacked."
            )
        if not is_quantised(param):
            continue
        state = getattr(param, _STATE)
        if param.requires_grad:
            raise LayoutError(
                f"{name}: a quantised weight is trainable, but packed bytes have no "
                "gradient. Freeze it, or take it out of lora_modules_to_save and "
                "unfrozen_parameters."
            )
        if id(state) in seen:
            raise LayoutError(
                f"{name} and {seen[id(state)]} share one quant_state, so they cannot "
                "be paged. Quantise each weight by itself."
            )
        if getattr(state, _REPACKED, False):
            raise LayoutError(
                f"{name}: bitsandbytes has repacked this weight for evaluation on the "
                "CPU, and it cannot be trained so. Load the model anew before training."
            )
        seen[id(state)] = name


def beside_quantised(model: nn.Module, named: Mapping[str, nn.Parameter]) -> set[int]:
    """Ids of other parameters of modules with a quantised weight: their biases.

    bitsandbytes casts a bias to the compute dtype by binding `bias.data` anew.
    """
    owners = {n.rpartition(".")[0] for n, param in named.items() if is_quantised(param)}
    return {
        id(param)
        for owner in owners
        for param in model.get_submodule(owner).parameters(recurse=False)
        if not is_quantised(param)
    }


def may_repack(model: nn.Module) -> list[nn.Module]:
    """4-bit layers that the first evaluation on this CPU would repack.

    With AVX512-BF16 bitsandbytes' `Linear4bit` binds weight and scales to new, rounded
    copies, which no slot holds and whose product has no backward.
    """
    return [m for m in model.modules() if getattr(m, _MAY_REPACK, False)]


def hold_quantised(model: nn.Module) -> ExitStack:
    """Keep bitsandbytes from what a session cannot follow, until the stack is closed.

    It does not repack weights on the CPU, and layers in 8 bits do not keep their inputs
    for the gradient of a weight that has none, where no saved-tensor hook would see them.
    """
    undo = ExitStack()
    for module in may_repack(model):
        setattr(module, _MAY_REPACK, False)
        undo.callback(setattr, module, _MAY_REPACK, True)
    for layer in _in_8_bits(model):
        undo.callback(layer.register_forward_hook(_forget_input).remove)
    return undo


def _forget_input(_layer: nn.Module, _args: Any, output: Tensor) -> None:
    node: Any = output.grad_fn
    # backward of no rows asks for their shape
    if node is not None and output.numel():
        node.A, node.tensors = None, (None, None, None)


def _side_tensors(path: str, state: object) -> Iterator[Binding]:
    for attribute, value in vars(state).items():
        if attribute in (_DATA, _OF_LAST_INPUT):
            continue
        if isinstance(value, Tensor):
            yield Binding(f"{path}.{attribute}", state, attribute)
        elif isinstance(value, type(state)):
            yield from _side_tensors(f"{path}.{attribute}", value)


def shared_bytes(tensors: Iterable[Tensor]) -> list[list[int]]:
    """Groups of tensors, by number, of which each shares bytes with others of its group.

    Where bytes lie decides, not who owns them: two parameters on one storage, slices,
    transposes and expanded views of one tensor.
    """
    lie = sorted((*extent(t), n) for n, t in enumerate(tensors) if t.numel())
    groups: list[list[int]] = []
    before, end = "", 0
    for memory, start, stop, number in lie:
        if memory == before and start < end:
            groups[-1].append(number)
        else:
            groups.append([number])
            before, end = memory, 0
        end = max(end, stop)
    return [group for group in groups if len(group) > 1]


def extent(tensor: Tensor) -> tuple[str, int, int]:
    """In which memory a tensor lies, its first byte there and the one after its last."""
    if isinstance(tensor, Packed):
        tensor = tensor.parts[0][0]
    memory, start = str(tensor.device), tensor.storage_offset() * tensor.itemsize
    if tensor.is_meta or hasattr(tensor, "__tensor_flatten__"):
        # without an address each storage is a memory of its own
        memory = f"{memory} {tensor.untyped_storage()._cdata}"
    else:
        start = tensor.data_ptr()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = int(sum((size - 1) * stride for size, stride in steps))
    return memory, int(start), int(start) + (last + 1) * tensor.itemsize


def placed_together(
    tensors: Sequence[Tensor], place: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Place the bytes of host tensors once; the results share them as the tensors do."""
    extents = [extent(tensor) for tensor in tensors]
    _, first, number = min((*e[:2], n) for n, e in enumerate(extents))
    # aligned as it was in its allocation
    first -= (first - tensors[number].untyped_storage().data_ptr()) % ALIGNMENT_BYTES
    end = max(stop for *_, stop in extents)
    memory: Any = (ctypes.c_char * (end - first)).from_address(first)
    placed = place(torch.frombuffer(memory, dtype=torch.uint8))
    return [
        placed[start - first : stop - first]
        .view(tensor.dtype)
        .as_strided(tensor.shape, tensor.stride())
        for tensor, (_, start, stop) in zip(tensors, extents, strict=True)
    ]


NO_TENSORS = frozenset({int, float, bool, str, type(None)})
"""Types of values in which nobody looks for tensors."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in tuples, lists, mappings and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif type(value) in NO_TENSORS:
        return
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in(_fields_of(value))


def map_tensors(
    value: Any, change: Callable[[Any], Any], kind: type | tuple[type, ...] = Tensor
) -> Any:
    """Return a structure with every tensor (or `kind`) replaced."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change, kind) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(item, change, kind) for item in value)
    if isinstance(value, dict):
        changed = {k: map_tensors(item, change, kind) for k, item in value.items()}
        # the output of a model is a dict of its own class
        return changed if type(value) is dict else type(value)(**changed)
    if is_dataclass(value) and not isinstance(value, type):
        found = _fields_of(value)
        changed = map_tensors(found, change, kind)
        if any(changed[name] is not item for name, item in found.items()):
            value = copy(value)
            for name, item in changed.items():
                # a frozen one takes it, too
                object.__setattr__(value, name, item)
    return value


def _fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, with slots too, and its other attributes."""
    names = (field.name for field in fields(value))
    found = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return {**found, **getattr(value, "__dict__", {})}
