"""Plain training where each block keeps only its input and runs again in backward."""

from __future__ import annotations

from ..setup import Setup, Training


def open(setup: Setup) -> Training:
    model = setup.model(setup.device)
    setup.recompute(model)
    return setup.resident(model, setup.optimizer(model), recompute="every block")
