"""Optimizer state that is at rest in host memory and travels to the device for an update.

# Note [State tensors]

An optimizer keeps whatever it likes for a parameter: tensors in a dict, and in there lists,
tensors made of tensors (torchao's 8-bit moments) and objects that hold tensors (APOLLO's
projector). Each tensor in such a structure is known by its path. The state of a piece rests
in one region of host memory. For an update the structure is copied with device tensors in
their place, the optimizer changes the copy, and the copy's tensors go back to the host: an
error before that has changed nothing.

Tensors that the optimizer itself keeps on the host (the step counts of AdamW, unless it is
fused) stay there, and so do tensors on the device that all parameters share (the
quantisation maps of bitsandbytes).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from functools import cache
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import AccessError
from ..layout import Piece, aligned
from ..layout.tensors import NO_TENSORS
from ..types import STATE_ALIGNMENT_BYTES
from .host_pool import StateMemory
from .staging import views_of

Path = tuple[Any, ...]
"""A parameter's name, as itself it hashes slowly, then keys, indices and attributes that
lead to a tensor of its state."""


class Place(NamedTuple):
    """Place of a tensor of a state in a region; `stride` is None in plain order."""

    offset: int
    shape: torch.Size
    stride: tuple[int, ...] | None
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.shape.numel() * self.dtype.itemsize

    def on_host(self, region: Tensor) -> Tensor:
        """The tensor with a storage of its own: `torch.save` writes whole storages."""
        numel = self.shape.numel()
        if not numel:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        flat = torch.frombuffer(
            region.numpy(), dtype=self.dtype, count=numel, offset=self.offset
        )
        if self.stride is None:
            return flat.view(self.shape)
        return flat.as_strided(self.shape, self.stride)


Form = tuple[torch.Size, tuple[int, ...] | None, torch.dtype]
"""Shape, stride and dtype of a tensor; stride is None in plain order."""


Mark = tuple[int, int, int]
"""Identity, version and address of a tensor, one of which a write changes."""


def form_of(tensor: Tensor) -> Form:
    """The form of a tensor: products round by the order of their operands."""
    dense = None if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")
    return tensor.shape, None if dense is None else dense.stride(), tensor.dtype


_OPAQUE = type, nn.Module, torch.optim.Optimizer, FunctionType, MethodType
"""Objects that are no state."""


def map_state(
    value: Any,
    change: Callable[[Path, Tensor], Tensor],
    path: Path = (),
    within: tuple[int, ...] = (),
) -> Any:
    """Copy a state with containers of its own and `change` of each plain tensor, in the
    order of its structure; parameters stay themselves."""
    if type(value) is Tensor:
        return change(path, value)
    if type(value) in NO_TENSORS:
        return value
    members, how = _members(value, within)
    if members is None:
        is_plain = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        return change(path, value) if is_plain else value
    # an object may lead back to what it is in
    within = *within, id(value)
    inside = {
        key: map_state(item, change, (*path, key), within)
        for key, item in members.items()
    }
    kind: Any = type(value)
    if isinstance(value, Tensor):
        return kind.__tensor_unflatten__(inside, how, value.shape, value.stride())
    if isinstance(value, (list, tuple)):
        items = inside.values()
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    own = copy(value)
    (own if isinstance(own, dict) else vars(own)).update(inside)
    return own


def _members(
    value: Any, within: tuple[int, ...]
) -> tuple[Mapping[Any, Any] | None, Any]:
    """Return the members of a container of a state, None for anything else; and how a
    tensor is made of its members."""
    if id(value) in within:
        return None, None
    if type(value) is dict:
        # most are: spares the questions that follow
        return value, None
    if isinstance(value, nn.Parameter):
        return None, None
    if isinstance(value, Tensor):
        if not hasattr(value, "__tensor_flatten__"):
            return None, None
        names, how = value.__tensor_flatten__()
        return {name: getattr(value, name) for name in names}, how
    if isinstance(value, dict):
        return value, None
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value)), None
    if hasattr(value, "__dict__") and not isinstance(value, _OPAQUE):
        return vars(value), None
    return None, None


def state_tensors(
    value: Any, path: Path = (), within: tuple[int, ...] = ()
) -> dict[Path, Tensor]:
    """Every plain tensor in a state by its path, in the order of its structure."""
    if type(value) is Tensor:
        return {path: value}
    members, _how = _members(value, within)
    if members is None:
        is_plain = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        return {path: value} if is_plain else {}
    within, found = (*within, id(value)), dict[Path, Tensor]()
    for key, item in members.items():
        # most are one of both
        inside = (*path, key)
        if type(item) is Tensor:
            found[inside] = item
        elif type(item) not in NO_TENSORS:
            found |= state_tensors(item, inside, within)
    return found


class OffloadedState:
    """The state of the parameters of a piece, or of one that several pieces cut.

    Args:
        optimizer: Has the state, by parameter.
        params: Names of the parameters that are updated together.
        torch_device: The device of updates.
        memory: Gives regions.
        is_cut: Pieces are elements of the only parameter.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Mapping[nn.Parameter, str],
        torch_device: torch.device,
        memory: StateMemory,
        is_cut: bool,
    ) -> None:
        self._optimizer, self._names, self._is_cut = optimizer, params, is_cut
        self._shape = next(iter(params)).shape
        self._torch_device, self._memory = torch_device, memory
        self._places: dict[Path, Place] = {}
        # the tensors in the region, each with a storage of its own
        self._on_host: dict[Path, Tensor] = {}
        self._staying: set[Path] = set()
        # every tensor when a step was recorded, and how it was
        self._recorded: dict[Path, Tensor] = {}
        self._marks: dict[Path, Mark] = {}
        self._left: list[Tensor] = []
        # of the update that is being made, and what they are views of
        self._here: tuple[Sequence[Tensor], dict[Path, Tensor]] = (), {}
        self.region = torch.empty(0, dtype=torch.uint8, device="cpu")
        """uint8; all that travels, tensors `STATE_ALIGNMENT_BYTES` apart."""

    def adopt(self, stays: Callable[[nn.Parameter, Path], bool], again: bool) -> None:
        """Take over a state that was made or loaded elsewhere, except what `stays`; `again`
        where somebody has put other tensors. No copy may be in flight."""
        states = self._states()
        every = self._tensors(states, anew=True)
        stayed = self._staying if again else set()
        params = {name: param for param, name in self._names.items()}
        staying = {
            path for path in every if stays(params[path[0]], path) or path in stayed
        }
        found = {p: t for p, t in every.items() if p not in staying}
        self._renew({path: self._form(path, tensor) for path, tensor in found.items()})
        self._staying = staying
        # nothing of what was there counts
        self._recorded = {}
        for path, tensor in found.items():
            self._on_host[path].copy_(tensor.detach())
            if again:
                # as without paging it is the one that somebody holds
                tensor.data = self._on_host[path]
                self._on_host[path] = tensor
        self._bind(states)
        self._release_left()
        if not self.note():
            raise AccessError(
                f"{', '.join(self._names.values())}: their optimizer state has one tensor "
                "in two places. Put a copy into one of them."
            )

    def note(self) -> bool:
        """Remember the state as it is when a step is recorded; False if not all is at rest."""
        self._recorded = self._tensors(self._states())
        self._marks = {
            path: (id(tensor), tensor._version, tensor.data_ptr())
            for path, tensor in self._recorded.items()
        }
        if self._recorded.keys() - self._staying != self._places.keys():
            return False
        start = self.region.data_ptr()
        for path, place in self._places.items():
            tensor = self._recorded[path]
            moved = place.nbytes and tensor.data_ptr() != start + place.offset
            if tensor is not self._on_host[path] or moved:
                return False
            if self._form(path, tensor) != place[1:]:
                return False
        return True

    def sources(self, piece: Piece) -> list[Tensor]:
        """Host bytes that an update of a piece reads, uint8."""
        if piece.elements is None:
            return [self.region] if self._places else []
        return [self.region[self._range(p, piece)] for p in self._places.values()]

    def on_device(
        self, parts: Sequence[Tensor], piece: Piece
    ) -> dict[nn.Parameter, Any]:
        """The states for an update of a piece: tensors that travel are views of `parts`,
        which hold what `sources` names, others are copies.

        Raises:
            AccessError: Somebody has written the state since the step was recorded.
        """
        views = self._views(parts, piece) if parts else {}
        self._here = parts, views
        marks, shared = dict[Path, Mark](), cache(self._shared)

        def here(path: Path, tensor: Tensor) -> Tensor:
            view = views.get(path)
            if path not in self._marks and tensor.data_ptr() in shared():
                return tensor
            marks[path] = id(tensor), tensor._version, tensor.data_ptr()
            if view is None:
                return tensor.clone()
            # or an update in place would change what further pieces read
            return view if self._leaves(path, piece) else view.clone()

        states = {
            param: map_state(state, here, (self._names[param],))
            for param, state in self._states().items()
        }
        # copies home of earlier pieces have written it, too
        if piece.is_first and marks != self._marks:
            every = {**self._marks, **marks}
            path = next(p for p in every if self._marks.get(p) != marks.get(p))
            raise AccessError(
                f"{path[0]}: its optimizer state {path[1:]} was written after "
                "`step`, by somebody who has held it since before, and its update is still "
                "due. Take it from `optimizer.state` after each step."
            )
        return states

    def take_back(
        self, states: Mapping[nn.Parameter, Any], parts: Sequence[Tensor], piece: Piece
    ) -> list[tuple[Tensor, Tensor]]:
        """The copies, (target, source), that bring updated `states` of a piece home.

        Tensors that the optimizer has made, or made larger, get another region. The last
        piece binds the optimizer's state to host memory.
        """
        every = self._tensors(states)
        found = {
            path: tensor
            for path, tensor in every.items()
            if tensor.device == self._torch_device and path not in self._staying
        }
        self._staying |= every.keys() - found.keys()
        forms = {path: self._form(path, t, piece) for path, t in found.items()}
        if forms != {path: place[1:] for path, place in self._places.items()}:
            self._renew(forms)
            parts = ()
        if not parts:
            # without the gaps of a view
            here = {
                path: tensor
                if forms[path][1] in (None, tensor.stride())
                else tensor.clone()
                for path, tensor in found.items()
            }
        else:
            here = (
                self._here[1] if self._here[0] is parts else self._views(parts, piece)
            )
            for path, view in here.items():
                if found[path] is view or not self._leaves(path, piece):
                    continue
                if found[path].data_ptr() != view.data_ptr():
                    view.copy_(found[path])
        self._here = (), {}
        if piece.is_last:
            for path in self._staying & self._recorded.keys() & every.keys():
                self._recorded[path].data = every[path]
            self._bind(states)
        if parts and piece.elements is None:
            return [(self.region, parts[0][: self.region.numel()])]
        return [
            (self._cut(self._on_host[path], piece), tensor)
            for path, tensor in here.items()
            if tensor.numel() and self._leaves(path, piece)
        ]

    def release(self) -> None:
        """Unlock all memory, which goes with its last reader; no copy may be in flight."""
        self._left.append(self.region)
        self._places, self._on_host, self._recorded = {}, {}, {}
        self._here = (), {}
        self.region = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._release_left()

    def _release_left(self) -> None:
        with ExitStack() as rest:
            for region in self._left:
                if region.numel():
                    rest.callback(self._memory.release, region)
            self._left = []

    def _states(self) -> dict[nn.Parameter, Any]:
        states = vars(self._optimizer)["state"]
        return {param: states[param] for param in self._names if param in states}

    def _tensors(
        self, states: Mapping[nn.Parameter, Any], anew: bool = False
    ) -> dict[Path, Tensor]:
        """Tensors of states, without those that all parameters share; they are looked for
        among tensors that have no place yet, or `anew` among all."""
        found: dict[Path, Tensor] = {}
        for param, state in states.items():
            found |= state_tensors(state, (self._names[param],))
        if anew or self._places.keys() | self._staying != found.keys():
            shared = self._shared()
            found = {p: t for p, t in found.items() if t.data_ptr() not in shared}
        return found

    def _shared(self) -> set[int]:
        apart = {"state", "param_groups", "defaults"}
        common = {k: v for k, v in vars(self._optimizer).items() if k not in apart}
        return {t.data_ptr() for t in state_tensors(common).values() if t.numel()}

    def _form(self, path: Path, tensor: Tensor, piece: Piece | None = None) -> Form:
        """The form of a tensor at rest, of which a piece may have a part."""
        if not self._is_cut:
            return form_of(tensor)
        shape, elements = tensor.shape, piece.elements if piece is not None else None
        if elements is not None and shape == (elements.stop - elements.start,):
            # a number may have as many elements as the last piece
            known = self._places.get(path)
            if known is None or self._is_by_element(known):
                shape = self._shape
        return shape, None, tensor.dtype

    def _leaves(self, path: Path, piece: Piece) -> bool:
        """Return whether an update of a piece brings a tensor home: a number of all elements,
        as a count of steps, is read by every piece and changed by the last."""
        return piece.is_last or self._is_by_element(self._places[path])

    def _is_by_element(self, place: Place) -> bool:
        return place.shape == self._shape

    def _range(self, place: Place, piece: Piece) -> slice:
        """Return the bytes of the region that a piece has of a tensor."""
        if piece.elements is None or not self._is_by_element(place):
            return slice(place.offset, place.offset + place.nbytes)
        first, stop = piece.elements.start, piece.elements.stop
        size = place.dtype.itemsize
        return slice(place.offset + first * size, place.offset + stop * size)

    def _cut(self, tensor: Tensor, piece: Piece) -> Tensor:
        """The part of a whole tensor that belongs to a piece."""
        if piece.elements is None or tensor.shape != self._shape:
            return tensor
        return tensor.reshape(-1)[piece.elements]

    def _views(self, parts: Sequence[Tensor], piece: Piece) -> dict[Path, Tensor]:
        """Tensors in a copy of the bytes that `sources` names."""
        if piece.elements is None:
            views = views_of(parts[0], self._places.values())
            return dict(zip(self._places, views, strict=True))
        return {
            path: part.view(place.dtype)
            if self._is_by_element(place)
            else part.view(place.dtype).view(place.shape)
            for (path, place), part in zip(self._places.items(), parts, strict=True)
        }

    def _renew(self, forms: Mapping[Path, Form]) -> None:
        """Take another region for tensors of these forms, without what is there."""
        places, end = {}, 0
        for path, form in forms.items():
            places[path] = place = Place(end, *form)
            end = aligned(end + place.nbytes, STATE_ALIGNMENT_BYTES)
        # updates are made in an evaluation, too
        with torch.inference_mode(False):
            region = torch.empty(0, dtype=torch.uint8, device="cpu")
            if end:
                # first, as it may fail: then all is as before
                region = self._memory.take(end)
            self._left.append(self.region)
            self.region, self._places = region, places
            self._on_host = {p: place.on_host(region) for p, place in places.items()}

    def _bind(self, states: Mapping[nn.Parameter, Any]) -> None:
        """Let the optimizer find states whose tensors are at rest."""
        own = vars(self._optimizer)["state"]
        at_rest = {**self._recorded, **self._on_host}
        every = {
            param: map_state(state, at_rest.get, (self._names[param],))
            for param, state in states.items()
        }
        for param, bound in every.items():
            kept = own.setdefault(param, bound)
            if kept is not bound:
                # as without paging the object stays
                kept.clear()
                kept.update(bound)


def state_bytes(states: Mapping[Any, Any]) -> int:
    """Bytes of all tensors in states."""
    return sum(tensor.nbytes for tensor in state_tensors(states).values())
