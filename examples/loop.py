"""Train a small Llama in a plain torch loop, in less device memory than it takes.

`python examples/loop.py` compares with the same loop without paging.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from axolotl.integrations.protrain.core import page

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 6,
}
BUDGET: dict[str, Any] = {"budget": "10MiB", "host_budget": "1GiB"}


def build() -> Any:
    """Make the same weights at each call, in host memory."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, **SIZES, num_attention_heads=4))


def rows(num: int) -> list[dict[str, torch.Tensor]]:
    """Make rows of tokens to be predicted."""
    ids = torch.randint(512, (num, 32), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def train(budget: dict[str, Any] | None) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Train, paged under a budget or plainly; losses and norms, and the weights."""
    model, numbers = build(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = [{name: row[None].to(DEVICE) for name, row in r.items()} for r in rows(8)]
    paging: Any = nullcontext()
    if budget is None:
        model.to(DEVICE)
    else:
        paging = page(model, optimizer, example=data[0], accumulation=2, **budget)
        print(paging.forecast)
    with paging as paged:
        for number, batch in enumerate(data, 1):
            loss = model(**batch).loss / 2
            loss.backward()
            numbers.append(loss.item())
            if number % 2 == 0:
                clip = paged.clip_grad_norm_ if paged else plain_clip(model)
                numbers.append(clip(0.5).item())
                optimizer.step()
                optimizer.zero_grad()
    return numbers, model.cpu().state_dict()


def plain_clip(model: Any) -> Any:
    """Clip as without paging."""
    return lambda most: torch.nn.utils.clip_grad_norm_(model.parameters(), most)


def compare(ours: Any, theirs: Any) -> None:
    """Print whether two trainings have seen and left the same bits."""
    weights = all(torch.equal(ours[1][n], w) for n, w in theirs[1].items())
    print(f"{len(ours[0])} numbers: equal {ours[0] == theirs[0]}; weights {weights}")


if __name__ == "__main__":
    compare(train(BUDGET), train(None))
