"""Where the parameters of an open model live, and how they got there and get back.

# Note [Who reads the state]

Ctrl-C saves the model at any moment, so at every moment a reader of the state has to find
the truth. A chunk's `state_dict` hooks are there before its parameters point at a slot, and
go after they are back. They wait for host updates and answer with arena tensors that have
storages of their own, so that `save_pretrained` neither clones them nor takes them for
shared; a load waits for copies as well, writes the arena, and through the parameters into
whatever slot they point at, which is stale then. Frozen bytes only move host to device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..layout.tensors import (
    Binding,
    hold_packing,
    model_bindings,
    parameter_name,
    release_packing,
)
from ..types import Chunk, Counters
from .arena import Arena, return_freed_memory
from .device import Device
from .hooks import Removable, StateAccess, attach_state_dict
from .pager import Ring
from .ranks import Ranks


class Residence:
    """Moves a model into arena, slots and device, and out again.

    Args:
        model: Its parameters keep their identity; only `.data` is bound anew, and the
            tensors in the quant state of quantised ones.
        arena: Holds the bytes of host-kept chunks.
        device: Everything else moves there.
        access: Called around reads and loads of the state of host-kept chunks.
        ranks: Fill a shared arena together, each its part.
        absent: Names of frozen parameters that this rank has in name only.
        counters: Refreshed bytes are counted here.
    """

    def __init__(
        self,
        model: nn.Module,
        arena: Arena,
        device: Device,
        access: StateAccess,
        ranks: Ranks,
        absent: Collection[str],
        counters: Counters,
    ) -> None:
        self._ranks = ranks
        # local rank that has a parameter's bytes, where not every rank does
        self._holders = ranks.holders(absent)
        self._model = model
        self._bindings = model_bindings(model)
        self._arena = arena
        self._device = device
        self._access = access
        self._counters = counters
        self._moved: dict[int, Chunk] = {}
        self._held: list[nn.Module] | None = None
        self._state_handles: list[Removable] = []

    def move_in(
        self, chunks: Sequence[Chunk], buffer_of: Callable[[Chunk], Tensor]
    ) -> None:
        """Bind every parameter to its place, one chunk at a time.

        Args:
            chunks: The host-kept chunks; a later call names those that move again.
            buffer_of: Gives the device buffer (uint8) that the parameters of a chunk
                become views of: a slot, or memory of its own.
        """
        if self._held is None:
            self._held = hold_packing(self._model)
            self._place_others({s.name for chunk in chunks for s in chunk.tensors})
        for chunk in chunks:
            self._move_chunk(chunk, buffer_of)

    def unload(self, chunks: Iterable[int]) -> None:
        """Bind host-kept chunks to the arena, so that their buffers may go."""
        for index in chunks:
            for spec in self._moved[index].tensors:
                self._bindings[spec.name].bind(self._arena.tensor(index, spec))

    def move_out(self) -> None:
        """Bind every parameter to plain host memory; undoes a partial `move_in` too."""
        self.unload(self._moved)
        self._moved = {}
        for param in self._model.parameters():
            # a gradient may not stay behind on another device
            param.grad = None
        for binding in self._bindings.values():
            binding.bind(binding.tensor.cpu())
        for buffer in self._model.buffers():
            buffer.data = buffer.data.cpu()
        release_packing(self._held or [])
        self._held = []

    def detach_state(self) -> None:
        """Readers of the state find it without being told: everything has moved out."""
        while self._state_handles:
            self._state_handles.pop().remove()

    def refresh(self, chunk: Chunk, ring: Ring) -> None:
        """Queue the transfer of a chunk's host weights into its own buffer, on compute."""
        first = self._bindings[chunk.tensors[0].name].tensor
        storage = first.untyped_storage()
        buffer = torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage)
        compute = self._device.compute
        compute.wait(ring.fetch(compute, buffer, chunk.index))
        self._counters.fetched_bytes += ring.source(chunk.index).nbytes

    def _attach_state(self, chunk: Chunk) -> None:
        """Let `state_dict` and `load_state_dict` reach a chunk's host copy.

        Bound to the modules that register its parameters, tied names included.
        """
        host = {id(self._bindings[spec.name].owner): spec for spec in chunk.tensors}
        for module in self._model.modules():
            own = {
                name: host[id(param)]
                for name, param in module.named_parameters(recurse=False)
                if id(param) in host
            }
            if not own:
                continue
            tensors = {n: self._arena.tensor(chunk.index, s) for n, s in own.items()}
            self._state_handles += [
                *self._attach_side_state(module, chunk, [s.name for s in own.values()]),
                *attach_state_dict(module, chunk, tensors, self._access),
            ]

    def _attach_side_state(
        self, owner: nn.Module, chunk: Chunk, params: Collection[str]
    ) -> list[Removable]:
        """Let `state_dict` read the quant state of a module's weights on the host.

        Its tensors are not parameters: bitsandbytes turns them into entries, some into
        plain numbers, while it reads the module. So it must see the host copies then.
        `params` are the names of the weights from the model root.
        """
        prefixes = tuple(f"{name}." for name in params)
        side = [
            (self._bindings[spec.name], self._arena.tensor(chunk.index, spec))
            for spec in chunk.tensors
            if spec.name.startswith(prefixes)
        ]
        if not side:
            return []
        # a stack: an interrupt may read the state in the middle of a read
        bound: list[list[tuple[Binding, Tensor]]] = []

        def show_host(*_: Any) -> None:
            bound.append([(binding, binding.tensor) for binding, _ in side])
            for binding, host in side:
                binding.bind(host)

        def show_device(*_: Any) -> None:
            for binding, tensor in bound.pop():
                binding.bind(tensor)

        return [
            owner.register_state_dict_pre_hook(show_host),
            owner.register_state_dict_post_hook(show_device),
        ]

    def _fills(self, chunk: Chunk, number: int) -> bool:
        filler = self._holder(chunk.tensors[number].name)
        if filler is None:
            # what trains may have begun at random: there the first rank's values count
            filler = 0 if chunk.trainable else number % self._ranks.world.local_size
        return self._ranks.local_rank == filler

    def _holder(self, binding: str) -> int | None:
        return self._holders.get(parameter_name(binding))

    def _place_others(self, on_host: set[str]) -> None:
        # first: one small view would keep a whole mapped shard of the file alive
        for name, binding in self._bindings.items():
            if name not in on_host:
                holder = self._holder(name)
                if holder is not None:
                    self._ranks.spread_on_node(binding.tensor, holder)
                binding.bind(self._device.place(binding.tensor))
        for buffer in self._model.buffers():
            buffer.data = self._device.place(buffer.data)

    def _move_chunk(self, chunk: Chunk, buffer_of: Callable[[Chunk], Tensor]) -> None:
        buffer = buffer_of(chunk)
        if chunk.index not in self._moved:
            for number, spec in enumerate(chunk.tensors):
                if self._fills(chunk, number):
                    self._arena.tensor(chunk.index, spec).copy_(
                        self._bindings[spec.name].tensor
                    )
            # see Note [Who reads the state]
            self._attach_state(chunk)
            self._moved[chunk.index] = chunk
        for spec in chunk.tensors:
            view = buffer[spec.offset : spec.offset + spec.nbytes]
            # the only rebinding under a plan; frees the original
            self._bindings[spec.name].bind(view.view(spec.dtype).view(spec.shape))
        return_freed_memory()
