"""Emulate what a device does to operators before they run: autocast, attention,
dropout.

Note [Autocast above autograd]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Autocast, the choice of an attention kernel and fused dropout belong to dispatch keys
of a device, and meta tensors have none of them (fake CUDA tensors would, but autograd
of a CPU build has no guard for them and aborts). So a function mode changes the
arguments where Python calls a function: above autograd, which therefore records the
casts and saves what it would save on the device, and above the decompositions, whose
inner calls it does not see. Functions that are composites in Python are entered again
with the mode on. Weights are cast once in a region, as autocast's cache does it. The
lists are those of aten/src/ATen/autocast_mode.{h,cpp} (torch 2.11 to 2.13), by the names
that Python calls them. Casts inside the backward of custom functions are not emulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from types import FunctionType
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..layout.tensors import map_tensors
from .meta import known

_aten = torch.ops.aten
_META = torch.device("meta")
_16_BIT = (torch.float16, torch.bfloat16)
_FLASH = 1

_LOWER = frozenset(
    "linear matmul __matmul__ __rmatmul__ mm bmm mv addmm addmv addr addbmm baddbmm "
    "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d "
    "conv_transpose3d convolution scaled_dot_product_attention vecdot".split()
)
# inside them views of weights are cast, which no cache keeps
_LOWER_INSIDE = frozenset({"einsum", "multi_dot", "chain_matmul"})
_FP32_EVERYWHERE = frozenset(
    "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div "
    "poisson_nll_loss cosine_embedding_loss hinge_embedding_loss margin_ranking_loss "
    "triplet_margin_loss multi_margin_loss multilabel_margin_loss cdist prod "
    "binary_cross_entropy_with_logits".split()
)
_FP32_ON_CUDA = frozenset(
    "softmax log_softmax layer_norm group_norm pow __pow__ __rpow__ exp expm1 log log2 "
    "log10 log1p rsqrt reciprocal softplus sum cumsum cumprod logsumexp norm sinh cosh "
    "tan acos asin erfinv dist renorm cosine_similarity".split()
)
_FP32_ON_CPU = frozenset("avg_pool3d grid_sampler stft quantile trace".split())


@cache
def _unguarded(func: Any) -> Any:
    """A function of torch.nn.functional that does not ask this mode first."""
    names = {**func.__globals__, "has_torch_function": lambda *_args: False}
    return FunctionType(
        func.__code__, names, func.__name__, func.__defaults__, func.__closure__
    )


@contextmanager
def autocast_on_meta() -> Iterator[None]:
    """Inside, `torch.autocast` takes "meta" for a device; torch itself refuses it.

    Libraries ask a tensor for its device: PEFT where it folds the adapter of an expert
    into its weight, Axolotl's kernels for fp32 gradients of adapters.
    """
    real = torch.autocast

    def autocast(
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> AbstractContextManager[Any]:
        if device_type != "meta":
            return real(device_type, dtype, enabled, cache_enabled)
        running = Emulation.running
        return nullcontext() if running is None else running.region(dtype, enabled)

    with patch.object(torch, "autocast", autocast):
        yield


class Emulation(TorchFunctionMode):
    """Wrap the forward in this to get the operators that "cuda" or "cpu" would run, with
    or without autocast around it."""

    running: ClassVar[Emulation | None] = None

    def __init__(
        self, device_type: str, autocast_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self._cuda, self._dtype = device_type == "cuda", autocast_dtype
        raised_here = _FP32_ON_CUDA if self._cuda else _FP32_ON_CPU
        self._raised = _FP32_EVERYWHERE | raised_here
        self._cast: dict[int, tuple[Tensor, Tensor]] = {}
        self._depth = 0

    def __enter__(self) -> Emulation:
        self._depth += 1
        Emulation.running = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self._cast.clear()
            Emulation.running = None
        super().__exit__(*error)

    @contextmanager
    def region(self, dtype: torch.dtype | None, enabled: bool) -> Iterator[None]:
        """An autocast region inside the one around the model."""
        before = self._dtype
        self._dtype = (dtype or before) if enabled else None
        try:
            yield
        finally:
            self._dtype = before

    def prepared(
        self, forward: Callable[..., Any], dtype: torch.dtype | None
    ) -> Callable[..., Any]:
        """As accelerate does it: a region around it, outputs in fp32; none for None."""
        if dtype is None:
            return forward

        @wraps(forward)
        def in_region(*args: Any, **kwargs: Any) -> Any:
            with self.region(dtype, True):
                outputs = forward(*args, **kwargs)
            self._cast.clear()
            return outputs_as_fp32(outputs)

        return in_region

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._dtype is not None:
            if name in _LOWER:
                args = map_tensors(args, self._lower)
                kwargs = map_tensors(kwargs, self._lower)
            elif name in _LOWER_INSIDE:
                args = map_tensors(args, self._lower_uncached)
            elif name in self._raised and kwargs.get("dtype") is None:
                args, kwargs = map_tensors(args, _raise), map_tensors(kwargs, _raise)
        if name == "multi_head_attention_forward":
            # its inner products are cast too; torch has switched this mode off here
            with self:
                return _unguarded(func)(*args, **kwargs)
        if name == "scaled_dot_product_attention" and self._on_meta(args):
            return _attention(self._cuda, *args, **kwargs)
        if name == "tensor" and kwargs.get("device") == _META:
            # made on the CPU first, its values remain known
            return func(*args, **{**kwargs, "device": "cpu"}).to(_META)
        if name == "tolist" and self._on_meta(args):
            return known(args[0]).tolist()
        if name == "dropout" and self._cuda and self._on_meta(args):
            return _fused_dropout(*args, **kwargs)
        return func(*args, **kwargs)

    @staticmethod
    def _on_meta(args: Any) -> bool:
        return bool(args) and isinstance(args[0], Tensor) and args[0].is_meta

    def _lower_uncached(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype == torch.float64:
            return tensor
        return tensor.to(self._dtype)

    def _lower(self, tensor: Tensor) -> Tensor:
        is_weight = (
            tensor.dtype == torch.float32 != self._dtype
            and tensor.requires_grad
            and tensor.is_leaf
            and tensor._base is None
        )
        if not is_weight:
            return self._lower_uncached(tensor)
        if id(tensor) not in self._cast:
            self._cast[id(tensor)] = (tensor, tensor.to(self._dtype))
        return self._cast[id(tensor)][1]


def outputs_as_fp32(outputs: Any) -> Any:
    """Do what accelerate does to the outputs of an autocast forward."""
    return map_tensors(outputs, _raise)


def _raise(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _16_BIT else tensor


def _fused_dropout(
    x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    # CUDA keeps a boolean mask where the composite operator keeps a float one
    if not training or p == 0.0 or inplace:
        return F.dropout(x, p, training, inplace)
    return torch.native_dropout(x, p, True)[0]


def _attention(
    cuda: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kernel that torch would choose, so that the same tensors are saved."""
    has_mask = attn_mask is not None
    if cuda:
        kernel = _cuda_kernel(query, key, value, has_mask, enable_gqa)
    elif attn_mask is not None and attn_mask.requires_grad:
        # T5 learns its position bias, and the fused kernel of the CPU gives no gradient
        kernel = "math"
    else:
        shapes = tuple((t.shape[1], t.shape[-1]) for t in (query, key, value))
        drops = 0.1 if dropout_p > 0 else 0.0
        kernel = _cpu_kernel(
            shapes, query.dtype, has_mask, drops, is_causal, enable_gqa
        )
    if kernel != "math" and attn_mask is not None and attn_mask.dtype == torch.bool:
        # ATen's convert_boolean_attn_mask
        passes, blocks = (
            torch.scalar_tensor(value, dtype=query.dtype, device=query.device)
            for value in (0.0, -math.inf)
        )
        attn_mask = torch.where(attn_mask, passes, blocks)
    if kernel == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
    if kernel == "flash":
        return _aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    if kernel == "efficient":
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
        return _aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
        )[0]
    args = (query, key, value, attn_mask, dropout_p, is_causal)
    return F.scaled_dot_product_attention(*args, scale=scale, enable_gqa=enable_gqa)


def _cuda_kernel(
    query: Tensor, key: Tensor, value: Tensor, has_mask: bool, enable_gqa: bool
) -> str:
    """sdp_utils.cpp, without the conditions that training never meets, and without cuDNN,
    which goes first on compute capability 9.0 and 10.0 and saves what flash does."""
    same_dim = query.shape[-1] == value.shape[-1]
    is_16_bit = query.dtype in _16_BIT
    if not has_mask and is_16_bit and same_dim and query.shape[-1] <= 256:
        return "flash"
    if enable_gqa and query.shape[1] != key.shape[1]:
        return "math"
    return "efficient"


@cache
def _cpu_kernel(
    shapes: tuple[tuple[int, int], ...],
    dtype: torch.dtype,
    has_mask: bool,
    drops: float,
    is_causal: bool,
    enable_gqa: bool,
) -> str:
    """Ask torch, with real tensors of two tokens; `shapes` are heads and widths."""
    q, k, v = (torch.empty(1, heads, 2, dim, dtype=dtype) for heads, dim in shapes)
    mask = torch.ones(1, 1, 2, 2, dtype=torch.bool) if has_mask else None
    choice = torch._fused_sdp_choice(
        q, k, v, mask, drops, is_causal, enable_gqa=enable_gqa
    )
    return "cpu" if choice == _FLASH else "math"
