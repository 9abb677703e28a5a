"""Triton kernels that unpack weights, with the bits of torch's operators.

An operator reads and writes what is between codes and weight several times, and across
rows where the weight is transposed: an H200 unpacked 46 billion numbers a second that way.
These kernels read codes and write the weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 64
_CODES = 64
"""Rows and bytes of each that one program unpacks."""


@triton.jit
def _unpack_e2m1(
    codes,
    scales,
    pairs,
    out,
    num_rows,
    num_codes,
    num_groups,
    row_step,
    column_step,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    CODES: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    bytes_ = tl.program_id(1) * CODES + tl.arange(0, CODES)[None, :]
    inside = (rows < num_rows) & (bytes_ < num_codes)
    code = tl.load(codes + rows * num_codes + bytes_, inside, 0).to(tl.int32)
    group = rows * num_groups + bytes_ // GROUP
    scale = tl.load(scales + group, inside, 0).to(tl.int32)
    pair = tl.load(pairs + scale * 256 + code, inside, 0)
    # bits of two numbers: no arithmetic that could round
    there = out + rows * row_step + 2 * bytes_ * column_step
    tl.store(there, pair.to(out.dtype.element_ty), inside)
    second = (pair >> BITS).to(out.dtype.element_ty)
    tl.store(there + column_step, second, inside)


@triton.jit
def _unpack_e4m3(
    codes,
    scales,
    out,
    num_rows,
    num_codes,
    num_groups,
    row_step,
    column_step,
    height,
    width,
    IN_BF16: tl.constexpr,
    ROWS: tl.constexpr,
    CODES: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(1) * CODES + tl.arange(0, CODES)[None, :]
    inside = (rows < num_rows) & (columns < num_codes)
    code = tl.load(codes + rows * num_codes + columns, inside, 0).to(tl.int32)
    # by its bits, as cards below 8.9 know no e4m3
    size = code & 127
    normal = ((size >> 3) + 120 << 23) | ((size & 7) << 20)
    value = normal.to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, value)
    value = tl.where(size == 127, float("nan"), value)
    value = tl.where(code > 127, -value, value)
    group = (rows // height) * num_groups + columns // width
    scale = tl.load(scales + group, inside, 0.0)
    number = value * scale
    if IN_BF16:
        # to the nearest, of two as near the even one: Triton's interpreter cuts off
        bits = number.to(tl.int32, bitcast=True)
        number = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    number = number.to(out.dtype.element_ty)
    tl.store(out + rows * row_step + columns * column_step, number, inside)


def unpack_e2m1(codes: Tensor, scales: Tensor, pairs: Tensor, rows: Tensor) -> None:
    """Unpack MXFP4.

    Args:
        codes: uint8, [rows, columns / 2], contiguous.
        scales: uint8, [rows, groups], contiguous.
        pairs: `table_of` the weight's dtype.
        rows: [rows, columns], a view of the weight with any strides.
    """
    size = rows.dtype.itemsize
    bits = rows.view({2: torch.int16, 4: torch.int32}[size])
    _unpack_e2m1[_grid(codes)](
        *(codes, scales, pairs, bits, *codes.shape, scales.shape[1], *rows.stride()),
        GROUP=codes.shape[1] // scales.shape[1],
        BITS=8 * size,
        ROWS=_ROWS,
        CODES=_CODES,
    )


def unpack_e4m3(
    codes: Tensor, scales: Tensor, rows: Tensor, block: tuple[int, int]
) -> None:
    """Unpack FP8.

    Args:
        codes: uint8, [rows, columns], contiguous.
        scales: fp32, [blocks down, blocks across], contiguous.
        rows: [rows, columns], a view of the weight with any strides.
        block: Rows and columns that share a scale.
    """
    is_bf16 = rows.dtype == torch.bfloat16
    out = rows.view(torch.int16) if is_bf16 else rows
    _unpack_e4m3[_grid(codes)](
        *(codes, scales, out, *codes.shape, scales.shape[1], *rows.stride()),
        *block,
        IN_BF16=is_bf16,
        ROWS=_ROWS,
        CODES=_CODES,
    )


def _grid(codes: Tensor) -> tuple[int, int]:
    return triton.cdiv(codes.shape[0], _ROWS), triton.cdiv(codes.shape[1], _CODES)
