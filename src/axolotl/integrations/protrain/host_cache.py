"""Keys and values of a generation in host memory, a layer of them on the device at a time.

# Note [A cache on the host]

For each token a layer reads all its keys and values once and adds one. So they may wait on
the host: those of the next layer come while one computes, through the ring of `Staging`
(Note [Staging protocol]), and what is new goes after them on the offload stream, behind
which the next fetch of that layer waits. The tensors that attention gets are those of
transformers' `DynamicCache`, joined by the same call, in the same order in memory: so are
its numbers.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from .core.engine.device import Device, Event
from .core.engine.host_pool import host_buffer
from .core.engine.staging import Source, Staging
from .core.types import IN_FLIGHT, Counters


class HostCache(Cache):
    """A cache whose layers are on the host; see Note [A cache on the host].

    Args:
        num_layers: Of the model, each with full attention.
        tokens: Of each sequence, at most.
        device: Whose streams carry it.
        counters: Get the bytes that are fetched and offloaded.
    """

    def __init__(
        self, num_layers: int, tokens: int, device: Device, counters: Counters
    ) -> None:
        self.tokens, self.device, self.counters = tokens, device, counters
        self.staging = Staging(device, counters)
        self._leaving: deque[tuple[Event, list[Tensor]]] = deque()
        self._all = [_HostLayer(self, number) for number in range(num_layers)]
        super().__init__(layers=[*self._all])

    def after(self, number: int) -> _HostLayer:
        """The layer that is read next, the first one after the last."""
        return self._all[(number + 1) % len(self._all)]

    def leaves(self, event: Event, memory: list[Tensor]) -> None:
        """Keep device memory until it has left; not that of many layers."""
        self._leaving.append((event, memory))
        while len(self._leaving) > IN_FLIGHT:
            # before its memory goes, which the queue holds
            self._leaving[0][0].synchronize()
            self._leaving.popleft()

    def close(self) -> None:
        """Let go of all memory, once nothing is copied."""
        self.device.synchronize()
        self._leaving.clear()
        self.staging.close()
        for layer in self._all:
            layer.close()


class _HostLayer(DynamicLayer):
    """Keys and values of a layer: for each token those of all rows, one after the other."""

    def __init__(self, cache: HostCache, number: int) -> None:
        super().__init__()
        self._cache, self._number = cache, number
        self._host: list[Tensor] = []
        self._shapes: list[tuple[int, ...]] = []
        self._length = 0
        self._left: Event | None = None

    def get_seq_length(self) -> int:
        return self._length

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        new, cache = (key_states, value_states), self._cache
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._allocate(new)
        whole = self._joined(new)
        self._send(new)
        following = cache.after(self._number)
        if following._length:
            cache.staging.fetch(following._number, following._sources())
        return whole

    def close(self) -> None:
        """Let go of host memory."""
        while self._host:
            self._cache.device.unpin(self._host.pop())

    def _allocate(self, new: tuple[Tensor, Tensor]) -> None:
        for tensor in new:
            rows, heads, _, width = tensor.shape
            shape = rows, heads, width
            self._shapes.append(shape)
            nbytes = self._cache.tokens * math.prod(shape) * tensor.itemsize
            self._host.append(host_buffer(nbytes))
            self._cache.device.pin(self._host[-1])

    def _joined(self, new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Join keys and values that were there, fetched, and new ones."""
        if not self._length:
            assert self.keys is not None and self.values is not None
            # as the plain layer joins its first ones
            keys, values = (
                torch.cat([empty, tensor], dim=-2)
                for empty, tensor in zip((self.keys, self.values), new, strict=True)
            )
            return keys, values
        staging = self._cache.staging
        parts = staging.take(self._number, self._sources())
        keys, values = (
            torch.cat(
                [
                    part.view(self.dtype).view(-1, *shape).permute(1, 2, 0, 3),
                    tensor,
                ],
                dim=-2,
            )
            for part, shape, tensor in zip(parts, self._shapes, new, strict=True)
        )
        device = self._cache.device
        device.reads(parts, device.compute)
        staging.give_back(self._number)
        return keys, values

    def _sources(self) -> list[Source]:
        return [
            Source(host[: self._bytes(number, self._length)], self._left)
            for number, host in enumerate(self._host)
        ]

    def _bytes(self, number: int, tokens: int) -> int:
        return tokens * math.prod(self._shapes[number]) * self.dtype.itemsize

    def _send(self, new: tuple[Tensor, Tensor]) -> None:
        device, stream = self._cache.device, self._cache.device.offload
        sent = [tensor.permute(2, 0, 1, 3).contiguous() for tensor in new]
        before, self._length = self._length, self._length + new[0].shape[-2]
        device.writes(sent, device.compute)
        stream.wait(device.compute.record())
        for number, (host, tensor) in enumerate(zip(self._host, sent, strict=True)):
            place = slice(
                self._bytes(number, before), self._bytes(number, self._length)
            )
            source = tensor.view(-1).view(torch.uint8)
            stream.copy(host[place], source)
            self._cache.counters.offloaded_bytes += source.nbytes
        self._left = stream.record()
        self._cache.leaves(self._left, sent)
