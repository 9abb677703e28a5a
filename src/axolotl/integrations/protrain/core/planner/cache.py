"""Measurements kept on disk: one JSON file for each machine.

Each value has the hash of its key, which names everything that changes the figures.
Memory that is free changes by the hour and is in neither. Processes that write at once may
lose what the other has measured, which is then measured again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, Union

import psutil
import torch

from ..errors import ConfigError
from ..types import Hardware
from .hardware import (
    MATMUL_SIZES,
    cpu_name,
    device_name,
    has_one_memory,
    measure_hardware,
    measured_unseen_bytes,
)

JSON: TypeAlias = Union[
    None, bool, int, float, str, Sequence["JSON"], Mapping[str, "JSON"]
]

FORMAT = 8
"""In every key; to be raised when a measurement changes its meaning."""

UNDISTURBED, NOTHING_S = 0.2, 0.05
"""Least share of the time in which a process works while nobody disturbs it; seconds of which
nothing can be told."""

Kept = TypeVar("Kept")


def default_folder() -> Path:
    """The platform's cache folder for this plugin.

    Raises:
        ConfigError: There is no home folder to put it in.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # the specification of these folders tells to ignore relative ones
    if not base.is_absolute():
        try:
            base = Path("~/.cache").expanduser()
        except RuntimeError as error:
            raise ConfigError(
                "protrain_cache_dir is not set and this user has no home folder: set "
                "it to a folder that can be written"
            ) from error
    return base / "axolotl-protrain"


def cached(
    folder: str | Path | None,
    key: Mapping[str, JSON],
    make: Callable[[], Kept],
    kind: type[Kept],
) -> Kept:
    """Return what `make` returned for this key, now or at an earlier time.

    Figures of a CPU that others kept busy meanwhile are for now only: threads that wait
    for each other have taken a hundred times as long.

    Args:
        folder: Holds the file of this machine; None for `default_folder`.
        key: Names everything that the value depends on.
        make: Measures it.
        kind: A dataclass of str, bool, int and float.

    Raises:
        ConfigError: The folder cannot be made or written.
    """
    value = recall(folder, key, kind)
    if value is None:
        # before the time for measuring is spent
        parent = _file(folder).parent
        with _writing(parent):
            parent.mkdir(parents=True, exist_ok=True)
        began, worked = time.perf_counter(), time.process_time()
        value = make()
        wall, work = time.perf_counter() - began, time.process_time() - worked
        if key.get("device") != "cpu" or work > UNDISTURBED * wall - NOTHING_S:
            keep(folder, key, value)
    return value


def recall(
    folder: str | Path | None, key: Mapping[str, JSON], kind: type[Kept]
) -> Kept | None:
    """Return the value kept under this key, or None."""
    value = _read(_file(folder)).get(_name(key))
    return None if value is None else kind(**value)


def keep(folder: str | Path | None, key: Mapping[str, JSON], value: Any) -> None:
    """Keep a dataclass under this key.

    Raises:
        ConfigError: As for `cached`.
    """
    file = _file(folder)
    measured = {**_read(file), _name(key): dataclasses.asdict(value)}
    content = {"hash": _hash(measured), "measured": measured}
    with _writing(file.parent):
        _write(file, json.dumps(content, indent=1, allow_nan=False))


def _file(folder: str | Path | None) -> Path:
    folder = default_folder() if folder is None else Path(folder).expanduser()
    return folder / f"{re.sub(r'[^A-Za-z0-9]+', '-', cpu_name()).strip('-')}.json"


def _name(key: Mapping[str, JSON]) -> str:
    return f"{key.get('measures')} {_hash(key)}"


def _hash(content: Mapping[str, JSON]) -> str:
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _read(file: Path) -> dict[str, Any]:
    """Return what was measured; nothing, with a warning, of a file that is not as `keep`
    wrote it."""
    try:
        content = json.loads(file.read_text("utf-8"))
        if content["hash"] == _hash(content["measured"]):
            return dict(content["measured"])
        fault = "it is not as it was written"
    except (FileNotFoundError, NotADirectoryError):
        return {}
    # the last is how json ends with what is nested deeply
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        fault = str(error) or type(error).__name__
    warnings.warn(f"{file} is damaged and measured again: {fault}", stacklevel=2)
    return {}


@dataclasses.dataclass(frozen=True)
class PeakSeen:
    """Device bytes that a run took beyond its trace, or half of those it took less, for
    another plan may need them; and the date."""

    beyond_bytes: int
    date: str


def measurement_key(
    measures: str, torch_device: torch.device, versions: Mapping[str, str], **of: JSON
) -> dict[str, JSON]:
    """Name what changes any measurement on this machine, versions of libraries by name,
    and what else this one depends on."""
    return {
        "measures": measures,
        "format": FORMAT,
        "device": str(torch_device.type),
        "device_name": device_name(torch_device),
        "device_total_bytes": (
            torch.cuda.get_device_properties(torch_device).total_memory
            if torch_device.type == "cuda"
            else psutil.virtual_memory().total
        ),
        "cpu": cpu_name(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "num_local_ranks": os.environ.get("LOCAL_WORLD_SIZE", "1"),
        "num_threads": torch.get_num_threads(),
        "fp32_matmul": torch.backends.cuda.matmul.fp32_precision,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "versions": dict(versions),
        **of,
    }


def cached_hardware(
    folder: str | Path | None,
    torch_device: torch.device,
    host_bytes: int,
    device_bytes: int,
    versions: Mapping[str, str],
    together: int = 1,
    weight_dtype: torch.dtype = torch.bfloat16,
) -> Hardware:
    """`measure_hardware`, or its rates from the cache with the memory of now, while
    `together` processes share the machine's links.

    Raises:
        ConfigError: As for `cached`.
    """
    key = measurement_key(
        "hardware",
        torch_device,
        versions,
        together=together,
        matmul=MATMUL_SIZES[torch_device.type],
        weight_dtype=str(weight_dtype),
    )
    measure = partial(measure_hardware, torch_device, weight_dtype=weight_dtype)
    return dataclasses.replace(
        cached(folder, key, measure, Hardware),
        host_bytes=host_bytes,
        device_bytes=device_bytes,
        unseen_bytes=measured_unseen_bytes(torch_device, device_bytes),
        one_memory=has_one_memory(torch_device),
    )


def _write(file: Path, content: str) -> None:
    # not tempfile: its files are unreadable to others who share the folder
    temporary = file.with_name(f"{file.stem}-{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_text(content, "utf-8")
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"protrain_cache_dir: {folder} cannot be written ({error.strerror}); set "
            "protrain_cache_dir to a folder that can"
        ) from error
