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

# Note [Averages]

A gradient is scaled and summed where autograd has made it, whole, and goes to the rank that
updates the weight, which takes its norm as it passes. At most `IN_FLIGHT` chunks are under
way. Averages arrive in shared memory that the last update of the chunk may still read on a
rank that has not used the chunk since, so launching waits for that update first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..errors import AccessError
from ..layout import main_chunk
from ..runtime import Arena, Device, HostWorker, Ranks, Removable, Staging
from ..types import Counters
from .gradients import Gradients
from .host_chunks import HostChunk
from .sums import GradientSums


class GradientReduction(Gradients):
    """`Gradients` of several ranks; see Note [The order of collectives].

    Args:
        order: Indices of chunks in the order in which their gradients are done; empty
            for that of the layout.
        sums_fp32: Sums of 16-bit gradients are kept in fp32.
    """

    def __init__(
        self,
        device: Device,
        worker: HostWorker,
        staging: Staging,
        ranks: Ranks,
        order: Sequence[int],
        sums_fp32: bool,
        counters: Counters,
    ) -> None:
        super().__init__(device, staging, counters)
        self._worker, self._ranks = worker, ranks
        self._order, self._sums_fp32 = order, sums_fp32
        self._waiting: list[_Waiting] = []
        self._of_chunk: dict[int, _Waiting] = {}
        self._first_of_block: dict[int, int] = {}
        self._sums_arena = Arena()
        self._pinned: Tensor | None = None
        self._due = self._ends = False
        self._next = 0

    def attach(self, chunks: Sequence[HostChunk]) -> list[Removable]:
        chunks = sorted(chunks, key=self._turn)
        self._waiting = [_Waiting(host) for host in chunks]
        self._of_chunk = {w.host.chunk.index: w for w in self._waiting}
        for number, waiting in enumerate(self._waiting):
            block = waiting.host.chunk.block
            if block is not None:
                self._first_of_block.setdefault(block, number)
        return [handle for host in chunks for handle in self._hook(host)]

    def begin_micro_batch(self, synchronises: bool) -> None:
        super().begin_micro_batch(synchronises)
        if synchronises:
            # or a gradient would be added to less than there is
            self._send_all()
            self._due, self._ends, self._next = True, False, 0
            for waiting in self._waiting:
                waiting.launched = False

    def reach(self, block: int) -> None:
        super().reach(block)
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

    def settle(self) -> None:
        # all ranks call it at the same point of a step
        reduces = self._due and bool(self._waiting)
        if reduces:
            self._launch_until(len(self._waiting))
            self._due = False
        self._settle_own()
        if not reduces:
            return
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
            present = waiting.host.sums.present
            present.clear()
            present.update(i for i, was_used in enumerate(row) if was_used)
        for shown in self._shown:
            shown.stand_in()

    def discard(self) -> None:
        self._due = False
        super().discard()
        for waiting in self._waiting:
            waiting.forget()

    def close(self) -> None:
        super().close()
        for waiting in self._waiting:
            waiting.forget()
        if self._pinned is not None:
            self._device.unpin(self._pinned)
            self._pinned = None

    def _turn(self, host: HostChunk) -> tuple[int, ...]:
        """Backward's order: the plan's, else from the last block to the first, and then
        what lies outside of blocks."""
        chunk = host.chunk
        if not self._order:
            return (0, -chunk.index) if chunk.pageable else (1, chunk.index)
        known = chunk.index in self._order
        return (self._order.index(chunk.index) if known else len(self._order),)

    def _take(self, host: HostChunk, index: int, gradient: Tensor) -> None:
        waiting = self._of_chunk[host.chunk.index]
        if self._synchronises:
            if not self._due:
                raise RuntimeError("backward without begin_micro_batch before it")
            if waiting.launched or index in waiting.gradients:
                name = host.chunk.tensors[index].name
                raise AccessError(
                    f"{name}: a second backward pass in the last micro-batch of a step "
                    "has reached this weight, whose gradient is on its way to the other "
                    "ranks. On several ranks each call of training_step may run one: "
                    "add the losses up, use gradient_accumulation_steps, or set "
                    "protrain_force_all_persistent: true."
                )
            if host.earlier is not None:
                gradient = self._added(host.earlier, index, gradient)
            self._device.writes((gradient,), self._device.compute)
            waiting.gradients[index] = gradient
            return
        if self._pinned is None:
            self._begin_sums()
        assert host.earlier is not None
        self._add(host.earlier, index, gradient)

    def _drop(self, host: HostChunk, index: int) -> None:
        if host.earlier is not None:
            self._forget(host.earlier, index)

    def _begin_sums(self) -> None:
        """Only runs that accumulate need them."""
        chunks = [waiting.host.chunk for waiting in self._waiting]
        summed = [main_chunk(chunk, self._sums_fp32) for chunk in chunks]
        self._pinned = self._sums_arena.add(summed)
        assert self._pinned is not None
        self._device.pin(self._pinned)
        self.host_bytes = self._sums_arena.nbytes
        for waiting, own in zip(self._waiting, chunks, strict=True):
            earlier = waiting.host.earlier = GradientSums(
                own,
                self._sums_arena,
                self._device,
                range(len(own.tensors)),
                self._sums_fp32,
            )
            self._expect(earlier)

    def _launch_until(self, number: int) -> None:
        while self._next < number:
            self._launch(self._waiting[self._next])
            self._next += 1

    def _launch(self, waiting: _Waiting) -> None:
        """See Note [Averages]."""
        device, host = self._device, waiting.host
        self._worker.wait(host.chunk.index)
        averages = self._scaled(waiting)
        self._make_room()
        communicate, offload = device.communicate, device.offload
        communicate.wait(device.compute.record())
        for rank, span in enumerate(host.owners):
            for index in span:
                average = averages[index]
                communicate.call(partial(self._ranks.reduce, average, rank), (average,))
                if index in host.span:
                    norm = partial(_take_norm, host.sums, index, average)
                    communicate.call(norm, ())
        offload.wait(communicate.record())
        for index in host.span:
            offload.copy(host.sums[index], averages[index])
            self._counters.offloaded_bytes += averages[index].nbytes
        self._leaves(host.sums, averages)

    def _scaled(self, waiting: _Waiting) -> list[Tensor]:
        """This rank's part of the average of each gradient of a chunk."""
        host, compute = waiting.host, self._device.compute
        gradients, earlier = waiting.gradients, host.earlier
        scaled = []
        for index, param in enumerate(host.params):
            own, dtype = gradients.pop(index, None), host.sums[index].dtype
            if own is not None or (earlier is not None and index in earlier.present):
                waiting.used.add(index)
            if own is None:
                own = torch.zeros(param.shape, dtype=dtype, device=param.device)
                if earlier is not None:
                    own = self._added(earlier, index, own)
            own = own.to(dtype).contiguous()
            scaled.append(own.mul_(1.0 / self._ranks.world.size))
        if earlier is not None:
            self._let_go(earlier)
        self._device.writes(scaled, compute)
        waiting.launched = True
        return scaled


class _Waiting:
    """One chunk until it is reduced; `used` are indices of its parameters that had a
    gradient in this step, `launched` says that the reduction has begun."""

    def __init__(self, host: HostChunk) -> None:
        self.host = host
        self.gradients: dict[int, Tensor] = {}
        self.used: set[int] = set()
        self.launched = False

    def forget(self) -> None:
        """Its gradients are not wanted."""
        self.gradients.clear()
        self.used.clear()
        if self.host.earlier is not None:
            self.host.earlier.present.clear()


def _take_norm(sums: GradientSums, index: int, average: Tensor) -> None:
    sums.norms[index] = sums.norm(average)
