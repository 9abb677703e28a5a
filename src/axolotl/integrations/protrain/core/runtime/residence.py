"""Where the parameters of an open model live, and how they got there and get back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from ..types import Chunk
from .arena import Arena, return_freed_memory
from .device import Device


class Residence:
    """Moves a model into arena, slots and device, and out again.

    Args:
        model: Its parameters keep their identity; only `.data` is bound anew.
        chunks: The host-kept chunks.
        arena: Holds their bytes.
        device_bytes: For each of them, by index, the device buffer (uint8) that its
            parameters are views of: a slot, or memory of its own.
        device: Everything else moves there.
        announce: Called for each chunk once its bytes are in the arena and before its
            parameters point elsewhere: from here on readers must be told.
    """

    def __init__(
        self,
        model: nn.Module,
        chunks: Sequence[Chunk],
        arena: Arena,
        device_bytes: Mapping[int, Tensor],
        device: Device,
        announce: Callable[[Chunk], None],
    ) -> None:
        self._model = model
        self._params = dict(model.named_parameters())
        self._chunks = chunks
        self._arena = arena
        self._device_bytes = device_bytes
        self._device = device
        self._announce = announce
        self._moved: list[Chunk] = []
        self.refreshed_bytes = 0

    def move_in(self) -> None:
        """Bind every parameter to its place, one chunk at a time."""
        on_host = {spec.name for chunk in self._chunks for spec in chunk.tensors}
        # first: one small view would keep a whole mapped shard of the file alive
        for name, param in self._params.items():
            if name not in on_host:
                param.data = self._device.place(param.data)
        for buffer in self._model.buffers():
            buffer.data = self._device.place(buffer.data)
        for chunk in self._chunks:
            self._move_chunk(chunk)

    def move_out(self) -> None:
        """Bind every parameter to plain host memory; undoes a partial `move_in` too."""
        for chunk in self._moved:
            for spec in chunk.tensors:
                self._params[spec.name].data = self._arena.tensor(chunk.index, spec)
        self._moved = []
        self._device_bytes = {}
        for param in self._params.values():
            # a gradient may not stay behind on another device
            param.grad = None
            param.data = param.data.cpu()
        for buffer in self._model.buffers():
            buffer.data = buffer.data.cpu()

    def refresh(self, chunk: Chunk) -> None:
        """Queue the copy of a chunk's host weights to the device, on compute."""
        for spec in chunk.tensors:
            self._device.compute.copy(
                self._params[spec.name].data, self._arena.tensor(chunk.index, spec)
            )
        self.refreshed_bytes += chunk.nbytes

    def _move_chunk(self, chunk: Chunk) -> None:
        buffer = self._device_bytes[chunk.index]
        for spec in chunk.tensors:
            self._arena.tensor(chunk.index, spec).copy_(self._params[spec.name].data)
        self._announce(chunk)
        self._moved.append(chunk)
        for spec in chunk.tensors:
            view = buffer[spec.offset : spec.offset + spec.nbytes]
            # the only rebinding until `move_out`; frees the original
            self._params[spec.name].data = view.view(spec.dtype).view(spec.shape)
        return_freed_memory()
