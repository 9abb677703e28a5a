"""An Axolotl plugin for the tests: fused kernels without a GPU.

The Triton and CUDA parts of Axolotl's LoRA kernels are replaced by the same arithmetic
in torch. Around them everything is Axolotl's own: its autograd functions, what they
keep for backward, its patches of modules and classes. Liger's kernels run in Triton's
interpreter, and nothing is compiled. Replaces for good, so jobs with it run in a process
of their own.
"""

from __future__ import annotations

from typing import Any

import bitsandbytes
import torch
from axolotl.integrations.base import BasePlugin
from axolotl.kernels import quantize, utils
from torch import Tensor
from torch.nn import functional
from triton import jit, language
from triton.runtime import interpreter

# mixed precision of the functions below is that of the device that they are made for
utils.torch_amp_custom_fwd = torch.amp.custom_fwd(device_type="cpu")
utils.torch_amp_custom_bwd = torch.amp.custom_bwd(device_type="cpu")

from axolotl.kernels import geglu, lora, swiglu  # noqa: E402


def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate.float()).to(up.dtype) * up


def swiglu_backward(
    grad_output: Tensor, gate: Tensor, up: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Writes into its arguments, as the kernel does."""
    wide = gate.float()
    sigmoid = wide.sigmoid()
    slope = sigmoid * (1 + wide * (1 - sigmoid))
    return _glu_backward(grad_output, gate, up, wide * sigmoid, slope)


def geglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    return functional.gelu(gate.float()).to(up.dtype) * up


def geglu_backward(
    grad_output: Tensor, gate: Tensor, up: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Writes into its arguments, as the kernel does."""
    wide = gate.float()
    share = 0.5 * (torch.erf(wide * 0.5**0.5) + 1)
    slope = share + wide * torch.exp(-0.5 * wide * wide) * (2 * torch.pi) ** -0.5
    return _glu_backward(grad_output, gate, up, wide * share, slope)


def _glu_backward(
    grad_output: Tensor, gate: Tensor, up: Tensor, activated: Tensor, slope: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    activated = activated.to(grad_output.dtype)
    output = activated * up
    grad_gate = ((grad_output * up).float() * slope).to(grad_output.dtype)
    grad_up = grad_output * activated
    return grad_output.copy_(output), gate.copy_(grad_gate), up.copy_(grad_up)


def dequantize_nf4(
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
    """bitsandbytes' own operators, which have a CPU form, for its CUDA symbols."""
    nested = bitsandbytes.functional.QuantState(
        absmax2, code=code2, blocksize=blocksize2, dtype=torch.float32
    )
    absmax = bitsandbytes.functional.dequantize_blockwise(absmax, nested) + offset
    packed = W.t() if W.shape[0] == 1 else W
    output = torch.ops.bitsandbytes.dequantize_4bit.default(
        packed, absmax, blocksize, "nf4", tuple(shape), dtype
    )
    return output.t() if W.shape[0] == 1 else output


# Axolotl 0.19 reads them in `lora`, later ones where they are made
for _module, _replacement in (
    (swiglu, swiglu_forward),
    (swiglu, swiglu_backward),
    (geglu, geglu_forward),
    (geglu, geglu_backward),
):
    for _reader in (lora, _module):
        setattr(_reader, _replacement.__name__, _replacement)
quantize._ctypes_nf4_dequant = dequantize_nf4


_launch = interpreter.GridExecutor.__call__


def _launch_with_data(self: Any, *args: Any, **kwargs: Any) -> None:
    """A trace has no data; its buffers are made by the caller of a kernel."""
    given = (*args, *kwargs.values())
    if not any(isinstance(arg, Tensor) and arg.is_meta for arg in given):
        _launch(self, *args, **kwargs)


_equal = torch.equal


def _equal_with_data(one: Tensor, other: Tensor) -> bool:
    """As for a GPU: Liger asks whether the gradient of the loss is exactly 1."""
    return not one.is_meta and _equal(one, other)


torch.equal = _equal_with_data
interpreter.GridExecutor.__call__ = _launch_with_data  # type: ignore[method-assign]


@jit
def rsqrt(x):  # type: ignore[no-untyped-def]  # the interpreter compiles it again
    return language.rsqrt(x)


class TorchKernelsPlugin(BasePlugin):
    """Replaces at import what Axolotl has by then, and in Liger what it imports later."""

    def register(self, cfg: Any) -> None:
        kernels = ("mlp", "qkv", "o", "embedding")
        asked = {key: cfg.get(key) for key in (f"lora_{k}_kernel" for k in kernels)}
        self._asked = {key: bool(value) for key, value in asked.items()}

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        # ProTrain has switched them off, for on a CPU they run nowhere but here; those
        # that Axolotl switches on by itself are off in both runs
        cfg.update(self._asked)

    def pre_model_load(self, cfg: Any) -> None:
        # what was compiled for other shapes before rounds in another way
        torch.compiler.set_stance("force_eager")
        if cfg.liger_rms_norm:
            from liger_kernel.ops import rms_norm

            # one of libdevice's functions, which the interpreter leaves out
            rms_norm.rsqrt = rsqrt
