"""Small models, traces and machines straight from their types, for searches over them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from core_models import layouts
from hypothesis import settings, strategies as st

from axolotl.integrations.protrain.core.errors import BudgetError
from axolotl.integrations.protrain.core.layout import slot_floor
from axolotl.integrations.protrain.core.planner.memory import MemoryModel
from axolotl.integrations.protrain.core.planner.plans import make_plan, place
from axolotl.integrations.protrain.core.planner.search import MAX_EXTRA_SLOTS, Search
from axolotl.integrations.protrain.core.planner.seconds import StepTime
from axolotl.integrations.protrain.core.types import (
    BlockTimes,
    Budget,
    Hardware,
    Layout,
    Lifetime,
    Placement,
    Plan,
    Save,
    Segment,
    Trace,
    Update,
    Work,
    Workload,
    World,
)

few = settings(max_examples=settings.default.max_examples // 10)
"""For tests that look at every plan of a case: seconds an example."""

PLENTY = 1 << 50
ALMOST = 1 + 1e-8
"""Seconds are sums in different orders."""
RATES = (
    "fetch_bytes_s",
    "offload_bytes_s",
    "fetch_both_bytes_s",
    "offload_both_bytes_s",
    "adam_bytes_s",
    "memory_bytes_s",
    "disk_bytes_s",
    "gather_bytes_s",
    "reduce_bytes_s",
    "across_bytes_s",
)
WORLDS = [World(), World(2, 2), World(4, 4), World(3, 1), World(4, 2)]


@dataclass(frozen=True)
class Case:
    """A model and a machine: all that a search needs but the budget."""

    layout: Layout
    trace: Trace
    workload: Workload
    hardware: Hardware
    times: BlockTimes
    redone_if_paged: frozenset[int] = frozenset()

    @property
    def memory(self) -> MemoryModel:
        return MemoryModel(self.layout, self.trace, self.workload, self.hardware)

    def search(
        self, device_bytes: int = PLENTY, host_bytes: int = PLENTY, disk_bytes: int = 0
    ) -> Search:
        budget = Budget(device_bytes, 0, host_bytes, disk_bytes)
        return Search(
            self.memory,
            self.times,
            budget,
            redone_if_paged=self.redone_if_paged,
        )

    def allows(self, plan: Plan) -> bool:
        """Whether each block that has to recompute where it pages does."""
        blocks = (self.layout.blocks[index] for index in self.redone_if_paged)
        return all(
            plan.policies[block.index].recomputes
            or not any(
                plan.placements[c] is Placement.PARAM_OFFLOADED for c in block.chunks
            )
            for block in blocks
        )

    def plans(self) -> list[Judged]:
        """Every plan that a search may choose from, with what it takes."""
        memory, search = self.memory, self.search()
        return [
            Judged(
                plan,
                memory.device(plan).peak_bytes,
                memory.host(plan).peak_bytes,
                search.simulate(plan),
            )
            for plan in self._plans()
            if self.allows(plan)
        ]

    def _plans(self) -> Iterator[Plan]:
        layout, master = self.layout, self.workload.fp32_master
        shared = self.workload.world.local_size
        nothing = place(layout, 0, master, Placement.RESIDENT)
        interval = self.search().swap_interval
        most = slot_floor(layout, nothing) + MAX_EXTRA_SLOTS
        total, shown = len(layout.pageable), self.workload.update is Update.DEVICE
        for outside, n_persist in product(
            (Placement.RESIDENT, Placement.OPTIMIZER_OFFLOADED), range(total + 1)
        ):
            # some keep their state where all weights stay, else all or none
            some = range(total + 1) if n_persist == total else {0, n_persist}
            for n_host_state in some if shown else [0]:
                placements = place(layout, n_persist, master, outside, n_host_state)
                floor = slot_floor(layout, placements)
                num_paged = placements.count(Placement.PARAM_OFFLOADED)
                for n_buffer in range(floor, min(most, num_paged) + 1):
                    for swapping, recomputed in self._rows(interval):
                        # what is not paged is not shared
                        for shards in {1, shared} if num_paged else {1}:
                            yield make_plan(
                                layout,
                                n_persist,
                                n_buffer,
                                swapping,
                                recomputed,
                                master,
                                outside,
                                swap_interval=interval,
                                shards=shards,
                                n_host_state=n_host_state,
                            )

    def _rows(self, interval: int) -> Iterator[tuple[int, int]]:
        """Swapping and recomputed blocks: none and the paper's bound with every number
        that leaves each block one of both; half of it, it and all with all."""
        blocks = len(self.layout.blocks)
        most = -(-blocks // interval)
        for swapping in (0, most):
            yield from ((swapping, number) for number in range(blocks - swapping + 1))
        yield from ((swapping, blocks) for swapping in {-(-most // 2), most, blocks})


@dataclass(frozen=True)
class Judged:
    """A plan, what it takes of device and host, and its step."""

    plan: Plan
    device_bytes: int
    host_bytes: int
    step: StepTime


def of_one_memory(case: Case, one: bool = True) -> Case:
    """The same on a device that has no memory but the host's, or one that has."""
    return replace(case, hardware=replace(case.hardware, one_memory=one))


def missing(error: BudgetError) -> str:
    found = re.search(r"([\d.]+ \w+) too little", str(error))
    assert found, error
    return found.group(1)


@st.composite
def cases(
    draw: st.DrawFn, trained: bool | None = None, worlds: Sequence[World] = WORLDS
) -> Case:
    """Any small layout, what its blocks could hold and take, on any machines."""
    layout = draw(layouts())
    if trained is not None:
        chunks = tuple(replace(c, trainable=trained) for c in layout.chunks)
        if not trained:
            chunks = tuple(chunk for chunk in chunks if chunk.pageable)
        there = {chunk.index for chunk in chunks}
        blocks = tuple(
            replace(block, chunks=tuple(c for c in block.chunks if c in there))
            for block in layout.blocks
        )
        layout = replace(layout, blocks=blocks, chunks=chunks)
    seconds = st.floats(0, 50)
    num_blocks = len(layout.blocks)
    per_block = st.tuples(*[seconds] * num_blocks)
    rates = {name: draw(st.floats(0.5, 50)) for name in RATES}
    for way in ("fetch", "offload"):
        share = draw(st.floats(0.5, 1))
        rates[f"{way}_both_bytes_s"] = rates[f"{way}_bytes_s"] * share
    world, master = draw(st.sampled_from(worlds)), draw(st.booleans())
    on_host = master or world.size > 1
    return Case(
        layout,
        draw(traces(layout)),
        Workload(
            accumulation=draw(st.integers(1, 5)),
            tokens=7,
            fp32_master=master,
            update=Update.HOST if on_host else draw(st.sampled_from(Update)),
            update_copies=draw(st.sampled_from([0.0, 1.0])),
            update_parameter_copies=draw(st.sampled_from([0.0, 2.0])),
            eval_ratio=draw(st.sampled_from([0.0, 2.0, 16.0])),
            world=world,
        ),
        Hardware(
            name="a test",
            source="made up",
            device_bytes=0,
            host_bytes=0,
            unseen_bytes=draw(st.integers(0, 100)),
            flops_16=1,
            flops_32=1,
            attention_16=1,
            kernel_s=0,
            overlaps=draw(st.booleans()),
            **rates,
        ),
        BlockTimes(
            draw(per_block), draw(per_block), draw(seconds), draw(seconds), 0.5, False
        ),
        draw(st.just(frozenset()) | st.frozensets(st.integers(0, num_blocks - 1))),
    )


@st.composite
def traces(draw: st.DrawFn, layout: Layout) -> Trace:
    """A step of it: what is before the blocks, the blocks, the head, and back."""
    num = len(layout.blocks)
    nbytes = st.integers(0, 400)

    def gradients(block: int | None, first: bool = True) -> tuple[tuple[str, int], ...]:
        chunks = [c for c in layout.chunks if c.trainable and c.block == block]
        if block is None:
            # the first one outside is the embedding, whose gradient comes last
            chunks = chunks[:1] if first else chunks[1:]
        return tuple((t.name, t.nbytes) for c in chunks for t in c.tensors)

    def forward(block: int | None) -> Segment:
        peak = draw(nbytes)
        dropped = draw(st.integers(0, peak))
        swapped, redone = (draw(st.integers(low, peak)) for low in (dropped, 0))
        return Segment(block, False, Work(), peak, dropped, swapped, redone)

    def backward(block: int | None, first: bool = True) -> Segment:
        made, peak = gradients(block, first), draw(nbytes)
        piled = peak + draw(st.integers(0, sum(size for _, size in made)))
        return Segment(
            *(block, True, Work(), peak),
            first_peak_bytes=piled,
            widened_peak_bytes=piled + draw(nbytes),
            gradients=made,
        )

    blocks = range(num)
    segments = [forward(None), *map(forward, blocks), forward(None)]
    segments += [backward(None, first=False), *map(backward, blocks[::-1])]
    segments.append(backward(None))
    last = len(segments) - 1
    lifetimes = []
    for block in blocks:
        made, back = block + 1, last - 1 - block
        saved = (Save(back, block),)
        lifetimes += [
            Lifetime(made, made, saved, draw(nbytes), bool(n)) for n in range(2)
        ]
        kept_as_input = (Save(back, block, True, draw(st.booleans())), *saved)
        lifetimes.append(Lifetime(block, made, kept_as_input, draw(nbytes)))
    backs = {block: last - 1 - block for block in blocks}
    shared = tuple(Save(back, block, as_input=True) for block, back in backs.items())
    lifetimes.append(Lifetime(0, num, shared, draw(nbytes)))
    both = tuple(Save(back, block) for block, back in backs.items())
    lifetimes.append(Lifetime(0, num, shared + both, draw(nbytes)))
    return Trace(
        tuple(segments),
        tuple(lifetimes),
        tuple(block.name for block in layout.blocks),
    )
