"""Average the gradients of host-kept chunks over all ranks, once an optimizer step.

As DistributedDataParallel does it: micro-batches that do not synchronise add up on each
rank; in the last one each rank's sum is divided by the number of ranks, and the sums of
all are added. Each rank receives the shard that it updates. Chunks are reduced in one
fixed order on every rank, whether or not a rank has used them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..layout import aligned, leaf_chunk, reduce_bytes
from ..runtime import Arena, Device, HostWorker, Ranks, Removable
from ..runtime.device import Event
from ..types import IN_FLIGHT, Chunk
from .gradients import Arriving, GradientOffload, hook_gradients
from .host_chunks import ShardedChunk


class GradientReduction:
    """Takes the place of `GradientOffload` where several ranks train.

    Args:
        device: Packs, reduces and offloads.
        worker: Adds up micro-batches that do not synchronise.
        ranks: Who averages.
        order: Indices of chunks in the order in which their gradients are done.
        fp32_master: Sums of 16-bit gradients are kept in fp32.

    Attributes:
        offloaded_bytes: Bytes sent to the host so far.
        fetched_bytes: Bytes of sums that came back so far.
        host_bytes: Bytes of this rank's sums.
    """

    def __init__(
        self,
        device: Device,
        worker: HostWorker,
        ranks: Ranks,
        order: Sequence[int],
        fp32_master: bool,
    ) -> None:
        self._device = device
        self._worker = worker
        self._ranks = ranks
        self._position = {index: number for number, index in enumerate(order)}
        self._fp32_master = fp32_master
        self._offload = GradientOffload(device, worker)
        self._waiting: list[_Waiting] = []
        self._first_of_block: dict[int, int] = {}
        self._buffers: list[Tensor] = []
        self._free: list[Event] = []
        self._sums: Tensor | None = None
        self._sums_arena = Arena()
        self._pinned: Tensor | None = None
        self._synchronises = True
        self._due = self._ends = False
        self._next = 0
        self._own_bytes = 0
        self.fetched_bytes = 0

    @property
    def host_bytes(self) -> int:
        return self._sums_arena.nbytes

    @property
    def offloaded_bytes(self) -> int:
        return self._own_bytes + self._offload.offloaded_bytes

    def attach(self, chunks: Sequence[ShardedChunk]) -> list[Removable]:
        """Hook every parameter of the chunks, and take the buffers they need."""
        chunks = sorted(
            chunks, key=lambda h: self._position.get(h.chunk.index, len(self._position))
        )
        self._waiting = [_Waiting(host) for host in chunks]
        for number, waiting in enumerate(self._waiting):
            block = waiting.host.chunk.block
            if block is not None:
                self._first_of_block.setdefault(block, number)
        nbytes = max(self._packed_bytes(host.chunk) for host in chunks)
        for _ in range(IN_FLIGHT):
            self._buffers.append(self._device.allocate(nbytes))
            self._free.append(self._device.compute.record())
        return [
            handle
            for waiting in self._waiting
            for handle in hook_gradients(
                waiting.host.params, partial(self._take, waiting)
            )
        ]

    def begin_micro_batch(self, synchronises: bool) -> None:
        """A forward begins; with `synchronises` it is the last one of a step."""
        self._synchronises = synchronises
        if synchronises:
            self._due, self._ends, self._next = True, False, 0

    def reach(self, block: int) -> None:
        """Backward has come to a block: what follows it in forward is done."""
        if not self._due:
            return
        if not self._ends:
            # before the hooks of DDP that wait, and called once all of backward has run
            self._ends = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if block in self._first_of_block:
            self._launch_until(self._first_of_block[block])

    def _end_backward(self) -> None:
        self._launch_until(len(self._waiting))

    def retire(self) -> None:
        """Let go of what has arrived on the host; waits for nothing."""
        self._offload.retire()

    def settle(self) -> None:
        """Return once every averaged gradient is in its leaf.

        All ranks have to call it at the same point of a step.
        """
        if not self._due:
            self._offload.settle()
            return
        self._launch_until(len(self._waiting))
        self._due = False
        for event in self._free:
            event.synchronize()
        used = [w.take_used() for w in self._waiting]
        flags = torch.zeros(len(used), max(map(len, used)), dtype=torch.uint8)
        for row, own in zip(flags, used, strict=True):
            row[: len(own)] = torch.tensor(own, dtype=torch.uint8)
        # a parameter that no rank has used keeps its weight, as without paging
        for row, waiting in zip(
            self._ranks.maximum(flags).tolist(), self._waiting, strict=True
        ):
            waiting.host.arrived(i for i, was_used in enumerate(row) if was_used)

    def discard(self) -> None:
        """Forget what has not been reduced; return once nothing is on its way."""
        self._due = False
        self._offload.discard()
        for waiting in self._waiting:
            waiting.forget()

    def close(self) -> None:
        """Release gradients and buffers; no copy may be in flight."""
        self._offload.close()
        for waiting in self._waiting:
            waiting.forget()
        if self._pinned is not None:
            self._device.unpin(self._pinned)
        for buffer in self._buffers:
            self._device.free(buffer)
        self._buffers, self._sums, self._pinned = [], None, None

    def _packed_bytes(self, chunk: Chunk) -> int:
        return reduce_bytes(chunk, self._ranks.world.local_size, self._fp32_master)

    def _take(self, waiting: _Waiting, index: int, gradient: Tensor) -> None:
        if self._synchronises:
            if not self._due:
                raise RuntimeError("backward without begin_micro_batch before it")
            self._device.writes((gradient,), self._device.compute)
            waiting.gradients[index] = gradient
            return
        if self._pinned is None:
            self._begin_sums()
        assert waiting.arriving is not None
        self._offload.take(waiting.arriving, index, gradient)

    def _begin_sums(self) -> None:
        """Only runs that accumulate need them."""
        leaves = [leaf_chunk(w.host.chunk, self._fp32_master) for w in self._waiting]
        self._pinned = self._sums_arena.add(leaves)
        assert self._pinned is not None
        self._device.pin(self._pinned)
        self._sums = self._device.allocate(max(leaf.nbytes for leaf in leaves))
        self._buffers.append(self._sums)
        for waiting, leaf in zip(self._waiting, leaves, strict=True):
            waiting.sums = MicroBatchSums(
                waiting.host, leaf, self._sums_arena, self._device
            )
            waiting.arriving = self._offload.expect(waiting.sums)

    def _launch_until(self, number: int) -> None:
        while self._next < number:
            if not self._next:
                # sums of earlier micro-batches, and no earlier
                self._offload.settle()
            self._launch(self._waiting[self._next])
            self._next += 1

    def _launch(self, waiting: _Waiting) -> None:
        device, turn = self._device, self._next % IN_FLIGHT
        buffer, host = self._buffers[turn], waiting.host
        # who has not used the chunk has not waited for its last update either
        self._worker.wait(host.chunk.index)
        sums = self._fetch_sums(waiting)
        device.compute.wait(self._free[turn])
        shares = []
        start = 0
        for reduction in host.reductions:
            flat = buffer[start : start + reduction.nbytes].view(reduction.dtype)
            shares.append(flat)
            start += aligned(reduction.nbytes)
            for pieces in reduction.pieces:
                for piece in pieces:
                    into = flat[piece.position : piece.position + piece.numel]
                    total = waiting.total(piece.tensor, sums)
                    if total is None:
                        into.zero_()
                    else:
                        own = total.reshape(-1)[piece.start : piece.stop]
                        scale = 1.0 / self._ranks.world.size
                        torch.mul(own.to(reduction.dtype), scale, out=into)
        device.writes((buffer,), device.compute)
        device.writes(sums.values(), device.compute)
        waiting.drop()
        communicate, offload = device.communicate, device.offload
        communicate.wait(device.compute.record())
        parts = []
        for flat, reduction in zip(shares, host.reductions, strict=True):
            own = flat.view(len(reduction.pieces), -1)[self._ranks.local_rank]
            parts.append(own)
            communicate.call(partial(self._ranks.reduce_scatter, own, flat), (flat,))
        offload.wait(communicate.record())
        for target, part in zip(host.parts, parts, strict=True):
            offload.copy(target, part)
            self._own_bytes += part.nbytes
        self._free[turn] = offload.record()

    def _fetch_sums(self, waiting: _Waiting) -> dict[int, Tensor]:
        """Device tensors with the sums of earlier micro-batches, by parameter."""
        if waiting.sums is None or not waiting.sums.present:
            return {}
        assert self._sums is not None
        device, leaf = self._device, waiting.sums.leaf
        device.fetch.wait(device.compute.record())
        device.fetch.copy(self._sums[: leaf.nbytes], self._sums_arena.chunk(leaf.index))
        device.compute.wait(device.fetch.record())
        self.fetched_bytes += leaf.nbytes
        found = {}
        for index in waiting.sums.present:
            spec = leaf.tensors[index]
            flat = self._sums[spec.offset : spec.offset + spec.nbytes]
            found[index] = flat.view(spec.dtype).view(spec.shape)
        return found


class _Waiting:
    """One chunk until it is reduced."""

    def __init__(self, host: ShardedChunk) -> None:
        self.host = host
        self.gradients: dict[int, Tensor] = {}
        self.sums: MicroBatchSums | None = None
        self.arriving: Arriving | None = None
        self._used: set[int] = set()

    def total(self, index: int, sums: dict[int, Tensor]) -> Tensor | None:
        """Gradient of a parameter over all micro-batches; None without any."""
        earlier, last = sums.get(index), self.gradients.get(index)
        if earlier is None:
            return last
        if last is not None and index not in self._used:
            # once: a parameter may lie in several shards
            earlier.add_(last)
        self._used.add(index)
        return earlier

    def drop(self) -> None:
        """It has been packed."""
        self._used.update(self.gradients)
        self.gradients.clear()
        if self.sums is not None:
            self.sums.present.clear()

    def take_used(self) -> list[bool]:
        """Whether each parameter had a gradient in this step."""
        used, self._used = self._used, set()
        return [index in used for index in range(len(self.host.params))]

    def forget(self) -> None:
        """Its gradients are not wanted."""
        self.drop()
        self._used = set()


class MicroBatchSums:
    """Gradients of a whole chunk that one rank adds up on its host.

    Args:
        host: The chunk.
        leaf: Its tensors in the dtype of the sums.
        arena: Holds them.
        device: Is told what is read and written.

    Attributes:
        present: Indices of parameters that have a sum.
    """

    def __init__(
        self, host: ShardedChunk, leaf: Chunk, arena: Arena, device: Device
    ) -> None:
        self.chunk = host.chunk
        self.params = host.params
        self.leaf = leaf
        self.present: set[int] = set()
        self._device = device
        self._sums = [arena.tensor(leaf.index, spec) for spec in leaf.tensors]

    def first_buffer(self, index: int) -> Tensor | None:
        """Where a first gradient may be copied as it is; None if it must be added."""
        same = self._sums[index].dtype == self.chunk.tensors[index].dtype
        return self._sums[index] if same and index not in self.present else None

    def arrived(self, index: int) -> None:
        """The copy into `first_buffer` has been queued."""
        self.present.add(index)

    def accumulate(self, index: int, gradient: Tensor) -> None:
        """Add a host gradient."""
        total = self._sums[index]
        self._device.reads((gradient,))
        self._device.writes((total,))
        if index in self.present:
            total.add_(gradient)
        else:
            total.copy_(gradient)
            self.present.add(index)
