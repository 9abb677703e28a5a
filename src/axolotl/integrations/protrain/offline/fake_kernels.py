"""Kernels that need a CUDA device, replaced by what they allocate and save.

A model on the meta device runs the Python around a kernel as it is: autograd functions,
chunk loops, buffers for outputs. What is left out is the launch itself. So the memory of
a fused kernel is that of its own code, read at the moment of planning.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import bitsandbytes as bnb
import torch
from torch import Tensor

PLANNED_ATTENTION = "protrain_planning"
"""Attention that saves what a flash kernel saves; runs on the meta device only."""

FLASH_ATTENTION = "flash_attention_2"
"""Name that models look for to pack their inputs as flash kernels want them."""


@contextmanager
def fake_kernels(target: str) -> Iterator[list[str]]:
    """Let a model that was patched for `target` run forward and backward on meta.

    Args:
        target: "cuda" or "cpu". On the CPU every kernel runs on meta as it is.

    Yields:
        One line for each kind of kernel that was replaced, complete once the model has
        run.
    """
    used: list[str] = []
    with ExitStack() as undo:
        if target == "cuda":
            undo.enter_context(registered_attention())
            undo.enter_context(_triton_launches(used))
            undo.enter_context(_axolotl_dequantize(used))
            if hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
                packet = torch.ops.bitsandbytes.gemm_4bit
                undo.enter_context(replaced(packet, "default", _gemm_4bit))
            undo.enter_context(replaced(torch, "equal", _equal))
        yield used


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of `owner`, which has it already, and put the old one back."""
    old = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, old)


def planned_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """A flash kernel on the meta device: saves q, k, v, output and fp32 log-sum-exp.

    Args:
        query: [batch, heads, length, dim]; key and value may have fewer heads.
        attention_mask: [batch, length] if rows have padding: it is cut out of q, k, v
            and put back into the output, which copies all four.

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
    # the operator also carries the count of floating point operations
    output = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, True, False, scale=scaling
    )[0]
    output = output[..., :value_dim].transpose(1, 2)
    return output if attention_mask is None else output.clone(), None


@contextmanager
def registered_attention() -> Iterator[None]:
    """Make transformers know `planned_attention` by both of its names."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    names = (PLANNED_ATTENTION, FLASH_ATTENTION)
    with (
        _entries(ALL_ATTENTION_FUNCTIONS, dict.fromkeys(names, planned_attention)),
        _entries(ALL_MASK_ATTENTION_FUNCTIONS, {PLANNED_ATTENTION: _no_mask}),
    ):
        yield


@contextmanager
def _entries(interface: Any, entries: dict[str, Callable]) -> Iterator[None]:
    table = interface._global_mapping
    before = dict(table)
    table.update(entries)
    try:
        yield
    finally:
        table.clear()
        table.update(before)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """These kernels take the boundaries of documents as positions, not as a mask."""


_torch_equal = torch.equal


def _equal(a: Tensor, b: Tensor) -> bool:
    """Liger asks if the gradient of the loss is exactly 1: not with accumulation."""
    if a.is_meta and a.is_floating_point():
        return False
    return _torch_equal(a, b)


@contextmanager
def _triton_launches(used: list[str]) -> Iterator[None]:
    """All buffers of a Triton kernel are made by its caller; the launch is left out."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    jit = importlib.import_module("triton.runtime.jit")
    tuner = importlib.import_module("triton.runtime.autotuner")
    names: list[str] = []

    def launch(self: Any, *args: Any, grid: Any, **kwargs: Any) -> None:
        name = _kernel_name(self)
        if name in names:
            return
        if names:
            used.remove(_launched(names))
        names.append(name)
        used.append(_launched(names))

    with ExitStack() as undo:
        for launcher in (jit.JITFunction, tuner.Autotuner, tuner.Heuristics):
            undo.enter_context(replaced(launcher, "run", launch))
        yield


def _launched(names: list[str]) -> str:
    return f"Triton kernels {', '.join(names)}: buffers are counted, their work is not"


def _kernel_name(kernel: Any) -> str:
    while hasattr(kernel, "fn") and not hasattr(kernel, "__name__"):
        kernel = kernel.fn
    return str(getattr(kernel, "__name__", kernel)).strip("_")


@contextmanager
def _axolotl_dequantize(used: list[str]) -> Iterator[None]:
    """Axolotl's 4-bit kernel takes addresses, which tensors on meta do not have."""
    from axolotl.kernels import quantize

    def dequantize(
        W: Tensor,
        absmax: Tensor,
        code2: Tensor,
        absmax2: Tensor,
        offset: Tensor,
        blocksize: int,
        blocksize2: int,
        shape: Any,
        dtype: torch.dtype,
    ) -> Tensor:
        line = "Axolotl's 4-bit dequantisation: buffers are counted, its work is not"
        if line not in used:
            used.append(line)
        output = torch.empty(tuple(shape), dtype=dtype, device=W.device)
        scales = torch.empty(absmax.numel(), dtype=torch.float32, device=W.device)
        scales += offset
        return output.t() if W.shape[0] == 1 else output

    with replaced(quantize, "_ctypes_nf4_dequant", dequantize):
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


@contextmanager
def quantisation_tables_apart() -> Iterator[None]:
    """Keep what bitsandbytes caches on the device where it is first asked for."""
    tables = bnb.functional.name2qmap
    before = dict(tables)
    tables.clear()
    try:
        yield
    finally:
        tables.clear()
        tables.update(before)


_TRACEABLE_EXPERTS = "grouped_mm"


def make_experts_traceable(
    model: Any, assumptions: list[str], wanted: str | None = None
) -> None:
    """The eager form asks which experts were chosen; other kernels need CUDA."""
    has_experts = any(hasattr(module, "is_concatenated") for module in model.modules())
    wanted = wanted or model.config.get_text_config()._experts_implementation
    if has_experts and wanted != _TRACEABLE_EXPERTS:
        model.set_experts_implementation(_TRACEABLE_EXPERTS)
        assumptions.append(
            f"experts_implementation {wanted}: traced as {_TRACEABLE_EXPERTS}"
        )


class _LinearCrossEntropy(torch.autograd.Function):
    """Cross entropy of `hidden @ weight.T` whose logits never exist."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        log_sum_exp = hidden.new_empty(hidden.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(hidden, weight, log_sum_exp)
        return hidden.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight, _ = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad
        return (
            torch.empty_like(hidden) if needs_hidden else None,
            torch.empty_like(weight) if needs_weight else None,
        )


def fake_cut_cross_entropy(model: Any, assumptions: list[str]) -> None:
    head = model.get_output_embeddings()

    def loss_function(logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        return _LinearCrossEntropy.apply(logits, head.weight)

    head.forward = lambda hidden: hidden
    model.loss_function = loss_function
    assumptions.append(
        "cut_cross_entropy is not installed here: a loss that keeps the hidden states "
        "and no logits"
    )
