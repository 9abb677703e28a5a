"""torchao's `CPUOffloadOptimizer`: weights on the device, AdamW on the host."""

from __future__ import annotations

import torch
from torchao.optim import CPUOffloadOptimizer

from ..setup import LEARNING_RATE, CannotRunError, Setup, Training


def open(setup: Setup) -> Training:
    if setup.case.accumulation > 1 or setup.case.max_norm is not None:
        raise CannotRunError("CPUOffloadOptimizer neither accumulates nor clips")
    model = setup.model(setup.device)
    if setup.case.recompute:
        setup.recompute(model)
    optimizer = CPUOffloadOptimizer(
        [p for p in model.parameters() if p.requires_grad],
        torch.optim.AdamW,
        offload_gradients=True,
        lr=LEARNING_RATE,
    )
    return setup.resident(
        model, optimizer, offload_gradients=True, recompute=setup.case.recompute
    )
