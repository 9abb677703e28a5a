"""Gradients that add up on the device although their sums are on the host.

The first micro-batch sends them as `GradientOffload` does. In later ones the sum so far
comes back through `Staging`, a block ahead, is added to the new gradient, in place, which
is what autograd does without paging, and the result leaves. The norm of each is taken as it
passes, by the kernel that the plain run takes. What lies outside blocks comes back in
pieces, when its gradient is there.
"""

from __future__ import annotations

from torch import Tensor

from ..runtime import Device, HostWorker, Source, Staging
from ..types import SUM_PIECE_BYTES, Counters
from .gradients import GradientOffload
from .host_chunks import GradientSums


class DeviceSums(GradientOffload):
    """`Gradients` of a rank alone whose updates happen on the device."""

    def __init__(
        self, device: Device, worker: HostWorker, staging: Staging, counters: Counters
    ) -> None:
        super().__init__(device, worker, counters)
        self._passing = staging
        self._synchronises = True

    def begin_micro_batch(self, synchronises: bool) -> None:
        self._synchronises = synchronises

    def reach(self, block: int) -> None:
        self._ahead(block)
        self._ahead(block - 1)

    def left(self, block: int) -> None:
        super().left(block)
        self._ahead(block - 2)

    def take(self, sums: GradientSums, index: int, gradient: Tensor) -> None:
        if index in sums.arrived:
            self._send(sums)
        gradient = gradient.to(sums.total(index).dtype)
        if index in sums.present:
            gradient = self._added(sums, index, gradient)
            # on the host it is old from now on
            sums.present.discard(index)
        sums.norms.pop(index, None)
        if self._synchronises:
            sums.norms[index] = sums.norm(gradient)
        super().take(sums, index, gradient)

    def _added(self, sums: GradientSums, index: int, gradient: Tensor) -> Tensor:
        compute = self._device.compute
        if sums.chunk.pageable:
            memory = self._passing.take(_key(sums), [_source(sums)])
            own = sums.within(memory, index)
            gradient.add_(own)
            self._device.reads((own,), compute)
            self._device.writes((gradient,), compute)
            return gradient
        flat = gradient.contiguous().view(-1)
        for piece in flat.split(self._piece_bytes() // flat.element_size()):
            first = (piece.data_ptr() - flat.data_ptr(), piece.nbytes)
            where = sums.memory[first[0] : sum(first)]
            key = *_key(sums), first[0]
            memory = self._passing.take(key, [Source(where, sums.sent)])
            piece.add_(memory[: piece.nbytes].view(piece.dtype))
            self._device.reads((memory,), compute)
            self._passing.give_back(key)
        self._device.writes((flat,), compute)
        return flat.view(gradient.shape)

    def _piece_bytes(self) -> int:
        """In what sums outside of blocks come back: what the staging has for blocks."""
        every = self._expected
        of_blocks = [sums.memory.numel() for sums in every if sums.chunk.pageable]
        return max(of_blocks, default=SUM_PIECE_BYTES)

    def _send(self, sums: GradientSums) -> None:
        fetched = self._passing.give_back(_key(sums))
        if fetched is not None:
            # it has read what is overwritten next
            self._device.offload.wait(fetched)
        super()._send(sums)

    def _ahead(self, block: int) -> None:
        for sums in self._of_block.get(block, ()):
            if sums.present:
                self._passing.fetch(_key(sums), [_source(sums)])


def _key(sums: GradientSums) -> tuple[str, int]:
    return "sum", sums.chunk.index


def _source(sums: GradientSums) -> Source:
    return Source(sums.memory, sums.sent)
