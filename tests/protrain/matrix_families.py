"""Cells of the compatibility matrix: model families, full, LoRA and QLoRA."""

from __future__ import annotations

from typing import Any

from axolotl_jobs import LORA, Pair, overrides, pair
from matrix import Cell
from tiny_models import CHATS, PREFERENCES, STEPS

QLORA = LORA | {"adapter": "qlora", "load_in_4bit": True}
COLUMNS: dict[str, dict[str, Any]] = {"full": {}, "LoRA": LORA, "QLoRA": QLORA}
# every block is paged; two of them recompute, the others keep what they save
PAGED_AND_MIXED = overrides(n_persist=0, n_buffer=2, n_checkpoint=2)

FAMILIES = {
    "Llama": "llama",
    "Qwen3": "qwen3",
    "Mistral": "mistral",
    "Gemma 3 (text)": "gemma3",
    "Phi-3": "phi3",
    "GPT-2": "gpt2",
    "Mixtral": "mixtral",
    "Qwen3-MoE": "qwen3_moe",
    "DeepSeek-V3": "deepseek_v3",
    "gpt-oss": "gpt_oss",
    "Qwen3-Next": "qwen3_next",
    "Qwen3.5 (text)": "qwen3_5_text",
    "Jamba": "jamba",
    "Mamba-2": "mamba2",
    "Falcon-H1": "falcon_h1",
    "LFM2": "lfm2",
    "GPT-NeoX": "gpt_neox",
    "Cohere": "cohere",
    "OLMo 2": "olmo2",
    "Qwen2": "qwen2",
    "Qwen2-MoE": "qwen2_moe",
    "SmolLM3": "smollm3",
    "Gemma 2": "gemma2",
    "Phi-2": "phi",
    "Falcon": "falcon",
    "Granite": "granite",
    "GLM-4": "glm4",
    "StarCoder2": "starcoder2",
}


IMAGES: dict[str, Any] = {
    "processor_type": "AutoProcessor",
    "tokenizer_config": None,
    "chat_template": "tokenizer_default",
    "datasets": [{"path": str(CHATS), "ds_type": "json", "type": "chat_template"}],
    "skip_prepare_dataset": True,
    "remove_unused_columns": False,
    "pad_to_sequence_len": None,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 3,
}
VISION = {
    "LLaVA": ("llava-vision", IMAGES),
    "Gemma 3": ("gemma3-vision", IMAGES),
}


# Axolotl's lora_target_linear would name the head too, which trains as it is
NO_HEAD: dict[str, Any] = {
    "lora_target_linear": False,
    "lora_target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"],
}
REWARD: dict[str, Any] = {
    "reward_model": True,
    "chat_template": "chatml",
    "datasets": [
        {"path": str(PREFERENCES), "ds_type": "json", "type": "bradley_terry.chat_template"}
    ],
    "sequence_len": 128,
    "remove_unused_columns": False,
}
STEPWISE: dict[str, Any] = {
    "process_reward_model": True,
    "datasets": [{"path": str(STEPS), "ds_type": "json", "type": "stepwise_supervised"}],
    "remove_unused_columns": False,
}
HEADS = {
    "Llama, reward_model": ("llama-reward", REWARD),
    "Qwen3, process_reward_model": ("qwen3-steps", STEPWISE),
}


def trainings(family: str, column: dict[str, Any]) -> Pair:
    settings: dict[str, Any] = {"max_grad_norm": 0.1, "gradient_accumulation_steps": 2}
    return pair(family, settings, column, plan=PAGED_AND_MIXED)


CELLS: tuple[Cell, ...] = tuple(
    Cell("Model families", row, column, trainings(family, keys))
    for row, family in FAMILIES.items()
    for column, keys in COLUMNS.items()
) + tuple(
    Cell(
        table,
        row,
        column,
        pair(
            family,
            keys,
            settings,
            NO_HEAD if rows is HEADS and "adapter" in keys else {},
            plan=PAGED_AND_MIXED,
        ),
    )
    for table, rows in {"Vision-language models": VISION, "Other heads": HEADS}.items()
    for row, (family, settings) in rows.items()
    for column, keys in COLUMNS.items()
)
