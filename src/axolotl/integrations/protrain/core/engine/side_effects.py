"""Side effects of a block's forward, which its recomputation must not have once more.

Torch replays random numbers of its own generators and autocast. A forward may also write
buffers, as a batch norm does its running statistics, or attributes, as one that counts its
calls; it may append to lists and draw from other generators.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import is_not
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..layout.tensors import map_tensors, tensors_in

SMALL_BYTES = 1 << 16
"""Size up to which a buffer is kept in each call, whether or not the block writes it."""
_LOOKED_AT = 2
"""Calls that show what a block writes beside its buffers."""
_ABSENT = object()


class Buffers:
    """Lets a recomputation find the buffers as its forward found them, and change none.

    A forward may write some, as a batch norm its running statistics. Small ones are kept
    in each call. Which large ones it writes the first call shows, in each state of
    `training` of the block's modules.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._written: dict[Any, set[tuple[int, str]]] = {}
        # in which mode a call has found none; the first one may register some
        self._without: dict[bool, int] = {}

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Surround the two runs of a call, the second of which is the recomputation."""
        trains = self._block.training
        if self._without.get(trains, 0) > 1:
            return run
        modules = [*self._block.modules()]
        found = [
            (module._buffers, name, buffer)
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        if not found:
            self._without[trains] = self._without.get(trains, 0) + 1
            return run
        mode = tuple(module.training for module in modules)
        written = self._written.get(mode)
        if written is not None:
            found = [
                (own, name, buffer)
                for own, name, buffer in found
                if buffer.nbytes <= SMALL_BYTES or (id(own), name) in written
            ]
        before = [buffer.clone() for *_, buffer in found]
        is_first = True

        def surrounded(*args: Any) -> Any:
            nonlocal is_first
            if is_first:
                is_first = False
                output = run(*args)
                if written is None:
                    self._written[mode] = {
                        (id(own), name)
                        for (own, name, buffer), kept in zip(found, before, strict=True)
                        if buffer.nbytes > SMALL_BYTES
                        # a batch norm leaves versions as they are
                        and (own[name] is not buffer or not buffer.equal(kept))
                    }
                return output
            now = [own[name] for own, name, _ in found]
            for (own, name, _), kept in zip(found, before, strict=True):
                own[name] = kept.clone()
            try:
                return run(*args)
            finally:
                for (own, name, _), buffer in zip(found, now, strict=True):
                    own[name] = buffer

        return surrounded


class SideEffects:
    """Lets a recomputation find what its forward found beside buffers, and change nothing.

    Lists and dicts that a call is given are kept in each call. The first calls show which
    attributes, generators, and small tensors that are attributes or given the block writes,
    apart in training and in evaluation.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        # by `training`: calls, places that they write, numbers of tensors that are given
        self._calls: Counter[bool] = Counter()
        self._written: dict[bool, dict[Any, _Place]] = {True: {}, False: {}}
        self._given: dict[bool, set[int]] = {True: set(), False: set()}

    def around(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[..., Any]:
        """Surround the two runs of a call, the second of which is the recomputation.

        Args:
            run: Takes the positional arguments.
            args: Those; autograd watches tensors among them itself.
            kwargs: The others, which `run` has.

        Raises:
            RuntimeError: In a recomputation, if somebody else has written an argument.
        """
        trains = self._block.training
        learns = self._calls[trains] < _LOOKED_AT
        self._calls[trains] += 1
        written, numbers = self._written[trains], self._given[trains]
        others = [*kwargs.values(), *(v for v in args if not isinstance(v, Tensor))]
        tensors = [*tensors_in(others)]
        versions = [*map(_version, tensors)]
        own = [*_places_of(self._block)] if learns else [*written.values()]
        kept: list[tuple[_Place, Any]] = [
            (place, place.keep())
            for place in (
                *own,
                *(_Items(value) for value in others if type(value) in (list, dict)),
                *(
                    _Values(tensor)
                    for number, tensor in enumerate(tensors)
                    if (_is_small(tensor) if learns else number in numbers)
                ),
            )
        ]
        is_first = True

        def surrounded(*args: Any) -> Any:
            nonlocal is_first
            if is_first:
                is_first = False
                output = run(*args)
                if learns:
                    pairs = enumerate(zip(tensors, versions, strict=True))
                    changed = (n for n, (t, before) in pairs if _version(t) != before)
                    numbers.update(n for n in changed if _is_small(tensors[n]))
                    for place, before in kept[: len(own)]:
                        written.update(
                            {each.key: each for each in place.written(before)}
                        )
                kept[:] = [
                    (place, place.without_graph(before))
                    for place, before in kept
                    if not isinstance(place, _Values) or any(place.written(before))
                ]
                return output
            for number, (tensor, before) in enumerate(
                zip(tensors, versions, strict=True)
            ):
                if _version(tensor) != before and number not in numbers:
                    # as torch says it of what it saves itself
                    raise RuntimeError(
                        "an argument of a recomputed block, which is needed for gradient "
                        "computation, has been modified by an inplace operation"
                    )
            now = [(place, place.keep()) for place, _ in kept]
            for place, before in kept:
                place.put(before)
            try:
                return run(*args)
            finally:
                for place, value in now:
                    place.put(value)

        return surrounded


def _places_of(block: nn.Module) -> Iterator[_Place]:
    """Every place that a block's forward may write, without buffers and arguments."""
    yield _Generator(random, "getstate", "setstate")
    yield _Generator(np.random, "get_state", "set_state")
    for module in block.modules():
        yield _Attributes(vars(module))
        for value in vars(module).values():
            if type(value) is list:
                yield _Items(value)
            elif isinstance(value, Tensor) and _is_small(value):
                yield _Values(value)
            elif isinstance(value, torch.Generator):
                yield _Generator(value, "get_state", "set_state")
            elif isinstance(value, random.Random):
                yield _Generator(value, "getstate", "setstate")
            elif isinstance(value, np.random.Generator):
                yield _Generator(value.bit_generator, "__getstate__", "__setstate__")


class _Place:
    """A place that a forward may write.

    Args:
        of: Is kept alive, or another object may get its number.

    Attributes:
        key: The same for another object of the same place.
    """

    def __init__(self, of: Any) -> None:
        self._of = of
        self.key: Any = id(of)

    def keep(self) -> Any:
        """Return what is there, for a recomputation to find."""
        raise NotImplementedError

    def put(self, kept: Any) -> None:
        """Put it there."""
        raise NotImplementedError

    def written(self, kept: Any) -> Iterator[_Place]:
        """Places in it that are other than kept, which later calls have to keep."""
        raise NotImplementedError

    def without_graph(self, kept: Any) -> Any:
        """Return what is kept without the graph of another call."""
        return kept


class _Attributes(_Place):
    """All attributes of a module, in its dict."""

    def keep(self) -> Any:
        return {**self._of}

    def put(self, kept: Any) -> None:
        for name in self._of.keys() - kept.keys():
            del self._of[name]
        self._of.update(kept)

    def written(self, kept: Any) -> Iterator[_Place]:
        for name in {**self._of, **kept}:
            if self._of.get(name, _ABSENT) is not kept.get(name, _ABSENT):
                yield _Attribute(self._of, name)

    def without_graph(self, kept: Any) -> Any:
        return {name: _without_graph(value) for name, value in kept.items()}


class _Attribute(_Place):
    def __init__(self, of: dict[str, Any], name: str) -> None:
        self._of, self._name, self.key = of, name, (id(of), name)

    def keep(self) -> Any:
        return self._of.get(self._name, _ABSENT)

    def put(self, kept: Any) -> None:
        if kept is _ABSENT:
            self._of.pop(self._name, None)
        else:
            self._of[self._name] = kept

    def without_graph(self, kept: Any) -> Any:
        return _without_graph(kept)


class _Items(_Place):
    """Items of a list or a dict."""

    def keep(self) -> Any:
        return self._of.copy()

    def put(self, kept: Any) -> None:
        self._of.clear()
        add: Any = self._of.extend if isinstance(kept, list) else self._of.update
        add(kept)

    def written(self, kept: Any) -> Iterator[_Place]:
        if len(kept) != len(self._of) or any(map(is_not, kept, self._of)):
            yield self

    def without_graph(self, kept: Any) -> Any:
        if isinstance(kept, list):
            return [*map(_without_graph, kept)]
        return {key: _without_graph(value) for key, value in kept.items()}


class _Values(_Place):
    """The values of a tensor, which is written in place."""

    def keep(self) -> Any:
        return _version(self._of), self._of.detach().clone()

    def put(self, kept: Any) -> None:
        # no version: nobody else has seen the values between
        self._of.data.copy_(kept[1])

    def written(self, kept: Any) -> Iterator[_Place]:
        if _version(self._of) != kept[0]:
            yield self


class _Generator(_Place):
    def __init__(self, of: Any, get: str, put: str) -> None:
        super().__init__(of)
        self._get, self._put = get, put

    def keep(self) -> Any:
        return getattr(self._of, self._get)()

    def put(self, kept: Any) -> None:
        getattr(self._of, self._put)(kept)

    def written(self, kept: Any) -> Iterator[_Place]:
        if not _equal(kept, self.keep()):
            yield self


def _is_small(tensor: Tensor) -> bool:
    return tensor.nbytes <= SMALL_BYTES and not tensor.is_inference()


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _without_graph(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value if value.grad_fn is None else value.detach().requires_grad_()
    return map_tensors(value, _without_graph) if isinstance(value, tuple) else value


def _equal(state: Any, other: Any) -> bool:
    if isinstance(state, dict):
        return all(_equal(own, other[key]) for key, own in state.items())
    if isinstance(state, tuple):
        return all(map(_equal, state, other))
    same: Any = state == other
    return same if isinstance(same, bool) else bool(same.all())


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
