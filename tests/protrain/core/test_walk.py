"""The walk over a step under any policies, against one that looks at each moment anew."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings, strategies as st
from search_cases import Case, cases

from axolotl.integrations.protrain.core.planner.memory import walk
from axolotl.integrations.protrain.core.types import (
    Lifetime,
    Moved,
    Policy,
    Save,
    Trace,
)

KEEP, RECOMPUTE, SWAP, SWAP_INPUT = Policy
Policies = tuple[Policy, ...]


@st.composite
def walks(draw: st.DrawFn) -> tuple[Case, list[Policies]]:
    """A trace with lifetimes of any kind, and rows of policies to walk one by one."""
    case = draw(cases())
    trace = case.trace
    num, last = len(trace.blocks), len(trace.segments) - 1
    head = num + 1

    def save() -> Save:
        block = draw(st.sampled_from([None, *range(num)]))
        if block is None:
            return Save(draw(st.integers(1, last)), None)
        early = draw(st.integers(block + 1, head))
        late = draw(st.integers(last - 1 - block, last))
        kinds = [Save(early, block), Save(last - 1 - block, block), Save(late, block)]
        inputs = [Save(last - 1 - block, block, True, by) for by in (True, False)]
        return draw(st.sampled_from([*kinds, *inputs]))

    def lifetime() -> Lifetime:
        saves = {save() for _ in range(draw(st.integers(1, 4)))}
        first = min(s.segment if s.block is None else s.block + 1 for s in saves)
        made = draw(st.integers(0, max(0, first - 1)))
        ordered = tuple(sorted(saves, key=lambda s: s.segment))
        forgotten = draw(st.integers(made, last))
        return Lifetime(made, forgotten, ordered, draw(nbytes), draw(st.booleans()))

    nbytes = st.integers(0, 1000)
    lifetimes = tuple(lifetime() for _ in range(draw(st.integers(1, 6))))
    trace = replace(trace, lifetimes=trace.lifetimes + lifetimes)
    rows = st.tuples(*[st.sampled_from(Policy)] * num)
    return replace(case, trace=trace), draw(st.lists(rows, min_size=1, max_size=4))


@settings(max_examples=100)
@given(walks())
def test_every_moment_is_what_lives_then(
    walk: tuple[Case, list[Policies]],
) -> None:
    case, rows = walk
    memory = case.memory
    for policies in rows:
        lives = {
            lifetime: life(case.trace, lifetime, policies, case.hardware.overlaps)
            for lifetime in case.trace.lifetimes
        }
        curve = memory.activations(policies)
        for index in range(len(case.trace.segments)):
            there = sum(
                lifetime.nbytes
                for lifetime in case.trace.lifetimes
                if index in lives[lifetime].there
            )
            assert curve.start[index] == there
        out, back = [0] * len(policies), [0] * len(policies)
        for lifetime in case.trace.lifetimes:
            away = lives[lifetime]
            if away.leaves is not None:
                out[away.leaves] += lifetime.nbytes
            if away.returns is not None:
                back[away.returns] += lifetime.nbytes
        assert curve.moved == Moved(tuple(out), tuple(back))
        for index, rise in enumerate(rises(case, policies, lives)):
            assert curve.later[index] - curve.start[index] == rise


@given(walks())
def test_the_walk_is_a_value_of_its_arguments(
    walked: tuple[Case, list[Policies]],
) -> None:
    """Whatever was asked before."""
    case, rows = walked
    trace, overlaps = case.trace, case.hardware.overlaps
    values = [walk(trace, policies, overlaps) for policies in rows]
    memory = case.memory
    for policies, value in reversed([*zip(rows, values, strict=True)]):
        assert walk(trace, policies, overlaps) == value
        assert memory.activations(policies) == value


class life:
    """In which segments a lifetime is on the device, which block sends it away, for
    which it comes back."""

    def __init__(
        self, trace: Trace, lifetime: Lifetime, policies: Policies, overlaps: bool
    ) -> None:
        self.leaves: int | None = None
        self.returns: int | None = None
        waiting, staying = [], [lifetime.forgotten]
        for save in lifetime.saves:
            policy = KEEP if save.block is None else policies[save.block]
            applies = save.as_input == policy.recomputes
            goes = policy is SWAP or (policy is SWAP_INPUT and save.by_position)
            if applies and goes and lifetime.large:
                waiting.append(save)
            elif applies:
                staying.append(save.segment)
        end = max(staying)
        if waiting:
            blocks = sorted(save.block for save in waiting if save.block is not None)
            self.leaves, highest = blocks[0], blocks[-1]
            if overlaps:
                end = max(end, given_up(trace, policies, blocks[0]))
            num, last = len(trace.blocks), len(trace.segments) - 1
            opened = last - 1 - min(highest + 1, num - 1)
            freed = max(save.segment for save in waiting)
            if opened <= end:
                end = max(end, freed)
            elif opened <= freed:
                self.returns = highest
        self.there = set(range(lifetime.made + 1, end + 1))
        if self.returns is not None:
            self.there |= set(range(opened, freed + 1))


def given_up(trace: Trace, policies: Policies, block: int) -> int:
    """Before the next block that swaps begins, or after the last block's forward."""
    later = (b for b in range(block + 1, len(trace.blocks)) if policies[b].swaps)
    following = next(later, None)
    return len(trace.blocks) if following is None else following


def rises(case: Case, policies: Policies, lives: dict[Lifetime, life]) -> list[int]:
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
                lifetime.nbytes
                for lifetime in trace.lifetimes
                for save in lifetime.saves
                if save.segment == index
                and save.block is not None
                and not save.as_input
                and policies[save.block].recomputes
                and index not in lives[lifetime].there
            )
            rise = max(rise + again, forward[segment.block].redone_peak_bytes)
        found.append(rise)
    return found
