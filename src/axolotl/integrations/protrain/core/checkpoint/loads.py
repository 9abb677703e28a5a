"""Weights that are still pages of their files are read to where they belong.

# Note [Where a weight lies]

A base is mapped, not read, when it loads: until somebody looks, a weight is a file, an
offset and a length. The kernel knows which (/proc/self/maps), by whatever keys and slices
a library came to it, and knows the pages that somebody has written since, which are the
file's no longer (/proc/self/pagemap). So the plan is made from the tensors as they are,
and several threads read what it names straight to its place, in the order of the disk,
where a copy would wait for one page after the other. What a library has made on the way,
fused, cast or quantised weights, is copied, and so is everything where the system tells
less.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..host import MappedFile, file_of, mapped_files
from .files import bytes_of
from .plans import Piece, pieces

_READERS = 4
"""Threads; the system's read and torch's copy let go of Python."""


def plan_load(tensors: Sequence[Tensor]) -> list[tuple[str, Piece]]:
    """What to read instead of copying host tensors: of files pieces of tensors, by number,
    in the order of the disk.

    A tensor is read whole or, where it is not what a file has, not named at all.
    """
    reads: list[tuple[str, Piece]] = []
    files = mapped_files()
    with ExitStack() as opened:
        pages = None
        with suppress(OSError):
            pages = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, pages)
        known: dict[str, bool] = {}
        for number, tensor in enumerate(tensors):
            is_plain = tensor.is_contiguous() and not tensor.is_neg()
            file = file_of(tensor, files) if is_plain else None
            if file is None or tensor.data_ptr() + tensor.nbytes > file.end:
                continue
            if file.path not in known:
                known[file.path] = _is_there(file)
            if not known[file.path] or _is_written(tensor, pages):
                continue
            offset = file.offset + tensor.data_ptr() - file.first
            own = pieces([(number, tensor.nbytes, offset)])
            reads += [(file.path, piece) for piece in own]
    return sorted(reads, key=lambda read: (read[0], read[1].offset))


def load(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Fill tensors of host memory: (target, source) of one dtype and shape each.

    Raises:
        CheckpointError: A file ends before a weight does.
        OSError: One cannot be read.
    """
    reads = plan_load([source for _, source in pairs])
    read = {piece.key for _, piece in reads}
    with ExitStack() as opened:
        files: dict[str, int] = {}
        for path in dict.fromkeys(path for path, _ in reads):
            files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, files[path])
        pool = opened.enter_context(ThreadPoolExecutor(_READERS))
        memory = {number: bytes_of(pairs[number][0]) for number in read}
        under_way: list[Future[Any]] = [
            pool.submit(
                _read_at,
                files[path],
                memory[piece.key][piece.start : piece.end],
                path,
                piece.offset,
            )
            for path, piece in reads
        ]
        # by threads too: who touches a page first waits for the system to clear it
        under_way += [
            pool.submit(target.copy_, source.detach())
            for number, (target, source) in enumerate(pairs)
            if number not in read
        ]
        for future in under_way:
            future.result()


def _read_at(descriptor: int, target: Tensor, path: str, offset: int) -> None:
    left = memoryview(target.numpy().data)
    while left:
        count = os.preadv(descriptor, [left], offset)
        if not count:
            raise CheckpointError(
                f"{path} ends at byte {offset}, before the weights that it had "
                "when they were loaded. Restore the file and start again."
            )
        left, offset = left[count:], offset + count


def _is_there(file: MappedFile) -> bool:
    """Whether the file's name is still that of what is mapped, and may be read."""
    return (
        os.access(file.path, os.R_OK)
        and os.path.isfile(file.path)
        and os.stat(file.path).st_ino == file.inode
    )


def _is_written(tensor: Tensor, pages: int | None) -> bool:
    """Whether a page of it may be this process's own, and not the file's
    (Documentation/admin-guide/mm/pagemap.rst of Linux)."""
    first = tensor.data_ptr() // mmap.PAGESIZE
    count = -(-(tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE) - first
    found = b"" if pages is None else os.pread(pages, 8 * count, 8 * first)
    if len(found) < 8 * count:
        return True
    entries = torch.frombuffer(bytearray(found), dtype=torch.int64)
    is_there, is_swapped, is_of_file = entries < 0, entries >> 62 & 1, entries >> 61 & 1
    return bool((is_swapped.bool() | is_there & ~is_of_file.bool()).any())
