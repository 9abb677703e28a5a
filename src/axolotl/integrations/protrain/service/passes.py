"""The passes of a request, in micro-batches as a training step of Axolotl has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from ..core.engine.session import Session
from ..core.errors import RequestError
from ..job import autocast_dtype
from .losses import LOSSES, TARGETS, Datum, Settings, fault_of


class Passes:
    """Forward and backward of a model on a device.

    Args:
        cfg: Axolotl's validated configuration: rows of a micro-batch and their length.
        session: Of a model without dropout.
        between: Called once a forward is queued, before its backward.
    """

    def __init__(self, cfg: Any, session: Session, between: Callable[[], None]) -> None:
        model: Any = session.model
        self._model, self._between = model, between
        self._device = session.device.torch_device
        self._rows, self._longest = int(cfg.micro_batch_size), int(cfg.sequence_len)
        self._vocabulary = int(model.get_input_embeddings().weight.shape[0])
        # of what Axolotl's collator makes the length of rows a multiple
        self._multiple = int(cfg.pad_to_multiple_of or 64)
        if cfg.pad_to_sequence_len:
            self._multiple *= -(-self._longest // self._multiple)
        elif cfg.pad_to_sequence_len is not None:
            self._multiple = 1
        self._autocast = autocast_dtype(cfg)

    def check(self, data: Sequence[Datum], loss_fn: str) -> None:
        """Refuse rows that no pass may see.

        Raises:
            RequestError: Which row, and what is wrong with it.
        """
        if not data:
            raise RequestError("data: there is no row.")
        for number, datum in enumerate(data):
            fault = fault_of(datum, loss_fn, self._vocabulary, self._longest)
            if fault is not None:
                raise RequestError(f"data[{number}]: {fault}")

    def run(
        self, data: Sequence[Datum], loss_fn: str, settings: Settings, backward: bool
    ) -> tuple[float, list[Tensor]]:
        """The loss, a sum, and log-probabilities of each row's targets, float32.

        Raises:
            RequestError: The loss is not finite.
        """
        total, rows = 0.0, []
        for first in range(0, len(data), self._rows):
            some = data[first : first + self._rows]
            loss, logprobs = self._micro_batch(some, loss_fn, settings, backward)
            total += loss
            rows += logprobs
        if not math.isfinite(total):
            raise RequestError(
                f"data: the loss is {total}. Look at the logprobs and advantages."
            )
        return total, rows

    def _micro_batch(
        self, data: Sequence[Datum], loss_fn: str, settings: Settings, backward: bool
    ) -> tuple[float, list[Tensor]]:
        """Rows of one length, in which there is room for the token that the client has
        shifted away."""
        longest = max(datum.tokens.numel() for datum in data)
        longest = min(longest + 1, self._longest)
        length = -(-longest // self._multiple) * self._multiple
        device, dtype = self._device, self._autocast

        def padded(rows: Iterable[Tensor], value: int = 0) -> Tensor:
            whole = [pad(row, (0, length - row.numel()), value=value) for row in rows]
            return torch.stack(whole).to(device)

        ends = [min(datum.tokens.numel() + 1, length) for datum in data]
        mask = padded(torch.ones(end, dtype=torch.int64) for end in ends)
        targets = padded((datum.inputs[TARGETS] for datum in data), -100)
        given = {
            name: padded(datum.inputs[name] for datum in data)
            for name in LOSSES[loss_fn].inputs
        }
        autocast = torch.autocast(device.type, dtype) if dtype else nullcontext()
        with torch.set_grad_enabled(backward):
            with autocast:
                output = self._model(
                    input_ids=padded(datum.tokens for datum in data),
                    attention_mask=mask,
                    use_cache=False,
                )
            logits = output.logits.float().flatten(0, 1)
            nll = cross_entropy(logits, targets.flatten(), reduction="none")
            logprobs = -nll.view(targets.shape)
            loss = LOSSES[loss_fn].of(logprobs, given, settings)
        self._between()
        if backward:
            loss.backward()
        found = logprobs.detach().cpu()
        rows = [found[row, : d.tokens.numel()].clone() for row, d in enumerate(data)]
        return float(loss.detach()), rows
