"""Plain training on all memory that the machine has: losses to compare with."""

from __future__ import annotations

from ..setup import Setup, Training


def open(setup: Setup) -> Training:
    model = setup.model(setup.device)
    # changes no number, but some cases of the GPU set fit nowhere without it
    recompute = setup.case.recompute and not setup.on_cpu
    if recompute:
        setup.recompute(model)
    return setup.resident(model, setup.optimizer(model), recompute=recompute)
