"""States on the disk as clients list them: what there is, how long it stays, how it goes.

All of it is read from the folder of a service when it is asked for, so what somebody copies
there or deletes by hand is listed or not. How long a state stays can change, and its own
files never do; so that lies beside it, with the time of the weights that it is about: a
state that replaces another one does not inherit its end.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from threading import Lock
from time import time
from typing import Any

from axolotl.utils.logging import get_logger

from ..core.errors import FOREIGN_ERRORS, CheckpointError, RequestError
from .adapters import (
    ABOUT,
    EXTERNAL,
    SAMPLERS,
    TRAINING,
    folder_of,
    path_of,
    weights_in,
)
from .turns import Turns

LOG = get_logger(__name__)

LAST = "_last"
"""Name under which a service that closes saves what has changed since its last save."""
KINDS = (TRAINING, SAMPLERS, EXTERNAL)
"""Folders of a model for its states."""
MOST_SECONDS = 315_576_000
"""The longest time that may be asked for: ten years."""
_AGAIN_S = 60
"""Seconds until a state is looked at again that could not be removed."""
_ENDS = "_expires"
"""Folder beside the states of a kind, with a file for each that has an end."""


@dataclass(frozen=True)
class Kept:
    """A client's wishes about a state that it saves.

    Attributes:
        seconds: It is removed after so many, if given.
        metadata: A client's own words about it.
        kind: Its folder, where it is saved without an optimizer.
    """

    seconds: float | None = None
    metadata: Mapping[str, str] | None = None
    kind: str = SAMPLERS


@dataclass(frozen=True)
class State:
    """One that is saved, as it is now.

    Attributes:
        files: Names and bytes.
        mark: The time of its weights in nanoseconds, which tells it from another one that
            has replaced it.
        about: What it says itself; None where that cannot be read.
        ends: When it will be removed, in seconds since 1970, if ever.
    """

    model: str
    kind: str
    name: str
    folder: Path
    files: Mapping[str, int]
    mark: int
    about: Mapping[str, Any] | None
    ends: float | None

    @property
    def path(self) -> str:
        """Return the path to load it by."""
        return f"tinker://{self.model}/{self.kind}/{self.name}"


class States:
    """The states below a service's folder; any thread may call it.

    Args:
        folder: Has them.
        turns: Know who waits for one.
    """

    def __init__(self, folder: Path, turns: Turns) -> None:
        self._folder, self._turns = folder, turns
        self._deleted = folder / "_deleted"
        self._runs: dict[str, Mapping[str, Any]] = {}
        self._lock = Lock()
        # what was there when the service began is looked at first
        self._soonest = -inf
        shutil.rmtree(self._deleted, ignore_errors=True)

    def describe(self, model: str, metadata: Mapping[str, Any] | None) -> None:
        """Keep a client's words about a model, as long as it is there."""
        if metadata is not None:
            self._runs[model] = metadata

    def forget(self, model: str) -> None:
        """Let go of the words about a model; its states keep them."""
        self._runs.pop(model, None)

    def words(self, model: str) -> Mapping[str, Any] | None:
        """Return a client's words about a model that is there."""
        return self._runs.get(model)

    def about(self, model: str, kept: Kept) -> dict[str, Any]:
        """Return what a state of a model says itself, beside what it is."""
        said = {"user_metadata": kept.metadata, "run_metadata": self.words(model)}
        return {name: {**words} for name, words in said.items() if words is not None}

    def every(self, model: str | None = None) -> list[State]:
        """List the states that there are, of all models or of one, the newest first.

        Raises:
            RequestError: This cannot be a model.
        """
        self.expire()
        if model is not None:
            path_of(model, TRAINING, "any")
        models = (
            [*self._folder.glob("[!_]*")] if model is None else [self._folder / model]
        )
        found = []
        for kind in [at / kind for at in models for kind in KINDS]:
            states = map(self._state, kind.glob("*"))
            found += [state for state in states if state is not None]
        return sorted(found, key=lambda state: (-state.mark, state.path))

    def get(self, path: str) -> State | None:
        """Find a state; None where there is none.

        Raises:
            RequestError: This is not a path.
        """
        return self._state(folder_of(self._folder, path))

    def one(self, path: str) -> State:
        """Find a state.

        Raises:
            RequestError: There is none, or this is not a path.
        """
        state = self.get(path)
        if state is None:
            raise RequestError(
                f"path: there is no state {path}, or no longer. GET /api/v1/checkpoints "
                "lists those that there are.",
                404,
            )
        return state

    def delete(self, path: str) -> None:
        """Remove a state. A sampling session keeps the weights that it was made with: it
        has links to them.

        Raises:
            RequestError: There is none, or somebody waits for it.
            CheckpointError: It cannot be removed.
        """
        state = self.one(path)
        if state.name == LAST and state.model in self._turns:
            raise RequestError(
                f"path: {path} is what {state.model} had learned when its server stopped, "
                "and that model is trained here. Unload it first, or delete it later.",
                409,
            )
        aside = self._deleted / uuid.uuid4().hex
        try:
            self._deleted.mkdir(exist_ok=True)
            self._turns.unless_used(path, partial(_rename, state.folder, aside))
            self._end_of(state.folder).unlink(missing_ok=True)
        except FileNotFoundError as error:
            raise RequestError(f"path: {path} has just been deleted.", 404) from error
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be deleted ({error}). See who owns {state.folder}."
            ) from error
        LOG.info(f"deleted {path}")
        shutil.rmtree(aside, ignore_errors=True)

    def keep(self, path: str, seconds: float | None) -> None:
        """Let a state be removed in so many seconds, or never.

        Raises:
            RequestError: There is none.
            CheckpointError: That cannot be written.
        """
        state = self.one(path)
        file = self._end_of(state.folder)
        try:
            if seconds is None:
                file.unlink(missing_ok=True)
                return
            ends = time() + seconds
            file.parent.mkdir(exist_ok=True)
            # no state has such a name
            aside = file.with_name(f"~{uuid.uuid4().hex}")
            aside.write_text(json.dumps({"expires_at": ends, "mark": state.mark}))
            os.replace(aside, file)
        except OSError as error:
            raise CheckpointError(
                f"the end of {path} cannot be written ({error}). Free some space."
            ) from error
        with self._lock:
            self._soonest = min(self._soonest, ends)

    def due(self) -> bool:
        """Tell whether the time of a state may be over."""
        return time() >= self._soonest

    def expire(self) -> None:
        """Remove the states whose time is over and which nobody waits for."""
        if not self.due():
            return
        with self._lock:
            try:
                ends = [*self._folder.glob(f"*/*weights/{_ENDS}/[!~]*")]
                self._soonest = min(map(self._left, ends), default=inf)
            except OSError as error:
                LOG.warning(
                    f"{self._folder} cannot be read, all stays for now: {error}"
                )
                self._soonest = time() + _AGAIN_S

    def _left(self, end: Path) -> float:
        """The time to look at a state again; removes it where its own is over."""
        folder = end.parent.parent / end.name
        try:
            state = self._state(folder)
            if state is None or state.ends is None:
                return inf
            if state.ends > time():
                return state.ends
            self.delete(state.path)
        except (RequestError, CheckpointError, OSError) as error:
            # it is needed, or cannot be removed now
            LOG.warning(f"{folder} stays for now, whatever its time is: {error}")
            return time() + _AGAIN_S
        return inf

    def _end_of(self, folder: Path) -> Path:
        return folder.parent / _ENDS / folder.name

    def _state(self, folder: Path) -> State | None:
        model, kind, name = folder.parts[-3:]
        if name.startswith("_") and name != LAST:
            return None
        try:
            folder_of(self._folder, f"tinker://{model}/{kind}/{name}")
            mark = weights_in(folder).stat().st_mtime_ns
            files = {at.name: at.stat().st_size for at in sorted(folder.iterdir())}
        except (RequestError, FileNotFoundError, NotADirectoryError):
            # none of ours, or just deleted
            return None
        end = _read(self._end_of(folder)) or {}
        ends = end.get("expires_at") if end.get("mark") == mark else None
        ends = ends if isinstance(ends, float) else None
        about = _read(folder / ABOUT)
        return State(model, kind, name, folder, files, mark, about, ends)


def _rename(source: Path, target: Path) -> None:
    source.rename(target)


def _read(file: Path) -> dict[str, Any] | None:
    """Read a file of JSON; None where there is none, or it is damaged: a state has to be
    listed then too, so that somebody can delete it."""
    try:
        found = json.loads(file.read_text("utf-8"))
        return found if isinstance(found, dict) else None
    except (OSError, *FOREIGN_ERRORS):
        return None
