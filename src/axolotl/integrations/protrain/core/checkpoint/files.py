"""Writes files by their plans, several pieces at once; knows nothing of models."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from .plans import FilePlan

_WRITERS = 4
"""Threads; the system's write lets go of Python."""


def write_file(path: Path, plan: FilePlan, tensors: Mapping[str, Tensor]) -> None:
    """Write a file: at any time one tensor that is not in one piece of host memory is
    brought there.

    Raises:
        OSError: It cannot be written.
    """
    descriptor = create(path, plan)
    under_way: deque[Future[None]] = deque()
    try:
        with ThreadPoolExecutor(_WRITERS) as pool:
            for key, pieces in groupby(plan.pieces, lambda piece: piece.key):
                source = bytes_of(tensors[key])
                for piece in pieces:
                    part = source[piece.start : piece.end]
                    under_way.append(
                        pool.submit(write_at, descriptor, part, piece.offset)
                    )
                while len(under_way) > 2 * _WRITERS:
                    under_way.popleft().result()
                if source.data_ptr() != tensors[key].data_ptr():
                    while under_way:
                        under_way.popleft().result()
            while under_way:
                under_way.popleft().result()
    finally:
        os.close(descriptor)


def create(path: Path, plan: FilePlan) -> int:
    """A file with its header and its length; its descriptor."""
    descriptor = os.open(
        path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666
    )
    try:
        os.ftruncate(descriptor, plan.nbytes)
        write_at(descriptor, plan.header, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def bytes_of(tensor: Tensor) -> Tensor:
    """All of a tensor in host memory, uint8: itself where it lies there in one piece."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def write_at(descriptor: int, part: Tensor | bytes, offset: int) -> None:
    """Write bytes, all of them, at a place of a file."""
    left = memoryview(part if isinstance(part, bytes) else part.numpy().data)
    while left:
        written = os.pwrite(descriptor, left, offset)
        left, offset = left[written:], offset + written
