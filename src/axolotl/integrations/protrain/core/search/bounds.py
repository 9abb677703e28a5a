"""Seconds that no plan of some knobs can beat, at a fraction of a simulation's cost.

Forward, backward and the update follow each other, so their bounds add up. Each is the
longest of a few chains, and each chain follows from a rule of `cost/time.py`: a block
waits for its chunks, a chunk for its slot and for its update, a gradient for the one
two before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import cached_property, partial
from itertools import accumulate
from typing import NamedTuple

from ..cost import (
    Collectives,
    HostWork,
    host_work,
    seconds_per_byte,
    update_seconds,
)
from ..layout import padded_bytes, shard_bytes
from ..types import (
    IN_FLIGHT,
    BlockTimes,
    Chunk,
    Hardware,
    Layout,
    Moved,
    Placement,
    Policy,
    Workload,
)


class Row(NamedTuple):
    """A row of policies, as far as time depends on it.

    Attributes:
        forward_s: All of forward, waiting for what leaves.
        backward: Seconds of the blocks before each, and of all: recomputation, and the
            copy of what the block before swapped, which does not begin earlier.
        alone: Seconds of each block without such copies.
        turn: The first block from which on none recomputes.
        first: The first block that swaps.
        out_bytes: What leaves in forward.
        back_bytes: What comes back in backward.
    """

    forward_s: float
    backward: list[float]
    alone: list[float]
    turn: int
    first: int
    out_bytes: int
    back_bytes: int


class StepBound:
    """Lower bounds for one model on one machine.

    Args:
        layout: The chunks.
        times: Compute of one micro-batch.
        workload: The rest of a step.
        hardware: Rates.
    """

    def __init__(
        self,
        layout: Layout,
        times: BlockTimes,
        workload: Workload,
        hardware: Hardware,
    ) -> None:
        self.layout = layout
        self.times = times
        self.hardware = hardware
        self.accumulation = workload.accumulation
        self.world = workload.world
        self.collectives = Collectives.of(hardware, workload.world)
        # seconds of the blocks before each, and of all
        self.forward = list(accumulate(times.forward_s, initial=0.0))
        self.backward = list(accumulate(times.backward_s, initial=0.0))
        self.outside_s = times.outside_forward_s + times.outside_backward_s
        self.work = {
            chunk.index: host_work(
                chunk, hardware, workload.fp32_master, world=workload.world
            )
            for chunk in layout.chunks
            if chunk.trainable
        }

    def under(self, placements: tuple[Placement, ...], shards: int = 1) -> PlacedBound:
        """Bounds of the plans with these placements."""
        return PlacedBound(self, placements, shards)

    def row(self, policies: tuple[Policy, ...], moved: Moved) -> Row:
        """What the bounds need of these policies."""
        times, hardware = self.times, self.hardware
        redone = [policy.recomputes for policy in policies]
        swaps = [policy.swaps for policy in policies]
        pairs = zip(times.backward_s, times.forward_s, redone, strict=True)
        alone = [backward + forward * again for backward, forward, again in pairs]
        seconds = alone[:]
        forward_s = self.forward[-1] + self.outside_s
        if any(swaps) and hardware.overlaps:
            copies = (nbytes / hardware.fetch_bytes_s for nbytes in moved.back[:-1])
            seconds[1:] = map(max, seconds[1:], copies)
            forward_s = left_s = 0.0
            for block, seconds_s in enumerate(times.forward_s):
                if swaps[block]:
                    # the room for it is free when the one before has left
                    forward_s = max(forward_s, left_s)
                forward_s += seconds_s
                if moved.out[block]:
                    left_s = forward_s + moved.out[block] / hardware.offload_bytes_s
            forward_s = max(forward_s + self.outside_s, left_s)
        return Row(
            forward_s,
            list(accumulate(seconds, initial=0.0)),
            alone,
            len(redone) - redone[::-1].index(True) if True in redone else 0,
            swaps.index(True) if True in swaps else 0,
            sum(moved.out),
            sum(moved.back),
        )


class _Gradients(NamedTuple):
    """Gradients that leave for the host, in their order.

    Attributes:
        works: Of each chunk.
        first_block: After whose backward the first ones leave.
        last_block: The same of the last chunk; None for one outside the blocks.
        lead_bytes: From the first one to the first large one.
        every: Bytes, and seconds of first and later sums, from that one on.
        awaited: The same without those that the trainer does not wait for.
    """

    works: list[HostWork]
    first_block: int
    last_block: int | None
    lead_bytes: int
    every: tuple[int, float, float]
    awaited: tuple[int, float, float]


class _Updates(NamedTuple):
    """How the host's updates delay the first forward.

    Attributes:
        start_s: When it can begin.
        fetch_from_s: When the first chunk can be fetched.
        end_s: When it can end.
    """

    start_s: float
    fetch_from_s: float
    end_s: float


class _Backward(NamedTuple):
    """Backward of one micro-batch.

    Attributes:
        seconds: All of it, but for its gradients.
        fetched_s: Of the fetch lane.
        gathered_s: Of collectives that bring weights.
        fetch_s: A byte's way from the host.
        offload_s: A byte's way to it.
    """

    seconds: float
    fetched_s: float
    gathered_s: float
    fetch_s: float
    offload_s: float


class PlacedBound:
    """Lower bounds of the plans that share their placements."""

    def __init__(
        self, step: StepBound, placements: tuple[Placement, ...], shards: int
    ) -> None:
        self._step = step
        self._shards = shards
        in_slots, resident = Placement.PAGED, Placement.RESIDENT
        self._paged: list[Chunk] = []
        # trained on the host, and of those what stays on the device nevertheless
        self._held: list[Chunk] = []
        self._stale: list[Chunk] = []
        updated, shared = 0, step.layout.fixed_trainable_bytes
        for chunk, placement in zip(step.layout.chunks, placements, strict=True):
            if placement is in_slots:
                self._paged.append(chunk)
            if chunk.trainable and placement is resident:
                updated += chunk.nbytes
                shared += chunk.payload_bytes
            elif chunk.trainable:
                self._held.append(chunk)
                if placement is not in_slots:
                    self._stale.append(chunk)
        self._update_s = step.times.update_s + update_seconds(updated, step.hardware)
        self._num_paged = len(self._paged)
        sizes = (padded_bytes(chunk, shards) for chunk in self._paged)
        self._bytes = list(accumulate(sizes, initial=0))
        works = [step.work[chunk.index] for chunk in self._held]
        self._leaving = sum(work.nbytes for work in works)
        self._parts = sum(work.part_bytes for work in works)
        # what earlier micro-batches have added up
        self._sums = self._leaving if step.accumulation > 1 else 0
        self._shared_s = shared * step.collectives.all_reduce_s
        self._gather_s = step.collectives.gather_s if shards > 1 else 0.0
        self._norm_s = sum(work.norm_s for work in works)

    def least_seconds(
        self, n_buffer: int, backward_s: float, out_bytes: int, back_bytes: int
    ) -> float:
        """No plan with so many slots takes less, from totals alone: each phase takes as
        long as its busiest lane.

        Args:
            n_buffer: Slots.
            backward_s: Compute of a micro-batch's backward, recomputation included.
            out_bytes: What at least leaves in forward.
            back_bytes: What at least comes back in backward.
        """
        step, hardware = self._step, self._step.hardware
        fetch_s, offload_s = 1 / hardware.fetch_bytes_s, 1 / hardware.offload_bytes_s
        missing, back_s = self._backward_bytes(n_buffer), back_bytes * fetch_s
        fetched_s = missing * fetch_s / self._shards + back_s
        gathered_s = missing * self._gather_s
        out_s = out_bytes * offload_s
        forward_s = self._forward_s(n_buffer)
        if hardware.overlaps:
            later_s = max(forward_s, out_s)
            backward_s = max(backward_s, fetched_s, gathered_s)
        else:
            later_s = forward_s + out_s
            backward_s += fetched_s + gathered_s
        first_s = self._first_forward_s(n_buffer)
        if self._held:
            first_s = max(first_s, self._updates.start_s + later_s)
        backward = _Backward(backward_s, fetched_s, gathered_s, fetch_s, offload_s)
        return self._together(
            first_s + step.outside_s,
            later_s + step.outside_s,
            backward,
            backward,
            lambda block: step.backward[-1] - step.backward[block],
        )

    def seconds(self, n_buffer: int, row: Row) -> float:
        """No plan with so many slots and these policies takes less."""
        backward = last = self._backward(n_buffer, row, 0, self._leaving)
        if self._step.world.size > 1:
            last = self._backward(n_buffer, row, self._sums, self._parts)
        return self._together(
            *self._before_backward_s(n_buffer, row),
            backward,
            last,
            partial(_done_s, row),
        )

    def _together(
        self,
        first_s: float,
        later_s: float,
        backward: _Backward,
        last: _Backward,
        done_s: Callable[[int], float],
    ) -> float:
        """All micro-batches.

        Args:
            first_s: Until backward, of the first one.
            later_s: Until backward, of another one.
            backward: Of all; with several ranks of all but the last one.
            last: Of that one.
            done_s: From the begin of backward until that of a block is done.
        """
        step, more = self._step, self._step.accumulation - 1
        if step.world.size > 1:
            return self._of_ranks(first_s, later_s, backward, last, done_s)
        backward_s, offload_s = backward.seconds, backward.offload_s
        if not step.hardware.overlaps:
            backward_s += self._leaving * offload_s
        if not self._held:
            return first_s + more * later_s + (more + 1) * backward_s

        # gradients leave one after the other, and the host adds up one after the other
        _, first_block, _, lead_bytes, every, _ = self._gradients
        ready_s = done_s(first_block)
        arrived_s = ready_s + lead_bytes * offload_s
        micro_batch_s = partial(self._micro_batch_s, backward_s, offload_s, done_s)
        nbytes, first_sums_s, later_sums_s = every
        chains = [
            # a lane that never rests
            ready_s + (more + 1) * nbytes * offload_s,
            arrived_s + first_sums_s + more * later_sums_s,
        ]
        if more:
            first_batch_s = micro_batch_s(True, False)
            chains.append(first_batch_s + later_s + arrived_s + more * later_sums_s)
            middle_s = later_s + micro_batch_s(False, False)
            last_s = later_s + micro_batch_s(False, True)
            chains.append(first_batch_s + (more - 1) * middle_s + last_s)
        else:
            chains.append(micro_batch_s(True, True))
        return first_s + max(chains) + self._norm_s

    def _micro_batch_s(
        self,
        backward_s: float,
        offload_s: float,
        done_s: Callable[[int], float],
        first: bool,
        last: bool,
    ) -> float:
        """Backward, and what the trainer waits for before what follows."""
        works, first_block, last_block, lead_bytes, every, awaited = self._gradients
        ready_s = done_s(first_block)
        arrived_s = ready_s + lead_bytes * offload_s
        nbytes, *sums = every if last else awaited
        if not nbytes:
            return backward_s
        sums_s = sums[0] if first else sums[1]
        seconds = max(backward_s, arrived_s + sums_s)
        if not last:
            return max(seconds, ready_s + nbytes * offload_s)
        work = works[-1]
        if last_block is not None:
            last_ready_s = done_s(last_block)
        else:
            last_ready_s = backward_s
            if not self._step.hardware.overlaps:
                last_ready_s -= work.nbytes * offload_s
        offloaded_s = max(
            last_ready_s + work.nbytes * offload_s, ready_s + nbytes * offload_s
        )
        sum_s = work.first_sum_s if first else work.later_sum_s
        return max(seconds, offloaded_s + sum_s)

    def _of_ranks(
        self,
        first_s: float,
        later_s: float,
        backward: _Backward,
        last: _Backward,
        done_s: Callable[[int], float],
    ) -> float:
        """All micro-batches of several ranks; arguments as in `_together`."""
        more = self._step.accumulation - 1
        last_s = self._last_backward_s(last, done_s) + self._norm_s
        if not more:
            return first_s + last_s
        backward_s, offload_s = backward.seconds, backward.offload_s
        if not self._step.hardware.overlaps:
            backward_s += self._leaving * offload_s
        before_s = backward_s + (more - 1) * (later_s + backward_s) + later_s
        if self._held:
            batch_s = partial(self._micro_batch_s, backward_s, offload_s, done_s)
            middle_s = (more - 1) * (later_s + batch_s(False, False))
            _, first_block, _, lead_bytes, every, _ = self._gradients
            nbytes, first_sums_s, later_sums_s = every
            ready_s = done_s(first_block)
            before_s = max(
                batch_s(True, False) + middle_s + later_s,
                # before the last backward the host has all that came before
                ready_s + more * nbytes * offload_s,
                ready_s
                + lead_bytes * offload_s
                + first_sums_s
                + (more - 1) * later_sums_s,
            )
        return first_s + before_s + last_s

    def _last_backward_s(
        self, last: _Backward, done_s: Callable[[int], float]
    ) -> float:
        """Of several ranks: one collective after the other, one part after the other
        leaves, and what earlier micro-batches have added up comes back in between."""
        step, scatter_s = self._step, self._step.collectives.scatter_s
        sums_s = self._sums * last.fetch_s
        reduced_s = self._leaving * scatter_s + self._shared_s
        if not step.hardware.overlaps:
            return last.seconds + sums_s + reduced_s + self._parts * last.offload_s
        start_s = done_s(len(step.layout.blocks) - 1)
        chains = [last.seconds, last.gathered_s + reduced_s]
        if self._held:
            works, first_block, last_block, lead_bytes, *_ = self._gradients
            first_s, (*_, final) = works[0].nbytes * scatter_s, works
            ready_s, last_ready_s = done_s(first_block), last.seconds
            if last_block is not None:
                last_ready_s = done_s(last_block)
            lead = works[-len(self._part_sums_s)]
            lead_part_s = lead.part_bytes * last.offload_s
            final_part_s = final.part_bytes * last.offload_s
            # the last part of all ends each way through reduction, link and host
            chains += [
                done_s(0) + sums_s,
                last.fetched_s + sums_s,
                ready_s + lead_bytes * scatter_s + lead_part_s + sum(self._part_sums_s),
                final.part_sum_s
                + max(
                    ready_s + first_s + self._parts * last.offload_s,
                    ready_s + self._leaving * scatter_s + final_part_s,
                    last_ready_s + final.nbytes * scatter_s + final_part_s,
                ),
            ]
            start_s = min(start_s, ready_s)
        return max(*chains, start_s + reduced_s)

    def _weight_s(self, fetch_s: float) -> float:
        """Of one byte until all ranks have it; the slower way counts where both work
        side by side."""
        if self._step.hardware.overlaps:
            return max(fetch_s / self._shards, self._gather_s)
        return fetch_s / self._shards + self._gather_s

    def _before_backward_s(self, n_buffer: int, row: Row) -> tuple[float, float]:
        """From update or backward to backward, of the first micro-batch and others."""
        step = self._step
        first_s = self._first_forward_s(n_buffer) + step.outside_s
        later_s = self._forward_s(n_buffer) + step.outside_s
        if not row.out_bytes:
            return first_s, later_s
        if step.hardware.overlaps:
            later_s = max(later_s, row.forward_s)
        else:
            later_s += row.out_bytes / step.hardware.offload_bytes_s
        return max(first_s, self._updates.start_s + later_s), later_s

    @cached_property
    def _block_of(self) -> list[int]:
        return [chunk.block or 0 for chunk in self._paged]

    @cached_property
    def _blocks(self) -> list[int]:
        return sorted(set(self._block_of))

    @cached_property
    def _between_s(self) -> float:
        """Forward of all blocks that page but the first and the last."""
        return sum(self._step.times.forward_s[b] for b in self._blocks[1:-1])

    @cached_property
    def _gradients(self) -> _Gradients:
        step = self._step
        inside = [chunk for chunk in self._held if chunk.block is not None]
        inside.sort(key=lambda chunk: -(chunk.block or 0))
        outside = [chunk for chunk in self._held if chunk.block is None]
        # the first one outside is the embedding, whose gradient comes last
        chunks = [*outside[1:], *inside, *outside[:1]]
        works = [step.work[chunk.index] for chunk in chunks]
        # the host is busy from the first large one on
        together = works[: len(outside) - 1] if len(outside) > 1 else works[:1]
        lead = max(range(len(together)), key=lambda k: together[k].nbytes, default=0)
        nbytes = [work.nbytes for work in works]
        first_sums_s = [w.first_sum_s for w in works[lead:] if w.first_sum_s]
        later_sums_s = [w.later_sum_s for w in works[lead:] if w.later_sum_s]
        # the trainer waits for all at the update, before that for all but these
        every, awaited = (
            (sum(nbytes[:stop]), sum(first_sums_s[:stop]), sum(later_sums_s[:stop]))
            for stop in (None, -IN_FLIGHT)
        )
        first_block = len(step.layout.blocks)
        if len(outside) < 2:
            first_block = inside[0].block or 0 if inside else 0
        last_block = chunks[-1].block
        lead_bytes = sum(nbytes[: lead + 1])
        return _Gradients(works, first_block, last_block, lead_bytes, every, awaited)

    @cached_property
    def _part_sums_s(self) -> list[float]:
        """Of the host in the last micro-batch, from the first large one on."""
        works, lead_bytes = self._gradients.works, self._gradients.lead_bytes
        until = accumulate(work.nbytes for work in works)
        pairs = zip(works, until, strict=True)
        return [work.part_sum_s for work, nbytes in pairs if nbytes >= lead_bytes]

    @cached_property
    def _updates(self) -> _Updates:
        step, shards = self._step, self._shards
        fetch_s = 1 / step.hardware.fetch_bytes_s
        forward_s = step.forward[-1]
        seconds = 0.0 if step.hardware.overlaps else self._update_s
        done: dict[int, float] = {}
        # what is outside the blocks comes first
        for chunk in sorted(self._held, key=lambda chunk: chunk.block is not None):
            seconds += step.work[chunk.index].update_s
            done[chunk.index] = seconds
        start_s = self._update_s
        fetch_from_s = arrived_s = 0.0
        for chunk in self._stale:
            start_s = max(start_s, done[chunk.index])
            # others are fetched while this one is gathered
            fetch_from_s = start_s = start_s + shard_bytes(chunk, shards) * fetch_s
            arrived_s = start_s = start_s + padded_bytes(chunk, shards) * self._gather_s
        fetched_s = fetch_from_s
        ends = [start_s + forward_s]
        for chunk in self._paged:
            if chunk.trainable:
                free_s = fetched_s if step.hardware.overlaps else arrived_s
                fetched_s = max(free_s, done[chunk.index])
                fetched_s += shard_bytes(chunk, shards) * fetch_s
                arrived_s = max(arrived_s, fetched_s)
                arrived_s += padded_bytes(chunk, shards) * self._gather_s
                ends.append(arrived_s + forward_s - step.forward[chunk.block or 0])
        return _Updates(start_s, fetch_from_s, max(ends))

    def _first_forward_s(self, n_buffer: int) -> float:
        """From the update on; what slots hold of trained chunks is fetched again."""
        step, (start_s, fetch_from_s, end_s) = self._step, self._updates
        stale = (chunk for chunk in self._paged[:n_buffer] if chunk.trainable)
        again = sum(padded_bytes(chunk, self._shards) for chunk in stale)
        if not again:
            return max(end_s, start_s + self._forward_s(n_buffer))
        fetch_s = self._weight_s(1 / step.hardware.fetch_bytes_s)
        fetch_s *= self._missing_bytes(n_buffer) + again
        if step.hardware.overlaps:
            last_s = step.forward[-1] - step.forward[self._block_of[-1]]
            seconds = fetch_from_s + fetch_s + last_s
        else:
            seconds = start_s + step.forward[-1] + fetch_s
        return max(end_s, seconds)

    def _forward_s(self, n_buffer: int) -> float:
        """Of a later micro-batch."""
        step, forward_s = self._step, self._step.forward[-1]
        fetch_s = self._weight_s(1 / step.hardware.fetch_bytes_s)
        fetch_s *= self._missing_bytes(n_buffer)
        if not fetch_s:
            return forward_s
        if not step.hardware.overlaps:
            return forward_s + fetch_s
        # what is fetched first waits for the first slot
        first_s = step.forward[self._block_of[0] + 1]
        last_s = forward_s - step.forward[self._block_of[-1]]
        between_s = 0.0
        if self._one_block_at_a_time(n_buffer):
            between_s = self._between_s
        return max(forward_s, first_s + fetch_s + between_s + last_s)

    def _backward(
        self, n_buffer: int, row: Row, more_bytes: int, leaving: int
    ) -> _Backward:
        """With so much more to fetch and so much that leaves."""
        missing = self._backward_bytes(n_buffer)
        fetched = missing // self._shards + row.back_bytes
        fetch_s, offload_s = seconds_per_byte(
            fetched + more_bytes, leaving, self._step.hardware
        )
        return _Backward(
            self._backward_s(n_buffer, row, missing, fetch_s),
            fetched * fetch_s,
            missing * self._gather_s,
            fetch_s,
            offload_s,
        )

    def _backward_s(
        self, n_buffer: int, row: Row, missing: int, second_per_byte: float
    ) -> float:
        """Of one micro-batch, but for its gradients."""
        step, before = self._step, row.backward
        backward_s, fetch_s = before[-1], missing * self._weight_s(second_per_byte)
        back_s = row.back_bytes * second_per_byte
        if not step.hardware.overlaps:
            return backward_s + fetch_s + back_s
        seconds = backward_s
        if back_s:
            # one lane, and what swapped first comes last or before the last weights
            last = min(row.first, self._block_of[0] if fetch_s else row.first)
            lane_s = missing / self._shards * second_per_byte + back_s
            seconds = max(seconds, lane_s + before[last + 1])
        if not fetch_s:
            return seconds
        low, high = self._block_of[0], self._block_of[-1]
        first_s, last_s = backward_s - before[high], before[low + 1]
        between_s = 0.0
        if self._one_block_at_a_time(n_buffer):
            between_s = sum(before[b + 1] - before[b] for b in self._blocks[1:-1])
        seconds = max(seconds, first_s + fetch_s + between_s + last_s)
        # blocks that keep their tensors come first: they may wait for fetches, and
        # those that recompute not
        turn = bisect_left(self._block_of, row.turn)
        if turn < self._num_paged - n_buffer:
            kept_s = fetch_s * (1 - self._bytes[turn] / missing)
            rest_s = before[self._block_of[turn] + 1]
            seconds = max(seconds, first_s + kept_s + rest_s)
        return seconds

    def _backward_bytes(self, n_buffer: int) -> int:
        """What backward fetches: all but what forward leaves in the slots."""
        return self._bytes[max(0, self._num_paged - n_buffer)]

    def _missing_bytes(self, n_buffer: int) -> int:
        """What forward fetches beside what its slots hold."""
        return self._bytes[-1] - self._bytes[min(n_buffer, self._num_paged)]

    def _one_block_at_a_time(self, n_buffer: int) -> bool:
        """Whether each block needs all slots, so that nothing is fetched ahead."""
        return self._num_paged == n_buffer * len(self._blocks)


def _done_s(row: Row, block: int) -> float:
    """From the begin of backward until a block is done, and 0 for one past the last.
    The copy that begins with it only holds up the next."""
    if block == len(row.alone):
        return 0.0
    return row.backward[-1] - row.backward[block + 1] + row.alone[block]
