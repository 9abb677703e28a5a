"""Kernels that need a CUDA device, replaced by what they allocate and save.

A model on the meta device runs the Python around a kernel as it is: autograd functions,
chunk loops, buffers for outputs. What is left out is the launch itself. So the memory of
a fused kernel is that of its own code, read at the moment of planning, and its time that
of the bytes it is given.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import bitsandbytes as bnb
import torch
from bitsandbytes.autograd._functions import MatMul8bitFp
from torch import Tensor, nn
from torch.fx.experimental import _config as fx_config

from ..core.layout.tensors import tensors_in
from ..core.planner.meta import value_of
from ..core.planner.operators import launch as launched_on, products

PLANNED_ATTENTION = "protrain_planning"
"""Attention that saves what a flash kernel saves; runs on the meta device only."""

_CHUNK = 64
"""Tokens that kernels of linear attention take together."""

_PACKAGES = {
    "chunk_gated_delta_rule": "fla",
    "chunk_kda": "fla",
    "mamba_chunk_scan_combined": "mamba_ssm",
    "mamba_inner_fn": "mamba_ssm",
    "selective_scan_fn": "mamba_ssm",
}
"""Kernels of linear attention by transformers' name, and the package of each."""

_DISTRIBUTIONS = {"fla": "flash-linear-attention", "mamba_ssm": "mamba-ssm"}


@contextmanager
def fake_kernels(target: str, model: nn.Module) -> Iterator[list[str]]:
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
        attention_kernels(attention_of(model)),
        _linear_attention(model, used),
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
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """A flash kernel on the meta device: saves q, k, v, output and fp32 log-sum-exp.

    Args:
        query: [batch, heads, length, dim]; key and value may have fewer heads.
        attention_mask: [batch, length] if rows have padding: it is cut out of q, k, v
            and put back into the output, which copies all four.
        position_ids: [1, length] of a packed row: each document attends to itself.
        is_causal: None for what the module says.
        cu_seq_lens_q: Where the documents of a packed row begin, and its end.

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
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    shape = query.shape
    documents = _documents(position_ids, cu_seq_lens_q, shape)
    query, key, value = (
        t.unflatten(2, (documents, -1)).transpose(1, 2).flatten(0, 1)
        for t in (query, key, value)
    )
    # the operator also carries the count of floating point operations
    output = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, is_causal, False, scale=scaling
    )[0]
    output = output[..., :value_dim].transpose(1, 2)
    output = output.reshape(shape[0], shape[2], *output.shape[2:])
    return output if attention_mask is None else output.clone(), None


def _documents(
    positions: Tensor | None, bounds: Tensor | None, shape: torch.Size
) -> int:
    """Return how many of equal length a packed row has; 1 if that is not known, or
    several rows."""
    known = None if positions is None else value_of(positions)
    if bounds is not None:
        documents = len(bounds) - 1
    elif known is not None and known.shape == (1, shape[2]):
        documents = int((known == 0).sum())
    else:
        return 1
    whole = shape[0] == 1 and documents and shape[2] % documents == 0
    return documents if whole else 1


def attention_of(model: nn.Module) -> set[str]:
    """Return transformers' names for the attention of a model and of those in it."""
    configs = (getattr(module, "config", None) for module in model.modules())
    names = {getattr(config, "_attn_implementation", None) for config in configs}
    return {name for name in names if name}


@contextmanager
def attention_kernels(names: Iterable[str]) -> Iterator[None]:
    """Let `planned_attention` stand for all attention that torch has no operator for:
    what transformers knows, and what is among `names`."""
    # imported here: they take seconds
    from axolotl.monkeypatch.attention import sdpa_varlen
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as ATTENTION

    with ExitStack() as undo:
        if sdpa_varlen._PATCH_APPLIED:
            # Axolotl's own looks for a GPU, and takes a mask without one
            packed = partial(_packed_sdpa, ATTENTION["sdpa"])
            _register(ATTENTION, "sdpa", packed, undo)
        for name in {PLANNED_ATTENTION, *ATTENTION, *names}:
            if name == "eager" or "sdpa" in name or name.startswith("paged|"):
                continue
            # what has no mask takes the boundaries of documents as positions
            maskless = name == PLANNED_ATTENTION or "flex" in name
            mask = _no_mask if maskless else MASKS["flash_attention_2"]
            _register(ATTENTION, name, planned_attention, undo)
            _register(MASKS, name, mask, undo)
        yield


def _register(interface: Any, name: str, function: Any, undo: ExitStack) -> None:
    """Hide what transformers has by a name; its own entries hide what is registered."""
    before = interface.get(name)

    def put_back() -> None:
        del interface[name]
        if interface.get(name) is not before:
            interface[name] = before

    interface[name] = function
    undo.callback(put_back)


def _packed_sdpa(
    otherwise: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> Any:
    """Axolotl's way of rows that are packed and have no mask, and of others."""
    attends = planned_attention if attention_mask is None else otherwise
    return attends(module, query, key, value, attention_mask, **kwargs)


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    pass


@contextmanager
def _linear_attention(model: nn.Module, used: list[str]) -> Iterator[None]:
    """Functions that transformers replaces by kernels of a package where it is found.

    A package that was imported runs its own code, with its Triton kernels left out.
    Axolotl requires fla, but without a GPU it may be installed and not importable.
    """
    modules = {type(module).__module__ for module in model.modules()}
    functions: dict[str, list[Any]] = {}
    for value in (
        v for m in modules & sys.modules.keys() for v in vars(sys.modules[m]).values()
    ):
        name = vars(type(value)).get("kernel_layer_name")
        if name in _PACKAGES and isinstance(value, nn.Module):
            functions.setdefault(_PACKAGES[name], []).append(value)
    with ExitStack() as undo:
        for package, found in functions.items():
            names = ", ".join(dict.fromkeys(f.kernel_layer_name for f in found))
            whole = _DISTRIBUTIONS[package]
            if package in sys.modules:
                used.append(f"{names}: kernels of {whole}")
            elif package == "fla" and _is_elsewhere(package):
                used.append(f"{names}: kernels of {whole}, which runs where a GPU is")
                for function in found:
                    undo.enter_context(patch.object(function, "forward", _delta_rule))
            else:
                used.append(
                    f"{names}: torch's own operators, which keep more and take longer; "
                    f"{whole}, which has kernels for it, cannot be imported here"
                )
        yield


def picks_all() -> AbstractContextManager[Any]:
    """Inside, who picks elements by a mask without values gets all: the most there are."""
    return patch.object(fx_config, "meta_nonzero_assume_all_nonzero", True)


def _is_elsewhere(package: str) -> bool:
    """Tell whether a package is installed here and needs a GPU, which is not here."""
    is_installed = importlib.util.find_spec(package) is not None
    return is_installed and not torch.cuda.is_available()


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *_args: Any,
    use_qk_l2norm_in_kernel: bool = False,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """`chunk_gated_delta_rule` or, with a decay for each channel, `chunk_kda`."""
    inputs = query, key, value, g, beta, use_qk_l2norm_in_kernel
    return _DeltaRule.apply(*inputs), None


class _DeltaRule(torch.autograd.Function):
    """Linear attention that allocates, saves and moves what flash-linear-attention does.

    Inputs are [batch, length, heads, dim]. A chunk's tokens meet each other in products of
    [chunk, chunk]; one state of [key dim, value dim] a chunk is there only within a pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        normalises: bool,
    ) -> Tensor:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        decay, beta = decay.contiguous(), beta.contiguous()
        scales: list[Tensor] = []
        if normalises:
            query, *scales = _normalised(query)
            key, *of_key = _normalised(key)
            scales += of_key
        sums = torch.empty_like(decay, dtype=torch.float32)
        launched_on([decay, sums])
        # by channel there is one such product for queries and one for keys
        solved = [key.new_empty(*key.shape[:3], _CHUNK) for _ in range(decay.ndim - 2)]
        launched_on([key, sums, beta, *solved])
        parts = _parts(key, value, sums, beta, solved)
        output = torch.empty_like(value)
        launched_on([query, key, sums, *parts[-2:], output])
        # chunk_kda keeps its decay too
        given = [decay] * (len(solved) - 1)
        ctx.save_for_backward(query, key, value, sums, beta, *solved, *scales, *given)
        ctx.normalises = normalises
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sums, beta, *others = ctx.saved_tensors
        (grad,), num_solved = grads, sums.ndim - 2
        solved, scales = others[:num_solved], others[num_solved:]
        parts = _parts(key, value, sums, beta, solved)
        first, states, new = parts[0], *parts[-2:]
        d_value = torch.empty_like(grad)
        launched_on([query, key, sums, grad, d_value])
        d_states, d_new = torch.empty_like(states), torch.empty_like(d_value)
        launched_on([query, key, first, sums, grad, d_value, d_states, d_new])
        d_query, d_key, d_first = (torch.empty_like(x) for x in (query, key, first))
        d_sums = torch.empty_like(sums)
        read = [query, key, new, first, sums, states, d_states, d_new, grad]
        launched_on([*read, d_query, d_key, d_first, d_sums])
        more = [torch.empty_like(x) for x in (key, value, beta, sums)]
        launched_on([key, value, beta, sums, *solved, d_first, d_new, *more])
        d_key += more[0]
        d_sums += more[3]
        d_decay = torch.empty_like(d_sums)
        launched_on([d_sums, d_decay])
        if ctx.normalises:
            made = torch.empty_like(query), torch.empty_like(key)
            launched_on([query, scales[0], d_query, made[0]])
            launched_on([key, scales[1], d_key, made[1]])
            d_query, d_key = made
        return d_query, d_key, more[1], d_decay, more[2], None


def _normalised(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of length 1, and in fp32 what they were divided by."""
    made = torch.empty_like(rows)
    scale = rows.new_empty(rows.shape[:-1], dtype=torch.float32)
    launched_on([rows, made, scale])
    return made, scale


def _parts(
    key: Tensor, value: Tensor, sums: Tensor, beta: Tensor, solved: list[Tensor]
) -> tuple[Tensor, ...]:
    """Make what both passes make and forget; states of all chunks and new values come last."""
    batch, length, heads, dim = key.shape
    # keys and values as a chunk's own tokens leave them; by channel keys decayed too
    made = [torch.empty_like(x) for x in (key, value, *[key] * (len(solved) - 1))]
    launched_on([key, value, beta, sums, *solved, *made])
    states = key.new_empty(batch, -(-length // _CHUNK), heads, dim, value.shape[-1])
    new = torch.empty_like(value)
    launched_on([key, *made[:2], sums, states, new])
    return *made, states, new


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
    """Multiply as the GPU kernel does above 1536 rows: it writes the whole weight first.

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
    """Take no column to be an outlier, which depends on values."""
    scales = rows.new_empty(rows.shape[:-1].numel(), dtype=torch.float32)
    packed = torch.empty_like(rows, dtype=torch.int8)
    if threshold == 0.0:
        return packed, scales, None
    _outliers = rows.abs() >= threshold
    return packed, scales, rows.new_empty(0, dtype=torch.int64)


def _int8_mixed(
    rows: Tensor, packed_rows: Tensor, packed: Tensor, *_others: Any
) -> tuple[Tensor, Tensor]:
    """Multiply as bitsandbytes' composite operator, whose shape rule makes the output only."""
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
    """Multiply as `bitsandbytes.matmul` does for rows on a CPU, in training."""
    return MatMul8bitFp.apply(rows, weight, out, bias, state)


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
    model.loss_function = lambda logits, labels, *_, **__: _LinearCrossEntropy.apply(
        logits, head.weight
    )
    assumptions.append(
        "cut_cross_entropy is not installed here: a loss that keeps the hidden states "
        "and no logits"
    )
