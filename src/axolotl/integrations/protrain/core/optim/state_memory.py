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

from ..runtime import Alone, Device, host_buffer
from ..runtime.arena import map_shared, open_of


class _Lies(NamedTuple):
    """Where the bytes of a tensor lie: a file of some process, and where in it."""

    process: int
    descriptor: int
    nbytes: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


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
        else:
            self._device.near(region, spread=True)
        return region

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

    def _place_of(self, value: Any) -> _Lies | Tensor | None:
        if type(value) is not Tensor:
            return None
        if value.device.type != "cpu":
            # its device is not the other rank's
            return value.cpu()
        first = value.data_ptr()
        for start, (descriptor, nbytes) in self._files.items():
            if start <= first < start + nbytes:
                shape, stride = tuple(value.shape), value.stride()
                where = os.getpid(), descriptor, nbytes, first - start
                return _Lies(*where, value.dtype, shape, stride)
        return None


def unpack(packed: bytes) -> dict[int, Any]:
    """The states of another rank: copy-on-write, as long as somebody holds them."""
    maps: dict[tuple[int, int], mmap.mmap] = {}

    def load(lies: _Lies | Tensor) -> Tensor:
        if isinstance(lies, Tensor):
            return lies
        where = lies.process, lies.descriptor
        if where not in maps:
            file = open_of(*where)
            maps[where] = mmap.mmap(file, lies.nbytes, flags=mmap.MAP_PRIVATE)
            os.close(file)
        numel = torch.Size(lies.shape).numel()
        flat = torch.frombuffer(
            maps[where], dtype=lies.dtype, count=numel, offset=lies.offset
        )
        return flat.as_strided(lies.shape, lies.stride)

    unpickler = pickle.Unpickler(io.BytesIO(packed))  # nosec B301 - of another rank
    unpickler.persistent_load = load  # type: ignore[method-assign]
    return unpickler.load()
