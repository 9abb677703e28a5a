"""bitsandbytes: 4-bit weights repacked by an evaluation on a CPU have no backward.

On a CPU with AVX512-BF16 the first call of a `Linear4bit` in evaluation repacks its weight.
Training after it multiplies by the repacked weight, whose product has no backward: the
gradient of what lies below is gone, and nothing says so. Unpacking when `training` is set
again, or a backward of that product, would do.
"""

import bitsandbytes as bnb
import torch

torch.manual_seed(0)
layer = bnb.nn.Linear4bit(
    256, 256, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
).to("cpu")
print("the CPU has AVX512-BF16:", layer.support_avx512bf16_for_cpu)


def gradient() -> torch.Tensor | None:
    """Return that of the layer's input, as an adapter in the layer below would get it."""
    layer.train()
    adapter = torch.ones(256, requires_grad=True)
    out = layer((adapter * torch.ones(4, 256)).to(torch.bfloat16))
    if out.requires_grad:
        out.float().sum().backward()
    return adapter.grad


before = gradient()
with torch.no_grad():
    layer.eval()(torch.ones(4, 256, dtype=torch.bfloat16))
try:
    after = gradient()
except RuntimeError as error:
    print(f"RuntimeError after an evaluation: {error}")
    after = None
print(
    "gradient before an evaluation:", before is not None, "after it:", after is not None
)
if before is not None and after is None:
    print("reproduced")
