"""Tensors as they are at one moment, written while training goes on.

# Note [What a save keeps]

A save names the bytes that it will write and lets training go on. Whoever writes host memory
says so first (`Device.before_write`), and waits there until the bytes that a save still needs have
been copied or written. One thread writes: what somebody waits for, then the rest. Once
training has begun to change what is left, it copies ahead, as far as there is room. A copy is made without a lock and counts only if it is
whole before anybody else's: then nobody has written the original yet. So a signal handler
that comes to the same bytes in the middle of a copy makes its own. What changes without a
word, on the device or in small tensors beside it, is copied or written at once.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from .files import bytes_of, create, write_at
from .folders import publish, restored_on_failure
from .plans import PIECE_BYTES, FilePlan


class _Part:
    """A piece of a file, and what is known of its bytes.

    Attributes:
        source: uint8, as training has them; None once they are not needed.
        copy: As they were.
        turn: When training may change them; None where it does not.
    """

    __slots__ = ("descriptor", "offset", "source", "copy", "turn", "in_writing")

    def __init__(self, descriptor: int, offset: int, source: Tensor) -> None:
        self.descriptor, self.offset = descriptor, offset
        self.source: Tensor | None = source
        self.copy: Tensor | None = None
        self.turn: int | None = None
        self.in_writing = False


class Snapshot:
    """See Note [What a save keeps].

    Args:
        announced: Host memory, uint8, that nobody writes without `before_write`, in the
            order in which it is written.
        lasting: Host memory that nobody writes.
        room_bytes: For copies.
    """

    def __init__(
        self, announced: Sequence[Tensor], lasting: Sequence[Tensor], room_bytes: int
    ) -> None:
        self._announced = sorted(map(_span, announced))
        self._turn = {_span(memory)[0]: n for n, memory in enumerate(announced)}
        self._lasting = sorted(map(_span, lasting))
        self._room = room_bytes
        self._changed = threading.Condition(threading.RLock())
        self._parts: list[_Part] = []
        self._watched: list[tuple[int, _Part]] = []
        self._urgent: deque[_Part] = deque()
        self._files: list[IO[bytes]] = []
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._over = self._changes = False

    # what is to be written

    def add(
        self,
        path: Path,
        plan: FilePlan,
        tensors: Mapping[str, Tensor],
        own: Collection[str] = (),
    ) -> None:
        """Write a file later; a plan without a header is of one that is there. Nobody
        else has the tensors `own`."""
        is_new = bool(plan.header)
        file = create(path, plan) if is_new else os.open(path, os.O_RDWR | os.O_CLOEXEC)
        # closed with the snapshot, if it is never started
        self._files.append(os.fdopen(file, "r+b", 0))
        sources: dict[str, Tensor] = {}
        for key, start, end, offset in plan.pieces:
            if key not in sources:
                sources = {key: bytes_of(tensors[key])}
            source = sources[key][start:end]
            part = _Part(file, offset, source)
            first, last = _span(source)
            announced = _around(self._announced, first, last)
            if announced is not None:
                part.turn = self._turn[announced]
                self._watched.append((first, part))
            elif key not in own and _around(self._lasting, first, last) is None:
                if source.numel() > self._room:
                    write_at(file, source, offset)
                    continue
                self._room -= source.numel()
                is_copy = sources[key].data_ptr() != tensors[key].data_ptr()
                part.copy = source if is_copy else _copy(source)
                part.source = None
            self._parts.append(part)

    def start(self, checkpoint: Path, then: Callable[[], None]) -> None:
        """Write from here on, publish the checkpoint, `then` do the rest."""
        self._watched.sort(key=lambda watched: watched[0])
        self._thread = threading.Thread(
            target=self._run, args=(checkpoint, then), name="protrain-save"
        )
        self._thread.start()

    # what training says

    def before_write(self, memory: Iterable[Tensor]) -> None:
        """Return once this memory may be written."""
        watched = self._watched
        for first, end in map(_span, memory):
            at = bisect_left(watched, first - PIECE_BYTES, key=lambda x: x[0])
            while at < len(watched) and watched[at][0] < end:
                begin, part = watched[at]
                source = part.source
                if source is not None and begin + source.numel() > first:
                    self._changes = True
                    self._keep(part)
                at += 1

    def join(self) -> None:
        """Return once nothing is under way any longer."""
        if self._thread is not None:
            self._thread.join()

    def check(self) -> None:
        """Raise what has ended the writing, or `finish`, early."""
        if self._error is not None:
            raise self._error

    @property
    def over(self) -> bool:
        """Whether nothing is under way any longer."""
        return self._over

    # how

    def _keep(self, part: _Part, waits: bool = True) -> bool:
        """Have a copy of a part, or have it written; False where there is no room."""
        with self._changed:
            source = part.source
            while source is not None and (
                part.in_writing or self._room < source.numel()
            ):
                if not waits:
                    return False
                self._urgent.append(part)
                self._changed.notify_all()
                self._changed.wait()
                source = part.source
            if source is None:
                return True
            self._room -= source.numel()
        copy = _copy(source)
        with self._changed:
            if part.source is None or part.in_writing:
                self._room += copy.numel()
            else:
                part.copy, part.source = copy, None
            while part.in_writing and part.source is not None:
                self._changed.wait()
            self._changed.notify_all()
        return True

    def _run(self, checkpoint: Path, then: Callable[[], None]) -> None:
        try:
            with restored_on_failure(checkpoint.parent, publishes=True):
                self._write()
                publish(checkpoint)
            then()
        except BaseException as error:
            # raised again by `check`
            self._error = error
        finally:
            with self._changed:
                self._over = True
                for part in self._parts:
                    part.source = part.copy = None
                self._parts, self._watched = [], []
                self._changed.notify_all()

    def _write(self) -> None:
        in_turn = sorted(
            self._watched, key=lambda watched: (watched[1].turn, watched[0])
        )
        ahead = deque(part for _, part in in_turn)
        left = deque(self._parts)
        try:
            while left:
                while self._changes and ahead and not self._urgent:
                    if not self._keep(ahead[0], waits=False):
                        break
                    ahead.popleft()
                self._write_part(
                    self._urgent.popleft() if self._urgent else left.popleft()
                )
        finally:
            while self._files:
                self._files.pop().close()

    def _write_part(self, part: _Part) -> None:
        if part.turn is not None:
            # or training might have to wait for the disk
            self._keep(part, waits=False)
        with self._changed:
            memory = part.copy if part.source is None else part.source
            part.in_writing = True
        if memory is not None:
            write_at(part.descriptor, memory, part.offset)
        with self._changed:
            if part.copy is not None:
                self._room += part.copy.numel()
            part.source = part.copy = None
            part.in_writing = False
            self._changed.notify_all()


def _span(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def _around(spans: Sequence[tuple[int, int]], first: int, end: int) -> int | None:
    """Where that of the spans begins which has it whole."""
    at = bisect_left(spans, (first + 1, 0)) - 1
    return spans[at][0] if at >= 0 and end <= spans[at][1] else None


def _copy(source: Tensor) -> Tensor:
    # on this thread alone: torch would take the cores that train
    return torch.from_numpy(source.numpy().copy())
