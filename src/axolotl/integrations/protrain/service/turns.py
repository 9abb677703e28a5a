"""Whose request is next, of one model by number, of several in turns by arrival, and
what the last ones were answered."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition
from typing import Any

from ..core.errors import RequestError

MOST_WAITING = 1024
"""Requests of one model that may wait, and how far numbers may run ahead."""
MOST_ANSWERS = 512
"""Answers of one model that are kept for a client that asks again."""


class Ticket(Future[Any]):
    """The answer to a request.

    Attributes:
        act: Makes it; None once it has run.
        asks: What tells it from others of its number; None where it could not be read.
        model, number: Whose it is; numbers are from 0.
    """

    def __init__(self, act: Callable[[], Any] | None, asks: Any) -> None:
        super().__init__()
        self.act, self.asks = act, asks
        self.model, self.number = "", 0
        # nobody can cancel it
        self.set_running_or_notify_cancel()


@dataclass
class _Line:
    next: int = 0
    last: int = -1
    tickets: dict[int, Ticket] = field(default_factory=dict)

    def known(self, model: str, number: int, asks: Any) -> Ticket:
        ticket = self.tickets.get(number)
        if ticket is None:
            raise RequestError(f"seq_id {number} was answered long ago.", 410)
        if None not in (ticket.asks, asks) and ticket.asks != asks:
            raise RequestError(
                f"seq_id {number}: {model} has had another request of this number. "
                "Count on from the last one."
            )
        return ticket


class Turns:
    """The requests of all models; any thread may call it.

    Those of a model are numbered from 0 and may arrive in any order. A model whose next
    request is there joins the end of the line; whoever had a turn goes to its end.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._ready: OrderedDict[str, None] = OrderedDict()
        self._changed = Condition()
        self.stopped = False

    def __contains__(self, model: str) -> bool:
        return model in self._lines

    def begin(self, model: str, ticket: Ticket) -> Ticket:
        """`add` number 0 of a model that may be new."""
        with self._changed:
            if not self.stopped:
                self._lines.setdefault(model, _Line())
            return self.add(model, 0, ticket)

    def add(self, model: str, number: int | None, ticket: Ticket) -> Ticket:
        """Queue a request, by default after the last one; one that is done uses its number
        up. The ticket of an equal one that was there before, if any.

        Raises:
            RequestError: There is no such model, another request had this number, its
                answer is no longer kept, or too many wait.
        """
        with self._changed:
            if self.stopped:
                raise RequestError("the server is stopping.", 409)
            line = self._line(model)
            number = line.last + 1 if number is None else number
            if number < line.next or number in line.tickets:
                return line.known(model, number, ticket.asks)
            if number >= line.next + MOST_WAITING:
                raise RequestError(
                    f"seq_id {number}: the next request of {model} is {line.next}, and "
                    f"{MOST_WAITING} may wait. Wait for answers before sending more.",
                    429,
                )
            line.tickets[number] = ticket
            ticket.model, ticket.number = model, number
            line.last = max(line.last, number)
            self._settle(model)
            while len(line.tickets) > MOST_ANSWERS:
                oldest = next(iter(line.tickets.values()))
                if oldest.number >= line.next or not oldest.done():
                    break
                del line.tickets[oldest.number]
            return ticket

    def peek(self) -> str | None:
        """The model whose turn it is, if any."""
        with self._changed:
            return next(iter(self._ready), None)

    def take(self) -> Ticket | None:
        """The request whose turn it is, once there is one; None after `stop`."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self.stopped)
            if self.stopped:
                return None
            model, _ = self._ready.popitem(last=False)
            line = self._lines[model]
            ticket = line.tickets[line.next]
            line.next += 1
            self._settle(model)
            return ticket

    def answer(self, model: str, number: int) -> Ticket:
        """The ticket of a request that has arrived.

        Raises:
            RequestError: There is none, or it is too old.
        """
        with self._changed:
            ticket = self._line(model).tickets.get(number)
            if ticket is None:
                raise RequestError(f"{model} has no request {number}.", 404)
            return ticket

    def missing(self, model: str, number: int) -> int | None:
        """The number that is next and not there, where that is an earlier one."""
        with self._changed:
            line = self._lines.get(model, _Line(next=number))
            waits = line.next < number and line.next not in line.tickets
            return line.next if waits else None

    def close(self, model: str) -> None:
        """Forget a model; its requests that wait are refused.

        Raises:
            RequestError: There is no such model.
        """
        with self._changed:
            line = self._line(model)
            del self._lines[model]
            self._ready.pop(model, None)
        gone = RequestError(f"{model} was unloaded.", 410)
        _refuse([t for n, t in line.tickets.items() if n >= line.next], gone)

    def stop(self) -> None:
        """From here on nothing is taken."""
        with self._changed:
            self.stopped = True
            self._changed.notify_all()

    def refuse_all(self) -> None:
        """Answer all that wait after `stop`, once nothing runs."""
        with self._changed:
            all_ = [t for line in self._lines.values() for t in line.tickets.values()]
        _refuse(all_, RequestError("the server has stopped.", 409))

    def _line(self, model: str) -> _Line:
        if model not in self._lines:
            raise RequestError(f"model_id: there is no model {model}.", 404)
        return self._lines[model]

    def _settle(self, model: str) -> None:
        line = self._lines[model]
        while line.next in line.tickets and line.tickets[line.next].done():
            line.next += 1
        if line.next in line.tickets:
            self._ready.setdefault(model)
            self._changed.notify_all()


def _refuse(tickets: list[Ticket], error: RequestError) -> None:
    for ticket in tickets:
        if not ticket.done():
            ticket.set_exception(error)
