"""Choose tokens: what a client may ask for, and a sample while it is made.

# Note [Which log-probabilities]

Those of a token that was sampled are the model's own: before temperature, top-k and top-p.
So they are what `importance_sampling` compares with log-probabilities of a pass, whatever
the token was drawn by; a pass reads the row at once and a sample token by token, so the two
differ in the last bits.

# Note [A random stream for each sample]

Sample i of a request with seed s draws from a generator of its own, seeded by both. Who
shares its batch changes nothing of what is drawn; the rounding of products of other shapes
remains.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import Field, field_validator
from pydantic.dataclasses import dataclass as checked
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..core.errors import RequestError
from .answers import MASKED, Reason, Sample, Shown, Top

MOST_STOPS = 64
"""Stop sequences of one request, and tokens or letters of one."""
LEAST_TEMPERATURE = 1e-4
"""Less would make scores that are not finite; 0 takes the likeliest token."""
_NONE_READ = torch.empty(1, 0, dtype=torch.int64)


@checked(frozen=True, config={"extra": "forbid", "allow_inf_nan": False})
class SamplingParams:
    """Rules by which tokens are chosen and a sample ends; the defaults are Tinker's.

    `temperature` 0 takes the likeliest token. `top_k` -1 or 0 takes from all. `stop` is a
    text, texts, tokens or sequences of tokens, beside the end of sequence of the base;
    without any, [], a sample ends at `max_tokens` alone.

    Raises:
        ValidationError: (a ValueError) Which value cannot be.
    """

    max_tokens: int | None = Field(default=None, ge=1, le=2**31)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    temperature: float = Field(default=1.0, ge=0)
    top_k: int = Field(default=-1, ge=-1, le=2**31)
    top_p: float = Field(default=1.0, gt=0, le=1)
    stop: str | list[str] | list[int] | list[list[int]] | None = None

    @field_validator("temperature")
    @classmethod
    def _is_zero_or_enough(cls, value: float) -> float:
        if 0 < value < LEAST_TEMPERATURE:
            raise ValueError(
                f"{value} is neither 0 nor at least {LEAST_TEMPERATURE}; 0 takes the "
                "likeliest token"
            )
        return value

    @field_validator("stop")
    @classmethod
    def _is_bounded(cls, stop: Any) -> Any:
        each = [stop] if isinstance(stop, str) else stop or []
        sizes = [1 if isinstance(one, int) else len(one) for one in each]
        if len(sizes) > MOST_STOPS or any(not 0 < n <= MOST_STOPS for n in sizes):
            raise ValueError(
                f"at most {MOST_STOPS} sequences of 1 to {MOST_STOPS} letters or tokens"
            )
        return stop


class Stops:
    """The ends of a sample that a client has asked for.

    Args:
        stop: See `SamplingParams`.
        ends: Tokens that end a sequence of this base.
        decode: Text of tokens, special ones too.
    """

    def __init__(
        self, stop: Any, ends: Collection[int], decode: Callable[[list[int]], str]
    ) -> None:
        each = [stop] if isinstance(stop, str) else stop or []
        self.texts = [one for one in each if isinstance(one, str)]
        self._tokens = frozenset(one for one in each if isinstance(one, int))
        self._sequences = [one for one in each if isinstance(one, list)]
        if stop is None or each:
            self._tokens |= frozenset(ends)
        self._decode = decode
        # a token has a byte at least, a letter four at most; a few beside, whose text
        # depends on what came before
        longest = max(map(len, self.texts), default=0)
        self._window = 4 * longest + 8

    def ended(self, tokens: list[int]) -> bool:
        """Tell whether the last token ends a sample."""
        if tokens[-1] in self._tokens:
            return True
        if any(tokens[-len(one) :] == one for one in self._sequences):
            return True
        if not self.texts:
            return False
        text = self._decode(tokens[-self._window :])
        return any(one in text for one in self.texts)


@dataclass(eq=False)
class Row:
    """A sample while it is made.

    Attributes:
        prompt: What it begins with.
        number: Of its request.
        most: Tokens that it may have.
        num_top: How many of the likeliest tokens are told at each place.
        show: Told each token, on the thread that decodes.
    """

    prompt: list[int]
    params: SamplingParams
    stops: Stops
    number: int
    most: int
    num_top: int = 0
    show: Callable[[Shown], None] | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: Reason | None = None

    def __post_init__(self) -> None:
        seed = secrets.randbits(64) if self.params.seed is None else self.params.seed
        digest = hashlib.sha256(f"{seed} {self.number}".encode()).digest()
        self._seed = int.from_bytes(digest[:8], "little") >> 1
        self._generator: torch.Generator | None = None
        self._top: list[tuple[Tensor, Tensor]] = []
        self._warp = _warpers(self.params)

    def pick(self, logits: Tensor) -> Tensor:
        """Choose a token from logits, float32 of shape [vocabulary]."""
        if self.params.temperature == 0:
            return logits.argmax()
        if self._generator is None:
            self._generator = torch.Generator(logits.device).manual_seed(self._seed)
        scores: Any = self._warp(_NONE_READ, logits[None])  # type: ignore[arg-type]
        chances = scores.softmax(-1)
        return torch.multinomial(chances, 1, generator=self._generator)[0, 0]

    def take(self, token: int, logprob: float, every: Tensor) -> None:
        """Add a token; `every` are log-probabilities of the whole vocabulary."""
        top: list[tuple[int, float]] = []
        if self.num_top:
            # first: where it has no room, the row has not this token
            best = every.topk(min(self.num_top, every.numel()))
            # what cannot be is -inf, for which JSON has no word
            values = best.values.clamp(min=MASKED).cpu()
            self._top.append((best.indices.int().cpu(), values))
            top = [*zip(*(part.tolist() for part in self._top[-1]), strict=True)]
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.stops.ended(self.tokens):
            self.reason = "stop"
        elif len(self.tokens) >= self.most:
            self.reason = "length"
        if self.show is not None:
            self.show(Shown(self.number, token, logprob, top))

    def sample(self) -> Sample:
        """Return what it has become."""
        assert self.reason is not None
        top = None
        if self._top:
            top = Top(*(torch.stack(part) for part in zip(*self._top, strict=True)))
        tokens = torch.tensor(self.tokens, dtype=torch.int32)
        return Sample(tokens, torch.tensor(self.logprobs), self.reason, top)


def choose(rows: Sequence[Row], logits: Tensor) -> None:
    """Give each row that has not ended its next token.

    Args:
        rows: Some may have ended.
        logits: float32 of shape [rows, vocabulary].

    Raises:
        RequestError: The model makes no numbers that can be chosen by.
    """
    every = logits.log_softmax(-1)
    if every.isnan().any():
        raise RequestError(
            "sampling_params: the logits of these weights are not finite."
        )
    for row, own, logprobs in zip(rows, logits, every, strict=True):
        if row.reason is None:
            token = int(row.pick(own))
            row.take(token, float(logprobs[token]), logprobs)


def _warpers(params: SamplingParams) -> LogitsProcessorList:
    """In the order of transformers' `generate`."""
    found = LogitsProcessorList()
    if params.temperature not in (0, 1):
        found.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k > 0:
        found.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        found.append(TopPLogitsWarper(params.top_p))
    return found
