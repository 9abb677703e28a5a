"""Some weights on the device between two passes, for who reads or changes them there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from ..errors import AccessError
from .full_params import FullParams
from .step import Step


class Visiting:
    """Brings parameters that `full_params` shows on the host to the device; called, a
    context inside of that one.

    Args:
        step: Of the session.
        full_params: Shows them.
    """

    def __init__(self, step: Step, full_params: FullParams) -> None:
        self._step, self._full_params = step, full_params
        self._chunks: dict[int, int] = {}
        self._shown: frozenset[int] | None = None

    @contextmanager
    def __call__(
        self, params: Iterable[nn.Parameter], writes: bool = False
    ) -> Iterator[None]:
        """Bind these to copies on the device inside; others stay as they are. With
        `writes` the host gets what was changed there.

        Raises:
            AccessError: Parameters are not shown.
            torch.OutOfMemoryError: There is no room for them; nothing has changed.
        """
        device, ranks = self._step.device, self._step.ranks
        chunks, copies = self._chunk_of(), list[tuple[nn.Parameter, Tensor, Tensor]]()
        for param in params:
            if id(param) in chunks and param.numel():
                home = param.data
                copy = device.allocate(home.nbytes).view(home.dtype).view(home.shape)
                device.compute.copy(copy, home)
                copies.append((param, home, copy))
        try:
            for param, _, copy in copies:
                param.data = copy
            # whoever sends them may do that on a stream of its own
            device.synchronize()
            yield
            device.synchronize()
            for param, home, _ in copies if writes else ():
                # of a node's ranks one takes a chunk over
                if chunks[id(param)] % ranks.world.local_size == ranks.local_rank:
                    device.offload.copy(home, param.data)
            device.synchronize()
        finally:
            for param, home, copy in copies:
                param.data = home
                device.free(copy)

    def _chunk_of(self) -> dict[int, int]:
        """The chunk of each parameter that is shown on the host."""
        step, shown = self._step, self._full_params.shown
        if shown is None or not self._full_params.shows_writes:
            raise AccessError(
                "weights visit the device inside of `full_params`, which all ranks enter"
            )
        if shown is not self._shown:
            self._shown = shown
            self._chunks = {
                id(step.params[spec.name]): index
                for index in shown
                for spec in step.store.on_host[index].tensors
                if spec.name in step.params
            }
        return self._chunks
