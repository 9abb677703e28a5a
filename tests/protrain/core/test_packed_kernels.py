"""Triton kernels that unpack weights, in Triton's interpreter: the bits of the operators."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product

import pytest
import torch
from torch import Tensor

from axolotl.integrations.protrain.core.layout.packed import (
    Encoding,
    Form,
    table_of,
    unpack,
    why_no_kernels,
)

HEIGHT, COLUMNS = 144, 96
"""Of a matrix: neither is a whole number of a kernel's tiles."""
FORMS = (
    Form(Encoding.E2M1, (1, 32)),
    Form(Encoding.E2M1, (1, 32), transposed=True),
    Form(Encoding.E4M3, (128, 64)),
    Form(Encoding.E4M3, (16, 48), transposed=True),
    Form(Encoding.E4M3, (1, 96)),
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def test_kernels_and_operators_unpack_to_the_same_bits() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, __file__], env=environment, check=True)


def by_kernel(form: Form, codes: Tensor, scales: Tensor, rows: Tensor) -> None:
    from axolotl.integrations.protrain.core.layout import packed_kernels as kernels

    if form.encoding is Encoding.E2M1:
        kernels.unpack_e2m1(codes, scales, table_of(rows.dtype), rows)
    else:
        height = form.block[0] if len(scales) > 1 else len(rows)
        kernels.unpack_e4m3(
            codes.view(torch.uint8), scales, rows, (height, form.block[1])
        )


def main() -> None:
    # all codes under all scales
    assert not why_no_kernels(torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for form, dtype in product(FORMS, DTYPES):
        shape = (2, COLUMNS, HEIGHT) if form.transposed else (2 * HEIGHT, COLUMNS)
        wide, blocks = form.stored(shape)
        codes = torch.randint(256, wide, dtype=torch.uint8, generator=generator)
        if form.encoding is Encoding.E2M1:
            scales = torch.randint(256, blocks, dtype=torch.uint8, generator=generator)
        else:
            codes = codes.view(torch.float8_e4m3fn)
            scales = 3 * torch.rand(blocks, generator=generator)
        own, wanted = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        for first, stop in form.pieces(shape, len(codes), 70 * COLUMNS):
            piece, factors = codes[first:stop], scales[form.scale_rows(first, stop)]
            unpack(form, piece, factors, wanted, first)
            matrix, start = divmod(first, HEIGHT)
            rows = own[matrix].t()[start:] if form.transposed else own[first:]
            by_kernel(form, piece, factors, rows[: stop - first])
        same = torch.equal(own.nan_to_num(), wanted.nan_to_num())
        assert same, (form, dtype)


if __name__ == "__main__":
    main()
