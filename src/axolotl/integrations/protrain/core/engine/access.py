"""Reads and writes of a model's and an optimizer's state, between two passes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import Tensor, nn

from ..errors import AccessError
from ..types import Chunk
from .full_params import FullParams
from .param_store import on_the_disk
from .saved_state import SavedState
from .step import Step


class StateAccess:
    """Settles what is under way before somebody reads or writes state.

    Args:
        step: The training step.
        full_params: Shows parameters.

    Attributes:
        saved_state: Optimizer state as it is read and saved.
    """

    def __init__(self, step: Step, full_params: FullParams) -> None:
        self._step, self._full_params = step, full_params
        self.saved_state = SavedState(step.updates, step.memory)

    @property
    def shows_writes(self) -> bool:
        """True while the parameters themselves are the truth."""
        return self._full_params.shows_writes

    def before_read(self, host: Collection[Tensor]) -> None:
        """Somebody is about to read these host tensors of the model's state."""
        step = self._step
        step.due.settle()
        step.device.reads(host)

    def before_load(self, host: Collection[Tensor]) -> None:
        """Somebody is about to write these host tensors of the model's state, on all ranks
        of a node, which share them."""
        self._begin_load()
        self._step.device.writes(host)

    def _begin_load(self) -> None:
        """Return once no rank of the node reads weights for a pass before the load."""
        step = self._step
        step.due.settle()
        step.device.synchronize()
        if not self.shows_writes:
            # else each writes pages of its own
            step.ranks.meet_on_node()

    def remember(self, names: Iterable[str]) -> None:
        """Remember parameters as they are bound now."""
        self._step.store.remember(names)

    def after_load(self, chunk: Chunk) -> None:
        """A load wrote the host tensors of a chunk.

        Raises:
            AccessError: The chunk is on the disk, and the load wrote other values.
        """
        step = self._step
        if step.store.undo_writes(chunk):
            raise AccessError(on_the_disk(chunk))
        for host in step.hosts:
            if host.chunk is chunk:
                host.renew_masters(range(len(host.params)))
        self._renew_on_device([chunk.index])

    def _renew_on_device(self, chunks: Iterable[int]) -> None:
        """Have these chunks, of which the host has other values now, fetched again."""
        step = self._step
        step.slots.forget_all()
        if not self.shows_writes:
            step.due.stale.update(c for c in chunks if c not in step.plan.away)
            step.due.refresh_stale()

    def before_state_access(self) -> None:
        """Somebody is about to read or write optimizer state."""
        step = self._step
        if not step.updates.own_code:
            step.due.apply_all()
            self.saved_state.require_gathered()
            self.saved_state.order_new()

    def load_masters(self, saved: Mapping[nn.Parameter, Tensor]) -> None:
        """Overwrite fp32 masters, and weights with them."""
        step = self._step
        self._full_params.hide()
        self._begin_load()
        self.saved_state.load_masters(saved)
        found = (step.updates.place_of(param)[0] for param in saved)
        self._renew_on_device(own.host.chunk.index for own in found if own is not None)
        self._full_params.show_again()

    def copying(self, module: nn.Module) -> None:
        """A module is about to be copied, after its own parameters."""
        step = self._step
        if not step.closed:
            self._full_params.before_copy(module)
