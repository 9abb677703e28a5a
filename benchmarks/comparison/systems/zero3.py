"""DeepSpeed ZeRO-3 with weights and optimizer on the host, one rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..setup import HOST, LEARNING_RATE, Batch, Setup, Training


def build(on_cpu: bool) -> None:
    """Compile the kernels that DeepSpeed otherwise compiles when it is first used."""
    _start(on_cpu)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    DeepSpeedCPUAdam([torch.zeros(1, requires_grad=True)])


def _start(on_cpu: bool) -> None:
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29517",
    }.items():
        os.environ.setdefault(name, value)
    # it looks at the environment when it is imported
    import deepspeed

    deepspeed.init_distributed("gloo" if on_cpu else "nccl")


def open(setup: Setup) -> Training:
    _start(setup.on_cpu)
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    model = setup.model(HOST)
    if setup.case.recompute:
        # the other way compares shapes of weights that are not there
        setup.recompute(model, reentrant=True)
    pin = not setup.on_cpu
    config = {
        "train_micro_batch_size_per_gpu": setup.case.rows,
        "gradient_accumulation_steps": setup.case.accumulation,
        "gradient_clipping": setup.case.max_norm or 0.0,
        "bf16": {"enabled": setup.case.precision == "bf16"},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": pin},
            "offload_optimizer": {"device": "cpu", "pin_memory": pin},
            "overlap_comm": True,
            "contiguous_gradients": True,
            # as transformers fills in "auto"
            "reduce_bucket_size": setup.hidden**2,
            "stage3_prefetch_bucket_size": int(0.9 * setup.hidden**2),
            "stage3_param_persistence_threshold": 10 * setup.hidden,
        },
        "steps_per_print": 1 << 30,
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    # torch's decay, and its default is DeepSpeed's too
    optimizer = DeepSpeedCPUAdam(trained, lr=LEARNING_RATE, weight_decay=1e-2)
    if config["bf16"]["enabled"]:
        model.bfloat16()
    # one weight at a time: `initialize` moves the whole model to the device
    deepspeed.zero.Init(module=model, config_dict_or_path=config)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(setup.device))
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None:
            state.to(setup.device)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(batches: list[Batch]) -> Tensor:
        total = torch.zeros((), device=setup.device)
        for batch in batches:
            with torch.autocast(setup.device.type, enabled=False):
                loss = engine(**batch).loss
            # it divides by the number of micro-batches itself
            engine.backward(loss)
            engine.step()
            total += loss.detach() / len(batches)
        return total

    partitions = [p.ds_tensor for p in model.parameters()]
    return setup.beside_host(
        lambda: _on_host(engine.optimizer, partitions),
        step,
        {**config, "recompute": setup.case.recompute},
        "fp32 masters and moments" if config["bf16"]["enabled"] else "",
    )


def _on_host(sharded: Any, partitions: list[Tensor]) -> Iterator[Tensor]:
    """What the sharded optimizer keeps in host memory."""
    yield from partitions
    names = "fp16_partitioned_groups_flat fp32_partitioned_groups_flat lp_param_buffer"
    for name in (*names.split(), "grad_partitions_flat_buffer"):
        held = getattr(sharded, name, None)
        for tensor in held if isinstance(held, list) else [held]:
            if tensor is not None:
                yield tensor
                if tensor.grad is not None:
                    yield tensor.grad
    for state in sharded.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
