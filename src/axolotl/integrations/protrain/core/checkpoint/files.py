"""Writes files by their plans, several pieces at once; knows nothing of models."""

from __future__ import annotations

import io
import os
import pickle  # nosec B403 - nothing is read
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import save, skip_data

from .plans import FilePlan, Piece, pieces

_WRITERS = 4
"""Threads; the system's write lets go of Python."""


def write_file(path: Path, plan: FilePlan, tensors: Mapping[str, Tensor]) -> None:
    """Write a file: at any time one tensor that is not in one piece of host memory is
    brought there.

    Raises:
        OSError: It cannot be written.
    """
    descriptor = create(path, plan)
    try:
        write_pieces(descriptor, plan.pieces, tensors)
    finally:
        os.close(descriptor)


def write_pieces(
    descriptor: int, pieces: Iterable[Piece], tensors: Mapping[str, Tensor]
) -> None:
    """Write pieces of tensors, those of a tensor one after the other, to an open file."""
    under_way: deque[Future[None]] = deque()
    with ThreadPoolExecutor(_WRITERS) as pool:
        for key, of_tensor in groupby(pieces, lambda piece: piece.key):
            source = bytes_of(tensors[key])
            for piece in of_tensor:
                part = source[piece.start : piece.end]
                under_way.append(pool.submit(write_at, descriptor, part, piece.offset))
            while len(under_way) > 2 * _WRITERS:
                under_way.popleft().result()
            if source.data_ptr() != tensors[key].data_ptr():
                while under_way:
                    under_way.popleft().result()
        while under_way:
            under_way.popleft().result()


def create(path: Path, plan: FilePlan) -> int:
    """A file with its header and its length; its descriptor."""
    descriptor = os.open(
        path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666
    )
    with ExitStack() as on_failure:
        on_failure.callback(os.close, descriptor)
        os.ftruncate(descriptor, plan.nbytes)
        write_at(descriptor, plan.header, 0)
        on_failure.pop_all()
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


def save_without_bytes(value: Any, path: Path) -> tuple[FilePlan, dict[str, Tensor]]:
    """`torch.save`, with room for the bytes of storages that are written later: where, and
    the storages as uint8. Check sums of these records stay 0; `torch.load` reads none."""
    order = _Storages(io.BytesIO())
    order.dump(value)
    with skip_data():
        save(value, path)
    tensors = {
        f"data/{number}": torch.empty(0, dtype=torch.uint8, device=s.device).set_(s)
        for number, s in enumerate(order.found.values())
    }
    file: Any = torch._C.PyTorchFileReader(str(path))
    places = [
        (key, bytes_.numel(), file.get_record_offset(key))
        for key, bytes_ in tensors.items()
    ]
    places.sort(key=itemgetter(2))
    return FilePlan(b"", tuple(pieces(places)), path.stat().st_size), tensors


class _Storages(pickle.Pickler):
    """Finds the storages of a value in the order in which `torch.save` numbers them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.found: dict[int, torch.UntypedStorage] = {}

    def persistent_id(self, value: Any) -> str | None:
        if isinstance(value, torch.TypedStorage):
            value = value._untyped_storage
        if not isinstance(value, torch.UntypedStorage):
            return None
        return str(self.found.setdefault(value._cdata, value)._cdata)
