"""A slot: a device buffer at a fixed address, and the only owner of copy events.

# Note [Stable addresses]

A paged parameter's `.data` is a view into its slot in every pass, always at the same
address: what autograd, a custom function or a quantised matmul holds on to is valid again
when the chunk is back, and it is back before the block's backward. So there are no
placeholder tensors. Between two passes it may show its host copy for a while
(`Session.weights`), and between two attempts at a step, when no graph is alive,
`Session.replan` may change addresses.

# Note [Slot protocol]

Only `Slot` knows events, and prefetch, miss, evaluation, generation, recomputation and
loading all go through its five calls:

* `fetch` lets the copy wait for the last use of the buffer (`_last_use`) and for the way
  home of what was changed there (`_sent`), then queues it;
* `begin_use` lets compute wait for that copy (`_arrival`) before anybody reads;
* `send_back` lets a copy to the host wait for compute, which has changed the weights;
* `end_use` records the last use, after the last kernel that reads was queued;
* `overwritten` stands for kernels that wrote through the parameters: a last use, too.

What `holds` says is a promise of what the buffer will contain once the copy is through;
the events are the proof. The first `_last_use` is the fill in the constructor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from .device import POISON_BYTE, Device, Event, Stream
from .ranks import Alone, Ranks


class Transport:
    """Copies whole chunks to the device, or a rank's shard of them and gathers the rest.

    Args:
        device: Whose streams carry them.
        ranks: Of the node, each with a shard of every chunk; None where this one
            fetches whole chunks.
    """

    def __init__(self, device: Device, ranks: Ranks | None = None) -> None:
        self._device = device
        self._ranks = ranks or Alone()
        self._views: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def fetch(self, stream: Stream, buffer: Tensor, source: Tensor) -> Event:
        """Queue the bytes of one chunk and give the point at which all are there.

        Args:
            stream: Carries the copy.
            buffer: uint8, on the device, as large as the chunk or all its shards.
            source: uint8, on the host: the chunk, or this rank's shard.
        """
        part, whole = self._targets(buffer, source.numel())
        stream.copy(part, source)
        if part is whole:
            return stream.record()
        gathers = self._device.communicate
        gathers.wait(stream.record())
        gathers.call(partial(self._ranks.all_gather, whole, part), (whole,))
        return gathers.record()

    def forget_buffers(self) -> None:
        """Let go of the views of device buffers."""
        self._views.clear()

    def _targets(self, buffer: Tensor, nbytes: int) -> tuple[Tensor, Tensor]:
        # made once: slicing costs more than queueing the copy
        key = buffer.data_ptr(), nbytes
        if key not in self._views:
            size, rank = self._ranks.world.local_size, self._ranks.local_rank
            whole = part = buffer[: size * nbytes]
            if size > 1:
                part = whole[rank * nbytes : (rank + 1) * nbytes]
            self._views[key] = part, whole
        return self._views[key]


class Slot:
    """One device buffer that paged chunks share in turn; see Note [Slot protocol].

    Args:
        buffer: uint8 device tensor; its address never changes.
        device: Where the copies run.
        transport: Brings the chunks; by default copies them whole.

    Attributes:
        holds: The chunk that is in it or on its way; None: all must be fetched again.
    """

    def __init__(
        self,
        buffer: Tensor,
        device: Device,
        transport: Transport | None = None,
    ) -> None:
        self.buffer = buffer
        self.holds: int | None = None
        self._device = device
        self._transport = transport or Transport(device)
        self._arrival: Event | None = None
        self._sent: Event | None = None
        # a block that is read without being called must not find plausible bytes
        device.compute.fill(buffer, POISON_BYTE)
        self._last_use = device.compute.record()

    def fetch(self, chunk: int, source: Tensor) -> None:
        """Queue the transfer of a chunk into the slot; see `Transport.fetch`."""
        stream = self._device.fetch
        stream.wait(self._last_use)
        if self._sent is not None:
            stream.wait(self._sent)
        self._arrival = self._transport.fetch(stream, self.buffer, source)
        self.holds = chunk

    def release(self) -> None:
        """Let go of the device memory; the slot cannot be used again."""
        self._device.free(self.buffer)
        self._transport.forget_buffers()
        self.holds = None
        self.buffer = self.buffer.new_empty(0)

    def begin_use(self) -> None:
        """Order the reads that follow after the copy."""
        if self._arrival is not None:
            self._device.wait_stalled(self._arrival)
        self._device.begin_use(self.buffer)

    def end_use(self) -> None:
        """Order the next `fetch` after the reads so far."""
        self._device.end_use(self.buffer)
        self._last_use = self._device.compute.record()

    def send_back(self, home: Tensor) -> Event:
        """Queue the way home of what compute has changed: uint8, on the host."""
        self._sent = send_home(self._device, home, self.buffer)
        return self._sent

    def changed(self) -> None:
        """Compute has written into an open window."""
        self._device.end_use(self.buffer)
        self._device.writes([self.buffer], self._device.compute)
        self._device.begin_use(self.buffer)

    def forget(self) -> None:
        """The host has another copy."""
        self.holds = None

    def overwritten(self) -> None:
        """Compute has written through the parameters; order the next `fetch` after."""
        self._device.writes([self.buffer], self._device.compute)
        self._last_use = self._device.compute.record()
        self.holds = None


class InBuffer:
    """Weights of a chunk on the device, uint8, to be updated there; `renew` brings the
    host's copy back."""

    def __init__(
        self, device: Device, buffer: Tensor, home: Tensor, renew: Callable[[], None]
    ) -> None:
        self._device, self.buffer, self._home = device, buffer, home
        self._renew = renew

    def changed(self) -> None:
        """Compute has written them."""
        self._device.writes([self.buffer], self._device.compute)

    def send_back(self) -> Event:
        """Queue the way home of what compute has changed."""
        return send_home(self._device, self._home, self.buffer)

    def spoilt(self) -> None:
        """They are not to be used: compute has changed some of them."""
        self.changed()
        self._renew()


class InSlot(InBuffer):
    """The same in a slot whose window is open."""

    def __init__(self, device: Device, slot: Slot, home: Tensor) -> None:
        super().__init__(device, slot.buffer, home, slot.forget)
        self._slot = slot

    def changed(self) -> None:
        self._slot.changed()

    def send_back(self) -> Event:
        return self._slot.send_back(self._home)


def send_home(device: Device, home: Tensor, buffer: Tensor) -> Event:
    """Copy a changed chunk to its host memory, after what compute has queued."""
    device.offload.wait(device.compute.record())
    device.offload.copy(home, buffer[: home.numel()])
    return device.offload.record()
