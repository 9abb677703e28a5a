"""Frozen weights on a disk: the rate of reads, a step beside its prediction, host memory.

Prints what the reader of a session gets beside `dd iflag=direct` on the same bytes, then
trains adapters over a base of which no frozen block is in host memory, and prints each
step, the prediction, and the resident memory of the process after each.

`--plans` asks `axolotl-protrain plan` instead: large bases on cards that are not here.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    Qwen3MoeConfig,
)

from axolotl.integrations.protrain.core import page
from axolotl.integrations.protrain.core.engine.chunk_files import (
    NUM_READERS,
    BaseFiles,
    ChunkFile,
    mappings,
    read_rate,
    spans_of,
    store,
)
from axolotl.integrations.protrain.core.engine.host_pool import host_buffer

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "protrain")]
from plan_jobs import Answer, Plans  # noqa: E402

GIB = 2**30
READ_BYTES, ROUNDS, STEPS = 256 << 20, 16, 12
TOKENS = (32, 256)
QLORA: dict[str, Any] = {
    "adapter": "qlora",
    "load_in_4bit": True,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_target_linear": True,
    "sequence_len": 1024,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 16,
}
GPT_OSS: dict[str, Any] = {
    "adapter": "lora",
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "sequence_len": 2048,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "attn_implementation": "eager",
    "model_quantization_config": "Mxfp4Config",
    "model_quantization_config_kwargs": {"dequantize": True},
    **dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False),
}
LLAMA_70B = LlamaConfig(
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
)
QWEN3_235B = Qwen3MoeConfig(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=94,
    num_attention_heads=64,
    num_key_value_heads=4,
    head_dim=128,
    moe_intermediate_size=1536,
    num_experts=128,
    num_experts_per_tok=8,
)
PLANNED: tuple[tuple[str, Any, dict[str, Any], str, tuple[int, ...]], ...] = (
    ("Llama 3 70B, QLoRA", LLAMA_70B, QLORA, "RTX 4090", (16, 32, 64)),
    (
        "Qwen3 235B-A22B, QLoRA",
        QWEN3_235B,
        QLORA
        | {"quantize_moe_experts": True, "lora_target_linear": None}
        | {"lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        "RTX 5090",
        (64, 192),
    ),
    ("gpt-oss-120b, LoRA", GptOssConfig(), GPT_OSS, "RTX 4090", (32, 96)),
)


def reads(folder: Path) -> Iterator[str]:
    """Yield the rates of a session's readers and of dd, in turns, on the same bytes."""
    noise = torch.frombuffer(bytearray(os.urandom(READ_BYTES)), dtype=torch.uint8)
    path, published = store(folder, noise), folder / "model.safetensors"
    save_file({"weight": noise}, published)
    pages = load_file(published)["weight"]
    spans = spans_of([(0, pages)], folder, mappings())
    assert spans is not None
    own, base, room = (
        ChunkFile(path, READ_BYTES),
        BaseFiles(spans),
        host_buffer(READ_BYTES),
    )
    dd = ["dd", f"if={path}", "of=/dev/null", "bs=8M", "iflag=direct"]
    with ThreadPoolExecutor(NUM_READERS) as readers:
        ways = {
            "dd": lambda: subprocess.run(dd, check=True, capture_output=True),
            "a chunk's file": lambda: own.read(room, 0, readers),
            "the base's file": lambda: base.read(room, 0, readers),
        }
        # compares the content, once
        own.read(room, 0, readers)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, act in ways.items():
                start = time.perf_counter()
                act()
                times[name].append(time.perf_counter() - start)
    own.close()
    base.close()
    rates = {name: READ_BYTES / statistics.median(took) for name, took in times.items()}
    for name, rate in rates.items():
        spread = sorted(READ_BYTES / took / 1e9 for took in times[name])
        yield (
            f"{name}: {rate / 1e9:.2f} GB/s ({spread[ROUNDS // 4]:.2f} to "
            f"{spread[-ROUNDS // 4]:.2f}), {rate / rates['dd']:.2f} of dd"
        )


def training(folder: Path, tokens: int) -> Iterator[str]:
    """Yield steps of adapters over a base on the disk, with memory after each."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=4,
    )
    saved = folder / f"base-{tokens}"
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(saved)
    base = AutoModelForCausalLM.from_pretrained(saved)
    adapter = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(base, adapter)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    rows = torch.randint(2048, (1, tokens))
    example = {"input_ids": rows, "labels": rows}
    nbytes = sum(p.nbytes for p in base.model.layers.parameters())
    with page(
        model,
        optimizer,
        example=example,
        budget=int(0.45 * nbytes),
        host_budget=int(0.25 * nbytes),
        disk=folder,
        device="cpu",
    ) as paged:
        forecast, times, taken = paged.forecast, list[float](), list[int]()
        for _ in range(STEPS):
            start = time.perf_counter()
            paged.module(**example).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - start)
            taken.append(psutil.Process().memory_info().rss)
        on_disk = sum(
            forecast.layout.chunks[index].nbytes for index in forecast.plan.on_disk
        )
        read = paged.measured().disk_bytes / STEPS
    step, predicted = statistics.median(times[2:]), forecast.step.total_s
    yield (
        f"{tokens} tokens: blocks of {nbytes >> 20} MiB, {on_disk >> 20} on the disk, "
        f"{read / 2**20:.0f} MiB read per step at {forecast.hardware.disk_bytes_s / 1e9:.2f} "
        f"GB/s: {step:.2f} s per step, {predicted:.2f} predicted ({step / predicted - 1:+.0%}), "
        f"limited by {forecast.step.limiter}"
    )
    mib = " ".join(str(n >> 20) for n in taken)
    kept = forecast.host.peak_bytes >> 20
    yield f"  host memory after each step, MiB: {mib}; {kept} for training by the plan"


def planned() -> Iterator[str]:
    """Yield the lines of a table of plans."""
    yield "| base | card | host, GiB | on the disk | s per step at 7 GB/s | without a disk |"
    yield "|---|---|---|---|---|---|"
    with TemporaryDirectory() as folder:
        plans = Plans(Path(folder))
        for name, config, keys, card, sizes in PLANNED:
            model = config.to_dict()
            model.pop("dtype", None)
            if config.model_type == "gpt_oss":
                model["quantization_config"] = {"quant_method": "mxfp4"}
            for gib in sizes:
                asked = ["--gpu", card, "--ram", str(gib), "--json"]
                plans.add(f"{name} {gib} no", model, keys, *asked)
                plans.add(f"{name} {gib} yes", model, keys, *asked, "--disk", "7GB/s")
        for name, _, _, card, sizes in PLANNED:
            for gib in sizes:
                with_disk, without = (plans[f"{name} {gib} {w}"] for w in ("yes", "no"))
                told = _told(with_disk), _told(without)[1]
                yield f"| {name} | {card} | {gib} | {told[0][0]} | {told[0][1]} | {told[1]} |"
        plans.close()


def _told(answer: Answer) -> tuple[str, str]:
    found = answer.json
    if found["verdict"] != "fits":
        return "-", str(found["reason"] or found["verdict"])
    said = " ".join(found["assumptions"])
    size = re.search(r"page, ([^,]+), lie on the disk", said)
    return (size[1] if size else "none"), f"{found['step_s']['total']:.1f}"


def main() -> None:
    """Print what was measured, or a table of plans."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", action="store_true", help="plans of large bases")
    parser.add_argument("--folder", type=Path, help="on the disk; default: temporary")
    args = parser.parse_args()
    if args.plans:
        for line in planned():
            print(line, flush=True)
        return
    with TemporaryDirectory(dir=args.folder) as name:
        for line in reads(Path(name)):
            print(line, flush=True)
        print(f"measured for a plan: {read_rate(Path(name)) / 1e9:.2f} GB/s")
        for tokens in TOKENS:
            for line in training(Path(name), tokens):
                print(line, flush=True)


if __name__ == "__main__":
    main()
