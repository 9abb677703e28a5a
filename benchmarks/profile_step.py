"""Where a paged step spends time that a plain step does not have.

Both are trained in turns, as in `overhead.py`, each under a cProfile of its own; what a
function took in plain steps is taken off what it took in paged ones. A function is
charged its own time and that of the operators that it calls itself, which on the CPU
device is where copies happen. Profiling makes Python slower: `calls` says how much of it
there is. The host thread is not seen; `update` is the same update on the plain side.

Then some paged steps under torch's profiler: the operators with the largest own time,
beside what they take in plain steps. Last, a plain step that makes the copies of a paged
one between its blocks and does not use them: what they evict from the caches costs it
the same, so what is left between the two is the plugin's own.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
from pairs import (
    CASES,
    Case,
    Memcpy,
    Pair,
    Size,
    common_arguments,
    keep_freed_memory,
)
from rich.console import Console
from tables import Page, environment, write
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from axolotl.integrations.protrain.core.engine.device import open_device
from axolotl.integrations.protrain.core.planner.plans import make_plan
from axolotl.integrations.protrain.core.types import Layout, Plan

PLUGIN = "/axolotl/integrations/protrain/"
OURS = (PLUGIN, "torch/utils/checkpoint.py", "torch/nn/modules/module.py")
"""Files whose functions are named; the rest is the model."""
NUM_ROWS = 12
Function = tuple[str, int, str]


def recomputed(layout: Layout) -> Plan:
    return make_plan(layout, 0, 2, 0, len(layout.blocks), False)


def charged(profiler: cProfile.Profile) -> tuple[Counter[str], Counter[str]]:
    """Seconds and calls of each named function; all others are `model`."""
    seconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    stats: dict[Function, tuple] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    for function, (_, num_calls, own_s, _, callers) in stats.items():
        if function[0] != "~":
            seconds[_name(function)] += own_s
            calls[_name(function)] += num_calls
            continue
        for caller, (_, _, own_s, _) in callers.items():
            seconds[_name(caller)] += own_s
    return seconds, calls


def _name(function: Function) -> str:
    file, _, name = function
    if not any(part in file for part in OURS):
        return "model"
    return f"{Path(file).parent.name}/{Path(file).name} {name}"


def median_ms(pair: Pair, num_steps: int) -> tuple[float, float, float]:
    """A plain step, a paged one and the plain update, without any profile."""
    plain, ours = [], []
    for _ in range(num_steps):
        plain += pair.plain.run(1)
        ours += pair.ours.run(1)
    return (
        statistics.median(step.wall_s for step in plain) * 1e3,
        statistics.median(step.wall_s for step in ours) * 1e3,
        statistics.median(step.update_s for step in plain) * pair.updated_share * 1e3,
    )


def python_page(case: Case, pair: Pair, num_steps: int) -> Page:
    """Named functions by what they cost more than in plain steps."""
    profilers = cProfile.Profile(), cProfile.Profile()
    for _ in range(num_steps):
        for trainer, profiler in zip((pair.plain, pair.ours), profilers, strict=True):
            with profiler:
                trainer.run(1)
    (plain_s, _), (paged_s, calls) = map(charged, profilers)
    paged_s.subtract(plain_s)
    plain, ours, update = median_ms(pair, num_steps)
    rows = [
        [name, f"{s / num_steps * 1e3:.2f}", f"{calls[name] / num_steps:.0f}"]
        for name, s in paged_s.most_common(NUM_ROWS)
    ]
    title = (
        f"{case.method}, {case.name}: {plain:.1f} ms plain, {ours:.1f} ms paged, update "
        f"{update:.1f} ms"
    )
    return Page(title, ("function", "ms a step more", "calls"), rows)


def operator_page(case: Case, pair: Pair, num_steps: int) -> Page:
    """Operators by own time in paged steps, beside that in plain ones."""
    paged = operators(lambda: pair.ours.run(num_steps))
    plain = operators(lambda: pair.plain.run(num_steps))
    rows = [
        [
            name,
            f"{us / num_steps / 1e3:.2f}",
            f"{plain[name] / num_steps / 1e3:.2f}",
        ]
        for name, us in paged.most_common(NUM_ROWS // 2)
    ]
    title = f"{case.method}, {case.name}: operators"
    return Page(title, ("operator", "paged ms", "plain ms"), rows)


def operators(act: Callable[[], object]) -> Counter[str]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        act()
    own: Counter[str] = Counter()
    for event in profiler.key_averages():
        own[event.key] += event.self_cpu_time_total
    return own


def copies_page(pair: Pair, device: torch.device, num_steps: int) -> Page:
    """A plain step, one with unused copies between its blocks, and a paged one."""
    memcpy = Memcpy(pair, open_device(device))
    copying, spent_s = False, 0.0

    def fetch(number: int) -> None:
        nonlocal spent_s
        if copying:
            start = time.process_time()
            target, source = memcpy.copies[number]
            target.copy_(source)
            spent_s += time.process_time() - start

    def bind(block: nn.Module, number: int) -> None:
        def after(_module: nn.Module, _args: object, output: Tensor) -> None:
            if number < last - 1:
                output.register_hook(lambda _: fetch(number))

        if number > 1:
            block.register_forward_pre_hook(lambda *_: fetch(number))
        block.register_forward_hook(after)

    last = len(pair.layout.blocks) - 1
    for block in pair.layout.blocks:
        bind(pair.plain.model.get_submodule(block.name), block.index)
    rows = []
    for _ in range(num_steps):
        plain_s = pair.plain.step().cpu_s
        copying, spent_s = True, 0.0
        unused_s = pair.plain.step().cpu_s
        copying = False
        rows.append((plain_s, unused_s, spent_s, pair.ours.step().cpu_s))
    memcpy.close()
    columns = ("plain", "with unused copies", "of it copies", "paged")
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    cells = [f"{median * 1e3:.1f}" for median in medians]
    return Page("LoRA, 2 slots: what copies cost, ms of cpu time", columns, [cells])


def cases() -> Iterable[Case]:
    for case in CASES:
        if case.name.startswith("nothing resident"):
            yield case
            yield replace(case, name=f"{case.name}, recomputed", plan=recomputed)


def main() -> int:
    parser = common_arguments(__doc__)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    console = Console(width=120)
    pages = []
    for case in cases():
        pair = Pair(case, Size(*args.paged), args.device)
        try:
            # counters are the benchmark's own affair
            pair.ours.waited_s = float
            median_ms(pair, 3)
            pages += [
                python_page(case, pair, args.steps),
                operator_page(case, pair, args.steps),
            ]
        finally:
            pair.close()
        for page in pages[-2:]:
            page.show(console)
    pair = Pair(next(iter(cases())), Size(*args.paged), args.device)
    pages.append(copies_page(pair, args.device, 2 * args.steps))
    pair.close()
    pages[-1].show(console)
    if args.output:
        raw = [[page.title, page.columns, page.rows] for page in pages]
        name = f"{args.device.type}-paged-step-profile"
        write(args.output, name, environment(args.device), pages, raw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
