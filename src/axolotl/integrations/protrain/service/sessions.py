"""Sampling sessions, and the weights that each was made with.

A session samples with weights as they were when it was made, whatever is trained, saved or
unloaded later. So the weights have a folder of their own: linked from what a client has
saved under a name, or written for this session alone. Sessions of equal weights share it,
and rows of all of them decode together.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import RLock

from ..core.errors import RequestError
from .adapters import AdapterStore, folder_of, weights_in
from .turns import Turns

MOST_SESSIONS = 1024
"""Sessions that are kept; the least recently used one without a request goes first."""
MOST_WEIGHTS = 32
"""Adapters that sessions are kept for, beside the base alone."""
BARE = "@@base"
"""In place of weights: the base without an adapter."""


@dataclass(frozen=True)
class SavedSession:
    """The answer to a save without a name."""

    session: str


@dataclass(frozen=True)
class Session:
    """A client's right to sample with certain weights.

    Attributes:
        path: That it was made from; None for the base alone, or a save without a name.
        key: Of its weights; no model has such a name.
    """

    name: str
    path: str | None
    key: str

    @property
    def line(self) -> str:
        """Return the name that its requests are kept under in `Turns`."""
        return f"@{self.name}"


class Sessions:
    """All sampling sessions of a server; any thread may call it.

    Args:
        store: Has the adapters.
        folder: For what is saved.
        turns: Keep requests.
        ended: Called when a session has ended, whose weights may be swept.
    """

    def __init__(
        self,
        store: AdapterStore,
        folder: Path,
        turns: Turns,
        ended: Callable[[], object],
    ) -> None:
        self._store, self._folder, self._turns = store, folder, turns
        self._ended = ended
        self._own = folder / "_samplers"
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._clients: Counter[str] = Counter()
        self._lock = RLock()
        shutil.rmtree(self._own, ignore_errors=True)

    def __len__(self) -> int:
        return len(self._sessions)

    def make(self, name: str, path: str | None) -> Session:
        """A session with weights that were saved under a path, or with the base alone. Asked
        again for the same path, the one that there is.

        Raises:
            RequestError: There are no such weights, or this is another session's name.
        """
        with self._lock:
            known = self._sessions.get(name)
            # weights of a session alone have no path either
            bare = known is not None and known.key == BARE
            if known is not None and known.path == path and bare is (path is None):
                return self.of(name)
            if known is not None:
                raise RequestError(
                    f"sampling_session_seq_id: {name} samples with "
                    f"{known.path or 'other weights'}. Count on from the last one."
                )
            return self._add(Session(name, path, self._key_of(path)))

    def of_path(self, path: str | None) -> Session:
        """The session of all who name a path as the model to sample from: of the weights
        that it has now.

        Raises:
            RequestError: There are no such weights.
        """
        with self._lock:
            key = self._key_of(path)
            name = f"path:{key}"
            return (
                self.of(name)
                if name in self._sessions
                else self._add(Session(name, path, key))
            )

    def folder_for(self, name: str) -> Path:
        """Return where weights of a session without a path are written before `add_own`.

        Raises:
            RequestError: This is another session's name, whose weights those would be.
        """
        self._require_new(name)
        return self._own / "unnamed" / _digest(name)

    def add_own(self, name: str) -> SavedSession:
        """A session with weights that were written for it.

        Raises:
            RequestError: This is another session's name.
        """
        with self._lock:
            self._require_new(name)
            self._add(Session(name, None, f"@@{_digest(name)}"))
            return SavedSession(name)

    def _require_new(self, name: str) -> None:
        if name in self._sessions:
            raise RequestError(
                f"sampling_session_seq_id: there is a session {name} already. Count on "
                "from the last one."
            )

    def of(self, name: str) -> Session:
        """Return a session.

        Raises:
            RequestError: There is none, or no longer.
        """
        with self._lock:
            if name not in self._sessions:
                raise RequestError(
                    f"sampling_session_id: there is no session {name}, or no longer: this "
                    f"server keeps the last {MOST_SESSIONS} sessions and those of the "
                    f"last {MOST_WEIGHTS} adapters. Make another one.",
                    404,
                )
            self._sessions.move_to_end(name)
            return self._sessions[name]

    def begun_by(self, client: str) -> list[str]:
        """List the sampling sessions of a client's session."""
        with self._lock:
            return [n for n in self._sessions if n.startswith(f"{client}:sample:")]

    def join(self, name: str) -> int:
        """Return a number for one more client of a session, whose first one has 0.

        Raises:
            RequestError: There is no such session.
        """
        with self._lock:
            self._clients[self.of(name).name] += 1
            return self._clients[name]

    def weights_of(self, key: str) -> Path | None:
        """Return the folder of weights; None for the base alone."""
        if key == BARE:
            return None
        digest = key.removeprefix("@@")
        own = self._own / "unnamed" / digest
        return own if own.exists() else self._own / "linked" / digest

    def sweep(self, drop: Callable[[str], None]) -> None:
        """Remove weights that no session has any longer, on the thread that reads them;
        `drop` is told their keys first."""
        with self._lock:
            kept = {session.key for session in self._sessions.values()}
            for folder in self._own.glob("*/[!_]*"):
                key = f"@@{folder.name}"
                if key not in kept:
                    drop(key)
                    shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove all weights of sessions."""
        shutil.rmtree(self._own, ignore_errors=True)

    def _key_of(self, path: str | None) -> str:
        """The key of weights that are saved under a path now, linked."""
        if path is None:
            return BARE
        folder = folder_of(self._folder, path)
        # whoever replaces it writes another file
        digest = _digest(path, *_marks(weights_in(folder)))
        target = self._own / "linked" / digest
        self._store.link(folder, target)
        # over another base, or too large, it is refused now
        self._store.layout_at(folder)
        return f"@@{digest}"

    def _add(self, session: Session) -> Session:
        self._sessions[session.name] = session
        self._turns.open(session.line, apart=True)
        self._turns.open(session.key)
        self._trim()
        return session

    def _trim(self) -> None:
        """Let sessions go that nobody has used for longest, until there are few enough."""
        while True:
            weights = {s.key for s in self._sessions.values()} - {BARE}
            too_many = len(self._sessions) > MOST_SESSIONS
            if not too_many and len(weights) <= MOST_WEIGHTS:
                return
            idle = [
                session
                for session in [*self._sessions.values()][:-1]
                if (too_many or session.key != BARE)
                and not self._turns.waits(session.line)
            ]
            if not idle:
                return
            self._end(idle[0])

    def _end(self, session: Session) -> None:
        del self._sessions[session.name]
        del self._clients[session.name]
        self._turns.close(session.line)
        self._ended()


def _marks(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except OSError:
        # said by who links it
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
