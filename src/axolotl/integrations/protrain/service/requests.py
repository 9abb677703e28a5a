"""Requests of Tinker clients by POST, and what of the service answers it.

JSON, but for passes, which newer clients send as protobuf (`messages`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BaseModel, Field, ValidationError

from ..core.errors import RequestError
from .adapters import EXTERNAL, KINDS, SAMPLERS, folder_of
from .engine import AdapterService, as_refusal
from .losses import Datum
from .messages import MOST_ROWS, data_of, read_request, settings_of, shaped
from .optimizers import AdamParams
from .sample_requests import SAMPLING, require_base, session_name
from .states import MOST_SECONDS, Kept
from .turns import MOST_WAITING, Ticket
from .wire import (
    ID,
    Input,
    Message,
    ModelMessage,
    SessionMessage,
    Strict,
    TensorMessage,
    future_of,
    worded,
)

UNLOADED = "unloaded"
"""In place of a number: an unload is done when it is answered."""
REFUSED = {
    "create_custom_loss": "Custom losses run in the client (forward_backward_custom).",
    "copy_weights": "Load a state by its path instead (load_weights).",
    "auth/token": "Keys are not exchanged here: send X-API-Key.",
}
"""Requests that are not served, and what to use instead."""


_MOST_WORDS = 16 << 10


def _short(words: dict[str, Any]) -> dict[str, Any]:
    if len(json.dumps(words)) > _MOST_WORDS:
        raise ValueError(f"has more than {_MOST_WORDS:,} characters as JSON")
    return words


class _Lora(Strict):
    rank: int
    seed: int | None = Field(None, ge=0, lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class _Optimizer(Strict):
    type: str = "adamw"


Words = Annotated[dict[str, Any], AfterValidator(_short)]
"""A client's own words about something, as JSON."""
_Seconds = Annotated[int, Field(ge=1, le=MOST_SECONDS)]


class _NewSession(Message):
    display_name: str | None = Field(None, max_length=_MOST_WORDS)
    user_metadata: Words | None = None


class _New(SessionMessage):
    user_metadata: Words | None = None
    model_seq_id: int = Field(ge=0, le=2**31)
    base_model: str | None = None
    optimizer_config: _Optimizer | None = None

    def id_on(self, service: AdapterService) -> str:
        """As the client derives it where it creates a model from a state."""
        require_base(service, self.base_model)
        asked, ours = self.optimizer_config, service.optimizer
        # newer clients say adamw where their user has said nothing
        if asked is not None and asked.type not in ("adamw", ours.name, ours.family):
            raise RequestError(
                f"optimizer_config: {asked.type}; this server trains by {ours.name}, as "
                "its YAML says. Leave it out, or name that one."
            )
        return f"{self.session_id}:train:{self.model_seq_id}"


class _Create(_New):
    lora_config: _Lora


class _CreateFrom(_New):
    path: str
    optimizer: bool


class _Numbered(BaseModel):
    """The part that is read first: a request that is refused after that has used up its
    number."""

    model_id: str | None = Field(None, pattern=ID)
    seq_id: int | None = Field(None, ge=1, le=2**31)


class _Step(ModelMessage):
    adam_params: AdamParams


class _Kept(ModelMessage):
    """A message that makes a state."""

    honoured = frozenset({"ttl_seconds"})
    ttl_seconds: _Seconds | None = None
    user_metadata: Annotated[dict[str, str], AfterValidator(_short)] | None = None

    def kept(self, kind: str = SAMPLERS) -> Kept:
        """Return how it is to be kept."""
        return Kept(self.ttl_seconds, self.user_metadata, kind)


class _Save(_Kept):
    path: str
    overwrite: bool = False


class _SaveExternal(_Kept):
    path: str


class _SaveForSampler(_Kept):
    path: str | None = None
    sampling_session_seq_id: int | None = Field(None, ge=0, le=2**31)
    kind: Literal["snapshot"] = "snapshot"


class _Load(ModelMessage):
    path: str
    optimizer: bool


class _Info(Message):
    tinker_path: str


class _Datum(Message):
    model_input: Input
    loss_fn_inputs: dict[str, TensorMessage]

    def read(self, number: int) -> Datum:
        tokens = self.model_input.tokens()
        inputs = {}
        for name, given in self.loss_fn_inputs.items():
            values = torch.tensor(given.data, dtype=torch.float64)
            whole = values.to(getattr(torch, given.dtype))
            if given.dtype == "int64" and not whole.equal(values):
                raise RequestError(f"data[{number}]: {name} are not integers.")
            inputs[name] = shaped(
                number, name, whole, given.shape, len(tokens), given.indices
            )
        return Datum(torch.tensor(tokens, dtype=torch.int64), inputs)


class _Data(Message):
    data: list[_Datum] = Field(fail_fast=True, max_length=MOST_ROWS)
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class _Pass(ModelMessage):
    forward_backward_input: _Data | None = None
    forward_input: _Data | None = None


def _get_info(service: AdapterService, asked: ModelMessage) -> dict[str, Any]:
    base, model = service.base_model, asked.model_id
    rank = service.spec(model).rank
    return {
        "type": "get_info",
        "model_id": model,
        "is_lora": rank > 0,
        "lora_rank": rank,
        "model_name": base,
        "model_data": {"model_name": base, "tokenizer_id": service.tokenizer},
    }


def _weights_info(service: AdapterService, asked: _Info) -> dict[str, Any]:
    spec = service.store.spec_of(folder_of(service.folder, asked.tinker_path))
    flags = {f"train_{kind}": kind in spec.kinds for kind in KINDS}
    named = {"base_model": service.base_model, "is_lora": spec.rank > 0}
    return {**named, "lora_rank": spec.rank, **flags}


def _unload(service: AdapterService, asked: ModelMessage) -> dict[str, Any]:
    service.unload(asked.model_id)
    return {"type": "unload_model", **future_of(asked.model_id, UNLOADED)}


def _new_session(service: AdapterService, asked: _NewSession) -> dict[str, Any]:
    made = service.clients.begin(asked.display_name, asked.user_metadata)
    return {"type": "create_session", "session_id": made}


_CLIENT = {
    "pjwt_auth_enabled": False,
    # its own transport of HTTP/2 is of no use on loopback
    "use_pyqwest_transport": False,
    # a wave may take longer than a client waits for progress
    "sample_enable_stuck_detection": False,
    "sample_join_sampling_session": True,
    "sample_max_concurrent_requests": MOST_WAITING,
}
"""Settings of a client."""
ANSWERED: dict[str, tuple[type[Message] | None, Callable[..., dict[str, Any]]]] = {
    "client/config": (None, lambda *_: _CLIENT),
    "client/dynamic_config": (None, lambda *_: {"sample_cancel_enabled": True}),
    "telemetry": (None, lambda *_: {"status": "accepted"}),
    "create_session": (_NewSession, _new_session),
    "session_heartbeat": (SessionMessage, lambda *_: {"type": "session_heartbeat"}),
    "get_info": (ModelMessage, _get_info),
    "weights_info": (_Info, _weights_info),
    "unload_model": (ModelMessage, _unload),
    **SAMPLING,
}
"""Requests that are answered at once: the message, if it is read, and what answers it."""


def _create(service: AdapterService, asked: _Create, _: int | None) -> Ticket:
    lora = asked.lora_config
    kinds = [kind for kind in KINDS if getattr(lora, f"train_{kind}")]
    model = asked.id_on(service)
    ticket = service.create(model, lora.rank, kinds, lora.seed)
    return _described(service, asked, ticket)


def _create_from(service: AdapterService, asked: _CreateFrom, _: int | None) -> Ticket:
    ticket = service.create_from(asked.id_on(service), asked.path, asked.optimizer)
    return _described(service, asked, ticket)


def _described(service: AdapterService, asked: _New, ticket: Ticket) -> Ticket:
    service.states.describe(ticket.model, asked.user_metadata)
    service.clients.hear(asked.session_id)
    return ticket


def _pass(
    service: AdapterService, asked: Any, number: int | None, forward_only: bool = False
) -> Ticket:
    rows: Iterator[Datum]
    if isinstance(asked, _Pass):
        given = asked.forward_backward_input or asked.forward_input
        if given is None:
            raise RequestError("forward_backward_input is missing.")
        rows = (datum.read(row) for row, datum in enumerate(given.data))
        settings, loss_fn = given.loss_fn_config, given.loss_fn
        only = asked.forward_backward_input is None
    else:
        rows, settings = data_of(asked), settings_of(asked)
        loss_fn, only = asked.loss_fn, asked.forward_only
    data, nbytes = [], 0
    for datum in rows:
        data.append(datum)
        nbytes += datum.nbytes
        if nbytes > service.turns.most_bytes:
            # no room ever: it says so before all zeros of sparse ones are made
            service.turns.reserve(nbytes)
    only, ask = only or forward_only, service.forward_backward
    return ask(asked.model_id, data, loss_fn, settings, number, only)


def _save_for_sampler(
    service: AdapterService, asked: _SaveForSampler, number: int | None
) -> Ticket:
    if asked.path is not None:
        return service.save(
            asked.model_id, asked.path, number, False, kept=asked.kept()
        )
    if asked.sampling_session_seq_id is None:
        raise RequestError("path: give a name, or a sampling_session_seq_id.")
    if asked.ttl_seconds is not None:
        raise RequestError(
            "ttl_seconds: weights without a name stay as long as their session. Leave it "
            "out, or give a path."
        )
    # a model's id begins with that of its client's session
    session, _, _ = asked.model_id.partition(":train:")
    name = session_name(session, asked.sampling_session_seq_id)
    return service.save_session(asked.model_id, name, number)


QUEUED: dict[str, tuple[type[Message], Callable[..., Ticket]]] = {
    "create_model": (_Create, _create),
    "forward": (_Pass, partial(_pass, forward_only=True)),
    "forward_backward": (_Pass, _pass),
    "optim_step": (_Step, lambda s, a, n: s.optim_step(a.model_id, a.adam_params, n)),
    "save_weights": (
        _Save,
        lambda s, a, n: s.save(a.model_id, a.path, n, True, a.overwrite, a.kept()),
    ),
    "save_weights_external": (
        _SaveExternal,
        lambda s, a, n: s.save(a.model_id, a.path, n, False, kept=a.kept(EXTERNAL)),
    ),
    "save_weights_for_sampler": (_SaveForSampler, _save_for_sampler),
    "load_weights": (
        _Load,
        lambda s, a, n: s.load(a.model_id, a.path, a.optimizer, n),
    ),
}
"""Requests that take their turn: the message, and what queues it under a number."""


def answer(service: AdapterService, name: str, body: bytes) -> dict[str, Any]:
    """Answer a request in `ANSWERED`.

    Raises:
        ValidationError, ProTrainError: What is wrong with the body.
    """
    message, act = ANSWERED[name]
    asked = message and message.model_validate_json(body)
    if isinstance(asked, SessionMessage):
        service.clients.hear(asked.session_id)
    return act(service, asked)


def queue(
    service: AdapterService, name: str, body: bytes, protobuf: bool
) -> dict[str, Any]:
    """Queue one in `QUEUED`; the name of its future.

    Raises:
        ValidationError, ProTrainError: What is wrong with the body.
    """
    (message, act), asked = QUEUED[name], None
    if protobuf and message is _Pass:
        asked = read_request(body)
        named = _Numbered(model_id=asked.model_id, seq_id=asked.seq_id or None)
    else:
        named = _Numbered.model_validate_json(body)
    if message is _Load and named.model_id is None:
        message, act = _CreateFrom, _create_from
    try:
        ticket = act(service, asked or message.model_validate_json(body), named.seq_id)
    except Exception as error:
        # whatever it is: those after it would wait for this number
        refusal = as_refusal(error)
        if isinstance(error, ValidationError):
            refusal = RequestError(worded(error))
        # what cannot be now may be sent again
        if named.model_id and named.seq_id and refusal.status != 429:
            service.refuse(named.model_id, named.seq_id, refusal)
        raise refusal from error
    return future_of(ticket.model, ticket.number)
