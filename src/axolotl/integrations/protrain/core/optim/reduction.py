"""Average the gradients of host-kept chunks over all ranks, once an optimizer step.

As DistributedDataParallel does it: micro-batches that do not synchronise add up on each
rank's host; in the last one each rank's sum is divided by the number of ranks, and the
sums of all are added, across nodes too. Each rank receives the shard that it updates. What
no rank has used keeps its weight: one all-reduce of flags a step.

# Note [The order of collectives]

Order and number of reductions are fixed by the plan, the same on every rank: a chunk goes
when backward reaches the block before it, whether or not this rank has used it, and before
the fetches of that block, which may be gathers; the last ones go when backward ends, by a
callback of the engine that is queued before DistributedDataParallel's, so before DDP waits
for its own: else a rank that left blocks out would wait in DDP for one that waits here.
Collectives are called by the thread that trains and by autograd's, never by the host
thread. On the CPU device they block, so their order is all that there is between ranks: no
reduction of ours may wait for one of DDP's, or the other way round.

# Note [Buffers of a reduction]

`IN_FLIGHT` buffers take turns. Packing waits until the copy out of the buffer's last turn
has ended, the collective for packing, the copy to the host for the collective. Averages
arrive in shared memory that the last update of the chunk may still read on a rank that has
not used the chunk since, so launching waits for that update first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from ..errors import AccessError
from ..layout import aligned, main_chunk, reduce_bytes
from ..runtime import Arena, Device, HostWorker, Ranks, Removable
from ..runtime.device import Event
from ..types import IN_FLIGHT, Counters
from .gradients import GradientOffload, Gradients
from .host_chunks import GradientSums, HostChunk, tensor_in


class GradientReduction(Gradients):
    """`Gradients` of several ranks; see Note [The order of collectives].

    Args:
        order: Indices of chunks in the order in which their gradients are done; empty
            for that of the layout.
        fp32_master: Sums of 16-bit gradients are kept in fp32.
    """

    def __init__(
        self,
        device: Device,
        worker: HostWorker,
        ranks: Ranks,
        order: Sequence[int],
        fp32_master: bool,
        counters: Counters,
    ) -> None:
        super().__init__()
        self._device, self._worker, self._ranks = device, worker, ranks
        self._order, self._fp32_master = order, fp32_master
        self._counters = counters
        self._offload = GradientOffload(device, worker, counters)
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

    def attach(self, chunks: Sequence[HostChunk]) -> list[Removable]:
        if not chunks:
            return []
        chunks = sorted(chunks, key=self._turn)
        self._waiting = [_Waiting(host) for host in chunks]
        for number, waiting in enumerate(self._waiting):
            block = waiting.host.chunk.block
            if block is not None:
                self._first_of_block.setdefault(block, number)
        size = self._ranks.world.local_size
        nbytes = max(reduce_bytes(h.chunk, size, self._fp32_master) for h in chunks)
        for _ in range(IN_FLIGHT):
            self._buffers.append(self._device.allocate(nbytes))
            self._free.append(self._device.compute.record())
        handles: list[Removable] = []
        for waiting in self._waiting:
            take, drop = partial(self._take, waiting), partial(self._drop, waiting)
            handles += self._hook(waiting.host, take, drop, self._offload.settle)
        return handles

    def begin_micro_batch(self, synchronises: bool) -> None:
        self._synchronises = synchronises
        if synchronises:
            self._due, self._ends, self._next = True, False, 0
            for waiting in self._waiting:
                waiting.launched = False

    def reach(self, block: int) -> None:
        # what follows the block in forward is done
        if not self._due or not self._waiting:
            return
        if not self._ends:
            # before the hooks of DDP that wait, and called once all of backward has run
            self._ends = True
            launch_all = partial(self._launch_until, len(self._waiting))
            torch.autograd.Variable._execution_engine.queue_callback(launch_all)
        if block in self._first_of_block:
            self._launch_until(self._first_of_block[block])

    def retire(self) -> None:
        self._offload.retire()

    def settle(self) -> None:
        # all ranks call it at the same point of a step
        if not self._due or not self._waiting:
            self._offload.settle()
            return
        self._launch_until(len(self._waiting))
        self._due = False
        for event in self._free:
            event.synchronize()
        width = max(len(waiting.host.params) for waiting in self._waiting)
        flags = torch.zeros(len(self._waiting), width, dtype=torch.uint8)
        for row, waiting in zip(flags, self._waiting, strict=True):
            params = waiting.host.params
            # not what somebody has set to None since
            row[[i for i in waiting.used if params[i].grad is not None]] = 1
            waiting.used.clear()
        # a parameter that no rank has used keeps its weight, as without paging
        for row, waiting in zip(
            self._ranks.maximum(flags).tolist(), self._waiting, strict=True
        ):
            waiting.host.used = {i for i, was_used in enumerate(row) if was_used}
        for shown in self._shown:
            shown.stand_in()

    def discard(self) -> None:
        self._due = False
        self._offload.discard()
        for waiting in self._waiting:
            waiting.forget()

    def close(self) -> None:
        self._offload.close()
        for waiting in self._waiting:
            waiting.forget()
        if self._pinned is not None:
            self._device.unpin(self._pinned)
        for buffer in self._buffers:
            self._device.free(buffer)
        self._buffers, self._sums, self._pinned = [], None, None

    def _turn(self, host: HostChunk) -> tuple[int, ...]:
        """Backward's order: the plan's, else from the last block to the first, and then
        what lies outside of blocks."""
        chunk = host.chunk
        if not self._order:
            return (0, -chunk.index) if chunk.pageable else (1, chunk.index)
        known = chunk.index in self._order
        return (self._order.index(chunk.index) if known else len(self._order),)

    def _take(self, waiting: _Waiting, index: int, gradient: Tensor) -> None:
        if self._synchronises:
            if not self._due:
                raise RuntimeError("backward without begin_micro_batch before it")
            if waiting.launched or index in waiting.gradients:
                name = waiting.host.chunk.tensors[index].name
                raise AccessError(
                    f"{name}: a second backward pass in the last micro-batch of a step "
                    "has reached this weight, whose gradient is on its way to the other "
                    "ranks. On several ranks each call of training_step may run one: "
                    "add the losses up, use gradient_accumulation_steps, or set "
                    "protrain_force_all_persistent: true."
                )
            self._device.writes((gradient,), self._device.compute)
            waiting.gradients[index] = gradient
            return
        if self._pinned is None:
            self._begin_sums()
        assert waiting.sums is not None
        self._offload.take(waiting.sums, index, gradient)

    def _drop(self, waiting: _Waiting, index: int) -> None:
        if waiting.sums is not None:
            self._offload.drop(waiting.sums, index)

    def _begin_sums(self) -> None:
        """Only runs that accumulate need them."""
        mains = [main_chunk(w.host.chunk, self._fp32_master) for w in self._waiting]
        self._pinned = self._sums_arena.add(mains)
        assert self._pinned is not None
        self._device.pin(self._pinned)
        self.host_bytes = self._sums_arena.nbytes
        self._sums = self._device.allocate(max(main.nbytes for main in mains))
        self._buffers.append(self._sums)
        for waiting, main in zip(self._waiting, mains, strict=True):
            buffers = [self._sums_arena.tensor(main.index, s) for s in main.tensors]
            memory = self._sums_arena.chunk(main.index)
            waiting.sums = GradientSums(
                waiting.host.chunk, main, memory, buffers, self._device
            )
            waiting.host.sums = waiting.sums
            self._offload.expect(waiting.sums)

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
        # see Note [Buffers of a reduction]
        self._worker.wait(host.chunk.index)
        sums = self._fetch_sums(waiting)
        device.compute.wait(self._free[turn])
        shares, start = [], 0
        for reduction in host.reductions:
            flat = buffer[start : start + reduction.nbytes].view(reduction.dtype)
            shares.append(flat)
            start += aligned(reduction.nbytes)
            for piece in chain.from_iterable(reduction.pieces):
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
        waiting.launched = True
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
            self._counters.offloaded_bytes += part.nbytes
        self._free[turn] = offload.record()

    def _fetch_sums(self, waiting: _Waiting) -> dict[int, Tensor]:
        """Device tensors with the sums of earlier micro-batches, by parameter."""
        if waiting.sums is None or not waiting.sums.present:
            return {}
        assert self._sums is not None
        device, main = self._device, main_chunk(waiting.host.chunk, self._fp32_master)
        device.fetch.wait(device.compute.record())
        device.fetch.copy(self._sums[: main.nbytes], self._sums_arena.chunk(main.index))
        device.compute.wait(device.fetch.record())
        self._counters.fetched_bytes += main.nbytes
        return {i: tensor_in(self._sums, main.tensors[i]) for i in waiting.sums.present}


class _Waiting:
    """One chunk until it is reduced; `used` are indices of its parameters that had a
    gradient in this step, `launched` says that the reduction has begun."""

    def __init__(self, host: HostChunk) -> None:
        self.host = host
        self.gradients: dict[int, Tensor] = {}
        self.sums: GradientSums | None = None
        self.used: set[int] = set()
        self.launched = False

    def total(self, index: int, sums: dict[int, Tensor]) -> Tensor | None:
        """Gradient of a parameter over all micro-batches; None without any."""
        earlier, last = sums.get(index), self.gradients.get(index)
        if earlier is None:
            return last
        if last is not None and index not in self.used:
            # once: a parameter may lie in several shards
            earlier.add_(last)
        self.used.add(index)
        return earlier

    def drop(self) -> None:
        """It has been packed."""
        self.used.update(self.gradients)
        self.gradients.clear()
        if self.sums is not None:
            self.sums.present.clear()

    def forget(self) -> None:
        """Its gradients are not wanted."""
        self.drop()
        self.used.clear()
