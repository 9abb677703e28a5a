"""A slot: a device buffer at a fixed address, and the only owner of copy events."""

from __future__ import annotations

from torch import Tensor

from .carrier import Carrier
from .device import POISON_BYTE, Device, Event


class Slot:
    """One device buffer that paged chunks share in turn.

    Protocol: `fetch` waits for the last use before it writes; `begin_use` waits for
    the copy before anyone reads; `end_use` marks the last use. `holds` is a promise,
    the events are the proof.

    Args:
        buffer: uint8 device tensor; its address never changes.
        device: Where the copies run.
        poison: Fill the buffer with NaN bytes when its chunk leaves.
        carrier: Brings the chunks; by default copies them whole.
    """

    def __init__(
        self,
        buffer: Tensor,
        device: Device,
        poison: bool,
        carrier: Carrier | None = None,
    ) -> None:
        self.buffer = buffer
        self.holds: int | None = None
        self._device = device
        self._poison = poison
        self._carrier = carrier or Carrier(device)
        self._arrival: Event | None = None
        # a block that is read without being called must not find plausible bytes
        device.compute.fill(buffer, POISON_BYTE)
        self._last_use = device.compute.record()

    def fetch(self, chunk: int, source: Tensor) -> None:
        """Queue the transfer of a chunk into the slot; see `Carrier.bring`."""
        stream = self._device.fetch
        stream.wait(self._last_use)
        if self._poison:
            stream.fill(self.buffer, POISON_BYTE)
        self._arrival = self._carrier.bring(stream, self.buffer, source)
        self.holds = chunk

    def release(self) -> None:
        """Let go of the device memory; the slot cannot be used again."""
        self._device.free(self.buffer)
        self._carrier.forget_buffers()
        self.holds = None
        self.buffer = self.buffer.new_empty(0)

    def forget(self) -> None:
        """The host copy changed: the content is stale and must be fetched again."""
        self.holds = None

    def begin_use(self) -> None:
        """Order the reads that follow after the copy."""
        if self._arrival is not None:
            self._device.wait_stalled(self._arrival)
        self._device.begin_use(self.buffer)

    def end_use(self) -> None:
        """Order the next `fetch` after the reads so far."""
        self._device.end_use(self.buffer)
        self._last_use = self._device.compute.record()

    def overwritten(self) -> None:
        """Compute has written through the parameters; order the next `fetch` after."""
        self._device.writes([self.buffer], self._device.compute)
        self._last_use = self._device.compute.record()
        self.forget()
