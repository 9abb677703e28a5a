"""A small configuration of any model type of transformers: its defaults, made smaller.

By rule: what an integer means is told by its name. Layers remain of every kind.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

from tiny_models import NUM_BLOCKS
from transformers.configuration_utils import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

_VOCABULARY = 320

_SIZES: tuple[tuple[str, int], ...] = (
    (r"topk_group|num_kv_shared_layers|num_dense_layers|\w+_offset", 1),
    (r"\w+_(period|interval)", 2),
    (r"qk_head_dim", 32),
    (r"index_topk", 16),
    # twice as wide as what comes in
    (r"attention_head_dim", 32),
    (r"attention_hidden_size|mamba_d_ssm", 128),
    (r"\w*mamba\w*heads|num_heads", 8),
    (r"(.*_)?(num_key_value_heads|num_kv_heads|kv_n_heads|num_query_groups)", 2),
    (r"(.*_)?(n|num|attention|resampler|conf_num)(_\w+)?_?heads?|heads", 4),
    (r"(.*_)?(head_?dim|d_head|dim_head|d_kv|kv_channels|head_size|rotary_dim)", 16),
    (r"(.*_)?(hidden_layers|num_layers|n_layers?|depth|\w+coder_layers|layers)", 4),
    (r"hidden_size_global|(.*_)?(hidden_size|d_model|n_embd|embed_dim)", 64),
    (r"(.*_)?(embedding_size|dim|width)", 64),
    (r"(.*_)?(intermediate_size|ffn_dim|d_ff|dff|ffn_hidden_size|inner\w*)", 96),
    (r"(.*_)?vocab(_\w+)?", _VOCABULARY),
    (r"(.*_)?(ranks?|state_size|d_state)", 8),
    (r"(.*_)?(num|n|moe_num)(_\w+)?_experts", 4),
    (r"(.*_)?(experts_per_tok|top_?k|moe_k|n_groups?|num_groups)", 2),
    (r"(.*_)?(chunk_size|sliding_window|window_size|block_size|chunk_length)", 16),
    (r"image_seq_length|mm_tokens_per_image|num_image_tokens|(.*_)?image_size", 16),
    (r"(.*_)?patch_size", 4),
)
"""Names of integers in configurations, and what they become; the first that matches."""
_TOKENS = r".*_token_(id|index)|.*_(start|end)_id"
_UNSET = r"head_dim|num_key_value_heads|n_\w+_experts|num_experts_per_tok"
"""Names of sizes that defaults of some configurations leave open."""

_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_MROPE = {"mrope_section": [2, 2, 4]}
_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "output_gate_type": "sigmoid",
}
_FACTS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": _ROPE}}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8}},
    "chameleon": {"vocabulary_map": {"<image>": 300}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"] * 2}},
    "mistral4": {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8},
    "falcon_h1": {"mamba_d_head": 16},
    "granite4_vision": {
        "text_config": {"model_type": "granite"},
        "deepstack_layer_map": [[1, 0], [2, 1]],
        "downsample_rate": "1/2",
    },
    "paddleocr_vl": {"text_config": {"rope_parameters": _ROPE | _MROPE}},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 300},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 300},
    "reformer": {
        "is_decoder": True,
        # it seeds its dropout by the clock
        "hash_seed": 0,
        "hidden_dropout_prob": 0,
        "local_attention_probs_dropout_prob": 0,
        "axial_pos_shape": (4, 8),
        "axial_pos_embds_dim": (16, 48),
    },
    "step3p7": {"text_config": {"sliding_window": 16}},
    "udop": {"decoder_start_token_id": 0},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"hybrid_layer_ids": [1, 3]},
}
"""What a family's defaults lack, or what the rule cannot know of it."""


def _shrunk(config: PretrainedConfig, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a small configuration of the same class."""
    given = vars(config)
    depth = given.get("num_hidden_layers", given.get("n_layer"))
    tokens = itertools.count(_VOCABULARY - 1, -1)
    changed: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, PretrainedConfig):
            inner = _shrunk(value, facts.get(name, {}))
            changed[name] = {"model_type": value.model_type, **inner}
        elif isinstance(value, (list, tuple)) and len(value) == depth:
            # some of each kind
            changed[name] = (list(dict.fromkeys(value)) * NUM_BLOCKS)[:NUM_BLOCKS]
        elif type(value) is int and re.fullmatch(_TOKENS, name):
            changed[name] = value if value < 8 else next(tokens)
        elif type(value) is int or (value is None and re.fullmatch(_UNSET, name)):
            found = (size for form, size in _SIZES if re.fullmatch(form, name))
            size = next(found, value)
            changed[name] = size if value is None else min(size, value)
    heads = "num_attention_heads", "num_key_value_heads"
    if len({given.get(name, name) for name in heads}) == 1:
        changed[heads[1]] = changed[heads[0]]
    rope = given.get("rope_parameters") or {}
    has_parts = {*rope, *getattr(config, "ignore_keys_at_rope_validation", ())}
    if "mrope_section" in has_parts:
        # three parts of the rotated half of a head
        half = int(8 * rope.get("partial_rotary_factor", 1))
        sections = [half // 4, half // 4, half - half // 4 * 2]
        changed["rope_parameters"] = _ROPE | rope | {"mrope_section": sections}
    nested = [k for k, v in given.items() if isinstance(v, PretrainedConfig)]
    return changed | {k: v for k, v in facts.items() if k not in nested}


def shrunk_config(model_type: str) -> PretrainedConfig:
    """One of a few thousand parameters, where the rule knows what to shrink."""
    config_class = CONFIG_MAPPING[model_type]
    return config_class(**_shrunk(config_class(), _FACTS.get(model_type, {})))
