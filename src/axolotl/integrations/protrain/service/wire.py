"""Parts of Tinker's messages in JSON, which requests of training and sampling share."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

ID = r"^[A-Za-z0-9][A-Za-z0-9_:-]{0,79}$"
NOT_HONOURED = {
    "ttl_seconds": "this makes nothing that could expire",
    "age_encryption_recipients": "nothing is encrypted here",
    "weights_access_token": (  # nosec B105 - no password
        "there are no accounts; every state may be loaded"
    ),
}
"""Fields of clients that may only be unset."""


def worded(error: ValidationError) -> str:
    """Return what is wrong first, and where."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the body'}: {first['msg']}"


class Message(BaseModel):
    """A message, of which unknown fields are left aside.

    Attributes:
        honoured: Names of `NOT_HONOURED` that it may have all the same.
    """

    honoured: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_honoured(cls, given: Any) -> Any:
        for name, why in NOT_HONOURED.items():
            unknown = name not in cls.honoured and isinstance(given, dict)
            if unknown and given.get(name) is not None:
                raise ValueError(f"{name} has to be left out: {why}")
        return given


class Strict(Message):
    """Everything in it changes numbers."""

    model_config = ConfigDict(extra="forbid")


class SessionMessage(Message):
    """A message of a client's session."""

    session_id: str = Field(pattern=ID)


class ModelMessage(Message):
    """A message about a model."""

    model_id: str = Field(pattern=ID)


# `fail_fast`: a list of errors would be larger than the body


class Chunk(Message):
    """Text, which is the only kind of input that is read."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(fail_fast=True)


class Input(Message):
    """A prompt, or the input of a row."""

    chunks: list[Chunk] = Field(fail_fast=True)

    def tokens(self) -> list[int]:
        """Return all its tokens."""
        return [token for chunk in self.chunks for token in chunk.tokens]


class TensorMessage(Strict):
    """Values in one list, and their shape."""

    data: list[float] = Field(fail_fast=True)
    dtype: Literal["int64", "float32"]
    shape: list[int] | None = Field(None, max_length=8)
    sparse_crow_indices: list[int] | None = Field(None, fail_fast=True)
    sparse_col_indices: list[int] | None = Field(None, fail_fast=True)

    @property
    def indices(self) -> tuple[list[int], list[int]] | None:
        """Return those of CSR; None if all values are there."""
        if self.sparse_crow_indices is None or self.sparse_col_indices is None:
            return None
        return self.sparse_crow_indices, self.sparse_col_indices


def future_of(model: str, number: object) -> dict[str, Any]:
    """Name what a client asks `retrieve_future` for."""
    return {"request_id": f"{model}:{number}", "model_id": model}
