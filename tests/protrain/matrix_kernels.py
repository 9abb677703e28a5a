"""Axolotl's fused LoRA kernels under paging: they read weights without calling layers.

Their Triton and CUDA parts are torch here (`torch_kernels_plugin`); their autograd
functions, and what those keep for backward outside of torch's saved tensors, are
Axolotl's own.
"""

from __future__ import annotations

from typing import Any

from axolotl_jobs import KERNELS, LORA, PAGED, job, overrides, pair
from matrix import Cell

Keys = dict[str, Any]

BF16: Keys = {"bf16": True}
QLORA = LORA | BF16 | {"adapter": "qlora", "load_in_4bit": True}
SINGLE: Keys = {"bnb_config_kwargs": {"bnb_4bit_use_double_quant": False}}
DORA: Keys = {"peft_use_dora": True}
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EMBEDDING: Keys = {
    "lora_target_linear": False,
    "lora_target_modules": [*LINEAR, "embed_tokens"],
    # Axolotl's backward of this kernel mixes dtypes under autocast
    "bf16": False,
}

HALF = overrides(1, 2, 2)
"""All but one chunk pass through two slots; half of the blocks recompute."""
POLICIES: dict[str, Keys] = {
    "blocks keep": overrides(0, 2),
    "blocks recompute": overrides(0, 2, 4),
    "blocks swap": overrides(0, 2, n_swap=4),
    "blocks recompute, inputs swap": overrides(0, 2, 4, n_swap=4),
}
BASES: dict[str, Keys] = {
    "LoRA fp32": LORA,
    "LoRA bf16": LORA | BF16,
    "QLoRA": QLORA,
    "QLoRA, quantised once": QLORA | SINGLE,
    "DoRA": LORA | BF16 | DORA,
    "QDoRA": QLORA | DORA,
}
NONE: Keys = {key: False for key, value in KERNELS.items() if value is True}
ALONE: dict[str, Keys] = {
    f"{key} alone": NONE | {key: True} | (EMBEDDING if "embedding" in key else {})
    for key in NONE
}
MORE: dict[str, Keys] = {
    "all four": EMBEDDING,
    "dropout": {"lora_dropout": 0.3},
    "two micro-batches, evaluation": {
        "gradient_accumulation_steps": 2,
        "val_set_size": 0.2,
        "eval_steps": 1,
    },
}
FAMILIES = {
    "Llama, tied": "llama-tied",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "Qwen3-MoE": "qwen3_moe",
    "Mistral": "mistral",
    "Mixtral": "mixtral",
    "Gemma": "gemma",
    "Gemma 2": "gemma2",
    "Gemma 3": "gemma3",
    "GLM-4": "glm4",
    "Granite": "granite",
    "SmolLM3": "smollm3",
    "EXAONE 4": "exaone4",
}
QUANTISED = ("Qwen3", "Mistral", "Gemma 3")
"""Families of which the 4-bit base is trained too."""


def _cell(row: str, column: str, family: str, *keys: Keys, plan: Keys = HALF) -> Cell:
    """Every kernel is on unless keys after the first say otherwise."""
    base, *more = keys
    trainings = pair(family, base, KERNELS, *more, plan=plan)
    return Cell("Fused LoRA kernels", row, column, trainings)


RECOMPUTED: Keys = {"protrain_lora_mlp_forbid_offload": True}
TWO_BASES = {name: BASES[name] for name in ("LoRA bf16", "QLoRA")}

CELLS: tuple[Cell, ...] = (
    *(
        _cell(f"Llama, {row}", base, "llama", keys, plan=plan)
        for row, plan in POLICIES.items()
        for base, keys in BASES.items()
    ),
    *(
        _cell(f"Llama, {row}", base, "llama", keys, more)
        for row, more in (ALONE | MORE).items()
        for base, keys in TWO_BASES.items()
    ),
    *(
        _cell(row, base, family, keys)
        for row, family in FAMILIES.items()
        for base, keys in TWO_BASES.items()
        if base != "QLoRA" or row in QUANTISED
    ),
    _cell(
        "protrain_lora_mlp_forbid_offload",
        "paged blocks recompute",
        "llama",
        LORA,
        plan=RECOMPUTED | overrides(1, 2, 4),
    ),
    Cell(
        "Fused LoRA kernels",
        "protrain_lora_mlp_forbid_offload",
        "a paged block keeps",
        refused=job("llama", LORA, KERNELS, PAGED, RECOMPUTED, overrides(1, 2, 2)),
        reason="that is what the key forbids",
        message="protrain_lora_mlp_forbid_offload: true excludes",
    ),
)
