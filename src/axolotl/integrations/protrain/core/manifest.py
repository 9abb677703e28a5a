"""The list of a checkpoint, written into it: sizes, and a hash of each tensor.

Hashes are of what is in the files, read back before they are flushed: the one way for
what several ranks, torch and transformers write. XXH3 with 128 bits finds damage; against
somebody who wants to deceive a list in the same folder would not help. But a list may be
anybody's: reading one opens regular files inside its folder, and nothing else.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Collection, Iterator
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Annotated, BinaryIO, Literal

import xxhash
from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    ValidationError,
    model_validator,
)

MANIFEST = "protrain.json"
OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"
_PIECE_BYTES = 4 << 20
_WEIGHTS = (".safetensors", ".bin")
_LONGEST_BYTES = 256 << 20
"""The largest list that is read; a tensor takes about 100 bytes."""


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or str(path) != name or "\0" in name:
        raise ValueError("is not the name of a file in the folder")
    return name


_Name = Annotated[str, AfterValidator(_inside)]
_Offset = Annotated[int, Field(ge=0, lt=1 << 63)]
_Part = tuple[_Offset, _Offset, Annotated[str, Field(pattern="^[0-9a-f]{32}$")]]


class _File(BaseModel, strict=True):
    """The parts of a file, by name, one after the other: begin, end and hash."""

    bytes: _Offset
    parts: dict[str, _Part]

    @model_validator(mode="after")
    def _is_covered(self) -> _File:
        at = 0
        for begin, end, _ in sorted(self.parts.values()):
            if begin != at or end < begin:
                raise ValueError(f"has no part that begins at {at}")
            at = end
        if at != self.bytes:
            raise ValueError(f"has parts of {at} bytes and {self.bytes} in all")
        return self


class _Listed(BaseModel, strict=True):
    """`absent` is what the save was meant to have and has not; older lists say nothing."""

    hash: Literal["xxh3_128"]
    files: dict[_Name, _File]
    absent: list[_Name] | None = None

    @property
    def not_saved(self) -> list[str]:
        """Files without which it is not the checkpoint that was meant."""
        if self.absent is not None:
            return self.absent
        # which only a save of the optimizer's state has
        is_full = any(fnmatch(name, "rng_state*.pth") for name in self.files)
        return [n for n in (OPTIMIZER, SCHEDULER) if is_full and n not in self.files]


def checkpoints(run_dir: Path) -> list[Path]:
    """List the checkpoints of a run, the newest first, whole or not."""
    found = (p for p in run_dir.glob("checkpoint-*") if p.name[11:].isdecimal())
    return sorted(found, key=lambda path: int(path.name[11:]), reverse=True)


def write_manifest(folder: Path, meant: Collection[str] = ()) -> None:
    """List every file of a folder: its bytes, and of each part where it begins and ends
    and its hash. Parts are the header and the tensors of safetensors; others are one.

    Args:
        folder: All of the checkpoint.
        meant: Names of files that have to be in a whole one.

    Raises:
        OSError: The disk is full.
    """
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb", 0) as file:
                parts = {
                    name: [begin, end, _hash(file, begin, end)]
                    for name, begin, end in _parts(path, file)
                }
            name = str(path.relative_to(folder))
            files[name] = {"bytes": path.stat().st_size, "parts": parts}
    absent = sorted({*meant} - files.keys())
    listed = {"hash": "xxh3_128", "files": files, "absent": absent}
    (folder / MANIFEST).write_text(json.dumps(listed))


def size_faults(folder: Path, allowed: Collection[str] = ()) -> Iterator[str]:
    """Name what is not there, unless it is `allowed` not to be, or has another length;
    nothing without a list.

    Raises:
        OSError, ValueError: The list cannot be read, or is none.
    """
    listed = _read(folder)
    for name, about in listed.files.items() if listed else ():
        if name not in allowed or os.path.lexists(folder / name):
            yield from _faults(folder, name, about, reads=False)


def differences(folder: Path) -> list[str] | None:
    """List what is missing, differs or is not listed in a checkpoint by file and
    tensor, from its bytes; None without a list."""
    try:
        listed = _read(folder)
    except (OSError, ValueError) as error:
        return [f"{MANIFEST} is truncated or damaged ({error})"]
    if listed is None:
        return None
    found = [f"incomplete: {_shown(name)} was not saved" for name in listed.not_saved]
    if not any(PurePosixPath(n).suffix in _WEIGHTS for n in listed.files):
        found.append(f"incomplete: {MANIFEST} lists no weights")
    for name, about in listed.files.items():
        found += _faults(folder, name, about, reads=True)
    others = sorted(_names(folder) - {MANIFEST, *listed.files})
    return found + [f"{_shown(name)} is not in {MANIFEST}" for name in others]


def _faults(folder: Path, name: str, about: _File, reads: bool) -> Iterator[str]:
    shown = _shown(name)
    try:
        with _opened(folder, name) as file:
            nbytes = os.fstat(file.fileno()).st_size
            if nbytes != about.bytes:
                yield (
                    f"{shown} has {nbytes:,} bytes, not the {about.bytes:,} of "
                    f"{MANIFEST} (if you have changed it, remove that list)"
                )
            for part, (begin, end, hashed) in about.parts.items() if reads else ():
                if _hash(file, begin, end) != hashed:
                    yield f"{shown}: {_shown(part) or 'its bytes'} differs"
    except FileNotFoundError:
        yield f"{shown} is missing"
    except (OSError, ValueError) as error:
        yield f"{shown} cannot be read ({getattr(error, 'strerror', None) or error})"


def _read(folder: Path) -> _Listed | None:
    try:
        with _opened(folder, MANIFEST) as file:
            nbytes = os.fstat(file.fileno()).st_size
            if nbytes > _LONGEST_BYTES:
                raise ValueError(f"it has {nbytes:,} bytes")
            return _Listed.model_validate_json(file.read(nbytes))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = "/".join(map(str, first["loc"]))[:200]
        at = f"{_shown(where)}: " if where else ""
        raise ValueError(f"{at}{first['msg']}") from error


def _opened(folder: Path, name: str) -> BinaryIO:
    """A regular file of a folder, not buffered; links may not lead out of it."""
    root = os.path.realpath(folder)
    path = os.path.realpath(os.path.join(root, name), strict=True)
    is_inside = os.path.commonpath([root, path]) == root
    if not is_inside or not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("it is no regular file of this folder")
    # were it exchanged for a pipe just now, this would not wait
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", 0)


def _names(folder: Path) -> set[str]:
    """All but folders, and what is hidden, as tools leave it that copy checkpoints."""
    found = set()
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name[0] != "."]
        links = (name for name in folders if os.path.islink(os.path.join(root, name)))
        paths = (os.path.join(root, x) for x in (*files, *links) if x[0] != ".")
        found |= {os.path.relpath(path, folder) for path in paths}
    return found


def _shown(name: str) -> str:
    """On one line, without what steers a terminal: a name may be anyone's."""
    return name if name.isprintable() else ascii(name)


def _parts(path: Path, file: BinaryIO) -> Iterator[tuple[str, int, int]]:
    """Names, beginnings and ends of a file's parts."""
    if path.suffix != ".safetensors":
        yield "", 0, path.stat().st_size
        return
    begin = 8 + int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(begin - 8))
    yield "header", 0, begin
    header.pop("__metadata__", None)
    for key, tensor in header.items():
        first, end = tensor["data_offsets"]
        yield key, begin + first, begin + end


def _hash(file: BinaryIO, begin: int, end: int) -> str:
    hashed, buffer = xxhash.xxh3_128(), memoryview(bytearray(_PIECE_BYTES))
    file.seek(begin)
    while begin < end:
        count = file.readinto(buffer[: end - begin])  # type: ignore[attr-defined]
        if not count:
            break
        hashed.update(buffer[:count])
        begin += count
    return hashed.hexdigest()
