"""`axolotl protrain serve`: the training service over HTTP, until it is told to stop."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO
from urllib.request import Request, urlopen

import uvicorn

from ..core.errors import ConfigError
from ..core.sizes import format_bytes
from ..service.engine import AdapterService
from ..service.http import app_of

API_KEY = "PROTRAIN_API_KEY"
"""Variable with the key that clients have to send."""


def serve(
    config: Path, host: str, port: int, folder: Path | None, adapter_bytes: int | None
) -> None:
    """Serve until SIGTERM or Ctrl-C; adapters that have changed are saved then.

    Raises:
        ConfigError: Others could reach it, and there is no key.
        ProTrainError: The base cannot be loaded, or no plan fits.
        OSError: The port is taken.
    """
    key = os.environ.get(API_KEY)
    if not _is_loopback(host) and not key:
        raise ConfigError(
            f"--host {host}: others could train and read here. Set {API_KEY} in the "
            "environment of server and clients, or serve on 127.0.0.1."
        )
    # before the base is loaded: a port that is taken is said at once
    with socket.create_server((host, port)) as listening, _own_output() as say:
        with AdapterService(config, folder, adapter_bytes) as service:
            # uvicorn raises again what has ended it, and what has changed is to be saved
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: None)
            settings = uvicorn.Config(
                app_of(service, key), timeout_graceful_shutdown=5, access_log=False
            )
            say.write(f"listening on http://{host}:{listening.getsockname()[1]}\n")
            say.flush()
            uvicorn.Server(settings).run(sockets=[listening])


@contextmanager
def _own_output() -> Iterator[TextIO]:
    """Standard output for us alone: what libraries print there is not the first line."""
    with os.fdopen(os.dup(1), "w") as ours:
        os.dup2(2, 1)
        yield ours


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def status_text(url: str) -> str:
    """What a server at `url` has: adapters, bytes, plan.

    Raises:
        OSError: Nobody answers there.
        ConfigError: It is no address.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--status {url}: not http://HOST:PORT.")
    headers = {"X-API-Key": os.environ.get(API_KEY, "")}
    asked = Request(f"{url.rstrip('/')}/api/v1/status", headers=headers)  # noqa: S310
    with urlopen(asked, timeout=30) as answer:  # noqa: S310  # nosec B310
        told = json.load(answer)
    lines = [told["plan"], f"base {told['base_model']}"]
    for adapter in told["adapters"]:
        where = "host" if adapter["on_host"] else "disk"
        lines.append(
            f"{adapter['model_id']:20} rank {adapter['rank']:4} on "
            f"{','.join(adapter['layers']):16} {format_bytes(adapter['bytes']):>10} "
            f"{where}"
        )
    moved, held = format_bytes(told["moved_bytes"]), format_bytes(told["host_bytes"])
    lines.append(
        f"{held} on the host; {told['switches']} switches moved {moved}, "
        f"{told['prefetched']} of them ahead of their turn"
    )
    return "\n".join(lines)
