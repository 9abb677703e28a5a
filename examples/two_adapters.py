"""Train two adapters of one base in turns, in one process: python two_adapters.py BASE.yaml

Each learns to repeat a token of its own; what they say of it afterwards is printed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from axolotl.integrations.protrain.service.engine import AdapterService
from axolotl.integrations.protrain.service.losses import Datum
from axolotl.integrations.protrain.service.optimizers import AdamParams

STEPS, LENGTH = 8, 32


def repeated(token: int) -> list[Datum]:
    """One row; its loss is the mean over tokens."""
    tokens = torch.full((LENGTH,), token)
    weights = torch.full((LENGTH,), 1 / LENGTH)
    return [Datum(tokens, {"target_tokens": tokens, "weights": weights})]


def main(config: Path) -> None:
    """Train, save, print."""
    tokens = {"tens": 10, "twenties": 20}
    with AdapterService(config) as service:
        service.create("tens", rank=4, seed=1)
        service.create("twenties", rank=8, kinds=["mlp", "unembed"], seed=2)
        for _ in range(STEPS):
            for model, token in tokens.items():
                service.forward_backward(model, repeated(token))
                service.optim_step(model, AdamParams(learning_rate=1e-2))
        for model, token in tokens.items():
            asked = service.forward_backward(model, repeated(token), forward_only=True)
            loss, _ = asked.result()
            path = service.save(model, "end").result()
            print(f"{model}: loss {loss:.3f}, saved as {path}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
