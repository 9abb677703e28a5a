"""`axolotl protrain serve --status`: what a server says of itself, in one HTTP GET."""

from __future__ import annotations

import json
import os
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from ..core.errors import ConfigError
from ..core.sizes import format_bytes

API_KEY = "PROTRAIN_API_KEY"
"""Variable with the key that clients have to send."""


def status_text(url: str) -> str:
    """Ask a server at `url` for its adapters, bytes and plan.

    Raises:
        ConfigError: It is no address, nobody answers there, or no server of this package.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--status {url}: not http://HOST:PORT.")
    headers = {"X-API-Key": os.environ.get(API_KEY, "")}
    asked = Request(f"{url.rstrip('/')}/api/v1/status", headers=headers)  # noqa: S310
    try:
        with urlopen(asked, timeout=30) as answer:  # noqa: S310  # nosec B310
            return _text(json.load(answer))
    except HTTPError as error:
        raise ConfigError(
            f"--status {url}: answered {error.code} {error.reason}. A server with a key "
            f"wants it in {API_KEY}; one that has no such page is another program's."
        ) from error
    except URLError as error:
        raise ConfigError(
            f"--status {url}: nobody answers there ({error.reason}). Give the address that "
            "`axolotl-protrain serve` printed."
        ) from error
    except (HTTPException, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"--status {url}: no server of this package answers there "
            f"({type(error).__name__}: {error}). Give the address that `axolotl-protrain "
            "serve` printed."
        ) from error


def _text(told: Any) -> str:
    lines = [told["plan"], f"base {told['base_model']}"]
    for adapter in told["adapters"]:
        where = "host" if adapter["on_host"] else "disk"
        lines.append(
            f"{adapter['model_id']:20} rank {adapter['rank']:4} on "
            f"{','.join(adapter['layers']):16} {format_bytes(adapter['bytes']):>10} "
            f"{where}"
        )
    unused = ", ".join(told.get("without_effect", ()))
    lines += [f"without effect here: {unused}"] if unused else []
    moved, held = format_bytes(told["moved_bytes"]), format_bytes(told["host_bytes"])
    lines.append(
        f"{held} on the host; {told['switches']} switches moved {moved}, "
        f"{told['prefetched']} of them ahead of their turn"
    )
    if sampling := told.get("sampling"):
        lines.append(
            f"{sampling['tokens']:,} tokens sampled; {sampling['decoding']} rows decode "
            f"and {sampling['waiting']} wait, of {sampling['sessions']} sessions"
        )
    return "\n".join(lines)
