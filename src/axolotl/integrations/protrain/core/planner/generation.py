"""A plan of its own for generation: sequences at once, and chunks that wait on the device.

Between two steps no activation and no gradient is alive, so there is room for a cache of
keys and values, and for chunks that training pages. Each decoding step reads the whole
base once, for all sequences together: what is held need not be fetched for each token,
what is not held is memory for more sequences at once. All are sampled in waves of as many
as fit; the pair that takes the fewest seconds in all is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..layout import padded_bytes, ring_fits, spread_order
from ..types import Hardware, Layout, Plan, Work
from .demand import Demand
from .memory import MemoryModel
from .seconds import work_s


@dataclass(frozen=True)
class GenerationPlan:
    """Sampling of sequences between two steps.

    Attributes:
        rows: Sequences at once.
        waves: Of as many, one after the other.
        held: Paged chunks that stay on the device meanwhile.
        cache_bytes: Keys and values of a wave at its end, on the device.
        away_bytes: The same on the host, 0 for none.
        working_bytes: What a forward takes on top of them.
        held_bytes: Device bytes of chunks that are held.
        prefill_s: Of the prompts of a wave.
        decode_s: Of one more token of each sequence of a wave.
        tokens: New tokens of all sequences, at most.
    """

    rows: int
    waves: int
    held: tuple[int, ...]
    cache_bytes: int
    working_bytes: int
    held_bytes: int
    prefill_s: float
    decode_s: float
    tokens: int
    total_s: float
    away_bytes: int = 0

    @property
    def taken_bytes(self) -> int:
        """Device bytes beside the cache and what training has there."""
        return self.working_bytes + self.held_bytes

    @property
    def tokens_per_s(self) -> float:
        """New tokens of all sequences over the seconds that they take."""
        return self.tokens / self.total_s if self.total_s else math.inf


def plan_generation(
    memory: MemoryModel, plan: Plan, demand: Demand, room_bytes: int, host_bytes: int
) -> GenerationPlan:
    """Choose sequences at once and the chunks that are held, for the fewest seconds.

    Args:
        memory: Of the training whose plan this is.
        plan: Of training: what it pages may be held.
        demand: Its chunks and their copies.
        room_bytes: Of the device, for the peak; where not one sequence fits, it is planned
            all the same, alone and with nothing held.
        host_bytes: Of the host, for keys and values of each rank.
    """
    generation, layout = memory.workload.generation, memory.layout
    assert generation is not None
    free = max(room_bytes - memory.standing_bytes(plan), generation.row_bytes)
    each = (
        timed(held, free, memory, plan, demand, away)
        for held in _choices(layout, plan)
        for away in (None, host_bytes)
    )
    return min(filter(None, each), key=lambda choice: choice.total_s)


def _choices(layout: Layout, plan: Plan) -> Iterator[tuple[int, ...]]:
    """Chunks to hold: none, more and more of them spread over the model, all."""
    paged = plan.paged
    # a gather is made by all ranks or by none
    if plan.shards > 1:
        yield ()
        return
    order = [paged[position] for position in spread_order(len(paged))]
    for number in range(len(order) + 1):
        held = tuple(sorted(order[:number]))
        if ring_fits(layout, plan, held):
            yield held


def timed(
    held: tuple[int, ...],
    free: int,
    memory: MemoryModel,
    plan: Plan,
    demand: Demand,
    away: int | None = None,
) -> GenerationPlan | None:
    """Price some chunks that are held, beside as many sequences as `free` bytes of the
    device have room for; None for not one. Keys and values are in so many bytes `away` on
    the host, if that is given."""
    generation, layout = memory.workload.generation, memory.layout
    assert generation is not None
    held_bytes = sum(padded_bytes(layout.chunks[c], plan.shards) for c in held)
    row_bytes = generation.row_bytes
    if away is not None:
        row_bytes = generation.away_bytes
        if not row_bytes or memory.hardware.one_memory:
            return None
    rows = min(generation.rows, (free - held_bytes) // row_bytes)
    if away is not None:
        rows = min(rows, away // generation.cache_bytes)
    if rows < 1:
        return None
    waves = -(-generation.rows // rows)
    # as even as may be
    rows = -(-generation.rows // waves)
    fetched = [n for n, chunk in enumerate(plan.paged) if chunk not in held]
    # the ring keeps what it has room for
    hardware, share = memory.hardware, rows / generation.rows
    each_s = [_fetch_s(demand, n, hardware) for n, _ in enumerate(plan.paged)]
    fetch_s = sum(each_s[n] for n in fetched) * (len(fetched) > plan.n_buffer)
    first_s = sum(each_s)

    cache = rows * generation.cache_bytes
    read_s = left_s = 0.0
    if away is not None:
        prompt = generation.prompt_tokens
        tokens = prompt + generation.new_tokens
        # what is there when half of the new tokens are
        read_s = cache * (prompt + tokens) / (2 * tokens) / hardware.fetch_bytes_s
        left_s = cache * prompt / tokens / hardware.offload_bytes_s

    def pass_s(works: Sequence[Work], copies_s: float) -> float:
        compute_s = sum(_compute_s(work, share, hardware) for work in works)
        weights_s = _weights(layout) / hardware.memory_bytes_s
        # a thread that queues as many kernels as in training is what few tokens wait for
        compute_s = max(compute_s, weights_s, sum(demand.queue_forward_s))
        if not hardware.overlaps:
            return compute_s + copies_s
        return max(compute_s, copies_s)

    prefill_s = pass_s(generation.prefill, max(fetch_s, left_s))
    decode_s = pass_s(generation.decode, fetch_s + read_s)
    # what is held comes once, with the first pass
    total_s = waves * (prefill_s + generation.new_tokens * decode_s) + first_s
    on_device = cache if away is None else 0
    return GenerationPlan(
        rows,
        waves,
        held,
        on_device,
        rows * row_bytes - on_device,
        held_bytes,
        prefill_s,
        decode_s,
        generation.rows * generation.new_tokens,
        total_s,
        cache - on_device,
    )


def _fetch_s(demand: Demand, number: int, hardware: Hardware) -> float:
    """Seconds of one paged chunk, alone."""
    return max(
        demand.chunk_bytes[number] / hardware.fetch_bytes_s,
        demand.gather_s[number],
        demand.unpack_s[number],
        demand.disk_s[number],
    )


def _compute_s(work: Work, share: float, hardware: Hardware) -> float:
    """Seconds of a part of the rows, of which kernels are as many."""
    busy = share * work_s(replace(work, num_kernels=0), hardware)
    return max(busy, work.num_kernels * hardware.kernel_s)


def _weights(layout: Layout) -> int:
    """Bytes that a forward of few tokens reads of the device's memory."""
    paged = sum(chunk.payload_bytes for chunk in layout.chunks)
    return paged + layout.fixed_frozen_bytes
