"""The rows that wait to be sampled, by the weights that they share, and their turns.

# Note [Turns of training and sampling]

Everything that waits stands in one line (`turns`): each model that trains has a place in
it, and each set of weights that somebody samples with. Whoever had a turn goes to its end.
A turn of training is one request. A turn of sampling is one wave, the rows that have waited
longest for these weights, as many as decode at once; after `TURN_STEPS` tokens of each it
ends where anybody else waits. What its rows have read goes to the host then and comes back
with the next turn, so nothing is computed twice and no number depends on who else waits. So
between two turns of one there is at most one of each other: nobody starves, a long sample no
more than a long training. Rows that come while a wave decodes are in the next one.

# Note [A wave without room]

The plan does not count keys and values; `Decoder.rows_at_once` bounds them. Where the device
runs out of memory all the same, the wave is halved: its rows keep their tokens, which are
read again with their prompts, and later waves have no more rows than the half. A single row
without room is refused.
"""

from __future__ import annotations

import gc
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import RLock

import torch

from ..core.engine.device import is_shortage
from ..core.errors import RequestError
from .decoding import Decoder, Wave
from .passes import Passes
from .sampling import Asked, Row, Sampled, Scored, choose
from .turns import Ticket

TURN_STEPS = 32
"""Tokens of each row in a turn of sampling while somebody else waits."""


@dataclass
class Request:
    """What a client has asked for once: samples of one prompt.

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


@dataclass
class _Queue:
    """What waits for a set of weights, and what decodes with them."""

    waiting: deque[tuple[Request, Row]] = field(default_factory=deque)
    wave: Wave | None = None
    requests: list[Request] = field(default_factory=list)
    has_turn: bool = False


class Samples:
    """The rows of all weights. Any thread may `add`; the others are of the one thread
    that has the model.

    Args:
        decoder: Of the model.
        passes: Read prompts.
        take_turn: Gives a set of weights a place in the line of all.
        others_wait: Tells whether anybody else is in it.
        stopped: Tells whether the server is.
        between: Called once a forward is queued.
        forget: Undoes a forward that has failed.

    Attributes:
        tokens: Sampled so far.
    """

    def __init__(
        self,
        decoder: Decoder,
        passes: Passes,
        take_turn: Callable[[str], None],
        others_wait: Callable[[], bool],
        stopped: Callable[[], bool],
        between: Callable[[], None],
        forget: Callable[[], None],
    ) -> None:
        self._decoder, self._passes = decoder, passes
        self._take_turn, self._others_wait = take_turn, others_wait
        self._stopped, self._between, self._forget = stopped, between, forget
        self._queues: dict[str, _Queue] = {}
        self._lock = RLock()
        self._most_rows = decoder.rows_at_once
        self.tokens = 0

    def require_cache(self) -> None:
        """See `Decoder.require_cache`."""
        self._decoder.require_cache()

    def add(self, key: str, request: Request) -> None:
        """Queue a request of weights.

        Raises:
            RequestError: The server is stopping.
        """
        with self._lock:
            queue = self._queues.setdefault(key, _Queue())
            queue.waiting.extend((request, row) for row in request.rows)
            self._go_on(key, queue)

    def counts(self) -> dict[str, int]:
        """Rows that wait, rows that decode, and tokens so far."""
        with self._lock:
            queues = [*self._queues.values()]
            waves = [queue.wave for queue in queues if queue.wave is not None]
            return {
                "waiting": sum(len(queue.waiting) for queue in queues),
                "decoding": sum(len(wave.going) for wave in waves),
                "tokens": self.tokens,
            }

    def turn(self, key: str) -> None:
        """Make a turn of weights that are shown: see Note [Turns of training and sampling].

        Raises:
            Exception: What a forward raises; `fail` ends the wave then.
        """
        queue = self._queues.get(key, _Queue())
        if queue.wave is None:
            self._begin(queue)
        steps = 0
        while queue.wave is not None and not self._stopped():
            if steps >= TURN_STEPS and self._others_wait():
                queue.wave.leave()
                return
            self._step(queue)
            steps += 1

    def ended(self, key: str) -> None:
        """Let weights wait for the next turn, if there is more to do."""
        with self._lock:
            queue = self._queues.setdefault(key, _Queue())
            queue.has_turn = False
            if queue.wave is not None or queue.waiting:
                self._go_on(key, queue)
            else:
                del self._queues[key]

    def drop(self, key: str) -> None:
        """Forget weights that nobody samples with any longer."""
        with self._lock:
            self._queues.pop(key, None)

    def fail(self, key: str, error: BaseException) -> None:
        """Answer the requests of a wave that cannot go on."""
        queue = self._queues.get(key, _Queue())
        requests, queue.requests, queue.wave = queue.requests, [], None
        for request in requests:
            request.ticket.settle(error=error)
        self._drop_answered(queue)

    def _go_on(self, key: str, queue: _Queue) -> None:
        if not queue.has_turn:
            self._take_turn(key)
            queue.has_turn = True

    def _begin(self, queue: _Queue) -> None:
        """Form a wave of those that have waited longest, and read what is asked about
        their prompts."""
        with self._lock:
            self._drop_answered(queue)
            some = [
                queue.waiting.popleft()
                for _ in range(min(self._most_rows, len(queue.waiting)))
            ]
            known = {id(request): request for request in queue.requests}
            known |= {id(request): request for request, _ in some}
            queue.requests = [*known.values()]
        self._score(
            [one for one in queue.requests if one.asked.reads and not one.scored]
        )
        for request, row in some:
            if request.scored is not None and row.most == 1:
                # the prompt has been read: nothing is left to decode
                choose([row], request.scored.last[None])
                self.tokens += 1
        self._go_with(queue, [row for _, row in some if row.reason is None])

    def _score(self, requests: list[Request]) -> None:
        every = self._passes.score([request.asked for request in requests])
        for request, scored in zip(requests, every, strict=True):
            request.scored = scored
        self._between()

    def _step(self, queue: _Queue) -> None:
        wave = queue.wave
        assert wave is not None
        try:
            logits = wave.logits()
        except RuntimeError as error:
            if not is_shortage(error):
                raise
            traceback.clear_frames(error.__traceback__)
            shortage = str(error)
        else:
            self._between()
            self.tokens += len(wave.going)
            choose(wave.rows, logits)
            self._end_rows(queue)
            return
        self._halve(queue, wave.going, shortage)

    def _end_rows(self, queue: _Queue) -> None:
        """Answer what is whole; a wave ends with its last row."""
        assert queue.wave is not None
        for request in queue.requests:
            request.settle()
            if request.ticket.done():
                # nobody waits for rows of one that was refused meanwhile
                for row in request.rows:
                    row.reason = row.reason or "length"
        queue.requests = [one for one in queue.requests if not one.ticket.done()]
        if not queue.wave.going:
            queue.wave = None

    def _halve(self, queue: _Queue, rows: list[Row], shortage: str) -> None:
        """See Note [A wave without room]."""
        queue.wave = None
        self._forget()
        gc.collect()
        if self._decoder.device.type == "cuda":
            torch.cuda.empty_cache()
        if len(rows) == 1:
            (row,) = rows
            nbytes = self._decoder.kv_bytes * (len(row.prompt) + len(row.tokens) + 1)
            error = RequestError(
                f"prompt: the device has no room for one row of {len(row.prompt)} tokens "
                f"and {len(row.tokens) + 1} more, whose keys and values take "
                f"{nbytes:,} bytes ({shortage}). Ask for a shorter prompt or fewer "
                "max_tokens, or serve a smaller sequence_len.",
                413,
            )
            for request in queue.requests:
                if any(one is row for one in request.rows):
                    request.ticket.settle(error=error)
            queue.requests = [one for one in queue.requests if not one.ticket.done()]
            return
        self._most_rows = half = len(rows) // 2
        with self._lock:
            queue.waiting.extendleft(reversed([*self._of(queue, rows[half:])]))
        self._go_with(queue, rows[:half])

    def _of(self, queue: _Queue, rows: list[Row]) -> Iterator[tuple[Request, Row]]:
        wanted = {id(row) for row in rows}
        for request in queue.requests:
            yield from ((request, row) for row in request.rows if id(row) in wanted)

    def _go_with(self, queue: _Queue, rows: list[Row]) -> None:
        queue.wave = Wave(self._decoder, rows)
        self._end_rows(queue)

    def _drop_answered(self, queue: _Queue) -> None:
        """Without rows whose request was refused while they waited."""
        with self._lock:
            live = [one for one in queue.waiting if not one[0].ticket.done()]
            queue.waiting = deque(live)
