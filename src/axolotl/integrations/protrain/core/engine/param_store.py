"""Parameters of an open model: moving them to their places and back, and binding them.

# Note [Who reads the state]

At every moment between two steps a reader of the state has to find the truth. The
`state_dict` hooks of a chunk (`StateHooks`) are there before its parameters point at a
slot, and go after they are back. They have updates applied first and answer with host
tensors that have storages of their own, so that `save_pretrained` neither clones them nor
takes them for shared; a load waits for copies as well, writes the host tensors, and through
the parameters into whatever slot they point at, which is stale then. Frozen bytes only move
host to device.

# Note [Full parameters]

Between two passes a slot holds the bytes of some block, so a reader of a parameter, or a
writer through `param.data`, which no version counter notices, must find it elsewhere.
Inside `Session.full_params` (compare FSDP's `summon_full_params`) offloaded parameters are
bound to their host tensors, and a pass binds them to their slots again. Whatever was shown
counts as written. Several ranks run the same callback on one host copy: each sees a
copy-on-write mapping of it, or an in-place change would happen once per rank, and takes its
share of the changed chunks over. At other times nothing but a load writes parameters: a
pass that finds another address or version than it left refuses to go on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ..errors import AccessError
from ..layout.packed import Packed
from ..layout.tensors import (
    Binding,
    hold_quantised,
    model_bindings,
    parameter_name,
    placed_together,
    shared_bytes,
)
from ..types import Chunk, TensorSpec
from .device import Device
from .host_pool import HostPool, copy_together, host_buffer, return_freed_memory
from .ranks import Ranks

_COPIERS, _ROOM_BYTES = 4, 64 << 20
_INSTEAD = (
    "Change weights in an event of a callback, inside `with "
    "trainer.protrain.full_params():`, or use protrain_force_all_persistent: true."
)


class ParamStore:
    """Moves a model into host memory, slots and device, and out again.

    Args:
        model: Its parameters keep their identity; only `.data` is bound anew, and the
            tensors in the quant state of quantised ones.
        pool: Holds the bytes of chunks in host memory.
        device: Everything else moves there.
        ranks: Fill a shared pool together, each its part.
        absent: Names of frozen parameters that this rank has in name only.

    Attributes:
        on_host: The chunks in host memory, by index.
    """

    def __init__(
        self,
        model: nn.Module,
        pool: HostPool,
        device: Device,
        ranks: Ranks,
        absent: Collection[str],
    ) -> None:
        self._ranks = ranks
        # local rank that has a parameter's bytes, where not every rank does
        self._holders = ranks.holders(absent)
        self._model = model
        self._bindings = model_bindings(model)
        # weights that came packed: their bytes, which nobody can make from values
        self._packed: dict[str, Packed] = {}
        for binding in self._bindings.values():
            if isinstance(packed := binding.tensor, Packed):
                self._packed[binding.name] = packed
                binding.bind(binding.owner.data)
        self._pool = pool
        self._device = device
        self.on_host: dict[int, Chunk] = {}
        # where a plan binds what is on the host, and address and version since then
        self._places: dict[str, Tensor] = {}
        self._known: dict[str, tuple[nn.Parameter, int, int]] = {}
        self._frozen: set[str] = set()
        # another version of these has shown the same bytes
        self._harmless: set[str] = set()
        self._shown: HostPool | None = None
        self._held: ExitStack | None = None

    def move_in(
        self,
        chunks: Sequence[Chunk],
        buffer_for: Callable[[Chunk], Tensor],
        on_host: Callable[[Chunk], None],
    ) -> None:
        """Bind every parameter to its place, one chunk at a time.

        Args:
            chunks: Those in host memory; a later call names those that move again.
            buffer_for: Gives the device buffer (uint8) that the parameters of a chunk
                become views of: a slot, or memory of its own.
            on_host: Called when a chunk is in host memory, before its parameters point
                at a buffer: see Note [Who reads the state].
        """
        if self._held is None:
            self._held = hold_quantised(self._model)
            self._place_others({s.name for chunk in chunks for s in chunk.tensors})
        for chunk in chunks:
            buffer = buffer_for(chunk)
            if chunk.index not in self.on_host:
                self._copy_to_host(chunk)
                on_host(chunk)
                self.on_host[chunk.index] = chunk
            for spec in chunk.tensors:
                # frees the original
                if spec.form is not None:
                    home: Any = self._pool.tensor(chunk.index, spec)
                    self._packed[spec.name] = home
                self._places[spec.name] = _view(buffer, spec)
                self._bindings[spec.name].bind(self._places[spec.name])
            if not chunk.trainable:
                self._frozen.update(spec.name for spec in chunk.tensors)
            self.remember(spec.name for spec in chunk.tensors)
            return_freed_memory()

    def rebind(
        self, chunks: Iterable[int], buffer_for: Callable[[Chunk], Tensor]
    ) -> None:
        """Bind chunks that pass through slots to others of them; no graph is alive."""
        for index in chunks:
            chunk = self.on_host[index]
            buffer = buffer_for(chunk)
            for spec in chunk.tensors:
                self._places[spec.name] = _view(buffer, spec)
                self._bindings[spec.name].bind(self._places[spec.name])
            self.remember(spec.name for spec in chunk.tensors)

    def unload(self, chunks: Iterable[int]) -> None:
        """Bind chunks to their host tensors, so that their buffers may go."""
        for index in chunks:
            for spec in self.on_host[index].tensors:
                self._bindings[spec.name].bind(self._pool.tensor(index, spec))
                # or it would keep the buffer
                self._places.pop(spec.name, None)

    def show(self, chunks: Iterable[int], own: bool) -> None:
        """Bind chunks to their host tensors; see Note [Full parameters].

        Nothing may be using or changing them. With `own`, other ranks do not see what
        this one writes there until `hide`.
        """
        self._shown = self._pool.copy_on_write() if own else self._pool
        for index in chunks:
            for spec in self.on_host[index].tensors:
                self._bindings[spec.name].bind(self._shown.tensor(index, spec))

    def hide(self, shown: Collection[int], takes: bool) -> None:
        """Bind all chunks as the plan has them; with `takes`, what was written counts.

        Raises:
            AccessError: A parameter was replaced by a tensor of another kind.
        """
        memory, self._shown = self._shown, None
        assert memory is not None
        wrong = self._take_replaced(memory, shown, takes)
        for index, chunk in self.on_host.items():
            for spec in chunk.tensors:
                self._bindings[spec.name].bind(self._places[spec.name])
            size = self._ranks.world.local_size
            if takes and index % size == self._ranks.local_rank:
                self._take_over(chunk, memory if index in shown else None)
            self.remember(spec.name for spec in chunk.tensors)
        for index in self._pool.undo_writes(shown):
            wrong = wrong or on_the_disk(self.on_host[index])
        if wrong:
            raise AccessError(wrong)

    def _take_replaced(
        self, memory: HostPool, shown: Collection[int], takes: bool
    ) -> str:
        """Copy tensors that somebody has put in place of parameters; what is wrong."""
        replaced: list[tuple[Tensor, Tensor]] = []
        wrong = ""
        for index, chunk in self.on_host.items():
            for spec in chunk.tensors:
                place, now = self._places[spec.name], self._bindings[spec.name].tensor
                if index in shown:
                    place = memory.tensor(index, spec)
                if _lies(now) == _lies(place):
                    continue
                if spec.form is not None:
                    wrong = wrong or (
                        f"{spec.name}: somebody put another tensor in its place, and this "
                        "weight is packed on the host. Load the base unpacked to "
                        "change it."
                    )
                elif (now.dtype, now.shape) != (place.dtype, place.shape):
                    wrong = wrong or (
                        f"{spec.name}: was {place.dtype} of shape "
                        f"{tuple(place.shape)} and is {now.dtype} of shape "
                        f"{tuple(now.shape)} now. While a model trains paged, its "
                        "weights change in value only."
                    )
                elif takes:
                    # a copy: it may be the place of another
                    replaced.append((place, now.clone()))
        for place, now in replaced:
            place.copy_(now)
        return wrong

    def updated(self, specs: Sequence[TensorSpec]) -> None:
        """Weights that stay on the device have an update: a graph that has read them before
        finds out, as autograd does it."""
        increment_version([self._bindings[spec.name].owner for spec in specs])
        self.remember(spec.name for spec in specs)

    def verify(self) -> None:
        """A pass begins: parameters are as the last one left them.

        Raises:
            AccessError: One was written, replaced or unfrozen, where that is lost.
        """
        frozen = self._frozen if torch.is_grad_enabled() else ()
        for name, (param, address, version) in self._known.items():
            if name in frozen and param.requires_grad:
                raise AccessError(
                    f"{name}: it was frozen when it was paged and requires a gradient "
                    "now, which would be lost. Say what trains (`requires_grad`) before "
                    "training begins; it may be frozen again after that."
                )
            if param.data_ptr() != address or param._version != version:
                raise AccessError(
                    f"{name}: somebody changed this weight while it was paged out, "
                    "where training would lose it. Change weights in an event of a "
                    "callback, or inside `with trainer.protrain.full_params():`."
                )

    def require_unwritten(self, chunk: Chunk) -> None:
        """Raise AccessError if somebody wrote a weight while its block used it."""
        known = self._known
        for spec in chunk.tensors:
            # what quantises a weight is no parameter, and is not known
            if spec.name not in known:
                continue
            param, address, version = known[spec.name]
            is_same = param.data_ptr() == address
            if is_same and param._version == version:
                continue
            # a parametrization that comes and goes leaves another version, too
            if is_same and spec.name not in self._harmless:
                self._device.synchronize()
                home = self._pool.tensor(chunk.index, spec)
                is_same = torch.equal(_as_bytes(param.detach().cpu()), _as_bytes(home))
                if is_same and ".parametrizations." in spec.name:
                    self._harmless.add(spec.name)
            if not is_same:
                raise AccessError(
                    f"{spec.name}: a hook or the model itself (max_norm of an embedding, "
                    "a constraint) changed this weight in a pass, where training loses "
                    f"it. {_INSTEAD}"
                )

    def remember(self, names: Iterable[str] | None = None) -> None:
        """Remember parameters, all of them or some, as a pass or a load has left them.

        Raises:
            AccessError: A pass has put another tensor in the place of one.
        """
        if names is None:
            # after each pass: most are as they were
            for name, (param, address, version) in self._known.items():
                if param.data_ptr() != address:
                    raise AccessError(
                        f"{name}: a hook or the model itself put another tensor in the "
                        "place of this weight in a pass (`weight.data = ...`), where "
                        f"training loses it. {_INSTEAD}"
                    )
                if param._version != version:
                    self._known[name] = param, address, param._version
            return
        for name in names:
            owner = self._bindings[name].owner
            if isinstance(owner, nn.Parameter):
                self._known[name] = owner, owner.data_ptr(), owner._version

    def _take_over(self, chunk: Chunk, memory: HostPool | None) -> None:
        """Bring what was written into a chunk, in `memory` or on the device, home."""
        if memory is self._pool:
            return
        for spec in chunk.tensors:
            if spec.form is not None:
                # nobody can write what is packed
                continue
            if memory is None:
                now = self._places[spec.name].cpu()
            else:
                now = memory.tensor(chunk.index, spec)
            home = self._pool.tensor(chunk.index, spec)
            # not even with equal bytes: that would touch every page
            if not torch.equal(_as_bytes(now), _as_bytes(home)):
                self._device.writes((home,))
                home.copy_(now)

    def undo_writes(self, chunk: Chunk) -> bool:
        """Take back writes over a chunk on the disk; whether they were other bytes."""
        return bool(self._pool.undo_writes([chunk.index]))

    def move_out(self) -> None:
        """Bind every parameter to plain host memory; undoes a partial `move_in` too."""
        self.unload(self.on_host)
        paged = {s.name for chunk in self.on_host.values() for s in chunk.tensors}
        resident = self._packed.keys() - paged
        self.on_host, self._known, self._frozen = {}, {}, set()
        while self._packed:
            name, packed = self._packed.popitem()
            binding: Any = self._bindings[name]
            if name in resident and _differs(binding.tensor, packed):
                # somebody wrote it where it was plain
                continue
            binding.bind(packed)
            # a view of a slot, which would live as long as somebody keeps the session
            binding.owner.data = binding.owner.data.new_empty(0)
        for param in self._model.parameters():
            # a gradient may not stay behind on another device
            param.grad = None
        every = [*self._bindings.values(), *self._buffers()]
        away = [b for b in every if b.tensor.device.type != "cpu"]
        # whole storages: what shares bytes goes on sharing them
        storages = {s.data_ptr(): s for s in (b.tensor.untyped_storage() for b in away)}
        stream = self._device.offload
        stream.wait(self._device.compute.record())
        with ExitStack() as undo:
            rooms: SimpleQueue[Tensor] = SimpleQueue()
            most = max((s.nbytes() for s in storages.values()), default=0) or 1
            for _ in range(_COPIERS if away else 0):
                room = host_buffer(min(most, _ROOM_BYTES))
                self._device.pin(room)
                undo.callback(self._device.unpin, room)
                rooms.put(room)
            undo.callback(lambda: stream.record().synchronize())
            # threads: the system clears each new page for who touches it first
            pool = undo.enter_context(ThreadPoolExecutor(_COPIERS))
            fetched = pool.map(partial(self._fetched_to_host, rooms), storages.values())
            homes = dict(zip(storages, fetched, strict=True))
        for binding in away:
            tensor = binding.tensor
            home = homes[tensor.untyped_storage().data_ptr()].untyped_storage()
            where = tensor.storage_offset(), tensor.shape, tensor.stride()
            binding.bind(
                torch.empty(0, dtype=tensor.dtype, device=home.device).set_(
                    home, *where
                )
            )
        if self._held is not None:
            self._held.close()

    def _fetched_to_host(
        self, rooms: SimpleQueue[Tensor], storage: torch.UntypedStorage
    ) -> Tensor:
        """A copy in plain host memory, through page-locked memory, which is faster."""
        away = _bytes_of(storage)
        home = torch.empty_like(away, device="cpu")
        stream, room = self._device.offload, rooms.get()
        ways = (memory.split(len(room)) for memory in (home, away))
        try:
            for target, source in zip(*ways, strict=True):
                stream.copy(room[: len(source)], source)
                stream.record().synchronize()
                target.copy_(room[: len(source)])
        finally:
            rooms.put(room)
        return home

    def buffer_of(self, chunk: Chunk) -> Tensor:
        """The device memory that a chunk's parameters are views of, uint8."""
        return _bytes_of(self._places[chunk.tensors[0].name].untyped_storage())

    def state_of(
        self, chunk: Chunk
    ) -> Iterator[tuple[nn.Module, list[tuple[Binding, Tensor]]]]:
        """The modules that register parameters of a chunk, by tied names too, each with
        what is bound of them and its host tensors."""
        host = {id(self._bindings[spec.name].owner): spec for spec in chunk.tensors}
        for module in self._model.modules():
            own = [
                host[id(param)].name
                for param in module.parameters(recurse=False)
                if id(param) in host
            ]
            if not own:
                continue
            prefixes = tuple(f"{name}." for name in own)
            yield (
                module,
                [
                    (self._bindings[spec.name], self._pool.tensor(chunk.index, spec))
                    for spec in chunk.tensors
                    if spec.name in own or spec.name.startswith(prefixes)
                ],
            )

    def _copy_to_host(self, chunk: Chunk) -> None:
        own: list[tuple[Tensor, Tensor]] = []
        every: list[tuple[Tensor, Tensor]] | None = []
        tensors: dict[str, Tensor] = {}
        for number, spec in enumerate(chunk.tensors):
            home: Any = self._pool.tensor(chunk.index, spec)
            if spec.form is None:
                now = tensors[spec.name] = self._bindings[spec.name].tensor
                copies = [(home, now)]
            else:
                packed = tensors[spec.name] = self._packed[spec.name]
                copies = [*packed.copies_to(home)]
            if self._fills(chunk, number):
                own += copies
            has_it = self._holder(spec.name) in (None, self._ranks.local_rank)
            every = every + copies if every is not None and has_it else None
        if not self._pool.leave_in_base(chunk, every, tensors):
            copy_together(own)
            self._pool.filled(chunk)

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
        others = [b for name, b in self._bindings.items() if name not in on_host]
        for binding in others:
            holder = self._holder(binding.name)
            if holder is not None:
                self._ranks.spread_on_node(binding.tensor, holder)
        others += self._buffers()
        # scales of quantised weights are never written, so copies of them are as good
        written = [binding for binding in others if binding.attribute == "data"]
        together: set[Binding] = set()
        for group in shared_bytes(binding.tensor for binding in written):
            members = [written[number] for number in group]
            placed = placed_together([b.tensor for b in members], self._device.place)
            for binding, tensor in zip(members, placed, strict=True):
                binding.bind(tensor)
            together.update(members)
        for binding in others:
            if binding not in together:
                binding.bind(self._placed(binding))

    def _placed(self, binding: Binding) -> Tensor:
        packed = self._packed.get(binding.name)
        if packed is None:
            return self._device.place(binding.tensor)
        room = self._device.allocate(packed.nbytes)
        self._device.writes((room,), self._device.compute)
        return packed.unpack_into(room.view(packed.dtype).view(packed.shape))

    def _buffers(self) -> list[Binding]:
        return [Binding(n, buffer, "data") for n, buffer in self._model.named_buffers()]


def _differs(plain: Tensor, packed: Packed) -> bool:
    values = packed.unpacked().view(torch.uint8)
    return not torch.equal(plain.detach().cpu().contiguous().view(torch.uint8), values)


def on_the_disk(chunk: Chunk) -> str:
    """Word that somebody wrote a chunk that lies in a file."""
    return (
        f"{chunk.tensors[0].name} and what lies beside it is frozen and on the disk: what "
        "somebody wrote there is lost. Remove protrain_disk_dir to change such weights."
    )


def _view(buffer: Tensor, spec: TensorSpec) -> Tensor:
    flat = buffer[spec.offset : spec.offset + spec.nbytes]
    if flat.numel() < spec.nbytes:
        return flat.view(spec.dtype).expand(spec.shape)
    return flat.view(spec.dtype).view(spec.shape)


def _lies(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
