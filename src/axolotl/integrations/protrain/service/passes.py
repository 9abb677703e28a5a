"""The passes of a request, in micro-batches as a training step of Axolotl has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from ..core.engine.session import Session
from ..core.errors import RequestError
from ..job import autocast_dtype
from .answers import MASKED, Asked, Scored, Top, Wanted
from .losses import LOSSES, TARGETS, Datum, Settings, fault_of


class Passes:
    """Forward and backward of a model on a device.

    Args:
        cfg: Axolotl's validated configuration: rows of a micro-batch and their length.
        session: Of a model without dropout.
        between: Called once a forward is queued, before its backward.

    Attributes:
        rows, longest: Of a micro-batch, and tokens of a row.
        vocabulary: Tokens that there are.
    """

    def __init__(self, cfg: Any, session: Session, between: Callable[[], None]) -> None:
        model: Any = session.model
        self._model, self._between = model, between
        self._device = session.device.torch_device
        self.rows, self.longest = int(cfg.micro_batch_size), int(cfg.sequence_len)
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])
        # of what Axolotl's collator makes the length of rows a multiple
        self._multiple = int(cfg.pad_to_multiple_of or 64)
        if cfg.pad_to_sequence_len:
            self._multiple *= -(-self.longest // self._multiple)
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
            fault = fault_of(datum, loss_fn, self.vocabulary, self.longest)
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
        for first in range(0, len(data), self.rows):
            some = data[first : first + self.rows]
            loss, logprobs = self._micro_batch(some, loss_fn, settings, backward)
            total += loss
            rows += logprobs
        if not math.isfinite(total):
            raise RequestError(
                f"data: the loss is {total}. Look at the logprobs and advantages."
            )
        return total, rows

    @torch.no_grad()
    def score(self, asked: Sequence[Asked]) -> list[Scored]:
        """Read prompts of a micro-batch, as `run` reads rows that end with their last token
        but one, whose log-probabilities are the same bits where the same rows share it."""
        tokens = [torch.tensor(one.prompt) for one in asked]
        logits = self._logits(tokens, [len(one.prompt) for one in asked])
        return [_scored(*pair) for pair in zip(asked, logits, strict=True)]

    def _padded(self, rows: Iterable[Tensor], length: int, value: int = 0) -> Tensor:
        rows = [*rows]
        if any(row.ndim > 1 for row in rows):
            rows = [row.view(len(row), -1) for row in rows]
        wide = max(row[0].numel() for row in rows)
        whole = []
        for row in rows:
            sides = (0, wide - row[0].numel()) * (row.ndim - 1)
            whole.append(pad(row, (*sides, 0, length - len(row)), value=value))
        return torch.stack(whole).to(self._device)

    def _logits(self, tokens: Sequence[Tensor], ends: Sequence[int]) -> Tensor:
        """Logits in float32, of shape [rows, length, vocabulary].

        Args:
            tokens: Of each row.
            ends: Where each is no longer looked at.
        """
        longest = min(max(ends), self.longest)
        length = -(-longest // self._multiple) * self._multiple
        ones = (torch.ones(min(end, length), dtype=torch.int64) for end in ends)
        kind, dtype = self._device.type, self._autocast
        with torch.autocast(kind, dtype, enabled=dtype is not None):
            output = self._model(
                input_ids=self._padded(tokens, length),
                attention_mask=self._padded(ones, length),
                use_cache=False,
            )
        return output.logits.float()

    def _micro_batch(
        self, data: Sequence[Datum], loss_fn: str, settings: Settings, backward: bool
    ) -> tuple[float, list[Tensor]]:
        """Rows of one length, in which there is room for the token that the client has
        shifted away."""
        ends = [datum.tokens.numel() + 1 for datum in data]
        with torch.set_grad_enabled(backward):
            logits = self._logits([datum.tokens for datum in data], ends)
            length = logits.shape[1]
            targets = self._padded(
                (datum.inputs[TARGETS] for datum in data), length, -100
            )
            given = {
                name: self._padded((datum.inputs[name] for datum in data), length)
                for name in LOSSES[loss_fn].inputs
            }
            logprobs = _of_targets(logits, targets)
            loss = LOSSES[loss_fn].of(logprobs, given, settings)
        self._between()
        if backward:
            loss.backward()
        found = logprobs.detach().cpu()
        shapes = [datum.inputs[TARGETS].shape for datum in data]
        rows = [_cut(*pair).clone() for pair in zip(found, shapes, strict=True)]
        return float(loss.detach()), rows


def _of_targets(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities of targets, one a token or several; 0 for -100."""
    if targets.ndim > 2:
        # one target a token has the bits that it has below
        found = logits.log_softmax(-1).gather(-1, targets.clamp(min=0))
        return found.masked_fill(targets < 0, 0)
    flat = logits.flatten(0, 1), targets.flatten()
    return -cross_entropy(*flat, reduction="none").view(targets.shape)


def _cut(padded: Tensor, shape: torch.Size) -> Tensor:
    own = padded[: shape[0]]
    wide = shape[1] if len(shape) > 1 else 1
    return own[:, :wide].reshape(shape) if own.ndim > 1 else own


def _scored(asked: Asked, logits: Tensor) -> Scored:
    """Log-probabilities of a prompt from its logits, of shape [length, vocabulary]."""
    length = len(asked.prompt)
    prompt = torch.tensor(asked.prompt, device=logits.device)
    every, last = logits[: length - 1], logits[length - 1].clone()
    nll = cross_entropy(every, prompt[1:], reduction="none")
    nothing = torch.full((1,), torch.nan)
    logprobs = torch.cat([nothing, -nll.cpu()])
    top = wanted = None
    if asked.num_top or asked.wanted is not None:
        every = every.log_softmax(-1)
    if asked.num_top:
        best = every.topk(min(asked.num_top, every.shape[-1]))
        values = best.values.clamp(min=MASKED).cpu()
        tokens = best.indices.int().cpu()
        top = Top(pad(tokens, (0, 0, 1, 0)), pad(values, (0, 0, 1, 0), value=MASKED))
    if asked.wanted is not None:
        which = asked.wanted.values.to(logits.device)
        values = every.gather(1, which.clamp(min=0)).clamp(min=MASKED)
        values = values.masked_fill(which < 0, 0)
        wanted = Wanted(values.cpu(), asked.wanted.sparse)
    return Scored(logprobs, top, wanted, last)
