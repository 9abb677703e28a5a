"""Send the gradients of host-kept chunks to the host, where sums of them rest.

Counted by post-accumulate hooks, never by module backward hooks: those fire before
leaf gradients are there. Once a chunk's last gradient is, all of them are copied; the
device tensors are held until the copy's event, and at most two chunks are in flight.

# Note [Sums of micro-batches]

The first micro-batch sends its gradients as they are. In later ones the sum so far comes
back through `Staging`, piece by piece in the order of the micro-batch before, as far ahead as
there is room, is added to the new gradient, in place, which is what autograd does without
paging, and the result leaves. Norms of the last sums are taken as they leave, by the kernel
that the plain run takes. A parameter whose gradient of the micro-batch before still waits for
its chunk sends that one first. What never arrives, because the loss does not depend on it,
stays without a sum, so the optimizer skips it as in the plain run; what has arrived goes
when backward has come past the block.

A rank alone lets them land where the update reads them. Of several ranks each does so
until the last micro-batch, in which they are averaged (`GradientReduction`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from ..types import IN_FLIGHT, Counters
from .device import Device, Event
from .host_chunks import HostChunk, MainGrads
from .staging import Staging


def unshared(gradient: Tensor) -> Tensor:
    """Return a gradient to be changed in place: a copy where others are in its memory,
    which backward still reads. That of a view may be in the memory of what it was added
    to."""
    storage = gradient.untyped_storage()
    # this object's and the tensor's own
    is_shared = torch._C._storage_Use_Count(storage._cdata) > 2
    return gradient.clone() if is_shared else gradient


class Gradients:
    """Brings gradients of host chunks to where the update reads them, of a rank alone;
    see Note [Sums of micro-batches].

    Args:
        staging: Brings sums back.
    """

    host_bytes = 0
    """Page-locked, beside what the chunks have."""

    def __init__(
        self, device: Device, staging: Staging, counters: Counters | None = None
    ) -> None:
        self._device, self._staging = device, staging
        self._counters = counters or Counters()
        self._expected: list[MainGrads] = []
        self._of_block: dict[int | None, list[MainGrads]] = {}
        self._in_flight: deque[tuple[Event, list[Tensor]]] = deque()
        self._synchronises = True

    def attach(self, chunks: Sequence[HostChunk]) -> None:
        """Expect gradients of these chunks, whose state is on the host."""
        for host in chunks:
            self._expect(host.main_grads)

    def begin_micro_batch(self, synchronises: bool) -> None:
        """A forward begins; with `synchronises` it is the last one of a step."""
        self._synchronises = synchronises

    def sums_of(self, block: int) -> list[MainGrads]:
        """Gradients of a block's chunks to which another micro-batch will add."""
        return [grads for grads in self._of_block.get(block, ()) if grads.present]

    def fetch_sum(self, grads: MainGrads) -> bool:
        """Bring sums back ahead of the gradients that are added to them, as far as there
        is room; False if that was not for all."""
        return all(
            self._staging.fetch(grads.key(number), [grads.source(number)])
            for number in grads.order
            if number in grads.unread
        )

    def reach(self, block: int) -> None:
        """Note that backward has come to a block, which is not in use yet."""

    def send_rest(self, block: int) -> None:
        """Send what a block has, whose backward is over: nothing else will arrive."""
        for grads in self._of_block.get(block, ()):
            self._send(grads)

    def retire(self, most: int = IN_FLIGHT) -> None:
        """Let go of what has arrived on the host; wait until `most` chunks are under way."""
        in_flight = self._in_flight
        while in_flight and (len(in_flight) > most or in_flight[0][0].query()):
            event, _gradients = in_flight.popleft()
            event.synchronize()

    def settle(self) -> None:
        """Return once every gradient produced so far is where the update reads it."""
        self.settle_own()

    def discard(self) -> None:
        """Forget what has not been sent; return once nothing is on its way."""
        for main_grads in self._expected:
            main_grads.arrived.clear()
            self._let_go(main_grads)
        self.retire(0)

    def close(self) -> None:
        """Release gradients and memory; no copy may be in flight."""
        self._in_flight.clear()
        for main_grads in self._expected:
            main_grads.arrived.clear()

    def make_room(self, host: HostChunk, index: int, is_last: bool) -> None:
        """Let autograd add a gradient: see `GradPlaceholders.make_room`.

        A gradient that somebody has set replaces what was sent, and None drops it.
        """
        param = host.params[index]
        if param.grad is not host.grads.placeholders[index]:
            if param.grad is not None:
                self.settle_own()
            host.grads.hide_one(index)
            if param.grad is None:
                self.drop(host, index)
        host.grads.make_room(index, is_last)

    def take(self, host: HostChunk, index: int, gradient: Tensor) -> None:
        """Take the gradient of a parameter that autograd has accumulated."""
        main_grads = host.earlier or host.main_grads
        if index in main_grads.arrived:
            # the next micro-batch: sums keep the order of the plain run
            self._send(main_grads)
        gradient = self._added(main_grads, index, gradient)
        main_grads.norms.pop(index, None)
        self._device.writes((gradient,), self._device.compute)
        main_grads.arrived[index] = gradient
        if len(main_grads.arrived) == len(main_grads.chunk.tensors):
            self._send(main_grads)

    def drop(self, host: HostChunk, index: int) -> None:
        """Forget the sum of a parameter so far, if there is one."""
        self._forget(host.main_grads, index)

    def _expect(self, main_grads: MainGrads) -> None:
        """Gradients of a chunk will come."""
        self._expected.append(main_grads)
        self._of_block.setdefault(main_grads.chunk.block, []).append(main_grads)

    def _send_all(self) -> None:
        """Send what has arrived: parameters the loss does not depend on never do."""
        for main_grads in self._expected:
            self._send(main_grads)

    def settle_own(self) -> None:
        """Return once what this rank has is on its host."""
        self._send_all()
        self.retire(0)

    def _forget(self, main_grads: MainGrads, index: int) -> None:
        if index in main_grads.present or index in main_grads.arrived:
            self.settle_own()
            main_grads.present.discard(index)

    def _added(self, main_grads: MainGrads, index: int, gradient: Tensor) -> Tensor:
        """A gradient with the sum so far, in the dtype of that, which is spent then."""
        gradient = gradient.to(main_grads.tensors[index].dtype)
        if index not in main_grads.present:
            return gradient
        gradient, compute = unshared(gradient), self._device.compute
        # on the host it is old from now on
        main_grads.present.discard(index)
        try:
            for number in main_grads.pieces_of[index]:
                piece, key = main_grads.pieces[number], main_grads.key(number)
                (memory,) = self._staging.take(key, [main_grads.source(number)])
                own = main_grads.in_piece(memory, piece, [index])[index]
                if piece.elements is None:
                    gradient.add_(own)
                else:
                    gradient = gradient.contiguous()
                    gradient.view(-1)[piece.elements].add_(own)
                self._device.reads((own,), compute)
                if main_grads.present.isdisjoint(piece.span):
                    self._give_back(main_grads, number)
        except torch.OutOfMemoryError:
            # the micro-batch is lost, not those before
            main_grads.present.add(index)
            raise
        self._device.writes((gradient,), compute)
        return gradient

    def _give_back(self, main_grads: MainGrads, number: int) -> None:
        """Give the staged sums of a piece back, and use the room for the next ones."""
        main_grads.unread.discard(number)
        self._staging.give_back(main_grads.key(number))
        block = main_grads.chunk.block
        if self.fetch_sum(main_grads) and block is not None:
            all(map(self.fetch_sum, self.sums_of(block - 1)))

    def _let_go(self, main_grads: MainGrads) -> None:
        """Give back what is staged of a chunk's sums."""
        for number in range(len(main_grads.pieces)):
            fetched = self._staging.give_back(main_grads.key(number))
            if fetched is not None:
                # it has read what is overwritten next
                self._device.offload.wait(fetched)

    def _send(self, main_grads: MainGrads) -> None:
        self._let_go(main_grads)
        gradients, main_grads.arrived = main_grads.arrived, {}
        if not gradients:
            return
        self.retire(IN_FLIGHT - 1)
        if self._synchronises:
            main_grads.take_norms(gradients)
        stream = self._device.offload
        stream.wait(self._device.compute.record())
        for index, gradient in gradients.items():
            stream.copy(main_grads.tensors[index], gradient)
            main_grads.present.add(index)
        main_grads.sent_in_order(gradients)
        self._counters.offloaded_bytes += sum(g.nbytes for g in gradients.values())
        self._leaves(main_grads, list(gradients.values()))

    def _leaves(self, main_grads: MainGrads, gradients: list[Tensor]) -> None:
        """Hold gradients until their copies to the host, queued now, have ended."""
        main_grads.sent = self._device.offload.record()
        self._in_flight.append((main_grads.sent, gradients))
        self.retire()
