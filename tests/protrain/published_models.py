"""What config.json of published models says, as far as it decides a plan."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

SMALL: Config = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
}
"""A hundred million parameters: more than a card of 1 GiB has beside its context."""
MIXTRAL = SMALL | {
    "model_type": "mixtral",
    "intermediate_size": 512,
    "num_local_experts": 4,
    "tie_word_embeddings": True,
}
LLAMA_8B: Config = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
QWEN_30B: Config = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
}
GEMMA_27B: Config = {
    "model_type": "gemma3",
    "mm_tokens_per_image": 256,
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "image_token_index": 262144,
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "query_pre_attn_scalar": 168,
        "sliding_window": 1024,
        "vocab_size": 262208,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 896,
        "patch_size": 14,
    },
}

BASES = {
    "NousResearch/Meta-Llama-3.1-8B": LLAMA_8B,
    "NousResearch/Meta-Llama-3-70B": LLAMA_70B,
    "Qwen/Qwen3-30B-A3B": QWEN_30B,
    "google/gemma-3-27b-it": GEMMA_27B,
}
"""Of the examples."""

TEXT: Config = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "vocab_size": 320,
}
"""Of models that are small, and look at images."""
QWEN_VL: Config = {
    "model_type": "qwen2_5_vl",
    "vision_start_token_id": 290,
    "vision_end_token_id": 291,
    "image_token_id": 292,
    "video_token_id": 293,
    "vision_config": {
        "depth": 4,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "window_size": 112,
        "fullatt_block_indexes": [1, 3],
        "out_hidden_size": 48,
    },
    "text_config": TEXT
    | {
        "model_type": "qwen2_5_vl_text",
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    },
}
LLAVA: Config = {
    "model_type": "llava",
    "image_token_index": 299,
    "image_seq_length": 16,
    "text_config": TEXT,
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": 56,
        "patch_size": 14,
    },
}
UNKNOWN_IMAGES: Config = {
    "model_type": "mistral3",
    "image_token_index": 299,
    "text_config": TEXT | {"model_type": "mistral"},
    "vision_config": LLAVA["vision_config"] | {"model_type": "pixtral"},
}
