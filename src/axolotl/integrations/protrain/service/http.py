"""Tinker's HTTP protocol over an `AdapterService`.

A request is answered at once with the id of a future, MODEL:SEQ_ID, so that one which is
sent again gets the same. `retrieve_future` waits for a while; nothing blocks the loop.
"""

from __future__ import annotations

import asyncio
import hmac
import io
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Literal

import torch
import zstandard
from axolotl.utils.logging import get_logger
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..core.errors import ProTrainError, RequestError
from .adapters import KINDS, folder_of, read_spec
from .engine import AdapterService
from .live import AdamParams
from .losses import Datum
from .messages import data_of, output_bytes, read_request, settings_of, shaped

LOG = get_logger(__name__)

MOST_BYTES = 64 << 20
"""Of a request's body, and of what it is when it is no longer compressed."""
WAIT_S = 20
"""How long an answer waits for its result before the client asks again."""
MOST_SESSIONS = 10_000
_UNLOADED = "unloaded"
"""In place of a number: an unload is done when it is answered."""
_PROTOBUF = "application/x-protobuf"
_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_:-]{0,79}$"
_ID = Field(pattern=_ID_PATTERN)
_NUMBER = Field(ge=0, le=2**31)
_ELSEWHERE = (
    "Sampling is not served here: save_weights_for_sampler writes a PEFT folder that "
    "vLLM or transformers load."
)
_REFUSED = {
    "asample": _ELSEWHERE,
    "create_sampling_session": _ELSEWHERE,
    "join_sampling_session": _ELSEWHERE,
    "create_custom_loss": "Custom losses run in the client (forward_backward_custom).",
    "save_weights_external": "Use save_weights_for_sampler: it writes a PEFT folder.",
    "copy_weights": "Load a state by its path instead (load_weights).",
    "auth/token": "Keys are not exchanged here: send X-API-Key.",
}


Answer = Callable[[Request, bytes], Awaitable[Any]]


class _Message(BaseModel):
    model_config = ConfigDict(protected_namespaces=())


class _Lora(_Message):
    rank: int
    seed: int | None = Field(None, ge=0, lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    @property
    def kinds(self) -> list[str]:
        return [kind for kind in KINDS if getattr(self, f"train_{kind}")]


class _Optimizer(_Message):
    type: Literal["adamw"] = "adamw"


class _Session(_Message):
    session_id: str = _ID


class _Model(_Message):
    model_id: str = _ID


class _Numbered(_Model):
    seq_id: int | None = Field(None, ge=1, le=2**31)


class _Create(_Session):
    model_seq_id: int = _NUMBER
    base_model: str
    lora_config: _Lora
    optimizer_config: _Optimizer = _Optimizer()


class _Adam(_Message):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    learning_rate: float = Field(1e-4, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip_norm: float = 0.0


class _Step(_Numbered):
    adam_params: _Adam


class _Save(_Numbered):
    path: str


class _Load(_Message):
    model_id: str | None = Field(None, pattern=_ID_PATTERN)
    seq_id: int | None = Field(None, ge=1, le=2**31)
    session_id: str | None = Field(None, pattern=_ID_PATTERN)
    model_seq_id: int | None = Field(None, ge=0, le=2**31)
    path: str
    optimizer: bool


class _Info(_Message):
    tinker_path: str


class _Retrieve(_Message):
    request_id: str


class _Chunk(_Message):
    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[int]


class _Input(_Message):
    chunks: list[_Chunk]


class _Tensor(_Message):
    model_config = ConfigDict(extra="forbid")
    data: list[int] | list[float]
    dtype: Literal["int64", "float32"]
    shape: list[int] | None = None


class _Datum(_Message):
    model_input: _Input
    loss_fn_inputs: dict[str, _Tensor]

    def read(self, number: int) -> Datum:
        tokens = [token for chunk in self.model_input.chunks for token in chunk.tokens]
        inputs = {}
        for name, given in self.loss_fn_inputs.items():
            values = _tensor(given.data, getattr(torch, given.dtype))
            shape = [values.numel()] if given.shape is None else given.shape
            inputs[name] = shaped(number, name, values, shape)
        return Datum(_tensor(tokens, torch.int64), inputs)


class _Data(_Message):
    data: list[_Datum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class _Pass(_Numbered):
    forward_backward_input: _Data | None = None
    forward_input: _Data | None = None


def _tensor(values: Any, dtype: torch.dtype) -> torch.Tensor:
    try:
        return torch.tensor(values, dtype=dtype)
    except (OverflowError, RuntimeError, TypeError) as error:
        raise RequestError(f"data: values are no {dtype} ({error}).") from error


def app_of(service: AdapterService, api_key: str | None) -> FastAPI:
    """The application; with a key, clients have to send it as X-API-Key."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    routes = _Routes(service)
    post: dict[str, Answer] = {
        "client/config": routes.client_config,
        "client/dynamic_config": routes.nothing,
        "telemetry": routes.telemetry,
        "create_session": routes.create_session,
        "session_heartbeat": routes.heartbeat,
        "create_model": routes.create_model,
        "get_info": routes.get_info,
        "weights_info": routes.weights_info,
        "unload_model": routes.unload_model,
        "forward": partial(routes.forward_backward, forward_only=True),
        "forward_backward": routes.forward_backward,
        "optim_step": routes.optim_step,
        "save_weights": partial(routes.save, whole=True),
        "save_weights_for_sampler": partial(routes.save, whole=False),
        "load_weights": routes.load_weights,
        "retrieve_future": routes.retrieve_future,
        **{name: partial(_refuse, why) for name, why in _REFUSED.items()},
    }
    get: dict[str, Answer] = {
        "/healthz": _health,
        "/api/v1/healthz": _health,
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

    async def found(request: Request) -> Response:
        try:
            given = request.headers.get("x-api-key", "")
            if api_key is not None and not hmac.compare_digest(
                given.encode(), api_key.encode()
            ):
                raise RequestError("X-API-Key is not the server's.", 401)
            found = await answer(request, await _body(request))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "the body"
            return _error(422, f"{where}: {first['msg']}")
        except RequestError as error:
            return _error(error.status, str(error))
        return found if isinstance(found, Response) else JSONResponse(found)

    async def endpoint(request: Request) -> Response:
        started = time.perf_counter()
        response = await found(request)
        milliseconds = (time.perf_counter() - started) * 1000
        path, status = request.url.path, response.status_code
        LOG.info(f"{request.method} {path} {status} {milliseconds:.0f} ms")
        return response

    return endpoint


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"detail": message, "error": message}, status)


async def _body(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MOST_BYTES:
            raise RequestError(f"the body has more than {MOST_BYTES:,} bytes.", 413)
        parts.append(part)
    body = b"".join(parts)
    if request.headers.get("content-encoding") == "zstd":
        try:
            with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(body)) as whole:
                body = whole.read(MOST_BYTES + 1)
        except zstandard.ZstdError as error:
            raise RequestError(f"the body is not zstd ({error}).") from error
        if len(body) > MOST_BYTES:
            raise RequestError(f"the body has more than {MOST_BYTES:,} bytes.", 413)
    return body


async def _refuse(why: str, _request: Request, _body: bytes) -> Any:
    raise RequestError(why, 404)


async def _health(_request: Request, _body: bytes) -> Any:
    return {"status": "ok"}


class _Routes:
    def __init__(self, service: AdapterService) -> None:
        self._service = service
        self._sessions: dict[str, None] = {}

    async def nothing(self, _request: Request, _body: bytes) -> Any:
        return {}

    async def client_config(self, _request: Request, _body: bytes) -> Any:
        # its own transport of HTTP/2 is of no use on loopback
        return {"pjwt_auth_enabled": False, "use_pyqwest_transport": False}

    async def telemetry(self, _request: Request, _body: bytes) -> Any:
        return {"status": "accepted"}

    async def create_session(self, _request: Request, _body: bytes) -> Any:
        session = uuid.uuid4().hex[:12]
        self._sessions[session] = None
        if len(self._sessions) > MOST_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        return {"type": "create_session", "session_id": session}

    async def heartbeat(self, _request: Request, body: bytes) -> Any:
        self._require(_Session.model_validate_json(body).session_id)
        return {"type": "session_heartbeat"}

    async def capabilities(self, _request: Request, _body: bytes) -> Any:
        service = self._service
        model = {
            "model_name": service.base_model,
            "max_context_length": service.sequence_len,
            "trainable": True,
            "sampleable": False,
        }
        return {"supported_models": [model]}

    async def status(self, _request: Request, _body: bytes) -> Any:
        return self._service.status()

    async def create_model(self, _request: Request, body: bytes) -> Any:
        asked = _Create.model_validate_json(body)
        self._require(asked.session_id)
        if asked.base_model != self._service.base_model:
            raise RequestError(
                f"base_model: {asked.base_model}; this server has "
                f"{self._service.base_model}."
            )
        model, lora = _model_id(asked), asked.lora_config
        self._service.create(model, lora.rank, lora.kinds, lora.seed)
        return _untyped(model, 0)

    async def get_info(self, _request: Request, body: bytes) -> Any:
        model = _Model.model_validate_json(body).model_id
        spec = await asyncio.to_thread(self._service.spec, model)
        return {
            "type": "get_info",
            "model_id": model,
            "is_lora": True,
            "lora_rank": spec.rank,
            "model_name": self._service.base_model,
            "model_data": {
                "model_name": self._service.base_model,
                "tokenizer_id": self._service.tokenizer,
            },
        }

    async def weights_info(self, _request: Request, body: bytes) -> Any:
        path = _Info.model_validate_json(body).tinker_path
        spec = await asyncio.to_thread(read_spec, folder_of(self._service.folder, path))
        flags = {f"train_{kind}": kind in spec.kinds for kind in KINDS}
        named = {"base_model": self._service.base_model, "is_lora": True}
        return {**named, "lora_rank": spec.rank, **flags}

    async def unload_model(self, _request: Request, body: bytes) -> Any:
        model = _Model.model_validate_json(body).model_id
        self._service.unload(model)
        return {
            "type": "unload_model",
            "model_id": model,
            "request_id": f"{model}:{_UNLOADED}",
        }

    async def forward_backward(
        self, request: Request, body: bytes, forward_only: bool = False
    ) -> Any:
        protobuf = request.headers.get("content-type", "").startswith(_PROTOBUF)
        read = _read_protobuf if protobuf else _read_json
        return await asyncio.to_thread(self._queue, read, body, forward_only)

    def _queue(self, read: Any, body: bytes, forward_only: bool) -> Any:
        """Off the loop: megabytes are parsed."""
        model, number, loss_fn, settings, data, only = read(body)
        only |= forward_only
        ask = self._service.forward_backward
        future = ask(model, data, loss_fn, settings, number, only)
        return _untyped(model, future.number)

    async def optim_step(self, _request: Request, body: bytes) -> Any:
        asked = _Step.model_validate_json(body)
        adam = AdamParams(**asked.adam_params.model_dump())
        future = self._service.optim_step(asked.model_id, adam, asked.seq_id)
        return _untyped(asked.model_id, future.number)

    async def save(self, _request: Request, body: bytes, whole: bool) -> Any:
        asked = _Save.model_validate_json(body)
        future = self._service.save(asked.model_id, asked.path, asked.seq_id, whole)
        return _untyped(asked.model_id, future.number)

    async def load_weights(self, _request: Request, body: bytes) -> Any:
        asked = _Load.model_validate_json(body)
        if asked.model_id is not None:
            load = self._service.load
            future = load(asked.model_id, asked.path, asked.optimizer, asked.seq_id)
            return _untyped(asked.model_id, future.number)
        if asked.session_id is None or asked.model_seq_id is None:
            raise RequestError("model_id, or session_id and model_seq_id, are missing.")
        self._require(asked.session_id)
        model = _model_id(asked)
        self._service.create_from(model, asked.path, asked.optimizer)
        return _untyped(model, 0)

    async def retrieve_future(self, request: Request, body: bytes) -> Any:
        asked = _Retrieve.model_validate_json(body).request_id
        model, _, number = asked.rpartition(":")
        if number == _UNLOADED:
            return {"type": "unload_model", "model_id": model}
        if not re.fullmatch("[0-9]{1,10}", number):
            raise RequestError(f"request_id: {asked!r} is not one of this server.", 404)
        future = self._service.answer(model, int(number))
        waiting = asyncio.wrap_future(future)
        done, _ = await asyncio.wait([waiting], timeout=WAIT_S)
        if not done:
            again = {"type": "try_again", "request_id": asked, "queue_state": "active"}
            return JSONResponse(again, 408)
        error = waiting.exception()
        if error is not None:
            ours = isinstance(error, ProTrainError)
            category = "user" if isinstance(error, RequestError) else "server"
            message = str(error) if ours else f"{type(error).__name__}: {error}"
            return {"error": message, "category": category}
        accepts = request.headers.get("accept", "")
        return _answer(model, waiting.result(), _PROTOBUF in accepts)

    def _require(self, session: str) -> None:
        if session not in self._sessions:
            raise RequestError(f"session_id: there is no session {session}.", 404)


def _model_id(asked: Any) -> str:
    """As the client derives it where it creates a model from a state."""
    return f"{asked.session_id}:train:{asked.model_seq_id}"


def _untyped(model: str, number: int) -> Any:
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
    settings = given.loss_fn_config or {}
    only = asked.forward_backward_input is None
    return asked.model_id, asked.seq_id, given.loss_fn, settings, data, only


def _read_protobuf(body: bytes) -> Any:
    asked = read_request(body)
    checked = _Numbered(model_id=asked.model_id, seq_id=asked.seq_id or None)
    given = asked.loss_fn, settings_of(asked), data_of(asked)
    return checked.model_id, checked.seq_id, *given, asked.forward_only
