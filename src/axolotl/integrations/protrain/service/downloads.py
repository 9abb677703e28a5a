"""Files of a state by signed addresses, for clients that send no key to fetch them.

An address holds for an hour, for one file of one state as it is now. Files are opened
before the first byte is sent, so a state that is deleted meanwhile is sent to its end.
"""

from __future__ import annotations

import hmac
import secrets
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from hashlib import sha256
from time import time
from typing import BinaryIO
from urllib.parse import quote, urlencode

from fastapi import Request
from fastapi.responses import StreamingResponse

from ..core.errors import RequestError
from .adapters import weights_in
from .states import State

ARCHIVE = "archive.tar"
"""In place of a file: all of them, as a tar that is written as it is sent."""
ROUTE = "/api/v1/downloads/{model}/{kind}/{name}/{file}"
"""Path of an address."""
_SECONDS = 3600
_PIECE_BYTES = 1 << 20
_BLOCK_BYTES = 512
_SECRET = secrets.token_bytes(32)
"""Signs addresses; another one in each process."""


@dataclass(frozen=True)
class Part:
    """Bytes of an answer: some that are there, and what a file has."""

    head: bytes
    file: BinaryIO
    nbytes: int
    tail: bytes = b""


def address(request: Request, state: State, file: str) -> tuple[str, str]:
    """Return where to fetch a file of a state, and until when, as ISO 8601."""
    until = int(time()) + _SECONDS
    parts = {"model": state.model, "kind": state.kind, "name": state.name, "file": file}
    path = ROUTE.format(**{name: quote(part, safe="") for name, part in parts.items()})
    given = {"until": until, "signature": _signature(state, file, str(until))}
    root = str(request.base_url).rstrip("/")
    return f"{root}{path}?{urlencode(given)}", iso(until)


def require_signed(request: Request, state: State | None, file: str) -> State:
    """Return the state of a request for a file, whose address is one of `address`.

    Raises:
        RequestError: It is not, or no longer; whether there is such a state is not told.
    """
    until = request.query_params.get("until", "")
    given = request.query_params.get("signature", "")
    if state is not None:
        signed = _signature(state, file, until).encode()
        known = hmac.compare_digest(signed, given.encode("utf-8", "replace"))
        if known and int(until) >= time():
            return state
    raise RequestError(
        "signature: this is no address of a state as it is now, or its "
        f"{_SECONDS} s are over. Ask for another one.",
        403,
    )


def sent(state: State, file: str) -> StreamingResponse:
    """Answer with a file of a state, or with all of them as `ARCHIVE`.

    Raises:
        RequestError: It has no such file, or no longer.
    """
    names = [*state.files] if file == ARCHIVE else [file]
    with ExitStack() as on_failure:
        parts = []
        for name in names:
            parts.append(_opened(state, name, file == ARCHIVE))
            on_failure.callback(parts[-1].file.close)
        # files of two states are none of either
        if not _is_there(state):
            raise RequestError(f"path: {state.path} has just been replaced.", 409)
        on_failure.pop_all()
    end = bytes(2 * _BLOCK_BYTES) if file == ARCHIVE else b""
    nbytes = sum(len(p.head) + p.nbytes + len(p.tail) for p in parts) + len(end)
    headers = {"Content-Length": str(nbytes)}
    return StreamingResponse(
        _pieces(parts, end), headers=headers, media_type="application/octet-stream"
    )


def iso(seconds: float) -> str:
    """Write a time since 1970 as clients read it."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat()


def _opened(state: State, name: str, as_member: bool) -> Part:
    if name not in state.files:
        raise RequestError(
            f"file: {state.path} has no {name!r}; it has {', '.join(state.files)}.", 404
        )
    try:
        file = (state.folder / name).open("rb")
    except FileNotFoundError as error:
        raise RequestError(f"path: {state.path} has just been deleted.", 404) from error
    nbytes = state.files[name]
    if not as_member:
        return Part(b"", file, nbytes)
    member = tarfile.TarInfo(name)
    member.size, member.mtime = nbytes, int(state.mark / 1e9)
    head = member.tobuf(tarfile.GNU_FORMAT)
    return Part(head, file, nbytes, bytes(-nbytes % _BLOCK_BYTES))


def _is_there(state: State) -> bool:
    weights = weights_in(state.folder)
    return weights.exists() and weights.stat().st_mtime_ns == state.mark


def _pieces(parts: list[Part], end: bytes) -> Iterator[bytes]:
    with ExitStack() as opened:
        for part in parts:
            opened.callback(part.file.close)
        for part in parts:
            yield part.head
            left = part.nbytes
            while left:
                piece = part.file.read(min(_PIECE_BYTES, left))
                if not piece:
                    # the length was said; a shorter answer is no whole file
                    raise OSError(f"{part.file.name} has become shorter")
                left -= len(piece)
                yield piece
            yield part.tail
        yield end


def _signature(state: State, file: str, until: str) -> str:
    text = f"{state.path}/{file}?{state.mark}?{until}"
    return hmac.new(_SECRET, text.encode("utf-8", "replace"), sha256).hexdigest()
