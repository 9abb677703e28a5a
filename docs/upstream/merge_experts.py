"""Axolotl: `merge-lora` leaves the experts of a Mixtral as they are in the base.

The default `merge_method: memory_efficient` goes by the tensors of the base's files. A
Mixtral's files have `experts.0.w1.weight` where the model has one fused `gate_up_proj`, the
adapter's keys name the fused one, nothing matches, and the base is written: exit code 0, with
"MERGE INCOMPLETE" in the log. An error, or fusing by transformers' own tables, would do.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from axolotl.cli.utils.lora_merge import merge_lora_sharded_efficient
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import MixtralConfig, MixtralForCausalLM

torch.manual_seed(0)
config = MixtralConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    vocab_size=64,
)
targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
with TemporaryDirectory() as name:
    base, adapter, merged = (
        Path(name) / part for part in ("base", "adapter", "merged")
    )
    MixtralForCausalLM(config).save_pretrained(base)
    model = get_peft_model(
        MixtralForCausalLM.from_pretrained(base),
        LoraConfig(r=4, target_modules=["q_proj"], target_parameters=targets),
    )
    for key, value in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(value)
    model.save_pretrained(adapter)
    merge_lora_sharded_efficient(base, adapter, merged)
    before = load_file(base / "model.safetensors")
    (file,) = merged.glob("*.safetensors")
    after = load_file(file)
same = {key for key, value in before.items() if torch.equal(value, after[key])}
experts = {key for key in before if "experts" in key}
print(f"{len(experts)} tensors of experts, {len(experts & same)} as in the base")
print("q_proj merged:", not any("q_proj" in key for key in same))
if experts <= same:
    print("reproduced")
