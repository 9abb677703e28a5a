"""Send the gradients of host-kept chunks to the host and add them up there.

Counted by post-accumulate hooks, never by module backward hooks: those fire before
leaf gradients are there. Once a chunk's last gradient is, all of them are copied; the
device tensors are held until the copy's event, and at most two chunks are in flight.

# Note [Sums of micro-batches]

Sums keep the order of the micro-batches, which fixes their last bit. The first gradient
lands in the buffer of the sum itself, where dtypes agree; a later one lands in a staging
buffer and is added on the host thread, which works in order. A parameter whose gradient of
the micro-batch before still waits for its chunk sends that one first. What never arrives,
because the loss does not depend on it, stays without a sum, so AdamW skips it as in the
plain run; what has arrived goes when backward has come past the block.

A rank alone lets them land where the update reads them and packs nothing. Several ranks
reduce shards of them in a fixed order, which is another pass over the bytes, with buffers
on the device (`GradientReduction`): two strategies with one face, `Gradients`, because
each would only skip the other's steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from ..errors import AccessError
from ..runtime import Device, HostTask, HostWorker, Removable, host_buffer
from ..runtime.device import Event
from ..types import IN_FLIGHT, Counters
from .host_chunks import GradientSums, HostChunk, tensor_in
from .stand_ins import ShownGradients


class Gradients:
    """Brings gradients of host chunks to where the host optimizer reads them."""

    host_bytes = 0
    """Page-locked, beside what the chunks have."""

    def __init__(self) -> None:
        self._shown: list[ShownGradients] = []

    def attach(self, chunks: Sequence[HostChunk]) -> list[Removable]:
        """Hook every parameter of the chunks, whose state is on the host."""
        raise NotImplementedError

    def show(self) -> None:
        """Let `.grad` of parameters be their settled gradients; see `ShownGradients`."""
        for shown in self._shown:
            shown.show()

    def keep_replaced(self) -> None:
        """What was put in their place is not the memory of others from here on."""
        for shown in self._shown:
            shown.keep_replaced()

    def hide(self) -> None:
        """Take over what was done to them."""
        for shown in self._shown:
            shown.hide()

    def take_back(
        self, pending: Callable[[int], bool], wait: Callable[[int], None]
    ) -> None:
        """Take over what `.grad` was set to meanwhile, after `settle`.

        `pending` says whether a chunk waits for its update, `wait` returns after it.
        """
        for shown in self._shown:
            index = shown.host.chunk.index
            shown.take_back(pending(index), partial(wait, index))

    def spend(self) -> None:
        """A step ends."""
        for shown in self._shown:
            shown.spend()

    def begin_micro_batch(self, synchronises: bool) -> None:
        """A forward begins; with `synchronises` it is the last one of a step."""

    def reach(self, block: int) -> None:
        """Backward has come to a block, whose window is not open yet."""

    def left(self, block: int) -> None:
        """Backward has come past a block, and the next one's window is open."""

    def retire(self) -> None:
        """Let go of what has arrived on the host; waits for nothing."""

    def settle(self) -> None:
        """Return once every gradient produced so far is where the update reads it."""

    def discard(self) -> None:
        """Forget what has not been sent; return once nothing is on its way."""

    def close(self) -> None:
        """Release gradients and memory; no copy may be in flight.

        Raises:
            Exception: What the sum of a gradient raised, unless `settle` has.
        """

    def _hook(
        self,
        host: HostChunk,
        take: Callable[[int, Tensor], None],
        drop: Callable[[int], None],
        settle: Callable[[], None],
    ) -> list[Removable]:
        """Give each gradient of a chunk away, with the index of its parameter, as soon as
        autograd has accumulated it.

        `drop` is called before, if the parameter has none: somebody set it to None;
        `settle` if somebody set it to a tensor, which replaces what is on its way.
        """
        shown = ShownGradients(host)
        self._shown.append(shown)
        for spec, param in zip(host.chunk.tensors, host.params, strict=True):
            if param._post_accumulate_grad_hooks:
                raise AccessError(
                    f"{spec.name}: a post-accumulate hook of somebody else's is there, "
                    "but the sum of this gradient is on the host. Use "
                    "`register_hook`, which sees each micro-batch, or an event of a "
                    "callback (on_pre_optimizer_step)."
                )

        backward, accumulates = -1, True

        def before(index: int, param: nn.Parameter, _gradient: Tensor) -> None:
            nonlocal backward, accumulates
            if backward != torch._C._current_graph_task_id():
                backward = torch._C._current_graph_task_id()
                accumulates = _accumulates(param)
            if accumulates:
                shown.make_room(index, settle, drop)

        def after(index: int, param: Tensor) -> None:
            gradient = param.grad
            shown.put(index)
            if gradient is not None:
                take(index, gradient)

        handles: list[Removable] = []
        for index, param in enumerate(host.params):
            handles.append(param.register_hook(partial(before, index, param)))
            hook = partial(after, index)
            handles.append(param.register_post_accumulate_grad_hook(hook))
        return handles


class GradientOffload(Gradients):
    """`Gradients` of a rank alone; see Note [Sums of micro-batches]."""

    def __init__(
        self, device: Device, worker: HostWorker, counters: Counters | None = None
    ) -> None:
        super().__init__()
        self._device, self._worker = device, worker
        self._counters = counters or Counters()
        self._expected: list[GradientSums] = []
        self._of_block: dict[int | None, list[GradientSums]] = {}
        self._in_flight: deque[tuple[Event, list[Tensor]]] = deque()
        self._staging: list[Tensor] = []
        self._staging_users: list[HostTask[None] | None] = [None] * IN_FLIGHT
        self._next_staging = 0

    def attach(self, chunks: Sequence[HostChunk]) -> list[Removable]:
        handles: list[Removable] = []
        for host in chunks:
            sums = host.sums
            assert sums is not None
            self.expect(sums)
            take, drop = partial(self.take, sums), partial(self.drop, sums)
            handles += self._hook(host, take, drop, self.settle)
        return handles

    def expect(self, sums: GradientSums) -> None:
        """Gradients of a chunk will come."""
        self._expected.append(sums)
        self._of_block.setdefault(sums.chunk.block, []).append(sums)

    def left(self, block: int) -> None:
        # what has not arrived of it never will
        for sums in self._of_block.get(block, ()):
            self._send(sums)

    def retire(self) -> None:
        while self._in_flight and self._in_flight[0][0].query():
            self._retire()

    def settle(self) -> None:
        for sums in self._expected:
            # parameters the loss does not depend on never arrive
            self._send(sums)
        while self._in_flight:
            self._retire()
        for slot in range(IN_FLIGHT):
            self._wait_staging(slot)

    def discard(self) -> None:
        for sums in self._expected:
            sums.arrived.clear()
        self.settle()

    def close(self) -> None:
        self._in_flight.clear()
        for sums in self._expected:
            sums.arrived.clear()
        with ExitStack() as rest:
            while self._staging:
                rest.callback(self._device.unpin, self._staging.pop())
            for slot in range(IN_FLIGHT):
                rest.callback(self._wait_staging, slot)

    def take(self, sums: GradientSums, index: int, gradient: Tensor) -> None:
        """A gradient of a micro-batch is there."""
        self._device.writes((gradient,), self._device.compute)
        if index in sums.arrived:
            # the next micro-batch: sums keep the order of the plain run
            self._send(sums)
        sums.arrived[index] = gradient
        if len(sums.arrived) == len(sums.chunk.tensors):
            self._send(sums)

    def drop(self, sums: GradientSums, index: int) -> None:
        """Forget the sum of a parameter so far, if there is one."""
        if index in sums.present or index in sums.arrived:
            self.settle()
            sums.present.discard(index)

    def _send(self, sums: GradientSums) -> None:
        gradients, sums.arrived = sums.arrived, {}
        if not gradients:
            return
        while len(self._in_flight) >= IN_FLIGHT:
            self._retire()
        stream = self._device.offload
        stream.wait(self._device.compute.record())
        staged: list[tuple[int, Tensor]] = []
        slot, staging = 0, None
        for index, gradient in gradients.items():
            buffer = sums.first_buffer(index, gradient.dtype)
            if buffer is not None:
                stream.copy(buffer, gradient)
                sums.present.add(index)
                continue
            if staging is None:
                slot, staging = self._claim_staging()
            view = tensor_in(staging, sums.chunk.tensors[index])
            stream.copy(view, gradient)
            staged.append((index, view))
        event = sums.sent = stream.record()
        self._counters.offloaded_bytes += sum(g.nbytes for g in gradients.values())
        self._in_flight.append((event, list(gradients.values())))
        if staged:
            work = partial(_add, event, sums, staged)
            self._staging_users[slot] = self._worker.submit(work)
        self.retire()

    def _claim_staging(self) -> tuple[int, Tensor]:
        slot = self._next_staging
        self._next_staging = (slot + 1) % IN_FLIGHT
        if slot == len(self._staging):
            # only runs that accumulate need them
            buffer = host_buffer(max(sums.chunk.nbytes for sums in self._expected))
            self._device.pin(buffer)
            self._staging.append(buffer)
        self._wait_staging(slot)
        return slot, self._staging[slot]

    def _wait_staging(self, slot: int) -> None:
        """Return once nobody reads a staging buffer; raise the failure of a sum once."""
        user = self._staging_users[slot]
        if user is not None:
            user.wait()
            # forgotten only now: an interrupt must not free what is being read
            self._staging_users[slot] = None
            user.result()

    def _retire(self) -> None:
        event, _gradients = self._in_flight.popleft()
        event.synchronize()


def _accumulates(param: Tensor) -> bool:
    """Whether the backward pass that runs ends in `.grad`; `torch.autograd.grad` calls
    the hooks of a leaf, too."""
    node = torch.autograd.graph.get_gradient_edge(param).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        # so it answers for a leaf whose gradient is the result
        return False


def _add(event: Event, sums: GradientSums, staged: list[tuple[int, Tensor]]) -> None:
    # the copy has a stream of its own; adding before its event reads old bytes
    event.synchronize()
    for index, gradient in staged:
        sums.add(index, gradient)
