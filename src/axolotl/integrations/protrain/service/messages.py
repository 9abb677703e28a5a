"""Tinker's protobuf messages, as far as a server reads and writes them.

Built from a table of names and numbers, so that neither the client's package nor a
compiler is needed; unknown fields are skipped, as protobuf does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from torch import Tensor

from ..core.errors import RequestError
from .answers import Sampled, Top
from .losses import MOST_TARGETS, TARGETS, Datum

MOST_ROWS = 1 << 16
"""Most rows of one request."""
_MOST_DENSE = 1 << 24
"""Most values of a tensor whose zeros a client leaves out."""
_FIELD = descriptor_pb2.FieldDescriptorProto
_PACKAGE = "axolotl_protrain.tinker"
_TABLE = """
ForwardBackwardRequest: 1 string model_id, 2 int32 seq_id, 3 *Datum data,
 4 string loss_fn, 5 %double loss_fn_config, 6 bool forward_only,
 7 %LossConfigValue loss_fn_config_v2
LossConfigValue: 1 |double number, 2 |string text
Datum: 1 *Chunk model_input, 2 %Tensor loss_fn_inputs
Chunk: 1 EncodedTextChunk encoded_text, 2 Other image, 3 Other dmel
Other:
EncodedTextChunk: 1 bytes tokens
Tensor: 1 |bytes dense, 2 |SparseCsr sparse_csr, 3 int32 dtype, 4 *int64 shape
SparseCsr: 1 bytes values, 2 bytes crow_indices, 3 bytes col_indices
ForwardBackwardOutput: 1 string loss_fn_output_type, 2 *ArrayRecord loss_fn_outputs,
 3 %double metrics
ArrayRecord: 1 string type_tag, 2 %BatchedTensor fields, 3 int64 num_datums
BatchedTensor: 1 bytes data, 2 bytes offsets, 3 int32 dtype, 4 *int64 trailing_shape
SampleResponse: 1 *SampledSequence sequences, 2 bytes prompt_logprobs,
 3 TopkLogprobs topk_prompt_logprobs, 5 Tensor target_prompt_logprobs
SampledSequence: 1 int32 stop_reason, 2 bytes tokens, 3 bytes logprobs,
 4 TopkLogprobs topk_sampled_logprobs
TopkLogprobs: 1 bytes token_ids, 2 bytes logprobs, 3 uint32 k, 4 uint32 length
"""
"""Message: number type name; `*` is repeated, `%` a map from strings, `|` of a oneof.
An enum is read as the int32 that it is on the wire."""
_FLOAT32 = 1
_REASONS = {"stop": 0, "length": 1}
_DTYPES = {_FLOAT32: torch.float32, 2: torch.int64, 3: torch.int32}


def _messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3"
    )
    for line in _TABLE.replace("\n ", " ").strip().splitlines():
        name, _, fields = line.partition(":")
        message = file.message_type.add(name=name)
        for field in filter(None, map(str.split, fields.split(","))):
            _add_field(message, int(field[0]), field[1], field[2])
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        message.name: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"{_PACKAGE}.{message.name}")
        )
        for message in file.message_type
    }


def _add_field(message: Any, number: int, kind: str, name: str) -> None:
    mark, kind = (kind[0], kind[1:]) if kind[0] in "*%|" else ("", kind)
    field = message.field.add(name=name, number=number)
    field.label = _FIELD.LABEL_REPEATED if mark in ("*", "%") else _FIELD.LABEL_OPTIONAL
    if mark == "%":
        entry = message.nested_type.add(name=name.title().replace("_", "") + "Entry")
        entry.options.map_entry = True
        _add_field(entry, 1, "string", "key")
        _add_field(entry, 2, kind, "value")
        kind = f"{message.name}.{entry.name}"
    elif mark == "|":
        if not message.oneof_decl:
            message.oneof_decl.add(name="kind")
        field.oneof_index = 0
    if kind[0].isupper():
        field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    else:
        field.type = _FIELD.Type.Value(f"TYPE_{kind.upper()}")


MESSAGES = _messages()


def read_request(body: bytes) -> Any:
    """A `ForwardBackwardRequest`.

    Raises:
        RequestError: The body is none.
    """
    try:
        return MESSAGES["ForwardBackwardRequest"].FromString(body)
    except DecodeError as error:
        raise RequestError(
            f"the body is no protobuf ForwardBackwardRequest ({error})."
        ) from error


def settings_of(request: Any) -> dict[str, Any]:
    """Read the settings of a loss; the newer map wins."""
    newer = request.loss_fn_config_v2.items()
    values = {name: getattr(v, v.WhichOneof("kind") or "number") for name, v in newer}
    return {**request.loss_fn_config, **values}


def data_of(request: Any) -> Iterator[Datum]:
    """Read the rows of a request, one after another.

    Raises:
        RequestError: Too many, or something other than text and plain tensors is in one.
    """
    if len(request.data) > MOST_ROWS:
        raise RequestError(f"data: {len(request.data)} rows; at most {MOST_ROWS}.")
    yield from (_datum(number, message) for number, message in enumerate(request.data))


def _datum(number: int, message: Any) -> Datum:
    chunks = []
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise RequestError(f"data[{number}]: only encoded_text chunks can train.")
        chunks.append(_from_bytes(number, chunk.encoded_text.tokens, torch.int32))
    tokens = torch.cat(chunks).long() if chunks else torch.empty(0, dtype=torch.int64)
    inputs = {}
    for name, tensor in message.loss_fn_inputs.items():
        dtype, kind = _DTYPES.get(tensor.dtype), tensor.WhichOneof("kind")
        if dtype is None or kind is None:
            raise RequestError(
                f"data[{number}]: {name} is no tensor of float32, int64 or int32."
            )
        shape, csr, indices = list(tensor.shape), tensor.sparse_csr, None
        if kind == "sparse_csr":
            both = (csr.crow_indices, csr.col_indices)
            indices = [_from_bytes(number, each, torch.int64) for each in both]
        given = tensor.dense if indices is None else csr.values
        values = _from_bytes(number, given, dtype)
        inputs[name] = shaped(number, name, values, shape, tokens.numel(), indices)
    return Datum(tokens, inputs)


def shaped(
    number: int,
    name: str,
    values: Tensor,
    shape: Sequence[int] | None,
    length: int,
    indices: Sequence[Any] | None = None,
) -> Tensor:
    """An input of a loss, in the dtype that it has in the engine.

    Args:
        number: Of its row, which has `length` tokens.
        name: Its own.
        values: One after another.
        shape: As the client says, or nothing of it.
        indices: Of CSR, where 0 was left out.

    Raises:
        RequestError: It has another number of values, or targets are no integers.
    """
    what, shape = f"data[{number}]: {name}", list(shape or [values.numel()])
    wanted = torch.int64 if name == TARGETS else torch.float32
    if wanted == torch.int64 and values.is_floating_point():
        raise RequestError(f"{what} are not integers.")
    values = values.to(wanted)
    if indices is not None:
        # a few bytes could ask for very many zeros
        fits = len(shape) == 2 and shape[0] == length and 0 < shape[1] <= MOST_TARGETS
        if not fits or math.prod(shape) > _MOST_DENSE:
            raise RequestError(
                f"{what} is sparse, of shape {shape}; allowed is [{length}, K], K from 1 "
                f"to {MOST_TARGETS}, of at most {_MOST_DENSE:,} values."
            )
        return densified(what, values, shape, indices)
    whole = len(shape) in (1, 2) and min(shape) >= 0
    if not whole or math.prod(shape) != values.numel():
        raise RequestError(
            f"{what} has shape {shape} and {values.numel()} values; one value a token is "
            "allowed, or as many for each."
        )
    return values.view(shape)


def densified(
    what: str,
    values: Tensor,
    shape: list[int],
    indices: Sequence[Any],
    missing: int = 0,
) -> Tensor:
    """Values in CSR with `missing` where none is listed.

    Args:
        what: For errors.
        values: The listed ones.
        shape: Of the result.
        indices: Where each row begins and ends among the columns, and the columns.

    Raises:
        RequestError: These are no such indices.
    """
    try:
        starts, columns = (torch.as_tensor(each, dtype=torch.int64) for each in indices)
        sparse = torch.sparse_csr_tensor(
            starts, columns, values - missing, shape, check_invariants=True
        )
    except (RuntimeError, ValueError, OverflowError) as error:
        raise RequestError(f"{what}: its indices are none of CSR ({error}).") from error
    return sparse.to_dense() + missing


def _from_bytes(number: int, data: bytes, dtype: torch.dtype) -> Tensor:
    if len(data) % dtype.itemsize:
        raise RequestError(f"data[{number}]: {len(data)} bytes are no {dtype} values.")
    if not data:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype)


def output_bytes(loss: float, rows: Sequence[Tensor]) -> bytes:
    """A `ForwardBackwardOutput`: the loss and log-probabilities of each row, float32."""
    answer = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    answer.metrics["loss:sum"] = loss
    for trailing, each in groupby(rows, lambda row: row.shape[1:]):
        some = [*each]
        record = answer.loss_fn_outputs.add(
            type_tag="ArrayRecord", num_datums=len(some)
        )
        ends = torch.tensor([0, *(row.nbytes for row in some)]).cumsum(0)
        found = record.fields["logprobs"]
        found.data = torch.cat(some).numpy().tobytes()
        found.offsets = ends.numpy().tobytes()
        found.dtype = _FLOAT32
        found.trailing_shape.extend(trailing)
    return answer.SerializeToString()


def sampled_bytes(answer: Sampled) -> bytes:
    """A `SampleResponse`."""
    message = MESSAGES["SampleResponse"]()
    for sample in answer.samples:
        one = message.sequences.add(
            stop_reason=_REASONS[sample.reason],
            tokens=sample.tokens.numpy().tobytes(),
            logprobs=sample.logprobs.numpy().tobytes(),
        )
        if sample.top is not None:
            _put_top(one.topk_sampled_logprobs, sample.top)
    if answer.prompt_logprobs is not None:
        message.prompt_logprobs = answer.prompt_logprobs.numpy().tobytes()
    if answer.prompt_top is not None:
        _put_top(message.topk_prompt_logprobs, answer.prompt_top)
    if answer.wanted is not None:
        wanted, target = answer.wanted, message.target_prompt_logprobs
        target.dtype = _FLOAT32
        target.shape.extend(wanted.shape)
        if wanted.sparse is None:
            target.dense = wanted.values.numpy().tobytes()
        else:
            target.sparse_csr.values = wanted.listed().numpy().tobytes()
            rows, columns = wanted.sparse
            target.sparse_csr.crow_indices = rows.numpy().tobytes()
            target.sparse_csr.col_indices = columns.numpy().tobytes()
    return message.SerializeToString()


def _put_top(message: Any, top: Top) -> None:
    message.token_ids = top.tokens.numpy().tobytes()
    message.logprobs = top.logprobs.numpy().tobytes()
    message.length, message.k = top.tokens.shape
