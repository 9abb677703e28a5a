"""Whose request is next: of one model by number, of several in turns by arrival."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ..core.errors import RequestError

Item = TypeVar("Item")

MOST_WAITING = 1024
"""Requests of one model that may wait, and how far numbers may run ahead."""


@dataclass
class _Line(Generic[Item]):
    next: int = 0
    last: int = -1
    waiting: dict[int, Item | None] = field(default_factory=dict)


class Turns(Generic[Item]):
    """The waiting requests; touches no tensor and takes no lock.

    Requests of a model are numbered from 0 and may arrive in any order. A model whose
    next request is there joins the end of the line; whoever had a turn goes to its end.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line[Item]] = {}
        self._ready: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, model: str) -> bool:
        return model in self._lines

    def open(self, model: str) -> None:
        """Numbers of `model` begin at 0."""
        self._lines[model] = _Line()

    def number(self, model: str) -> int:
        """The one after the last that is known."""
        return self._lines[model].last + 1

    def missing(self, model: str, number: int) -> int | None:
        """The number that is next and not there, where that is an earlier one."""
        line = self._lines.get(model)
        if line is None or line.next >= number or line.next in line.waiting:
            return None
        return line.next

    def is_new(self, model: str, number: int) -> bool:
        """Whether a request of this number has not arrived before."""
        line = self._lines[model]
        return number >= line.next and number not in line.waiting

    def add(self, model: str, number: int, item: Item | None) -> None:
        """A new request; None for one that was refused, whose number is used up.

        Raises:
            RequestError: Too many wait.
        """
        line = self._lines[model]
        if not line.next <= number < line.next + MOST_WAITING:
            raise RequestError(
                f"seq_id {number}: the next request of {model} is {line.next}, and "
                f"{MOST_WAITING} may wait. Wait for answers before sending more.",
                429,
            )
        line.waiting[number] = item
        line.last = max(line.last, number)
        self._settle(model)

    def peek(self) -> str | None:
        """The model whose turn it is, if any."""
        return next(iter(self._ready), None)

    def take(self) -> tuple[str, int, Item] | None:
        """The request whose turn it is, if any."""
        if not self._ready:
            return None
        model, _ = self._ready.popitem(last=False)
        line = self._lines[model]
        number = line.next
        item = line.waiting.pop(number)
        assert item is not None
        line.next += 1
        self._settle(model)
        return model, number, item

    def close(self, model: str) -> list[Item]:
        """Forget a model; what was waiting."""
        self._ready.pop(model, None)
        line = self._lines.pop(model, _Line())
        return [item for item in line.waiting.values() if item is not None]

    def _settle(self, model: str) -> None:
        line = self._lines[model]
        while line.next in line.waiting and line.waiting[line.next] is None:
            del line.waiting[line.next]
            line.next += 1
        if line.next in line.waiting:
            self._ready.setdefault(model)
