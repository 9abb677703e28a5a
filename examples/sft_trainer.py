"""Train a small Llama by TRL's `SFTTrainer`, in less device memory than it takes.

`python examples/sft_trainer.py` compares with the same training without paging.
"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from typing import Any

import torch
from datasets import Dataset
from loop import BUDGET, build, compare, rows
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from transformers_trainer import SETTINGS
from trl import SFTConfig, SFTTrainer

from axolotl.integrations.protrain.core import page


def train(budget: dict[str, Any] | None) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Train, paged under a budget or plainly; losses and norms, and the weights."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = Dataset.from_list([{"input_ids": r["labels"].tolist()} for r in rows(8)])
    words = Tokenizer(WordLevel({"<pad>": 0, "</s>": 1}, unk_token="<pad>"))
    example = {name: row[None] for name, row in rows(1)[0].items()}
    paging: Any = nullcontext()
    if budget is not None:
        paging = page(
            model, optimizer, example=example, accumulation=2, evaluates=1, **budget
        )
    with paging as paged, tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model,
            # the plan says what recomputes
            SFTConfig(folder, **SETTINGS, gradient_checkpointing=False, bf16=False),
            train_dataset=data,
            eval_dataset=data.select(range(2)),
            processing_class=PreTrainedTokenizerFast(
                tokenizer_object=words, pad_token="<pad>", eos_token="</s>"
            ),
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
