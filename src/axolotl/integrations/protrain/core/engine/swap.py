"""Send what a block saves for backward to the host, and bring it back in time.

Bound with torch's saved-tensor hooks: autograd keeps a handle, the bytes wait in pinned
host memory. Whole storages travel, so that views keep their stride and offset and two
views of one storage stay views of one storage.

# Note [Tensors that several blocks save]

A storage is known by its identity and its version. The first block that saves it sends it,
into that block's region; whoever saves it later (rotary tables, masks) gets a handle of the
same `Swapped`, so it goes out once and comes back once, and one that has been written in
between goes again. Weights and their views never travel, nor do storages below
`SMALLEST_SWAP_BYTES`.

# Note [Memory of what is away]

The device memory of what has left is given back when compute has waited for the copy, at
the next swapping block's forward or after the last block's: compute waits, not the calling
thread, and kernels that get the memory come after. What somebody else has kept on the
device meanwhile is taken as it is. What comes back goes into memory that kernels before
this moment may still use, so the copy waits for compute; compute waits for the copy where
it is unpacked. When a block opens in backward its own tensors are queued first, then those
of the block before it, and the weights ahead come after both.

# Note [Finalizers]

What a signal handler raises inside a finalizer that is Python, as Ctrl-C does, is printed
and lost. So nothing of ours runs when a `Swapped` ends: a weak reference puts itself into a
deque, and `settle` does the rest. A copy that is under way keeps its target until then.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AccessError
from ..types import SMALLEST_SWAP_BYTES, Counters
from .calls import AroundCall
from .device import Device, Event
from .host_pool import host_buffer


class SwapRegion:
    """Pinned host memory for the storages of one block in one micro-batch.

    A slot the other way round. It may be filled again when no storage in it is `wanted`
    any more; compute has waited for all copies out of it then, and what is copied into
    it next waits for compute.

    Args:
        nbytes: What the plan expects; it grows where a batch is larger.
        swap: Counts its bytes.
    """

    def __init__(self, nbytes: int, swap: Swap) -> None:
        self._swap = swap
        self._buffers: list[Tensor] = []
        self.wanted: set[_Life] = set()
        self.claim()
        if nbytes:
            self._grow(nbytes)

    def claim(self) -> None:
        """Begin to fill it anew."""
        self._current = self._used = 0

    def reserve(self, nbytes: int) -> Tensor:
        """The next bytes, uint8 of shape [nbytes]."""
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
        for life in self.wanted:
            # a cycle of both would keep what has come back
            life.arriving = None
        while self._buffers:
            self._swap.device.unpin(self._buffers.pop())

    def _grow(self, nbytes: int) -> None:
        buffer = host_buffer(nbytes)
        self._swap.device.pin(buffer)
        self._buffers.append(buffer)
        self._swap.host_bytes += nbytes


class Swapped:
    """One storage that waits on the host; `version` is that of the tensor which was saved,
    `swap` sends it."""

    life: _Life
    host: Tensor

    def __init__(self, storage: torch.UntypedStorage, version: int, swap: Swap) -> None:
        self._swap, self._device = swap, swap.device
        self._nbytes = storage.nbytes()
        self._original = weakref.ref(storage)
        self._version = version
        self._here: torch.UntypedStorage | None = None

    def is_of(self, storage: torch.UntypedStorage, version: int) -> bool:
        """Return whether it holds what `storage` holds now."""
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
        device.fetch.copy(target, self.host)
        self._here = target.untyped_storage()
        self.life.arriving = device.fetch.record(), self._here
        self._swap.counters.swapped_in_bytes += self._nbytes

    def tensor(self, dtype: torch.dtype, *strided: Any) -> Tensor:
        """A view of its bytes on the device, readable by compute."""
        self.fetch()
        self.life.arrive(self._device)
        assert self._here is not None
        self._device.reads([_view(self._here, torch.uint8)], self._device.compute)
        return _view(self._here, dtype, *strided)


class _Life(weakref.ref[Swapped]):
    """Life of a `Swapped`: whether it is still wanted, and what is under way for it."""

    __slots__ = ("arriving", "key", "region")
    key: int
    region: SwapRegion
    arriving: tuple[Event, torch.UntypedStorage] | None

    def arrive(self, device: Device) -> None:
        """Let compute wait for the copy that is under way, if any."""
        arriving, self.arriving = self.arriving, None
        if arriving is not None:
            device.wait_stalled(arriving[0])


class Swap:
    """The swapping blocks of a model.

    Args:
        device: Between which and the host they travel.
        weights: Tensors that never do, nor views of them: parameters, buffers, slots.
        block_bytes: For each block what it is expected to send, by index.
        counters: Bytes each way are counted here.

    Attributes:
        host_bytes: Host memory taken for them.
    """

    def __init__(
        self,
        device: Device,
        weights: Collection[Tensor],
        block_bytes: dict[int, int],
        counters: Counters | None = None,
    ) -> None:
        self.device = device
        self._weights = {weight.untyped_storage()._cdata for weight in weights}
        self._block_bytes = block_bytes
        self._regions: dict[int, list[SwapRegion]] = {}
        self._known: dict[int, _Life] = {}
        self._ended: deque[_Life] = deque()
        self._of_block: dict[int, list[_Life]] = {}
        self._leaving: list[tuple[Event, Tensor]] = []
        self.counters = counters or Counters()
        self.host_bytes = 0

    def saving(self, block: int) -> torch.autograd.graph.saved_tensors_hooks:
        """A context in which tensors saved for backward go to the host.

        Entered once for each forward of a block.
        """
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            raise AccessError(
                f"block {block} sends what it saves to the host, and saved_tensors_hooks "
                "of somebody else's (a checkpoint around several blocks, an offload of "
                "activations) are around it, which would see none of it. Set "
                "protrain_n_swap_override: 0."
            )
        self.settle()
        region = self._claim(block)
        swapped = self._of_block[block] = []

        def pack(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
            if not self._swaps(tensor):
                # a node that keeps its own result would never be freed without backward
                return tensor if tensor.is_leaf else tensor.detach()
            storage, version = tensor.untyped_storage(), tensor._version
            life = self._known.get(storage._cdata)
            known = life() if life is not None else None
            if known is None or not known.is_of(storage, version):
                known = self._send(storage, version, region)
            swapped.append(known.life)
            strided = tensor.storage_offset(), tensor.shape, tensor.stride()
            return partial(known.tensor, tensor.dtype, *strided)

        return torch.autograd.graph.saved_tensors_hooks(pack, _unpack)

    def open_backward(self, block: int) -> None:
        """Backward has come to a block: its tensors first, then the next one's."""
        self.settle()
        for number in (block, block - 1):
            for life in self._of_block.pop(number, ()):
                swapped = life()
                if swapped is not None:
                    swapped.fetch()

    def _send(
        self, storage: torch.UntypedStorage, version: int, region: SwapRegion
    ) -> Swapped:
        """Queue the way of a storage into a region."""
        device, source = self.device, _view(storage, torch.uint8)
        swapped = Swapped(storage, version, self)
        swapped.life = life = _Life(swapped, self._ended.append)
        life.key, life.region, life.arriving = storage._cdata, region, None
        self._known[life.key] = life
        region.wanted.add(life)
        swapped.host = region.reserve(source.nbytes)
        device.offload.wait(device.compute.record())
        device.offload.copy(swapped.host, source)
        self.counters.swapped_out_bytes += source.nbytes
        event = device.offload.record()
        if not event.query():
            # it must live until then
            self._leaving.append((event, source))
        return swapped

    def settle(self) -> None:
        """Give the memory of what has left to the kernels that follow, and that of what
        has ended: see Note [Finalizers]."""
        for event, _source in self._leaving:
            self.device.compute.wait(event)
        self._leaving = []
        while self._ended:
            # taken off at the end: after an interrupt all of it is done again
            life = self._ended[0]
            # the memory may be given to a kernel next, and the copy may not be done
            life.arrive(self.device)
            life.region.wanted.discard(life)
            if self._known.get(life.key) is life:
                del self._known[life.key]
            self._ended.popleft()

    def remove(self) -> None:
        """Release the host memory; the device is idle."""
        self._leaving = []
        self._ended.clear()
        self._of_block.clear()
        for regions in self._regions.values():
            for region in regions:
                region.close()
        self._regions.clear()

    def _claim(self, block: int) -> SwapRegion:
        regions = self._regions.setdefault(block, [])
        region = next((region for region in regions if not region.wanted), None)
        if region is None:
            # also a second forward before the first one's backward
            region = SwapRegion(self._block_bytes.get(block, 0), self)
            regions.append(region)
        region.claim()
        return region

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


class SwapBlock(AroundCall):
    """Swaps what one block saves, hooks included."""

    def __init__(self, block: nn.Module, index: int, swap: Swap) -> None:
        self._swap, self._index = swap, index
        super().__init__(block)

    def around(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        with self._swap.saving(self._index):
            return call(*args, **kwargs)


def _unpack(packed: Tensor | Callable[[], Tensor]) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed()


def _view(storage: torch.UntypedStorage, dtype: torch.dtype, *strided: Any) -> Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *strided)
