"""Tinker's requests about what there is: runs and their checkpoints.

A run is a model, there or with states; a checkpoint is a state. All are read from the
folder of the service and from its models when they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel, ConfigDict, Field

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
NO_PROJECTS = "there are no projects here. Leave it out."

Kind = TypeVar("Kind", bound="Query")
Act = Callable[[AdapterService, Request, bytes], Any]


class Query(BaseModel):
    """The parameters of an address; others than these are refused."""

    model_config = ConfigDict(extra="forbid")
    access_scope: Literal["owned", "accessible"] = "owned"
    project_id: str | None = None

    @classmethod
    def of(cls: type[Kind], request: Request) -> Kind:
        """Read what a request asks for."""
        query = cls.model_validate({**request.query_params})
        if query.project_id is not None:
            raise RequestError(f"project_id: {NO_PROJECTS}")
        return query


class Page(Query):
    """A part of a list."""

    limit: int = Field(20, ge=1, le=1000)
    offset: int = Field(0, ge=0)

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


def as_texts(words: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Return a client's words as clients read them, whatever JSON they were."""
    return None if words is None else {name: str(word) for name, word in words.items()}


def _checkpoints(service: AdapterService, request: Request, _: bytes) -> Any:
    return Page.of(request).cut("checkpoints", service.states.every(), _checkpoint)


def _of_run(service: AdapterService, request: Request, _: bytes) -> Any:
    Query.of(request)
    states = _run_of(service, request.path_params["model"])[1]
    return {"checkpoints": [_checkpoint(state) for state in states]}


def _runs(service: AdapterService, request: Request, _: bytes) -> Any:
    page, states = Page.of(request), by_model(service)
    every = sorted(
        ((_last(service, model, of), model, of) for model, of in states.items()),
        key=lambda one: (-one[0], one[1]),
    )
    return page.cut("training_runs", every, lambda one: _run(service, *one[1:]))


def _one_run(service: AdapterService, request: Request, _: bytes) -> Any:
    Query.of(request)
    return _run(service, *_run_of(service, request.path_params["model"]))


def by_model(service: AdapterService) -> dict[str, list[State]]:
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
        "user_metadata": as_texts(words),
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


ROUTES: dict[tuple[str, str], Act] = {
    ("GET", "/api/v1/checkpoints"): _checkpoints,
    ("GET", "/api/v1/training_runs"): _runs,
    ("GET", "/api/v1/training_runs/{model}"): _one_run,
    ("GET", "/api/v1/training_runs/{model}/checkpoints"): _of_run,
    ("DELETE", _STATE): _delete,
    ("PUT", f"{_STATE}/ttl"): _set_ttl,
    ("GET", f"{_STATE}/archive"): _archive,
    ("GET", f"{_STATE}/external_weights_urls"): _urls,
    ("POST", f"{_STATE}/publish"): _refuse,
    ("DELETE", f"{_STATE}/publish"): _refuse,
}
"""Requests about what there is, by method and path, and what answers them."""
SIGNED: dict[tuple[str, str], Act] = {("GET", ROUTE): _download}
"""Requests whose address is signed, and asked for no key."""
