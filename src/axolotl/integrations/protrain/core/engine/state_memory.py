"""Host memory for optimizer state, which other ranks of the node can read.

Several ranks each have the state of the weights that they update, and one of them writes
checkpoints. So it lies in files without a name (`memfd_create`) that the writer maps, by
the process and the descriptor of who has them; what else there is of a state is pickled.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle  # nosec B403 - between ranks of one run
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .device import Device
from .host_pool import host_buffer, map_shared, open_of
from .ranks import Alone


class Place(NamedTuple):
    """Where a tensor of a state lies in a region; `stride` is None in plain order."""

    offset: int
    shape: torch.Size
    stride: tuple[int, ...] | None
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def on_host(self, region: Tensor) -> Tensor:
        """The tensor with a storage of its own: `torch.save` writes whole storages."""
        numel = self.shape.numel()
        if not numel:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(
            region.numpy(), dtype=self.dtype, count=numel, offset=self.offset
        )
        if self.stride is None:
            return flat.view(self.shape)
        return flat.as_strided(self.shape, self.stride)


Form = tuple[torch.Size, tuple[int, ...] | None, torch.dtype]
"""Shape, stride and dtype of a tensor; stride is None in plain order."""


def form_of(tensor: Tensor) -> Form:
    """The form of a tensor: products round by the order of their operands."""
    dense = None if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")
    return tensor.shape, None if dense is None else dense.stride(), tensor.dtype


class StateMemory:
    """Gives regions, uint8.

    Args:
        locks: Copies of the device reach them.
        shares: Other ranks read them.
    """

    def __init__(self, device: Device, locks: bool, shares: bool) -> None:
        self._device, self._locks, self._shares = device, locks, shares
        # descriptor and length of each region, by its address
        self._files: dict[int, tuple[int, int]] = {}

    def take(self, nbytes: int) -> Tensor:
        """A region of that many bytes."""
        if self._shares:
            memory, descriptor = map_shared(nbytes, Alone())
            region = torch.frombuffer(memory, dtype=torch.uint8)
            self._files[region.data_ptr()] = descriptor, nbytes
        else:
            region = host_buffer(nbytes)
        if self._locks:
            self._device.pin(region)
        return region

    def settle(self) -> None:
        """Return once no copy to a region is on its way."""
        self._device.synchronize()

    def release(self, region: Tensor) -> None:
        """It is not needed any longer; who still reads it may."""
        if self._locks:
            self._device.unpin(region)
        descriptor, _ = self._files.pop(region.data_ptr(), (None, 0))
        if descriptor is not None:
            os.close(descriptor)

    def pack(self, states: Mapping[int, Any]) -> bytes:
        """What another rank needs to see states, which do not change meanwhile."""
        packed = io.BytesIO()
        pickler = pickle.Pickler(packed)
        pickler.persistent_id = self._place_of  # type: ignore[method-assign]
        pickler.dump(dict(states))
        return packed.getvalue()

    def _place_of(self, value: Any) -> Tensor | tuple[int, int, int, Place] | None:
        """Its process, file and length of that, and where it lies there."""
        if type(value) is not Tensor:
            return None
        if value.device.type != "cpu":
            # its device is not the other rank's
            return value.cpu()
        first = value.data_ptr()
        for start, (descriptor, nbytes) in self._files.items():
            if start <= first < start + nbytes:
                place = Place(first - start, *form_of(value))
                return os.getpid(), descriptor, nbytes, place
        return None


def unpack(packed: bytes) -> dict[int, Any]:
    """The states of another rank: copy-on-write, as long as somebody holds them."""
    regions: dict[tuple[int, int], Tensor] = {}

    def load(lies: Tensor | tuple[int, int, int, Place]) -> Tensor:
        if isinstance(lies, Tensor):
            return lies
        process, descriptor, nbytes, place = lies
        if (process, descriptor) not in regions:
            file = open_of(process, descriptor)
            memory = mmap.mmap(file, nbytes, flags=mmap.MAP_PRIVATE)
            os.close(file)
            regions[process, descriptor] = torch.frombuffer(memory, dtype=torch.uint8)
        return place.on_host(regions[process, descriptor])

    unpickler = pickle.Unpickler(io.BytesIO(packed))  # nosec B301 - of another rank
    unpickler.persistent_load = load  # type: ignore[method-assign]
    return unpickler.load()
