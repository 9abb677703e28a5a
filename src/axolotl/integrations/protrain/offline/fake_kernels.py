"""Kernels that need a CUDA device, replaced by what they allocate and save.

A model on the meta device runs the Python around a kernel as it is: autograd functions,
chunk loops, buffers for outputs. What is left out is the launch itself. So the memory of
a fused kernel is that of its own code, read at the moment of planning, and its time that
of the bytes it is given.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import bitsandbytes as bnb
import torch
from bitsandbytes.autograd._functions import MatMul8bitFp
from torch import Tensor

from ..core.layout.tensors import tensors_in
from ..core.profile.meta import value_of
from ..core.profile.operators import launch as launched_on, products

PLANNED_ATTENTION = "protrain_planning"
"""Attention that saves what a flash kernel saves; runs on the meta device only."""

FLASH_ATTENTION = "flash_attention_2"
"""Name that models look for to pack their inputs as flash kernels want them."""


@contextmanager
def fake_kernels(target: str) -> Iterator[list[str]]:
    """Let a model that was patched for `target` run forward and backward on meta.

    Yields one line for each kind of kernel that was replaced, complete at the end.
    Kernels of the target "cpu" run on meta as they are.
    """
    used: list[str] = []
    if target != "cuda":
        with patch.object(bnb, "matmul", _matmul_on_cpu):
            yield used
        return
    ops = torch.ops.bitsandbytes
    with (
        registered_attention(),
        _triton_launches(used),
        _axolotl_dequantize(used),
        patch.object(torch, "equal", _equal),
        patch.object(ops.gemm_4bit, "default", _gemm_4bit),
        patch.object(ops.int8_vectorwise_quant, "default", _int8_quant),
        patch.object(ops, "int8_mixed_scaled_mm", _int8_mixed),
    ):
        yield used


def planned_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """A flash kernel on the meta device: saves q, k, v, output and fp32 log-sum-exp.

    Args:
        query: [batch, heads, length, dim]; key and value may have fewer heads.
        attention_mask: [batch, length] if rows have padding: it is cut out of q, k, v
            and put back into the output, which copies all four.
        position_ids: [1, length] of a packed row: each document attends to itself.

    Returns:
        Output [batch, length, heads, dim].
    """
    dtype = module.config.dtype
    if query.dtype == torch.float32 and dtype in (torch.bfloat16, torch.float16):
        # norms in fp32 raise what flash kernels take only in 16 bits
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if attention_mask is not None:
        query, key, value = query.clone(), key.clone(), value.clone()
    dim, value_dim = query.shape[-1], value.shape[-1]
    if value_dim < dim:
        value = torch.nn.functional.pad(value, [0, dim - value_dim])
    shape = query.shape
    documents = _documents(position_ids, shape)
    query, key, value = (
        t.unflatten(2, (documents, -1)).transpose(1, 2).flatten(0, 1)
        for t in (query, key, value)
    )
    # the operator also carries the count of floating point operations
    output = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, True, False, scale=scaling
    )[0]
    output = output[..., :value_dim].transpose(1, 2)
    output = output.reshape(shape[0], shape[2], *output.shape[2:])
    return output if attention_mask is None else output.clone(), None


def _documents(positions: Tensor | None, shape: torch.Size) -> int:
    """How many of equal length a packed row has; 1 if that is not known, or several rows."""
    known = None if positions is None else value_of(positions)
    if known is None or known.shape != (1, shape[2]) or shape[0] != 1:
        return 1
    documents = int((known == 0).sum())
    return documents if documents and shape[2] % documents == 0 else 1


@contextmanager
def registered_attention() -> Iterator[None]:
    """Make transformers know `planned_attention` by both of its names."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    both = dict.fromkeys((PLANNED_ATTENTION, FLASH_ATTENTION), planned_attention)
    # these kernels take the boundaries of documents as positions, not as a mask
    no_mask = {PLANNED_ATTENTION: lambda *_, **__: None}
    with (
        patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, both),
        patch.dict(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, no_mask),
    ):
        yield


def _equal(a: Tensor, b: Tensor, equal: Callable = torch.equal) -> bool:
    """Liger asks if the gradient of the loss is exactly 1: not with accumulation."""
    return False if a.is_meta and a.is_floating_point() else equal(a, b)


@contextmanager
def _triton_launches(used: list[str]) -> Iterator[None]:
    """All buffers of a Triton kernel are made by its caller."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    jit = importlib.import_module("triton.runtime.jit")
    tuner = importlib.import_module("triton.runtime.autotuner")
    launched: dict[str, None] = {}

    def launch(self: Any, *args: Any, grid: Any, **kwargs: Any) -> None:
        while hasattr(self, "fn") and not hasattr(self, "__name__"):
            self = self.fn
        launched[str(getattr(self, "__name__", self)).strip("_")] = None
        launched_on([*tensors_in(args), *tensors_in(kwargs)])

    with ExitStack() as undo:
        for launcher in (jit.JITFunction, tuner.Autotuner, tuner.Heuristics):
            undo.enter_context(patch.object(launcher, "run", launch))
        yield
    if launched:
        names = ", ".join(launched)
        used.append(
            f"Triton kernels {names}: seconds are those of the bytes that they are given"
        )


@contextmanager
def _axolotl_dequantize(used: list[str]) -> Iterator[None]:
    """Axolotl's 4-bit kernel takes addresses, which tensors on meta do not have."""
    from axolotl.kernels import quantize

    def dequantize(W: Tensor, absmax: Tensor, *others: Any) -> Tensor:
        _code2, _absmax2, offset, *_blocksizes, shape, dtype = others
        line = "Axolotl's 4-bit dequantisation: seconds are those of its bytes"
        if line not in used:
            used.append(line)
        output = torch.empty(tuple(shape), dtype=dtype, device=W.device)
        scales = torch.empty(absmax.numel(), dtype=torch.float32, device=W.device)
        scales += offset
        launched_on([W, absmax, output])
        return output.t() if W.shape[0] == 1 else output

    with patch.object(quantize, "_ctypes_nf4_dequant", dequantize):
        yield


def _gemm_4bit(
    rows: Tensor,
    packed: Tensor,
    shape: Any,
    absmax: Tensor,
    blocksize: int,
    quant_type: str,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    """What the GPU kernel does above 1536 rows: it writes the whole weight first.

    Below, a fused kernel may do without that buffer, by a table of GPUs and shapes.
    """
    ops = torch.ops.bitsandbytes
    if absmax_8bit is not None:
        scales = (absmax_8bit, absmax, absmax_code, 256, torch.float32)
        absmax = ops.dequantize_blockwise(*scales) + absmax_offset
    weight = ops.dequantize_4bit(
        packed, absmax, blocksize, quant_type, shape, rows.dtype
    )
    return torch.nn.functional.linear(rows, weight, bias)


def _int8_quant(
    rows: Tensor, threshold: float = 0.0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Which columns are outliers depends on values: none are taken to be."""
    scales = rows.new_empty(rows.shape[:-1].numel(), dtype=torch.float32)
    packed = torch.empty_like(rows, dtype=torch.int8)
    if threshold == 0.0:
        return packed, scales, None
    _outliers = rows.abs() >= threshold
    return packed, scales, rows.new_empty(0, dtype=torch.int64)


def _int8_mixed(
    rows: Tensor, packed_rows: Tensor, packed: Tensor, *_others: Any
) -> tuple[Tensor, Tensor]:
    """What bitsandbytes' composite operator calls; its shape rule makes the output only."""
    sums = torch.ops.bitsandbytes.int8_linear_matmul(packed_rows, packed)
    # a bias is added in place
    output = torch.empty_like(sums, dtype=torch.float16)
    return output.to(rows.dtype), rows.new_empty(0)


def _matmul_on_cpu(
    rows: Tensor,
    weight: Tensor,
    out: Tensor | None = None,
    state: Any = None,
    threshold: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:
    """What `bitsandbytes.matmul` chooses by the device of the rows, in training."""
    return MatMul8bitFp.apply(rows, weight, out, bias, state)


def quantisation_tables_apart() -> AbstractContextManager[Any]:
    """Keep what bitsandbytes caches on the device where it is first asked for."""
    return patch.dict(bnb.functional.name2qmap, clear=True)


def make_experts_traceable(
    model: Any, assumptions: list[str], wanted: str | None = None
) -> None:
    """The eager form asks which experts were chosen; other kernels need CUDA."""
    has_experts = any(hasattr(module, "is_concatenated") for module in model.modules())
    wanted = wanted or model.config.get_text_config()._experts_implementation
    if has_experts and wanted != "grouped_mm":
        model.set_experts_implementation("grouped_mm")
        assumptions.append(f"experts_implementation {wanted}: traced as grouped_mm")


class _LinearCrossEntropy(torch.autograd.Function):
    """Cross entropy of `hidden @ weight.T` whose logits never exist."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        log_sum_exp = hidden.new_empty(hidden.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(hidden, weight, log_sum_exp)
        products(hidden, weight, 1)
        return hidden.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        # logits are made again, then a product for each gradient
        products(*ctx.saved_tensors[:2], 1 + sum(ctx.needs_input_grad))
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        hidden, weight = (torch.empty_like(x) if needs else None for x, needs in needed)
        return hidden, weight


@contextmanager
def without_logits(model: Any) -> Iterator[None]:
    """Inside, a loss that keeps the hidden states and no logits."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head, loss_function = base.get_output_embeddings(), base.loss_function
    with patch.object(head, "forward", head.forward):
        fake_cut_cross_entropy(base, [])
        try:
            yield
        finally:
            base.loss_function = loss_function


def fake_cut_cross_entropy(model: Any, assumptions: list[str]) -> None:
    head = model.get_output_embeddings()

    head.forward = lambda hidden: hidden
    model.loss_function = lambda logits, labels, **_: _LinearCrossEntropy.apply(
        logits, head.weight
    )
    assumptions.append(
        "cut_cross_entropy is not installed here: a loss that keeps the hidden states "
        "and no logits"
    )
