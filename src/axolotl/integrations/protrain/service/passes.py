"""The passes of a request, in micro-batches as a training step of Axolotl has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..core.errors import RequestError
from ..planning import autocast_dtype
from .losses import LOSSES, TARGETS, Datum, Settings, check_data


class Passes:
    """Forward and backward of a model on a device.

    Args:
        cfg: Axolotl's validated configuration: rows of a micro-batch and their length.
        model: On the device, without dropout.
        device: Where it computes.
        between: Called once a forward is queued, before its backward.
    """

    def __init__(
        self,
        cfg: Any,
        model: Any,
        device: torch.device,
        between: Callable[[], None],
    ) -> None:
        self._model, self._device, self._between = model, device, between
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
        """See `check_data`."""
        check_data(data, loss_fn, self._vocabulary, self._longest)

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
        tokens = torch.zeros(len(data), length, dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        targets = torch.full_like(tokens, -100)
        names = LOSSES[loss_fn].inputs
        given = {name: torch.zeros(len(data), length) for name in names}
        for row, datum in enumerate(data):
            end = datum.tokens.numel()
            tokens[row, :end] = datum.tokens
            mask[row, : end + 1] = 1
            targets[row, :end] = datum.inputs[TARGETS]
            for name, values in given.items():
                values[row, :end] = datum.inputs[name]
        device, dtype = self._device, self._autocast
        given = {name: values.to(device) for name, values in given.items()}
        autocast = torch.autocast(device.type, dtype) if dtype else nullcontext()
        with torch.set_grad_enabled(backward):
            with autocast:
                output = self._model(
                    input_ids=tokens.to(device),
                    attention_mask=mask.to(device),
                    use_cache=False,
                )
            logits = output.logits.float().flatten(0, 1)
            flat = targets.flatten().to(device)
            nll = torch.nn.functional.cross_entropy(logits, flat, reduction="none")
            logprobs = -nll.view(targets.shape)
            loss = LOSSES[loss_fn].of(logprobs, given, settings)
        self._between()
        if backward:
            loss.backward()
        found = logprobs.detach().cpu()
        rows = [found[row, : d.tokens.numel()].clone() for row, d in enumerate(data)]
        return float(loss.detach()), rows
