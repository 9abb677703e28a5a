"""OpenAI's messages for completions and chats, as far as they mean something here.

Written down instead of taken from the `openai` package, which a server would need for
nothing else; its client reads them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..core.errors import RequestError
from .answers import MASKED, Sample, Shown
from .sampling import SamplingParams
from .text import Text, TextStream

_WITHOUT_EFFECT = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key".split()
)
"""Fields about accounts and caches, which are read over."""
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Fields that are not served, with the values that ask for nothing."""
_MOST_PROMPTS = 1024


class _StreamOptions(BaseModel):
    include_usage: bool = False


class _Asking(BaseModel):
    """A request for text: the fields that completions and chats share."""

    model_config = ConfigDict(extra="forbid")
    kind: ClassVar[str]
    part_kind: ClassVar[str]
    prefix: ClassVar[str]

    model: str
    max_tokens: int | None = Field(None, ge=1, le=2**31)
    temperature: float | None = Field(None, le=2)
    top_p: float | None = None
    top_k: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_means_nothing(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name, neutral in _NEUTRAL.items():
            if given.get(name) is not None and given[name] not in neutral:
                raise ValueError(f"{name} is not served; leave it out")
        dropped = _WITHOUT_EFFECT | _NEUTRAL.keys()
        return {key: value for key, value in given.items() if key not in dropped}

    @property
    def most(self) -> int | None:
        """Return the tokens that a sample may have."""
        return self.max_tokens

    @property
    def num_samples(self) -> int:
        """Return how many samples of each prompt are asked for."""
        return 1 if self.n is None else self.n

    def params(self) -> SamplingParams:
        """Return how tokens are chosen.

        Raises:
            ValidationError: Which value cannot be.
        """
        given: dict[str, Any] = {
            "max_tokens": self.most,
            "seed": self.seed,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            # an empty list would not even end at the end of a sequence
            "stop": self.stop or None,
        }
        return SamplingParams(**{k: v for k, v in given.items() if v is not None})

    def stops(self) -> list[str]:
        """Return the texts that end a sample."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class Completion(_Asking):
    """A request for completions."""

    kind = part_kind = "text_completion"
    prefix = "cmpl"

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0)

    @property
    def most(self) -> int | None:
        """Return OpenAI's default where none is given."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def num_top(self) -> int:
        """Return how many of the likeliest tokens are asked for."""
        return self.logprobs or 0

    def prompts(self, text: Text) -> list[list[int]]:
        """Return the tokens of each prompt."""
        given: Any = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        if not 0 < len(given) <= _MOST_PROMPTS:
            raise RequestError(
                f"prompt: {len(given)} prompts; allowed are 1 to {_MOST_PROMPTS}."
            )
        return [text.tokens(one) if isinstance(one, str) else one for one in given]

    def choice(self, words: str, reason: str | None, tokens: Any) -> dict[str, Any]:
        """Return a choice of an answer; `tokens` are log-probabilities, if asked for."""
        return {"text": words, "finish_reason": reason, "logprobs": tokens}

    def piece(self, words: str, reason: str | None, tokens: Any) -> dict[str, Any]:
        """Return a choice of a part of an answer."""
        return self.choice(words, reason, tokens)

    def opening(self) -> dict[str, Any] | None:
        """Return the choice of the first part, where there is one without text."""
        return None

    def logprobs_of(self, text: Text, tokens: Iterable[Shown]) -> Any:
        """Return log-probabilities as an answer has them; None if not asked for."""
        if self.logprobs is None:
            return None
        every = [*tokens]
        words = [text.text([one.token]) for one in every]
        ends = [0]
        for word in words:
            ends.append(ends[-1] + len(word))
        tops = [{text.text([t]): p for t, p in one.top} for one in every]
        return {
            "tokens": words,
            "token_logprobs": [one.logprob for one in every],
            "top_logprobs": tops if self.logprobs else None,
            "text_offset": ends[:-1],
        }


class Chat(_Asking):
    """A request for an answer in a chat."""

    kind, part_kind = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)

    @property
    def most(self) -> int | None:
        """See `_Asking`."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_top(self) -> int:
        """See `Completion`."""
        return (self.top_logprobs or 0) if self.logprobs else 0

    def prompts(self, text: Text) -> list[list[int]]:
        """See `Completion`."""
        return [text.chat([_plain(message) for message in self.messages])]

    def choice(self, words: str, reason: str | None, tokens: Any) -> dict[str, Any]:
        """See `Completion`."""
        message = {"role": "assistant", "content": words, "refusal": None}
        return {"message": message, "finish_reason": reason, "logprobs": tokens}

    def piece(self, words: str, reason: str | None, tokens: Any) -> dict[str, Any]:
        """See `Completion`."""
        delta = {"content": words} if words or reason is None else {}
        return {"delta": delta, "finish_reason": reason, "logprobs": tokens}

    def opening(self) -> dict[str, Any] | None:
        """See `Completion`."""
        delta = {"role": "assistant", "content": ""}
        return {"delta": delta, "finish_reason": None, "logprobs": None}

    def logprobs_of(self, text: Text, tokens: Iterable[Shown]) -> Any:
        """See `Completion`."""
        if not self.logprobs:
            return None
        return {"content": [_told(text, one) for one in tokens], "refusal": None}


Asking = Completion | Chat


def _told(text: Text, shown: Shown) -> dict[str, Any]:
    def one(token: int, logprob: float) -> dict[str, Any]:
        word = text.text([token])
        return {"token": word, "logprob": logprob, "bytes": [*word.encode()]}

    top = [one(*pair) for pair in shown.top]
    return {**one(shown.token, shown.logprob), "top_logprobs": top}


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is a text."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [p.get("text") if isinstance(p, dict) else None for p in content]
        if not all(isinstance(part, str) for part in parts):
            raise RequestError("messages: only parts of text are read.")
        message = {**message, "content": "".join(map(str, parts))}
    if not isinstance(message.get("role"), str):
        raise RequestError("messages: each has a role and a content.")
    return message


def shown_of(sample: Sample) -> list[Shown]:
    """Return the tokens of a sample as a stream shows them."""
    tops: list[list[tuple[int, float]]] = [[] for _ in sample.tokens]
    if sample.top is not None:
        tables = sample.top.tokens.tolist(), sample.top.logprobs.tolist()
        tops = [
            [pair for pair in zip(*both, strict=True) if pair[1] != MASKED]
            for both in zip(*tables, strict=True)
        ]
    each = zip(sample.tokens.tolist(), sample.logprobs.tolist(), tops, strict=True)
    return [Shown(0, *one) for one in each]


class Answering:
    """The frame of an answer: equal in all its parts."""

    def __init__(self, asked: Asking, text: Text) -> None:
        self._asked, self._text = asked, text
        self._frame = {
            "id": f"{asked.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": asked.model,
        }

    def whole(
        self, prompts: Sequence[Sequence[int]], every: Sequence[Sequence[Sample]]
    ) -> dict[str, Any]:
        """Return an answer in one piece, of the samples of each prompt."""
        asked = self._asked
        choices: list[dict[str, Any]] = []
        for sample in (sample for samples in every for sample in samples):
            stream = TextStream(self._text, asked.stops())
            words = stream.push(sample.tokens.tolist(), last=True)
            tokens = asked.logprobs_of(self._text, shown_of(sample))
            choice = asked.choice(words, sample.reason, tokens)
            choices.append({"index": len(choices), **choice})
        usage = _usage(prompts, every)
        return {**self._frame, "object": asked.kind, "choices": choices, **usage}

    def part(
        self, index: int, words: str, reason: str | None, tokens: Sequence[Shown] = ()
    ) -> dict[str, Any]:
        """Return a part of an answer, about one choice."""
        logprobs = self._asked.logprobs_of(self._text, tokens) if tokens else None
        return self._part(index, self._asked.piece(words, reason, logprobs))

    def first(self, count: int) -> list[dict[str, Any]]:
        """Return the parts that come before any text of so many choices."""
        choice = self._asked.opening()
        return [self._part(index, choice) for index in range(count if choice else 0)]

    def _part(self, index: int, choice: dict[str, Any] | None) -> dict[str, Any]:
        choices = [{"index": index, **(choice or {})}]
        return {**self._frame, "object": self._asked.part_kind, "choices": choices}

    def last(
        self, prompts: Sequence[Sequence[int]], every: Sequence[Sequence[Sample]]
    ) -> dict[str, Any]:
        """Return the part that tells how many tokens there were."""
        usage = _usage(prompts, every)
        return {**self._frame, "object": self._asked.part_kind, "choices": [], **usage}


def _usage(
    prompts: Sequence[Sequence[int]], every: Sequence[Sequence[Sample]]
) -> dict[str, Any]:
    read = sum(map(len, prompts))
    made = sum(len(sample.tokens) for samples in every for sample in samples)
    counts = {"prompt_tokens": read, "completion_tokens": made}
    return {"usage": {**counts, "total_tokens": read + made}}
