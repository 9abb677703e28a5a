"""Device bytes by term and seconds of five trainings on consumer cards, as
`axolotl protrain plan` predicts them. Models are configurations; nothing runs on a GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from published import LIGER_KEYS, MODELS, decoder, qwen
from rich.console import Console
from tables import Page

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "protrain")]
from axolotl_jobs import LORA  # noqa: E402
from plan_jobs import Plans  # noqa: E402

from axolotl.integrations.protrain.core.planner.cards import gpu_hardware  # noqa: E402

ADAPTERS = {**LORA, "lora_r": 32, "lora_alpha": 64, "adapter": "lora"}
IN_4_BITS = {**ADAPTERS, "adapter": "qlora", "load_in_4bit": True}
EXPERTS = {
    "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "lora_target_linear": None,
    "quantize_moe_experts": True,
}
QWEN_32B = qwen(5120, 64, 64, 8, 25600, 151936, kind="qwen3", head_dim=128)
QWEN_14B = qwen(5120, 40, 40, 8, 17408, 151936, kind="qwen3", head_dim=128)
GEMMA_27B = decoder(
    *(5376, 62, 32, 16, 21504, 262208),
    model_type="gemma3_text",
    head_dim=128,
    query_pre_attn_scalar=168,
    tie_word_embeddings=True,
)
MIXTRAL = decoder(
    *(4096, 32, 32, 8, 14336, 32000), model_type="mixtral", num_local_experts=8
)
LLAMA_70B = {**MODELS["llama2-70b"], "vocab_size": 128256}
COMMON = {
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 4,
    "sample_packing": True,
    "pad_to_sequence_len": True,
    "attn_implementation": "flash_attention_2",
}
FULL = {"optimizer": "adamw_bnb_8bit"}
JOBS: dict[str, tuple[Any, ...]] = {
    "Llama-3-70B QLoRA": (LLAMA_70B, IN_4_BITS, 4096, "RTX 4090", 64),
    "Qwen3-32B LoRA": (QWEN_32B, ADAPTERS, 8192, "RTX 4090", 96),
    "Qwen3-14B full": (QWEN_14B, FULL, 4096, "RTX 4090", 112),
    "Gemma-3-27B QLoRA": (GEMMA_27B, IN_4_BITS, 2048, "RTX 4080", 64),
    "Mixtral 8x7B QLoRA": (MIXTRAL, IN_4_BITS | EXPERTS, 2048, "RTX 4080", 64),
}


def without_head(model: dict[str, Any], gpu: str) -> str:
    """The card with as much more room as the model's head takes, in bf16: what paging
    that could spare at most, before it is fetched."""
    card, less, more = (
        gpu_hardware(f"{gpu}{size}", None, 0) for size in ("", ":10", ":20")
    )
    # what kernels take unseen grows with the card
    lost = (more.unseen_bytes - less.unseen_bytes) / (10 << 30)
    fixed = less.unseen_bytes - lost * less.device_bytes
    head = 2 * model["vocab_size"] * model["hidden_size"]
    room = card.device_bytes - card.desktop_bytes - card.unseen_bytes + head
    return f"{gpu}:{(room + fixed) / (1 - lost) / 2**30:.4f}"


def row(name: str, found: dict[str, Any]) -> list[str]:
    """What is shown of an answer; bytes in GiB."""
    plan, device, step = (found[key] for key in ("plan", "device_bytes", "step_s"))
    terms = (f"{k} {v / 2**30:.2f}" for k, v in device["terms"].items() if v)
    knobs = (str(plan[f"n_{k}"]) for k in ("persist", "buffer", "swap", "checkpoint"))
    seconds = f"{step['total']:.2f}" if step else f"none: {found['verdict']}"
    peaks = (f"{found[k]['peak'] / 2**30:.2f}" for k in ("device_bytes", "host_bytes"))
    return [name, seconds, " / ".join(knobs), *peaks, ", ".join(terms)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--liger", action="store_true", help="with a fused loss")
    parser.add_argument(
        "--no-head", action="store_true", help="cards with room for the head beside"
    )
    parser.add_argument(
        "--first", nargs="+", metavar="GIB", help="the first one alone, in such cards"
    )
    parser.add_argument("--output", type=Path, help="Markdown file to add to")
    options = parser.parse_args()
    columns = ["training", "step, s", "persist / buffer / swap / checkpoint"]
    columns += ["device, GiB", "host, GiB", "of the device"]
    rows = []
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        plans = Plans(Path(folder))
        jobs = [*JOBS.items()]
        if options.first:
            name, (*job, gpu, ram) = jobs[0]
            jobs = [(name, (*job, f"{gpu}:{gib}", ram)) for gib in options.first]
        labels = []
        for name, (model, keys, length, gpu, ram) in jobs:
            keys = COMMON | {"sequence_len": length} | keys
            keys |= LIGER_KEYS if options.liger else {}
            gpu = without_head(model, gpu) if options.no_head else gpu
            arguments = "--gpu", gpu, "--ram", str(ram), "--json"
            labels.append(f"{name} {length}, {gpu}, {ram} GiB")
            plans.add(labels[-1], {"dtype": "bfloat16", **model}, keys, *arguments)
        for label in labels:
            answer = plans[label]
            if "device_bytes" not in answer.out:
                sys.exit(f"{label}: {answer.out}{answer.err}")
            rows.append(row(label, answer.json))
        plans.close()
    title = "With Liger" if options.liger else "Plain loss"
    title += ", without the head's bytes" * options.no_head
    page = Page(title, columns, rows)
    page.show(Console(width=150))
    if options.output:
        with options.output.open("a") as file:
            file.write(page.markdown())
    print(f"s per step: {', '.join(cells[1] for cells in rows)}")


if __name__ == "__main__":
    main()
