"""Samples as they are answered, and what is asked and told about a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from .turns import TENSOR_BYTES

Reason = Literal["stop", "length"]
MASKED = -99999.0
"""In place of a log-probability in tables of the likeliest tokens, where there is none."""


@dataclass(frozen=True)
class Top:
    """The likeliest tokens at each place, best first, of shape [length, k]: `tokens` int32,
    `logprobs` float32; 0 and `MASKED` where there are none."""

    tokens: Tensor
    logprobs: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the host."""
        return self.tokens.nbytes + self.logprobs.nbytes + 2 * TENSOR_BYTES


@dataclass(frozen=True)
class Shown:
    """A token while its sample, of some number, is still made; `top` as in `Top`."""

    number: int
    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Sample:
    """One sample: `tokens` int32 and `logprobs` float32 of shape [length], the one that has
    ended it included."""

    tokens: Tensor
    logprobs: Tensor
    reason: Reason
    top: Top | None = None


@dataclass(frozen=True)
class Wanted:
    """Tokens that a client names at places of a prompt, or log-probabilities of them.

    Attributes:
        values: Of shape [length - 1, k]; -1 for no token, 0 for its log-probability.
        sparse: Where the client has named some, as CSR has it: where each row begins and
            ends among the columns, and the columns; int64. None if all were sent.
    """

    values: Tensor
    sparse: tuple[Tensor, Tensor] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return that of `values`."""
        return tuple(self.values.shape)

    def listed(self) -> Tensor:
        """Return the values where `sparse` has some."""
        assert self.sparse is not None
        rows, columns = self.sparse
        each = torch.arange(len(rows) - 1).repeat_interleave(rows.diff())
        return self.values[each, columns]


@dataclass(frozen=True)
class Asked:
    """A client's questions about a prompt.

    Attributes:
        last_n: Log-probabilities of so many tokens of it only, if not None.
        num_top: So many of the likeliest tokens at each place.
        wanted: Tokens to tell log-probabilities of, int64.
        logprobs: Whether log-probabilities of its own tokens are asked for.
    """

    prompt: list[int] = field(default_factory=list)
    logprobs: bool = False
    last_n: int | None = None
    num_top: int = 0
    wanted: Wanted | None = None

    @property
    def reads(self) -> bool:
        """Tell whether it asks for anything."""
        return self.logprobs or self.num_top > 0 or self.wanted is not None


@dataclass(frozen=True)
class Scored:
    """Log-probabilities of a prompt.

    Attributes:
        logprobs: Of each of its tokens after those before it, float32; NaN for the first.
        top: The likeliest tokens at each place, none at the first.
        wanted: Of tokens that a client has named, float32.
        last: Logits after the prompt, float32 of shape [vocabulary], or no longer.
    """

    logprobs: Tensor
    top: Top | None
    wanted: Wanted | None
    last: Tensor | None

    def told(self, asked: Asked) -> tuple[Tensor | None, Top | None, Wanted | None]:
        """Return what was asked for: log-probabilities, likeliest tokens, wanted ones."""
        logprobs, top = self.logprobs, self.top
        if asked.last_n is not None:
            before = slice(0, len(asked.prompt) - asked.last_n)
            logprobs = logprobs.clone()
            logprobs[before] = torch.nan
            if top is not None:
                top = Top(top.tokens.clone(), top.logprobs.clone())
                top.tokens[before], top.logprobs[before] = 0, MASKED
        return logprobs if asked.logprobs else None, top, self.wanted


@dataclass(frozen=True)
class Sampled:
    """The answer to a request; what was not asked for of a prompt is None."""

    samples: Sequence[Sample]
    prompt_logprobs: Tensor | None = None
    prompt_top: Top | None = None
    wanted: Wanted | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the host."""
        tensors = [t for s in self.samples for t in (s.tokens, s.logprobs)]
        wanted = None if self.wanted is None else self.wanted.values
        tensors += [t for t in (self.prompt_logprobs, wanted) if t is not None]
        tops = [*(s.top for s in self.samples), self.prompt_top]
        return sum(t.nbytes + TENSOR_BYTES for t in tensors) + sum(
            top.nbytes for top in tops if top is not None
        )
