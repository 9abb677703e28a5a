"""Plain training on all memory that the machine has: losses to compare with."""

from __future__ import annotations

from ..setup import Setup, Training


def open(setup: Setup) -> Training:
    model = setup.model(setup.device)
    if setup.case.reference_recomputes:
        # changes no number
        setup.recompute(model)
    return setup.resident(
        model, setup.optimizer(model), recompute=setup.case.reference_recomputes
    )
