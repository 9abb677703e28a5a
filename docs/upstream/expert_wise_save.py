"""transformers: saving a model with fused experts takes its experts a second time.

`save_pretrained` turns fused experts back into one tensor per expert, as copies, for the
whole model before it writes a byte. Views of the fused weights, written one by one, hold
the same bytes. Linux: `/proc/self/status` counts the peak.
"""

import gc
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import MixtralConfig, MixtralForCausalLM

CONFIG = MixtralConfig(
    hidden_size=512,
    intermediate_size=1792,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=8,
    num_local_experts=8,
    vocab_size=1024,
)


def resident(key: str) -> float:
    """Return MB of this process: VmRSS now, VmHWM at its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    raise KeyError(key)


model = MixtralForCausalLM(CONFIG)
names = [name for name, _ in model.named_parameters() if "experts" in name]
print("parameters of the first block's experts:", names[:2])
size = sum(p.nbytes for p in model.parameters()) / 2**20
with TemporaryDirectory() as folder:
    # what the first save imports is not counted
    torch.nn.Linear(8, 8)
    MixtralForCausalLM(
        MixtralConfig(
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            num_local_experts=2,
            vocab_size=8,
        )
    ).save_pretrained(folder)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    model.save_pretrained(folder)
    more = resident("VmHWM") - before
print(f"model {size:.0f} MiB, its save takes {more:.0f} MiB more")
if more > 0.5 * size:
    print("reproduced")
