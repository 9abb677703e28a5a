"""Optimizers of adapters: those of Axolotl that have been tried with adapters in turns.

# Note [An optimizer for one step]

An optimizer is made anew for each update, from what the client sends with it, over the weights
that have gradients. Its state are views of the adapter's buffer, which moves and is saved with
the weights; so is a count of updates for each weight. What state a weight has is found out by
one step of the optimizer over zeros of its shape. At a weight's first update the optimizer
makes the state itself, as in any training, and that is copied to its place. Torch's fused
AdamW alone gets its views at once, zeros at first: so nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as checked
from torch import Tensor, nn
from transformers import Trainer
from transformers.training_args import OptimizerNames

from ..core.errors import FOREIGN_ERRORS, ConfigError, RequestError, first_complaint

Shape = tuple[int, ...]
Views = Mapping[str, Mapping[str, Tensor]]


@checked(frozen=True, config={"extra": "forbid", "allow_inf_nan": False})
class AdamParams:
    """One update; the defaults are Tinker's. `grad_clip_norm` 0 clips nothing.

    Raises:
        ValidationError: (a ValueError) Which value cannot be.
    """

    learning_rate: float = Field(default=1e-4, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    # less is zero in float32, and an update from gradients that are zero 0 / 0
    eps: float = Field(default=1e-12, ge=1e-30)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip_norm: float = Field(default=0.0, ge=0)


_FUSED = "adamw_torch_fused"
_ADAM, _BETAS, _NONE = ("beta1", "beta2", "eps"), ("beta1", "beta2"), ()
_FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "adamw": (f"{_FUSED} adamw_torch", _ADAM),
    "adamw_8bit": ("adamw_8bit adamw_bnb_8bit paged_adamw_8bit", _ADAM),
    "adamw_32bit": ("paged_adamw_32bit", _ADAM),
    "ademamix_8bit": ("ademamix_8bit paged_ademamix_8bit", _ADAM),
    "ademamix_32bit": ("ademamix paged_ademamix_32bit", _ADAM),
    "lion_8bit": ("lion_8bit paged_lion_8bit", _BETAS),
    "lion_32bit": ("lion_32bit paged_lion_32bit", _BETAS),
    "rmsprop_8bit": ("rmsprop_bnb_8bit", _NONE),
    "rmsprop_32bit": ("rmsprop_bnb rmsprop_bnb_32bit", _NONE),
    **{name: (name, _NONE) for name in ("adafactor", "adagrad", "rmsprop", "sgd")},
}
"""Optimizers whose states are alike, and what they take of `AdamParams` beside what all do."""
_KNOWN = {name: key for key, (names, _) in _FAMILIES.items() for name in names.split()}
_WHY = {
    "*_layerwise lomo adalomo": "updates weights inside of backward",
    "schedule_free_*": "has other weights for what it has learned than for training",
    "adamw_torch_?bit ao_adamw_*": "has state in tensors of its own kind, not in bytes",
    "dion sinkgd": "draws random numbers for all weights, which turns would mix up",
    "muon": "is compiled anew by the shapes that came before, which its rounding follows",
    "*": "has not been tried with adapters that take turns",
}
"""Why others cannot be, by patterns of their names, of which the first counts."""


@dataclass(frozen=True)
class _State:
    """State of a weight of some shape.

    Attributes:
        parts: Shapes and dtypes of its tensors.
        step: The class of its own count, if it has one.
        others: All else, which never changes.
    """

    parts: Mapping[str, tuple[Shape, torch.dtype]]
    step: type | None
    others: Mapping[str, Any]


class AdapterOptimizer:
    """The optimizer of all adapters of a server; see Note [An optimizer for one step].

    Args:
        name: `optimizer` of the YAML, or None for torch's fused AdamW.
        arguments: Its `optim_args`.

    Attributes:
        family: Tells states that it can go on from.

    Raises:
        ConfigError: Adapters cannot have it.
    """

    def __init__(
        self, name: str | None = None, arguments: str | Mapping[str, Any] | None = None
    ) -> None:
        self.name = name = str(name or _FUSED)
        if name not in _KNOWN:
            patterns = ((p, why) for names, why in _WHY.items() for p in names.split())
            why = next(why for pattern, why in patterns if fnmatchcase(name, pattern))
            raise ConfigError(
                f"optimizer: {name} {why}. Adapters can have {', '.join(sorted(_KNOWN))}; "
                f"without the key it is {_FUSED}."
            )
        if isinstance(arguments, Mapping):
            arguments = ",".join(f"{key}={value}" for key, value in arguments.items())
        self._arguments = arguments or ""
        self.family = f"{_KNOWN[name]} {self._arguments}".strip()
        self._takes = _FAMILIES[_KNOWN[name]][1]
        self._state = cache(self._tried)
        try:
            self._state((8, 8), torch.float32)
        except (ImportError, *FOREIGN_ERRORS) as error:
            raise ConfigError(
                f"optimizer: {name} cannot be made here: {first_complaint(error)}. See to "
                f"its package and optim_args, or remove the key: it is {_FUSED} then."
            ) from error

    def check(self, adam: AdamParams) -> None:
        """Refuse settings that the optimizer has not.

        Raises:
            RequestError: One is given, other than Tinker's default.
        """
        for key in {*_ADAM} - {*self._takes}:
            default = getattr(AdamParams(), key)
            if getattr(adam, key) != default:
                raise RequestError(
                    f"adam_params.{key}: {self.name}, the optimizer of this server's YAML, "
                    f"has none. Leave it out, which is {default}."
                )

    def parts(
        self, shape: Shape, dtype: torch.dtype
    ) -> Mapping[str, tuple[Shape, torch.dtype]]:
        """Return shapes and dtypes of the state of a weight, beside its count."""
        return self._state(shape, dtype).parts

    def step(
        self, params: Mapping[str, nn.Parameter], views: Views, adam: AdamParams
    ) -> None:
        """Update the weights of an adapter that have gradients.

        Args:
            params: These, by name.
            views: Of the adapter's buffer, where their state is.
            adam: What the client has sent.
        """
        optimizer = self._made([*params.values()], adam)
        kinds = {n: self._state(tuple(p.shape), p.dtype) for n, p in params.items()}
        places = {n: {k: views[k][n] for k in kind.parts} for n, kind in kinds.items()}
        counts = [views["step"][name] for name in params]
        if self.name == _FUSED:
            for count, (name, param) in zip(counts, params.items(), strict=True):
                optimizer.state[param] = {"step": count, **places[name]}
            optimizer.step()
            return
        numbers = torch.stack(counts).tolist()
        for number, (name, param) in zip(numbers, params.items(), strict=True):
            if number:
                state = {**kinds[name].others, **places[name]}
                if kinds[name].step is not None:
                    own = kinds[name].step is int
                    state["step"] = int(number) if own else torch.tensor(number)
                optimizer.state[param] = state
        optimizer.step()
        for count, (name, param) in zip(counts, params.items(), strict=True):
            count.add_(1)
            for key, place in places[name].items():
                place.copy_(optimizer.state[param][key])

    def _made(self, params: list[nn.Parameter], adam: AdamParams) -> Any:
        given = SimpleNamespace(
            optim=OptimizerNames(self.name),
            optim_args=self._arguments,
            learning_rate=adam.learning_rate,
            adam_beta1=adam.beta1,
            adam_beta2=adam.beta2,
            adam_epsilon=adam.eps,
        )
        made, settings = Trainer.get_optimizer_cls_and_kwargs(given)  # type: ignore[arg-type]
        # as a trainer's group of weights has it
        settings.pop("is_paged", None)
        return made(params, **{**settings, "weight_decay": adam.weight_decay})

    def _tried(self, shape: Shape, dtype: torch.dtype) -> _State:
        param = nn.Parameter(torch.zeros(shape, dtype=dtype))
        param.grad = torch.zeros_like(param)
        optimizer = self._made([param], AdamParams())
        optimizer.step()
        state = dict(optimizer.state[param])
        step = state.pop("step", None)
        tensors = {k: v for k, v in state.items() if isinstance(v, Tensor)}
        return _State(
            {name: (tuple(v.shape), v.dtype) for name, v in tensors.items()},
            None if step is None else type(step),
            {name: value for name, value in state.items() if name not in tensors},
        )
