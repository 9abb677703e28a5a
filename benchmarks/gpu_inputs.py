"""Write what `benchmarks/gpu.sh` trains: a tokenizer, data, models with random weights
and one YAML for each run.

Usage: python benchmarks/gpu_inputs.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from comparison.cases import SHAPES
from comparison.models import normal
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen3MoeConfig,
)
from transformers.modeling_utils import PreTrainedModel

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from demo import VOCAB_SIZE, docstrings, tokenizer_of  # noqa: E402

SHARD_BYTES = 4 << 30
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SMALL = LlamaConfig(
    **TOKENS,
    vocab_size=VOCAB_SIZE,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=12,
    num_attention_heads=16,
    num_key_value_heads=4,
    dtype="bfloat16",
)
EXPERTS = Qwen3MoeConfig(
    **TOKENS,
    vocab_size=VOCAB_SIZE,
    hidden_size=512,
    intermediate_size=1024,
    moe_intermediate_size=256,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    num_experts=16,
    num_experts_per_tok=4,
    dtype="bfloat16",
)


def _llama(name: str, tied: bool = False) -> LlamaConfig:
    """The configuration of a shape that `compare.py` trains, too."""
    shape = SHAPES[name]
    return LlamaConfig(
        **TOKENS,
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=tied,
        dtype="bfloat16",
    )


MODELS = {
    "small": SMALL,
    "experts": EXPERTS,
    "8b": _llama("8b"),
    "3b": _llama("3b", True),
}

FULL = {"optimizer": "adamw_torch_fused", "learning_rate": 1e-4}
LORA = {
    **FULL,
    "adapter": "lora",
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0,
    "lora_target_linear": True,
}
KERNELS = {f"lora_{part}_kernel": True for part in ("mlp", "qkv", "o")}
QLORA = {**LORA, "adapter": "qlora", "load_in_4bit": True}
SHORT = {"sequence_len": 512, "micro_batch_size": 2, "gradient_accumulation_steps": 2}
LONG = {"sequence_len": 2048, "micro_batch_size": 1, "gradient_accumulation_steps": 4}


def runs() -> dict[str, dict[str, Any]]:
    """YAML by name: small ones to compare with plain runs, large ones to predict."""
    return {
        "exact-lora": _run("small", 4 << 10, SHORT, LORA, KERNELS, _knobs(2, 2, 3, 4)),
        "exact-qlora": _run("small", 4 << 10, SHORT, QLORA, _knobs(2, 3, 2, 4)),
        "exact-full": _run("small", 4 << 10, SHORT, FULL, _knobs(2, 3, 2, 4)),
        "exact-experts": _run("experts", 4 << 10, SHORT, FULL, _knobs(0, 2, 0, 4)),
        "lora-8b-12gb": _run("8b", 12 << 10, LONG, LORA, KERNELS),
        "qlora-8b-8gb": _run("8b", 8 << 10, LONG, QLORA, KERNELS),
        "full-3b-16gb": _run("3b", 16 << 10, LONG, FULL),
    }


def _knobs(persist: int, buffer: int, swap: int, checkpoint: int) -> dict[str, int]:
    knobs = {
        "persist": persist,
        "buffer": buffer,
        "swap": swap,
        "checkpoint": checkpoint,
    }
    return {f"protrain_n_{name}_override": value for name, value in knobs.items()}


def _run(model: str, budget_mib: int, *parts: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "plugins": ["axolotl.integrations.protrain.ProTrainPlugin"],
        "protrain_auto_memory": True,
        "protrain_capacity_bytes": f"{budget_mib}MiB",
        "base_model": f"models/{model}",
        "datasets": [{"path": "data.jsonl", "ds_type": "json", "type": "completion"}],
        "dataset_num_proc": 1,
        "val_set_size": 0,
        "sample_packing": False,
        "pad_to_sequence_len": True,
        "seed": 42,
        "lr_scheduler": "constant",
        "max_grad_norm": 1.0,
        "bf16": True,
        "tf32": False,
        "attn_implementation": "sdpa",
        "logging_steps": 1,
        "save_strategy": "no",
    }
    for part in parts:
        settings |= part
    return settings


def write_tokenizer_and_data(folder: Path) -> Any:
    texts = list(docstrings())
    # each row is longer than the longest sequence, so that no step is padded
    rows = ["\n".join(texts[first : first + 120]) for first in range(0, 1200, 10)]
    lines = [json.dumps({"text": row}) + "\n" for row in rows if len(row) > 20_000]
    (folder / "data.jsonl").write_text("".join(lines))
    return tokenizer_of(texts[::4])


def write_model(folder: Path, config: Any) -> None:
    """Large ones from one pool of normal numbers, in shards, never the whole twice."""
    if config.hidden_size <= SMALL.hidden_size:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model.config.save_pretrained(folder)
    shard: dict[str, torch.Tensor] = {}
    where: dict[str, str] = {}
    nbytes = number = 0

    def close() -> None:
        nonlocal shard, nbytes, number
        name = f"model-{number:05d}.safetensors"
        save_file(shard, folder / name, {"format": "pt"})
        where.update(dict.fromkeys(shard, name))
        shard, nbytes, number = {}, 0, number + 1

    # parameters come once, tied or not
    for seed, (name, weight) in enumerate(model.named_parameters()):
        value = (
            torch.ones(weight.shape, dtype=torch.bfloat16)
            if weight.ndim == 1
            else normal(weight.shape, torch.bfloat16, seed)
        )
        shard[name] = value
        nbytes += value.nbytes
        if nbytes > SHARD_BYTES:
            close()
    if shard:
        close()
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def main(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer_and_data(folder)
    for name, settings in runs().items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    for name in names or MODELS:
        path = folder / "models" / name
        path.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(path)
        write_model(path, MODELS[name])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
