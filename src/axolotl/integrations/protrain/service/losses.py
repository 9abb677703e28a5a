"""Tinker's loss functions: sums over tokens, and what a request has to bring for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import torch
from torch import Tensor

from ..core.errors import RequestError
from .turns import TENSOR_BYTES

Inputs = Mapping[str, Tensor]
Settings = Mapping[str, float]


@dataclass(frozen=True)
class Datum:
    """One row.

    Attributes:
        tokens: Of the input, int64 of shape [length].
        inputs: Of the loss, by name, of the same shape, or [length, candidates];
            `target_tokens` is int64, the rest float32.
    """

    tokens: Tensor
    inputs: Inputs

    @property
    def nbytes(self) -> int:
        """Bytes of the host."""
        tensors = (self.tokens, *self.inputs.values())
        return sum(tensor.nbytes + TENSOR_BYTES for tensor in tensors)


def digest(data: Sequence[Datum]) -> bytes:
    """A hash of rows, by which a client's are known when they come again."""
    found = sha256()
    for datum in data:
        for name, values in [("", datum.tokens), *sorted(datum.inputs.items())]:
            found.update(f"{name} {values.dtype} {[*values.shape]} ".encode())
            found.update(values.numpy().tobytes())
    return found.digest()


@dataclass(frozen=True)
class Loss:
    """`of` gives the sum from log-probabilities of the targets, float32 as `inputs`; a
    `soft` one may have several targets for each token."""

    inputs: tuple[str, ...]
    of: Callable[[Tensor, Inputs, Settings], Tensor]
    settings: Settings = field(default_factory=dict)
    soft: bool = False


def _cross_entropy(logprobs: Tensor, given: Inputs, _: Settings) -> Tensor:
    return -(logprobs * given["weights"]).sum()


def _importance_sampling(logprobs: Tensor, given: Inputs, _: Settings) -> Tensor:
    ratio = torch.exp(logprobs - given["logprobs"])
    return -(ratio * given["advantages"]).sum()


def _ppo(logprobs: Tensor, given: Inputs, settings: Settings) -> Tensor:
    ratio = torch.exp(logprobs - given["logprobs"])
    clipped = _clipped(ratio, settings)
    advantages = given["advantages"]
    return -torch.minimum(ratio * advantages, clipped * advantages).sum()


def _cispo(logprobs: Tensor, given: Inputs, settings: Settings) -> Tensor:
    ratio = torch.exp(logprobs.detach() - given["logprobs"])
    return -(_clipped(ratio, settings) * logprobs * given["advantages"]).sum()


def _dro(logprobs: Tensor, given: Inputs, settings: Settings) -> Tensor:
    apart = logprobs - given["logprobs"]
    gained = logprobs * given["advantages"]
    return -(gained - 0.5 * settings["beta"] * apart**2).sum()


def _clipped(ratio: Tensor, settings: Settings) -> Tensor:
    low, high = settings["clip_low_threshold"], settings["clip_high_threshold"]
    return ratio.clamp(low, high)


_SAMPLED = ("logprobs", "advantages")
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES = {
    "cross_entropy": Loss(("weights",), _cross_entropy, soft=True),
    "importance_sampling": Loss(_SAMPLED, _importance_sampling),
    "ppo": Loss(_SAMPLED, _ppo, _CLIP),
    "cispo": Loss(_SAMPLED, _cispo, _CLIP),
    "dro": Loss(_SAMPLED, _dro, {"beta": 0.05}),
}
TARGETS = "target_tokens"
MOST_TARGETS = 64
"""Most candidates for a token."""


def checked_settings(loss_fn: str, given: Mapping[str, object]) -> Settings:
    """The settings of a loss, with the defaults of those that are left out.

    Raises:
        RequestError: There is no such loss, or it has no such setting.
    """
    loss = LOSSES.get(loss_fn)
    if loss is None:
        raise RequestError(
            f"loss_fn: {loss_fn} is not known here; allowed are {', '.join(LOSSES)}. "
            "A loss of your own runs in the client (forward_backward_custom)."
        )
    for name, value in given.items():
        if name not in loss.settings:
            allowed = ", ".join(loss.settings) or "none"
            raise RequestError(
                f"loss_fn_config: {loss_fn} has no {name}; allowed: {allowed}."
            )
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise RequestError(f"loss_fn_config: {name} is not a finite number.")
    return {**loss.settings, **given}  # type: ignore[dict-item]


def fault_of(datum: Datum, loss_fn: str, vocabulary: int, longest: int) -> str | None:
    """Why no pass may see a row, of `longest` tokens at most; None if one may."""
    names = (TARGETS, *LOSSES[loss_fn].inputs)
    length = datum.tokens.numel()
    if not 0 < length <= longest:
        return f"{length} tokens; allowed are 1 to {longest}, the server's sequence_len"
    if {*names} != datum.inputs.keys():
        given = ", ".join(datum.inputs) or "nothing"
        return f"loss_fn_inputs are {given}, and the loss takes {', '.join(names)}"
    wanted, more = datum.tokens.shape, ""
    if LOSSES[loss_fn].soft:
        more = f", or (tokens, K) of all, K from 1 to {MOST_TARGETS}"
        candidates = datum.inputs[TARGETS].shape[1:]
        if len(candidates) == 1 and 0 < candidates[0] <= MOST_TARGETS:
            wanted = torch.Size((length, *candidates))
    for name, values in datum.inputs.items():
        if values.shape != wanted:
            shape = tuple(values.shape)
            return f"{name} has shape {shape}; allowed is one value a token, ({length},){more}"
        if not values.isfinite().all():
            return f"{name} is not finite"
    for tokens in (datum.tokens, datum.inputs[TARGETS]):
        low, high = (int(value) for value in tokens.aminmax())
        if low < 0 or high >= vocabulary:
            wrong = low if low < 0 else high
            return f"token {wrong}; the vocabulary has 0 to {vocabulary - 1}"
    return None
