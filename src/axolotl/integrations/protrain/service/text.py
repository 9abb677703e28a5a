"""The tokenizer of a base: text to tokens and back, also token by token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from ..core.errors import FOREIGN_ERRORS, RequestError

_TAIL = 8
"""Tokens before the new ones that decide how these are written."""


class Text:
    """Text of a base's tokens.

    Args:
        tokenizer: Of transformers.
        model: Its generation config knows more ends of a sequence.

    Attributes:
        ends: Tokens that end a sequence.
        pad: A token that nothing reads.
    """

    def __init__(self, tokenizer: Any, model: Any) -> None:
        self._tokenizer = tokenizer
        config = getattr(model, "generation_config", None)
        known = getattr(config, "eos_token_id", None)
        found = known if isinstance(known, list) else [known]
        every = {*found, tokenizer.eos_token_id} - {None}
        self.ends: frozenset[int] = frozenset(map(int, every))
        pad = tokenizer.pad_token_id
        self.pad = int(min(self.ends, default=0) if pad is None else pad)

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text, with those that the base begins one with."""
        return [*self._tokenizer(text)["input_ids"]]

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of a chat that the base is to answer.

        Raises:
            RequestError: The tokenizer has no template, or refuses the messages.
        """
        if not self._tokenizer.chat_template:
            raise RequestError(
                "messages: the tokenizer of this base has no chat template. Ask "
                "/v1/completions, or set chat_template in the server's YAML."
            )
        try:
            written = self._tokenizer.apply_chat_template(
                [*messages], add_generation_prompt=True, tokenize=False
            )
        except (TemplateError, *FOREIGN_ERRORS) as error:
            raise RequestError(
                f"messages: the chat template refuses them: {error}"
            ) from error
        found = self._tokenizer(written, add_special_tokens=False)["input_ids"]
        return [*found]

    def text(self, tokens: Iterable[int], special: bool = True) -> str:
        """Return the text of tokens, by default with special ones."""
        return self._tokenizer.decode([*tokens], skip_special_tokens=not special)


class TextStream:
    """The text of a sample as it grows: what no later token changes, without special
    tokens and without the stop text that ends it.

    Args:
        text: Of the base.
        stops: Texts that end the sample.
    """

    def __init__(self, text: Text, stops: Sequence[str]) -> None:
        self._text, self._stops = text, stops
        self._tokens: list[int] = []
        self._begin = self._read = 0
        self._held = ""
        self.ended = False

    def push(self, tokens: Iterable[int], last: bool = False) -> str:
        """Return the text that is new and stays; with the `last` tokens all of it."""
        self._tokens += tokens
        before = self._text.text(self._tokens[self._begin : self._read], False)
        now = self._text.text(self._tokens[self._begin :], False)
        # half a letter is written as this mark until its other tokens are there
        if last or not now.endswith("\ufffd"):
            self._held += now[len(before) :]
            self._begin = max(self._begin, len(self._tokens) - _TAIL)
            self._read = len(self._tokens)
        return self._safe(last)

    def _safe(self, last: bool) -> str:
        if self.ended:
            return ""
        places = [self._held.find(stop) for stop in self._stops]
        first = min((place for place in places if place >= 0), default=-1)
        if first >= 0:
            self.ended = True
            return self._held[:first]
        keep = 0 if last else max(map(self._begun, self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def _begun(self, stop: str) -> int:
        """Return how much of a stop text the end may be."""
        sizes = range(min(len(stop) - 1, len(self._held)), 0, -1)
        return next((n for n in sizes if self._held.endswith(stop[:n])), 0)
