"""Requests of Tinker clients by POST, and what of the service answers it.

JSON, but for passes, which newer clients send as protobuf (`messages`).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..core.errors import RequestError
from .adapters import KINDS, folder_of
from .engine import FAULTS, AdapterService, as_refusal
from .live import AdamParams
from .losses import Datum
from .messages import MOST_ROWS, data_of, read_request, settings_of, shaped
from .turns import Ticket

UNLOADED = "unloaded"
"""In place of a number: an unload is done when it is answered."""
_ID = r"^[A-Za-z0-9][A-Za-z0-9_:-]{0,79}$"
_ELSEWHERE = (
    "Sampling is not served here: save_weights_for_sampler with a name writes a PEFT "
    "folder that vLLM or transformers load."
)
REFUSED = {
    "asample": _ELSEWHERE,
    "create_sampling_session": _ELSEWHERE,
    "join_sampling_session": _ELSEWHERE,
    "create_custom_loss": "Custom losses run in the client (forward_backward_custom).",
    "save_weights_external": "Use save_weights_for_sampler: it writes a PEFT folder.",
    "copy_weights": "Load a state by its path instead (load_weights).",
    "auth/token": "Keys are not exchanged here: send X-API-Key.",
}
"""Requests that are not served, and what to use instead."""
_NOT_HONOURED = {
    "ttl_seconds": "a state stays until its folder is deleted",
    "sampling_session_seq_id": _ELSEWHERE,
    "weights_access_token": (  # nosec B105 - no password
        "there are no accounts; every state may be loaded"
    ),
}
"""Fields of clients that may only be unset. `user_metadata` is not kept."""


def worded(error: ValidationError) -> str:
    """Return what is wrong first, and where."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the body'}: {first['msg']}"


class _Message(BaseModel):
    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_honoured(cls, given: Any) -> Any:
        for name, why in _NOT_HONOURED.items():
            if isinstance(given, dict) and given.get(name) is not None:
                raise ValueError(f"{name} has to be left out: {why}")
        return given


class _Strict(_Message):
    """Everything in it changes numbers."""

    model_config = ConfigDict(extra="forbid")


class _Lora(_Strict):
    rank: int
    seed: int | None = Field(None, ge=0, lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class _Optimizer(_Strict):
    type: Literal["adamw"] = "adamw"


class _Session(_Message):
    session_id: str = Field(pattern=_ID)


class _Model(_Message):
    model_id: str = Field(pattern=_ID)


class _New(_Session):
    model_seq_id: int = Field(ge=0, le=2**31)
    base_model: str | None = None
    optimizer_config: _Optimizer | None = None

    def id_on(self, base: str) -> str:
        """As the client derives it where it creates a model from a state."""
        if self.base_model not in (None, base):
            raise RequestError(
                f"base_model: {self.base_model}; this server has {base}."
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

    model_id: str | None = Field(None, pattern=_ID)
    seq_id: int | None = Field(None, ge=1, le=2**31)


class _Step(_Model):
    adam_params: AdamParams


class _Save(_Model):
    path: str
    overwrite: bool = False


class _Load(_Model):
    path: str
    optimizer: bool


class _Info(_Message):
    tinker_path: str


# `fail_fast`: a list of errors would be larger than the body


class _Chunk(_Message):
    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(fail_fast=True)


class _Input(_Message):
    chunks: list[_Chunk] = Field(fail_fast=True)


class _Tensor(_Strict):
    data: list[float] = Field(fail_fast=True)
    dtype: Literal["int64", "float32"]
    shape: list[int] | None = Field(None, max_length=8)


class _Datum(_Message):
    model_input: _Input
    loss_fn_inputs: dict[str, _Tensor]

    def read(self, number: int) -> Datum:
        tokens = [token for chunk in self.model_input.chunks for token in chunk.tokens]
        inputs = {}
        for name, given in self.loss_fn_inputs.items():
            values = torch.tensor(given.data, dtype=torch.float64)
            whole = values.to(getattr(torch, given.dtype))
            if given.dtype == "int64" and not whole.equal(values):
                raise RequestError(f"data[{number}]: {name} are not integers.")
            shape = [values.numel()] if given.shape is None else given.shape
            inputs[name] = shaped(number, name, whole, shape)
        return Datum(torch.tensor(tokens, dtype=torch.int64), inputs)


class _Data(_Message):
    data: list[_Datum] = Field(fail_fast=True, max_length=MOST_ROWS)
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class _Pass(_Model):
    forward_backward_input: _Data | None = None
    forward_input: _Data | None = None


def _get_info(service: AdapterService, asked: _Model) -> dict[str, Any]:
    base, model = service.base_model, asked.model_id
    return {
        "type": "get_info",
        "model_id": model,
        "is_lora": True,
        "lora_rank": service.spec(model).rank,
        "model_name": base,
        "model_data": {"model_name": base, "tokenizer_id": service.tokenizer},
    }


def _weights_info(service: AdapterService, asked: _Info) -> dict[str, Any]:
    spec = service.store.spec_of(folder_of(service.folder, asked.tinker_path))
    flags = {f"train_{kind}": kind in spec.kinds for kind in KINDS}
    named = {"base_model": service.base_model, "is_lora": True}
    return {**named, "lora_rank": spec.rank, **flags}


def _unload(service: AdapterService, asked: _Model) -> dict[str, Any]:
    service.unload(asked.model_id)
    return {"type": "unload_model", **future_of(asked.model_id, UNLOADED)}


def _new_session(*_: object) -> dict[str, Any]:
    return {"type": "create_session", "session_id": uuid.uuid4().hex[:12]}


_CLIENT = {"pjwt_auth_enabled": False, "use_pyqwest_transport": False}
"""Setting of a client: its own transport of HTTP/2 is of no use on loopback."""
ANSWERED: dict[str, tuple[type[_Message] | None, Callable[..., dict[str, Any]]]] = {
    "client/config": (None, lambda *_: _CLIENT),
    "client/dynamic_config": (None, lambda *_: {}),
    "telemetry": (None, lambda *_: {"status": "accepted"}),
    "create_session": (None, _new_session),
    "session_heartbeat": (_Session, lambda *_: {"type": "session_heartbeat"}),
    "get_info": (_Model, _get_info),
    "weights_info": (_Info, _weights_info),
    "unload_model": (_Model, _unload),
}
"""Requests that are answered at once: the message, if it is read, and what answers it."""


def _create(service: AdapterService, asked: _Create, _: int | None) -> Ticket:
    lora = asked.lora_config
    kinds = [kind for kind in KINDS if getattr(lora, f"train_{kind}")]
    return service.create(asked.id_on(service.base_model), lora.rank, kinds, lora.seed)


def _create_from(service: AdapterService, asked: _CreateFrom, _: int | None) -> Ticket:
    model = asked.id_on(service.base_model)
    return service.create_from(model, asked.path, asked.optimizer)


def _pass(
    service: AdapterService, asked: Any, number: int | None, forward_only: bool = False
) -> Ticket:
    data: list[Datum]
    if isinstance(asked, _Pass):
        given = asked.forward_backward_input or asked.forward_input
        if given is None:
            raise RequestError("forward_backward_input is missing.")
        data = [datum.read(row) for row, datum in enumerate(given.data)]
        settings, loss_fn = given.loss_fn_config, given.loss_fn
        only = asked.forward_backward_input is None
    else:
        data, settings = data_of(asked), settings_of(asked)
        loss_fn, only = asked.loss_fn, asked.forward_only
    only, ask = only or forward_only, service.forward_backward
    return ask(asked.model_id, data, loss_fn, settings, number, only)


QUEUED: dict[str, tuple[type[_Message], Callable[..., Ticket]]] = {
    "create_model": (_Create, _create),
    "forward": (_Pass, partial(_pass, forward_only=True)),
    "forward_backward": (_Pass, _pass),
    "optim_step": (_Step, lambda s, a, n: s.optim_step(a.model_id, a.adam_params, n)),
    "save_weights": (
        _Save,
        lambda s, a, n: s.save(a.model_id, a.path, n, overwrite=a.overwrite),
    ),
    "save_weights_for_sampler": (
        _Save,
        lambda s, a, n: s.save(a.model_id, a.path, n, whole=False),
    ),
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
    return act(service, message and message.model_validate_json(body))


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
    except FAULTS as error:
        refusal = as_refusal(error)
        if isinstance(error, ValidationError):
            refusal = RequestError(worded(error))
        # what cannot be now may be sent again
        if named.model_id and named.seq_id and refusal.status != 429:
            service.refuse(named.model_id, named.seq_id, refusal)
        raise refusal from error
    return future_of(ticket.model, ticket.number)


def future_of(model: str, number: object) -> dict[str, Any]:
    """Name what a client asks `retrieve_future` for."""
    return {"request_id": f"{model}:{number}", "model_id": model}
