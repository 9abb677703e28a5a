"""One of two ranks that train by `page` and by plain DistributedDataParallel."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))

from core_models import adamw, batches, freeze, stack, twin, weights  # noqa: E402

from axolotl.integrations.protrain.core import gpu, page  # noqa: E402
from axolotl.integrations.protrain.core.types import Knobs  # noqa: E402


def steps(net: nn.Module, optimizer: Any, clip: Any, around: Any) -> list[float]:
    """Two micro-batches a step, of this rank's own rows."""
    numbers = []
    for number, tokens in enumerate(batches(6, seed=10 + dist.get_rank())):
        last = number % 2 == 1
        with around(last):
            loss = net(tokens) / 2
            loss.backward()
        numbers.append(loss.item())
        if last:
            numbers.append(clip(0.5).item())
            optimizer.step()
            optimizer.zero_grad()
    return numbers


def compare(knobs: Knobs | None, lora: bool) -> None:
    model = stack()
    if lora:
        freeze(model)
    plain = nn.parallel.DistributedDataParallel(twin(model))
    optimizer, other = adamw(model), adamw(plain.module)
    with page(
        model,
        optimizer,
        example=batches(1)[0],
        budget="1GiB",
        host_budget="1GiB",
        accumulation=2,
        knobs=knobs,
        hardware=gpu("RTX 4090") if knobs else None,
        device="cpu",
    ) as paged:
        kind = type(paged.module).__name__
        ours = steps(paged.module, optimizer, paged.clip_grad_norm_, paged.micro_batch)
        found = weights(model)
    theirs = steps(
        plain,
        other,
        lambda most: nn.utils.clip_grad_norm_(plain.parameters(), most),
        lambda last: nullcontext() if last else plain.no_sync(),
    )
    same = all(torch.equal(found[n], w) for n, w in weights(plain.module).items())
    print(f"{kind}: {'equal' if same and ours == theirs else 'differs'}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    store = f"file://{sys.argv[1]}"
    rank, size = (int(os.environ[key]) for key in ("RANK", "WORLD_SIZE"))
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    for knobs in (Knobs(0, 2, 0, 3), None):
        for lora in (False, True):
            compare(knobs, lora)
    dist.destroy_process_group()
