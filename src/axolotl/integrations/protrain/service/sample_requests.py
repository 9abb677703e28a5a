"""Requests of Tinker clients to sample, and their answers in JSON.

A request to sample is answered at once with the name of its future, as others are, but has
no turn among its client's requests: it is answered whenever its rows have ended, under the
number that the client gives it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from ..core.errors import RequestError
from .answers import MASKED, Asked, Sampled, Top, Wanted
from .engine import AdapterService
from .messages import densified
from .sampler import require_targets
from .sampling import SamplingParams
from .wire import Input, Message, SessionMessage, Strict, TensorMessage, future_of

_SESSION = r"^[A-Za-z0-9][A-Za-z0-9_:-]{0,99}$"
_MOST_NUMBER = 2**63


class _NewSession(SessionMessage):
    sampling_session_seq_id: int = Field(ge=0, le=2**31)
    base_model: str | None = None
    model_path: str | None = None


class _OfSession(Message):
    sampling_session_id: str = Field(pattern=_SESSION)


class _Cancel(Message):
    request_id: str = Field(pattern=r"^@.+:[0-9]{1,19}$")


class _Targets(TensorMessage):
    dtype: Literal["int64"]

    def read(self, length: int) -> Wanted:
        """Return the tokens that are named for a prompt of some length, dense."""
        shape = self.shape or []
        require_targets(shape, length)
        values = _integers(self.data)
        if self.indices is None:
            if values.numel() != math.prod(shape):
                raise RequestError(
                    f"target_prompt_logprobs has {values.numel()} values and shape {shape}."
                )
            return Wanted(values.view(shape))
        dense = densified("target_prompt_logprobs", values, shape, self.indices, -1)
        starts, columns = (torch.tensor(each).long() for each in self.indices)
        return Wanted(dense, (starts, columns))


class _Sample(Strict):
    type: str = "sample"
    prompt: Input
    sampling_params: SamplingParams
    num_samples: int = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = Field(None, pattern=_SESSION)
    seq_id: int | None = Field(None, ge=0, lt=_MOST_NUMBER)
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: _Targets | None = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None

    def about(self, length: int) -> Asked:
        """Return what is asked about the prompt, which has so many tokens."""
        targets = self.target_prompt_logprobs
        return Asked(
            logprobs=bool(self.prompt_logprobs),
            last_n=self.prompt_logprobs_last_n,
            num_top=self.topk_prompt_logprobs,
            wanted=None if targets is None else targets.read(length),
        )


def session_name(session: str, number: int) -> str:
    """Name a sampling session of a client's session."""
    return f"{session}:sample:{number}"


def _new_session(service: AdapterService, asked: _NewSession) -> dict[str, Any]:
    require_base(service, asked.base_model)
    name = session_name(asked.session_id, asked.sampling_session_seq_id)
    made = service.sessions.make(name, asked.model_path)
    return {"type": "create_sampling_session", "sampling_session_id": made.name}


def _join(service: AdapterService, asked: _OfSession) -> dict[str, Any]:
    number = service.sessions.join(asked.sampling_session_id)
    return {"type": "join_sampling_session", "client_counter": number}


def sampler_info(service: AdapterService, name: str) -> dict[str, Any]:
    """Tell what a session samples with."""
    path = service.sessions.of(name).path
    return {"sampler_id": name, "base_model": service.base_model, "model_path": path}


def _sample(service: AdapterService, asked: _Sample) -> dict[str, Any]:
    require_base(service, asked.base_model)
    if asked.prompt_alt_tokens_k:
        raise RequestError(
            "prompt_alt_tokens_k: no alternatives are drawn here; topk_prompt_logprobs "
            "tells the likeliest tokens at each place."
        )
    if asked.record_stability_info:
        raise RequestError("record_stability_info: none is recorded here.")
    tokens = asked.prompt.tokens()
    service.sampler.check_prompt(tokens)
    name = asked.sampling_session_id
    if name is None:
        name = service.sessions.of_path(asked.model_path).name
    ticket = service.sampler.sample(
        name,
        tokens,
        asked.sampling_params,
        asked.num_samples,
        asked.seq_id,
        asked.about(len(tokens)),
        asked.topk_sample_logprobs,
    )
    each = range(asked.num_samples)
    ids = [f"{name}:{ticket.number}:{number}" for number in each]
    return {**future_of(ticket.model, ticket.number), "sample_sequence_ids": ids}


def _cancel(service: AdapterService, asked: _Cancel) -> dict[str, Any]:
    name, _, number = asked.request_id.rpartition(":")
    service.sampler.cancel(service.turns.answer(name, int(number)))
    return {}


def require_base(service: AdapterService, base: str | None) -> None:
    """Refuse another base than the server's.

    Raises:
        RequestError: It is.
    """
    if base not in (None, service.base_model):
        raise RequestError(f"base_model: {base}; this server has {service.base_model}.")


SAMPLING: dict[str, tuple[type[Message], Callable[..., dict[str, Any]]]] = {
    "create_sampling_session": (_NewSession, _new_session),
    "join_sampling_session": (_OfSession, _join),
    "asample": (_Sample, _sample),
    "cancel_future": (_Cancel, _cancel),
}
"""Requests about samples: the message, and what answers it at once."""


def as_json(answer: Sampled) -> dict[str, Any]:
    """A `SampleResponse` as clients read it that ask for no protobuf."""
    found: dict[str, Any] = {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": sample.reason,
                "tokens": sample.tokens.tolist(),
                "logprobs": sample.logprobs.tolist(),
                "topk_logprobs": sample.top and _pairs(sample.top),
            }
            for sample in answer.samples
        ],
        "prompt_logprobs": None,
        "topk_prompt_logprobs": answer.prompt_top and _pairs(answer.prompt_top),
    }
    if answer.prompt_logprobs is not None:
        every = answer.prompt_logprobs.tolist()
        # JSON has no word for NaN, nor for what cannot be
        found["prompt_logprobs"] = [
            one if math.isfinite(one) else None for one in every
        ]
    if answer.wanted is not None:
        found["target_prompt_logprobs"] = _targets(answer.wanted)
    return found


def _targets(wanted: Wanted) -> dict[str, Any]:
    found: dict[str, Any] = {"dtype": "float32", "shape": wanted.shape}
    if wanted.sparse is None:
        return {**found, "data": wanted.values.flatten().tolist()}
    rows, columns = wanted.sparse
    indices = {"sparse_crow_indices": rows, "sparse_col_indices": columns}
    found |= {name: each.tolist() for name, each in indices.items()}
    return {**found, "data": wanted.listed().tolist()}


def _pairs(top: Top) -> list[list[tuple[int, float]] | None]:
    tables = zip(top.tokens.tolist(), top.logprobs.tolist(), strict=True)
    found = [[*zip(*pair, strict=True)] for pair in tables]
    return [None if one[0][1] == MASKED else one for one in found]


def _integers(values: list[float]) -> Tensor:
    every = torch.tensor(values, dtype=torch.float64)
    whole = every.to(torch.int64)
    if not whole.to(torch.float64).equal(every):
        raise RequestError("target_prompt_logprobs: tokens are not integers.")
    return whole
