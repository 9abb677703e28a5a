"""Randomly initialised models of a few thousand parameters, one a family.

Sizes are odd on purpose: rows that are no multiple of 64 bytes leave alignment gaps
inside a chunk, and a model whose heads, layers and experts differ in number shows a
mix-up that equal sizes would hide.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

NUM_BLOCKS = 4
VOCABULARY = 288
TOKENIZER = Path("tokenizer")
DATA = Path("data.jsonl")
MODELS = Path("models")

_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1}
_COMMON = _TOKENS | {
    "eos_token_id": 2,
    "hidden_size": 36,
    "intermediate_size": 56,
    "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
}


def _llama(**settings: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_COMMON, **settings)


def _llama_tied() -> Any:
    return _llama(tie_word_embeddings=True)


def _qwen3() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**_COMMON, head_dim=12, tie_word_embeddings=False)


def _mistral() -> Any:
    from transformers import MistralConfig

    return MistralConfig(**_COMMON, head_dim=12, sliding_window=16)


def _gemma3() -> Any:
    from transformers import Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention"] * (NUM_BLOCKS // 2)
    return Gemma3TextConfig(
        **_COMMON,
        head_dim=12,
        query_pre_attn_scalar=12,
        sliding_window=16,
        layer_types=kinds,
    )


def _phi3() -> Any:
    from transformers import Phi3Config

    return Phi3Config(**_COMMON)


def _gpt2() -> Any:
    from transformers import GPT2Config

    # dropout stays at its default: what recomputes has to repeat it
    return GPT2Config(
        **_TOKENS,
        eos_token_id=2,
        n_embd=36,
        n_layer=NUM_BLOCKS,
        n_head=3,
        n_positions=256,
    )


def _mixtral() -> Any:
    from transformers import MixtralConfig

    # the grouped matrix product of the experts wants rows of 16 bytes
    sizes = _COMMON | {"hidden_size": 40, "num_attention_heads": 5}
    return MixtralConfig(**sizes, num_local_experts=3, num_experts_per_tok=2)


def _opt_skipping_layers() -> Any:
    from transformers import OPTConfig

    return OPTConfig(
        **_TOKENS,
        eos_token_id=2,
        hidden_size=36,
        word_embed_proj_dim=36,
        ffn_dim=56,
        num_hidden_layers=NUM_BLOCKS,
        num_attention_heads=3,
        max_position_embeddings=256,
        layerdrop=0.5,
    )


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "llama-tied": _llama_tied,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "mixtral": _mixtral,
}
SKIPPING = "opt-skipping-layers"

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_OTHER: dict[str, dict[str, Any]] = {
    "cohere": {},
    "deepseek_v3": {
        **_EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "exaone4": {"head_dim": 12},
    "falcon": {"new_decoder_architecture": False},
    "gemma": {"head_dim": 12},
    "gemma2": {"head_dim": 12},
    "glm4": {"head_dim": 12},
    "gpt_neox": {},
    "granite": {},
    "granitemoe": {"num_experts_per_tok": 2, "num_local_experts": 4},
    "jamba": {
        "num_experts": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
        "mamba_dt_rank": 8,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * (NUM_BLOCKS // 2)},
    "nemotron": {},
    "olmo2": {},
    "phi": {},
    "qwen2": {},
    "qwen2_moe": {
        **_EXPERTS,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_moe": {**_EXPERTS, "num_experts": 4, "head_dim": 12},
    "qwen3_next": {
        **_EXPERTS,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
        "head_dim": 12,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "smollm3": {},
    "starcoder2": {},
}
"""More model types of transformers, and what their configurations need."""

OTHER_FAMILIES = tuple(_OTHER)


def _other(model_type: str) -> Any:
    from transformers import AutoConfig

    sizes = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return AutoConfig.for_model(model_type, **(_COMMON | sizes | _OTHER[model_type]))


_QUANTISED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-nf4": (
        "llama",
        {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
        },
    ),
    "llama-8bit": ("llama", {"load_in_8bit": True}),
}
"""Families whose weights bitsandbytes has quantised before they were saved."""

_ALL = {
    **FAMILIES,
    SKIPPING: _opt_skipping_layers,
    **{name: partial(_other, name) for name in _OTHER},
}


def model_path(family: str) -> Path:
    """Where `build_model` puts a family's model, below the folder of all jobs."""
    return MODELS / family


def build_model(root: Path, family: str) -> None:
    """Save a family's `random_model`, quantised if the family is."""
    if family in _QUANTISED:
        model = _quantised_model(root, *_QUANTISED[family])
    else:
        model = random_model(family)
    _save_once(root / model_path(family), model.save_pretrained)


def _quantised_model(root: Path, family: str, settings: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if not (root / model_path(family)).exists():
        build_model(root, family)
    return AutoModelForCausalLM.from_pretrained(
        root / model_path(family),
        quantization_config=BitsAndBytesConfig(**settings),
        device_map={"": "cpu"},
    )


def random_model(family: str) -> Any:
    """A model in fp32 with the same weights every time."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(_ALL[family]())


def build_inputs(root: Path) -> None:
    """Save the tokenizer and the data that all families share."""
    _save_once(root / TOKENIZER, _byte_tokenizer().save_pretrained)
    chance = random.Random(0)  # noqa: S311 - not a secret
    words = "page block slot chunk host device copy fetch event stream of the".split()
    rows = [
        {"text": " ".join(chance.choices(words, k=chance.randint(3, 12)))}
        for _ in range(48)
    ]
    (root / DATA).write_text("".join(json.dumps(row) + "\n" for row in rows))


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    numbers = {text: n for n, text in enumerate([*special.values(), *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=numbers, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def _save_once(folder: Path, save: Callable[[Path], Any]) -> None:
    """Two workers may build the same thing: the first whole folder stays."""
    if folder.exists():
        return
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    save(unfinished)
    try:
        unfinished.rename(folder)
    except OSError:
        if not folder.exists():
            raise
