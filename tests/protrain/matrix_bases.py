"""Cells of docs/compatibility.md: bases in few bits."""

from __future__ import annotations

from itertools import product
from typing import Any

from axolotl_jobs import (
    LORA,
    PAGED,
    PROTRAIN,
    SEEDING,
    SHARDED,
    job,
    overrides,
    pair,
)
from matrix import Cell
from tiny_models import NUM_BLOCKS

QLORA: dict[str, Any] = {**LORA, "adapter": "qlora", "load_in_4bit": True, "bf16": True}
STORAGE = ("bfloat16", "uint8", "float32")
RECOMPUTE = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}


def _in_4_bits(kind: str, double: bool, storage: str, recompute: bool) -> Cell:
    quantisation = {
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": double,
        "bnb_4bit_quant_storage": storage,
    }
    return Cell(
        table="Bases in 4 bits (`load_in_4bit: true`, QLoRA)",
        row=f"{kind.upper()}{', double quantisation' if double else ''}",
        column=f"in {storage}, blocks {'recompute' if recompute else 'keep'}",
        trainings=pair(
            "llama",
            {**QLORA, "bnb_config_kwargs": quantisation},
            plan=overrides(1, 2, (NUM_BLOCKS - 1) * recompute)
            | {"gradient_checkpointing": recompute},
            plain=RECOMPUTE if recompute else {},
        ),
    )


_QUANTISED = [
    _in_4_bits(kind, double, storage, recompute)
    for kind, double, storage, recompute in product(
        ("nf4", "fp4"), (False, True), STORAGE, (False, True)
    )
]

IN_8_BITS = {**LORA, "bf16": True, "load_in_8bit": True}
ON_ATTENTION = {"lora_target_linear": False, "lora_target_modules": ["q_proj"]}
ON_EXPERTS = {
    "lora_target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
}
QUANTISED_ELSEWHERE = {
    # without a GPU a plain run does not even load
    "quantize_moe_experts": None,
    "plugins": [PROTRAIN, SEEDING, "experts_plugin.ExpertsPlugin"],
}
EVALUATED = {"gradient_accumulation_steps": 2, "val_set_size": 0.2, "eval_steps": 1}

KERNELS_PLUGIN = [PROTRAIN, "axolotl.integrations.kernels.KernelsPlugin"]
_OTHERS = [
    Cell(
        table="Other bases",
        row="NF4 on the disk",
        column="QLoRA",
        trainings=pair("llama-nf4", QLORA, plan=overrides(0, 2)),
    ),
    *(
        Cell(
            table="Other bases",
            row=f"8 bits (`load_in_8bit: true`){more}",
            column="LoRA",
            trainings=pair(family, IN_8_BITS | keys, plan=plan),
        )
        for more, family, keys, plan in (
            ("", "llama", {}, overrides(0, 2)),
            (", blocks recompute", "llama", {"bf16": False}, overrides(1, 2, 3)),
            (", blocks swap", "qwen2", {}, overrides(0, 2, n_swap=4)),
            (", accumulated and evaluated", "mistral", EVALUATED, overrides(0, 2, 2)),
        )
    ),
    Cell(
        table="Other bases",
        row="8 bits on the disk",
        column="LoRA",
        trainings=pair("llama-8bit", LORA, {"bf16": True}, plan=overrides(0, 2)),
    ),
    *(
        Cell(
            table="Other bases",
            row=f"Experts too (`quantize_moe_experts: true`), {more}",
            column="QLoRA",
            trainings=pair(
                family,
                QLORA | ON_ATTENTION | keys | {"quantize_moe_experts": True},
                plan=overrides(0, 2, num_redone),
                plain=QUANTISED_ELSEWHERE,
            ),
        )
        for more, family, keys, num_redone in (
            ("Mixtral", "mixtral", {}, 0),
            ("Qwen3-MoE", "qwen3_moe", {}, 2),
            ("adapters on experts", "mixtral", ON_EXPERTS, 0),
            (
                "adapters on experts, blocks recompute",
                "qwen3_moe",
                ON_EXPERTS,
                4,
            ),
        )
    ),
    Cell(
        table="Other bases",
        row="Experts too (`quantize_moe_experts: true`), 8 bits",
        column="LoRA",
        refused=job("mixtral", IN_8_BITS, ON_ATTENTION, QUANTISED_ELSEWHERE),
        reason="bitsandbytes' kernel for the host takes two dimensions, the GPU's three: "
        "the plain run ends so too",
        message="The size of tensor a (112) must match the size of tensor b (40)",
        called="CUDA only",
    ),
]

MXFP4 = {"model_quantization_config": "Mxfp4Config", "attn_implementation": "eager"}
UNPACKS = {"model_quantization_config_kwargs": {"dequantize": True}, "bf16": True}
DEQUANTISED = MXFP4 | UNPACKS
WITH_EXPERTS = {"plugins": [PROTRAIN, SEEDING, "experts_plugin.SavedExpertsPlugin"]}
FP8 = UNPACKS | {
    "model_quantization_config": "FineGrainedFP8Config",
    "attn_implementation": "eager",
}
PACKED = LORA | ON_ATTENTION
MIXED = overrides(1, 2, 1, 2)
_OTHERS += [
    *(
        Cell(
            table="Other bases",
            row="MXFP4 (`model_quantization_config: Mxfp4Config`), dequantised",
            column=column,
            trainings=pair(
                "gpt_oss-mxfp4",
                DEQUANTISED | keys,
                plan=overrides(0, 2, 2),
                plain=WITH_EXPERTS if column == "full" else {},
                num_ranks=num_ranks,
            ),
        )
        for column, num_ranks, keys in (
            ("full", 1, {"bf16": True}),
            ("LoRA", 1, PACKED),
            ("LoRA on experts", 1, PACKED | ON_EXPERTS | EVALUATED),
            ("LoRA on experts, two ranks", 2, PACKED | ON_EXPERTS),
        )
    ),
    *(
        Cell(
            table="Other bases",
            row="FP8 (`model_quantization_config: FineGrainedFP8Config`), dequantised",
            column=column,
            trainings=pair(
                family,
                FP8 | keys,
                plan=plan,
                # without a GPU a plain run does not even load
                plain={"plugins": [PROTRAIN, SEEDING, "fp8_plugin.Fp8Plugin"]},
                num_ranks=num_ranks,
            ),
        )
        for column, family, num_ranks, keys, plan in (
            ("LoRA", "qwen3-fp8", 1, LORA | EVALUATED, overrides(1, 2, 2)),
            ("LoRA on experts", "deepseek_v3-fp8", 1, PACKED | ON_EXPERTS, MIXED),
            ("LoRA, two ranks", "qwen3-fp8", 2, LORA, overrides(0, 2, 1) | SHARDED),
            (
                "LoRA on experts, two ranks",
                "deepseek_v3-fp8",
                2,
                PACKED | ON_EXPERTS,
                overrides(1, 2, 1) | SHARDED,
            ),
        )
    ),
    Cell(
        table="Other bases",
        row="MXFP4 (`model_quantization_config: Mxfp4Config`)",
        column="LoRA",
        refused=job("gpt_oss-mxfp4", PAGED, LORA, MXFP4),
        reason="The tensors that its kernels for GPUs read are not parameters: not tried.",
        message="`model_quantization_config: Mxfp4Config` gives weights of a kind",
    ),
]
NOT_TRIED = {
    "gptq": "GPTQ keeps packed weights as buffers, which stay on the device, and its "
    "kernels are for GPUs: not tried.",
    "nvfp4_merge_aware": "Kernels for NVFP4 are for GPUs of the last generation: not "
    "tried.",
}
_OTHERS += [
    Cell(
        table="Other bases",
        row=f"`{key}`",
        column="LoRA",
        refused=job(
            "llama",
            LORA,
            PAGED,
            {key: True, "bf16": True, "use_sonicmoe": True, "plugins": KERNELS_PLUGIN},
        ),
        reason=reason,
        message=f"`{key}: true` gives weights of a kind that ProTrain cannot page",
    )
    for key, reason in NOT_TRIED.items()
]

CELLS = (*_QUANTISED, *_OTHERS)
