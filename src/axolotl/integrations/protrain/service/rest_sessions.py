"""Tinker's requests about sessions of clients: lists, searches, ends."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import Request, Response
from pydantic import AwareDatetime, Field

from ..core.errors import RequestError
from .client_sessions import ClientSession
from .engine import AdapterService
from .rest import NO_PROJECTS, OWNER, Act, Page, Query, as_texts, by_model
from .states import State
from .wire import Message, SessionMessage, Strict

_Reason = Literal["success", "errored", "interrupted"]


class _Found(NamedTuple):
    """A session, its models, and all their states."""

    created: datetime
    name: str
    said: ClientSession
    status: dict[str, Any] | None
    models: list[str]
    states: list[State]


class _Ended(Message):
    type: _Reason


class _Finish(Message):
    reason: _Ended
    detail: str | None = Field(None, max_length=16 << 10)


class _Anybody(Strict):
    type: Literal["own", "accessible"] = "own"


class _Users(Strict):
    type: Literal["user"]
    owner_urns: list[str] = Field(min_length=1, max_length=10)


class _Status(Strict):
    type: Literal["active", "cancelled", "failed"]


class _HasEnded(Strict):
    type: Literal["client_finished"]
    reasons: list[_Reason] | None = Field(None, min_length=1)


class _Cursor(Strict):
    last_created_at: AwareDatetime
    last_session_id: str


class _Search(Strict):
    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = {}
    display_name: str | None = Field(None, min_length=1)
    owner: Annotated[_Anybody | _Users, Field(discriminator="type")] = _Anybody()
    statuses: (
        list[Annotated[_Status | _HasEnded, Field(discriminator="type")]] | None
    ) = Field(None, min_length=1)
    limit: int = Field(50, ge=1, le=200)
    cursor: _Cursor | None = None

    def wants(self, one: _Found) -> bool:
        """Tell whether a session is one that is searched for, on whatever page."""
        words = as_texts(one.said.user_metadata) or {}
        return (
            self._names(one)
            and self.user_metadata.items() <= words.items()
            and (isinstance(self.owner, _Anybody) or OWNER in self.owner.owner_urns)
            and (self.statuses is None or any(_is(one, s) for s in self.statuses))
        )

    def _names(self, one: _Found) -> bool:
        """Tell whether a session has the id or the name that is asked for, if any is."""
        asked = []
        if self.session_id is not None:
            asked.append(self.session_id == one.name)
        if self.display_name is not None:
            called, words = one.said.display_name, self.display_name.lower().split()
            inside = called is not None and all(w in called.lower() for w in words)
            asked.append(inside)
        return any(asked) or not asked

    def follows(self, one: _Found) -> bool:
        """Tell whether a session comes after the page before."""
        last = self.cursor
        return last is None or one[:2] < (last.last_created_at, last.last_session_id)


def _is(one: _Found, asked: _Status | _HasEnded) -> bool:
    if one.status is None or one.status["type"] != asked.type:
        return False
    reasons = asked.reasons if isinstance(asked, _HasEnded) else None
    return reasons is None or one.status["reason"]["type"] in reasons


def _every(service: AdapterService) -> list[_Found]:
    """All sessions, the newest first."""
    models: dict[str, dict[str, list[State]]] = {}
    for model, states in sorted(by_model(service).items()):
        session, made, _ = model.partition(":train:")
        if made:
            models.setdefault(session, {})[model] = states
    known = service.clients.every()
    found = [
        _found(service, name, known.get(name), models.get(name, {}))
        for name in {**known, **models}
    ]
    return sorted(found, key=lambda one: one[:2], reverse=True)


def _found(
    service: AdapterService,
    name: str,
    said: ClientSession | None,
    models: dict[str, list[State]],
) -> _Found:
    states = [state for each in models.values() for state in each]
    if said is None:
        # its states were copied here, or an earlier version saved them
        oldest = min((state.mark for state in states), default=0)
        said = ClientSession(created=oldest / 1e9)
    status = {"type": "active"} if service.clients.goes_on(name) else None
    if said.ended is not None:
        status = {"type": "client_finished", **said.ended}
    created = datetime.fromtimestamp(said.created, timezone.utc)
    return _Found(created, name, said, status, [*models], states)


def _summary(one: _Found) -> dict[str, Any]:
    return {
        "session_id": one.name,
        "created_at": one.created.isoformat(),
        "owner": OWNER,
        # a text for clients; there are none
        "project_id": "",
        "status": one.status,
        "checkpoints_count": len(one.states),
        "display_name": one.said.display_name,
        "user_metadata": as_texts(one.said.user_metadata),
        "checkpoint_storage_bytes": sum(
            nbytes for state in one.states for nbytes in state.files.values()
        ),
    }


def _search(service: AdapterService, request: Request, body: bytes) -> Any:
    asked = _Search.model_validate_json(body)
    if asked.project_ids is not None:
        raise RequestError(f"project_ids: {NO_PROJECTS}")
    found = [one for one in _every(service) if asked.wants(one) and asked.follows(one)]
    page, cursor = found[: asked.limit], None
    if len(found) > len(page):
        last = page[-1]
        cursor = {
            "last_created_at": last.created.isoformat(),
            "last_session_id": last.name,
        }
    return {"sessions": [_summary(one) for one in page], "next_cursor": cursor}


def _sessions(service: AdapterService, request: Request, _: bytes) -> Any:
    page = Page.of(request)
    found = page.cut("sessions", _every(service), lambda one: one.name)
    return {"sessions": found["sessions"]}


def _session(service: AdapterService, request: Request, _: bytes) -> Any:
    Query.of(request)
    name = request.path_params["session"]
    one = next((one for one in _every(service) if one.name == name), None)
    if one is None:
        raise RequestError(f"session_id: there is no session {name} here.", 404)
    return {
        "training_run_ids": one.models,
        "sampler_ids": service.sessions.begun_by(name),
        "user_metadata": as_texts(one.said.user_metadata),
        "display_name": one.said.display_name,
    }


def _finish(service: AdapterService, request: Request, body: bytes) -> Any:
    name = SessionMessage(session_id=request.path_params["session"]).session_id
    service.clients.finish(name, _Finish.model_validate_json(body).model_dump())
    service.finish(name)
    return Response(status_code=204)


ROUTES: dict[tuple[str, str], Act] = {
    ("GET", "/api/v1/sessions"): _sessions,
    ("POST", "/api/v1/sessions/search"): _search,
    ("GET", "/api/v1/sessions/{session}"): _session,
    ("POST", "/api/v1/sessions/{session}/finish"): _finish,
}
"""Requests about sessions, by method and path, and what answers them."""
