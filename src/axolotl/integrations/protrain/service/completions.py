"""OpenAI's /v1/completions, /v1/chat/completions and /v1/models over an `AdapterService`.

A model is the base, by its name, or what a client has saved, by its path: the weights that
it has when the request comes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse

from ..core.errors import RequestError
from .answers import Shown
from .completion_messages import Answering, Asking
from .engine import AdapterService
from .text import TextStream
from .turns import Ticket

LOOK_S = 1.0
"""Seconds between two looks whether a client that waits is still there."""


@dataclass
class _Begun:
    """A request whose rows wait; `events` has what is shown of them."""

    asked: Asking
    prompts: list[list[int]]
    tickets: list[Ticket]
    events: asyncio.Queue[tuple[int, Shown | None]]
    answering: Answering

    def cancel(self, service: AdapterService) -> None:
        """Let the rows go."""
        for ticket in self.tickets:
            service.sampler.cancel(ticket)


def models(service: AdapterService) -> dict[str, Any]:
    """List the base, and every state that can be read, of whatever kind: the newest first."""
    every = [(service.base_model, service.folder.stat().st_mtime_ns)]
    for state in service.states.every():
        if state.about is not None:
            every.append((state.path, state.mark))
    return {"object": "list", "data": [_model(*pair) for pair in every]}


def model(service: AdapterService, name: str) -> dict[str, Any]:
    """One of `models`.

    Raises:
        RequestError: There is none of that name.
    """
    every = models(service)["data"]
    found = next((one for one in every if one["id"] == name), None)
    if found is None:
        raise RequestError(f"model: {name!r} is none of /v1/models.", 404)
    return found


def _model(name: str, mark: int) -> dict[str, Any]:
    named = {"id": name, "object": "model", "owned_by": "axolotl-protrain"}
    return {**named, "created": mark // 10**9}


async def complete(
    message: type[Asking],
    parse: Callable[[Callable[[], Any]], Awaitable[Any]],
    service: AdapterService,
    request: Request,
    body: bytes,
) -> Any:
    """Answer a request for completions, in one piece or in parts.

    Args:
        message: What it is.
        parse: Runs what reads the body, apart from the loop.
        service: What samples.
        request: Of the client.
        body: A JSON object.

    Raises:
        ValidationError, ProTrainError: What is wrong with the body.
    """
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[tuple[int, Shown | None]] = asyncio.Queue()

    def tell(event: tuple[int, Shown | None]) -> None:
        # the loop may have ended with its server
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(events.put_nowait, event)

    begun = await parse(partial(_begin, message, service, body, tell, events))
    if begun.asked.stream:
        parts = _parts(service, begun)
        return StreamingResponse(parts, media_type="text/event-stream")
    try:
        await _ended_all(begun.tickets, request)
    finally:
        # where the client has gone, or the server ends, nobody waits for them
        begun.cancel(service)
    every = [ticket.result().samples for ticket in begun.tickets]
    return begun.answering.whole(begun.prompts, every)


async def _ended_all(tickets: Sequence[Ticket], request: Request) -> None:
    pending = {asyncio.wrap_future(ticket) for ticket in tickets}
    for one in pending:
        # an error is read from the ticket, or by nobody
        one.add_done_callback(lambda done: done.cancelled() or done.exception())
    while pending:
        _, pending = await asyncio.wait(pending, timeout=LOOK_S)
        if pending and await request.is_disconnected():
            raise RequestError("the client has gone.", 408)


def _begin(
    message: type[Asking],
    service: AdapterService,
    body: bytes,
    tell: Any,
    events: asyncio.Queue[tuple[int, Shown | None]],
) -> _Begun:
    asked = message.model_validate_json(body)
    sampler = service.sampler
    session = _session(service, asked.model)
    prompts, params = asked.prompts(sampler.text), asked.params()
    answering = Answering(asked, sampler.text)
    begun = _Begun(asked, prompts, [], events, answering)
    for number, prompt in enumerate(prompts):
        first = number * asked.num_samples
        show = partial(_show, tell, first) if asked.stream else None
        try:
            ticket = sampler.sample(
                session,
                prompt,
                params,
                asked.num_samples,
                num_top=asked.num_top,
                show=show,
            )
        except RequestError:
            begun.cancel(service)
            raise
        begun.tickets.append(ticket)
        ticket.add_done_callback(partial(_ended, tell, number))
    return begun


def _show(tell: Any, first: int, shown: Shown) -> None:
    tell((first + shown.number, shown))


def _ended(tell: Any, number: int, _ticket: Any) -> None:
    tell((number, None))


def _session(service: AdapterService, model: str) -> str:
    base = service.base_model
    if model != base and not model.startswith("tinker://"):
        raise RequestError(
            f"model: {model!r} is neither {base} nor the path of a state; /v1/models lists "
            "what there is.",
            404,
        )
    return service.sessions.of_path(None if model == base else model).name


async def _parts(service: AdapterService, begun: _Begun) -> AsyncIterator[str]:
    """Server-sent events: what is new of each choice, as it is sampled."""
    asked, answering, text = begun.asked, begun.answering, service.sampler.text
    each = asked.num_samples
    count = each * len(begun.prompts)
    streams = [TextStream(text, asked.stops()) for _ in range(count)]
    wants_tokens = asked.num_top > 0 or bool(getattr(asked, "logprobs", None))
    every: list[Sequence[Any]] = [()] * len(begun.prompts)
    left = len(begun.prompts)
    try:
        for part in answering.first(count):
            yield _event(part)
        while left:
            index, shown = await begun.events.get()
            if shown is not None:
                words = streams[index].push([shown.token])
                told = [shown] if wants_tokens else []
                if words or told:
                    yield _event(answering.part(index, words, None, told))
                continue
            left -= 1
            error = begun.tickets[index].exception()
            if error is not None:
                yield _event({"error": wrong(str(error), "server_error")})
                return
            every[index] = begun.tickets[index].result().samples
            for number, sample in enumerate(every[index], index * each):
                words = streams[number].push([], last=True)
                yield _event(answering.part(number, words, sample.reason))
        if asked.stream_options is not None and asked.stream_options.include_usage:
            yield _event(answering.last(begun.prompts, every))
        yield "data: [DONE]\n\n"
    finally:
        # whoever has gone needs no more
        begun.cancel(service)


def wrong(message: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    """Word an error as OpenAI's clients read it."""
    return {"message": message, "type": kind, "param": None, "code": None}


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
