"""Full parameters between two passes: weights and gradients as plain tensors.

# Note [Who looks between two passes]

`Session.full_params` shows weights (Note [Full parameters] in param_store.py) and
gradients. A parameter with a gradient on the host has a placeholder as its `.grad`, never
None, so a computation with it elsewhere is an error instead of a sum over half of the
gradients. Inside, `.grad` is the sum on the host, clipped, or a copy of it where device or
dtype differ. A forward or backward inside hides all of it, and shows it again when it ends.
A copy of the model by `copy.deepcopy` is announced by the hooks of its root, which are
copied before the parameters below: weights are shown from then until the next pass. Several
ranks cannot settle together at a moment that only one of them has, so then only bytes are
shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn
from torch.utils import _python_dispatch

from ..errors import AccessError
from .step import Step

not_counted = _python_dispatch._disable_current_modes
"""Copies that are shown are no work of the device."""


class FullParams:
    """Binds parameters and gradients to their host tensors, and back.

    Args:
        step: Settles before anything is shown.

    Attributes:
        shows_writes: Whether parameters are the truth now and writes to them count.
        shown: Chunks whose parameters are bound to the host, None while none are.
        num_inside: Contexts that are open.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self.shows_writes = False
        self.shown: frozenset[int] | None = None
        self.num_inside = 0

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Show weights and gradients; see `Session.full_params`."""
        step = self._step
        if step.outermost is not None and not step.slots.in_forward:
            # an interrupt between two blocks ends a forward and calls no hook
            step.forward_ended(step.outermost)
        self.num_inside += 1
        try:
            self._show()
            yield
        finally:
            self.num_inside -= 1
            if not self.num_inside:
                self.hide()

    def show_again(self) -> None:
        """Show them again where a context is open: a pass has ended, or a step."""
        if self.num_inside and not self._step.inside_forward:
            self._show()

    def before_copy(self, module: nn.Module) -> None:
        """Show weights to a copy of the model; refuse that of a module alone.

        Raises:
            AccessError: The module has offloaded weights of its own.
        """
        if self.shown is not None:
            return
        step = self._step
        own = {id(param) for param in module.parameters(recurse=False)}
        on_host = step.store.on_host.values()
        kept = {spec.name for chunk in on_host for spec in chunk.tensors}
        for name, param in step.params.items():
            if id(param) in own and name in kept:
                raise AccessError(
                    f"{name}: this weight is paged out, and its module cannot be copied "
                    "alone. Copy the whole model, or do it inside `with "
                    "trainer.protrain.full_params():`."
                )
        self._show(together=step.ranks.world.size == 1)

    @not_counted()
    def _show(self, together: bool = True) -> None:
        """Bind to host tensors; not `together`, other ranks do not come to what all do."""
        step = self._step
        if step.closed or self.shows_writes:
            return
        self.hide()
        if step.slots.in_forward:
            raise AccessError(
                "weights and gradients can be looked at between two passes through the "
                "model, not inside of one"
            )
        shown = frozenset(step.plan.away)
        # or it would go on as it is bound then
        step.slots.end_use()
        if together:
            step.settle_all()
        else:
            step.due.settle()
            if step.plan.shards > 1:
                # what stays on the device is gathered by all ranks or by none
                shown |= step.store.on_host.keys()
        self.shown, self.shows_writes = shown, together
        step.store.show(shown, own=together)
        if together:
            for host in step.hosts:
                host.grads.show()

    def hide(self) -> None:
        """Bind parameters and gradients as a pass needs them, and take over writes."""
        # asked before each block, where putting modes aside would cost more
        if self.shown is not None:
            shown, self.shown = self.shown, None
            self._hide(shown)

    @not_counted()
    def _hide(self, shown: frozenset[int]) -> None:
        step = self._step
        writes, self.shows_writes = self.shows_writes, False
        if writes:
            # nobody of the node looks any longer
            step.ranks.meet_on_node()
            for host in step.hosts:
                host.grads.keep_replaced()
        with ExitStack() as undo:
            if writes:
                # after a write that is refused too: others count
                undo.callback(self._take_over)
            step.store.hide(shown, writes)

    def _take_over(self) -> None:
        step = self._step
        # a placeholder is where its parameter is
        for host in step.hosts:
            host.grads.hide()
        # each rank has taken its part of what all have written
        step.ranks.meet_on_node()
        for host in step.hosts:
            host.renew_masters(host.span)
        step.slots.forget_all()
