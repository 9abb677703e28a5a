"""Where the search lets activations wait on the host, and how plans say so."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaModel

from axolotl.integrations.protrain.core.layout import build_layout, find_blocks
from axolotl.integrations.protrain.core.planner.cards import gpu_hardware
from axolotl.integrations.protrain.core.planner.emulation import Emulation
from axolotl.integrations.protrain.core.planner.memory import MemoryModel
from axolotl.integrations.protrain.core.planner.search import Search
from axolotl.integrations.protrain.core.planner.seconds import block_times
from axolotl.integrations.protrain.core.planner.trace import trace_step
from axolotl.integrations.protrain.core.types import (
    BlockTimes,
    Budget,
    Knobs,
    Policy,
    Workload,
)

NUM_BLOCKS, SEQUENCE_LEN, HOST_BYTES = 16, 16384, 1 << 40


def traced(gpu: str) -> tuple[MemoryModel, BlockTimes]:
    """Blocks of a Llama-3 70B with small adapters on a card and PCIe 4 x16."""
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=NUM_BLOCKS,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=1024,
    )
    with torch.device("meta"):
        model = LlamaModel(config).to(torch.bfloat16).requires_grad_(False)
    for layer in model.layers:
        layer.input_layernorm.requires_grad_(True)
    adapters = {name for name, p in model.named_parameters() if p.requires_grad}
    ids = torch.ones(1, SEQUENCE_LEN, dtype=torch.long)

    def loss_of() -> torch.Tensor:
        with Emulation("cuda", torch.bfloat16):
            return model(input_ids=ids, use_cache=False)[0].sum()

    trace = trace_step(model, find_blocks(model), loss_of).trace
    layout = build_layout(model, adapters, trace.blocks)
    card = gpu_hardware(gpu, "pcie4x16", HOST_BYTES)
    memory = MemoryModel(layout, trace, Workload(), card)
    return memory, block_times(trace, layout, card)


def test_long_sequences_swap_where_recompute_costs_more() -> None:
    chosen = Search(*traced("A100-80GB"), Budget(40 << 30, 0, HOST_BYTES))
    plan = chosen.fastest()
    assert chosen.swap_interval == 2
    assert plan.n_swap == 8 and plan.policies[:4] == (
        Policy.SWAP,
        Policy.RECOMPUTE,
        Policy.SWAP,
        Policy.RECOMPUTE,
    )
    gone = plan.n_swap + plan.n_checkpoint
    recomputing = chosen.asked(Knobs(plan.n_persist, plan.n_buffer, 0, gone))
    swapping_s, recomputing_s = (
        chosen.simulate(each).total_s for each in (plan, recomputing)
    )
    assert swapping_s < 0.92 * recomputing_s


def test_inputs_alone_that_do_not_fit_wait_on_the_host() -> None:
    memory, times = traced("RTX 4090")
    smallest = Search(memory, times, Budget(1, 0, HOST_BYTES)).nearest()
    assert smallest.policies == (Policy.SWAP_INPUT,) * NUM_BLOCKS
    assert (smallest.n_swap, smallest.n_checkpoint) == (NUM_BLOCKS, NUM_BLOCKS)
    least = memory.device(smallest).peak_bytes
    tight = Search(memory, times, Budget(least, 0, HOST_BYTES))
    assert tight.fastest() == smallest
    kept = tight.asked(Knobs(0, smallest.n_buffer, 0, NUM_BLOCKS))
    hidden_bytes = SEQUENCE_LEN * 8192 * 2
    assert memory.device(kept).peak_bytes > least + (NUM_BLOCKS - 4) * hidden_bytes
