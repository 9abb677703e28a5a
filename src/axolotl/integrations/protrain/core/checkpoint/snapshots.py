"""Copies of tensors as they are at one moment, written while training goes on.

A save copies what fits into the host's free room before it returns: whoever writes a
weight or a moment later, announced or not, changes no file. The rest is written while
training waits.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import groupby
from pathlib import Path
from typing import IO, NamedTuple

from torch import Tensor

from .files import bytes_of, create, write_at, write_pieces
from .folders import publish, restored_on_failure
from .plans import FilePlan, Piece


class _Part(NamedTuple):
    """A copied piece of a file."""

    descriptor: int
    offset: int
    copy: Tensor


class Snapshot:
    """The files of one checkpoint, of which a thread writes what has been copied.

    Args:
        room_bytes: For copies; what they have no room for is written at once.
    """

    def __init__(self, room_bytes: int) -> None:
        self._room = room_bytes
        self._parts: deque[_Part] = deque()
        self._files: list[IO[bytes]] = []
        self._writing: Future[None] | None = None

    def add(self, path: Path, plan: FilePlan, tensors: Mapping[str, Tensor]) -> None:
        """Take over a file; a plan without a header is of one that is there.

        Nothing is read of the tensors after this.
        """
        is_new = bool(plan.header)
        file = create(path, plan) if is_new else os.open(path, os.O_RDWR | os.O_CLOEXEC)
        # closed with the snapshot, if it is never started
        self._files.append(os.fdopen(file, "r+b", 0))
        at_once: list[Piece] = []
        for key, of_tensor in groupby(plan.pieces, lambda piece: piece.key):
            pieces = [*of_tensor]
            nbytes = sum(piece.end - piece.start for piece in pieces)
            if nbytes > self._room:
                at_once += pieces
                continue
            self._room -= nbytes
            copy = bytes_of(tensors[key])
            if copy.data_ptr() == tensors[key].data_ptr():
                copy = copy.clone()
            self._parts += (
                _Part(file, piece.offset, copy[piece.start : piece.end])
                for piece in pieces
            )
        write_pieces(file, at_once, tensors)

    def start(
        self,
        checkpoint: Path,
        then: Callable[[], None],
        meant: Collection[str] = (),
    ) -> None:
        """Write from here on, `publish` the checkpoint, `then` do the rest."""
        executor = ThreadPoolExecutor(1, "protrain-save")
        self._writing = executor.submit(self._run, checkpoint, then, meant)
        executor.shutdown(wait=False)

    def join(self) -> None:
        """Return once nothing is under way any longer."""
        if self._writing is not None:
            wait([self._writing])

    def check(self) -> None:
        """Raise what has ended the writing, or `then`, early."""
        if self._writing is not None:
            self._writing.result()

    @property
    def over(self) -> bool:
        """Tell whether nothing is under way any longer."""
        return self._writing is not None and self._writing.done()

    def _run(
        self, checkpoint: Path, then: Callable[[], None], meant: Collection[str]
    ) -> None:
        with restored_on_failure(checkpoint.parent, publishes=True):
            self._write()
            publish(checkpoint, meant)
        then()

    def _write(self) -> None:
        try:
            while self._parts:
                part = self._parts.popleft()
                write_at(part.descriptor, part.copy, part.offset)
        finally:
            self._parts.clear()
            while self._files:
                self._files.pop().close()
