"""Tinker's requests about what there is: runs, their checkpoints, sessions.

A run is a model, there or with states; a checkpoint is a state. All are read from the
folder of the service and from its models when they are asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Request, Response
from pydantic import BaseModel, Field

from ..core.errors import RequestError
from .adapters import EXTERNAL, SAMPLERS, TRAINING
from .downloads import ARCHIVE, ROUTE, address, iso, require_signed, sent
from .engine import AdapterService
from .states import MOST_SECONDS, State

OWNER = "axolotl-protrain"
"""There are no accounts: all is this server's."""
_TYPES = {TRAINING: "training", SAMPLERS: "sampler", EXTERNAL: "external"}
_STATE = "/api/v1/training_runs/{model}/checkpoints/{kind}/{name}"
_NO_ACCOUNTS = (
    "there are no accounts here: whoever may call this server may load every state."
)

Act = Callable[[AdapterService, Request, bytes], Any]
Answer = Callable[[AdapterService, Request, bytes], Awaitable[Any]]


class _Page(BaseModel):
    limit: int = Field(20, ge=1, le=1000)
    offset: int = Field(0, ge=0)
    access_scope: Literal["owned", "accessible"] = "owned"
    project_id: str | None = None

    @classmethod
    def of(cls, request: Request) -> _Page:
        """Read what a request asks for."""
        page = cls.model_validate({**request.query_params})
        if page.project_id is not None:
            raise RequestError("project_id: there are no projects here. Leave it out.")
        return page

    def cut(self, name: str, every: list[Any], show: Callable[[Any], Any]) -> Any:
        """Return a part of a list, and where it lies."""
        part = every[self.offset : self.offset + self.limit]
        cursor = {"offset": self.offset, "limit": self.limit, "total_count": len(every)}
        return {name: [show(one) for one in part], "cursor": cursor}


class _Ttl(BaseModel):
    ttl_seconds: Annotated[int, Field(ge=1, le=MOST_SECONDS)] | None


def _checkpoint(state: State) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{state.kind}/{state.name}",
        "checkpoint_type": _TYPES[state.kind],
        "time": iso(state.mark / 1e9),
        "tinker_path": state.path,
        "size_bytes": sum(state.files.values()),
        "public": False,
        "user_metadata": _part(state.about, "user_metadata"),
        "expires_at": None if state.ends is None else iso(state.ends),
    }


def _part(about: Mapping[str, Any] | None, name: str) -> dict[str, Any] | None:
    """A part of what a state says; None where it is not known."""
    found = (about or {}).get(name)
    return found if isinstance(found, dict) else None


def _checkpoints(service: AdapterService, request: Request, _: bytes) -> Any:
    return _Page.of(request).cut("checkpoints", service.states.every(), _checkpoint)


def _of_run(service: AdapterService, request: Request, _: bytes) -> Any:
    model = request.path_params["model"]
    states = _run_of(service, model)[1]
    return {"checkpoints": [_checkpoint(state) for state in states]}


def _runs(service: AdapterService, request: Request, _: bytes) -> Any:
    page, states = _Page.of(request), _by_model(service)
    every = sorted(
        ((_last(service, model, of), model, of) for model, of in states.items()),
        key=lambda one: (-one[0], one[1]),
    )
    return page.cut("training_runs", every, lambda one: _run(service, *one[1:]))


def _one_run(service: AdapterService, request: Request, _: bytes) -> Any:
    return _run(service, *_run_of(service, request.path_params["model"]))


def _by_model(service: AdapterService) -> dict[str, list[State]]:
    """The states of every model that is there or has some."""
    found: dict[str, list[State]] = {model: [] for model in [*service.store.layouts]}
    for state in service.states.every():
        found.setdefault(state.model, []).append(state)
    return found


def _run_of(service: AdapterService, model: str) -> tuple[str, list[State]]:
    states = service.states.every(model)
    if not states and model not in service.store.layouts:
        raise RequestError(
            f"training_run_id: there is no model {model}, nor a state of it. GET "
            "/api/v1/training_runs lists those that there are.",
            404,
        )
    return model, states


def _last(service: AdapterService, model: str, states: list[State]) -> float:
    """The time of a model's last request that is known: its last save, at least."""
    saved = states[0].mark / 1e9 if states else 0.0
    return max(service.turns.asked(model) or 0.0, saved)


def _run(service: AdapterService, model: str, states: list[State]) -> dict[str, Any]:
    newest = {state.kind: state for state in reversed(states)}
    about = next((state.about for state in states if state.about), None)
    layout = service.store.layouts.get(model)
    rank = layout.spec.rank if layout else (_part(about, "spec") or {}).get("rank")
    words = service.states.words(model) or _part(about, "run_metadata")
    here, base = service.base_model, (_part(about, "base") or {}).get("name")
    last = {
        name: _checkpoint(newest[kind]) if kind in newest else None
        for name, kind in (
            ("last_checkpoint", TRAINING),
            ("last_sampler_checkpoint", SAMPLERS),
        )
    }
    return {
        "training_run_id": model,
        "base_model": here if layout or base is None else base,
        "model_owner": OWNER,
        "is_lora": rank != 0,
        "corrupted": False,
        "lora_rank": rank,
        "last_request_time": iso(_last(service, model, states)),
        "user_metadata": words and {name: str(word) for name, word in words.items()},
        **last,
    }


def _path(request: Request) -> str:
    return "tinker://{model}/{kind}/{name}".format(**request.path_params)


def _delete(service: AdapterService, request: Request, _: bytes) -> Any:
    service.states.delete(_path(request))
    return Response(status_code=204)


def _set_ttl(service: AdapterService, request: Request, body: bytes) -> Any:
    seconds = _Ttl.model_validate_json(body).ttl_seconds
    service.states.keep(_path(request), seconds)
    return Response(status_code=204)


def _archive(service: AdapterService, request: Request, _: bytes) -> Any:
    url, expires = address(request, service.states.one(_path(request)), ARCHIVE)
    return {"url": url, "expires": expires}


def _urls(service: AdapterService, request: Request, _: bytes) -> Any:
    state = service.states.one(_path(request))
    signed = {name: address(request, state, name) for name in state.files}
    expires = min(until for _, until in signed.values())
    return {
        "urls": {name: url for name, (url, _) in signed.items()},
        "expires": expires,
    }


def _download(service: AdapterService, request: Request, _: bytes) -> Any:
    file = request.path_params["file"]
    state = require_signed(request, service.states.get(_path(request)), file)
    return sent(state, file)


def _refuse(service: AdapterService, request: Request, _: bytes) -> Any:
    raise RequestError(_NO_ACCOUNTS, 404)


def _sessions(service: AdapterService, request: Request, _: bytes) -> Any:
    page, found = _Page.of(request), _models_of(service)
    return {"sessions": page.cut("sessions", [*found], str)["sessions"]}


def _session(service: AdapterService, request: Request, _: bytes) -> Any:
    name = request.path_params["session"]
    models, samplers = _models_of(service).get(name), service.sessions.begun_by(name)
    if models is None and not samplers:
        raise RequestError(
            f"session_id: {name} has no model, state or sampling session here.", 404
        )
    return {"training_run_ids": models or [], "sampler_ids": samplers}


def _models_of(service: AdapterService) -> dict[str, list[str]]:
    """Models by the client's session that their ids begin with."""
    found: dict[str, list[str]] = {}
    for model in sorted(_by_model(service)):
        session, made, _ = model.partition(":train:")
        if made:
            found.setdefault(session, []).append(model)
    return found


def _finish(service: AdapterService, request: Request, _: bytes) -> Any:
    service.finish(request.path_params["session"])
    return Response(status_code=204)


def _apart(act: Act) -> Answer:
    """Act away from the loop: files are read or changed."""

    async def answer(service: AdapterService, request: Request, body: bytes) -> Any:
        return await asyncio.to_thread(partial(act, service, request, body))

    return answer


ROUTES: dict[tuple[str, str], Answer] = {
    ("GET", "/api/v1/checkpoints"): _apart(_checkpoints),
    ("GET", "/api/v1/training_runs"): _apart(_runs),
    ("GET", "/api/v1/training_runs/{model}"): _apart(_one_run),
    ("GET", "/api/v1/training_runs/{model}/checkpoints"): _apart(_of_run),
    ("DELETE", _STATE): _apart(_delete),
    ("PUT", f"{_STATE}/ttl"): _apart(_set_ttl),
    ("GET", f"{_STATE}/archive"): _apart(_archive),
    ("GET", f"{_STATE}/external_weights_urls"): _apart(_urls),
    ("POST", f"{_STATE}/publish"): _apart(_refuse),
    ("DELETE", f"{_STATE}/publish"): _apart(_refuse),
    ("GET", "/api/v1/sessions"): _apart(_sessions),
    ("GET", "/api/v1/sessions/{session}"): _apart(_session),
    ("POST", "/api/v1/sessions/{session}/finish"): _apart(_finish),
}
"""Requests about what there is, by method and path, and what answers them."""
SIGNED: dict[tuple[str, str], Answer] = {("GET", ROUTE): _apart(_download)}
"""Requests whose address is signed, and asked for no key."""
