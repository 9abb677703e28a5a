"""The order of requests, of one model by number, of several in turns by arrival, and
what the last ones were answered."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from math import inf
from threading import Condition
from time import time
from typing import Any

from ..core.errors import RequestError

MOST_WAITING = 1024
"""Requests of one model that may wait, and how far numbers may run ahead."""
MOST_ANSWERS = 512
"""Answers of one model that are kept for a client that asks again."""
TENSOR_BYTES = 512
"""Host memory of a tensor beside its values."""


class Ticket(Future[Any]):
    """The answer to a request.

    Attributes:
        act: Makes it; None once it has run.
        asks: What tells it from others of its number; None where it could not be read.
        model, number: Whose it is; numbers are from 0.
        nbytes: Of the host, for what `act` reads, or for the result.
        path: Of a state that `act` reads or writes.
    """

    def __init__(
        self,
        act: Callable[[], Any] | None,
        asks: Any,
        nbytes: int = 0,
        path: str | None = None,
    ) -> None:
        super().__init__()
        self.path = path
        self.act, self.asks, self.nbytes = act, asks, nbytes
        self.model, self.number = "", 0
        # nobody can cancel it
        self.set_running_or_notify_cancel()

    def settle(self, result: Any = None, error: BaseException | None = None) -> None:
        """Answer it, unless somebody else just has."""
        with suppress(InvalidStateError):
            if error is None:
                self.set_result(result)
            else:
                self.set_exception(error)


@dataclass
class _Line:
    next: int = 0
    last: int = -1
    apart: bool = False
    asked: float = 0.0
    tickets: dict[int, Ticket] = field(default_factory=dict)

    @property
    def missing(self) -> int:
        """The first number that has not arrived."""
        return next(n for n in count(self.next) if n not in self.tickets)

    @property
    def ahead_bytes(self) -> int:
        """Bytes of what waits for `missing`."""
        first = inf if self.apart else self.missing
        return sum(one.nbytes for n, one in self.tickets.items() if n > first)

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
    request is there joins the end of the line; whoever had a turn goes to its end. What
    samples with the same weights has one place in it, as a model that trains has: see Note
    [Turns of training and sampling] in `samples`. Requests to sample are kept apart, under
    the numbers that clients give them.

    Args:
        most_bytes: Of the host, for requests that arrive or wait, and for answers that
            are kept, of all models; the oldest answers make room.

    Attributes:
        used_bytes: Of them.
    """

    def __init__(self, most_bytes: int = 1 << 30) -> None:
        self._lines: dict[str, _Line] = {}
        self._ready: OrderedDict[str, None] = OrderedDict()
        self._answers: deque[Ticket] = deque()
        self._changed = Condition()
        self.most_bytes, self.used_bytes, self._answer_bytes = most_bytes, 0, 0
        self.stopped = False

    def __contains__(self, model: str) -> bool:
        return model in self._lines

    def begin(self, model: str, ticket: Ticket) -> Ticket:
        """`add` number 0 of a model that may be new."""
        with self._changed:
            self.open(model)
            return self.add(model, 0, ticket)

    def open(self, name: str, apart: bool = False) -> None:
        """Let requests of a name that is no model's come, if it is new; `apart` for those
        of `keep`."""
        with self._changed:
            if not self.stopped:
                self._lines.setdefault(name, _Line(apart=apart))

    def keep(self, name: str, number: int | None, ticket: Ticket) -> Ticket:
        """Keep a request that somebody else answers, whenever that is, under any number;
        by default the next one. The ticket of an equal one that was there before, if any.

        Raises:
            RequestError: There is no such name, another request had this number, or too
                many wait.
        """
        with self._changed:
            self._require_open()
            line = self._line(name)
            number = line.last + 1 if number is None else number
            if number in line.tickets:
                return line.known(name, number, ticket.asks)
            if sum(not one.done() for one in line.tickets.values()) >= MOST_WAITING:
                raise RequestError(
                    f"{MOST_WAITING} requests of {name} wait. Wait for answers before "
                    "sending more.",
                    429,
                )
            self._put(line, name, number, ticket)
            return ticket

    def waits(self, name: str) -> bool:
        """Tell whether a request of a name is not answered yet."""
        with self._changed:
            line = self._lines.get(name, _Line())
            return any(not ticket.done() for ticket in line.tickets.values())

    def asked(self, name: str) -> float | None:
        """The time of the last request of a name; None where there is no such name."""
        with self._changed:
            line = self._lines.get(name)
            return None if line is None else line.asked

    def unless_used(self, path: str, act: Callable[[], None]) -> None:
        """Act while no request that waits or runs needs a state, and none can come.

        Raises:
            RequestError: One does.
        """
        with self._changed:
            self._require_open()
            for name, line in self._lines.items():
                if any(t.path == path and not t.done() for t in line.tickets.values()):
                    raise RequestError(
                        f"path: a request of {name} waits to load or save {path}. "
                        "Ask again when that is answered.",
                        409,
                    )
            act()

    def add(self, model: str, number: int | None, ticket: Ticket) -> Ticket:
        """Queue a request, by default after the last one; one that is done uses its number
        up. The ticket of an equal one that was there before, if any.

        Raises:
            RequestError: There is no such model, another request had this number, its
                answer is no longer kept, or too many wait.
        """
        with self._changed:
            self._require_open()
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
            self._put(line, model, number, ticket)
            return ticket

    def _put(self, line: _Line, name: str, number: int, ticket: Ticket) -> None:
        if not line.apart and number > line.missing:
            self._require_not_ahead(ticket)
        self.reserve(ticket.nbytes)
        line.tickets[number] = ticket
        line.asked = time()
        ticket.model, ticket.number = name, number
        line.last = max(line.last, number)
        if not line.apart:
            self._settle(name)
        ticket.add_done_callback(self._keep)
        answered = [
            one
            for one in line.tickets.values()
            if one.done() and (line.apart or one.number < line.next)
        ]
        for oldest in answered[:-MOST_ANSWERS]:
            self._forget(oldest)

    def _require_not_ahead(self, ticket: Ticket) -> None:
        """Leave half of the room to those that have not arrived and are waited for."""
        waiting = sum(line.ahead_bytes for line in self._lines.values())
        if waiting + ticket.nbytes > self.most_bytes // 2:
            raise RequestError(
                f"requests that wait for one which has not arrived take {waiting:,} bytes "
                f"of the host, and {self.most_bytes // 2:,} may be used for them (half of "
                "--request-memory). Send the one that is missing first.",
                429,
            )

    def reserve(self, nbytes: int) -> None:
        """Count bytes of a request; `release` them when they are gone.

        Raises:
            RequestError: There is no room for them now, or never will be.
        """
        if nbytes > self.most_bytes:
            raise RequestError(
                f"the request takes {nbytes:,} bytes of the host, and {self.most_bytes:,} "
                "may be used for all (--request-memory). Send fewer rows at once.",
                413,
            )
        with self._changed:
            waiting = self.used_bytes - self._answer_bytes
            # before answers go, which would make too little room
            if waiting + nbytes > self.most_bytes:
                raise RequestError(
                    f"requests that wait take {waiting:,} bytes of the host, and "
                    f"{self.most_bytes:,} may be used for all (--request-memory). Wait "
                    "for answers before sending more.",
                    429,
                )
            while self.used_bytes + nbytes > self.most_bytes:
                self._forget(self._answers[0])
            self.used_bytes += nbytes

    def release(self, nbytes: int) -> None:
        """Count bytes no longer."""
        with self._changed:
            self.used_bytes -= nbytes

    def _keep(self, ticket: Future[Any]) -> None:
        """Count an answer in place of its request."""
        assert isinstance(ticket, Ticket)
        with self._changed:
            self.release(ticket.nbytes)
            line = self._lines.get(ticket.model)
            kept = line is not None and line.tickets.get(ticket.number) is ticket
            answered = kept and ticket.exception() is None
            ticket.nbytes = _bytes_of(ticket.result()) if answered else 0
            if ticket.nbytes:
                self.used_bytes += ticket.nbytes
                self._answer_bytes += ticket.nbytes
                self._answers.append(ticket)

    def _forget(self, ticket: Ticket) -> None:
        """Answer no more what was answered, or will be."""
        with suppress(ValueError):
            self._answers.remove(ticket)
            self._answer_bytes -= ticket.nbytes
        self.release(ticket.nbytes)
        ticket.nbytes = 0
        if ticket.model in self._lines:
            self._lines[ticket.model].tickets.pop(ticket.number, None)

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
            line = self._line(model)
            if number < line.next:
                return line.known(model, number, None)
            ticket = line.tickets.get(number)
            if ticket is None:
                raise RequestError(f"{model} has no request {number}.", 404)
            return ticket

    def missing(self, model: str, number: int) -> int | None:
        """The number that is next and not there, where that is an earlier one."""
        with self._changed:
            line = self._lines.get(model, _Line(next=number))
            waits = line.next < number and line.next not in line.tickets
            return line.next if waits and not line.apart else None

    def close(self, model: str) -> None:
        """Forget a model; its requests that wait are refused.

        Raises:
            RequestError: There is no such model.
        """
        with self._changed:
            line = self._line(model)
            self._ready.pop(model, None)
            waiting = [t for n, t in line.tickets.items() if n >= line.next]
            _refuse(waiting, RequestError(f"{model} was unloaded.", 410))
            for ticket in [t for t in line.tickets.values() if t.done()]:
                self._forget(ticket)
            del self._lines[model]

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

    def _require_open(self) -> None:
        if self.stopped:
            raise RequestError("the server is stopping.", 409)

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


def _bytes_of(result: Any) -> int:
    if isinstance(result, tuple):
        return sum(row.nbytes + TENSOR_BYTES for row in result[1])
    return getattr(result, "nbytes", 0)


def _refuse(tickets: list[Ticket], error: RequestError) -> None:
    for ticket in tickets:
        if not ticket.done():
            ticket.act = None
            ticket.settle(error=error)
