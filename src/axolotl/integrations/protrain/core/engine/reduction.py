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
from ..types import IN_FLIGHT, Counters
from .gradients import Gradients, unshared
from .host_chunks import HostChunk, HostMemory, MainGrads
from .host_pool import HostPool
from .staging import Staging
from .worker import HostWorker


class GradientReduction(Gradients):
    """`Gradients` of several ranks; see Note [The order of collectives].

    Args:
        memory: Of the chunks.
        order: Indices of chunks in the order in which their gradients are done; empty
            for that of the layout.
    """

    def __init__(
        self,
        memory: HostMemory,
        staging: Staging,
        counters: Counters,
        worker: HostWorker,
        order: Sequence[int],
    ) -> None:
        super().__init__(memory.device, staging, counters)
        self._memory, self._ranks = memory, memory.ranks
        self._worker, self._order = worker, order
        self._hosts: list[HostChunk] = []
        self._number: dict[HostChunk, int] = {}
        # the number of each block's first one
        self._first_of: dict[int | None, int] = {}
        # which parameters of each had a gradient in this step
        self._used: list[set[int]] = []
        self._earlier_pool = HostPool()
        self._pinned: Tensor | None = None
        self._due = self._ends = False
        # who is reduced next
        self._next = 0

    def attach(self, chunks: Sequence[HostChunk]) -> None:
        self._hosts = sorted(chunks, key=self._turn)
        self._used = [set() for _ in self._hosts]
        for number, host in reversed([*enumerate(self._hosts)]):
            self._first_of[host.chunk.block] = self._number[host] = number

    def begin_micro_batch(self, synchronises: bool) -> None:
        self._begin_anew()
        if synchronises:
            # or a gradient would be added to less than there is
            self._send_all()
        super().begin_micro_batch(synchronises)
        if synchronises:
            self._due, self._ends, self._next = bool(self._hosts), False, 0

    def _begin_anew(self) -> None:
        """Forget averages whose `.grad` somebody has set to None.

        Raises:
            AccessError: Others are there, to which nothing can be added.
        """
        for number, host in enumerate(self._hosts):
            present = host.main_grads.present
            launched = self._due and number < self._next
            for index in range(len(host.params)) if launched or present else ():
                if host.params[index].grad is None:
                    present.discard(index)
                elif launched or index in present:
                    raise AccessError(
                        f"{host.chunk.tensors[index].name}: a micro-batch begins where "
                        "the gradient of this weight has been averaged over the ranks, "
                        "and cannot be added to. Say which micro-batch of a step is the "
                        "last (`micro_batch(last=False)` around others, in a Trainer "
                        "gradient_accumulation_steps), or call `zero_grad` before."
                    )
        self._due = False

    def reach(self, block: int) -> None:
        # what follows the block in forward is done
        if not self._due:
            return
        if not self._ends:
            # before the hooks of DDP that wait, and called once all of backward has run
            self._ends = True
            launch_all = partial(self._launch_until, len(self._hosts))
            torch.autograd.Variable._execution_engine.queue_callback(launch_all)
        self._launch_until(self._first_of.get(block, 0))

    def settle(self) -> None:
        # all ranks call it at the same point of a step
        reduces = self._due
        if reduces:
            self._launch_until(len(self._hosts))
            self._due = False
        self.settle_own()
        if not reduces:
            return
        width = max(len(host.params) for host in self._hosts)
        flags = torch.zeros(len(self._hosts), width, dtype=torch.uint8, device="cpu")
        for row, host, used in zip(flags, self._hosts, self._used, strict=True):
            # not what somebody has set to None since
            row[[i for i in used if host.params[i].grad is not None]] = 1
            used.clear()
        # a parameter that no rank has used keeps its weight, as without paging
        flags = self._ranks.maximum(flags)
        for row, host in zip(flags.tolist(), self._hosts, strict=True):
            host.main_grads.present.clear()
            host.main_grads.present.update(
                i for i, was_used in enumerate(row) if was_used
            )
        for host in self._hosts:
            host.grads.put_agreed()

    def close(self) -> None:
        super().close()
        for host in self._hosts:
            host.main_grads.arrived.clear()
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

    def take(self, host: HostChunk, index: int, gradient: Tensor) -> None:
        if self._synchronises:
            if not self._due:
                raise AccessError(
                    f"{host.chunk.tensors[index].name}: on several ranks a gradient comes "
                    "in a micro-batch that has begun, and whose step has not been averaged "
                    "since. Go backward inside `with paged.micro_batch():`, and look at "
                    "weights and gradients (`full_params`, `state_dict`, a copy of the "
                    "model) before it or after its backward, not in between."
                )
            if self._number[host] < self._next or index in host.main_grads.arrived:
                name = host.chunk.tensors[index].name
                raise AccessError(
                    f"{name}: a gradient came in the last micro-batch of a step when "
                    "that of this weight was on its way to the other ranks: in a second "
                    "backward pass, or from blocks that ran twice or in another order "
                    "than planned. On several ranks each call of training_step may run "
                    "one backward through each block, in its order: add the losses up, "
                    "use gradient_accumulation_steps, or set "
                    "protrain_force_all_persistent: true."
                )
            if host.earlier is not None:
                gradient = self._added(host.earlier, index, gradient)
            self._device.writes((gradient,), self._device.compute)
            host.main_grads.arrived[index] = gradient
            return
        if self._pinned is None:
            self._begin_sums()
        assert host.earlier is not None
        super().take(host, index, gradient)

    def drop(self, host: HostChunk, index: int) -> None:
        if host.earlier is not None:
            self._forget(host.earlier, index)

    def _begin_sums(self) -> None:
        """Only runs that accumulate need them."""
        in_fp32 = self._memory.main_grads_fp32
        summed = [main_chunk(host.chunk, in_fp32) for host in self._hosts]
        self._pinned = self._earlier_pool.add(summed)
        assert self._pinned is not None
        self._device.pin(self._pinned)
        self.host_bytes = self._earlier_pool.nbytes
        for host in self._hosts:
            whole = range(len(host.params))
            given = self._earlier_pool, self._memory, whole
            host.earlier = MainGrads(host.chunk, *given)
            self._expect(host.earlier)

    def _launch_until(self, number: int) -> None:
        while self._next < number:
            self._launch(self._next)
            self._next += 1

    def _launch(self, number: int) -> None:
        """See Note [Averages]."""
        device, host = self._device, self._hosts[number]
        self._worker.wait(host.chunk.index)
        averages = self._scaled(host, self._used[number])
        # those that other ranks have told are of averages before
        host.main_grads.norms.clear()
        self.retire(IN_FLIGHT - 1)
        communicate, offload = device.communicate, device.offload
        communicate.wait(device.compute.record())
        for rank, span in enumerate(host.owners):
            for index in span:
                average = averages[index]
                communicate.call(partial(self._ranks.reduce, average, rank), (average,))
                if index in host.span:
                    norm = partial(host.main_grads.take_norms, {index: average})
                    communicate.call(norm, ())
        offload.wait(communicate.record())
        for index in host.span:
            offload.copy(host.main_grads.tensors[index], averages[index])
            self._counters.offloaded_bytes += averages[index].nbytes
        self._leaves(host.main_grads, averages)

    def _scaled(self, host: HostChunk, used: set[int]) -> list[Tensor]:
        """This rank's part of the average of each gradient of a chunk."""
        gradients, earlier = host.main_grads.arrived, host.earlier
        scaled = []
        for index, param in enumerate(host.params):
            own, dtype = (
                gradients.pop(index, None),
                host.main_grads.tensors[index].dtype,
            )
            if own is None and param.grad is None and earlier is not None:
                # somebody has forgotten what there was
                earlier.present.discard(index)
            if own is not None or (earlier is not None and index in earlier.present):
                used.add(index)
            if own is None:
                own = torch.zeros(param.shape, dtype=dtype, device=param.device)
                if earlier is not None:
                    own = self._added(earlier, index, own)
            own = unshared(own.to(dtype).contiguous())
            scaled.append(own.mul_(1.0 / self._ranks.world.size))
        if earlier is not None:
            self._let_go(earlier)
        self._device.writes(scaled, self._device.compute)
        return scaled
