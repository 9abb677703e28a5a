"""A trainer for the tests, whose loss is its own."""

from __future__ import annotations

from typing import Any

from axolotl.core.trainers.base import AxolotlTrainer


class Consistent(AxolotlTrainer):
    """Two forwards of a batch, whose logits are to be near each other."""

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        first, second = model(**inputs), model(**inputs)
        apart = first.logits.float() - 0.5 * second.logits.float().detach()
        loss = first.loss + apart.square().mean()
        return (loss, first) if return_outputs else loss
