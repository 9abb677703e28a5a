"""Sessions of clients: when each began, what its client calls it, how it has ended.

A file for each keeps that beyond the end of the server, so that models and states, whose ids
begin with that of a session, can be searched by its words.
"""

from __future__ import annotations

import os
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from time import monotonic, time
from typing import Any

from axolotl.utils.logging import get_logger
from pydantic import BaseModel, Field, ValidationError

LOG = get_logger(__name__)

MOST_KNOWN = 8192
"""Sessions that are kept; the oldest go first."""
QUIET_S = 120
"""Seconds without a word of its client after which a session is not known to go on; clients
send one every ten."""
MOST_SECONDS = 253402300800
"""Since 1970 until the end of year 9999, the last that a date can be."""


class ClientSession(BaseModel):
    """A session, as its client has described it.

    Attributes:
        created: In seconds since 1970.
        ended: With what reason, and details, once its client has said so.
    """

    created: float = Field(ge=0, lt=MOST_SECONDS, allow_inf_nan=False)
    display_name: str | None = None
    user_metadata: dict[str, Any] | None = None
    ended: dict[str, Any] | None = None


class ClientSessions:
    """The sessions of a server's clients; any thread may call it.

    Args:
        folder: Keeps them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, Lock()
        self._heard: dict[str, float] = {}
        found = [(at.stem, _read(at)) for at in folder.glob("[!~]*.json")]
        known = [(name, session) for name, session in found if session is not None]
        known.sort(key=lambda one: one[1].created)
        self._known = OrderedDict(known)

    def begin(self, display_name: str | None, metadata: dict[str, Any] | None) -> str:
        """Make a session; its id."""
        name, now = uuid.uuid4().hex[:12], time()
        session = ClientSession(
            created=now, display_name=display_name, user_metadata=metadata or None
        )
        with self._lock:
            self._heard[name] = monotonic()
            self._put(name, session)
        return name

    def hear(self, name: str) -> None:
        """Note that the client of a session is there, which may have begun elsewhere."""
        with self._lock:
            self._hear(name)

    def finish(self, name: str, ended: Mapping[str, Any]) -> None:
        """Note how a session has ended; its first end counts."""
        with self._lock:
            # one that others push out meanwhile would be unknown
            session = self._hear(name)
            if session.ended is None:
                self._put(name, session.model_copy(update={"ended": {**ended}}))

    def every(self) -> dict[str, ClientSession]:
        """Return what is known, by id."""
        with self._lock:
            return dict(self._known)

    def goes_on(self, name: str) -> bool:
        """Tell whether the client of a session was heard lately."""
        return monotonic() - self._heard.get(name, -QUIET_S) < QUIET_S

    def _hear(self, name: str) -> ClientSession:
        self._heard[name] = monotonic()
        if name not in self._known:
            self._put(name, ClientSession(created=time()))
        return self._known[name]

    def _put(self, name: str, session: ClientSession) -> None:
        self._known[name], gone = session, list[str]()
        while len(self._known) > MOST_KNOWN:
            gone.append(self._known.popitem(last=False)[0])
            self._heard.pop(gone[-1], None)
        aside = self._folder / f"~{uuid.uuid4().hex}"
        try:
            self._folder.mkdir(exist_ok=True)
            aside.write_text(session.model_dump_json(), "utf-8")
            os.replace(aside, self._file(name))
            for oldest in gone:
                self._file(oldest).unlink(missing_ok=True)
        except OSError as error:
            # clients go on; what is lost are words for the next server
            LOG.warning(f"session {name} is not kept on the disk: {error}")

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def _read(file: Path) -> ClientSession | None:
    try:
        return ClientSession.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        LOG.warning(f"{file} cannot be read: nothing is known of this session.")
        return None
