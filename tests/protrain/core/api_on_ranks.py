"""One of two ranks that train by `page` and by plain DistributedDataParallel."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))

from core_models import adamw, batches, freeze, stack, twin, weights  # noqa: E402

from axolotl.integrations.protrain.core import Paged, gpu, page  # noqa: E402
from axolotl.integrations.protrain.core.errors import AccessError  # noqa: E402
from axolotl.integrations.protrain.core.types import Knobs  # noqa: E402


@dataclass(frozen=True)
class Loop:
    """A training loop's parts, plain or `paged`; `net` is called."""

    model: nn.Module
    net: Any
    optimizer: torch.optim.Optimizer
    paged: Paged | None = None

    def around(self, last: bool = True) -> Any:
        if self.paged is not None:
            return self.paged.micro_batch(last)
        alone = self.net is self.model
        return nullcontext() if last or alone else self.net.no_sync()

    def clip(self, most: float) -> float:
        if self.paged is not None:
            return self.paged.clip_grad_norm_(most).item()
        return nn.utils.clip_grad_norm_(self.model.parameters(), most).item()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def rows(count: int) -> list[torch.Tensor]:
    """This rank's own."""
    return batches(count, seed=10 + dist.get_rank())


def steps(loop: Loop) -> list[float]:
    """Two micro-batches a step."""
    numbers = []
    for number, tokens in enumerate(rows(6)):
        last = number % 2 == 1
        with loop.around(last):
            loss = loop.net(tokens) / 2
            loss.backward()
        numbers.append(loss.item())
        if last:
            numbers.append(loop.clip(0.5))
            loop.update()
    return numbers


def scales(loop: Loop) -> list[float]:
    """Two micro-batches a step in fp16, under scales of which the first ones overflow."""
    return scaled(loop, rows(12), torch.amp.GradScaler("cpu", 2.0**27))


def scaled(
    loop: Loop,
    data: list[torch.Tensor],
    scaler: torch.amp.GradScaler,
    clip: bool = True,
) -> list[float]:
    """Losses, scales and norms of finite gradients: a step that is left out has none."""
    numbers = []
    if loop.paged is not None:
        loop.paged.adapt(scaler)
    for number, tokens in enumerate(data):
        last = number % 2 == 1
        with loop.around(last):
            with torch.autocast(tokens.device.type, torch.float16):
                loss = loop.net(tokens) / 2
            scaler.scale(loss).backward()
        numbers.append(loss.item())
        if last:
            if clip:
                scaler.unscale_(loop.optimizer)
                numbers += [norm for norm in [loop.clip(0.5)] if math.isfinite(norm)]
            scaler.step(loop.optimizer)
            scaler.update()
            loop.optimizer.zero_grad()
            numbers.append(scaler.get_scale())
    return numbers


def skips(loop: Loop) -> list[float]:
    """A step with a norm that is not finite is left out, one of two micro-batches after it
    is not."""
    numbers = []
    for number, tokens in enumerate(rows(5)):
        with loop.around(last=number != 2):
            loss = loop.net(tokens) * (float("inf") if number == 1 else 1.0)
            loss.backward()
        if number == 2:
            continue
        norm = loop.clip(0.5)
        if number == 1:
            loop.optimizer.zero_grad()
        else:
            numbers.append(norm)
            loop.update()
    return numbers


def refuses(loop: Loop) -> list[float]:
    """What would lose gradients is an error, after which training goes on."""
    if loop.paged is not None:
        tokens = rows(1)[0]
        with loop.around(), pytest.raises(AccessError, match=r"Call `paged\.module`"):
            loop.model(tokens)
        with torch.no_grad(), loop.around():
            loop.model(tokens)
        with loop.around():
            loop.net(tokens).backward()
        for last in (True, False):
            with pytest.raises(AccessError, match=r"micro_batch\(last=False\)"):
                loop.around(last).__enter__()
        loop.optimizer.zero_grad()
    return steps(loop)


def looks(loop: Loop) -> list[float]:
    """Weights shown inside of a micro-batch, before its backward, end the run: ranks that
    show gradients average them."""
    if loop.paged is not None:
        with loop.around(), pytest.raises(AccessError, match="not in between"):
            with loop.paged.full_params():
                factor = loop.model.head.weight.sum().item()
            (factor * loop.net(rows(1)[0])).backward()
    return []


def by_trainer(
    loop: Loop,
    folder: str,
    resumes_from: str | None = None,
    scaler: torch.amp.GradScaler | None = None,
    **settings: Any,
) -> list[float]:
    """Let a `transformers.Trainer` train; losses and norms, those before a checkpoint too.

    With a `scaler` in fp16, as on a GPU: on a CPU accelerate would have none.
    """
    from transformers import Trainer, TrainingArguments

    class Plain(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return model(inputs["tokens"])

    arguments = TrainingArguments(
        folder,
        max_steps=4,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        logging_steps=1,
        remove_unused_columns=False,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{"save_strategy": "no", "max_grad_norm": 0.5, **settings},
    )
    data: Any = [{"tokens": tokens[0]} for tokens in batches(16)]
    optimizers = loop.optimizer, None
    # on several ranks its CPU is number 0, to which weights would be copied
    with patch.object(TrainingArguments, "place_model_on_device", False):
        trainer = Plain(
            loop.model, arguments, train_dataset=data, optimizers=optimizers
        )
    if scaler is not None:
        trainer.accelerator.scaler, trainer.accelerator.native_amp = scaler, True
    if loop.paged is not None:
        loop.paged.adapt(trainer.accelerator)
    trainer.train(resume_from_checkpoint=resumes_from)
    log = trainer.state.log_history
    return [line[key] for line in log for key in ("loss", "grad_norm") if key in line]


def saves_weights(loop: Loop) -> list[float]:
    """Train by a Trainer, which saves the optimizer's state on a rank alone only."""
    settings = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    with TemporaryDirectory() as folder:
        return by_trainer(loop, folder, **settings)


CASES: dict[str, tuple[Callable[[Loop], list[float]], Knobs | None, bool]] = {
    "full": (steps, Knobs(0, 2, 0, 3), False),
    "adapter": (steps, Knobs(0, 2, 0, 3), True),
    "full, measured": (steps, None, False),
    "adapter, measured": (steps, None, True),
    "scales": (scales, Knobs(0, 2, 0, 3), False),
    "skips": (skips, Knobs(0, 2, 0, 3), False),
    "looks": (looks, Knobs(0, 2, 0, 3), False),
    "refuses": (refuses, Knobs(2, 2, 0, 0), False),
    "Trainer": (saves_weights, Knobs(0, 2, 0, 3), False),
    "Trainer, some stay": (saves_weights, Knobs(2, 2, 0, 3), False),
}
"""A loop, the plan of the paged one, and whether an adapter alone trains."""


def compare(name: str) -> None:
    train, knobs, lora = CASES[name]
    model = stack()
    if lora:
        freeze(model)
    other = twin(model)
    plain = Loop(other, nn.parallel.DistributedDataParallel(other), adamw(other))
    ours = Loop(model, model, adamw(model))
    with page(
        model,
        ours.optimizer,
        example=batches(1)[0],
        budget="1GiB",
        host_budget="1GiB",
        accumulation=2,
        knobs=knobs,
        hardware=gpu("RTX 4090") if knobs else None,
        device="cpu",
    ) as paged:
        kind = type(paged.module).__name__
        numbers = train(replace(ours, net=paged.module, paged=paged))
        found = weights(model)
    same = numbers == train(plain)
    same &= all(torch.equal(found[n], w) for n, w in weights(other).items())
    print(f"{name}: {'equal' if same else 'differs'}, {kind}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    store = f"file://{sys.argv[1]}"
    rank, size = (int(os.environ[key]) for key in ("RANK", "WORLD_SIZE"))
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    for name in CASES:
        compare(name)
    dist.destroy_process_group()
