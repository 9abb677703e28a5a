"""Plans of files of tensors: facts about each, and from them a frozen plan."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

PIECE_BYTES = 4 << 20
"""Read, written and kept at once."""

# in the order of safetensors' own table, by which its files are sorted
_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
_ORDER = {dtype: -number for number, dtype in enumerate(_DTYPES)}


class TensorSpec(NamedTuple):
    """A tensor as a file has it: under which key, and what it looks like."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Piece(NamedTuple):
    """Bytes `start` to `end` of the tensor `key`, which lie at `offset` in its file."""

    key: Any
    start: int
    end: int
    offset: int


@dataclass(frozen=True)
class FilePlan:
    """A file that is to be written.

    Attributes:
        header: What stands before the tensors.
        pieces: The tensors, in the order of the file.
        nbytes: Its length.
    """

    header: bytes
    pieces: tuple[Piece, ...]
    nbytes: int


def spec_of(key: str, tensor: Tensor) -> TensorSpec | None:
    """None where it is more than its numbers, or of a dtype that no file knows."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.dtype not in _DTYPES:
        return None
    if tensor.layout != torch.strided:
        return None
    return TensorSpec(key, tensor.dtype, tuple(tensor.shape))


def plan_safetensors(
    specs: Sequence[TensorSpec], metadata: Mapping[str, str]
) -> FilePlan:
    """The file that safetensors writes, byte for byte (format 0.3 to 0.8)."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    ordered = sorted(specs, key=lambda spec: (_ORDER[spec.dtype], spec.key.encode()))
    offset = 0
    for spec in ordered:
        header[spec.key] = {
            "dtype": _DTYPES[spec.dtype],
            "shape": spec.shape,
            "data_offsets": (offset, offset + spec.nbytes),
        }
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    begin = len(text).to_bytes(8, "little") + text
    places, nbytes = [], len(begin)
    for spec in ordered:
        places.append((spec.key, spec.nbytes, nbytes))
        nbytes += spec.nbytes
    return FilePlan(begin, tuple(pieces(places)), nbytes)


def pieces(places: Sequence[tuple[Any, int, int]]) -> list[Piece]:
    """Tensors, each with its bytes and its offset in the file, cut to `PIECE_BYTES`."""
    return [
        Piece(key, start, min(start + PIECE_BYTES, nbytes), offset + start)
        for key, nbytes, offset in places
        for start in range(0, nbytes, PIECE_BYTES)
    ]
