"""Randomly initialised models of a few thousand parameters, one a family.

Sizes are odd on purpose: rows that are no multiple of 64 bytes leave alignment gaps
inside a chunk, and a model whose heads, layers and experts differ in number shows a
mix-up that equal sizes would hide.
"""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

NUM_BLOCKS = 4
VOCABULARY = 288
IMAGE_TOKEN = 261
IMAGE_SIDE = 8
TOKENIZER = Path("tokenizer")
DATA = Path("data.jsonl")
CHATS = Path("chats.jsonl")
PREFERENCES = Path("preferences.jsonl")
ANSWERS = Path("answers.jsonl")
STEPS = Path("steps.jsonl")
TAUGHT = Path("taught.jsonl")
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


_PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _COMMON),
    "llama-tied": ("llama", _COMMON | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", _COMMON | {"head_dim": 12, "tie_word_embeddings": False}),
    "mistral": ("mistral", _COMMON | {"head_dim": 12, "sliding_window": 16}),
    "gemma3": (
        "gemma3_text",
        _COMMON
        | {
            "head_dim": 12,
            "query_pre_attn_scalar": 12,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * (NUM_BLOCKS // 2),
        },
    ),
    "phi3": ("phi3", _COMMON),
    # dropout stays at its default: what recomputes has to repeat it
    "gpt2": (
        "gpt2",
        _TOKENS
        | {
            "eos_token_id": 2,
            "n_embd": 36,
            "n_layer": NUM_BLOCKS,
            "n_head": 3,
            "n_positions": 256,
        },
    ),
    # the grouped matrix product of the experts wants rows of 16 bytes
    "mixtral": (
        "mixtral",
        _COMMON
        | {
            "hidden_size": 40,
            "num_attention_heads": 5,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
        },
    ),
}
FAMILIES = tuple(_PLAIN)
"""Those that most tests train."""
SKIPPING = "opt-skipping-layers"
_MORE: dict[str, tuple[str, dict[str, Any]]] = {
    SKIPPING: (
        "opt",
        _TOKENS
        | {
            "eos_token_id": 2,
            "hidden_size": 36,
            "word_embed_proj_dim": 36,
            "ffn_dim": 56,
            "num_hidden_layers": NUM_BLOCKS,
            "num_attention_heads": 3,
            "max_position_embeddings": 256,
            "layerdrop": 0.5,
        },
    ),
    "llama-reward": ("llama", _COMMON | {"num_labels": 1}),
    "qwen3-steps": _PLAIN["qwen3"],
    # 4-bit rows and columns that bitsandbytes can repack, on CPUs where it does
    "llama-wide": (
        "llama",
        _COMMON
        | {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2},
    ),
    "t5-seq2seq": (
        "t5",
        _TOKENS
        | {
            "d_model": 36,
            "d_kv": 12,
            "d_ff": 56,
            "num_layers": NUM_BLOCKS - 1,
            "num_decoder_layers": NUM_BLOCKS,
            "num_heads": 3,
            "decoder_start_token_id": 0,
            "feed_forward_proj": "gated-gelu",
        },
    ),
    "bart-seq2seq": (
        "bart",
        _TOKENS
        | {"d_model": 36, "max_position_embeddings": 256}
        | {f"{s}_attention_heads": 3 for s in ("encoder", "decoder")}
        | {f"{s}_ffn_dim": 56 for s in ("encoder", "decoder")}
        | {f"{s}_layers": NUM_BLOCKS for s in ("encoder", "decoder")},
    ),
}

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_HYBRID = {
    "head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
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
    "falcon_h1": {
        "head_dim": 12,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
    "gemma": {"head_dim": 12},
    "gemma2": {"head_dim": 12},
    "glm4": {"head_dim": 12},
    "gpt_neox": {},
    "gpt_oss": {
        "head_dim": 12,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * (NUM_BLOCKS // 2),
    },
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
    "mamba2": {
        "num_heads": 8,
        "head_dim": 12,
        "state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
    },
    "nemotron": {},
    "olmo2": {},
    "phi": {},
    "qwen2": {},
    "qwen2_moe": {
        **_EXPERTS,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_5_text": {
        **_HYBRID,
        "layer_types": ["linear_attention", "full_attention"] * (NUM_BLOCKS // 2),
    },
    "qwen3_moe": {**_EXPERTS, "num_experts": 4, "head_dim": 12},
    "qwen3_next": {
        **_EXPERTS,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
        **_HYBRID,
    },
    "smollm3": {},
    "starcoder2": {},
}
"""More model types of transformers, and what their configurations need."""


_WORDS = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
_IMAGE_TOKENS = {"image_token_id": IMAGE_TOKEN, "image_token_index": IMAGE_TOKEN}
_TOWER = {
    "hidden_size": 40,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": IMAGE_SIDE,
    "patch_size": IMAGE_SIDE // 2,
}
_VISION: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": {"model_type": "llama"},
        "vision_config": {"model_type": "clip_vision_model", **_TOWER},
        "image_seq_length": 4,
    },
    "gemma3": {
        "text_config": {"model_type": "gemma3_text", "head_dim": 12},
        "vision_config": {"model_type": "siglip_vision_model", **_TOWER},
        "mm_tokens_per_image": 4,
        "boi_token_index": IMAGE_TOKEN - 2,
        "eoi_token_index": IMAGE_TOKEN - 1,
    },
    "qwen2_5_vl": {
        "text_config": {
            "model_type": "qwen2_5_vl_text",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 2, 2],
            },
        },
        "vision_config": {
            "depth": 3,
            "hidden_size": 40,
            "intermediate_size": 52,
            "num_heads": 2,
            "patch_size": IMAGE_SIDE // 2,
            "window_size": IMAGE_SIDE * 2,
            "fullatt_block_indexes": [1],
            "out_hidden_size": 48,
        },
        "vision_start_token_id": IMAGE_TOKEN - 2,
        "vision_end_token_id": IMAGE_TOKEN - 1,
        "video_token_id": IMAGE_TOKEN + 1,
    },
}
"""Models with two stacks of blocks, one for images and one for text."""


_BY_RULE = (
    "aria_text",
    "blt",
    "deepseek_v4",
    "jetmoe",
    "minimax",
    "nemotron_h",
    "recurrent_gemma",
    "xlm",
    "zamba2",
)
"""Families of odd structure, as `make sweep` trains them."""

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


_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    **_PLAIN,
    **_MORE,
    **{name: (name, _COMMON | _WORDS | keys) for name, keys in _OTHER.items()},
    # as many columns as a block of MXFP4 has
    "gpt_oss-mxfp4": (
        "gpt_oss",
        _COMMON
        | _WORDS
        | _OTHER["gpt_oss"]
        | {"hidden_size": 64, "intermediate_size": 32},
    ),
    "qwen3-fp8": _PLAIN["qwen3"],
    "deepseek_v3-fp8": ("deepseek_v3", _COMMON | _WORDS | _OTHER["deepseek_v3"]),
    **{
        f"{name}-vision": (
            name,
            _IMAGE_TOKENS
            | {"tie_word_embeddings": False}
            | keys
            | {"text_config": _COMMON | _WORDS | keys["text_config"]},
        )
        for name, keys in _VISION.items()
    },
}


def _config(family: str) -> Any:
    from shrunk_models import shrunk_config
    from transformers import AutoConfig

    if family in _BY_RULE:
        return shrunk_config(family)
    model_type, keys = _CONFIGS[family]
    return AutoConfig.for_model(model_type, **copy.deepcopy(keys))


MODEL_NAMES = (*_CONFIGS, *_BY_RULE)
"""All that `random_model` makes."""

_KINDS = {
    "vision": "ImageTextToText",
    "reward": "SequenceClassification",
    "steps": "TokenClassification",
    "seq2seq": "Seq2SeqLM",
}
"""The last word of a family's name, where it is no causal language model."""


def model_path(family: str) -> Path:
    """Where `build_model` puts a family's model, below the folder of all jobs."""
    return MODELS / family


def build_model(root: Path, family: str) -> None:
    """Save a family's `random_model`, quantised if the family is, and the processor of
    one that takes images."""

    def save(folder: Path) -> None:
        if family in _QUANTISED:
            model = _quantised_model(root, *_QUANTISED[family])
        else:
            model = random_model(family)
        model.save_pretrained(folder)
        if family.endswith("-mxfp4"):
            _pack_experts(folder)
        if family.endswith("-fp8"):
            _pack_layers(folder)
        if family in _PROCESSORS:
            _PROCESSORS[family]().save_pretrained(folder)

    _save_once(root / model_path(family), save)


def _quantised_model(root: Path, family: str, settings: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if not (root / model_path(family)).exists():
        build_model(root, family)
    return AutoModelForCausalLM.from_pretrained(
        root / model_path(family),
        quantization_config=BitsAndBytesConfig(**settings),
        device_map={"": "cpu"},
    )


def _pack_experts(folder: Path) -> None:
    """Random experts in MXFP4 in place of a saved gpt-oss's, as its authors publish it."""
    from safetensors.torch import load_file, save_file

    file, config = folder / "model.safetensors", folder / "config.json"
    weights = load_file(file)
    for name in [name for name in weights if name.endswith("_proj")]:
        experts, rows, columns = weights.pop(name).shape
        shape = (experts, columns, rows // 32, 16)
        weights[f"{name}_blocks"] = torch.randint(256, shape, dtype=torch.uint8)
        scales = torch.randint(118, 124, shape[:-1], dtype=torch.uint8)
        weights[f"{name}_scales"] = scales
    save_file(weights, file, {"format": "pt"})
    settings = json.loads(config.read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4"}
    config.write_text(json.dumps(settings))


FP8_BLOCK = 4, 2
"""As few as these models need for several blocks a weight; published are 128 by 128."""


def _pack_layers(folder: Path) -> None:
    """FP8 in place of a saved model's linear layers, as DeepSeek and Qwen publish it."""
    from safetensors.torch import load_file, save_file

    file, config = folder / "model.safetensors", folder / "config.json"
    weights = load_file(file)
    height, width = FP8_BLOCK
    for name, weight in list(weights.items()):
        is_kept = any(
            word in name for word in ("embed", "lm_head", "norm", "mlp.gate.")
        )
        if is_kept or weight.ndim != 2:
            continue
        rows, columns = weight.shape
        blocks = weight.float().view(rows // height, height, columns // width, width)
        scales = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scales[:, None, :, None]).view(rows, columns)
        weights[name] = codes.to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = scales
    save_file(weights, file, {"format": "pt"})
    settings = json.loads(config.read_text())
    settings["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": FP8_BLOCK,
    }
    config.write_text(json.dumps(settings))


def random_model(family: str) -> Any:
    """A model in fp32 with the same weights every time."""
    import transformers

    torch.manual_seed(0)
    kind = _KINDS.get(family.rpartition("-")[2], "CausalLM")
    loader = getattr(transformers, f"AutoModelFor{kind}")
    return loader.from_config(_config(family))


def _llava_processor() -> Any:
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    side = {"height": IMAGE_SIDE, "width": IMAGE_SIDE}
    return LlavaProcessor(
        CLIPImageProcessorPil(size=side, crop_size=side),
        _byte_tokenizer(with_images=True),
        patch_size=IMAGE_SIDE // 2,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    )


def _gemma3_processor() -> Any:
    from transformers import Gemma3ImageProcessorPil, Gemma3Processor

    side = {"height": IMAGE_SIDE, "width": IMAGE_SIDE}
    return Gemma3Processor(
        Gemma3ImageProcessorPil(size=side),
        _byte_tokenizer(with_images=True),
        image_seq_length=4,
        chat_template=CHAT_TEMPLATE.replace("<image>", "<start>"),
    )


_PROCESSORS = {"llava-vision": _llava_processor, "gemma3-vision": _gemma3_processor}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}</s>{% endfor %}"
)


def _chats(root: Path, chance: random.Random, words: list[str]) -> list[dict[str, Any]]:
    """Two turns each; images in half of the rows, so that batches differ in it."""
    from PIL import Image

    def text() -> dict[str, str]:
        return {"type": "text", "text": " ".join(chance.choices(words, k=3))}

    rows = []
    for number in range(24):
        picture = root / f"picture-{number}.png"
        image = Image.frombytes("RGB", (9, 12), chance.randbytes(9 * 12 * 3))
        image.save(picture)
        shown = [{"type": "image", "path": str(picture)}] if number % 2 else []
        turns = [
            {"role": "user", "content": [*shown, text()]},
            {"role": "assistant", "content": [text()]},
        ]
        again = [
            {"role": "user", "content": [text()]},
            {"role": "assistant", "content": [text()]},
        ]
        rows.append({"messages": [*turns, *again]})
    return rows


def build_inputs(root: Path) -> None:
    """Save the tokenizer and the data that all families share."""
    _save_once(root / TOKENIZER, _byte_tokenizer().save_pretrained)
    chance = random.Random(0)  # noqa: S311 - not a secret
    words = "page block slot chunk host device copy fetch event stream of the".split()
    rows = [
        {"text": " ".join(chance.choices(words, k=chance.randint(3, 12)))}
        for _ in range(48)
    ]
    _write_rows(root / CHATS, _chats(root, chance, words))
    _write_rows(root / PREFERENCES, [_preference(chance, words) for _ in range(24)])
    _write_rows(root / STEPS, [_judged_steps(chance, words) for _ in range(24)])
    _write_rows(root / ANSWERS, [_answers(chance, n) for n in range(24)])
    _write_rows(root / TAUGHT, [_taught(chance, words) for _ in range(24)])
    _write_rows(root / DATA, rows)


def _preference(chance: random.Random, words: list[str]) -> dict[str, Any]:
    names = ("input", "chosen", "rejected")
    return {"system": ""} | {n: " ".join(chance.choices(words, k=3)) for n in names}


def _judged_steps(chance: random.Random, words: list[str]) -> dict[str, Any]:
    return {
        "prompt": " ".join(chance.choices(words, k=3)),
        "completions": [" ".join(chance.choices(words, k=2)) for _ in range(3)],
        "labels": chance.choices([True, False], k=3),
    }


def _answers(chance: random.Random, number: int) -> dict[str, Any]:
    """Two answers, and one of them to be judged; in most batches one is the longest."""
    words = "page slot host copy".split()
    prompt, chosen, rejected = (
        " ".join(chance.choices(words, k=k)) for k in (2, 6, 3 + number % 4)
    )
    pair = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    return pair | {
        "completion": chosen if number % 4 else rejected,
        "label": number % 2 == 0,
    }


def _taught(chance: random.Random, words: list[str]) -> dict[str, Any]:
    """A chat with the four best tokens of a teacher for each of its last tokens."""
    user, assistant = (" ".join(chance.choices(words, k=k)) for k in (2, 4))
    tokens = range(5, VOCABULARY)
    return {
        "messages": [
            {"role": "user", "content": user},
            {"role": "assistant", "content": assistant},
        ],
        "target_token_ids": [chance.sample(tokens, 4) for _ in range(6)],
        "logprobs": [[-0.5, -1.5, -2.5, -3.5]] * 6,
    }


def _write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _byte_tokenizer(with_images: bool = False) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    images = ["<start>", "<end>", "<image>"] if with_images else []
    names = [*special.values(), *alphabet, *images]
    numbers = {text: n for n, text in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=numbers, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if not with_images:
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    marks = {"image_token": "<image>", "boi_token": "<start>", "eoi_token": "<end>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        extra_special_tokens=marks,
        chat_template=CHAT_TEMPLATE,
        **special,
    )


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
