"""Files in which weights wait that are quantised while a base loads, for this start and for
later ones."""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from .core.engine.chunk_files import (
    QUANTISED,
    remove,
    remove_unfinished,
    unfinished,
    write,
)
from .core.errors import DiskError
from .core.host import SPILLED
from .core.layout import aligned
from .core.layout.shards import PAGE_BYTES


class SpillFile:
    """Keeps host tensors in a file while a model is loaded that the host has no room for.

    The file has no name, so nothing is left of it in whatever way the process ends.

    Raises:
        DiskError: The folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = NamedTemporaryFile(
                dir=folder, prefix=SPILLED, delete=False, buffering=0
            )
            os.unlink(self._file.name)
        except OSError as error:
            raise _unwritable(self._folder, error) from error

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the tensor as pages of the file."""
        data = tensor.contiguous().view(-1).view(torch.uint8)
        if not len(data):
            return tensor
        try:
            start = _append(self._file, data)
            return _pages(self._file, start, tensor.dtype, tensor.shape)
        except OSError as error:
            raise _unwritable(self._folder, error) from error


def _unwritable(folder: Path, error: OSError) -> DiskError:
    return DiskError(
        f"protrain_disk_dir: {folder} cannot be written ({error.strerror}). Give a folder "
        "on a disk with room for twice the frozen weights."
    )


def _append(file: IO[bytes], data: Tensor) -> int:
    """Write bytes from a page on; return where."""
    start = aligned(os.fstat(file.fileno()).st_size, PAGE_BYTES)
    os.truncate(file.fileno(), start)
    file.seek(start)
    write(file, data.numpy().data)
    return start


def _pages(
    file: IO[bytes], start: int, dtype: torch.dtype, shape: Sequence[int]
) -> Tensor:
    nbytes = prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(tuple(shape), dtype=dtype)
    memory = mmap.mmap(file.fileno(), nbytes, flags=mmap.MAP_PRIVATE, offset=start)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


class QuantisedFile:
    """Weights of a base as they were quantised, for this start and for later ones.

    Args:
        folder: Has them, each base in a file of its own; is made where it is missing.
        identity: Of the base and of how it is quantised.

    Attributes:
        is_whole: An earlier start has written it; a damaged one is not, and goes.

    Raises:
        DiskError: The folder cannot be written.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        self._path = folder / f"{identity}{QUANTISED}"
        self._index: dict[str, list[list[Any]]] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            remove_unfinished(folder)
            self.is_whole = self._path.is_file() and self._read_index()
            if self.is_whole:
                now, changed = time.time_ns(), self._path.stat().st_mtime_ns
                os.utime(self._path, ns=(now, changed))
                self._file: IO[bytes] = self._path.open("rb")
            else:
                self._file = unfinished(folder)
        except OSError as error:
            raise _unwritable(self._path.parent, error) from error

    def find(self, name: str) -> list[Tensor] | None:
        """Return the tensors that an earlier start has kept under a name, as pages of the
        file; None if there are none, or no longer as they were written."""
        if not self.is_whole or name not in self._index:
            return None
        found = []
        for start, dtype, shape, digest in self._index[name]:
            kind: torch.dtype = getattr(torch, dtype)
            tensor = _pages(self._file, start, kind, shape)
            if _digest(tensor) != digest:
                # written anew, with what is quantised from here on, at the next start
                remove(self._path)
                return None
            found.append(tensor)
        return found

    def keep(self, name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Write the tensors of a weight; return them as pages of the file.

        Raises:
            DiskError: The disk has no room.
        """
        kept, index = [], []
        for tensor in map(torch.Tensor.contiguous, tensors):
            try:
                start = _append(self._file, tensor.view(-1).view(torch.uint8))
                kept.append(_pages(self._file, start, tensor.dtype, tensor.shape))
            except OSError as error:
                raise _unwritable(self._path.parent, error) from error
            dtype = str(tensor.dtype).removeprefix("torch.")
            index.append([start, dtype, list(tensor.shape), _digest(tensor)])
        self._index[name] = index
        return kept

    def close(self, whole: bool) -> None:
        """Give the file its name if all of the base is in it, or leave none."""
        if not self.is_whole:
            name = Path(self._file.name)
            if whole:
                try:
                    self._publish(name)
                except OSError as error:
                    remove(name)
                    raise _unwritable(self._path.parent, error) from error
            else:
                remove(name)
        self._file.close()

    def _publish(self, name: Path) -> None:
        listed = json.dumps(self._index).encode()
        digest = xxh3_64_hexdigest(listed).encode()
        end = listed + digest + len(listed).to_bytes(8, "little")
        self._file.seek(0, os.SEEK_END)
        write(self._file, memoryview(end))
        os.fsync(self._file.fileno())
        os.replace(name, self._path)

    def _read_index(self) -> bool:
        """Read what is in the file; tell whether that could be."""
        with self._path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - _END_BYTES, 0))
            digest, length = file.read(16), int.from_bytes(file.read(8), "little")
            if not 0 < length <= size - _END_BYTES:
                return False
            file.seek(size - _END_BYTES - length)
            listed = file.read(length)
        if xxh3_64_hexdigest(listed).encode() != digest:
            return False
        self._index = json.loads(listed)
        return bool(self._index)


_END_BYTES = 16 + 8
"""A digest of the index and its length, behind it."""


def _digest(tensor: Tensor) -> str:
    return str(xxh3_64_hexdigest(tensor.view(-1).view(torch.uint8).numpy().data))
