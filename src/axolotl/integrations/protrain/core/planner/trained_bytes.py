"""Bytes of the model states: weights, gradients, optimizer state.

The first term of the paper's peak (equations 8 to 11): resident chunks plus slots.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property

from ..layout import (
    Piece,
    aligned,
    main_chunk,
    master_chunk,
    padded_bytes,
    pieces,
    shard_bytes,
    slot_bytes,
    span_bytes,
    spans,
)
from ..layout.moves import MOVED_BYTES, num_pieces, unpacked_numel, unpacking
from ..layout.shards import PAGE_BYTES
from ..types import (
    IN_FLIGHT,
    STATE_ALIGNMENT_BYTES,
    Chunk,
    Layout,
    Placement,
    Update,
    Workload,
    main_grads_in_fp32,
)


def adamw_bytes(nbytes: int) -> tuple[int, ...]:
    """AdamW's state of a parameter: two moments and an fp32 scalar, its steps."""
    return nbytes, nbytes, 4


class TrainedBytes:
    """Bytes that the trained chunks of a layout take in a step beside their weights,
    each list by the index of a chunk: 0 for a frozen one."""

    def __init__(self, layout: Layout, workload: Workload) -> None:
        self.layout, self.workload = layout, workload
        self.main_grads_fp32 = main_grads_in_fp32(
            workload.fp32_master,
            workload.accumulation > 1,
            workload.world,
            workload.update,
        )
        """Gradients with masters add up in fp32."""

    @cached_property
    def _states(self) -> list[list[tuple[int, ...]]]:
        """Bytes of the tensors of the state of each tensor of each chunk."""
        known = self.workload.state_bytes
        return [
            [
                adamw_bytes(spec.nbytes) if known is None else known[spec.name]
                for spec in main_chunk(chunk, self.workload.fp32_master).tensors
            ]
            if chunk.trainable
            else []
            for chunk in self.layout.chunks
        ]

    @cached_property
    def sums(self) -> list[Chunk]:
        """Bytes of gradients, laid out as they add up."""
        return [main_chunk(chunk, self.main_grads_fp32) for chunk in self.layout.chunks]

    @cached_property
    def state(self) -> list[int]:
        """All of their optimizer state."""
        return [sum(map(sum, states)) for states in self._states]

    @cached_property
    def region(self) -> list[int]:
        """Bytes of the state as it lies on the host."""
        return [sum(map(_region_bytes, states)) for states in self._states]

    @cached_property
    def managed(self) -> list[int]:
        """Part of the state that the driver may move to the host where the device
        updates it."""
        managed = self.workload.managed_bytes
        return [
            sum(managed.get(spec.name, 0) for spec in chunk.tensors)
            for chunk in self.layout.chunks
        ]

    @cached_property
    def _unpacking(self) -> dict[int, int]:
        """Device memory beside slots in which packed chunks are unpacked, by shards."""
        pageable = self.layout.pageable
        every = {1, self.workload.world.local_size}
        return {shards: unpacking(pageable, shards).nbytes for shards in every}

    @cached_property
    def unpacked(self) -> list[tuple[int, int]]:
        """Bytes that are read and written to unpack each chunk, and its pieces, per fetch."""
        moved = [
            sum(
                numel * MOVED_BYTES[kind]
                for kind, numel in unpacked_numel(chunk).items()
            )
            for chunk in self.layout.chunks
        ]
        return [*zip(moved, map(num_pieces, self.layout.chunks), strict=True)]

    def unpacking(self, n_buffer: int, shards: int) -> int:
        """Device memory beside so many slots in which packed chunks are unpacked."""
        return self._unpacking[shards] if n_buffer else 0

    @cached_property
    def fixed_state(self) -> int:
        """State of what never leaves the device, on the device."""
        known, managed = self.workload.state_bytes, self.workload.managed_bytes
        layout = self.layout
        if known is None:
            steps = adamw_bytes(0)[-1] * layout.num_fixed_trainable
            return 2 * layout.fixed_trainable_bytes + steps
        everything = sum(map(sum, known.values())) - sum(managed.values())
        return everything - sum(self.state) + sum(self.managed)

    @cached_property
    def masters(self) -> list[int]:
        """fp32 masters of its 16-bit weights."""
        return [
            master_chunk(chunk).nbytes
            if chunk.trainable and self.workload.fp32_master
            else 0
            for chunk in self.layout.chunks
        ]

    @cached_property
    def _spans(self) -> dict[int, tuple[range, ...]]:
        """The tensors that each rank of a node updates of each trained chunk."""
        trained = [chunk for chunk in self.layout.chunks if chunk.trainable]
        own = spans(trained, self.workload.world.local_size)
        return {chunk.index: s for chunk, s in zip(trained, own, strict=True)}

    @cached_property
    def _pieces(self) -> dict[int, list[Piece]]:
        """The pieces in which all ranks update each trained chunk."""
        cuts = self.workload.elementwise
        return {
            index: [p for s in own for p in pieces(self.layout.chunks[index], s, cuts)]
            for index, own in self._spans.items()
        }

    @cached_property
    def operands(self) -> list[int]:
        """Bytes beside the weights for the whole of an update: gradients, masters and
        state, of several ranks with the paged weights of the largest span; or sums."""
        whole = {index: [*map(Piece, own)] for index, own in self._spans.items()}
        return self._staged(whole, self._whole_sum)

    @cached_property
    def piece_operands(self) -> list[int]:
        """Bytes beside the weights for the largest piece of an update, or sums."""
        return self._staged(self._pieces, self.sum_piece)

    def sum_piece(self, chunk: Chunk) -> int:
        """Bytes of the largest piece of a chunk's sums."""
        laid = self.sums[chunk.index]
        every = pieces(chunk, range(len(chunk.tensors)), splits=True)
        return aligned(max((_bytes_of(laid, piece) for piece in every), default=0))

    def _whole_sum(self, chunk: Chunk) -> int:
        return aligned(self.sums[chunk.index].nbytes)

    def _staged(
        self, cut: Mapping[int, Sequence[Piece]], sums: Callable[[Chunk], int]
    ) -> list[int]:
        found = [0] * len(self.layout.chunks)
        for index, own in cut.items():
            chunk = self.layout.chunks[index]
            if self.workload.accumulation > 1:
                found[index] = sums(chunk)
            if self.workload.update is Update.DEVICE:
                most = max(self._operands(chunk, piece) for piece in own)
                found[index] = max(found[index], most)
        return found

    def _operands(self, chunk: Chunk, piece: Piece) -> int:
        w = self.workload
        laid = [self.sums[chunk.index]]
        if w.fp32_master:
            laid.append(master_chunk(chunk))
        if w.world.size > 1 and chunk.pageable:
            laid.append(chunk)
        return aligned(self._state_of(chunk, piece)) + sum(
            aligned(_bytes_of(own, piece)) for own in laid
        )

    def _state_of(self, chunk: Chunk, piece: Piece) -> int:
        """Bytes of the state of a piece, where it lies on the host or in staging."""
        states = self._states[chunk.index]
        if piece.elements is None:
            return sum(_region_bytes(states[index]) for index in piece.span)
        numel = chunk.tensors[piece.span.start].numel
        share = (piece.elements.stop - piece.elements.start) / numel
        own = (round(n * share) if n >= numel else n for n in states[piece.span.start])
        return _region_bytes(own)

    @cached_property
    def update(self) -> list[int]:
        """Bytes that the update of a piece of the chunk takes on top."""
        found = [0] * len(self.layout.chunks)
        for index, own in self._pieces.items():
            if self.workload.update is Update.DEVICE:
                chunk = self.layout.chunks[index]
                main = main_chunk(chunk, self.workload.fp32_master)
                found[index] = max(self._update(chunk, main, piece) for piece in own)
        return found

    @cached_property
    def made(self) -> list[int]:
        """Bytes of state that the first updates of pieces of the chunk make, until they
        have left."""
        found = [0] * len(self.layout.chunks)
        for index, own in self._pieces.items():
            chunk = self.layout.chunks[index]
            sizes = sorted(self._state_of(chunk, piece) for piece in own)
            found[index] = sum(sizes[-IN_FLIGHT - 1 :])
        return found

    def _update(self, chunk: Chunk, main: Chunk, piece: Piece) -> int:
        w = self.workload
        if piece.elements is None:
            every = [main.tensors[index].nbytes for index in piece.span]
        else:
            every = [_bytes_of(main, piece)]
        widened = 0
        if w.fp32_master and not self.main_grads_fp32:
            # gradients of 16 bits
            pairs = zip(piece.span, every, strict=True)
            widened = sum(n for index, n in pairs if chunk.tensors[index].is_16_bit)
        whole = w.update_copies * sum(every) + w.update_parameter_copies * max(every)
        return round(widened + whole)


def _bytes_of(laid: Chunk, piece: Piece) -> int:
    """Bytes of a piece of a chunk."""
    if piece.elements is None:
        own = span_bytes(laid, piece.span)
        return own.stop - own.start
    spec = laid.tensors[piece.span.start]
    return (
        min(spec.numel, piece.elements.stop - piece.elements.start)
        * spec.dtype.itemsize
    )


def _region_bytes(tensors: Iterable[int]) -> int:
    """Count bytes of the state of a tensor where it lies on the host or in staging."""
    return sum(aligned(nbytes, STATE_ALIGNMENT_BYTES) for nbytes in tensors)


@dataclass(frozen=True)
class StateBytes:
    """Device bytes of the states under a plan, by term.

    Attributes:
        fixed: Frozen weights and buffers outside blocks that never move.
        adapters: Their weights, and other trainable ones that never move.
        resident: Weights of resident chunks.
        host_state: Weights that stay while their gradients and moments do not.
        slots: The ring, and room in which packed chunks are unpacked.
        operands: The ring for what comes from the host, to be updated or to be added to:
            gradients and optimizer state of blocks, of several ranks weights too.
        moments: Optimizer state of what trains on the device.
        gradients: Gradients of what trains on the device, all of them.
        buckets: Copy of `gradients` that DDP reduces, there from the start.
    """

    fixed: int
    adapters: int
    resident: int
    host_state: int
    slots: int
    operands: int
    moments: int
    gradients: int
    buckets: int

    @property
    def weights(self) -> int:
        """Count what is there from opening to closing, before any step."""
        placed = self.fixed + self.adapters + self.resident + self.host_state
        return placed + self.slots + self.buckets


def state_bytes(
    trained: TrainedBytes,
    placements: Sequence[Placement],
    n_buffer: int,
    shards: int,
    in_pieces: bool = False,
) -> StateBytes:
    """Device bytes of the states; with `in_pieces` operands come a piece ahead, else all
    of a block's."""
    # in one pass: a search asks for hundreds
    layout, workload = trained.layout, trained.workload
    on_device, state_on_host = Placement.RESIDENT, Placement.OPTIMIZER_OFFLOADED
    resident = host_state = 0
    trained_bytes = adapters = layout.fixed_trainable_bytes
    fixed = layout.fixed_frozen_bytes
    moments = trained.fixed_state
    leaving: list[Chunk] = []
    for chunk, placement in zip(layout.chunks, placements, strict=True):
        if placement is Placement.HOST_LOOKUP:
            # one element stands for all
            fixed += chunk.tensors[0].dtype.itemsize
        elif placement is on_device and chunk.rows_bytes:
            fixed += chunk.payload_bytes
        elif placement is on_device:
            # tensor by tensor; only what has a host copy lies there in one piece
            adapters += chunk.adapter * chunk.payload_bytes
            resident += (not chunk.adapter) * chunk.payload_bytes
            if chunk.trainable:
                trained_bytes += chunk.payload_bytes
                moments += trained.state[chunk.index] - trained.managed[chunk.index]
            continue
        if placement is state_on_host:
            adapters += chunk.adapter * chunk.nbytes
            host_state += (not chunk.adapter) * padded_bytes(chunk, shards)
        if chunk.trainable:
            leaving.append(chunk)
    operands = trained.piece_operands if in_pieces else trained.operands
    largest = max(
        (operands[c.index] for c in leaving if c.block is not None), default=0
    )
    if workload.accumulation > 1:
        # sums outside blocks come back through the ring, too
        outside = (trained.sum_piece(c) for c in leaving if c.block is None)
        largest = max(largest, *outside, 0)
    return StateBytes(
        fixed=fixed,
        adapters=adapters,
        resident=resident,
        host_state=host_state,
        slots=sum(slot_bytes(layout, placements, n_buffer, shards))
        + trained.unpacking(n_buffer, shards),
        operands=IN_FLIGHT * largest,
        moments=moments,
        gradients=trained_bytes,
        buckets=trained_bytes if workload.world.size > 1 else 0,
    )


@dataclass(frozen=True)
class HostBytes:
    """Host bytes of a node under a plan, by term.

    Attributes:
        host_pool: Weights of every chunk that is kept there.
        gradients: Their gradients, in fp32 where there are masters, unless a rank
            alone does not accumulate; with several ranks that do also the sums of each.
        masters: What fp32 masters have beyond their weights.
        moments: Optimizer state of what has it on the host, or in managed memory.
        swapped: Saved tensors of swapped blocks.
        loader: Batches that wait in the dataloader.
        rows: Of embeddings that the host looks up, on their way.
        ring: Buffers through which chunks come from the disk.
    """

    host_pool: int
    gradients: int
    masters: int
    moments: int
    swapped: int = 0
    loader: int = 0
    rows: int = 0
    ring: int = 0

    @property
    def total(self) -> int:
        return sum(astuple(self))


def ring_bytes(chunks: Sequence[Chunk], num_buffers: int, shards: int = 1) -> int:
    """Host bytes of a rank's buffers through which these chunks come from the disk."""
    sizes = (aligned(shard_bytes(c.in_pool, shards), PAGE_BYTES) for c in chunks)
    return min(num_buffers, len(chunks)) * max(sizes, default=0)


def host_state_bytes(
    held: TrainedBytes,
    placements: Sequence[Placement],
    shards: int = 1,
    on_disk: Collection[int] = (),
    disk_buffers: int = 0,
) -> HostBytes:
    """Host bytes of the host pool and of what trains there, for all ranks of a node."""
    layout, workload = held.layout, held.workload
    ranks, several = workload.world.local_size, workload.world.size > 1
    kept = [chunk for chunk in layout.chunks if placements[chunk.index].on_host]
    trained = [chunk for chunk in kept if chunk.trainable]
    gradients = sum(held.sums[chunk.index].nbytes for chunk in trained)
    if several and workload.accumulation > 1:
        # sums of each, and their average
        gradients += ranks * gradients
    managed = sum(workload.managed_bytes.values())
    managed -= sum(held.managed[chunk.index] for chunk in trained)
    read = [layout.chunks[index] for index in on_disk]
    return HostBytes(
        host_pool=sum(
            aligned(padded_bytes(chunk.in_pool, shards), PAGE_BYTES)
            for chunk in kept
            if chunk.index not in on_disk
        ),
        gradients=gradients,
        masters=sum(held.masters[chunk.index] for chunk in trained),
        moments=sum(held.region[chunk.index] for chunk in trained) + ranks * managed,
        loader=ranks * workload.loader_bytes,
        rows=ranks * sum(chunk.rows_bytes for chunk in kept),
        ring=ranks * ring_bytes(read, disk_buffers, shards),
    )
