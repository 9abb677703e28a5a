"""The ways of packed chunks from host memory into their slots, piece by piece.

# Note [Packed chunks]

A frozen weight that is published in few bits has a storage form, which the host pool
keeps and the link carries, and values, which its slot holds and the model reads. Only
pool and transport know: `Chunk.in_pool` is the chunk as it lies there, codes and then
scales of each such tensor, and `Move`s say how it becomes the chunk of the slot.

* Before and after training the parameter is a `Packed`, whose parts are pages of the
  base's files, or of the pool: who reads it gets values, and nobody can write it. While a
  session is open it is a plain parameter, a view of its slot; `full_params`, a state and
  a copy of the model show a `Packed` over the pool, which takes no room until it is read.
* The bytes stay on the host wherever the plan has the weight: values cannot be packed.
* A piece is copied into one of two buffers on the fetch stream and unpacked from there on
  that of the gathers, so that the link goes on meanwhile. A buffer waits for its last
  unpacking, a slot for the last arrival. Shards are gathered whole before.
* Values are those of transformers' own unpacking: a table of all pairs of codes under all
  scales, or a product in fp32 and one rounding. No device and no piece makes a difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..types import Chunk, Encoding, Form, TensorSpec
from .chunks import aligned
from .packed import room_bytes, stored_specs, table_of, unpack
from .pieces import PIECE_NUMEL
from .shards import padded_bytes


@dataclass(frozen=True)
class Move:
    """Bytes of a stored chunk that become a tensor of a slot, or some rows of one.

    Attributes:
        spec: The tensor.
        stored: Its one stored tensor, or its codes and scales.
        sources: Where these bytes, or those of some rows, are in the stored chunk.
        first: Number of the first of the rows.
    """

    spec: TensorSpec
    stored: tuple[TensorSpec, ...]
    sources: tuple[slice, ...]
    first: int = 0

    @property
    def room_bytes(self) -> int:
        """Room on the device while they are unpacked."""
        if self.spec.form is None:
            return 0
        codes = self.sources[0].stop - self.sources[0].start
        numel = codes // self.stored[0].shape[1] * self.stored_columns
        return room_bytes(self.spec.form, numel, self.spec.dtype)

    @property
    def stored_columns(self) -> int:
        """Numbers of a row."""
        assert self.spec.form is not None
        return self.spec.form.matrix(self.spec.shape)[1]

    @property
    def staged(self) -> tuple[slice, ...]:
        """Places of the sources side by side in a buffer, at aligned addresses."""
        places, end = [], 0
        for source in self.sources:
            stop = end + source.stop - source.start
            places.append(slice(end, stop))
            end = aligned(stop)
        return tuple(places)

    def target(self, slot: Tensor) -> Tensor:
        """The bytes of the whole tensor in its slot."""
        return slot[self.spec.offset : self.spec.offset + self.spec.nbytes]

    def unpack(
        self,
        sources: Sequence[Tensor],
        slot: Tensor,
        room: Tensor,
        tables: Mapping[torch.dtype, Tensor],
    ) -> None:
        """Unpack rows whose codes and scales are bytes on the device."""
        assert self.spec.form is not None
        codes, scales = (
            source.view(spec.dtype).view(-1, spec.shape[1])
            for source, spec in zip(sources, self.stored, strict=True)
        )
        out = self.target(slot).view(self.spec.dtype).view(self.spec.shape)
        table = tables.get(self.spec.dtype)
        unpack(self.spec.form, codes, scales, out, self.first, room, table)


def moves_of(chunk: Chunk) -> Iterator[Move]:
    """Yield how a chunk comes from host memory into its slot, in the order of its bytes."""
    by_name = {spec.name: spec for spec in chunk.in_pool.tensors}
    for spec in chunk.tensors:
        stored = tuple(by_name[part.name] for part in stored_specs(spec))
        if spec.form is None:
            yield Move(spec, stored, (_bytes_of(stored[0], 0, spec.nbytes),))
            continue
        codes, scales = stored
        for first, stop in spec.form.pieces(spec.shape, codes.shape[0], PIECE_NUMEL):
            rows = spec.form.scale_rows(first, stop)
            own = _rows(codes, first, stop), _rows(scales, rows.start, rows.stop)
            yield Move(spec, stored, own, first)


MOVED_BYTES = {Encoding.E2M1: 15, Encoding.E4M3: 19}
"""Bytes that operators read and write for each number that they unpack."""


def num_pieces(chunk: Chunk) -> int:
    """Count the pieces that are unpacked for each fetch of a chunk."""
    return sum(
        _num_pieces(s.form, s.shape) for s in chunk.tensors if s.form is not None
    )


def _num_pieces(form: Form, shape: tuple[int, ...]) -> int:
    (rows, _), _ = form.stored(shape)
    return sum(1 for _ in form.pieces(shape, rows, PIECE_NUMEL))


def unpacked_numel(chunk: Chunk) -> dict[Encoding, int]:
    """Count the numbers of a chunk that are unpacked for each fetch."""
    found: dict[Encoding, int] = {}
    for spec in chunk.tensors:
        if spec.form is not None:
            kind = spec.form.encoding
            found[kind] = found.get(kind, 0) + spec.numel
    return found


class Unpacking(NamedTuple):
    """Device memory beside the slots for chunks that are packed on the host: buffers for
    what has come, two pieces in turns or all shards of a chunk, room to unpack, and the
    dtypes of which there is a table of numbers."""

    staged_bytes: tuple[int, ...]
    room_bytes: int
    tables: tuple[torch.dtype, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        tables = sum(table_of(dtype).nbytes for dtype in self.tables)
        return sum(self.staged_bytes) + self.room_bytes + tables


def unpacking(chunks: Iterable[Chunk], ranks: int) -> Unpacking:
    """Return what the largest of these chunks, or pieces of them, need."""
    packed = [chunk for chunk in chunks if chunk.stored is not None]
    moves = [m for chunk in packed for m in moves_of(chunk) if m.spec.form is not None]
    room = max((aligned(move.room_bytes) for move in moves), default=0)
    looked_up = {move.spec.dtype for move in moves if _is_e2m1(move.spec)}
    tables = tuple(sorted(looked_up, key=str))
    if ranks > 1:
        every = (padded_bytes(chunk.in_pool, ranks) for chunk in packed)
        return Unpacking((max(every, default=0),), room, tables)
    piece = max((aligned(move.staged[-1].stop) for move in moves), default=0)
    return Unpacking((piece, piece), room, tables)


def _is_e2m1(spec: TensorSpec) -> bool:
    return spec.form is not None and spec.form.encoding is Encoding.E2M1


def _rows(spec: TensorSpec, first: int, stop: int) -> slice:
    each = spec.nbytes // spec.shape[0]
    return _bytes_of(spec, first * each, stop * each)


def _bytes_of(spec: TensorSpec, first: int, stop: int) -> slice:
    return slice(spec.offset + first, spec.offset + stop)
