"""Tinker's HTTP protocol over an `AdapterService`.

A request is answered at once with the id of a future, MODEL:SEQ_ID, so that one which is
sent again gets the same. `retrieve_future` waits for a while; nothing blocks the loop.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from collections.abc import Awaitable, Callable, Container, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import zstandard
from axolotl.utils.logging import get_logger
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, ValidationError
from starlette.requests import ClientDisconnect

from ..core.errors import ProTrainError, RequestError
from .answers import Sampled
from .completion_messages import Asking, Chat, Completion
from .completions import complete, model, models, wrong
from .engine import AdapterService
from .messages import output_bytes, sampled_bytes
from .requests import ANSWERED, QUEUED, REFUSED, UNLOADED, answer, queue
from .rest import ROUTES, SIGNED, Act
from .rest_sessions import ROUTES as SESSIONS
from .sample_requests import as_json, sampler_info
from .sessions import SavedSession
from .wire import worded

LOG = get_logger(__name__)

MOST_BYTES = 64 << 20
"""Most bytes of a request's body, and of what it is when it is no longer compressed."""
LITTLE_BYTES = 64 << 10
"""Most bytes of one that has neither rows nor prompts."""
SMALL_BYTES = 4 << 10
"""Bytes of a body that count as nothing: who asks for an answer needs no room for it."""
BODY_S = 60
"""Seconds that a body may take to arrive."""
WAIT_S = 20
"""Seconds that an answer waits for its result before the client asks again."""
PARSED_BYTES = 48
"""Bytes of the host for each of a body while it is parsed: numbers as objects of Python."""
LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
"""Names by which clients on this machine may call it, as `Host` has it."""
_POLLED = ("/retrieve_future", "/session_heartbeat", "/healthz")
"""Paths that clients ask for again and again; not logged where nothing is wrong."""
_PROTOBUF = "application/x-protobuf"


class _Retrieve(BaseModel):
    request_id: str = Field(pattern=f"^.+:([0-9]{{1,19}}|{UNLOADED})$")


Answer = Callable[[AdapterService, Request, bytes], Awaitable[Any]]


def app_of(
    service: AdapterService,
    api_key: str | None,
    hosts: Container[str] = LOOPBACK,
) -> FastAPI:
    """The application; with a key, clients have to send it as X-API-Key. `hosts` are the
    names that it answers to, without the port."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    # one body at a time becomes objects, in memory that the next one has again
    parser = ThreadPoolExecutor(1, "adapter-service-parser")

    def add(
        method: str,
        path: str,
        answer: Answer,
        checks: bool = True,
        most: int = LITTLE_BYTES,
    ) -> None:
        def admit(request: Request) -> None:
            _require_host(request, hosts)
            if checks:
                _require_key(request, api_key)

        word = _openai_error if path.startswith("/v1/") else _error
        endpoint = _endpoint(service, partial(answer, service), admit, word, most)
        app.add_api_route(path, endpoint, methods=[method])

    add("GET", "/healthz", _health, False)
    add("GET", "/api/v1/healthz", _health, False)
    for path, act in _TOLD.items():
        add("GET", path, _apart(act))
    add("POST", "/api/v1/retrieve_future", _retrieve)
    for name in (*ANSWERED, *QUEUED, *REFUSED):
        add("POST", f"/api/v1/{name}", partial(_post, name, parser), most=MOST_BYTES)
    for (method, path), act in {**ROUTES, **SESSIONS, **SIGNED}.items():
        add(method, path, _apart(act), (method, path) not in SIGNED)
    most = MOST_BYTES
    add("POST", "/v1/completions", partial(_complete, Completion, parser), most=most)
    add("POST", "/v1/chat/completions", partial(_complete, Chat, parser), most=most)
    return app


def _apart(act: Act) -> Answer:
    """Act away from the loop: files may be read or changed."""

    async def answer(*given: Any) -> Any:
        return await asyncio.to_thread(act, *given)

    return answer


async def _health(service: AdapterService, _request: Request, _body: bytes) -> Any:
    if service.turns.stopped:
        return JSONResponse({"status": "stopping"}, 503)
    return {"status": "ok"}


def _capabilities(service: AdapterService, _request: Request, _body: bytes) -> Any:
    model = {
        "model_name": service.base_model,
        "max_context_length": service.sequence_len,
        "trainable": True,
        "sampleable": service.sampler.can_sample,
    }
    return {"supported_models": [model]}


_TOLD: dict[str, Act] = {
    "/api/v1/get_server_capabilities": _capabilities,
    "/api/v1/status": lambda service, *_: service.status(),
    "/api/v1/samplers/{name}": lambda service, asked, _: sampler_info(
        service, asked.path_params["name"]
    ),
    "/v1/models": lambda service, *_: models(service),
    "/v1/models/{name:path}": lambda service, asked, _: model(
        service, asked.path_params["name"]
    ),
}
"""Paths of GET, and what answers them."""


async def _complete(
    message: type[Asking],
    parser: Executor,
    service: AdapterService,
    request: Request,
    body: bytes,
) -> Any:
    parse = partial(_parsed, parser, service, body)
    return await complete(message, parse, service, request, body)


async def _parsed(
    parser: Executor, service: AdapterService, body: bytes, act: Callable[[], Any]
) -> Any:
    """Run what makes objects of a body, one at a time and within bounds."""

    def run() -> Any:
        with _counted(service, PARSED_BYTES * max(0, len(body) - SMALL_BYTES)):
            return act()

    return await asyncio.get_running_loop().run_in_executor(parser, run)


async def _post(
    name: str,
    parser: Executor,
    service: AdapterService,
    request: Request,
    body: bytes,
) -> Any:
    if name in REFUSED:
        raise RequestError(REFUSED[name], 404)
    protobuf = request.headers.get("content-type", "").startswith(_PROTOBUF)
    act = partial(queue, protobuf=protobuf) if name in QUEUED else answer
    return await _parsed(parser, service, body, partial(act, service, name, body))


@contextmanager
def _counted(service: AdapterService, nbytes: int) -> Iterator[Callable[[int], None]]:
    """Host memory that a request has meanwhile, and may have more of."""
    size = held = 0

    def take(more: int) -> None:
        nonlocal size, held
        size += more
        if size > SMALL_BYTES:
            service.turns.reserve(size - held)
            held = size

    try:
        take(nbytes)
        yield take
    finally:
        service.turns.release(held)


async def _retrieve(service: AdapterService, request: Request, body: bytes) -> Any:
    asked = _Retrieve.model_validate_json(body).request_id
    model, _, number = asked.rpartition(":")
    if number == UNLOADED:
        return {"type": "unload_model", "model_id": model}
    waiting = asyncio.wrap_future(service.turns.answer(model, int(number)))
    done, _ = await asyncio.wait([waiting], timeout=WAIT_S)
    if not done:
        again = {"type": "try_again", "request_id": asked, "queue_state": "active"}
        missing = service.turns.missing(model, int(number))
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
    return _result(model, waiting.result(), _PROTOBUF in accepts)


def _result(model: str, result: Any, protobuf: bool) -> Any:
    if isinstance(result, tuple):
        loss, rows = result
        if protobuf:
            return Response(output_bytes(loss, rows), media_type=_PROTOBUF)
        outputs = [
            {
                "logprobs": {
                    "data": row.flatten().tolist(),
                    "dtype": "float32",
                    "shape": [*row.shape],
                }
            }
            for row in rows
        ]
        return {
            "loss_fn_output_type": "ArrayRecord",
            "loss_fn_outputs": outputs,
            "metrics": {"loss:sum": loss},
        }
    if isinstance(result, Sampled):
        if protobuf:
            return Response(sampled_bytes(result), media_type=_PROTOBUF)
        return as_json(result)
    if isinstance(result, SavedSession):
        kind = {"type": "save_weights_for_sampler"}
        return {**kind, "sampling_session_id": result.session}
    if isinstance(result, float):
        return {"metrics": {"grad_norm": result}}
    if result.startswith("tinker://"):
        return {"path": result, "model_id": model}
    return {"type": "create_model", "model_id": model}


def _endpoint(
    service: AdapterService,
    answer: Callable[[Request, bytes], Awaitable[Any]],
    admit: Callable[[Request], None],
    word: Callable[[int, str], Response],
    most: int,
) -> Any:
    """Reads the body, of at most so many bytes, and words what is refused."""

    async def endpoint(request: Request) -> Response:
        started = time.perf_counter()
        try:
            admit(request)
            with _counted(service, 0) as take:
                body = await asyncio.wait_for(_body(request, take, most), BODY_S)
                found = await answer(request, body)
            response = found if isinstance(found, Response) else JSONResponse(found)
        except ValidationError as error:
            response = word(422, worded(error))
        except ProTrainError as error:
            response = word(getattr(error, "status", 422), str(error))
        except (asyncio.TimeoutError, ClientDisconnect):
            response = word(408, f"the body took more than {BODY_S} s.")
        milliseconds = (time.perf_counter() - started) * 1000
        path, status = request.url.path, response.status_code
        if not (path.endswith(_POLLED) and status in (200, 408)):
            LOG.info(f"{request.method} {path} {status} {milliseconds:.0f} ms")
        return response

    return endpoint


def _require_host(request: Request, hosts: Container[str]) -> None:
    """A page under a name of its own that leads here is another site's all the same."""
    given = request.headers.get("host", "")
    name = re.sub(r":[0-9]*$", "", given).lower()
    if name not in hosts:
        raise RequestError(
            f"Host: {given!r} is not what this server is called; start it with "
            f"--allow-host {name or 'NAME'} if it is.",
            403,
        )


def _require_key(request: Request, api_key: str | None) -> None:
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
    given = request.headers.get("x-api-key", bearer)
    if not api_key:
        # a page that somebody on this machine looks at may post here
        if "origin" in request.headers:
            raise RequestError("browsers are not served without a key.", 403)
    elif not hmac.compare_digest(given.encode(), api_key.encode()):
        raise RequestError("X-API-Key, or the bearer, is not the server's key.", 401)


async def _body(request: Request, take: Callable[[int], None], most: int) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise RequestError(f"the body has more than {most:,} bytes.", 413)
        take(len(part))
        parts.append(part)
    body = b"".join(parts)
    encoding = request.headers.get("content-encoding", "identity")
    if encoding == "zstd":
        try:
            # a limit of `decompress` does not hold where the frame says its own size
            content = zstandard.frame_content_size(body)
            if content > most:
                raise RequestError(f"the body is more than {most:,} bytes.", 413)
            take(content if content > 0 else most)
            # its streams end without an error where a frame is cut short
            return zstandard.ZstdDecompressor().decompress(
                body, max_output_size=most, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise RequestError(f"the body is not one zstd frame ({error}).") from error
    if encoding != "identity":
        raise RequestError(f"content-encoding {encoding}; allowed is zstd.", 415)
    return body


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"detail": message, "error": message}, status, _later(status))


def _openai_error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": wrong(message)}, status, _later(status))


def _later(status: int) -> dict[str, str] | None:
    return {"Retry-After": "1"} if status == 429 else None
