"""The plain optimizer of a session: its steps are recorded, and hooks around them see full
parameters."""

from __future__ import annotations

import copyreg
from contextlib import nullcontext
from itertools import chain
from typing import Any, ClassVar

import torch
from torch.optim import optimizer as torch_hooks

from ..errors import AccessError, ConfigError
from .access import StateAccess
from .full_params import FullParams
from .recorded_step import require_separable, states_of, without_hooks
from .step import Step


class PagedOptimizer(torch.optim.Optimizer):
    """An optimizer whose steps are recorded; put in front of the plain one's class."""

    session_step: ClassVar[Step]
    access: ClassVar[StateAccess]
    plain_class: ClassVar[Any]

    @property  # type: ignore[override]
    def state(self) -> dict[Any, Any]:
        """State of all parameters, once all recorded steps are applied."""
        self.access.before_state_access()
        return states_of(self)

    @state.setter
    def state(self, states: dict[Any, Any]) -> None:
        self.access.before_state_access()
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
        saved = self.access.saved_state
        # before groups are read: an update may be what completes them
        self.session_step.due.apply_all()
        saved.require_gathered()
        saved.order()
        packed = super().state_dict()
        saved.add_masters(packed)
        return packed

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        _require_no_hooks(self, "load_state_dict")
        saved = self.access.saved_state
        others, masters = saved.without_masters(state_dict)
        self.session_step.due.apply_all()
        with saved.loading():
            super().load_state_dict(others, *args, **kwargs)
        self.access.load_masters(masters)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        super().zero_grad(*args, **kwargs)
        # the gradients that it was for are gone
        self.session_step.updates.clip = None


def page_optimizer(
    plain: torch.optim.Optimizer, step: Step, access: StateAccess
) -> None:
    """Put `PagedOptimizer` in front of the class of an optimizer, whose state is paged.

    Raises:
        ConfigError: See `require_separable`.
    """
    require_separable(plain)
    kind: Any = type(plain)

    def switch(method: str) -> Any:
        return staticmethod(lambda: step.switch_optimizer(method))

    switches = {name: switch(name) for name in ("train", "eval") if hasattr(kind, name)}
    own = {"session_step": step, "access": access, "plain_class": kind, **switches}
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
    full_params: ClassVar[FullParams]

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
            on_any = torch.tensor([looks], dtype=torch.uint8, device="cpu")
            looks = bool(paged.ranks.maximum(on_any).any())
        with self.full_params.inside() if looks else nullcontext():
            return super().step(*args, **kwargs)

    # neither torch nor its schedulers are to wrap this one
    step.hooked = step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def show_to_hooks(
    optimizer: torch.optim.Optimizer, step: Step, full_params: FullParams
) -> None:
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
    own = {"session_step": step, "full_params": full_params}
    optimizer.__class__ = type(kind.__name__, bases, own)


def plain_class(kind: type) -> type:
    """The class of an optimizer, without those that this package puts in front of it."""
    package = __name__.partition(".core.")[0]
    return next(k for k in kind.__mro__ if not k.__module__.startswith(package))


def hooks_look(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether some hook of a step may look at weights, gradients or state."""
    tables = (
        torch_hooks._global_optimizer_pre_hooks,
        torch_hooks._global_optimizer_post_hooks,
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
    )
    return any(map(_looks, chain.from_iterable(t.values() for t in tables)))


def _looks(hook: Any) -> bool:
    """Return whether a hook is somebody else's and does not say that it looks at nothing."""
    home = getattr(hook, "__module__", None) or ""
    return getattr(hook, "looks_at_weights", True) and not home.startswith(_BLIND)
