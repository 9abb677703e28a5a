"""Predicted steps of a full fine-tune of Llama-3 8B on a 4090: updates on the device beside
AdamW on the host, in a desktop and in a server.

Nothing is measured and nothing is downloaded: the model is a configuration, the card a row
of the table (24 GB, PCI Express 4 x16), the host its channels of memory, of which AdamW
gets 0.7, and norms there take one thread (4.6 GB/s). Each plan is the fastest that fits, 128 GiB of host memory; bf16 weights and
moments (`adamw_torch_fused`), micro-batches of 2048 tokens.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from plan_speed import LLAMA_70B
from rich.console import Console
from tables import Page
from transformers import LlamaConfig, LlamaForCausalLM

from axolotl.integrations.protrain.core.layout import build_layout, find_blocks
from axolotl.integrations.protrain.core.planner.cards import gpu_hardware
from axolotl.integrations.protrain.core.planner.emulation import Emulation
from axolotl.integrations.protrain.core.planner.memory import MemoryModel
from axolotl.integrations.protrain.core.planner.planner import Forecast, Planner
from axolotl.integrations.protrain.core.planner.seconds import block_times
from axolotl.integrations.protrain.core.planner.trace import trace_step
from axolotl.integrations.protrain.core.types import (
    ADAM_MOVED_BYTES,
    Budget,
    Placement,
    Update,
    Workload,
)

HOST_BYTES = 128 << 30
TOKENS = 2048
HOSTS = {
    "desktop, 2 x DDR4-3200": 2 * 25.6e9,
    "server, 8 x DDR5-4800": 8 * 38.4e9,
}
"""Bytes a second in theory."""
REACHED = 0.7
LLAMA_8B = LLAMA_70B | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}


def forecasts() -> dict[tuple[str, int, Update], Forecast]:
    config = LlamaConfig(**{k: v for k, v in LLAMA_8B.items() if k != "architectures"})
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    ids = torch.ones(1, TOKENS, dtype=torch.long)

    def loss_of() -> torch.Tensor:
        with Emulation("cuda", torch.bfloat16):
            return model(input_ids=ids, labels=ids, use_cache=False).loss

    trace = trace_step(model, find_blocks(model), loss_of).trace
    layout = build_layout(model, (), trace.blocks)
    card = gpu_hardware("RTX 4090", "pcie4x16", HOST_BYTES)
    found = {}
    for (host, bytes_s), accumulation, update in product(HOSTS.items(), (1, 8), Update):
        hardware = replace(card, adam_bytes_s=bytes_s * REACHED / ADAM_MOVED_BYTES)
        workload = Workload(accumulation=accumulation, tokens=TOKENS, update=update)
        times = block_times(trace, layout, hardware)
        memory = MemoryModel(layout, trace, workload, hardware)
        budget = Budget(hardware.device_bytes, 0, HOST_BYTES)
        planner = Planner(memory, times, budget)
        found[host, accumulation, update] = planner.forecast(planner.fastest())
    return found


def row(key: tuple[str, int, Update], forecast: Forecast) -> list[str]:
    host, accumulation, update = key
    step, places = forecast.step, forecast.plan.placements
    waits = {lane: f"{s:.2f}" for lane, s in step.exposed_s.items()}
    return [
        host,
        str(accumulation),
        update.value,
        f"{step.total_s:.2f}",
        f"{step.busy_s['compute']:.2f}",
        *waits.values(),
        f"{forecast.tokens_per_s:,.0f}",
        " / ".join(str(places.count(place)) for place in Placement),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="Markdown file")
    options = parser.parse_args()
    lanes = ("fetch", "offload", "host")
    columns = [
        "host",
        "GA",
        "updates on",
        "step, s",
        "compute",
        *(f"waits for {lane}" for lane in lanes),
        "tokens/s",
        "chunks resident / host-state / paged",
    ]
    rows = [row(key, forecast) for key, forecast in forecasts().items()]
    page = Page("Llama-3 8B, full fine-tune, RTX 4090", columns, rows)
    page.show(Console(width=160))
    if options.output:
        text = " ".join((__doc__ or "").split())
        options.output.write_text(
            f"# update-places\n\nPredicted, by `benchmarks/update_places.py`. {text}\n\n"
            f"{page.markdown()}",
            "utf-8",
        )


if __name__ == "__main__":
    main()
