"""Look-ups in frozen embeddings whose weight is on the host alone.

The host looks up what a micro-batch asks for, into page-locked memory, and compute's
stream copies it to the device: the same bytes as a look-up there. The parameter itself
shows one element of poison, expanded to its shape, so that whoever reads it otherwise
gets no plausible numbers; a trace has seen that the model does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..types import Counters
from .calls import AroundCall
from .device import Device, Event
from .host_pool import host_buffer


class LookUp(AroundCall):
    """Answers what a frozen embedding looks up in its weight.

    What else the embedding's forward does, with another weight too, stays its own.

    Args:
        embedding: Its `weight` is the one.
    """

    def __init__(self, embedding: nn.Module) -> None:
        # not what a functional call has in its place
        self.weight: Any = embedding.weight
        super().__init__(embedding)

    def look_up(self, ids: Tensor) -> Tensor:
        """Give the rows, [*shape, width], of indices of any shape."""
        raise NotImplementedError

    def around(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with _Answering(self):
            return call(*args, **kwargs)


class _Answering(TorchFunctionMode):
    def __init__(self, asked: LookUp) -> None:
        super().__init__()
        self._asked = asked

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # a bound is one of the weight's own
        if (
            func is F.embedding
            and args[1] is self._asked.weight
            and kwargs["max_norm"] is None
        ):
            return self._asked.look_up(args[0])
        return func(*args, **(kwargs or {}))


class HostEmbedding(LookUp):
    """Answers an embedding's look-ups from host memory.

    Args:
        embedding: Its weight is on the host alone.
        table: That weight there.
        device: Where the rows go.
        counters: Their bytes are counted here.
    """

    def __init__(
        self, embedding: nn.Module, table: Tensor, device: Device, counters: Counters
    ) -> None:
        self._table, self._device, self._counters = table, device, counters
        self._room = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._copied: Event | None = None
        super().__init__(embedding)

    def remove(self) -> None:
        """Undo the binding and give the memory back. No copy may be in flight."""
        super().remove()
        self._take_room(0)

    @torch.no_grad()
    def look_up(self, ids: Tensor) -> Tensor:
        table, device = self._table, self._device
        shape = *ids.shape, table.shape[1]
        rows = torch.empty(shape, dtype=table.dtype, device=device.torch_device)
        # waits for compute, which may be making them
        wanted = ids.reshape(-1).cpu()
        if self._copied is not None:
            self._copied.synchronize()
        if self._room.numel() < rows.nbytes:
            self._take_room(rows.nbytes)
        room = self._room[: rows.nbytes]
        device.reads((table,))
        device.writes((room,))
        on_way = room.view(table.dtype).view(-1, table.shape[1])
        torch.index_select(table, 0, wanted, out=on_way)
        device.compute.copy(rows, on_way.view(shape))
        self._copied = device.compute.record()
        self._counters.fetched_bytes += rows.nbytes
        return rows

    def _take_room(self, nbytes: int) -> None:
        if self._room.numel():
            self._device.unpin(self._room)
        self._room = host_buffer(nbytes) if nbytes else self._room[:0]
        if nbytes:
            self._device.pin(self._room)
