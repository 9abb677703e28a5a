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

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils import _python_dispatch

from .errors import AccessError
from .optim import Gradients
from .runtime import Pager, Ranks, Residence
from .types import Plan

_not_counted = _python_dispatch._disable_current_modes
"""What is copied to be shown is no work of the device."""


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
