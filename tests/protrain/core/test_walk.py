"""The walk over a step under any policies, against one that looks at each moment anew."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings, strategies as st
from search_cases import Case, cases

from axolotl.integrations.protrain.core.types import (
    Hold,
    Holding,
    Moved,
    Policy,
    Trace,
)

KEEP, RECOMPUTE, SWAP, SWAP_INPUT = Policy
Policies = tuple[Policy, ...]


@st.composite
def walks(draw: st.DrawFn) -> tuple[Case, list[Policies]]:
    """A trace with holdings of any kind, and rows of policies to walk one by one."""
    case = draw(cases())
    trace = case.trace
    num, last = trace.num_blocks, len(trace.segments) - 1
    head = num + 1

    def hold() -> Hold:
        block = draw(st.sampled_from([None, *range(num)]))
        if block is None:
            return Hold(draw(st.integers(1, last)), None)
        early = draw(st.integers(block + 1, head))
        late = draw(st.integers(last - 1 - block, last))
        kinds = [Hold(early, block), Hold(last - 1 - block, block), Hold(late, block)]
        inputs = [Hold(last - 1 - block, block, True, by) for by in (True, False)]
        return draw(st.sampled_from([*kinds, *inputs]))

    def holding() -> Holding:
        holds = {hold() for _ in range(draw(st.integers(1, 4)))}
        first = min(h.segment if h.block is None else h.block + 1 for h in holds)
        made = draw(st.integers(0, max(0, first - 1)))
        ordered = tuple(sorted(holds, key=lambda h: h.segment))
        forgotten = draw(st.integers(made, last))
        return Holding(made, forgotten, ordered, draw(nbytes), draw(st.booleans()))

    nbytes = st.integers(0, 1000)
    holdings = tuple(holding() for _ in range(draw(st.integers(1, 6))))
    trace = replace(trace, holdings=trace.holdings + holdings)
    rows = st.tuples(*[st.sampled_from(Policy)] * num)
    return replace(case, trace=trace), draw(st.lists(rows, min_size=1, max_size=4))


@settings(max_examples=100)
@given(walks())
def test_every_moment_is_what_its_holdings_take(
    walk: tuple[Case, list[Policies]],
) -> None:
    case, rows = walk
    memory = case.memory
    for policies in rows:
        lives = {
            holding: life(case.trace, holding, policies, case.hardware.overlaps)
            for holding in case.trace.holdings
        }
        curve = memory.activations(policies)
        for index in range(len(case.trace.segments)):
            there = sum(
                holding.nbytes
                for holding in case.trace.holdings
                if index in lives[holding].there
            )
            assert curve.start[index] == case.trace.batch_bytes + there
        out, back = [0] * len(policies), [0] * len(policies)
        for holding in case.trace.holdings:
            away = lives[holding]
            if away.leaves is not None:
                out[away.leaves] += holding.nbytes
            if away.returns is not None:
                back[away.returns] += holding.nbytes
        assert memory.moved_bytes(policies) == Moved(tuple(out), tuple(back))
        for index, rise in enumerate(rises(case, policies, lives)):
            assert curve.later[index] - curve.start[index] == rise


class life:
    """In which segments a holding is on the device, which block sends it away, for
    which it comes back."""

    def __init__(
        self, trace: Trace, holding: Holding, policies: Policies, overlaps: bool
    ) -> None:
        self.leaves: int | None = None
        self.returns: int | None = None
        waiting, staying = [], [holding.forgotten]
        for hold in holding.holds:
            policy = KEEP if hold.block is None else policies[hold.block]
            applies = hold.as_input == policy.recomputes
            goes = policy is SWAP or (policy is SWAP_INPUT and hold.by_position)
            if applies and goes and holding.large:
                waiting.append(hold)
            elif applies:
                staying.append(hold.segment)
        end = max(staying)
        if waiting:
            blocks = sorted(hold.block for hold in waiting if hold.block is not None)
            self.leaves, highest = blocks[0], blocks[-1]
            if overlaps:
                end = max(end, given_up(trace, policies, blocks[0]))
            num, last = trace.num_blocks, len(trace.segments) - 1
            opened = last - 1 - min(highest + 1, num - 1)
            freed = max(hold.segment for hold in waiting)
            if opened <= end:
                end = max(end, freed)
            elif opened <= freed:
                self.returns = highest
        self.there = set(range(holding.made + 1, end + 1))
        if self.returns is not None:
            self.there |= set(range(opened, freed + 1))


def given_up(trace: Trace, policies: Policies, block: int) -> int:
    """Before the next block that swaps begins, or after the last block's forward."""
    later = (b for b in range(block + 1, trace.num_blocks) if policies[b].swaps)
    following = next(later, None)
    return trace.num_blocks if following is None else following


def rises(case: Case, policies: Policies, lives: dict[Holding, life]) -> list[int]:
    """The highest rise within each segment, gradients apart."""
    trace = case.trace
    forward = {s.block: s for s in trace.segments if not s.backward}
    found = []
    for index, segment in enumerate(trace.segments):
        policy = KEEP if segment.block is None else policies[segment.block]
        rise = segment.peak_bytes
        if not segment.backward and policy.recomputes:
            rise = segment.dropped_peak_bytes
        if not segment.backward and policy is SWAP and not case.hardware.overlaps:
            rise = segment.swapped_peak_bytes
        if segment.backward and policy.recomputes:
            again = sum(
                holding.nbytes
                for holding in trace.holdings
                for hold in holding.holds
                if hold.segment == index
                and hold.block is not None
                and not hold.as_input
                and policies[hold.block].recomputes
                and index not in lives[holding].there
            )
            rise = max(rise + again, forward[segment.block].redone_peak_bytes)
        found.append(rise)
    return found
