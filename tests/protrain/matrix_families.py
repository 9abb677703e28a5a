"""Cells of the compatibility matrix: model families, full, LoRA and QLoRA."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from axolotl_jobs import LORA, PAGED, job, overrides, pair
from matrix import Cell
from tiny_models import CHATS, PREFERENCES, STEPS

Settings = dict[str, Any]

COLUMNS: dict[str, Settings] = {
    "full": {},
    "LoRA": LORA,
    "QLoRA": LORA | {"adapter": "qlora", "load_in_4bit": True},
}
# every block is paged; two of them recompute, the others keep what they save
PLAN = overrides(n_persist=0, n_buffer=2, n_checkpoint=2)
TEXT: Settings = {
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.1,
    "max_steps": 2,
}


def targets(*names: str) -> Settings:
    """LoRA on these modules alone."""
    return {"lora_target_linear": False, "lora_target_modules": list(names)}


@dataclass(frozen=True)
class Row:
    """A family, what all its trainings set, and what those of its adapters set."""

    family: str
    settings: Settings = field(default_factory=dict)
    adapters: Settings = field(default_factory=dict)
    columns: tuple[str, ...] = tuple(COLUMNS)


UNQUANTISED = ("full", "LoRA")
EAGER: Settings = {"attn_implementation": "eager"}
# PEFT refuses `out_proj` of state-space layers
STATE_SPACE = targets("in_proj", "q_proj", "v_proj", "down_proj")
# GPT-2 keeps its weights transposed, in a class that lora_target_linear skips
CONV1D = targets("c_attn", "c_proj", "c_fc") | {"lora_fan_in_fan_out": True}
SEQ2SEQ: Settings = {"type_of_model": "AutoModelForSeq2SeqLM"}
T5_PARTS = targets("q", "v", "wi_0", "wo")
BART_PARTS = targets("q_proj", "v_proj", "fc1", "fc2")

TEXT_MODELS = {
    "Llama": Row("llama"),
    "Mistral": Row("mistral"),
    "Qwen2": Row("qwen2"),
    "Qwen3": Row("qwen3"),
    "Gemma": Row("gemma"),
    "Gemma 2": Row("gemma2"),
    "Gemma 3": Row("gemma3"),
    "Phi-2": Row("phi"),
    "Phi-3": Row("phi3"),
    "GPT-2": Row("gpt2", adapters=CONV1D),
    "GPT-NeoX": Row("gpt_neox"),
    # bitsandbytes does not take Falcon's own class of linear layers for one
    "Falcon": Row("falcon", columns=UNQUANTISED),
    "Cohere": Row("cohere"),
    "OLMo 2": Row("olmo2"),
    "Granite": Row("granite"),
    "GLM-4": Row("glm4"),
    "EXAONE 4": Row("exaone4"),
    "Nemotron": Row("nemotron"),
    "SmolLM3": Row("smollm3"),
    "StarCoder2": Row("starcoder2"),
    "Mixtral (experts)": Row("mixtral"),
    "Qwen2-MoE (experts)": Row("qwen2_moe"),
    "Qwen3-MoE (experts)": Row("qwen3_moe"),
    "DeepSeek-V3 (experts)": Row("deepseek_v3"),
    "GraniteMoE (experts)": Row("granitemoe"),
    "gpt-oss (experts)": Row("gpt_oss", EAGER),
    "Qwen3-Next (hybrid)": Row("qwen3_next"),
    "Qwen3.5 (hybrid)": Row("qwen3_5_text"),
    "Jamba (hybrid)": Row("jamba"),
    # a plain QLoRA run fails too, in the CPU kernel of bitsandbytes
    "Falcon-H1 (hybrid)": Row("falcon_h1", adapters=STATE_SPACE, columns=UNQUANTISED),
    "LFM2 (hybrid)": Row("lfm2"),
    "Mamba-2": Row("mamba2", EAGER, STATE_SPACE),
    "Aria (experts)": Row("aria_text"),
    # with adapters a plain run fails too: it adds to frozen embeddings in place
    "BLT": Row("blt", columns=("full",)),
    # PEFT does not know its grouped linear layers
    "DeepSeek-V4 (experts)": Row("deepseek_v4", EAGER, columns=("full",)),
    "JetMoE (experts)": Row("jetmoe"),
    "MiniMax (hybrid)": Row("minimax"),
    "Nemotron-H (hybrid)": Row("nemotron_h", adapters=STATE_SPACE),
    "RecurrentGemma (hybrid)": Row("recurrent_gemma"),
    "XLM": Row("xlm", EAGER),
    "Zamba 2 (hybrid)": Row("zamba2", adapters=STATE_SPACE),
    "T5 (encoder and decoder)": Row("t5-seq2seq", SEQ2SEQ, T5_PARTS),
    "BART (encoder and decoder)": Row("bart-seq2seq", SEQ2SEQ, BART_PARTS),
}

# images in every second row: the tower of most micro-batches of a step is not used
IMAGES: Settings = {
    "processor_type": "AutoProcessor",
    "tokenizer_config": None,
    "chat_template": "tokenizer_default",
    "datasets": [{"path": str(CHATS), "ds_type": "json", "type": "chat_template"}],
    "skip_prepare_dataset": True,
    "remove_unused_columns": False,
    "pad_to_sequence_len": None,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 3,
    "max_steps": 2,
}
FREEZE: Settings = {"freeze_mm_modules": True}
LANGUAGE: Settings = {
    "lora_target_linear": False,
    "lora_target_modules": r".*language_model.*\.(q|v|up|down)_proj",
}
VISION_MODELS = {
    "LLaVA": Row("llava-vision", IMAGES),
    "LLaVA, two images or none": Row(
        "llava-vision", IMAGES | {"micro_batch_size": 2}, columns=UNQUANTISED
    ),
    "LLaVA, adapters on the text": Row(
        "llava-vision", IMAGES, LANGUAGE, ("LoRA", "QLoRA")
    ),
    "LLaVA, `freeze_mm_modules`": Row(
        "llava-vision", IMAGES | FREEZE, columns=UNQUANTISED
    ),
    "Gemma 3": Row("gemma3-vision", IMAGES),
    "Gemma 3, `freeze_mm_modules`": Row(
        "gemma3-vision", IMAGES | FREEZE, columns=("full",)
    ),
}

# what a key masks is no part of the loss: test_parity.py has that each of them does
MARKS: Settings = {
    "role_boundaries": [
        {"role": role, "start": f"<|{role}|>", "end": "eos_token"}
        for role in ("user", "assistant")
    ]
}


def chats(**keys: Any) -> Settings:
    """The data of `IMAGES`, with keys of its own."""
    return {"datasets": [{**IMAGES["datasets"][0], **keys}]}


MASKS: dict[str, Settings] = {
    "role_boundaries": MARKS,
    "roles_to_train": MARKS | chats(roles_to_train=["user"]),
    "train_on_eos": MARKS | chats(train_on_eos="none"),
    "train_on_inputs": MARKS | {"train_on_inputs": True},
}

PREFERRED: Settings = {
    "reward_model": True,
    "chat_template": "chatml",
    "datasets": [
        {
            "path": str(PREFERENCES),
            "ds_type": "json",
            "type": "bradley_terry.chat_template",
        }
    ],
    "sequence_len": 128,
}
JUDGED: Settings = {
    "process_reward_model": True,
    "datasets": [
        {"path": str(STEPS), "ds_type": "json", "type": "stepwise_supervised"}
    ],
}
HEAD: Settings = {"remove_unused_columns": False, "max_steps": 2}
# Axolotl's lora_target_linear names the head too, which PEFT trains as it is
BODY = targets("q_proj", "v_proj", "up_proj", "down_proj")
HEADS = {
    "Llama, `reward_model`": Row("llama-reward", HEAD | PREFERRED, BODY),
    "Qwen3, `process_reward_model`": Row(
        "qwen3-steps", HEAD | JUDGED, BODY, UNQUANTISED
    ),
}


def _cells(table: str, rows: dict[str, Row], common: Settings) -> list[Cell]:
    return [
        Cell(
            table,
            name,
            column,
            pair(
                row.family,
                common,
                COLUMNS[column],
                row.settings,
                row.adapters if "adapter" in COLUMNS[column] else {},
                # a head in bf16 after fp32 layers needs autocast, in plain runs too
                {"bf16": True} if column == "QLoRA" and row.family in HEADED else {},
                plan=PLAN,
            ),
        )
        for name, row in rows.items()
        for column in row.columns
    ]


HEADED = {row.family for row in HEADS.values()}
QUANTISED_HEAD = Cell(
    "Reward models",
    "Qwen3, `process_reward_model`",
    "QLoRA",
    refused=job(
        "qwen3-steps", COLUMNS["QLoRA"], HEAD, JUDGED, BODY, {"bf16": True}, PAGED, PLAN
    ),
    reason="Axolotl quantises the new head too, which then cannot train",
    message="score.modules_to_save.default.weight: a quantised weight is trainable",
)
CELLS: tuple[Cell, ...] = (
    *_cells("Model families", TEXT_MODELS, TEXT),
    *_cells("Vision-language models", VISION_MODELS, {}),
    *_cells(
        "Assistant-only loss with images",
        {
            f"`{key}`": Row("llava-vision", IMAGES | settings, columns=("LoRA",))
            for key, settings in MASKS.items()
        },
        {},
    ),
    *_cells("Reward models", HEADS, {}),
    QUANTISED_HEAD,
)
