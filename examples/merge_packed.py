"""Merge an adapter into a base in MXFP4 or FP8, with the values that it was trained over.

`python examples/merge_packed.py BASE ADAPTER OUTPUT` writes weights in 16 bits, for which
the host needs as much memory: 39 GiB for gpt-oss-20b, 218 GiB for gpt-oss-120b. Without an
ADAPTER it writes the base alone.
"""

from __future__ import annotations

import sys
from typing import Any

from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

from axolotl.integrations.protrain.loading import keep_packed, unpack_all

KINDS: dict[str, Any] = {"mxfp4": Mxfp4Config, "fp8": FineGrainedFP8Config}


def merge(base: str, output: str, adapter: str | None = None) -> None:
    """Read base and adapter, and write both as one model."""
    method = AutoConfig.from_pretrained(base).quantization_config["quant_method"]
    with keep_packed():
        model = AutoModelForCausalLM.from_pretrained(
            base,
            dtype="bfloat16",
            quantization_config=KINDS[method](dequantize=True),
            device_map={"": "cpu"},
        )
    unpack_all(model)
    merged: Any = model
    if adapter is not None:
        merged = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    # transformers would write it back by the rules by which it has read it, and lose experts
    merged._weight_conversions = None
    merged.save_pretrained(output)


if __name__ == "__main__":
    base, *adapters, output = sys.argv[1:]
    merge(base, output, *adapters)
    AutoTokenizer.from_pretrained(base).save_pretrained(output)
