"""The rows that wait to be sampled, by the weights that they share, and their turns.

# Note [Turns of training and sampling]

Everything that waits stands in one line (`turns`): each model that trains has a place in
it, and each set of weights that somebody samples with. Whoever had a turn goes to its end.
A turn of training is one request. A turn of sampling is one wave, as many rows as decode at
once; after `TURN_STEPS` tokens of each it ends where anybody else waits. What its rows have
read goes to the host then and comes back with the next turn, so nothing is computed twice
and no number depends on who else waits. So between two turns of one there is at most one of
each other: nobody starves, a long sample no more than a long training. A wave takes a row of
each request in turn, so that one with many rows holds up none with few; those that come
while it decodes are in the next one.

# Note [A wave without room]

A wave has the rows that the planner has found room for, beside chunks of the base that it
holds on the device meanwhile (`core/planner/generation.py`). Where the device runs out of
memory all the same, the wave is halved: its rows keep their tokens, which are read again with
their prompts, and later waves have no more rows than the half. A single row without room goes
on with nothing held, or is refused. What goes to the host counts as memory of requests; where
there is no room, it is dropped, and read again.
"""

from __future__ import annotations

import gc
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import RLock

import torch

from ..core.engine.device import is_shortage
from ..core.errors import RequestError
from .answers import Asked, Sampled, Scored
from .decoding import Decoder, Wave
from .passes import Passes
from .sampling import Row, choose
from .turns import Ticket, Turns

TURN_STEPS = 32
"""Tokens of each row in a turn of sampling while somebody else waits."""


@dataclass(eq=False)
class Request:
    """A client's request: samples of one prompt.

    Attributes:
        ticket: Its answer.
        asked: About the prompt, which all rows begin with.
    """

    ticket: Ticket
    asked: Asked
    rows: Sequence[Row]
    scored: Scored | None = None

    def settle(self) -> None:
        """Answer it once its last row has ended."""
        if all(row.reason is not None for row in self.rows):
            samples = [row.sample() for row in self.rows]
            told = self.scored.told(self.asked) if self.scored else ()
            self.ticket.settle(Sampled(samples, *told))

    def end(self) -> None:
        """Stop its rows: it was answered otherwise."""
        for row in self.rows:
            row.reason = row.reason or "length"


@dataclass
class _Queue:
    """The rows that wait for a set of weights, and those that decode with them.

    Attributes:
        waiting: Rows by request, in the order in which they are next.
        requests: That have rows in the wave.
        kept_bytes: Of the host, for what the wave has read.
    """

    waiting: OrderedDict[Request, deque[Row]] = field(default_factory=OrderedDict)
    wave: Wave | None = None
    requests: list[Request] = field(default_factory=list)
    has_turn: bool = False
    kept_bytes: int = 0

    def forget_answered(self) -> None:
        """Let requests go that nobody waits for any longer."""
        for request in [one for one in self.waiting if one.ticket.done()]:
            del self.waiting[request]

    def pick(self, most: int) -> list[Row]:
        """Take a row of each request in turn."""
        found: list[Row] = []
        self.forget_answered()
        while self.waiting and len(found) < most:
            request, rows = self.waiting.popitem(last=False)
            found.append(rows.popleft())
            if rows:
                self.waiting[request] = rows
            if request not in self.requests:
                self.requests.append(request)
        return found

    def put_back(self, rows: Iterable[Row]) -> None:
        """Let rows of the wave be the next ones."""
        owners = {id(row): request for request in self.requests for row in request.rows}
        for row in reversed([*rows]):
            request = owners[id(row)]
            self.waiting.setdefault(request, deque()).appendleft(row)
            self.waiting.move_to_end(request, last=False)


class Samples:
    """The rows of all weights. Any thread may `add`; the others are of the one thread
    that has the model.

    Args:
        decoder: Of the model.
        passes: Read prompts.
        turns: The line of all.
        sample: Shows weights and makes a `turn` of them.
        between: Called once a forward is queued.
        forget: Undoes a forward that has failed.

    Attributes:
        decoder: Of the model.
        tokens: Sampled so far.
    """

    def __init__(
        self,
        decoder: Decoder,
        passes: Passes,
        turns: Turns,
        sample: Callable[[str], None],
        between: Callable[[], None],
        forget: Callable[[], None],
    ) -> None:
        self.decoder, self._passes, self._turns = decoder, passes, turns
        self._sample, self._between, self._forget = sample, between, forget
        self._queues: dict[str, _Queue] = {}
        self._lock = RLock()
        self.tokens = 0

    def add(self, key: str, request: Request) -> None:
        """Queue a request of weights.

        Raises:
            RequestError: The server is stopping.
        """
        with self._lock:
            queue = self._queues.setdefault(key, _Queue())
            queue.waiting[request] = deque(request.rows)
            self._go_on(key, queue)

    def counts(self) -> dict[str, int]:
        """Rows that wait, rows that decode, and tokens so far."""
        with self._lock:
            queues = [*self._queues.values()]
            waiting = [rows for queue in queues for rows in queue.waiting.values()]
            waves = [queue.wave for queue in queues if queue.wave is not None]
            return {
                "waiting": sum(map(len, waiting)),
                "decoding": sum(len(wave.going) for wave in waves),
                "tokens": self.tokens,
            }

    def turn(self, key: str) -> None:
        """Make a turn of weights that are shown: see Note [Turns of training and sampling].

        Raises:
            Exception: What a forward raises; `fail` ends the wave then.
        """
        queue = self._queues.get(key, _Queue())
        self._let_go_of(queue)
        self.decoder.follow_plan()
        if queue.wave is None:
            self._begin(queue)
        with self.decoder.holding():
            self._decode(queue)

    def _decode(self, queue: _Queue) -> None:
        steps = 0
        while queue.wave is not None and not self._turns.stopped:
            if steps >= TURN_STEPS and self._turns.peek() is not None:
                self._set_aside(queue, queue.wave)
                return
            self._step(queue)
            steps += 1

    def ended(self, key: str) -> None:
        """Let weights wait for the next turn, if there is more to do."""
        with self._lock:
            queue = self._queues.setdefault(key, _Queue())
            queue.has_turn = False
            queue.forget_answered()
            if queue.wave is not None or queue.waiting:
                self._go_on(key, queue)
            else:
                del self._queues[key]

    def drop(self, key: str) -> None:
        """Forget weights that nobody samples with any longer."""
        with self._lock:
            queue = self._queues.pop(key, _Queue())
        self._let_go_of(queue)

    def fail(self, key: str, error: BaseException) -> None:
        """Answer the requests of a wave that cannot go on, or all that wait where none
        could begin."""
        queue = self._queues.get(key, _Queue())
        self._let_go_of(queue)
        with self._lock:
            requests = queue.requests or [*queue.waiting]
        queue.requests, queue.wave = [], None
        for request in requests:
            request.ticket.settle(error=error)
            request.end()

    def _go_on(self, key: str, queue: _Queue) -> None:
        if not queue.has_turn:
            self._turns.add(key, None, Ticket(partial(self._sample, key), None))
            queue.has_turn = True

    def _set_aside(self, queue: _Queue, wave: Wave) -> None:
        nbytes = wave.nbytes
        try:
            self._turns.reserve(nbytes)
        except RequestError:
            # see Note [A wave without room]
            queue.wave = Wave(self.decoder, wave.going)
            return
        queue.kept_bytes = nbytes
        wave.leave()

    def _let_go_of(self, queue: _Queue) -> None:
        self._turns.release(queue.kept_bytes)
        queue.kept_bytes = 0

    def _begin(self, queue: _Queue) -> None:
        """Form a wave, and read what is asked about its prompts."""
        with self._lock:
            rows = queue.pick(self.decoder.most_rows)
        self._score([one for one in queue.requests if one.asked.reads])
        picked = {id(row) for row in rows}
        for request in queue.requests:
            for row in request.rows:
                last = request.scored.last if request.scored else None
                if last is not None and id(row) in picked:
                    # the prompt has been read: nothing is left to decode
                    self._alone(request, partial(choose, [row], last[None]))
                    self.tokens += 1
        self._go_with(queue, [row for row in rows if row.reason is None])

    def _score(self, requests: list[Request]) -> None:
        new = [request for request in requests if request.scored is None]
        for first in range(0, len(new), self._passes.rows):
            some = new[first : first + self._passes.rows]
            if _shortage(partial(self._read, some)):
                for request in some:
                    self._make_room()
                    self._alone(request, partial(self._read, [request]))
        self._between()

    def _read(self, requests: list[Request]) -> None:
        every = self._passes.score([request.asked for request in requests])
        for request, scored in zip(requests, every, strict=True):
            # what is decoded makes them again, beside the prompt's keys and values
            one = request.rows[0].most == 1
            request.scored = scored if one else replace(scored, last=None)

    def _alone(self, request: Request, act: Callable[[], object]) -> None:
        """Act for one request, which is refused where the device has no room for it."""
        if shortage := _shortage(act):
            self._make_room()
            error = RequestError(
                f"prompt: the device has no room to read {len(request.asked.prompt)} "
                f"tokens of it at once ({shortage}). Ask for a shorter one, or without "
                "log-probabilities of it.",
                413,
            )
            request.ticket.settle(error=error)
            request.end()

    def _step(self, queue: _Queue) -> None:
        wave = queue.wave
        assert wave is not None
        if shortage := _shortage(partial(self._choose, wave)):
            self._halve(queue, wave.going, shortage)
        else:
            self._end_rows(queue)

    def _choose(self, wave: Wave) -> None:
        logits, count = wave.logits(), len(wave.going)
        self._between()
        choose(wave.rows, logits)
        self.tokens += count

    def _go_with(self, queue: _Queue, rows: list[Row]) -> None:
        queue.wave = Wave(self.decoder, rows)
        self._end_rows(queue)

    def _end_rows(self, queue: _Queue) -> None:
        """Answer what is whole; a wave ends with its last row."""
        assert queue.wave is not None
        for request in queue.requests:
            request.settle()
            if request.ticket.done():
                request.end()
        queue.requests = [one for one in queue.requests if not one.ticket.done()]
        if not queue.wave.going:
            queue.wave = None

    def _make_room(self) -> None:
        """Let go of all that a forward without room has held."""
        self._forget()
        gc.collect()
        if self.decoder.device.type == "cuda":
            torch.cuda.empty_cache()

    def _halve(self, queue: _Queue, rows: list[Row], shortage: str) -> None:
        """See Note [A wave without room]."""
        queue.wave = None
        self._make_room()
        if len(rows) > 1:
            self.decoder.most_rows = half = len(rows) // 2
            with self._lock:
                queue.put_back(rows[half:])
            self._go_with(queue, rows[:half])
            return
        if self.decoder.let_go():
            with self._lock:
                queue.put_back(rows)
            return
        (row,) = rows
        error = RequestError(
            f"prompt: the device has no room for one row of {len(row.prompt)} tokens and "
            f"{len(row.tokens) + 1} more ({shortage}). Ask for a shorter prompt or fewer "
            "max_tokens, or serve a smaller sequence_len.",
            413,
        )
        for request in queue.requests:
            if any(one is row for one in request.rows):
                request.ticket.settle(error=error)
        self._go_with(queue, [])


def _shortage(act: Callable[[], object]) -> str:
    """Act; what is said of the room that the device has not, if so."""
    try:
        act()
    except RuntimeError as error:
        if not is_shortage(error):
            raise
        traceback.clear_frames(error.__traceback__)
        return str(error) or type(error).__name__
    return ""
