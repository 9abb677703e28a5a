"""Axolotl plugins for the tests: an operator of the second step finds no memory.

Each plugin fails in one place: the second micro-batch's forward or backward, the
clipping before the update, or the update itself. Some fail again when the step is
repeated, one in the words of cuBLAS, and one asks for more than there is under any plan.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from axolotl.integrations.base import BasePlugin
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

STEP, MICRO_BATCH = 2, 2
ASKED_BYTES = 4096


class FailingPlugin(BasePlugin):
    """Raises `error`, some times."""

    where: str
    times = 1
    error: RuntimeError = torch.OutOfMemoryError(
        f"Tried to allocate {ASKED_BYTES} bytes."
    )

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[TrainerCallback]:
        return [_Fail(_Operators(_PLACES[self.where], self.times, self.error))]


class FailForward(FailingPlugin):
    where = "forward"


class FailBackward(FailingPlugin):
    where = "backward"


class FailClipping(FailingPlugin):
    where = "clipping"


class FailUpdate(FailingPlugin):
    where = "update"


class FailThrice(FailingPlugin):
    where = "forward"
    times = 3
    error = RuntimeError(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    )


class FailFourTimes(FailThrice):
    times = 4


class FailWithoutMeasure(FailingPlugin):
    where = "backward"
    error = torch.OutOfMemoryError("Tried to allocate 1.00 GiB.")


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
        if self._times_left and self._place(name, self._num_forwards):
            self._times_left -= 1
            raise type(self._error)(*self._error.args)
        return func(*args, **(kwargs or {}))


_PLACES: dict[str, Callable[[str, int], bool]] = {
    # late enough for dropout to have drawn numbers in both
    "forward": lambda name, batch: batch >= MICRO_BATCH and name == "_log_softmax",
    "backward": lambda name, batch: (
        batch == MICRO_BATCH
        and name == "_scaled_dot_product_flash_attention_for_cpu_backward"
    ),
    "clipping": lambda name, _: name in ("_foreach_norm", "linalg_vector_norm"),
    "update": lambda name, _: name == "_fused_adamw_",
}


class _Fail(TrainerCallback):
    def __init__(self, operators: _Operators) -> None:
        self._operators = operators
        self._inside = ExitStack()

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_kw: Any) -> None:
        if state.global_step + 1 == STEP:
            self._inside.enter_context(self._operators)

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        self._inside.close()
