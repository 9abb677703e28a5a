"""Side effects of a block's forward, which its recomputation must not have once more.

Torch replays random numbers of its own generators and autocast. A forward may also write
buffers, as a batch norm does its running statistics, or attributes, as one that counts its
calls; it may append to lists and draw from other generators.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_not
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..layout.tensors import tensors_in

SMALL_BYTES = 1 << 16
"""Size up to which a buffer is kept in each call, whether or not the block writes it."""
_LOOKED_AT = 2
"""Calls in each mode that show what a block writes; the first one may register buffers."""
_ABSENT = object()


class SideEffects:
    """Lets a recomputation find what its forward found, and change nothing.

    Small buffers, and lists and dicts that a call is given, are kept in each call. The first
    calls show which large buffers, attributes and generators the block changes, in each
    state of `training` of its modules.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        # of each mode its calls, and the places that they write
        self._modes: dict[Any, tuple[int, dict[Any, _Place]]] = {}
        # calls in a row that have written none
        self._without: dict[bool, int] = {}

    def around(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[..., Any]:
        """Surround the two runs of a call, the second of which is the recomputation.

        Args:
            run: Takes the positional arguments.
            args: Those; autograd watches tensors among them itself.
            kwargs: The others, which `run` has.

        Raises:
            RuntimeError: In a recomputation, if an argument has been changed in place.
        """
        others = [*kwargs.values(), *(v for v in args if not isinstance(v, Tensor))]
        versions = [(tensor, _version(tensor)) for tensor in tensors_in(others)]
        places, learn = self._places_of_call()
        places += (_Items(value) for value in others if type(value) in (list, dict))
        kept = [place.keep() for place in places]
        is_first = True

        def surrounded(*args: Any) -> Any:
            nonlocal is_first
            if is_first:
                is_first = False
                output = run(*args)
                if learn is not None:
                    learn(places, kept)
                return output
            if any(_version(tensor) != before for tensor, before in versions):
                # as torch says it of what it saves itself
                raise RuntimeError(
                    "an argument of a recomputed block, which is needed for gradient "
                    "computation, has been modified by an inplace operation"
                )
            now = [place.now() for place in places]
            for place, before in zip(places, kept, strict=True):
                place.put(before)
            try:
                return run(*args)
            finally:
                for place, value in zip(places, now, strict=True):
                    place.put_back(value)

        return surrounded

    def _places_of_call(self) -> tuple[list[_Place], Callable[..., None] | None]:
        """Return the places that this call keeps, and who learns which it has changed."""
        trains = self._block.training
        if self._without.get(trains, 0) >= _LOOKED_AT:
            return [], None
        modules = [*self._block.modules()]
        mode = tuple(module.training for module in modules)
        calls, written = self._modes.get(mode, (0, {}))
        if calls >= _LOOKED_AT:
            return [*written.values()], None
        before = [(vars(module), {*vars(module)}) for module in modules]

        def learn(places: list[_Place], kept: list[Any]) -> None:
            for table, names in before:
                for name in table.keys() - names:
                    places.append(_Attribute(table, name))
                    kept.append(_ABSENT)
            for place, found in zip(places, kept, strict=True):
                if place.is_needed(found):
                    written[place.key] = place
            self._modes[mode] = calls + 1, written
            self._without[trains] = 0 if written else self._without.get(trains, 0) + 1

        return [*_places_of(modules)], learn


def _places_of(modules: Sequence[nn.Module]) -> Iterator[_Place]:
    """Every place of a block that its forward may write."""
    yield _Generator(random, "getstate", "setstate")
    yield _Generator(np.random, "get_state", "set_state")
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield _Buffer(module._buffers, name)
        for name, value in vars(module).items():
            yield _Attribute(vars(module), name)
            if type(value) is list:
                yield _Items(value)
            elif isinstance(value, torch.Generator):
                yield _Generator(value, "get_state", "set_state")
            elif isinstance(value, random.Random):
                yield _Generator(value, "getstate", "setstate")
            elif isinstance(value, np.random.Generator):
                yield _Generator(value.bit_generator, "__getstate__", "__setstate__")


class _Place:
    """A place that a forward may write.

    Attributes:
        key: The same for another object of the same place.
    """

    key: Any

    def keep(self) -> Any:
        """Return what is there, for a recomputation to find."""
        raise NotImplementedError

    def put(self, kept: Any) -> None:
        """Let a recomputation find it."""
        raise NotImplementedError

    def now(self) -> Any:
        """Return what is there, to be put back."""
        return self.keep()

    def put_back(self, now: Any) -> None:
        """Undo a recomputation."""
        self.put(now)

    def is_needed(self, kept: Any) -> bool:
        """Return whether later calls keep it, too: a call that found `kept` changed it."""
        raise NotImplementedError


class _Attribute(_Place):
    def __init__(self, table: dict[str, Any], name: str) -> None:
        self._table, self._name, self.key = table, name, (id(table), name)

    def keep(self) -> Any:
        return self._table.get(self._name, _ABSENT)

    def put(self, kept: Any) -> None:
        if kept is _ABSENT:
            self._table.pop(self._name, None)
        else:
            self._table[self._name] = kept

    def is_needed(self, kept: Any) -> bool:
        return self.keep() is not kept


class _Buffer(_Attribute):
    def keep(self) -> Any:
        buffer = self._table[self._name]
        return buffer, buffer.clone()

    def put(self, kept: Any) -> None:
        # may be written again, and found once more
        self._table[self._name] = kept[1].clone()

    def now(self) -> Any:
        return self._table[self._name]

    def put_back(self, now: Any) -> None:
        self._table[self._name] = now

    def is_needed(self, kept: Any) -> bool:
        buffer, copy = kept
        if copy.nbytes <= SMALL_BYTES:
            return True
        # a batch norm leaves versions as they are
        return self.now() is not buffer or not buffer.equal(copy)


class _Items(_Place):
    def __init__(self, items: Any) -> None:
        self._items, self.key = items, id(items)

    def keep(self) -> Any:
        return self._items.copy()

    def put(self, kept: Any) -> None:
        self._items.clear()
        add: Any = self._items.extend if isinstance(kept, list) else self._items.update
        add(kept)

    def is_needed(self, kept: Any) -> bool:
        return len(kept) != len(self._items) or any(map(is_not, kept, self._items))


class _Generator(_Place):
    def __init__(self, of: Any, get: str, put: str) -> None:
        # kept alive, or another object may get its number
        self._of, self._get, self._put, self.key = of, get, put, id(of)

    def keep(self) -> Any:
        return getattr(self._of, self._get)()

    def put(self, kept: Any) -> None:
        getattr(self._of, self._put)(kept)

    def is_needed(self, kept: Any) -> bool:
        return not _equal(kept, self.keep())


def _equal(state: Any, other: Any) -> bool:
    if isinstance(state, dict):
        return all(_equal(own, other[key]) for key, own in state.items())
    if isinstance(state, tuple):
        return all(map(_equal, state, other))
    same: Any = state == other
    return same if isinstance(same, bool) else bool(same.all())


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


@contextmanager
def keeping_generators() -> Iterator[None]:
    """Random numbers of Python and numpy that are drawn inside are drawn again afterwards;
    torch has `fork_rng` for its own."""
    before, numpys = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpys)
