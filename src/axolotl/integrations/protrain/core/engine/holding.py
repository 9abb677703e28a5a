"""Chunks that page stay on the device for many forwards in a row, as generation has them.

# Note [Held chunks]

Between two steps no activation is alive, so there may be room for chunks that training
pages. A chunk that is held gets a slot of its own: it is fetched with its first use and
stays. The others go on through the ring, one after the other, as if those that are held
were resident. Parameters are bound to other addresses meanwhile, and to those of before
afterwards: a graph that is alive finds its weights where they were (Note [Stable
addresses]). A recorded step is applied in whatever slot a chunk has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from ..errors import AccessError
from .calls import inside_backward
from .full_params import FullParams
from .step import Step


class Holding:
    """Holds chunks on the device; called, a context.

    Args:
        step: Of the session.
        full_params: Hidden inside.
    """

    def __init__(self, step: Step, full_params: FullParams) -> None:
        self._step, self._full_params = step, full_params

    @contextmanager
    def __call__(self, chunks: Collection[int]) -> Iterator[None]:
        """Keep these of the paged chunks on the device inside.

        Raises:
            AccessError: A forward or backward pass runs.
            torch.OutOfMemoryError: There is no room; nothing has changed.
        """
        step = self._step
        if not chunks:
            yield
            return
        if step.slots.in_forward or inside_backward():
            raise AccessError(
                "chunks can be held on the device between two passes through the model, "
                "not inside of one"
            )
        self._full_params.hide()
        # what is bound there trains later
        normal = partial(torch.inference_mode, False)
        # no other slot knows of weights that one has still to send to the host
        step.device.synchronize()
        try:
            with normal():
                step.slots.hold(chunks)
                step.store.rebind(step.plan.paged, step.slots.buffer_for)
            yield
        finally:
            # a forward inside has shown them again where somebody looks
            self._full_params.hide()
            # weights that were updated in their slots may be on their way to the host
            step.device.synchronize()
            with normal():
                step.slots.let_go()
                step.store.rebind(step.plan.paged, step.slots.buffer_for)
            self._full_params.show_again()
