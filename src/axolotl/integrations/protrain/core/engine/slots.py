"""Slots: device buffers at fixed addresses, through which offloaded chunks pass.

# Note [Stable addresses]

The `.data` of an offloaded parameter is a view into its slot in every pass, always at the
same address: what autograd, a custom function or a quantised matmul holds on to is valid
again when the chunk is back, and it is back before the block's backward. So there are no
placeholder weights. Between two passes a parameter may show its host copy for a while
(`Session.full_params`), and between two attempts at a step, when no graph is alive,
`Session.replan` may change addresses.

# Note [Slot protocol]

Only `Slot` knows events. A miss, a prefetch, an evaluation, generation and a recomputation
all go through its calls:

* `fetch` lets the H2D copy wait for the last use of the buffer (`_last_use`), for the
  write-back of what an update changed there (`_written_back`) and for what came before
  (`_arrival`), then queues it;
* `begin_use` lets compute wait for that copy (`_arrival`) before anybody reads;
* `write_back` lets a D2H copy wait for compute, which has changed the weights;
* `end_use` records the last use, after the last kernel that reads was queued;
* `overwritten` stands for kernels that wrote through the parameters: a last use, too.

`holds` promises a content once the copy is through; the events are the proof. The first
`_last_use` is the fill in the constructor.

# Note [States of a chunk]

`ChunkState` says where the weights of an offloaded chunk can be read, and `TRANSITIONS`
which state may follow; every other change is an error. A recorded optimizer step is no
state: it is applied on the way into `IN_USE`, or makes the chunk `UPDATING`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from ..errors import LayoutError
from ..layout import Direction, Schedule, padded_bytes, shard_bytes, slot_bytes
from ..layout.moves import Move, moves_of, unpacking
from ..layout.packed import table_of
from ..types import Chunk, Counters, Layout, Plan
from .device import POISON_BYTE, Device, Event, Stream, range_of
from .disk import Disk, Extent
from .host_pool import HostPool
from .ranks import Alone, Ranks


class ChunkState(Enum):
    """State of a chunk: the memory in which its weights can be read."""

    ON_HOST = "its slot does not hold it"
    FETCHING = "an H2D copy into its slot is queued"
    IN_USE = "a block computes with it"
    ON_DEVICE = "its slot holds it, and no block uses it"
    UPDATING = "a queued update is about to change the host copy"

    # as itself: that of an enum is a function of Python, called ten times per block
    __hash__ = object.__hash__


TRANSITIONS = {
    ChunkState.ON_HOST: {ChunkState.FETCHING, ChunkState.UPDATING},
    ChunkState.FETCHING: {ChunkState.IN_USE, ChunkState.ON_HOST, ChunkState.UPDATING},
    ChunkState.IN_USE: {ChunkState.ON_DEVICE, ChunkState.ON_HOST},
    ChunkState.ON_DEVICE: {ChunkState.IN_USE, ChunkState.ON_HOST, ChunkState.UPDATING},
    ChunkState.UPDATING: {ChunkState.ON_HOST, ChunkState.UPDATING},
}
"""The states that may follow a state; see Note [States of a chunk]."""


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
        # buffers for what has come and is packed, and when it was unpacked last
        self._staged: list[Tensor] = []
        self._room: Tensor | None = None
        self._tables: dict[torch.dtype, Tensor] = {}
        self._unpacked: dict[int, Event] = {}

    @property
    def num_shards(self) -> int:
        """Ranks that fetch a shard each; 1 where each fetches whole chunks."""
        return self._ranks.world.local_size

    @property
    def local_rank(self) -> int:
        """Number of this rank's shard."""
        return self._ranks.local_rank

    def reserve(self, chunks: Sequence[Chunk]) -> None:
        """Take device memory through which packed chunks come, and are unpacked."""
        need = unpacking(chunks, self._ranks.world.local_size)
        if need.room_bytes:
            self._staged = [self._device.allocate(n) for n in need.staged_bytes]
            self._room = self._device.allocate(need.room_bytes)
        unpacks = self._device.communicate
        for dtype in need.tables:
            table = table_of(dtype)
            there = self._device.allocate(table.nbytes)
            # compute may have used these addresses before
            unpacks.wait(self._device.compute.record())
            unpacks.copy(there, table.view(torch.uint8))
            self._tables[dtype] = there.view(table.dtype)

    def fetch(
        self,
        stream: Stream,
        buffer: Tensor,
        source: Tensor,
        moves: Sequence[Move] = (),
    ) -> Event:
        """Queue the bytes of one chunk and give the point at which all are there.

        Args:
            stream: Carries the copy.
            buffer: uint8, on the device, as large as the chunk or all its shards.
            source: uint8, on the host: the chunk, or this rank's shard.
            moves: How they fill the buffer, where they are packed.
        """
        if moves:
            return self._unpack(stream, buffer, source, moves)
        part, whole = self._targets(buffer, source.numel())
        stream.copy(part, source)
        if part is whole:
            return stream.record()
        gathers = self._device.communicate
        gathers.wait(stream.record())
        gathers.call(partial(self._ranks.all_gather, whole, part), (whole,))
        return gathers.record()

    def _unpack(
        self, stream: Stream, buffer: Tensor, source: Tensor, moves: Sequence[Move]
    ) -> Event:
        """Unpack behind the copies, on the stream of gathers, which has no other work."""
        unpacks, room = self._device.communicate, self._room
        is_whole = self._ranks.world.local_size == 1
        assert room is not None
        if not is_whole:
            (staged,) = self._staged
            self._wait_unpacked(stream, 0)
            self.fetch(stream, staged, source)
            # behind the gather
            stream, source = unpacks, staged
        plain = [move for move in moves if move.spec.form is None]
        for move in plain:
            stream.copy(move.target(buffer), source[move.sources[0]])
        packed = (move for move in moves if move.spec.form is not None)
        for number, move in enumerate(packed):
            turn = number % len(self._staged)
            sources = [source[part] for part in move.sources]
            if is_whole:
                self._wait_unpacked(stream, turn)
                places = [self._staged[turn][place] for place in move.staged]
                for place, part in zip(places, sources, strict=True):
                    stream.copy(place, part)
                unpacks.wait(stream.record())
                sources = places
            work = partial(move.unpack, sources, buffer, room, self._tables)
            unpacks.call(work, (*sources, room, move.target(buffer)))
            self._unpacked[turn] = unpacks.record()
        return unpacks.record()

    def _wait_unpacked(self, stream: Stream, turn: int) -> None:
        """Let a copy into a staging buffer wait for who still unpacks from it."""
        if turn in self._unpacked:
            stream.wait(self._unpacked[turn])

    def forget(self, buffer: Tensor) -> None:
        """Let go of views of a buffer that is about to be freed."""
        address = buffer.data_ptr()
        for key in [key for key in self._views if key[0] == address]:
            del self._views[key]

    def forget_buffers(self) -> None:
        """Let go of device buffers, and of views of others."""
        self._views.clear()
        room = [] if self._room is None else [self._room]
        for memory in (*self._staged, *room, *self._tables.values()):
            self._device.free(memory)
        self._staged, self._room, self._tables = [], None, {}

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
    """One device buffer that offloaded chunks share in turn; see Note [Slot protocol].

    Args:
        buffer: uint8 device tensor; its address never changes.
        device: Where the copies run.
        transport: Brings the chunks; by default copies them whole.

    Attributes:
        holds: Index of the chunk that is in it or on its way, None for no chunk.
    """

    def __init__(
        self, buffer: Tensor, device: Device, transport: Transport | None = None
    ) -> None:
        self.buffer = buffer
        self.holds: int | None = None
        self._device = device
        self._transport = transport or Transport(device)
        self._arrival: Event | None = None
        self._written_back: Event | None = None
        # a block that is read without being called must not find plausible bytes
        device.compute.fill(buffer, POISON_BYTE)
        self._last_use = device.compute.record()

    def fetch(self, chunk: int, source: Tensor, moves: Sequence[Move] = ()) -> Event:
        """Queue the transfer of a chunk into the slot; see `Transport.fetch`."""
        # an error in the middle leaves it empty
        self.holds = None
        stream = self._device.fetch
        stream.wait(self._last_use)
        if self._written_back is not None:
            stream.wait(self._written_back)
        if self._arrival is not None:
            # what came before may be gathered or unpacked still, though nobody wants it
            stream.wait(self._arrival)
        self._arrival = self._transport.fetch(stream, self.buffer, source, moves)
        self.holds = chunk
        return self._arrival

    def begin_use(self) -> None:
        """Order the reads that follow after the copy."""
        if self._arrival is not None:
            self._device.wait_stalled(self._arrival)
        self._device.begin_use(self.buffer)

    def end_use(self) -> None:
        """Order the next `fetch` after the reads so far."""
        self._device.end_use(self.buffer)
        self._last_use = self._device.compute.record()

    def changed(self, part: Tensor) -> None:
        """Note that compute has written a part of the slot while a block uses it."""
        self._device.end_use(self.buffer)
        self._device.writes([part], self._device.compute)
        self._device.begin_use(self.buffer)

    def write_back_ends(self, event: Event) -> None:
        """Order the next `fetch` after the D2H copy of what an update changed."""
        self._written_back = event

    def overwritten(self) -> None:
        """Forget the content, which compute has written through the parameters."""
        self._device.writes([self.buffer], self._device.compute)
        self._last_use = self._device.compute.record()
        self.holds = None

    def release(self) -> None:
        """Let go of the device memory; the slot cannot be used again."""
        self._transport.forget(self.buffer)
        self._device.free(self.buffer)
        self.holds = None
        self.buffer = self.buffer.new_empty(0)


class Order:
    """Chunks that come before and after each other through a ring of slots.

    Args:
        needed: Chunks of each block, those too that do not pass through the ring.
        chunks: Those that do, in the order of use.
        num_slots: Of the ring.

    Attributes:
        ahead: For each direction and block, chunks to fetch while the block computes.
        soon: The same, of all that follow: see `Schedule.after`.
    """

    def __init__(
        self, needed: Sequence[Sequence[int]], chunks: Sequence[int], num_slots: int
    ) -> None:
        numbers = {index: number for number, index in enumerate(chunks)}
        schedule = Schedule(
            [[numbers[c] for c in own if c in numbers] for own in needed], num_slots
        )

        def each(
            of: Callable[[int, Direction], Iterable[int]],
        ) -> dict[Direction, list[list[int]]]:
            return {
                way: [
                    [chunks[n] for n in of(block, way)] for block in range(len(needed))
                ]
                for way in Direction
            }

        self.ahead, self.soon = each(schedule.ahead), each(schedule.after)


class Slots:
    """The slots of a plan, the chunks that pass through them and the block in use.

    Args:
        layout: All chunks.
        plan: Places them.
        pool: Holds the bytes of those in host memory.
        device: Has the slots.
        ranks: Who trains; under a plan with shards each fetches one shard of a chunk.
        counters: Fetches and misses are counted here.

    Attributes:
        block: The block whose weights may be read now.
        in_forward: Whether its forward has begun and not ended.
        chunks: Indices of the chunks that pass through slots, in the order of use.
        disk: Reads those ahead that lie in files; None if none does.
    """

    def __init__(
        self,
        layout: Layout,
        plan: Plan,
        pool: HostPool,
        device: Device,
        ranks: Ranks,
        counters: Counters,
    ) -> None:
        self.block: int | None = None
        self.in_forward = False
        self.chunks = plan.paged
        self._device, self._pool, self._counters = device, pool, counters
        self._transport = Transport(device, ranks if plan.shards > 1 else None)
        self._shards = plan.shards
        paged = frozenset(self.chunks)
        self._sizes = slot_bytes(layout, plan.placements, plan.n_buffer, plan.shards)
        self._all: list[Slot] = []
        self._slots: dict[int, Slot] = {}
        self._states = dict.fromkeys(self.chunks, ChunkState.ON_HOST)
        self._layout = layout
        self._sources: dict[int, tuple[Tensor | None, list[Move]]] = {}
        self.disk: Disk | None = None
        self._num_disk_buffers = plan.disk_buffers
        self._needed = [[c for c in b.chunks if c in paged] for b in layout.blocks]
        self._held: list[Slot] = []

    def allocate(self) -> None:
        """Take the device memory of all slots."""
        device, transport = self._device, self._transport
        # before the slots, whose first fetch waits for what compute does to them
        transport.reserve([self._layout.chunks[index] for index in self.chunks])
        self._all = [Slot(device.allocate(n), device, transport) for n in self._sizes]
        self._line_up(self.chunks)

    def _line_up(self, chunks: Sequence[int]) -> None:
        """Let these chunks follow each other through the ring, which is empty then."""
        self.end_use()
        for slot in {id(slot): slot for slot in self._slots.values()}.values():
            if slot.holds is not None:
                self.forget(slot.holds)
        self._order = Order(self._needed, chunks, len(self._all))
        for number, index in enumerate(chunks):
            self._slots[index] = self._all[number % len(self._all)]

    def hold(self, held: Collection[int]) -> None:
        """Give some chunks slots of their own, in which they stay until `let_go`; none is in
        use. The others follow each other through the ring, which has room for them."""
        self._line_up([index for index in self.chunks if index not in held])
        for index in held:
            nbytes = padded_bytes(self._layout.chunks[index], self._shards)
            # no name of its own: the traceback of an error would keep the buffer
            own = Slot(self._device.allocate(nbytes), self._device, self._transport)
            self._held.append(own)
            self._slots[index] = own

    def let_go(self) -> None:
        """Give up the slots of chunks that are held; nothing computes or is copied."""
        self._line_up(self.chunks)
        while self._held:
            self._held.pop().release()

    def open_disk(self) -> None:
        """Read ahead from now on what the pool has in files."""
        pool, size = self._pool, self._transport.num_shards
        paged = [self._layout.chunks[index] for index in self.chunks]
        extents = {
            chunk.index: Extent(
                pool.files[chunk.index],
                self._transport.local_rank * shard_bytes(chunk.in_pool, size),
                shard_bytes(chunk.in_pool, size),
            )
            for chunk in paged
            if chunk.index in pool.files
        }
        if not extents:
            return
        num = self._num_disk_buffers
        self.disk = Disk(self._device, extents, num, self._counters)
        self.disk.read_ahead([*extents])

    def read_ahead(self, block: int, direction: Direction) -> None:
        """Read from the disk what blocks after this one will fetch."""
        disk, soon = self.disk, self._order.soon[direction][block]
        if disk is not None:
            away = [c for c in soon if c in disk and self._slots[c].holds != c]
            disk.read_ahead(away)

    def state(self, chunk: int) -> ChunkState:
        """The state of a chunk that passes through a slot."""
        return self._states[chunk]

    def slot_of(self, chunk: int) -> Slot | None:
        """The slot through which a chunk passes, None for other chunks."""
        return self._slots.get(chunk)

    def is_paged(self, block: int) -> bool:
        """Return whether weights of a block pass through slots."""
        return bool(self._needed[block])

    def buffer_for(self, chunk: Chunk) -> Tensor:
        """Device memory, uint8, that the parameters of a chunk become views of: its
        slot, or a new buffer of its own."""
        slot = self._slots.get(chunk.index)
        if slot is not None:
            return slot.buffer
        return self._device.allocate(padded_bytes(chunk, self._shards))

    def missing(self, block: int) -> list[int]:
        """Chunks that a block needs and its slots do not hold."""
        return [c for c in self._needed[block] if self._slots[c].holds != c]

    def ahead(self, block: int, direction: Direction) -> list[int]:
        """Chunks to prefetch while a block computes, the soonest needed first."""
        wanted = self._order.ahead[direction][block]
        missing = [c for c in wanted if self._slots[c].holds != c]
        disk = self.disk
        if disk is None or self._shards > 1:
            # all ranks of a node gather the same chunks in the same order
            return missing
        return [c for c in missing if c not in disk or disk.is_ready(c)]

    def fetch(self, chunk: int) -> None:
        """Queue the H2D copy of a chunk into its slot, whose content it replaces."""
        slot = self._slots[chunk]
        disk = self.disk
        on_disk = disk is not None and chunk in disk
        if chunk not in self._sources:
            own = self._layout.chunks[chunk]
            moves = [] if own.stored is None else [*moves_of(own)]
            self._sources[chunk] = None if on_disk else self._pool.share(own), moves
        source, moves = self._sources[chunk]
        if disk is not None and on_disk:
            source = disk.take(chunk)
        assert source is not None
        other = slot.holds
        if other is not None and self._states[other] is ChunkState.IN_USE:
            raise LayoutError(f"chunk {chunk} into the slot of {other}, in use")
        self._becomes(chunk, ChunkState.FETCHING)
        if other is not None:
            self._becomes(other, ChunkState.ON_HOST)
        try:
            with range_of("protrain::fetch"):
                arrival = slot.fetch(chunk, source, moves)
            if disk is not None and on_disk:
                disk.leaves(chunk, arrival)
        except BaseException:
            # raised again as it is
            self._becomes(chunk, ChunkState.ON_HOST)
            raise
        self._counters.fetched_bytes += source.nbytes
        self._counters.num_fetches += 1

    def begin_use(self, block: int, in_forward: bool) -> None:
        """Make the weights of a block readable, whose chunks are all there or coming."""
        for chunk in self._needed[block]:
            self._becomes(chunk, ChunkState.IN_USE)
            self._slots[chunk].begin_use()
        self.block, self.in_forward = block, in_forward

    def end_use(self) -> None:
        """Mark the last use of the weights of the block in use, if there is one."""
        if self.block is None:
            return
        for chunk in self._needed[self.block]:
            slot = self._slots[chunk]
            slot.end_use()
            if self._states[chunk] is ChunkState.IN_USE:
                self._becomes(chunk, ChunkState.ON_DEVICE)
        self.block, self.in_forward = None, False

    @contextmanager
    def using(self, chunk: int) -> Iterator[None]:
        """Use one chunk while no block is in use; it is fetched where that is needed."""
        slot = self._slots[chunk]
        if slot.holds != chunk:
            self.fetch(chunk)
        self._becomes(chunk, ChunkState.IN_USE)
        slot.begin_use()
        try:
            yield
        finally:
            slot.end_use()
            if self._states[chunk] is ChunkState.IN_USE:
                self._becomes(chunk, ChunkState.ON_DEVICE)

    def begin_update(self, chunk: int) -> None:
        """Forget what the slot of a chunk holds: a queued update changes the host copy."""
        slot = self._slots.get(chunk)
        if slot is not None:
            self._becomes(chunk, ChunkState.UPDATING)
            if slot.holds == chunk:
                slot.holds = None

    def end_update(self, chunk: int) -> None:
        """Note that the host copy of a chunk has its last update."""
        if self._states.get(chunk) is ChunkState.UPDATING:
            self._becomes(chunk, ChunkState.ON_HOST)

    def is_updating(self, chunk: int) -> bool:
        """Return whether a queued update of a chunk is still to end."""
        return self._states.get(chunk) is ChunkState.UPDATING

    def forget(self, chunk: int) -> None:
        """Forget what the slot of a chunk holds of it: the host has another copy."""
        slot = self._slots[chunk]
        if slot.holds == chunk:
            slot.holds = None
            self._becomes(chunk, ChunkState.ON_HOST)

    def forget_all(self) -> None:
        """Forget the content of all slots: somebody wrote through the parameters."""
        self.end_use()
        for slot in (*self._all, *self._held):
            if slot.holds is not None:
                self._becomes(slot.holds, ChunkState.ON_HOST)
            slot.overwritten()

    def refresh(self, chunk: Chunk, buffer: Tensor) -> None:
        """Queue the H2D copy of a chunk into a buffer of its own, on compute's stream."""
        source, compute = self._pool.share(chunk), self._device.compute
        # a transport of its own: the slots' one keeps views, and this buffer may go
        sharing = Transport(self._device, self._transport._ranks)
        compute.wait(sharing.fetch(compute, buffer, source))
        self._counters.fetched_bytes += source.nbytes

    def release(self) -> None:
        """Let go of the device memory of all slots."""
        if self.disk is not None:
            self.disk.close()
        for slot in (*self._all, *self._held):
            slot.release()
        self._transport.forget_buffers()

    def _becomes(self, chunk: int, state: ChunkState) -> None:
        before = self._states[chunk]
        if state not in TRANSITIONS[before]:
            raise LayoutError(f"chunk {chunk} went from {before.name} to {state.name}")
        self._states[chunk] = state
