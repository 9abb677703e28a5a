"""Send what a block saves for backward to the host, and bring it back in time.

Bound with torch's saved-tensor hooks: autograd keeps a handle, the bytes wait in pinned
host memory. Whole storages travel, so that views keep their stride and offset and two
views of one storage stay views of one storage.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from ..types import SMALLEST_SWAP_BYTES
from .arena import host_buffer
from .device import Device, Event


class SwapRegion:
    """Pinned host memory for the storages of one block in one micro-batch.

    A slot the other way round. It is free again when no storage in it is wanted any
    more; compute has waited for all copies out of it then, and what is copied into it
    next waits for compute.

    Args:
        nbytes: What the plan expects; it grows where a batch is larger.
        device: Whose copies use it.
        taken: Told the bytes of each piece of host memory.
    """

    def __init__(
        self, nbytes: int, device: Device, taken: Callable[[int], None]
    ) -> None:
        self._device = device
        self._taken = taken
        self._buffers: list[Tensor] = []
        self._current = self._used = 0
        self._wanted: weakref.WeakSet[Swapped] = weakref.WeakSet()
        if nbytes:
            self._grow(nbytes)

    @property
    def free(self) -> bool:
        """True when nothing in it is wanted any more."""
        return not self._wanted

    def claim(self) -> None:
        """Begin to fill it anew."""
        self._current = self._used = 0

    def reserve(self, nbytes: int, owner: Swapped) -> Tensor:
        """The next bytes, uint8 of shape [nbytes], as long as `owner` lives."""
        self._wanted.add(owner)
        while self._current < len(self._buffers):
            buffer = self._buffers[self._current]
            if self._used + nbytes <= buffer.numel():
                start, self._used = self._used, self._used + nbytes
                return buffer[start : self._used]
            self._current, self._used = self._current + 1, 0
        self._grow(nbytes)
        self._used = nbytes
        return self._buffers[self._current]

    def close(self) -> None:
        """Give the memory back. No copy may be in flight."""
        while self._buffers:
            self._device.unpin(self._buffers.pop())

    def _grow(self, nbytes: int) -> None:
        buffer = host_buffer(nbytes)
        self._device.pin(buffer)
        self._buffers.append(buffer)
        self._taken(nbytes)


class Swapped:
    """One storage that waits on the host.

    Args:
        storage: Its bytes on the device.
        region: Where they wait.
        swap: Counts the copies, and keeps the storage until it has left.
    """

    def __init__(
        self,
        storage: torch.UntypedStorage,
        version: int,
        region: SwapRegion,
        swap: Swap,
    ) -> None:
        # first: what fails below must not fail again in `__del__`
        self._arrival: Event | None = None
        self._device = device = swap.device
        self._swap = swap
        self._nbytes = storage.nbytes()
        self._original = weakref.ref(storage)
        self._version = version
        self._here: torch.UntypedStorage | None = None
        self._host = region.reserve(self._nbytes, self)
        source = _bytes(storage, device.torch_device)
        device.offload.wait(device.compute.record())
        device.offload.copy(self._host, source)
        swap.left(device.offload.record(), source)

    def __del__(self) -> None:
        # the memory may be given to a kernel next, and the copy may not be done
        self._await()

    def is_of(self, storage: torch.UntypedStorage, version: int) -> bool:
        """Whether it holds what `storage` holds now."""
        return self._original() is storage and self._version == version

    def fetch(self) -> None:
        """Queue its way back; does nothing if it is there."""
        if self._here is not None:
            return
        # somebody else has kept it on the device
        self._here = self._original()
        if self._here is not None:
            return
        device = self._device
        target = torch.empty(
            self._nbytes, dtype=torch.uint8, device=device.torch_device
        )
        # kernels before this moment may still use that memory; and compute has waited
        # for the copy out, or the original would be here
        device.fetch.wait(device.compute.record())
        device.fetch.copy(target, self._host)
        self._arrival = device.fetch.record()
        self._here = target.untyped_storage()
        self._swap.fetched_bytes += self._nbytes
        self._swap.num_fetches += 1

    def storage(self) -> torch.UntypedStorage:
        """Its bytes on the device, readable by compute."""
        self.fetch()
        self._await()
        assert self._here is not None
        device = self._device
        device.reads([_bytes(self._here, device.torch_device)], device.compute)
        return self._here

    def _await(self) -> None:
        arrival, self._arrival = self._arrival, None
        if arrival is not None:
            self._device.wait_stalled(arrival)


class _Handle:
    """What autograd keeps in place of a tensor."""

    def __init__(self, swapped: Swapped, tensor: Tensor) -> None:
        self._swapped = swapped
        self._dtype = tensor.dtype
        self._view = tensor.storage_offset(), tensor.shape, tensor.stride()

    def unpack(self) -> Tensor:
        storage = self._swapped.storage()
        empty = torch.empty(0, dtype=self._dtype, device=storage.device)
        return empty.set_(storage, *self._view)


class Swap:
    """The swapping blocks of a model.

    Args:
        device: Between which and the host they travel.
        weights: Tensors that never do, nor views of them: parameters, buffers, slots.
        block_bytes: For each block what it is expected to send, by index.

    Attributes:
        offloaded_bytes: Sent to the host so far.
        fetched_bytes: Brought back so far.
        num_offloads: Storages sent.
        num_fetches: Storages brought back.
        host_bytes: Host memory taken for them.
    """

    def __init__(
        self, device: Device, weights: Collection[Tensor], block_bytes: dict[int, int]
    ) -> None:
        self.device = device
        self._weights = {weight.untyped_storage()._cdata for weight in weights}
        self._block_bytes = block_bytes
        self._regions: dict[int, list[SwapRegion]] = {}
        self._known: weakref.WeakValueDictionary[int, Swapped] = (
            weakref.WeakValueDictionary()
        )
        self._of_block: dict[int, list[weakref.ref[Swapped]]] = {}
        self._leaving: list[tuple[Event, Tensor]] = []
        self.offloaded_bytes = self.fetched_bytes = 0
        self.num_offloads = self.num_fetches = self.host_bytes = 0

    def saving(self, block: int) -> torch.autograd.graph.saved_tensors_hooks:
        """A context in which tensors saved for backward go to the host.

        Entered once for each forward of a block.
        """
        self.settle()
        region = self._claim(block)
        swapped = self._of_block[block] = []

        def pack(tensor: Tensor) -> Tensor | _Handle:
            if not self._swaps(tensor):
                return tensor
            storage, version = tensor.untyped_storage(), tensor._version
            known = self._known.get(storage._cdata)
            if known is None or not known.is_of(storage, version):
                known = Swapped(storage, version, region, self)
                self._known[storage._cdata] = known
            swapped.append(weakref.ref(known))
            return _Handle(known, tensor)

        return torch.autograd.graph.saved_tensors_hooks(pack, _unpack)

    def open_backward(self, block: int) -> None:
        """Backward has come to a block: its tensors first, then the next one's."""
        self.settle()
        for number in (block, block - 1):
            for reference in self._of_block.pop(number, ()):
                swapped = reference()
                if swapped is not None:
                    swapped.fetch()

    def left(self, event: Event, source: Tensor) -> None:
        """A copy to the host is queued; `source` must live until `event`."""
        self.offloaded_bytes += source.nbytes
        self.num_offloads += 1
        if not event.query():
            self._leaving.append((event, source))

    def settle(self) -> None:
        """Give the memory of what has left to the kernels that follow."""
        for event, _source in self._leaving:
            self.device.compute.wait(event)
        self._leaving = []

    def count_on(self, before: Swap) -> None:
        """Go on from the counters of one that has been closed."""
        self.offloaded_bytes += before.offloaded_bytes
        self.fetched_bytes += before.fetched_bytes
        self.num_offloads += before.num_offloads
        self.num_fetches += before.num_fetches

    def close(self) -> None:
        """Release the host memory; the device is idle."""
        self._leaving = []
        self._of_block.clear()
        for regions in self._regions.values():
            for region in regions:
                region.close()
        self._regions.clear()

    def _claim(self, block: int) -> SwapRegion:
        regions = self._regions.setdefault(block, [])
        region = next((region for region in regions if region.free), None)
        if region is None:
            # also a second forward before the first one's backward
            expected = self._block_bytes.get(block, 0)
            region = SwapRegion(expected, self.device, self._take)
            regions.append(region)
        region.claim()
        return region

    def _take(self, nbytes: int) -> None:
        self.host_bytes += nbytes

    def _swaps(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor
            and tensor.device.type == self.device.torch_device.type
            and tensor.layout is torch.strided
            and not tensor.is_conj()
            and not tensor.is_neg()
            and tensor.untyped_storage().nbytes() >= SMALLEST_SWAP_BYTES
            and tensor.untyped_storage()._cdata not in self._weights
        )


class SwapBlock:
    """Swaps what one block saves, from its pre-hook to its hook."""

    def __init__(self, block: nn.Module, index: int, swap: Swap) -> None:
        self._saving: torch.autograd.graph.saved_tensors_hooks | None = None

        def begin(_block: nn.Module, _args: Any) -> None:
            if torch.is_grad_enabled():
                self._saving = swap.saving(index)
                self._saving.__enter__()

        def end(_block: nn.Module, _args: Any, _output: Any) -> None:
            self.unwind()

        self._handles = [
            block.register_forward_pre_hook(begin),
            block.register_forward_hook(end, prepend=True, always_call=True),
        ]

    def unwind(self) -> None:
        """Leave a forward that an interruption left half done."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.__exit__()

    def remove(self) -> None:
        """Undo the binding."""
        self.unwind()
        for handle in self._handles:
            handle.remove()


def _unpack(packed: Tensor | _Handle) -> Tensor:
    return packed.unpack() if isinstance(packed, _Handle) else packed


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
