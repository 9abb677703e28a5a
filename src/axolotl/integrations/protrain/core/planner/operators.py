"""Work of one operator: operations by formula, bytes moved for all without one.

torch has formulas for its own matrix products. Kernels of other libraries, products
that torch forgets and those that count rows otherwise stand in the table below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ..types import Work

_aten = torch.ops.aten

_library = torch.library.Library("protrain", "DEF")
_library.define("launch(Tensor[] tensors) -> ()")
_library.define("products(Tensor rows, Tensor weight, int times) -> ()")
for _name in "launch", "products":
    _library.impl(_name, lambda *_: None, "Meta")
launch = torch.ops.protrain.launch
"""Stands for a kernel on the meta device that reads or writes each of these once."""
products = torch.ops.protrain.products
"""Stands for products inside a kernel, of [..., K] rows and an [N, K] weight or of the
same size, which make no tensor."""

_COUNTED_AS = {
    # fused LoRA kernels add the adapter's product where the layer's already is
    _aten.addmm_: _aten.addmm,
    _aten.baddbmm_: _aten.baddbmm,
    _aten._scaled_dot_product_flash_attention_for_cpu: (
        _aten._scaled_dot_product_flash_attention
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        _aten._scaled_dot_product_flash_attention_backward
    ),
}
_GATHERS = {_aten.embedding, _aten.index, _aten.index_select, _aten.gather}

_PRODUCTS: dict[str, Callable[..., int]] = {
    # each row of the first operand [..., K] meets so many columns; the rows of a
    # grouped product are spread over the experts, so each meets one weight
    "aten::_grouped_mm": lambda a, b, *_: b.shape[-1],
    "aten::_int_mm": lambda a, b, *_: b.shape[-1],
    "protrain::products": lambda rows, weight, times: times * weight.shape[0],
    "bitsandbytes::gemm_4bit": lambda a, b, shape, *_: shape[0],
    "bitsandbytes::gemv_4bit": lambda a, b, shape, *_: shape[0],
    "bitsandbytes::int8_linear_matmul": lambda a, b, *_: b.shape[0],
    "bitsandbytes::int8_scaled_mm": lambda a, b, *_: b.shape[0],
    "bitsandbytes::int8_mixed_scaled_mm": lambda a, a_8bit, b, *_: b.shape[0],
}
_DEQUANTISES = "bitsandbytes::gemm_4bit"

_NO_PRODUCT = {
    f"aten::{name}"
    for name in (
        "_to_copy clone copy_ detach cat stack embedding embedding_dense_backward index "
        "index_select index_put index_put_ gather scatter scatter_add slice_backward "
        "select_backward constant_pad_nd repeat repeat_interleave flip roll sum mean amax amin "
        "linalg_vector_norm norm var_mean std native_layer_norm _fused_rms_norm "
        "_softmax _log_softmax empty_like new_empty zeros_like ones_like full_like "
        "new_zeros _weight_norm_interface tril triu"
    ).split()
} | {
    "bitsandbytes::dequantize_4bit",
    "bitsandbytes::dequantize_blockwise",
    "protrain::launch",
}
"""Operators that take weights, are not pointwise, and multiply no matrices."""


def qualified_name(func: Any) -> str:
    """As `aten::add`, whatever the overload."""
    return func.name().partition(".")[0]


def work_of(
    func: Any, args: Any, output: Any, read: Sequence[Tensor], made: Sequence[Tensor]
) -> Work:
    """Count the work of one call: `read` are the tensors in `args`, `made` those in
    `output`."""
    packet, name = func.overloadpacket, qualified_name(func)
    if name in _PRODUCTS:
        flops = 2 * read[0].numel() * _PRODUCTS[name](*args)
        moved = 0
        if name == _DEQUANTISES:
            # with many rows it writes the whole weight, and multiplies that
            numel = args[2][0] * args[2][1]
            moved = sum(t.nbytes for t in read[1:]) + numel * read[0].itemsize
        return _of_products(flops, read[0], moved)
    formula = flop_registry.get(_COUNTED_AS.get(packet, packet))
    if formula is not None:
        if "is_causal" not in (names := _argument_names(func)):
            return _of_products(formula(*args, out_val=output), read[0])
        if name.startswith("aten::_scaled_dot_product"):
            args = _with_equal_heads(args, names.index("query"))
        flops = formula(*args, out_val=output)
        if len(args) > (at := names.index("is_causal")) and args[at]:
            # the other half is never computed
            flops //= 2
        if read[0].itemsize > 2:
            return _of_products(flops, read[0])
        return Work(attention_16=flops, num_kernels=1)
    written = sum(tensor.nbytes for tensor in made)
    if packet in _GATHERS:
        # reads as many rows as it writes, not the whole table
        return Work(moved_bytes=2 * written, num_kernels=1)
    moved = written + sum(tensor.nbytes for tensor in read)
    return Work(moved_bytes=moved, num_kernels=1)


def workspace_bytes(func: Any, read: Sequence[Tensor]) -> int:
    """Count what a kernel allocates while it runs, beside its output.

    Flash attention's backward adds the query's gradient up in fp32, with a sum a row, and
    makes gradients of key and value for each head of the query (FlashAttention-2,
    `flash_api.cpp`).
    """
    if func.overloadpacket is not _aten._scaled_dot_product_flash_attention_backward:
        return 0
    _, query, key, *_ = read
    sums = 4 * (query.numel() + query.numel() // query.shape[-1])
    return sums + 2 * query.nbytes * (key.shape[1] < query.shape[1])


@cache
def multiplies(func: Any) -> bool:
    """Tell whether an operator is a product of matrices, or one of another library."""
    packet, name = func.overloadpacket, qualified_name(func)
    counted = _COUNTED_AS.get(packet, packet) in flop_registry
    return counted or name in _PRODUCTS or not name.startswith(("aten::", "prims::"))


def may_multiply(func: Any) -> bool:
    """Tell whether an operator may hide products that `work_of` does not count."""
    packet, name = func.overloadpacket, qualified_name(func)
    return not (
        func.is_view
        or name in _PRODUCTS
        or name in _NO_PRODUCT
        or _COUNTED_AS.get(packet, packet) in flop_registry
        or torch.Tag.pointwise in func.tags
    )


def _with_equal_heads(args: Sequence[Any], at: int) -> list[Any]:
    """Give key and value of attention, as shapes, the heads of the query at `at`.

    Each head of a query meets a key, grouped or not; torch 2.11 counts no grouped ones.
    """
    shapes = [args[at + place].shape for place in range(3)]
    equal = [torch.Size((s[0], shapes[0][1], *s[2:])) for s in shapes]
    return [*args[:at], *equal, *args[at + 3 :]]


@cache
def _argument_names(func: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in func._schema.arguments)


def _of_products(flops: int, first: Tensor, moved_bytes: int = 0) -> Work:
    # fp8 and int8 are at least as fast as 16 bits
    if first.itemsize <= 2:
        return Work(flops_16=flops, moved_bytes=moved_bytes, num_kernels=1)
    return Work(flops_32=flops, moved_bytes=moved_bytes, num_kernels=1)
