"""A batch and a loss for planning, made by a trainer that goes on to train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_models import random_model
from torch import Tensor
from transformers import Trainer, TrainingArguments

from axolotl.integrations.protrain.objective import objective_of


class Weighted(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
        return model(**inputs).loss * 2


def test_a_collator_in_a_closure_draws_and_counts_in_training_alone(
    tmp_path: Path,
) -> None:
    generator, seen = torch.Generator().manual_seed(5), []

    def inner(rows: Any, depth: int = 1) -> dict[str, Tensor]:
        if depth:
            return inner(rows, depth - 1)
        seen.append(len(rows))
        ids = torch.randint(3, 250, (len(rows), 8), generator=generator)
        return {"input_ids": ids, "labels": ids}

    def collate(rows: Any) -> dict[str, Tensor]:
        return inner(rows)

    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    trainer = Weighted(model=random_model("llama"), args=arguments)
    before = generator.get_state()
    objective = objective_of(trainer, [{}, {}], collate)
    assert objective is not None and objective.batch["input_ids"].shape[1] == 8
    assert not seen and torch.equal(generator.get_state(), before)
    # of a generator like that of training
    first = objective.batch["input_ids"][0]
    assert torch.equal(first, collate([{}] * 8)["input_ids"][0])
