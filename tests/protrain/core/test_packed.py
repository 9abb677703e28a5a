"""Packed weights: the bits of transformers' own unpacking, however they are cut and joined."""

from __future__ import annotations

import io
from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, MergeModulelist
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from axolotl.integrations.protrain.core.errors import LayoutError
from axolotl.integrations.protrain.core.layout.packed import (
    Packed,
    form_of,
    from_fp8,
    from_mxfp4,
    stored_bytes,
)

TARGETS = [torch.bfloat16, torch.float16, torch.float32]
E8M0 = torch.float8_e8m0fnu


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def assert_same_bits(own: Tensor, wanted: Tensor) -> None:
    assert (own.shape, own.dtype) == (wanted.shape, wanted.dtype)
    assert torch.equal(bits(own), bits(wanted))


def plain_fp8(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What transformers makes of it while it loads a base with `dequantize`."""
    owner = nn.Module()
    owner.weight = nn.Parameter(torch.empty(0, dtype=dtype))
    read = {"weight$": [codes], "weight_scale_inv": [scales]}
    own = Fp8Dequantize(None).convert(read, full_layer_name="weight", model=owner)
    return own["weight"]


def every_code(rows: int) -> Tensor:
    """All 256 bytes in each row."""
    return torch.arange(256, dtype=torch.uint8).repeat(rows, 1)


@pytest.mark.parametrize("dtype", TARGETS, ids=str)
def test_every_e2m1_number_under_every_scale(dtype: torch.dtype) -> None:
    """Overflow of fp16, subnormals of all three, and NaN of 0 times infinity included."""
    blocks = every_code(2 * 128).view(2, 128, 16, 16)
    scales = torch.arange(256, dtype=torch.uint8).view(2, 128, 1).repeat(1, 1, 16)
    own = from_mxfp4(blocks, scales, dtype)
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    assert own.shape == wanted.shape == (2, 512, 128)
    assert_same_bits(own.unpacked(), wanted)
    assert stored_bytes(own) == blocks.numel() + scales.numel()


FACTORS = torch.tensor(
    [1.0, 2.0**-9, 0.1, 3.3e-5, -7.7, 2.0**-140, 1e38, 448.0, 0.0, 1e-3, 2e-39, 65504.0]
)


@pytest.mark.parametrize("dtype", TARGETS, ids=str)
def test_every_e4m3_code_under_many_scales(dtype: torch.dtype) -> None:
    """A scale for each row of all codes; its NaN codes and subnormals included."""
    codes = every_code(len(FACTORS)).view(torch.float8_e4m3fn)
    scales = FACTORS[:, None]
    own = from_fp8(codes, scales, dtype).unpacked()
    assert_same_bits(own, plain_fp8(codes, scales, dtype))


@pytest.mark.parametrize(
    "grid", [(3, 2), (384, 1), (1, 1), (384, 2), (1, 256)], ids=str
)
@pytest.mark.parametrize("dtype", TARGETS, ids=str)
def test_blocks_of_any_size(grid: tuple[int, int], dtype: torch.dtype) -> None:
    """128 by 128 as published, a channel, the whole, and what lies between."""
    torch.manual_seed(0)
    codes = torch.randint(256, (384, 256), dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.rand(grid) / 300
    assert_same_bits(
        from_fp8(codes, scales, dtype).unpacked(), plain_fp8(codes, scales, dtype)
    )


@pytest.mark.parametrize(
    "kind", [torch.float32, torch.bfloat16, E8M0, torch.uint8], ids=str
)
def test_scales_of_any_kind(kind: torch.dtype) -> None:
    """DeepSeek's are fp32, others bf16; powers of two come as e8m0 or as its bytes."""
    codes = every_code(256).view(torch.float8_e4m3fn)
    exponents = torch.arange(256, dtype=torch.uint8)[:, None]
    scales = exponents if kind == torch.uint8 else exponents.view(E8M0).to(kind)
    own = from_fp8(codes, scales, torch.bfloat16).unpacked()
    assert_same_bits(own, plain_fp8(codes, scales, torch.bfloat16))


@pytest.mark.parametrize("scale", [torch.tensor(0.3), torch.tensor([0.3])])
def test_one_scale_need_be_no_matrix(scale: Tensor) -> None:
    codes = every_code(2).view(torch.float8_e4m3fn)
    own = from_fp8(codes, scale, torch.bfloat16).unpacked()
    assert_same_bits(own, plain_fp8(codes, scale, torch.bfloat16))


def test_scales_of_unequal_blocks_are_refused() -> None:
    codes = every_code(3).view(torch.float8_e4m3fn)
    with pytest.raises(LayoutError, match="3 by 256 numbers are not"):
        from_fp8(codes, torch.ones(2, 1), torch.bfloat16)


@pytest.mark.parametrize("size", [(576, 256), (192, 64), (130, 200)], ids=str)
@given(numel=st.integers(1, 60000))
def test_blocks_may_be_cut_off(size: tuple[int, int], numel: int) -> None:
    """DeepSeek-V3 has 576 rows in blocks of 128, which transformers refuses; of 192 rows
    it would take 96 for a block, and so the second factor for rows of the first."""
    torch.manual_seed(0)
    codes = torch.randint(256, size, dtype=torch.uint8).view(torch.float8_e4m3fn)
    grid = [-(-n // 128) for n in size]
    scales = torch.rand(grid) / 300
    packed = from_fp8(codes, scales, torch.bfloat16, (128, 128))
    row, column = (torch.arange(n) // 128 for n in size)
    wanted = (codes.float() * scales[row][:, column]).bfloat16()
    assert_same_bits(packed.unpack_into(torch.empty_like(wanted), numel), wanted)


def some_fp8(rows: int, columns: int, block: tuple[int, int], seed: int = 0) -> Packed:
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (rows, columns), dtype=torch.uint8, generator=draw)
    scales = torch.rand(rows // block[0], columns // block[1], generator=draw)
    return from_fp8(codes.view(torch.float8_e4m3fn), scales, torch.bfloat16)


def some_mxfp4(experts: int, rows: int, groups: int) -> Packed:
    blocks = torch.randint(256, (experts, rows, groups, 16), dtype=torch.uint8)
    scales = torch.randint(110, 130, (experts, rows, groups), dtype=torch.uint8)
    return from_mxfp4(blocks, scales, torch.bfloat16)


@given(
    numel=st.integers(1, 700),
    block=st.sampled_from([(1, 1), (1, 32), (4, 4), (12, 32), (6, 8)]),
    joined=st.booleans(),
)
def test_fp8_has_the_same_bits_in_pieces_of_any_size(
    numel: int, block: tuple[int, int], joined: bool
) -> None:
    packed = some_fp8(12, 32, block)
    if joined:
        packed = torch.cat([packed, some_fp8(24, 32, block, 1)])
        assert isinstance(packed, Packed)
    out = torch.full(packed.shape, float("nan"), dtype=packed.dtype)
    assert_same_bits(packed.unpack_into(out, numel), packed.unpacked())


@given(numel=st.integers(1, 700))
def test_mxfp4_has_the_same_bits_in_pieces_of_any_size(numel: int) -> None:
    packed = some_mxfp4(3, 5, 2)
    out = torch.full(packed.shape, float("nan"), dtype=packed.dtype)
    assert_same_bits(packed.unpack_into(out, numel), packed.unpacked())


@given(
    numel=st.integers(1, 700),
    height=st.integers(1, 40),
    block=st.sampled_from([1, 5, 8]),
)
def test_a_piece_is_small_and_its_blocks_are_whole(
    numel: int, height: int, block: int
) -> None:
    rows, columns = height * block, 16
    form = some_fp8(rows, columns, (block, 16)).form
    pieces = [*form.pieces((rows, columns), rows, numel)]
    assert [stop for _, stop in pieces] == [*(start for start, _ in pieces[1:]), rows]
    for start, stop in pieces:
        assert (stop - start) * columns <= max(numel, columns)
        whole = not (start % block or stop % block)
        assert whole or start // block == (stop - 1) // block


def test_experts_are_merged_packed_as_transformers_merges_them() -> None:
    """Gate and up of each expert, stacked and then joined: the order of the rows counts."""
    own = {
        f"{name}.weight": [some_fp8(8, 16, (4, 8), seed + e) for e in range(3)]
        for seed, name in ((0, "gate"), (10, "up"))
    }
    plain = {name: [e.unpacked() for e in experts] for name, experts in own.items()}

    def merged(read: dict[str, Any]) -> Tensor:
        patterns, config = {"source_patterns": [*read]}, SimpleNamespace()
        patterns["target_patterns"] = ["gate_up"]
        read = MergeModulelist(dim=0).convert(read, **patterns, config=config)
        return Concatenate(dim=1).convert(read, **patterns, config=config)["gate_up"]

    packed = merged(own)
    assert isinstance(packed, Packed) and packed.shape == (3, 16, 16)
    assert len(packed.parts) == 6
    assert_same_bits(packed.unpacked(), merged(plain))


def cut_off_rows() -> tuple[Tensor, Tensor]:
    codes = torch.randint(256, (6, 8), dtype=torch.uint8)
    return codes.view(torch.float8_e4m3fn), torch.rand(2, 2)


@pytest.mark.parametrize("dim", [1, -1], ids=["columns", "columns from behind"])
def test_what_cannot_stay_packed_is_unpacked(dim: int) -> None:
    one, other = some_fp8(4, 8, (2, 4)), some_fp8(4, 8, (2, 4), 1)
    joined = torch.cat([one, other], dim)
    assert not isinstance(joined, Packed)
    assert_same_bits(joined, torch.cat([one.unpacked(), other.unpacked()], dim))
    of_two_forms = torch.cat([one, some_fp8(4, 8, (4, 4))])
    assert not isinstance(of_two_forms, Packed) and of_two_forms.shape == (8, 8)
    cut_off = [from_fp8(*cut_off_rows(), one.dtype, (4, 4)), some_fp8(8, 8, (4, 4))]
    assert_same_bits(torch.cat(cut_off), torch.cat([t.unpacked() for t in cut_off]))
    with_plain = torch.stack([one, other.unpacked()])
    assert not isinstance(with_plain, Packed)
    assert_same_bits(with_plain[0], one.unpacked())


# as a tensor and a parameter


def test_who_reads_it_gets_the_unpacked_values() -> None:
    layer = nn.Linear(8, 4, bias=False, dtype=torch.bfloat16)
    plain = deepcopy(layer)
    packed = some_fp8(4, 8, (4, 8))
    layer.weight = nn.Parameter(packed, requires_grad=False)
    plain.weight = nn.Parameter(packed.unpacked(), requires_grad=False)
    assert isinstance(layer.weight, Packed) and isinstance(layer.weight, nn.Parameter)
    rows = torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True)
    layer(rows).nan_to_num().sum().backward()
    own, rows.grad = rows.grad, None
    plain(rows).nan_to_num().sum().backward()
    assert_same_bits(own, rows.grad)
    assert_same_bits(layer(rows), plain(rows))


def test_nobody_writes_it() -> None:
    packed = some_fp8(4, 8, (4, 8))
    for write in (packed.zero_, lambda: packed.copy_(torch.ones(4, 8))):
        with pytest.raises(LayoutError, match="would write a weight that is packed"):
            write()
    with pytest.raises(LayoutError, match="packed"):
        torch.add(torch.ones(4, 8), 1, out=packed)


def test_a_copy_has_bytes_of_its_own_and_stays_packed() -> None:
    layer = nn.Linear(8, 4, bias=False)
    layer.weight = nn.Parameter(some_mxfp4(1, 8, 1), requires_grad=False)
    copied = deepcopy(layer).weight
    assert isinstance(copied, Packed) and isinstance(copied, nn.Parameter)
    assert not copied.requires_grad
    addresses = {t.data_ptr() for w in (layer.weight, copied) for t in w.parts[0]}
    assert len(addresses) == 4
    assert_same_bits(copied.unpacked(), layer.weight.unpacked())


def test_a_file_has_the_unpacked_weight() -> None:
    """Others have no class of ours to read it with."""
    packed, file = some_fp8(4, 8, (4, 8)), io.BytesIO()
    torch.save({"weight": packed}, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)["weight"]
    assert type(read) is Tensor
    assert_same_bits(read, packed.unpacked())


# who writes


def sets_data(packed: Packed) -> None:
    packed.data = packed.data * 2


def sets_a_row(packed: Packed) -> None:
    packed.data[0] = 0


def writes_a_view(packed: Packed) -> None:
    packed.data.view(-1).mul_(2)


def writes_a_view_of_a_view(packed: Packed) -> None:
    packed.t()[0].add_(1)


@pytest.mark.parametrize("write", [sets_a_row, writes_a_view, writes_a_view_of_a_view])
def test_a_write_to_a_view_is_refused(write: Callable[[Packed], None]) -> None:
    """It would go to a copy."""
    packed = some_fp8(8, 16, (4, 8))
    values = packed.unpacked()
    with pytest.raises(LayoutError, match="would write a weight that is packed"):
        write(packed)
    assert_same_bits(packed.unpacked(), values)
    assert_same_bits(torch.tensor(packed.t()[2].tolist()), values[:, 2].float())
    assert_same_bits(packed.t() * 2, values.t() * 2)


@pytest.mark.parametrize("write", [sets_data, lambda p: nn.ParameterList([p]).double()])
def test_who_sets_its_data_is_told_at_the_next_read(
    write: Callable[[Packed], None],
) -> None:
    packed: Any = nn.Parameter(some_fp8(8, 16, (4, 8)), requires_grad=False)
    write(packed)
    for read in (torch.sum, form_of, Packed.unpacked):
        with pytest.raises(LayoutError, match=r"`\.data =` or `\.to\(dtype\)`"):
            read(packed)
    assert packed.written is not None


def test_what_has_no_memory_is_neither_stored_nor_shared() -> None:
    packed = some_fp8(8, 16, (4, 8))
    for ask in (packed.untyped_storage, packed.share_memory_):
        with pytest.raises(LayoutError, match="packed weight"):
            ask()


@pytest.mark.parametrize("scales", [torch.tensor(2.0), torch.tensor([1.0, 2.0, 3.0])])
def test_matrices_may_have_a_scale_each_or_one(scales: Tensor) -> None:
    codes = torch.randn(3, 8, 16).to(torch.float8_e4m3fn)
    packed = from_fp8(codes, scales, torch.float32)
    assert_same_bits(packed.unpacked(), codes.float() * scales.view(-1, 1, 1))


def test_blocks_that_reach_into_the_next_matrix_are_refused() -> None:
    codes = torch.randn(4, 12, 16).to(torch.float8_e4m3fn)
    with pytest.raises(
        LayoutError, match="12 rows of each matrix are not whole blocks"
    ):
        from_fp8(codes, torch.rand(4, 2, 2), torch.bfloat16, (8, 8))
