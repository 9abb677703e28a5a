"""Recorded optimizer steps, which are replayed later for one piece after another.

# Note [The optimizer's clone]

All that an optimizer has beside its parameters and their state is in its attributes and
groups. `RecordedStep` keeps them by value when `step` is called: schedulers change groups,
and some optimizers count in them. `replay` calls the optimizer class's own `step` on a clone
with these attributes. In its groups master parameters stand for the parameters, at the same
positions, by which some optimizers go: a pass may be using the parameters' own memory, or it
has another dtype. Of parameters that are not updated now the clone has non-tensor state
alone (Muon marks its matrices so); where elements are updated independently it has none of
them, or a replay would take as long as all of them. A value that only an update changes in a group (optimi's
`kahan_sum`) changes in the optimizer's own group, too. So no optimizer is written down here,
and what it does to one parameter after another it does later with the same numbers. An
optimizer that looks at several parameters together would not: `require_separable` knows
which have been tried.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError

Clip = tuple[float, Tensor]
"""Largest norm, and the norm of all gradients."""

_BITSANDBYTES = "bitsandbytes.optim.optimizer"
_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
_NOT_RECORDED = {"step", "state", "param_groups", *_HOOKS}


_SEPARABLE = {
    "torch.optim": "Adadelta Adafactor Adagrad Adam AdamW Adamax Muon NAdam RAdam RMSprop "
    "Rprop SGD",
    "transformers.optimization": "Adafactor",
    "torchao.optim": "Adam4bit Adam8bit AdamFp8 AdamW4bit AdamW8bit AdamWFp8 _AdamW",
    "axolotl.contribs.mit.muon": "Muon",
    "axolotl.utils.optimizers": "ADOPT AdamC",
    "apollo_torch": "AdamW",
    "came_pytorch": "CAME",
    "flashoptim": "FlashAdam FlashAdamW FlashLion FlashSGD FlashSGDW",
    "galore_torch": "Adafactor AdamW AdamW8bit",
    "optimi": "Adam AdamW Adan Lion RAdam Ranger SGD StableAdamW",
    "schedulefree": "AdamWScheduleFree RAdamScheduleFree SGDScheduleFree",
}
"""Classes that update one parameter after another, by the package that has them; all of
bitsandbytes' do."""

_ELEMENTWISE = {
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
}
"""Classes that update one element after another, by state of the parameter's shape and
numbers, all of it from one step on: a large parameter may be updated in pieces."""


def is_elementwise(kind: type) -> bool:
    """Return whether an optimizer updates each element of a parameter independently of others."""
    return kind in _ELEMENTWISE


def require_separable(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what cannot be updated a chunk at a time with the same numbers.

    Raises:
        ConfigError: The optimizer is not of a class that has been tried, or rounds by
            random numbers that all parameters draw from one generator.
    """
    kind = type(optimizer)
    home = f"{kind.__module__}."
    known = home.startswith("bitsandbytes.optim.") or any(
        home.startswith(f"{package}.") and kind.__name__ in names.split()
        for package, names in _SEPARABLE.items()
    )
    why = "is not known to update its parameters independently of each other"
    if known and getattr(optimizer, "bf16_stochastic_round", False):
        known = False
        why = "rounds by random numbers, which would come in another order"
    if not known:
        raise ConfigError(
            f"optimizer: {kind.__module__}.{kind.__qualname__} {why}, and the state of "
            "some weights is on the host, to be updated a chunk at a time. Use adamw_torch"
            "_fused, adamw_bnb_8bit, adafactor, lion or another of those in "
            "docs/compatibility.md, train an adapter, or set "
            "protrain_force_all_persistent: true."
        )


class RecordedStep:
    """One call of an optimizer's method, replayed later; see Note [The optimizer's clone].

    Args:
        plain: The optimizer as it is when the method is called.
        kind: Its class, without what was put in front of it.
        clip: How its gradients are still to be scaled.
        fused: Use the kernels for CPU tensors, where there are some.
        method: `step`; or `train` or `eval`, by which schedule-free optimizers move
            weights between where they train and their mean.
    """

    def __init__(
        self,
        plain: torch.optim.Optimizer,
        kind: Any,
        clip: Clip | None = None,
        method: str = "step",
        fused: bool = False,
    ) -> None:
        self._kind, self.clip, self.method = kind, clip, method
        self._attributes = {
            k: v for k, v in vars(plain).items() if k not in _NOT_RECORDED
        }
        self._groups = [_by_value(group) for group in plain.param_groups]
        for group in self._groups:
            if fused and "fused" in group:
                group.update(fused=True, foreach=False, capturable=False)
        self._params = [[*group["params"]] for group in plain.param_groups]
        self._groups_of: dict[nn.Parameter, list[int]] | None = None
        every = [param for params in self._params for param in params]
        if is_elementwise(kind):
            # none of a parameter that somebody has taken out, several of one put in twice
            self._groups_of = defaultdict(list)
            for number, params in enumerate(self._params):
                for param in params:
                    self._groups_of[param].append(number)
            every = []
        self._absent = {
            param: nn.Parameter(torch.empty(0, device="cpu")) for param in every
        }
        states = states_of(plain)
        self._marks = {
            self._absent[p]: non_tensor_state(states.get(p, {})) for p in every
        }

    @property
    def divisor(self) -> Tensor | None:
        """Divides gradients in a fused kernel under a GradScaler, unless it skips."""
        scale = self._attributes.get("grad_scale")
        if scale is None or self._attributes.get("found_inf"):
            return None
        return scale.cpu()

    def replay(
        self,
        plain: torch.optim.Optimizer,
        master_params: Mapping[nn.Parameter, nn.Parameter],
        states: dict[nn.Parameter, Any],
    ) -> None:
        """Make the step for some parameters.

        Args:
            plain: The optimizer as it is now.
            master_params: For each parameter the one that is changed in its place; in a
                step those with a gradient are, once it has been clipped.
            states: Their state, which is changed and completed.
        """
        if self.clip is not None:
            used = [main for main in master_params.values() if main.grad is not None]
            torch.nn.utils.clip_grads_with_norm_(used, *self.clip)
        clone: Any = object.__new__(self._kind)
        vars(clone).update(self._attributes, **{hooks: {} for hooks in _HOOKS})
        known = {m: states[p] for p, m in master_params.items() if p in states}
        clone.state = defaultdict(dict, {**self._marks, **known})
        if self._groups_of is None:
            here = {**self._absent, **master_params}
            lists = [[here[param] for param in params] for params in self._params]
        else:
            lists = [[] for _ in self._groups]
            for param, main in master_params.items():
                for number in self._groups_of.get(param, ()):
                    lists[number].append(main)
        clone.param_groups = [
            # by value again: some count in place
            {**_by_value(recorded), "params": params}
            for recorded, params in zip(self._groups, lists, strict=True)
        ]
        if self.method == "step" and any(
            base.__module__ == _BITSANDBYTES for base in self._kind.__mro__
        ):
            _step_of_bitsandbytes(clone)
        else:
            without_hooks(getattr(self._kind, self.method))(clone)
        for param, main in master_params.items():
            if main in clone.state:
                states[param] = clone.state[main]
        # further groups may have come since
        every = zip(self._groups, clone.param_groups, plain.param_groups, strict=False)
        for recorded, ours, group in every:
            changed = {k: ours[k] for k, v in recorded.items() if ours[k] is not v}
            group.update((k, v) for k, v in changed.items() if group[k] is recorded[k])


def clone_for(
    optimizer: torch.optim.Optimizer, others: Mapping[nn.Parameter, nn.Parameter]
) -> torch.optim.Optimizer:
    """A copy of an optimizer, without state and hooks, over other parameters."""
    clone: Any = object.__new__(type(optimizer))
    for key, value in vars(optimizer).items():
        if key not in _NOT_RECORDED:
            vars(clone)[key] = copy(value) if isinstance(value, (list, dict)) else value
    vars(clone).update({hooks: {} for hooks in _HOOKS}, state=defaultdict(dict))
    clone.param_groups = [
        {**_by_value(group), "params": [others[param] for param in group["params"]]}
        for group in optimizer.param_groups
    ]
    return clone


def states_of(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Return an optimizer's state as it is now: steps may be pending."""
    return vars(optimizer)["state"]


def non_tensor_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the items of a parameter's state that neither are nor hold a tensor."""
    simple = bool, int, float, str, type(None)
    return {key: value for key, value in state.items() if isinstance(value, simple)}


def _by_value(group: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone()
        if isinstance(value, Tensor)
        else copy(value)
        if isinstance(value, (list, dict))
        else value
        for key, value in group.items()
        if key != "params"
    }


def without_hooks(step: Any) -> Any:
    """Return the `step` that torch has wrapped to call hooks, which run elsewhere."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _step_of_bitsandbytes(clone: Any) -> None:
    """Make the step of a bitsandbytes optimizer without its waits and managed memory."""
    clone.is_paged = False
    for g, group in enumerate(clone.param_groups):
        for number, param in enumerate(group["params"]):
            if param.grad is not None:
                if not clone.state[param]:
                    clone.init_state(group, param, g, number)
                clone.update_step(group, param, g, number)
