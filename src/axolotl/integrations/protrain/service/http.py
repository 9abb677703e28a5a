"""Tinker's HTTP protocol over an `AdapterService`.

A request is answered at once with the id of a future, MODEL:SEQ_ID, so that one which is
sent again gets the same. `retrieve_future` waits for a while; nothing blocks the loop.
"""

from __future__ import annotations

import asyncio
import hmac
import time
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import zstandard
from axolotl.utils.logging import get_logger
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.requests import ClientDisconnect

from ..core.errors import ProTrainError, RequestError
from .adapters import KINDS, folder_of, read_spec
from .engine import AdapterService
from .live import AdamParams
from .losses import Datum
from .messages import (
    MOST_ROWS,
    data_of,
    output_bytes,
    read_request,
    settings_of,
    shaped,
)

LOG = get_logger(__name__)

MOST_BYTES = 64 << 20
"""Of a request's body, and of what it is when it is no longer compressed."""
BODY_S = 60
"""How long a body may take to arrive."""
WAIT_S = 20
"""How long an answer waits for its result before the client asks again."""
MOST_SESSIONS = 10_000
_UNLOADED = "unloaded"
"""In place of a number: an unload is done when it is answered."""
_PROTOBUF = "application/x-protobuf"
_ID = r"^[A-Za-z0-9][A-Za-z0-9_:-]{0,79}$"
_ELSEWHERE = (
    "Sampling is not served here: save_weights_for_sampler with a name writes a PEFT "
    "folder that vLLM or transformers load."
)
_NO_ACCOUNTS = "there are no accounts; every state may be loaded"
_REFUSED = {
    "asample": _ELSEWHERE,
    "create_sampling_session": _ELSEWHERE,
    "join_sampling_session": _ELSEWHERE,
    "create_custom_loss": "Custom losses run in the client (forward_backward_custom).",
    "save_weights_external": "Use save_weights_for_sampler: it writes a PEFT folder.",
    "copy_weights": "Load a state by its path instead (load_weights).",
    "auth/token": "Keys are not exchanged here: send X-API-Key.",
}
_NOT_HONOURED = {
    "ttl_seconds": "a state stays until its folder is deleted",
    "sampling_session_seq_id": _ELSEWHERE,
    "weights_access_token": _NO_ACCOUNTS,
}
"""Fields of clients that may only be unset. `user_metadata` is not kept."""


class _Message(BaseModel):
    model_config = ConfigDict(protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_honoured(cls, given: Any) -> Any:
        for name, why in _NOT_HONOURED.items():
            if isinstance(given, dict) and given.get(name) is not None:
                raise ValueError(f"{name} has to be left out: {why}")
        return given


class _Strict(_Message):
    """Everything in it changes numbers."""

    model_config = ConfigDict(extra="forbid")


class _Lora(_Strict):
    rank: int
    seed: int | None = Field(None, ge=0, lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class _Optimizer(_Strict):
    type: Literal["adamw"] = "adamw"


class _Session(_Message):
    session_id: str = Field(pattern=_ID)


class _Model(_Message):
    model_id: str = Field(pattern=_ID)


class _New(_Session):
    model_seq_id: int = Field(ge=0, le=2**31)
    base_model: str | None = None
    optimizer_config: _Optimizer | None = None

    @property
    def id(self) -> str:
        """As the client derives it where it creates a model from a state."""
        return f"{self.session_id}:train:{self.model_seq_id}"


class _Create(_New):
    lora_config: _Lora


class _CreateFrom(_New):
    path: str
    optimizer: bool


class _Numbered(BaseModel):
    """What is read first: a request that is refused after that has used up its number."""

    model_config = ConfigDict(protected_namespaces=())
    model_id: str | None = Field(None, pattern=_ID)
    seq_id: int | None = Field(None, ge=1, le=2**31)


class _Step(_Model):
    adam_params: AdamParams


class _Save(_Model):
    path: str
    overwrite: bool = False


class _Load(_Model):
    path: str
    optimizer: bool


class _Info(_Message):
    tinker_path: str


class _Retrieve(_Message):
    request_id: str = Field(pattern=f"^.+:([0-9]{{1,10}}|{_UNLOADED})$")


# `fail_fast`: a list of errors would be larger than the body


class _Chunk(_Message):
    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[int] = Field(fail_fast=True)


class _Input(_Message):
    chunks: list[_Chunk] = Field(fail_fast=True)


class _Tensor(_Strict):
    data: list[float] = Field(fail_fast=True)
    dtype: Literal["int64", "float32"]
    shape: list[int] | None = Field(None, max_length=8)


class _Datum(_Message):
    model_input: _Input
    loss_fn_inputs: dict[str, _Tensor]

    def read(self, number: int) -> Datum:
        tokens = [token for chunk in self.model_input.chunks for token in chunk.tokens]
        inputs = {}
        for name, given in self.loss_fn_inputs.items():
            values = torch.tensor(given.data, dtype=torch.float64)
            whole = values.to(getattr(torch, given.dtype))
            if given.dtype == "int64" and not whole.equal(values):
                raise RequestError(f"data[{number}]: {name} are not integers.")
            shape = [values.numel()] if given.shape is None else given.shape
            inputs[name] = shaped(number, name, whole, shape)
        try:
            return Datum(torch.tensor(tokens, dtype=torch.int64), inputs)
        except (OverflowError, RuntimeError) as error:
            raise RequestError(f"data[{number}]: {error}.") from error


class _Data(_Message):
    data: list[_Datum] = Field(fail_fast=True, max_length=MOST_ROWS)
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class _Pass(_Model):
    forward_backward_input: _Data | None = None
    forward_input: _Data | None = None


Answer = Callable[[Request, bytes], Awaitable[Any]]
Read = TypeVar("Read", bound=BaseModel)


def app_of(service: AdapterService, api_key: str | None) -> FastAPI:
    """The application; with a key, clients have to send it as X-API-Key."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    routes = _Routes(service)
    post: dict[str, Answer] = {
        # its own transport of HTTP/2 is of no use on loopback
        "client/config": _says(pjwt_auth_enabled=False, use_pyqwest_transport=False),
        "client/dynamic_config": _says(),
        "telemetry": _says(status="accepted"),
        "create_session": routes.create_session,
        "session_heartbeat": _reads(_Session, routes.heartbeat),
        "create_model": _reads(_Create, routes.create_model),
        "get_info": _reads(_Model, routes.get_info),
        "weights_info": _reads(_Info, routes.weights_info),
        "unload_model": _reads(_Model, routes.unload_model),
        "forward": routes.queued(partial(routes.a_pass, forward_only=True)),
        "forward_backward": routes.queued(routes.a_pass),
        "optim_step": routes.queued(routes.optim_step),
        "save_weights": routes.queued(routes.save),
        "save_weights_for_sampler": routes.queued(routes.save_for_sampler),
        "load_weights": routes.queued(routes.load_weights),
        "retrieve_future": routes.retrieve_future,
        **{name: partial(_refuse, why) for name, why in _REFUSED.items()},
    }
    get: dict[str, Answer] = {
        "/healthz": routes.health,
        "/api/v1/healthz": routes.health,
        "/api/v1/get_server_capabilities": routes.capabilities,
        "/api/v1/status": routes.status,
    }
    for name, answer in post.items():
        app.add_api_route(
            f"/api/v1/{name}", _endpoint(answer, api_key), methods=["POST"]
        )
    for path, answer in get.items():
        key = None if path.endswith("healthz") else api_key
        app.add_api_route(path, _endpoint(answer, key), methods=["GET"])
    return app


def _endpoint(answer: Answer, api_key: str | None) -> Any:
    """Reads the body, within bounds, and words what is refused."""

    async def endpoint(request: Request) -> Response:
        started = time.perf_counter()
        try:
            _admit(request, api_key)
            body = await asyncio.wait_for(_body(request), BODY_S)
            found = await answer(request, body)
            response = found if isinstance(found, Response) else JSONResponse(found)
        except ValidationError as error:
            response = _error(422, _worded(error))
        except ProTrainError as error:
            response = _error(getattr(error, "status", 422), str(error))
        except (asyncio.TimeoutError, ClientDisconnect):
            response = _error(408, f"the body took more than {BODY_S} s.")
        milliseconds = (time.perf_counter() - started) * 1000
        path, status = request.url.path, response.status_code
        LOG.info(f"{request.method} {path} {status} {milliseconds:.0f} ms")
        return response

    return endpoint


def _admit(request: Request, api_key: str | None) -> None:
    given = request.headers.get("x-api-key", "")
    if api_key is None:
        # a page that somebody on this machine looks at may post here
        if "origin" in request.headers:
            raise RequestError("browsers are not served without a key.", 403)
    elif not hmac.compare_digest(given.encode(), api_key.encode()):
        raise RequestError("X-API-Key is not the server's.", 401)


async def _body(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MOST_BYTES:
            raise RequestError(f"the body has more than {MOST_BYTES:,} bytes.", 413)
        parts.append(part)
    body = b"".join(parts)
    encoding = request.headers.get("content-encoding", "identity")
    if encoding == "zstd":
        try:
            # a limit of `decompress` does not hold where the frame says its own size
            if zstandard.frame_content_size(body) > MOST_BYTES:
                raise RequestError(f"the body is more than {MOST_BYTES:,} bytes.", 413)
            # its streams end without an error where a frame is cut short
            return zstandard.ZstdDecompressor().decompress(
                body, max_output_size=MOST_BYTES, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise RequestError(f"the body is not one zstd frame ({error}).") from error
    if encoding != "identity":
        raise RequestError(f"content-encoding {encoding}; allowed is zstd.", 415)
    return body


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"detail": message, "error": message}, status)


def _worded(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the body'}: {first['msg']}"


def _says(**words: Any) -> Answer:
    async def answer(_request: Request, _body: bytes) -> Any:
        return words

    return answer


async def _refuse(why: str, _request: Request, _body: bytes) -> Any:
    raise RequestError(why, 404)


def _reads(message: type[Read], act: Callable[[Read], Any]) -> Answer:
    async def answer(_request: Request, body: bytes) -> Any:
        return await asyncio.to_thread(lambda: act(message.model_validate_json(body)))

    return answer


class _Routes:
    def __init__(self, service: AdapterService) -> None:
        self._service = service
        self._sessions: dict[str, None] = {}

    async def health(self, _request: Request, _body: bytes) -> Any:
        if self._service.is_serving:
            return {"status": "ok"}
        return JSONResponse({"status": "stopping"}, 503)

    async def create_session(self, _request: Request, _body: bytes) -> Any:
        session = uuid.uuid4().hex[:12]
        self._sessions[session] = None
        if len(self._sessions) > MOST_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        return {"type": "create_session", "session_id": session}

    def heartbeat(self, asked: _Session) -> Any:
        self._require(asked)
        return {"type": "session_heartbeat"}

    async def capabilities(self, _request: Request, _body: bytes) -> Any:
        model = {
            "model_name": self._service.base_model,
            "max_context_length": self._service.sequence_len,
            "trainable": True,
            "sampleable": False,
        }
        return {"supported_models": [model]}

    async def status(self, _request: Request, _body: bytes) -> Any:
        return self._service.status()

    def create_model(self, asked: _Create) -> Any:
        self._require_new(asked)
        lora = asked.lora_config
        kinds = [kind for kind in KINDS if getattr(lora, f"train_{kind}")]
        self._service.create(asked.id, lora.rank, kinds, lora.seed)
        return _untyped(asked.id, 0)

    def get_info(self, asked: _Model) -> Any:
        base, spec = self._service.base_model, self._service.spec(asked.model_id)
        return {
            "type": "get_info",
            "model_id": asked.model_id,
            "is_lora": True,
            "lora_rank": spec.rank,
            "model_name": base,
            "model_data": {"model_name": base, "tokenizer_id": self._service.tokenizer},
        }

    def weights_info(self, asked: _Info) -> Any:
        spec = read_spec(folder_of(self._service.folder, asked.tinker_path))
        flags = {f"train_{kind}": kind in spec.kinds for kind in KINDS}
        named = {"base_model": self._service.base_model, "is_lora": True}
        return {**named, "lora_rank": spec.rank, **flags}

    def unload_model(self, asked: _Model) -> Any:
        self._service.unload(asked.model_id)
        return {"type": "unload_model", **_untyped(asked.model_id, _UNLOADED)}

    # requests that are queued: the message, its model and number

    def queued(self, ask: Callable[[Any, str, int | None], Future[Any]]) -> Answer:
        async def answer(request: Request, body: bytes) -> Any:
            kind = request.headers.get("content-type", "")
            protobuf = kind.startswith(_PROTOBUF)
            # off the loop: megabytes are parsed
            return await asyncio.to_thread(self._queue, ask, body, protobuf)

        return answer

    def _queue(self, ask: Any, body: bytes, protobuf: bool) -> Any:
        if protobuf:
            message = read_request(body)
            model, seq_id = message.model_id, message.seq_id or None
            named = _Numbered(model_id=model, seq_id=seq_id)
        else:
            message, named = body, _Numbered.model_validate_json(body)
        try:
            return ask(message, named.model_id, named.seq_id)
        except (ValidationError, RequestError) as error:
            if not isinstance(error, RequestError):
                error = RequestError(_worded(error))
            if named.model_id is not None and named.seq_id is not None:
                self._service.refuse(named.model_id, named.seq_id, error)
            raise error

    def a_pass(
        self, message: Any, model: str, number: int | None, forward_only: bool = False
    ) -> Any:
        read = _read_json if isinstance(message, bytes) else _read_protobuf
        data, loss_fn, settings, only = read(message)
        ask = self._service.forward_backward
        future = ask(model, data, loss_fn, settings, number, only or forward_only)
        return _untyped(model, future.number)

    def optim_step(self, message: Any, model: str, number: int | None) -> Any:
        adam = _Step.model_validate_json(message).adam_params
        future = self._service.optim_step(model, adam, number)
        return _untyped(model, future.number)

    def save(self, message: Any, model: str, number: int | None) -> Any:
        asked = _Save.model_validate_json(message)
        save, overwrite = self._service.save, asked.overwrite
        future = save(model, asked.path, number, overwrite=overwrite)
        return _untyped(model, future.number)

    def save_for_sampler(self, message: Any, model: str, number: int | None) -> Any:
        asked = _Save.model_validate_json(message)
        future = self._service.save(model, asked.path, number, whole=False)
        return _untyped(model, future.number)

    def load_weights(self, message: Any, model: str | None, number: int | None) -> Any:
        if model is not None:
            asked = _Load.model_validate_json(message)
            load = self._service.load
            future = load(model, asked.path, asked.optimizer, number)
            return _untyped(model, future.number)
        new = _CreateFrom.model_validate_json(message)
        self._require_new(new)
        self._service.create_from(new.id, new.path, new.optimizer)
        return _untyped(new.id, 0)

    async def retrieve_future(self, request: Request, body: bytes) -> Any:
        asked = _Retrieve.model_validate_json(body).request_id
        model, _, number = asked.rpartition(":")
        if number == _UNLOADED:
            return {"type": "unload_model", "model_id": model}
        waiting = asyncio.wrap_future(self._service.turns.answer(model, int(number)))
        done, _ = await asyncio.wait([waiting], timeout=WAIT_S)
        if not done:
            again = {"type": "try_again", "request_id": asked, "queue_state": "active"}
            missing = self._service.turns.missing(model, int(number))
            if missing is not None:
                why = f"seq_id {missing} of {model} has not arrived"
                again |= {"queue_state": "paused_capacity", "queue_state_reason": why}
            return JSONResponse(again, 408)
        error = waiting.exception()
        if error is not None:
            ours = isinstance(error, ProTrainError)
            category = "user" if isinstance(error, RequestError) else "server"
            message = str(error) if ours else f"{type(error).__name__}: {error}"
            return {"error": message, "category": category}
        accepts = request.headers.get("accept", "")
        return _answer(model, waiting.result(), _PROTOBUF in accepts)

    def _require(self, asked: _Session) -> None:
        session = asked.session_id
        if session not in self._sessions:
            raise RequestError(f"session_id: there is no session {session}.", 404)

    def _require_new(self, asked: _New) -> None:
        self._require(asked)
        own = self._service.base_model
        if asked.base_model not in (None, own):
            raise RequestError(
                f"base_model: {asked.base_model}; this server has {own}."
            )


def _untyped(model: str, number: object) -> dict[str, Any]:
    return {"request_id": f"{model}:{number}", "model_id": model}


def _answer(model: str, result: Any, protobuf: bool) -> Any:
    if isinstance(result, tuple):
        loss, rows = result
        if protobuf:
            return Response(output_bytes(loss, rows), media_type=_PROTOBUF)
        outputs = [
            {"logprobs": {"data": r.tolist(), "dtype": "float32", "shape": [*r.shape]}}
            for r in rows
        ]
        return {
            "loss_fn_output_type": "ArrayRecord",
            "loss_fn_outputs": outputs,
            "metrics": {"loss:sum": loss},
        }
    if isinstance(result, float):
        return {"metrics": {"grad_norm": result}}
    if result.startswith("tinker://"):
        return {"path": result, "model_id": model}
    return {"type": "create_model", "model_id": model}


def _read_json(body: bytes) -> Any:
    asked = _Pass.model_validate_json(body)
    given = asked.forward_backward_input or asked.forward_input
    if given is None:
        raise RequestError("forward_backward_input is missing.")
    data = [datum.read(number) for number, datum in enumerate(given.data)]
    only = asked.forward_backward_input is None
    return data, given.loss_fn, given.loss_fn_config or {}, only


def _read_protobuf(asked: Any) -> Any:
    return data_of(asked), asked.loss_fn, settings_of(asked), asked.forward_only
