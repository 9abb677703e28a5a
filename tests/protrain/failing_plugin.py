"""Axolotl plugins for the tests: an operator of the second step finds no memory.

Each plugin fails in one place: the second micro-batch's inputs, forward or backward, the
clipping before the update, or the update itself; of each there is one that fails on one
rank of several (`OfRank0`). Some fail again when the step is
repeated, one in the words of cuBLAS, and one asks for more than there is under any plan.
Another takes memory that no trace sees.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from axolotl.integrations.base import BasePlugin
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainerCallback

from axolotl.integrations.protrain.core.engine.device import CpuDevice, CudaDevice

STEP, MICRO_BATCH = 2, 2
ASKED_BYTES = 4096


class FailingPlugin(BasePlugin):
    """Raises `error`, some times."""

    where: str
    times = 1
    rank: int | None = None
    error: RuntimeError = torch.OutOfMemoryError(
        f"Tried to allocate {ASKED_BYTES} bytes."
    )

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[TrainerCallback]:
        return [
            _Fail(_Operators(PLACES[self.where], self.times, self.error), self.rank)
        ]


PLACES: dict[str, Callable[[str, int], bool]] = {
    # late enough for dropout to have drawn numbers in both
    "Forward": lambda name, batch: batch >= MICRO_BATCH and name == "_log_softmax",
    "Backward": lambda name, batch: (
        batch == MICRO_BATCH
        and name == "_scaled_dot_product_flash_attention_for_cpu_backward"
    ),
    "Inputs": lambda name, batch: batch == MICRO_BATCH - 1 and name == "inputs",
    # between the inputs and the model's forward
    "Before": lambda name, batch: batch == MICRO_BATCH - 1 and name == "before",
    "Entry": lambda name, batch: batch == MICRO_BATCH and name == "embedding",
    "Turn": lambda name, batch: (
        batch == MICRO_BATCH and name == "_log_softmax_backward_data"
    ),
    "Activation": lambda name, batch: batch == MICRO_BATCH and name == "silu_backward",
    # when answers were scored after the first micro-batch
    "Sampled": lambda name, batch: batch > MICRO_BATCH and name == "silu_backward",
    # when weights of the last blocks, and of the first, have had their gradients
    "Late": lambda name, batch: (
        batch == MICRO_BATCH and name == "embedding_dense_backward"
    ),
    "Clipping": lambda name, _: name in ("_foreach_norm", "linalg_vector_norm"),
    # when room for the update is looked for
    "Probe": lambda name, _: name == "probe",
    "Update": lambda name, _: name == "_fused_adamw_",
}
"""Operators and moments, by the place of which the plugins `Fail…` have the name."""
for _place in PLACES:
    globals()[f"Fail{_place}"] = type(
        f"Fail{_place}", (FailingPlugin,), {"where": _place}
    )


class FailThrice(FailingPlugin):
    where = "Forward"
    times = 3
    error = RuntimeError(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    )


class FailFourTimes(FailThrice):
    times = 4


class FailWithoutMeasure(FailingPlugin):
    where = "Backward"
    error = torch.OutOfMemoryError("Tried to allocate 1.00 GiB.")


class FailBesideGradients(FailingPlugin):
    """In a step that begins with gradients, as after an epoch of unknown length."""

    where = "Forward"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[TrainerCallback]:
        return [*super().add_callbacks_pre_trainer(cfg, model), _LeaveGradients()]


class _LeaveGradients(TrainerCallback):
    def on_step_end(self, *_args: Any, model: Any, **_kwargs: Any) -> None:
        for param in model.parameters():
            if param.requires_grad:
                param.grad = torch.ones_like(param)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UNSEEN_BYTES = (32 if DEVICE == "cuda" else 1) << 20


class TakeUnseen(BasePlugin):
    """Each forward holds `UNSEEN_BYTES` beside what was there when the run was planned."""

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[TrainerCallback]:
        return [_Take()]


class _Take(TrainerCallback):
    def on_train_begin(self, *_args: Any, model: Any, **_kwargs: Any) -> None:
        def take(*_: Any) -> None:
            self.held = None
            self.held = torch.zeros(UNSEEN_BYTES, dtype=torch.uint8, device=DEVICE)

        model.register_forward_pre_hook(take)


SHARED_BYTES = 8 << 20
for _kind in FailingPlugin.__subclasses__():
    for _rank in range(2):
        _name = f"{_kind.__name__}OfRank{_rank}"
        # more than was planned
        _error = torch.OutOfMemoryError(
            f"Tried to allocate {SHARED_BYTES >> 20}.00 MiB."
        )
        _given = {"rank": _rank, "error": _error}
        globals()[_name] = type(_name, (_kind,), _given)


class CallbackPlugin(BasePlugin):
    """Has one callback."""

    kind: type[TrainerCallback]

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[TrainerCallback]:
        return [self.kind()]


class _DrawBetween(TrainerCallback):
    def on_substep_end(self, *_args: Any, **_kwargs: Any) -> None:
        torch.rand(1)


class _ReadBetween(TrainerCallback):
    def on_substep_end(self, *_args: Any, model: Any, **_kwargs: Any) -> None:
        assert any(p.grad.norm() > 0 for p in model.parameters() if p.grad is not None)


class _ScaleBetween(TrainerCallback):
    def on_substep_end(self, *_args: Any, model: Any, **_kwargs: Any) -> None:
        for param in model.parameters():
            if param.grad is not None:
                param.grad.data.mul_(0.5)


class _WriteBetween(TrainerCallback):
    def on_substep_end(self, *_args: Any, model: Any, **_kwargs: Any) -> None:
        for param in model.parameters():
            if param.requires_grad:
                param.data.neg_()


class _FreezeBetween(TrainerCallback):
    """Without looking at weights."""

    looks_at_weights = False

    def on_substep_end(self, *_args: Any, model: Any, **_kwargs: Any) -> None:
        next(p for p in model.parameters() if p.requires_grad).requires_grad_(False)


class _ClampBefore(TrainerCallback):
    def on_pre_optimizer_step(self, *_args: Any, model: Any, **_kwargs: Any) -> None:
        for param in model.parameters():
            if param.grad is not None:
                param.grad.clamp_(-1e-4, 1e-4)


class _CountForwards(TrainerCallback):
    num_forwards = 0

    def on_train_begin(self, *_args: Any, model: Any, **_kwargs: Any) -> None:
        def count(*_: Any) -> None:
            self.num_forwards += 1

        model.register_forward_hook(count)


class _ChangeBuffer(TrainerCallback):
    """By a hook that no module's list of hooks has."""

    def on_train_begin(self, *_args: Any, model: Any, **_kwargs: Any) -> None:
        forward, buffer = model.forward, next(model.buffers())

        def changing(*args: Any, **kwargs: Any) -> Any:
            buffer.add_(0)
            return forward(*args, **kwargs)

        model.forward = changing


for _callback in TrainerCallback.__subclasses__():
    if _callback.__module__ == __name__ and not vars(_callback).get("__init__"):
        _name = _callback.__name__.removeprefix("_")
        globals().setdefault(_name, type(_name, (CallbackPlugin,), {"kind": _callback}))


class _Operators(TorchDispatchMode):
    """Counts forwards by their embeddings, and raises where it is told to."""

    def __init__(
        self, place: Callable[[str, int], bool], times: int, error: RuntimeError
    ) -> None:
        super().__init__()
        self._place = place
        self._num_forwards = 0
        self._times_left = times
        self._error = error

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        self._num_forwards += name == "embedding"
        self.fail(name)
        return func(*args, **(kwargs or {}))

    def fail(self, name: str) -> None:
        if self._times_left and self._place(name, self._num_forwards):
            self._times_left -= 1
            raise type(self._error)(*self._error.args)


class _Fail(TrainerCallback):
    def __init__(self, operators: _Operators, rank: int | None) -> None:
        self._operators, self._rank = operators, rank
        self._inside = ExitStack()

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_kw: Any) -> None:
        own = dist.get_rank() if dist.is_initialized() else 0
        if state.global_step + 1 == STEP and self._rank in (None, own):
            self._inside.enter_context(self._operators)
            for owner, name, moment in (
                (Trainer, "_prepare_input", "inputs"),
                (Trainer, "compute_loss", "before"),
                (CpuDevice, "probe", "probe"),
                (CudaDevice, "probe", "probe"),
            ):
                self._inside.enter_context(self._failing(owner, name, moment))

    def _failing(self, owner: type, name: str, moment: str) -> Any:
        plain = getattr(owner, name)

        def failing(*args: Any, **kwargs: Any) -> Any:
            # a watched device looks for the room of each operator too
            if moment != "probe" or sys._getframe(1).f_code.co_name != "follow":
                self._operators.fail(moment)
            return plain(*args, **kwargs)

        return patch.object(owner, name, failing)

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        self._inside.close()
