"""`axolotl protrain serve --status`: what a server says of itself, in one HTTP GET."""

from __future__ import annotations

import json
import os
from urllib.request import Request, urlopen

from ..core.errors import ConfigError
from ..core.sizes import format_bytes

API_KEY = "PROTRAIN_API_KEY"
"""Variable with the key that clients have to send."""


def status_text(url: str) -> str:
    """Ask a server at `url` for its adapters, bytes and plan.

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
    unused = ", ".join(told.get("without_effect", ()))
    lines += [f"without effect here: {unused}"] if unused else []
    moved, held = format_bytes(told["moved_bytes"]), format_bytes(told["host_bytes"])
    lines.append(
        f"{held} on the host; {told['switches']} switches moved {moved}, "
        f"{told['prefetched']} of them ahead of their turn"
    )
    return "\n".join(lines)
