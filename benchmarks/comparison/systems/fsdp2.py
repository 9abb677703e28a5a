"""PyTorch FSDP2 with `CPUOffloadPolicy`, one rank: weights and updates on the host."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from axolotl.monkeypatch.fsdp2_qlora import (
    apply_init_dtype_attrs_patch,
    apply_init_sharded_param_patch,
    apply_init_unsharded_param_patch,
)
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from ..setup import HOST, Setup, Training


def open(setup: Setup) -> Training:
    # gradients that come to the host are reduced there
    dist.init_process_group(
        "gloo" if setup.on_cpu else "cpu:gloo,cuda:nccl",
        init_method="tcp://127.0.0.1:0",
        rank=0,
        world_size=1,
    )
    mesh = init_device_mesh(setup.device.type, (1,))
    model = setup.model(HOST)
    if setup.case.recompute:
        setup.recompute(model)
    if setup.case.method == "qlora":
        # as Axolotl does: else FSDP2 forgets the quant states
        apply_init_sharded_param_patch()
        apply_init_unsharded_param_patch()
        apply_init_dtype_attrs_patch()
    policy = CPUOffloadPolicy(pin_memory=not setup.on_cpu)
    base = model if setup.case.method == "full" else model.get_base_model()
    for layer in base.model.layers:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    for buffer in model.buffers():
        # FSDP2 leaves those where they are
        buffer.data = buffer.data.to(setup.device)
    optimizer = setup.optimizer(model)
    shards = [*model.parameters()]

    def host() -> Iterator[Tensor]:
        for shard in shards:
            yield shard
            if shard.grad is not None:
                yield shard.grad
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    return setup.beside_host(
        host,
        setup.step(model, optimizer),
        {
            "offload_policy": f"CPUOffloadPolicy(pin_memory={not setup.on_cpu})",
            "units": "each block, and the rest",
            "recompute": setup.case.recompute,
        },
    )
