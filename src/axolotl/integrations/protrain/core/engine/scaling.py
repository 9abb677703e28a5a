"""Gradients that a GradScaler looks for on the device, wherever they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from .host_chunks import OffloadedGrad
from .session import Session


@contextmanager
def finds_all_gradients(scaler: Any, session: Session) -> Iterator[None]:
    """Let a `torch.amp.GradScaler` unscale gradients in host memory too, inside.

    It does that in `unscale_`, and in `step` for who has not called that.
    """
    plain = scaler._unscale_grads_

    def unscale(
        optimizer: torch.optim.Optimizer, inv_scale: Tensor, found: Tensor, *rest: Any
    ) -> dict[torch.device, Tensor]:
        params = (p for group in optimizer.param_groups for p in group["params"])
        if not any(_is_away(param.grad, found.device) for param in params):
            return plain(optimizer, inv_scale, found, *rest)
        with session.full_params():
            # torch does not wait for its own copies of both to the host before it reads them
            flags = plain(optimizer, inv_scale.cpu(), found.cpu(), *rest)
        # one flag: of several a fused optimizer is given the sum, and skips only at 1
        each = [flag.to(found.device) for flag in flags.values()]
        return {found.device: torch.stack(each).amax()}

    with patch.object(scaler, "_unscale_grads_", unscale):
        yield


def _is_away(gradient: Tensor | None, device: torch.device) -> bool:
    """Tell whether the host has it, which `full_params` may show."""
    if gradient is None:
        return False
    return isinstance(gradient, OffloadedGrad) or gradient.device != device
