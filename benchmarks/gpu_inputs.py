"""Write what `benchmarks/gpu.sh` trains: a tokenizer, data, models with random weights
and one YAML for each run.

With `--tiny` in place of the large models come small ones, and budgets to match, for a
rehearsal on a device that is emulated.
"""

from __future__ import annotations

import argparse
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
    GptOssConfig,
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


PACKED_EXPERTS = GptOssConfig(
    **TOKENS,
    vocab_size=VOCAB_SIZE,
    hidden_size=512,
    intermediate_size=512,
    num_hidden_layers=8,
    num_local_experts=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    dtype="bfloat16",
)
GPT_OSS = GptOssConfig(
    **TOKENS, num_hidden_layers=24, num_local_experts=32, dtype="bfloat16"
)
TINY = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6}
TINY_LLAMA = {**TINY, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY_GPT_OSS = {**TINY, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY_GPT_OSS |= {"num_local_experts": 4, "layer_types": ["full_attention"] * 6}
"""Sizes of a rehearsal."""


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


def models(tiny: bool) -> dict[str, Any]:
    """Configurations by the names of their folders."""
    large = {"8b": _llama("8b"), "3b": _llama("3b", True), "gpt-oss-20b": GPT_OSS}
    if tiny:
        for name, config in large.items():
            sizes = TINY_GPT_OSS if config is GPT_OSS else TINY_LLAMA
            own = {"vocab_size": VOCAB_SIZE, "head_dim": 64, **sizes}
            large[name] = type(config)(**{**config.to_dict(), **own})
    return {"small": SMALL, "experts": EXPERTS, "packed": PACKED_EXPERTS, **large}


PROTRAIN = "axolotl.integrations.protrain.ProTrainPlugin"
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
FP16 = {**LORA, "fp16": True, "bf16": False, "lora_dropout": 0.1}
GRPO: dict[str, Any] = {
    **LORA,
    "rl": "grpo",
    "datasets": [{"path": "rows.jsonl", "ds_type": "json", "type": "answers.rows"}],
    "dataset_prepared_path": "prepared-rows",
    "trl": {
        "reward_funcs": ["answers.vowels"],
        "num_generations": 4,
        "max_completion_length": 64,
        "beta": 0.1,
    },
    "remove_unused_columns": False,
    "pad_to_sequence_len": False,
}
SHORT = {"sequence_len": 512, "micro_batch_size": 2, "gradient_accumulation_steps": 2}
LONG = {"sequence_len": 2048, "micro_batch_size": 1, "gradient_accumulation_steps": 4}
PACKED = {
    **FULL,
    "adapter": "lora",
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "attn_implementation": "eager",
    "model_quantization_config": "Mxfp4Config",
    "model_quantization_config_kwargs": {"dequantize": True},
    **dict.fromkeys(KERNELS, False),
}


def runs(tiny: bool, disk: Path) -> dict[str, dict[str, Any]]:
    """YAML by name: small ones to compare with plain runs, large ones to predict."""
    if tiny:
        short, long = ({**keys, "sequence_len": 128} for keys in (SHORT, LONG))
        kernels = dict.fromkeys(KERNELS, False)
    else:
        short, long, kernels = SHORT, LONG, KERNELS
    full = {"optimizer": "adamw_torch"} if tiny else {}

    def mib(large: int, small: int) -> int:
        # a context of CUDA takes most of so small a budget
        context = 216 if torch.cuda.is_available() else 0
        return small + context if tiny else large << 10

    def on_disk(host_mib: int) -> dict[str, Any]:
        host = {"protrain_cpu_capacity_bytes": f"{host_mib}MiB"}
        return {**host, "protrain_disk_dir": str(disk)}

    small = 4 << 10
    found = {
        "exact-lora": _run("small", small, short, LORA, kernels, _knobs(2, 2, 3, 4)),
        "exact-qlora": _run("small", small, short, QLORA, _knobs(2, 3, 2, 4)),
        "exact-full": _run("small", small, short, FULL, _knobs(2, 3, 2, 4)),
        "exact-experts": _run("experts", small, short, FULL, _knobs(0, 2, 0, 4)),
        "exact-packed": _run("packed", small, short, PACKED, _knobs(1, 2, 2, 4)),
        "exact-disk": _run(
            *("small", small, short, LORA, kernels),
            *(_knobs(2, 2, 0, 4), on_disk(150)),
        ),
        # dropout is drawn again where a block recomputes
        "exact-fp16": _run("small", small, short, FP16, _knobs(2, 3, 2, 4)),
        "exact-grpo": _run("small", small, short, GRPO, kernels, _knobs(0, 2, 0, 4)),
        "lora-8b-12gb": _run("8b", mib(12, 24), long, LORA, kernels),
        "lora-8b-12gb-disk": _run(
            "8b", mib(12, 24), long, LORA, kernels, on_disk(mib(8, 8))
        ),
        "qlora-8b-8gb": _run("8b", mib(8, 24), long, QLORA, kernels),
        "full-3b-16gb": _run("3b", mib(16, 48), long, FULL),
        "gpt-oss-20b-12gb": _run("gpt-oss-20b", mib(12, 30), long, PACKED),
    }
    # what is compared with a plain run has no limit to hold
    capped = {} if tiny else {"plugins": [PROTRAIN, "gpu_cap.CapPlugin"]}
    return {
        name: settings | full | ({} if name.startswith("exact") else capped)
        for name, settings in found.items()
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
        "plugins": [PROTRAIN],
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
    asked = [json.dumps({"prompt": text[:60], "chosen": ""}) for text in texts[:64]]
    (folder / "rows.jsonl").write_text("\n".join(asked))
    return tokenizer_of(texts[::4])


def write_model(folder: Path, config: Any) -> None:
    """Large ones from one pool of normal numbers, in shards, never the whole twice.

    Experts of a gpt-oss are in MXFP4, as its authors publish them.
    """
    if config is SMALL or config is EXPERTS:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model.config.save_pretrained(folder)
    is_packed = isinstance(config, GptOssConfig)
    if is_packed:
        path = folder / "config.json"
        packed = {"quantization_config": {"quant_method": "mxfp4"}}
        path.write_text(json.dumps(json.loads(path.read_text()) | packed))
    shard: dict[str, torch.Tensor] = {}
    where: dict[str, str] = {}
    number = 0

    def close() -> None:
        nonlocal shard, number
        name = f"model-{number:05d}.safetensors"
        save_file(shard, folder / name, {"format": "pt"})
        where.update(dict.fromkeys(shard, name))
        shard, number = {}, number + 1

    # parameters come once, tied or not
    for seed, (name, weight) in enumerate(model.named_parameters()):
        if is_packed and name.endswith("_proj"):
            shard |= mxfp4(name, weight.shape, seed)
        elif weight.ndim == 1:
            shard[name] = torch.ones(weight.shape, dtype=torch.bfloat16)
        else:
            shard[name] = normal(weight.shape, torch.bfloat16, seed)
        if sum(value.nbytes for value in shard.values()) > SHARD_BYTES:
            close()
    if shard:
        close()
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def mxfp4(name: str, shape: torch.Size, seed: int) -> dict[str, torch.Tensor]:
    """Random numbers of about 0.02 under the two names of a packed weight."""
    experts, rows, columns = shape
    size = experts * columns * rows // 2
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randint(
        256, (min(size, 1 << 24),), dtype=torch.uint8, generator=generator
    )
    blocks = pool.repeat(-(-size // pool.numel()))[:size].clone()
    blocks = blocks.view(experts, columns, rows // 32, 16)
    scales = torch.full(blocks.shape[:-1], 119, dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="of models; default: all")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--disk", type=Path, help="folder of a disk; default: FOLDER")
    args = parser.parse_args()
    folder, configs = args.folder, models(args.tiny)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer_and_data(folder)
    disk = (args.disk or folder / "disk").absolute()
    for name, settings in runs(args.tiny, disk).items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    for name in args.names or configs:
        path = folder / "models" / name
        path.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(path)
        write_model(path, configs[name])


if __name__ == "__main__":
    main()
