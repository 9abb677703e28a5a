"""Answers under paging: tokens per second over sequences at once, beside the prediction.

Samples from a Llama on the CPU device, resident, paged, and with a part of what pages held
on the device, in turns, and prints medians; `predicted` is the planner's for this machine.

`--plans` asks `axolotl-protrain plan` instead: GRPO of large bases on cards that are not here.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from axolotl.integrations.protrain.core.engine.device import CpuDevice
from axolotl.integrations.protrain.core.engine.session import Session
from axolotl.integrations.protrain.core.host import host_memory
from axolotl.integrations.protrain.core.layout import build_layout, spread_order
from axolotl.integrations.protrain.core.planner.cache import cached_hardware
from axolotl.integrations.protrain.core.planner.demand import Demand
from axolotl.integrations.protrain.core.planner.generation import timed
from axolotl.integrations.protrain.core.planner.job import library_versions, trace_loss
from axolotl.integrations.protrain.core.planner.memory import MemoryModel
from axolotl.integrations.protrain.core.planner.meta import meta_copy
from axolotl.integrations.protrain.core.planner.plans import make_plan
from axolotl.integrations.protrain.core.planner.seconds import block_times
from axolotl.integrations.protrain.core.types import Workload
from axolotl.integrations.protrain.generation import Asked

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "protrain")]
from plan_jobs import Answer, Plans  # noqa: E402
from published_models import LLAMA_8B, LLAMA_70B  # noqa: E402
from tiny_models import TOKENIZER, build_inputs  # noqa: E402

PROMPT, NEW, ROUNDS = 32, 24, 3
ROWS = (1, 4, 16, 64)
SLOTS = 2
HELD = {"resident": None, "paged": 0.0, "half held": 0.5, "all held": 1.0}
"""Parts of what pages that stay on the device; None: nothing pages."""
GRPO: dict[str, Any] = {
    "rl": "grpo",
    "trl": {
        "reward_funcs": ["rewards.none"],
        "num_generations": 8,
        "max_completion_length": 512,
        "beta": 0.04,
    },
    "datasets": [{"path": "nobody/none", "type": "rewards.rows"}],
    "sequence_len": 1024,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 64,
    "adapter": "lora",
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_target_linear": True,
    "sample_packing": None,
    "optimizer": "adamw_torch_fused",
}
QLORA = {"adapter": "qlora", "load_in_4bit": True}
QWEN_32B = {
    "model_type": "qwen2",
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
}
PLANNED: tuple[tuple[str, Mapping[str, Any], dict[str, Any], str], ...] = (
    ("Llama 3.1 8B, LoRA", LLAMA_8B, {}, "RTX 4060:8"),
    ("Llama 3.1 8B, LoRA", LLAMA_8B, {}, "RTX 4090"),
    ("Qwen2.5 32B, QLoRA", QWEN_32B, QLORA, "RTX 4090"),
    ("Llama 3 70B, QLoRA", LLAMA_70B, QLORA, "RTX 4090"),
)


def model() -> LlamaForCausalLM:
    """0.1 GB in 8 blocks, fp32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def measured() -> Iterator[str]:
    """Yield rows of a table, tokens per second and what was predicted, then a sentence."""
    worst = 0.0
    capacity = 2 << 30
    hardware = cached_hardware(
        None,
        torch.device("cpu"),
        host_memory(),
        capacity,
        library_versions(),
        1,
        torch.float32,
    )
    base = model()
    # a loss has to have something that trains
    base.lm_head.requires_grad_(True)
    ids = torch.randint(3, 1000, (2, 16))
    meta = meta_copy(base)
    step = trace_loss(
        meta,
        "cpu",
        lambda: meta(input_ids=ids.to("meta"), labels=ids.to("meta")).loss,
        None,
    )
    layout = build_layout(base, order=step.trace.blocks)
    times = block_times(step.trace, layout, hardware)
    for rows in ROWS:
        asked = Asked(rows, PROMPT, NEW, amid_step=False, steps=1.0)
        generation = asked.traced(meta, "cpu", None)
        workload = Workload(generation=generation)
        memory = MemoryModel(layout, step.trace, workload, hardware)
        found: dict[str, list[float]] = {name: [] for name in HELD}
        foretold: dict[str, float] = {}
        for _ in range(ROUNDS):
            for name, share in HELD.items():
                own = model()
                persists = len(layout.pageable) if share is None else 0
                plan = make_plan(
                    layout, persists, 0 if persists else SLOTS, 0, 0, fp32_master=False
                )
                order = [plan.paged[at] for at in spread_order(len(plan.paged))]
                held = tuple(sorted(order[: round((share or 0.0) * len(order))]))
                demand = Demand(memory.trained, plan, times, hardware)
                planned = timed(held, capacity, memory, plan, demand)
                assert planned is not None
                foretold[name] = planned.tokens_per_s
                own.lm_head.requires_grad_(True)
                session = Session(own, layout, plan, CpuDevice())
                found[name].append(_sample(own, session, held, rows))
                session.close()
        rates = {name: rows * NEW / statistics.median(found[name]) for name in HELD}
        cells = (f"{rates[name]:,.0f} ({foretold[name]:,.0f})" for name in HELD)
        yield f"| {rows} | {' | '.join(cells)} |"
        errors = (foretold[name] / rates[name] - 1 for name in HELD)
        worst = max(worst, *errors, key=abs)
    yield f"tokens/s: the worst of {len(ROWS) * len(HELD)} predictions is {worst:+.0%} off"


def _sample(own: Any, session: Session, held: tuple[int, ...], rows: int) -> float:
    """Seconds of a batch of answers."""
    config = GenerationConfig(
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=True,
        pad_token_id=0,
        eos_token_id=2,
        disable_compile=True,
    )
    ids = torch.randint(3, 1000, (rows, PROMPT))
    generate = partial(own.generate, input_ids=ids, generation_config=config)
    generate = partial(generate, attention_mask=torch.ones_like(ids))
    with torch.no_grad(), session.holding(held):
        started = time.perf_counter()
        generate()
        return time.perf_counter() - started


def planned() -> Iterator[str]:
    """Yield rows of a table: GRPO on cards, both phases."""
    with TemporaryDirectory() as folder:
        plans = Plans(Path(folder))
        build_inputs(Path(folder))
        for number, (_, config, keys, card) in enumerate(PLANNED):
            settings = {
                **GRPO,
                **keys,
                "tokenizer_config": str(Path(folder) / TOKENIZER),
            }
            plans.add(str(number), config, settings, "--gpu", card, "--json")
        for number, (label, _, _, card) in enumerate(PLANNED):
            yield f"| {label} | {card} | {_told(plans[str(number)])} |"
        plans.close()


def _told(answer: Answer) -> str:
    assert answer.out, answer.err
    own = answer.json
    made, step, device = own["generation"], own["step_s"], own["device_bytes"]
    if step is None:
        return own["reason"]
    waves = f"{made['waves']} x {made['at_once']}"
    paged = sum(at == "paged" for at in own["plan"]["placements"])
    # of training alone: answers have columns of their own
    both_s = step["total"] + made["total_s"] / made["every_steps"]
    trained = step["tokens_per_s"] * both_s / step["total"]
    cache = f"{made['cache_bytes'] / 2**30:.2f}"
    if made["host_cache_bytes"]:
        cache = f"{made['host_cache_bytes'] / 2**30:.2f} on the host"
    return (
        f"{waves} | {len(made['held'])} of {paged} | {cache} | "
        f"{made['total_s']:.0f} | {made['tokens_per_s']:,.0f} | {step['total']:.0f} | "
        f"{trained:,.0f} | {device['peak'] / 2**30:.1f}"
    )


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", action="store_true", help="cards that are not here")
    if parser.parse_args().plans:
        heads = (
            "training",
            "card",
            "waves x sequences",
            "held of paged chunks",
            "cache, GiB",
            "generation, s",
            "tokens/s",
            "training step, s",
            "tokens/s",
            "peak, GiB",
        )
        lines = planned()
    else:
        heads = ("sequences at once", *HELD)
        lines = measured()
    print(f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}", sep="\n")
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
