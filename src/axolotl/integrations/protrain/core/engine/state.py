"""The state of an optimizer as the tensors that it is made of, and where they lie.

An optimizer keeps what it likes for a parameter: tensors in a dict, and in there lists,
tensors made of tensors (torchao's 8-bit moments) and objects that hold tensors (APOLLO's
projector). Here each of these tensors is a *leaf*: a place in the structure that can be
bound to other memory. So the state of a chunk rests on the host, in one region, and an
update finds it on the device, without anybody knowing what it means.

What an optimizer keeps on the host by itself (the step counts of AdamW, unless it is fused)
stays there, and so does what all parameters share with the optimizer (the quantisation maps
of bitsandbytes) on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..layout import aligned
from ..types import STATE_ALIGNMENT_BYTES
from .state_memory import Place, StateMemory, form_of

Path = tuple[Any, ...]


_OPAQUE = type, nn.Module, torch.optim.Optimizer, FunctionType, MethodType
"""Objects that are no state."""


class StateTensor(NamedTuple):
    """One tensor of a state: an item of `holder`, or an attribute of it."""

    path: Path
    holder: Any
    key: Any
    is_attribute: bool

    @property
    def tensor(self) -> Tensor:
        """What is bound there now."""
        if self.is_attribute:
            return getattr(self.holder, self.key)
        return self.holder[self.key]

    def bind(self, tensor: Tensor) -> None:
        """Let the optimizer find `tensor` there from here on."""
        if self.is_attribute:
            setattr(self.holder, self.key, tensor)
        elif isinstance(self.holder, tuple):
            self.tensor.data = tensor
        else:
            self.holder[self.key] = tensor


def state_tensors(
    value: Any, path: Path = (), within: tuple[int, ...] = ()
) -> Iterator[StateTensor]:
    """Every plain tensor in a state, in the order of its structure; no parameters."""
    # an object may lead back to what it is in
    within = *within, id(value)
    for key, item, is_attribute in _members(value):
        inside = *path, key
        if isinstance(item, nn.Parameter) or id(item) in within:
            continue
        if isinstance(item, Tensor) and not hasattr(item, "__tensor_flatten__"):
            yield StateTensor(inside, value, key, is_attribute)
        else:
            yield from state_tensors(item, inside, within)


def _members(value: Any) -> list[tuple[Any, Any, bool]]:
    if isinstance(value, Mapping):
        return [(key, item, False) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [(key, item, False) for key, item in enumerate(value)]
    if isinstance(value, Tensor):
        names = value.__tensor_flatten__()[0]  # type: ignore[attr-defined]
        return [(name, getattr(value, name), True) for name in names]
    if hasattr(value, "__dict__") and not isinstance(value, _OPAQUE):
        return [(name, item, True) for name, item in vars(value).items()]
    return []


def structure(value: Any, keep: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with containers of its own, and `keep` of each tensor.

    Tensors made of tensors are themselves again: bind their leaves to restore them.
    """
    if isinstance(value, Tensor):
        return value if hasattr(value, "__tensor_flatten__") else keep(value)
    if isinstance(value, dict):
        own = copy(value)
        own.update((key, structure(item, keep)) for key, item in value.items())
        return own
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(structure(item, keep) for item in value)
    if hasattr(value, "__dict__") and not isinstance(value, _OPAQUE):
        own = copy(value)
        vars(own).update((k, structure(item, keep)) for k, item in vars(value).items())
        return own
    return value


class _Placed(NamedTuple):
    """A region of host memory, uint8, and what lies where in it."""

    places: dict[Path, Place]
    region: Tensor


class Change(NamedTuple):
    """What an update has left on the device.

    Attributes:
        rest: Where it will lie on the host.
        copies: What brings it there, as target and source.
    """

    placed: _Placed
    copies: list[tuple[Tensor, Tensor]]


class OffloadedState:
    """The state of parameters, at rest in host memory.

    Args:
        optimizer: Has it, by parameter.
        params: All of a chunk that are updated here.
        torch_device: Where updates happen.
        memory: Gives regions.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Sequence[nn.Parameter],
        torch_device: torch.device,
        memory: StateMemory,
    ) -> None:
        self._optimizer, self._params = optimizer, params
        self._torch_device, self._memory = torch_device, memory
        self._placed = _Placed({}, torch.empty(0, dtype=torch.uint8))
        self._left: list[Tensor] = []

    @property
    def region(self) -> Tensor:
        """uint8; everything that travels, its leaves `STATE_ALIGNMENT_BYTES` apart."""
        return self._placed.region

    def adopt(self, stays: Callable[[StateTensor], bool]) -> None:
        """Take over a state that was made or loaded elsewhere; but what `stays`."""
        found = [leaf for leaf in self._state_tensors() if not stays(leaf)]
        change = self._moved(found)
        for target, source in change.copies:
            target.copy_(source)
        self.take(change)

    def to_device(self, buffer: Tensor) -> None:
        """Bind what travels to its copy in a device buffer."""
        for leaf, place in self._on_host():
            here = place.within(buffer)
            if not self.is_on_host(leaf.tensor):
                # somebody has put it there since
                here.copy_(leaf.tensor)
            leaf.bind(here)

    def changed(self, buffer: Tensor) -> Change:
        """What an update in `buffer` has changed; what it replaced is put there, too.

        What it has made, or made larger, gets another region.
        """
        here = self._torch_device
        found = [x for x in self._state_tensors() if x.tensor.device == here]
        if {leaf.path: form_of(leaf.tensor) for leaf in found} != {
            path: place[1:] for path, place in self._placed.places.items()
        }:
            return self._moved(found)
        for leaf in found:
            view = self._placed.places[leaf.path].within(buffer)
            if leaf.tensor.data_ptr() != view.data_ptr():
                view.copy_(leaf.tensor)
        whole = [(self.region, buffer[: self.region.numel()])] if found else []
        return Change(self._placed, whole)

    # updates are made in an evaluation, too
    @torch.inference_mode(False)
    def take(self, change: Change) -> None:
        """Bind everything to where it will rest; its copies are queued next."""
        if change.placed is not self._placed:
            self._left.append(self.region)
            self._placed = change.placed
        for leaf, place in self._on_host():
            leaf.bind(place.on_host(self.region))

    def is_on_host(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the region."""
        start = self.region.data_ptr()
        return start <= tensor.data_ptr() < start + self.region.numel()

    def release(self) -> None:
        """Unlock all memory, which goes with its last reader; no copy may be in flight."""
        regions = [region for region in (*self._left, self.region) if region.numel()]
        self._left, self._placed = [], _Placed({}, torch.empty(0, dtype=torch.uint8))
        with ExitStack() as rest:
            for region in regions:
                rest.callback(self._memory.release, region)

    def _state_tensors(self) -> list[StateTensor]:
        # not what all parameters share with the optimizer
        apart = {"state", "param_groups", "defaults"}
        common = {k: v for k, v in vars(self._optimizer).items() if k not in apart}
        shared = {
            x.tensor.data_ptr() for x in state_tensors(common) if x.tensor.numel()
        }
        return [
            x for x in state_tensors(self._own()) if x.tensor.data_ptr() not in shared
        ]

    def _own(self) -> dict[int, Any]:
        states, pairs = vars(self._optimizer)["state"], enumerate(self._params)
        return {n: states[p] for n, p in pairs if p in states}

    def _on_host(self) -> Iterator[tuple[StateTensor, Place]]:
        """What travels, and where it lies in the region."""
        places = self._placed.places
        return (
            (x, places[x.path]) for x in state_tensors(self._own()) if x.path in places
        )

    def _moved(self, found: Sequence[StateTensor]) -> Change:
        places, end = {}, 0
        for leaf in found:
            places[leaf.path] = place = Place(end, *form_of(leaf.tensor))
            end = aligned(end + place.nbytes, STATE_ALIGNMENT_BYTES)
        region = torch.empty(0, dtype=torch.uint8)
        if end:
            region = self._memory.take(end)
        copies = [
            # without the gaps of a view
            (places[leaf.path].on_host(region), leaf.tensor.clone())
            if form_of(leaf.tensor)[1] not in (None, leaf.tensor.stride())
            else (places[leaf.path].on_host(region), leaf.tensor)
            for leaf in found
            if leaf.tensor.numel()
        ]
        return Change(_Placed(places, region), copies)


def state_bytes(states: Mapping[Any, Any]) -> int:
    """Bytes of all tensors in states."""
    return sum(leaf.tensor.nbytes for leaf in state_tensors(states))
