"""Plain training: everything on the device."""

from __future__ import annotations

from ..setup import Setup, Training


def open(setup: Setup) -> Training:
    model = setup.model(setup.device)
    return setup.resident(model, setup.optimizer(model))
