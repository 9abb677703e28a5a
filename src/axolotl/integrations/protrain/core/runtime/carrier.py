"""How the bytes of a chunk get from the host into a device buffer."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from .device import Device, Event, Stream
from .ranks import Ranks


class Carrier:
    """Copies whole chunks, or this rank's shard of them and gathers the others'.

    Args:
        device: Whose streams carry them.
        ranks: Of the node, each with a shard of every chunk; None where this one
            fetches whole chunks.
    """

    def __init__(self, device: Device, ranks: Ranks | None = None) -> None:
        self._device = device
        self._ranks = ranks
        self._views: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def bring(self, stream: Stream, buffer: Tensor, source: Tensor) -> Event:
        """Queue the bytes of one chunk.

        Args:
            stream: Carries the copy.
            buffer: uint8, on the device, as large as the chunk or all its shards.
            source: uint8, on the host: the chunk, or this rank's shard.

        Returns:
            The point at which all of them are there.
        """
        part, whole = self._targets(buffer, source.numel())
        stream.copy(part, source)
        if self._ranks is None:
            return stream.record()
        gathers = self._device.communicate
        gathers.wait(stream.record())
        gathers.call(partial(self._ranks.all_gather, whole, part), (whole,))
        return gathers.record()

    def _targets(self, buffer: Tensor, nbytes: int) -> tuple[Tensor, Tensor]:
        # made once: slicing costs more than queueing the copy
        key = buffer.data_ptr(), nbytes
        if key not in self._views:
            if self._ranks is None:
                whole = part = buffer[:nbytes]
            else:
                start = self._ranks.local_rank * nbytes
                part = buffer[start : start + nbytes]
                whole = buffer[: self._ranks.world.local_size * nbytes]
            self._views[key] = part, whole
        return self._views[key]

    def forget_buffers(self) -> None:
        """Let go of the views of device buffers."""
        self._views.clear()
