"""Shows weights and gradients of an open model where they can be read and written.

# Note [Who looks between two passes]

`weights` shows weights (Note [Weights that are shown] in residence.py) and gradients. A
parameter with a gradient on the host has a stand-in as its `.grad`, never None, so whoever
computes with it elsewhere gets an error instead of a sum over half of the gradients. Shown,
it is the sum on the host, clipped, or a copy of it where device or dtype differ. A forward
or backward inside hides all of it, and shows it again when it ends. A copy of the model by
`copy.deepcopy` is announced by the hooks of its root, which are copied before the
parameters below: weights are shown from then until the next pass. Several ranks cannot
settle together at a moment that only one of them has, so then only bytes are shown.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import optimizer as torch_hooks
from torch.utils import _python_dispatch

from .errors import AccessError, ConfigError
from .optim import Gradients, kind_of
from .runtime import Pager, Ranks, Residence
from .types import Plan

_not_counted = _python_dispatch._disable_current_modes
"""What is copied to be shown is no work of the device."""
MOMENTS = {
    "event of a callback": "Shown: weights, gradients and state are true, writes count. On "
    "several ranks state is refused outside of `gathered_state`.",
    "hook of an optimizer's step": "Shown, before and after a step, global hooks too.",
    "scheduler of somebody else's": "Shown while it is made and in its steps.",
    "closure of a step": "Refused.",
    "hook of an optimizer's state": "Refused where the host has state: those of "
    "`state_dict` and `load_state_dict`.",
    "hook of a tensor": "Sees and may change the gradient of a micro-batch, and sees its "
    "block's weights. Whoever computes with `.grad`, the sum so far, is refused.",
    "hook of an accumulated gradient": "Refused, at opening or where it computes.",
    "hook of a module, forward or backward": "Sees the weights of its block and those "
    "outside of blocks. `weights` is refused; weights of other blocks are not there, which "
    "nobody notices.",
    "any other code between passes": "Has to enter `weights`. A write outside of it is an "
    "error in the next pass, a read is not noticed.",
}
"""When code of users may run while weights, gradients or state are not true, and what it
finds then; see Note [Who looks between two passes]."""

_BLIND = "torch.", __name__.partition(".core.")[0]
"""Modules whose hooks of an optimizer's step look at nothing."""


@dataclass
class Viewer:
    """Shows weights and gradients between two passes, and hides them from a pass."""

    params: Mapping[str, nn.Parameter]
    residence: Residence
    ranks: Ranks
    now: Callable[[], tuple[Plan, Pager, Gradients]]
    """The plan, and what runs it."""
    settle: Callable[[], None]
    """Returns once no host update is pending, without other ranks."""
    settle_all: Callable[[], None]
    """The same of gradients and copies too, with all ranks."""
    takes: bool = False
    """Whether what is written now counts; parameters show the truth then."""
    closed: bool = False
    _shown: frozenset[int] | None = None
    # how many look
    _looking: int = 0
    _outermost: nn.Module | None = None
    # of the pass that runs, or ran last
    _backward: int = -1

    @contextmanager
    def weights(self) -> Iterator[None]:
        """See `Session.weights`."""
        self._looking += 1
        try:
            self._show()
            yield
        finally:
            self._looking -= 1
            if not self._looking:
                self.hide()

    def for_hooks(
        self, optimizer: torch.optim.Optimizer
    ) -> AbstractContextManager[None]:
        """`weights`, where hooks of a step may look at them, on any rank."""
        plan, *_ = self.now()
        if plan.mode == "A":
            return nullcontext()
        tables = (
            torch_hooks._global_optimizer_pre_hooks,
            torch_hooks._global_optimizer_post_hooks,
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
        )
        look = any(map(_looks, chain.from_iterable(t.values() for t in tables)))
        all_look = self.ranks.maximum(torch.tensor([look], dtype=torch.uint8)).any()
        return self.weights() if all_look else nullcontext()

    def hide(self) -> None:
        """A pass begins, or nobody looks any longer."""
        if self._shown is not None:
            shown, self._shown = self._shown, None
            takes, self.takes = self.takes, False
            self._bind_back(shown, takes)

    def show_again(self, *_: object) -> None:
        """A forward has ended, or all updates of a step are queued."""
        if self._looking and self._outermost is None:
            self._show()

    def enter(self, module: nn.Module) -> None:
        """A forward begins above the blocks."""
        self.hide()
        if self._outermost in (None, module):
            self._outermost = module
            self.residence.verify()

    def left(self, module: nn.Module) -> None:
        """A forward has ended."""
        if module is self._outermost:
            self._outermost = None
            self.residence.remember()
            self.show_again()

    def before_backward(self) -> None:
        """Backward comes to a block."""
        self.hide()
        task = torch._C._current_graph_task_id()
        # -1 outside of it, where what is left of a pass is opened
        if task not in (self._backward, -1):
            self._backward = task
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._after_backward)

    def copying(self, module: nn.Module) -> None:
        """A module is about to be copied, after its own parameters."""
        if self.closed or self._shown is not None:
            return
        own = {id(param) for param in module.parameters(recurse=False)}
        on_host = self.residence.on_host.values()
        kept = {spec.name for chunk in on_host for spec in chunk.tensors}
        for name, param in self.params.items():
            if id(param) in own and name in kept:
                raise AccessError(
                    f"{name}: this weight is paged out, and its module cannot be copied "
                    "alone. Copy the whole model, or do it inside `with "
                    "trainer.protrain.weights():`."
                )
        self._show(together=self.ranks.world.size == 1)

    @_not_counted()
    def _show(self, together: bool = True) -> None:
        """Not `together`, other ranks do not come to what all have to do."""
        if self.closed or self.takes:
            return
        self.hide()
        plan, pager, gradients = self.now()
        if pager.is_running():
            raise AccessError(
                "weights and gradients can be looked at between two passes through the "
                "model, not inside of one"
            )
        shown = frozenset(plan.away)
        if together:
            self.settle_all()
        else:
            pager.close_any()
            self.settle()
            if plan.shards > 1:
                # what stays on the device is gathered by all ranks or by none
                shown |= self.residence.on_host.keys()
        self._shown, self.takes = shown, together
        self.residence.show(shown, own=together)
        if together:
            for gradient in gradients.shown:
                gradient.show()

    @_not_counted()
    def _bind_back(self, shown: frozenset[int], takes: bool) -> None:
        _, pager, gradients = self.now()
        if takes:
            # nobody of the node looks any longer
            self.ranks.node_sum(torch.zeros(1))
            for gradient in gradients.shown:
                gradient.keep_replaced()
        self.residence.hide(shown, takes)
        if takes:
            # a stand-in is where its parameter is
            for gradient in gradients.shown:
                gradient.hide()
            # each rank has taken its part of what all have written
            self.ranks.node_sum(torch.zeros(1))
            pager.forget_all()

    def _after_backward(self) -> None:
        self.residence.remember()
        self.show_again()


class ShowingOptimizer(torch.optim.Optimizer):
    """Put in front of an optimizer's class: hooks of its steps are shown all there is."""

    viewer: ClassVar[Viewer]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # another one of this class is somebody else's, and pages nothing
        return kind_of(cls)(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # nor does a copy, of whatever kind; pickle takes no other class after `__newobj__`
        made = copyreg._reconstructor  # type: ignore[attr-defined]
        return made, (kind_of(self), object, None), self.__getstate__()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        # a scheduler asks for it
        self._opt_called = True
        with self.viewer.for_hooks(self):
            return super().step(*args, **kwargs)

    # neither torch nor its schedulers are to wrap this one
    step.hooked = step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def show_to_hooks(optimizer: torch.optim.Optimizer, viewer: Viewer) -> None:
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
    optimizer.__class__ = type(kind.__name__, bases, {"viewer": viewer})


def _looks(hook: Any) -> bool:
    """Whether a hook of somebody else's may look at weights, gradients or state."""
    home = getattr(hook, "__module__", None) or ""
    return getattr(hook, "looks_at_weights", True) and not home.startswith(_BLIND)
