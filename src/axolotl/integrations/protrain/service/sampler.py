"""Requests to sample: checked by the thread that brings them, queued with their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..core.errors import RequestError
from .answers import Asked, Shown, Wanted
from .losses import Datum, digest
from .passes import Passes
from .samples import Request, Samples
from .sampling import Row, SamplingParams, Stops
from .sessions import Sessions
from .text import Text
from .turns import TENSOR_BYTES, Ticket, Turns

MOST_SAMPLES = 1024
"""Samples of one request."""
MOST_TOP = 256
"""The likeliest tokens that may be asked for at one place."""
_TOKEN_BYTES = 128
"""Bytes of the host for a sampled token while it is one of Python's."""
_ROW_BYTES = 8192
"""Bytes of the host for a sample beside its tokens: the state of its random stream."""


class Sampler:
    """Samples for clients; any thread may call it.

    Args:
        sessions: Who samples with which weights.
        samples: The rows that wait.
        passes: Know how long a row may be, and the vocabulary.
        turns: Keep requests.
        text: Of the base.

    Attributes:
        longest: Tokens that may be read of one row, prompt and sample together.
    """

    def __init__(
        self,
        sessions: Sessions,
        samples: Samples,
        passes: Passes,
        turns: Turns,
        text: Text,
    ) -> None:
        self.sessions, self._samples, self._turns = sessions, samples, turns
        self.text = text
        self.longest, self._vocabulary = passes.longest, passes.vocabulary

    def sample(
        self,
        session: str,
        prompt: Sequence[int],
        params: SamplingParams,
        num_samples: int = 1,
        number: int | None = None,
        about: Asked | None = None,
        num_top: int = 0,
        show: Callable[[Shown], None] | None = None,
    ) -> Ticket:
        """Sample with the weights of a session.

        Args:
            session: Its name.
            prompt: At least one token.
            params: How tokens are chosen.
            num_samples: Of this prompt.
            number: Of the request; one of the same number is answered once.
            about: What is asked about the prompt.
            num_top: So many of the likeliest tokens at each place of the samples.
            show: Told each token, on the thread that decodes, which it must not hold
                up.

        Returns:
            A future of `Sampled`.

        Raises:
            RequestError: Something cannot be, or too many wait.
        """
        asked, tokens = about or Asked(), [*prompt]
        made = self.sessions.of(session)
        self.check_prompt(tokens)
        self._check(tokens, num_samples, num_top, asked)
        self._samples.decoder.require_cache()
        most = self.longest + 1 - len(tokens)
        most = min(most, params.max_tokens or most)
        stops = Stops(params.stop, self.text.ends, self.text.text)
        rows = [
            Row(tokens, params, stops, each, most, num_top, show)
            for each in range(num_samples)
        ]
        nbytes = _TOKEN_BYTES * (len(tokens) + most * num_samples)
        nbytes += 8 * (asked.num_top * len(tokens) + num_top * most * num_samples)
        if num_top:
            # two tensors a token, until a sample is whole
            nbytes += 2 * TENSOR_BYTES * most * num_samples
        wanted = {} if asked.wanted is None else {"wanted": asked.wanted.values}
        # log-probabilities of as many are told
        nbytes += 2 * sum(values.nbytes for values in wanted.values())
        told = (asked.logprobs, asked.last_n, asked.num_top)
        sent = digest([Datum(torch.tensor(tokens), wanted)])
        asks = (sent, params, num_samples, num_top, told)
        ticket = Ticket(None, asks, nbytes + _ROW_BYTES * num_samples)
        kept = self._turns.keep(made.line, number, ticket)
        if kept is ticket:
            about = Asked(tokens, *told, asked.wanted)
            self._samples.add(made.key, Request(ticket, about, rows))
        return kept

    def cancel(self, ticket: Ticket) -> None:
        """Let a request go that nobody waits for any longer, at its next token."""
        ticket.settle(error=RequestError("the client has gone.", 410))

    @property
    def can_sample(self) -> bool:
        """Tell whether the base does."""
        return not self._samples.decoder.why_not

    def counts(self) -> dict[str, int]:
        """See `Samples.counts`."""
        return self._samples.counts()

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Refuse a prompt that no pass may see.

        Raises:
            RequestError: What is wrong with it.
        """
        if not 0 < len(prompt) <= self.longest:
            raise RequestError(
                f"prompt: {len(prompt)} tokens; allowed are 1 to {self.longest}, the "
                "server's sequence_len."
            )
        wrong = [token for token in prompt if not 0 <= token < self._vocabulary]
        if wrong:
            raise RequestError(
                f"prompt: token {wrong[0]}; the vocabulary has 0 to "
                f"{self._vocabulary - 1}."
            )

    def _check(
        self, prompt: list[int], num_samples: int, num_top: int, asked: Asked
    ) -> None:
        if not 1 <= num_samples <= MOST_SAMPLES:
            raise RequestError(
                f"num_samples: {num_samples}; allowed are 1 to {MOST_SAMPLES}."
            )
        for what, k in (("prompt", asked.num_top), ("sample", num_top)):
            if not 0 <= k <= MOST_TOP:
                raise RequestError(
                    f"topk_{what}_logprobs: {k}; allowed are 0 to {MOST_TOP}."
                )
        if asked.last_n is not None and not 1 <= asked.last_n < len(prompt):
            raise RequestError(
                f"prompt_logprobs_last_n: {asked.last_n}; allowed are 1 to "
                f"{len(prompt) - 1}, the prompt without its first token."
            )
        self._check_wanted(prompt, asked.wanted)

    def _check_wanted(self, prompt: list[int], wanted: Wanted | None) -> None:
        if wanted is None:
            return
        require_targets(wanted.shape, len(prompt))
        each = wanted.values.unique().tolist()
        if not all(-1 <= token < self._vocabulary for token in each):
            raise RequestError(
                f"target_prompt_logprobs: tokens are -1 to {self._vocabulary - 1}."
            )


def require_targets(shape: Sequence[int], length: int) -> None:
    """Refuse a table of tokens that has not the shape for a prompt of some length.

    Raises:
        RequestError: It has another one.
    """
    if len(shape) != 2 or shape[0] != length - 1 or not 0 < shape[1] <= MOST_TOP:
        raise RequestError(
            f"target_prompt_logprobs has shape {tuple(shape)}; allowed is "
            f"({length - 1}, k): a row for each token but the first, and 1 to {MOST_TOP} "
            "tokens in it."
        )
