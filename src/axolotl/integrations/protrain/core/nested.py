"""Tensors inside arguments and outputs of modules: tuples, lists, mappings, dataclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor

_PLAIN = {int, float, bool, str, type(None)}


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in `value`, in order."""
    if isinstance(value, Tensor):
        yield value
    elif type(value) in _PLAIN:
        return
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in(vars(value))


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same structure with every tensor replaced; dataclasses are left alone."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, dict):
        changed = {key: map_tensors(item, change) for key, item in value.items()}
        # the output of a model is a dict of its own class
        return changed if type(value) is dict else type(value)(**changed)
    return value
