"""What an adapter of a system gets, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from axolotl.integrations.protrain.core.engine.device import CpuDevice

from . import models
from .cases import SHAPES, Case
from .meters import DeviceBytes

HOST = torch.device("cpu")
LEARNING_RATE = 1e-4

Batch = dict[str, Tensor]
Step = Callable[[list[Batch]], Tensor]
Clip = Callable[[float], Any]


class CannotRunError(RuntimeError):
    """The system said so itself, in a warning instead of an error."""


def nothing() -> None:
    """No figure, or nothing to do."""


@dataclass(frozen=True)
class Training:
    """A model that a system has taken over.

    Attributes:
        step: Forward and backward on each micro-batch, and the update; returns the loss.
        config: What the system was told, for the record.
        arithmetic: What its update does differently from plain torch, if anything.
        watch: While inside, device memory is counted on a machine without a GPU.
        peak_bytes: Highest count so far of that; None where device memory cannot be
            told from the host's.
        moved: Bytes to the device and bytes from it so far, where the system counts.
        pinned_bytes: Host memory that it has page-locked itself, beside torch's own
            pinned memory.
        between: Called before each step that is timed, outside its time.
        record: More for the JSON file, asked for at the end.
    """

    step: Step
    config: dict[str, Any] = field(default_factory=dict)
    arithmetic: str = ""
    watch: Callable[[], AbstractContextManager[Any]] = nullcontext
    peak_bytes: Callable[[], int | None] = nothing
    moved: Callable[[], tuple[int, int]] | None = None
    pinned_bytes: Callable[[], int] = int
    between: Callable[[], Any] = nothing
    record: Callable[[], dict[str, Any]] = dict


@dataclass(frozen=True)
class Setup:
    """One case on one device."""

    case: Case
    device: torch.device
    capped: bool = True

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def hidden(self) -> int:
        return SHAPES[self.case.shape].hidden

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.case.precision == "bf16" else None

    def model(self, home: torch.device) -> nn.Module:
        """The model with its weights at `home`."""
        return models.build(self.case, home, self.device)

    def batches(self, step: int) -> list[Batch]:
        """The micro-batches of a step."""
        count = self.case.accumulation
        return [
            models.batch(self.case, step * count + number, self.device)
            for number in range(count)
        ]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        with self.autocast():
            return model(**batch).loss

    def autocast(self) -> AbstractContextManager[Any]:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast_dtype)

    def recompute(self, model: Any, reentrant: bool = False) -> None:
        """Recompute every block in backward, as transformers does it."""
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if self.case.method != "full":
            model.enable_input_require_grads()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)

    def step(self, model: nn.Module, optimizer: Any, clip: Clip | None = None) -> Step:
        """A plain loop's step; `clip` clips all gradients where torch's own does not."""
        if clip is None:
            clip = partial(nn.utils.clip_grad_norm_, [*model.parameters()])
        return partial(self._step, model, optimizer, clip)

    def _step(
        self, model: nn.Module, optimizer: Any, clip: Clip, batches: list[Batch]
    ) -> Tensor:
        total = torch.zeros((), device=self.device)
        for batch in batches:
            loss = self.loss(model, batch) / len(batches)
            loss.backward()
            total += loss.detach()
        if self.case.max_norm is not None:
            clip(self.case.max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    def resident(self, model: nn.Module, optimizer: Any, **config: Any) -> Training:
        """A model that is on the device and is trained by a plain loop."""
        if not self.on_cpu:
            return Training(self.step(model, optimizer), config)
        device = CpuDevice(self.case.capacity_bytes if self.capped else None)
        held = {p.untyped_storage().data_ptr(): p for p in model.parameters()}
        nbytes = sum(p.untyped_storage().nbytes() for p in held.values())
        placed = iter((nbytes,))

        @contextmanager
        def watch() -> Iterator[None]:
            with device.watch(already=next(placed, 0)):
                yield

        return Training(
            self.step(model, optimizer),
            config,
            watch=watch,
            peak_bytes=device.peak_bytes,
        )

    def beside_host(
        self,
        host: Callable[[], Iterable[Tensor]],
        step: Step,
        config: dict[str, Any],
        arithmetic: str = "",
    ) -> Training:
        """A training of which `host` names what is not on the device."""
        if not self.on_cpu:
            return Training(step, config, arithmetic)
        counter = DeviceBytes(host)

        @contextmanager
        def watch() -> Iterator[None]:
            with counter:
                yield

        return Training(
            step, config, arithmetic, watch=watch, peak_bytes=lambda: counter.peak
        )
