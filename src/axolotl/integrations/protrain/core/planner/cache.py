"""Measurements kept on disk: one small JSON file for each thing that was measured.

A file's name is the hash of its key, and the key names everything that changes the
figures. Memory that is free changes by the hour and is in neither.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, Union, get_type_hints

import psutil
import torch

from ..errors import ConfigError
from ..types import Hardware
from .hardware import (
    MATMUL_SIZES,
    cpu_name,
    device_name,
    measure_hardware,
    measured_unseen_bytes,
)

JSON: TypeAlias = Union[
    None, bool, int, float, str, Sequence["JSON"], Mapping[str, "JSON"]
]

FORMAT = 3
"""In every key; to be raised when a measurement changes its meaning."""

PLAUSIBLE = (1e-12, 1e18)
"""Any time in seconds and any rate per second lies between these."""

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
    """What `make` returned for this key, now or at an earlier time.

    A file that is damaged, or that holds anything but such values, is warned about and
    replaced.

    Args:
        folder: None for `default_folder`.
        key: Names everything that the value depends on.
        make: Measures it.
        kind: A dataclass of str, bool, int and float. A float without a default is
            `PLAUSIBLE`; one of which 0 is the default may be that too.

    Raises:
        ConfigError: The folder cannot be made or written.
    """
    value = recall(folder, key, kind)
    if value is None:
        # before the time for measuring is spent
        parent = _file(folder, key).parent
        with _writing(parent):
            parent.mkdir(parents=True, exist_ok=True)
        value = make()
        keep(folder, key, value)
    return value


def recall(
    folder: str | Path | None, key: Mapping[str, JSON], kind: type[Kept]
) -> Kept | None:
    """The value kept under this key; None, with a warning if damaged, without."""
    file = _file(folder, key)
    fault = "it does not hold what its name says"
    try:
        content = json.loads(file.read_text("utf-8"))
        if isinstance(content, dict) and content.get("key") == json.loads(_text(key)):
            return _checked(content.get("value"), kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    # the last is how json ends with what is nested deeply
    except (OSError, ValueError, RecursionError) as error:
        fault = str(error)
    warnings.warn(f"{file} is damaged and measured again: {fault}", stacklevel=2)
    return None


def keep(folder: str | Path | None, key: Mapping[str, JSON], value: Any) -> None:
    """Keep a dataclass under this key.

    Raises:
        ConfigError: As for `cached`.
    """
    file = _file(folder, key)
    entry = {"key": key, "value": dataclasses.asdict(value)}
    content = json.dumps(entry, indent=1, allow_nan=False)
    with _writing(file.parent):
        _write(file, content)


def _file(folder: str | Path | None, key: Mapping[str, JSON]) -> Path:
    folder = default_folder() if folder is None else Path(folder)
    return folder / f"{hashlib.sha256(_text(key).encode()).hexdigest()}.json"


def _text(key: Mapping[str, JSON]) -> str:
    return json.dumps(key, sort_keys=True, allow_nan=False)


@dataclasses.dataclass(frozen=True)
class PeakSeen:
    """What a run took of the device beyond its trace, or half of what it took less, for
    another plan may need it; and when."""

    beyond_bytes: int
    date: str


def measurement_key(
    measures: str, torch_device: torch.device, versions: Mapping[str, str], **of: JSON
) -> dict[str, JSON]:
    """What changes any measurement on this machine, versions of libraries by name, and
    what else this one depends on."""
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
    )


def _checked(value: Any, kind: type[Kept]) -> Kept:
    """Raise ValueError unless these are the fields of a `kind`; see `cached`."""
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if not isinstance(value, dict) or value.keys() != fields.keys():
        raise ValueError(f"its value has not the fields {', '.join(fields)}")
    types, (least, most) = get_type_hints(kind), PLAUSIBLE
    for name, field in fields.items():
        found = value[name]
        # not isinstance, for which True is 1
        fits = type(found) is types[name]
        if fits and types[name] is float:
            # false for nan too
            fits = least <= found <= most or found == field.default == 0
        if not fits:
            raise ValueError(f"{name} cannot be {found!r:.40}")
    return kind(**value)


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
