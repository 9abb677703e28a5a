"""A step of the plain optimizer that is noted when it is called, and made later.

# Note [The ghost]

Everything of an optimizer but its parameters and their state is in its attributes and
groups. A `Noted` keeps them by value, as they are when `step` is called: schedulers change
groups, and some optimizers count in them. The step itself is that of the optimizer's own
class on an object with these attributes, the same parameters in the same groups (some
optimizers go by positions), and the state of those parameters alone that have a gradient
now. So nothing of an optimizer is written down here, and whatever it does to one parameter
after another it does later with the same numbers. What looks at several parameters
together would not: `require_separable` knows which optimizers have been tried.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

Clip = tuple[float, Tensor]
"""Largest norm, and the norm of all gradients."""

_BITSANDBYTES = "bitsandbytes.optim.optimizer"
_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
_NOT_NOTED = {"step", "state", "param_groups", *_HOOKS}


class Noted:
    """One call of `step`, for parameters that are updated later; see Note [The ghost].

    Args:
        plain: The optimizer as it is when `step` is called.
        kind: Its class, without what was put in front of it.
        clip: How its gradients are still to be scaled.
    """

    def __init__(
        self, plain: torch.optim.Optimizer, kind: Any, clip: Clip | None = None
    ) -> None:
        self._kind, self.clip = kind, clip
        self._attributes = {k: v for k, v in vars(plain).items() if k not in _NOT_NOTED}
        self._groups = [_by_value(group) for group in plain.param_groups]

    def step(
        self, plain: torch.optim.Optimizer, params: Sequence[nn.Parameter]
    ) -> None:
        """Update `params`, the only ones with a gradient, which is not clipped yet.

        Their state is in `plain`, and is renewed there.
        """
        used = [param for param in params if param.grad is not None]
        if self.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(used, *self.clip)
        ghost: Any = object.__new__(self._kind)
        vars(ghost).update(self._attributes, **{hooks: {} for hooks in _HOOKS})
        known = {param: plain.state[param] for param in params if param in plain.state}
        ghost.state = defaultdict(dict, known)
        ghost.param_groups = [
            {**noted, "params": group["params"]}
            for noted, group in zip(self._groups, plain.param_groups, strict=True)
        ]
        if any(base.__module__ == _BITSANDBYTES for base in self._kind.__mro__):
            _step_of_bitsandbytes(ghost)
        else:
            _without_hooks(self._kind.step)(ghost)
        plain.state.update(ghost.state)


def _by_value(group: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def _without_hooks(step: Any) -> Any:
    """What torch has wrapped to call the hooks, which have run when it was called."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _step_of_bitsandbytes(ghost: Any) -> None:
    """Its step without what it waits for after each tensor, and without managed memory."""
    ghost.is_paged = False
    for g, group in enumerate(ghost.param_groups):
        for number, param in enumerate(group["params"]):
            if param.grad is not None:
                if not ghost.state[param]:
                    ghost.init_state(group, param, g, number)
                ghost.update_step(group, param, g, number)
