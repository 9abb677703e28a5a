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
from pathlib import Path
from typing import Any, TypeAlias, Union, get_type_hints

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

FORMAT = 2
"""In every key; to be raised when a measurement changes its meaning."""

PLAUSIBLE = (1e-12, 1e18)
"""Any time in seconds and any rate per second lies between these."""

_FREE_MEMORY = ("device_bytes", "host_bytes", "unseen_bytes", "unneeded_bytes")


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
    make: Callable[[], dict[str, Any]],
    kind: type,
    apart: Sequence[str] = (),
) -> dict[str, Any]:
    """What `make` returned for this key, now or at an earlier time.

    A file that is damaged, or that holds anything but such values, is warned about and
    replaced.

    Args:
        folder: None for `default_folder`.
        key: Names everything that the value depends on.
        make: Measures the fields of a `kind`.
        kind: A dataclass of str, bool, int and float. A float without a default is
            `PLAUSIBLE`; one of which 0 is the default may be that too.
        apart: Fields that are not in the value.

    Raises:
        ConfigError: The folder cannot be made or written.
    """
    value = recall(folder, key, kind, apart)
    if value is None:
        # before the time for measuring is spent
        file = _file(folder, key)
        with _writing(file.parent):
            file.parent.mkdir(parents=True, exist_ok=True)
        value = keep(folder, key, make())
    return value


def recall(
    folder: str | Path | None,
    key: Mapping[str, JSON],
    kind: type,
    apart: Sequence[str] = (),
) -> dict[str, Any] | None:
    """What was kept under this key, as for `cached`; None where nothing was."""
    text = json.dumps(key, sort_keys=True, allow_nan=False)
    return _read(_file(folder, key), json.loads(text), kind, apart)


def keep(
    folder: str | Path | None, key: Mapping[str, JSON], value: Mapping[str, Any]
) -> dict[str, Any]:
    """Keep a value under this key; it as a later run reads it: lists for tuples.

    Raises:
        ConfigError: As for `cached`.
    """
    file = _file(folder, key)
    content = json.dumps({"key": key, "value": value}, indent=1, allow_nan=False)
    with _writing(file.parent):
        _write(file, content)
    return json.loads(content)["value"]


def _file(folder: str | Path | None, key: Mapping[str, JSON]) -> Path:
    folder = default_folder() if folder is None else Path(folder)
    text = json.dumps(key, sort_keys=True, allow_nan=False)
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"


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

    def make() -> dict[str, Any]:
        measured = measure_hardware(
            torch_device, host_bytes, device_bytes, weight_dtype=weight_dtype
        )
        values = dataclasses.asdict(measured)
        return {name: values[name] for name in values if name not in _FREE_MEMORY}

    key = measurement_key(
        "hardware",
        torch_device,
        versions,
        together=together,
        matmul=MATMUL_SIZES[torch_device.type],
        weight_dtype=str(weight_dtype),
    )
    return Hardware(
        **cached(folder, key, make, Hardware, _FREE_MEMORY),
        host_bytes=host_bytes,
        device_bytes=device_bytes,
        unseen_bytes=measured_unseen_bytes(torch_device, device_bytes),
    )


def _read(
    file: Path, key: Any, kind: type, apart: Sequence[str]
) -> dict[str, Any] | None:
    """The value stored under this key; None, with a warning if damaged, without."""
    fault = "it does not hold what its name says"
    try:
        content = json.loads(file.read_text("utf-8"))
        if isinstance(content, dict) and content.get("key") == key:
            value = content.get("value")
            _check(value, kind, apart)
            return value
    except (FileNotFoundError, NotADirectoryError):
        return None
    # the last is how json ends with what is nested deeply
    except (OSError, ValueError, RecursionError) as error:
        fault = str(error)
    warnings.warn(f"{file} is damaged and measured again: {fault}", stacklevel=3)
    return None


def _check(value: Any, kind: Any, apart: Sequence[str]) -> None:
    """Raise ValueError unless these are the fields of a `kind`; see `cached`."""
    fields = {f.name: f for f in dataclasses.fields(kind) if f.name not in apart}
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
