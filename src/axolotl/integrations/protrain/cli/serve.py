"""`axolotl protrain serve`: the training service over HTTP, until it is told to stop."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import uvicorn

from ..core.errors import ConfigError
from ..service.engine import AdapterService
from ..service.http import LOOPBACK, app_of
from .status import API_KEY


def serve(
    config: Path,
    host: str,
    port: int,
    folder: Path | None,
    adapter_bytes: int | None,
    request_bytes: int | None = None,
    more_hosts: Sequence[str] = (),
) -> None:
    """Serve until SIGTERM or Ctrl-C; adapters that have changed are saved then.

    Raises:
        ConfigError: Others could reach it, and there is no key.
        ProTrainError: The base cannot be loaded, or no plan fits.
        OSError: The port is taken.
    """
    key = os.environ.get(API_KEY, "").strip() or None
    if not _is_loopback(host) and key is None:
        raise ConfigError(
            f"--host {host}: others could train and read here. Set {API_KEY} in the "
            "environment of server and clients, or serve on 127.0.0.1."
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # before the base is loaded: a port that is taken is said at once
    listening = socket.create_server((host, port), family=family)
    with listening, _own_output() as say:
        with AdapterService(config, folder, adapter_bytes, request_bytes) as service:
            # uvicorn raises again what has ended it, and what has changed is to be saved
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: None)
            app = app_of(service, key, _Hosts(host, more_hosts))
            settings = uvicorn.Config(
                app, timeout_graceful_shutdown=5, access_log=False
            )
            say.write(
                f"listening on http://{_named(host)}:{listening.getsockname()[1]}\n"
            )
            say.flush()
            uvicorn.Server(settings).run(sockets=[listening])


@contextmanager
def _own_output() -> Iterator[TextIO]:
    """Standard output for us alone: what libraries print there is not the first line."""
    with os.fdopen(os.dup(1), "w") as ours:
        os.dup2(2, 1)
        yield ours


class _Hosts:
    """Names by which a server that listens at `host` is called: this machine's, that of
    `host`, others that are allowed, and any address where it listens at all."""

    def __init__(self, host: str, more: Sequence[str]) -> None:
        self._names = {*LOOPBACK, *(name.lower() for name in (_named(host), *more))}
        self._anywhere = host in ("0.0.0.0", "::")  # noqa: S104  # nosec B104
        if self._anywhere:
            self._names.add(socket.gethostname().lower())

    def __contains__(self, name: object) -> bool:
        # a page cannot be loaded from an address that is not its server's
        return name in self._names or (
            self._anywhere and _address(str(name)) is not None
        )


def _named(host: str) -> str:
    """A host as addresses of HTTP have it."""
    return f"[{host}]" if ":" in host else host


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback
