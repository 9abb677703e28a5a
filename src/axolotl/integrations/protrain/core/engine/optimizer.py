"""The plain optimizer of a session: its steps are recorded, and hooks around them see full
parameters.

# Note [The optimizer's clone]

All that an optimizer has beside its parameters and their state is in its attributes and
groups. `RecordedStep` keeps them by value when `step` is called: schedulers change groups,
and some optimizers count in them. `replay` calls the optimizer class's own `step` on a clone
with these attributes. In its groups master parameters stand for the parameters, at the same
positions, by which some optimizers go: a pass may be using the parameters' own memory, or it
has another dtype. Of parameters that are not updated now the clone has non-tensor state
alone (Muon marks its matrices so). A value that only an update changes in a group (optimi's
`kahan_sum`) changes in the optimizer's own group, too. So no optimizer is written down here,
and what it does to one parameter after another it does later with the same numbers. An
optimizer that looks at several parameters together would not: `require_separable` knows
which have been tried.
"""

from __future__ import annotations

import copyreg
from collections import defaultdict
from collections.abc import Mapping
from contextlib import nullcontext
from copy import copy
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_hooks

from ..errors import AccessError, ConfigError

if TYPE_CHECKING:
    from .step import Step

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
numbers: a large parameter may be updated in pieces."""


def is_elementwise(kind: type) -> bool:
    """Whether an optimizer updates each element of a parameter independently of others."""
    return kind in _ELEMENTWISE


def require_separable(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what cannot be updated a chunk at a time with the same numbers.

    Raises:
        ConfigError: The optimizer is not of a class that has been tried, or rounds by
            random numbers that all parameters draw from one generator.
    """
    kind = type(optimizer)
    known = kind.__module__.startswith("bitsandbytes.optim.") or any(
        kind.__module__.startswith(package) and kind.__name__ in names.split()
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
        every = [param for params in self._params for param in params]
        self._absent = {param: nn.Parameter(torch.empty(0)) for param in every}
        states = states_of(plain)
        self._marks = {
            self._absent[p]: non_tensor_state(states.get(p, {})) for p in every
        }

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
        here = {**self._absent, **master_params}
        clone.param_groups = [
            # by value again: some count in place
            {**_by_value(recorded), "params": [here[param] for param in params]}
            for recorded, params in zip(self._groups, self._params, strict=True)
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
    """What `state` is, as it is now: steps may be pending."""
    return vars(optimizer)["state"]


def non_tensor_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """What neither is nor holds a tensor in the state of a parameter."""
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
    """What torch has wrapped to call the hooks of a step, which run around that alone."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _step_of_bitsandbytes(clone: Any) -> None:
    """Its step without what it waits for after each tensor, and without managed memory."""
    clone.is_paged = False
    for g, group in enumerate(clone.param_groups):
        for number, param in enumerate(group["params"]):
            if param.grad is not None:
                if not clone.state[param]:
                    clone.init_state(group, param, g, number)
                clone.update_step(group, param, g, number)


class PagedOptimizer(torch.optim.Optimizer):
    """An optimizer whose steps are recorded; put in front of the plain one's class."""

    session_step: ClassVar[Step]
    plain_class: ClassVar[Any]

    @property  # type: ignore[override]
    def state(self) -> dict[Any, Any]:
        """State of all parameters, once all recorded steps are applied."""
        self.session_step.before_state_access()
        return states_of(self)

    @state.setter
    def state(self, states: dict[Any, Any]) -> None:
        self.session_step.before_state_access()
        vars(self)["state"] = states

    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            raise ConfigError(
                "optimizer: a closure cannot be called while weights are paged. Call "
                "`step` without one, after backward."
            )
        with self.session_step.optimizer_step():
            # hooks are called around this one: nothing is hidden from them
            return without_hooks(self.plain_class.step)(self)

    # torch is not to call them once more
    step.hooked = True  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        _require_no_hooks(self, "state_dict")
        saved = self.session_step.saved_state
        self.session_step.apply_all()
        saved.require_gathered()
        saved.order()
        packed = super().state_dict()
        saved.add_masters(packed)
        return packed

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        _require_no_hooks(self, "load_state_dict")
        saved = self.session_step.saved_state
        others, masters = saved.without_masters(state_dict)
        self.session_step.apply_all()
        with saved.loading():
            super().load_state_dict(others, *args, **kwargs)
        self.session_step.load_masters(masters)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        super().zero_grad(*args, **kwargs)
        # the gradients that it was for are gone
        self.session_step.updates.clip = None


def page_optimizer(plain: torch.optim.Optimizer, step: Step) -> None:
    """Put `PagedOptimizer` in front of the class of an optimizer, whose state is paged.

    Raises:
        ConfigError: See `require_separable`.
    """
    require_separable(plain)
    kind: Any = type(plain)

    def switch(method: str) -> Any:
        return staticmethod(lambda: step.switch_optimizer(method))

    switches = {name: switch(name) for name in ("train", "eval") if hasattr(kind, name)}
    own = {"session_step": step, "plain_class": kind, **switches}
    plain.__class__ = type(f"Paged{kind.__name__}", (PagedOptimizer, kind), own)


def _require_no_hooks(optimizer: torch.optim.Optimizer, method: str) -> None:
    for when in ("pre", "post"):
        if getattr(optimizer, f"_optimizer_{method}_{when}_hooks", None):
            raise AccessError(
                f"optimizer: a hook that `register_{method}_{when}_hook` has added would "
                "see other parameters than the model's while their state is on the host. "
                "Do it in an event of a callback (on_train_begin, on_save)."
            )


_BLIND = "torch.", __name__.partition(".core.")[0]
"""Modules whose hooks of an optimizer's step look at nothing."""


class ShowingOptimizer(torch.optim.Optimizer):
    """An optimizer whose step hooks find full parameters; put in front of its class."""

    session_step: ClassVar[Step]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # another one of this class is somebody else's, and pages nothing
        return plain_class(cls)(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # nor does a copy, of whatever kind; pickle takes no other class after `__newobj__`
        made = copyreg._reconstructor  # type: ignore[attr-defined]
        return made, (plain_class(type(self)), object, None), self.__getstate__()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        # a scheduler asks for it
        self._opt_called = True
        paged = self.session_step
        looks = paged.plan.mode != "A" and hooks_look(self)
        if paged.plan.mode != "A" and paged.ranks.world.size > 1:
            on_any = torch.tensor([looks], dtype=torch.uint8)
            looks = bool(paged.ranks.maximum(on_any).any())
        with paged.full_params.inside() if looks else nullcontext():
            return super().step(*args, **kwargs)

    # neither torch nor its schedulers are to wrap this one
    step.hooked = step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def show_to_hooks(optimizer: torch.optim.Optimizer, step: Step) -> None:
    """Put `ShowingOptimizer` in front of the class of an optimizer.

    Raises:
        ConfigError: Its `step` is not that of its class.
    """
    own = vars(optimizer).pop("step", None)
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        raise ConfigError(
            "optimizer: its `step` was replaced by another function, which would update "
            "weights that are paged out. Use `register_step_pre_hook` or "
            "`register_step_post_hook` instead."
        )
    kind = type(optimizer)
    bases = ShowingOptimizer, kind
    optimizer.__class__ = type(kind.__name__, bases, {"session_step": step})


def plain_class(kind: type) -> type:
    """The class of an optimizer, without those that this package puts in front of it."""
    package = __name__.partition(".core.")[0]
    return next(k for k in kind.__mro__ if not k.__module__.startswith(package))


def hooks_look(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a hook of somebody else's may look at weights, gradients or state."""
    tables = (
        torch_hooks._global_optimizer_pre_hooks,
        torch_hooks._global_optimizer_post_hooks,
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
    )
    return any(map(_looks, chain.from_iterable(t.values() for t in tables)))


def _looks(hook: Any) -> bool:
    """Whether a hook of somebody else's may look at weights, gradients or state."""
    home = getattr(hook, "__module__", None) or ""
    return getattr(hook, "looks_at_weights", True) and not home.startswith(_BLIND)
