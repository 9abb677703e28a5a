"""Train a small Llama by `transformers.Trainer`, in less device memory than it takes.

`python examples/transformers_trainer.py` compares with the same training without paging.
"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from typing import Any

import torch
from loop import BUDGET, DEVICE, build, compare, rows
from transformers import Trainer, TrainingArguments

from axolotl.integrations.protrain.core import page

SETTINGS: dict[str, Any] = {
    "max_steps": 4,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.5,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_steps": 2,
    "report_to": [],
    "use_cpu": DEVICE == "cpu",
}


def train(budget: dict[str, Any] | None) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Train, paged under a budget or plainly; losses and norms, and the weights."""
    model, data = build(), rows(8)
    # the loop's own optimizer: a Trainer makes its own too late
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    example = {name: row[None] for name, row in data[0].items()}
    paging: Any = nullcontext()
    if budget is not None:
        paging = page(
            model, optimizer, example=example, accumulation=2, evaluates=1, **budget
        )
    with paging as paged, tempfile.TemporaryDirectory() as folder:
        # inside: it finds the model where it trains, and does not move it
        trainer = Trainer(
            model,
            TrainingArguments(folder, **SETTINGS),
            train_dataset=data,
            eval_dataset=data[:2],
            optimizers=(optimizer, None),
        )
        if paged is not None:
            # it clips gradients wherever they are
            paged.adapt(trainer.accelerator)
            print(paged.forecast)
        trainer.train()
    log = trainer.state.log_history
    keys = "loss", "grad_norm", "eval_loss"
    return [line[k] for line in log for k in keys if k in line], model.state_dict()


if __name__ == "__main__":
    compare(train(BUDGET), train(None))
