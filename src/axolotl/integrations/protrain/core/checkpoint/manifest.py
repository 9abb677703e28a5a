"""What a checkpoint consists of, written beside it: sizes, and a hash of each tensor.

Hashes are of what is in the files, read back before they are flushed: the one way for
what several ranks, torch and transformers write. XXH3 with 128 bits finds damage; against
somebody who wants to deceive a list in the same folder would not help.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from ..errors import FOREIGN_ERRORS
from .plans import PIECE_BYTES

MANIFEST = "protrain.json"
_HASH = "xxh3_128"


def write_manifest(folder: Path) -> None:
    """List every file of a folder: its bytes, and of each part where it begins and ends
    and its hash. Parts are the header and the tensors of safetensors; others are one.

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
    (folder / MANIFEST).write_text(json.dumps({"hash": _HASH, "files": files}))


def size_faults(folder: Path) -> Iterator[str]:
    """Which files are not there or have another length; none without a manifest."""
    for name, listed in (_files(folder) or {}).items():
        path = folder / name
        if not path.is_file():
            yield f"{name} is missing"
        elif path.stat().st_size != listed["bytes"]:
            yield (
                f"{name} has {path.stat().st_size:,} bytes, not the {listed['bytes']:,} "
                f"of {MANIFEST} (if you have changed it, remove that list)"
            )


def differences(folder: Path) -> list[str] | None:
    """What is missing or differs in a checkpoint by file and tensor, from its bytes; None
    without a manifest."""
    try:
        files = _files(folder)
        if files is None:
            return None
        found = [*size_faults(folder)]
        for name, listed in files.items():
            if (folder / name).is_file():
                found += _part_faults(folder / name, name, listed["parts"])
    except FOREIGN_ERRORS as error:
        return [f"{MANIFEST} is truncated or damaged ({error})"]
    return found


def _part_faults(
    path: Path, name: str, parts: Mapping[str, tuple[int, int, str]]
) -> Iterator[str]:
    try:
        with path.open("rb", 0) as file:
            for part, (begin, end, hashed) in parts.items():
                if _hash(file, begin, end) != hashed:
                    yield f"{name}: {part or 'its bytes'} differs"
    except OSError as error:
        yield f"{name} cannot be read ({error})"


def _files(folder: Path) -> Mapping[str, Any] | None:
    try:
        return json.loads((folder / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        return None


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
    hashed, buffer = xxhash.xxh3_128(), memoryview(bytearray(PIECE_BYTES))
    file.seek(begin)
    while begin < end:
        count = file.readinto(buffer[: end - begin])  # type: ignore[attr-defined]
        if not count:
            break
        hashed.update(buffer[:count])
        begin += count
    return hashed.hexdigest()
