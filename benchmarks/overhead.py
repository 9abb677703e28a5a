"""What the plugin costs when everything fits, and what explains the cost when nothing does.

A Llama from a configuration is trained twice in one process, plain and under a plan, in
turns: a round is some steps of one and then as many of the other, which one begins
alternates. Each figure is the median over rounds of a ratio within a round, with
quartiles; 95 % is the interval in which the true median lies, by order statistics, and a
target counts as missed when all of it is outside. Where a model lies in memory makes a
few percent for as long as it lies there, so both are built anew several times.

Everything resident (target: within 1 % of plain):
  plain again        neither of the two has a plan: what the method itself says of noise
  mode A             what the search takes when everything fits: no hook is attached
  mode B             LoRA; every chunk in a slot of its own: all hooks of all blocks run
                     and open and close windows, but nothing moves after the first step

Paged, blocks larger than the caches, as those of real models are:
  nothing resident   two slots (target: what it adds is explained within 15 %)
  state on the host  full fine-tune; weights stay, gradients leave, updates come back

Explained is predicted / measured: of the whole step, and of what it takes more than a
plain one, whose 95 % are those of resampled rounds. Predicted is the plain step plus the bytes moved over
the memcpy rate between the same chunks and slots, measured in each round. In wall time
the update that goes to the host is taken off, and what compute waited for it, measured,
is put on; where it runs beside compute, the plain step is one beside which a thread
updates as many bytes, because both share cores, caches and memory. In cpu time it is the
same work on another thread.

`--axolotl` pairs whole `axolotl train` processes instead, with the plugin under
`protrain_force_all_persistent` and without it, which take turns step by step. cpu is the time of all threads of the
process, which other load on the machine changes less than wall time; `least cpu` is the
ratio of the fastest rounds, and `watch ms` what counting every storage of the CPU device
adds to each of a run's first steps, which are in no other figure.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from pairs import (
    CASES,
    Case,
    Memcpy,
    Pair,
    Rate,
    Size,
    Step,
    Trainer,
    common_arguments,
    keep_freed_memory,
    size_option,
    state_on_host,
)
from rich.console import Console
from tables import Page, environment, median_interval, spread, write
from whole_runs import axolotl_page, axolotl_pairs

from axolotl.integrations.protrain.core.engine.device import open_device
from axolotl.integrations.protrain.core.engine.session import Session

RESIDENT_TARGET, EXPLAINED_TARGET = 0.01, 0.15
RESAMPLES = 2000


@dataclass(frozen=True)
class Round:
    """Medians of the steps of a round, and of a paged one what a step moves."""

    plain: Step
    ours: Step
    beside: Step
    fetched_bytes: float = 0.0
    offloaded_bytes: float = 0.0
    rate: Rate = Rate(1.0, 1.0, 1.0)
    host_update_s: float = 0.0

    @property
    def copies_s(self) -> float:
        fetch_s = self.fetched_bytes / self.rate.fetch
        return fetch_s + self.offloaded_bytes / self.rate.offload

    @property
    def predicted_s(self) -> float:
        host_s = self.ours.waited_s - self.host_update_s
        return self.beside.wall_s + self.copies_s + host_s

    @property
    def predicted_cpu_s(self) -> float:
        moved = self.fetched_bytes + self.offloaded_bytes
        return self.plain.cpu_s + moved / self.rate.cpu


@dataclass
class Result:
    """All rounds of a case."""

    case: Case
    num_hooks: int = 0
    rounds: list[Round] = field(default_factory=list)
    equal: bool = True
    watch_s: float = 0.0

    def raw_rounds(self) -> list[dict[str, Any]]:
        """What each figure comes from."""
        if not self.case.resident:
            return [asdict(one) for one in self.rounds]
        kinds = ("wall_s", "cpu_s")
        return [
            {
                "plain": {kind: getattr(one.plain, kind) for kind in kinds},
                "ours": {kind: getattr(one.ours, kind) for kind in kinds},
            }
            for one in self.rounds
        ]

    @property
    def ratios(self) -> list[float]:
        """What the target is about, of each round; 1 without any cost or error."""
        if self.case.resident:
            return [r.ours.wall_s / r.plain.wall_s for r in self.rounds]
        return [r.predicted_s / r.ours.wall_s for r in self.rounds]

    @property
    def slowdown_explained(self) -> float:
        """The same without the plain step in it; noise weighs more."""
        return _slowdown_explained(self.rounds)

    @property
    def slowdown_interval(self) -> tuple[float, float]:
        """95 % of what it would be if other rounds were repeated."""
        draw = random.Random(0)
        resampled = (
            _slowdown_explained(draw.choices(self.rounds, k=len(self.rounds)))
            for _ in range(RESAMPLES)
        )
        edges = statistics.quantiles(resampled, n=40)
        return edges[0], edges[-1]

    @property
    def verdict(self) -> str:
        """Of the target, as far as the noise lets it be known."""
        if not self.equal:
            return "losses DIFFER"
        if self.case.plan is None:
            return "noise"
        if self.case.plan is state_on_host:
            return "no target"
        if self.case.resident:
            low, high = median_interval(self.ratios)
            below, above = 0.0, 1 + RESIDENT_TARGET
        else:
            low, high = self.slowdown_interval
            below, above = 1 - EXPLAINED_TARGET, 1 + EXPLAINED_TARGET
        if high < below or low > above:
            return "MISSED"
        return "met" if low >= below and high <= above else "open"

    @property
    def failure(self) -> str:
        """What is wrong, in a few words; empty where the target is met or open."""
        if self.verdict not in ("MISSED", "losses DIFFER"):
            return ""
        if not self.equal:
            found = self.verdict
        elif self.case.resident:
            found = f"{statistics.median(self.ratios):.3f} of plain"
        else:
            found = f"{self.slowdown_explained:.2f} explained"
        return f"{self.case.method}, {self.case.name}: {found}"

    def cells(self) -> list[str]:
        def ms(figure: Callable[[Round], float]) -> str:
            return f"{statistics.median(map(figure, self.rounds)) * 1e3:.1f}"

        def mega(figure: Callable[[Round], float]) -> str:
            return f"{statistics.median(map(figure, self.rounds)) / 1e6:,.0f}"

        low, high = median_interval(self.ratios)
        slower = [r.ours.wall_s / r.plain.wall_s for r in self.rounds]
        cells = [
            self.case.method,
            self.case.name,
            ms(lambda r: r.plain.wall_s),
            ms(lambda r: r.ours.wall_s),
            spread(slower),
        ]
        interval = f"{low:.3f} to {high:.3f}"
        if self.case.resident:
            cpu = spread([r.ours.cpu_s / r.plain.cpu_s for r in self.rounds])
            least = min(r.ours.cpu_s for r in self.rounds) / min(
                r.plain.cpu_s for r in self.rounds
            )
            watch = f"{self.watch_s * 1e3:.1f}"
            facts = f"{least:.3f}", str(self.num_hooks), watch, self.verdict
            return [*cells, interval, cpu, *facts]
        return [
            *cells,
            mega(lambda r: r.fetched_bytes),
            mega(lambda r: r.offloaded_bytes),
            ms(lambda r: r.copies_s),
            ms(lambda r: r.ours.waited_s),
            ms(lambda r: r.predicted_s),
            spread(self.ratios),
            f"{self.slowdown_explained:.2f}",
            "{:.2f} to {:.2f}".format(*self.slowdown_interval),
            spread([r.predicted_cpu_s / r.ours.cpu_s for r in self.rounds]),
            self.verdict,
        ]


RESIDENT_COLUMNS = (
    "train",
    "plan",
    "plain ms",
    "ours ms",
    "ours / plain",
    "95 %",
    "cpu ours / plain",
    "least cpu",
    "hooks",
    "watch ms",
    "within 1 %",
)


PAGED_COLUMNS = (
    "train",
    "plan",
    "plain ms",
    "ours ms",
    "ours / plain",
    "MB in",
    "MB out",
    "copies ms",
    "wait ms",
    "predicted ms",
    "step explained",
    "slowdown explained",
    "95 %",
    "cpu explained",
    "within 15 %",
)


def _slowdown_explained(rounds: Sequence[Round]) -> float:
    predicted = [r.predicted_s - r.plain.wall_s for r in rounds]
    measured = [r.ours.wall_s - r.plain.wall_s for r in rounds]
    return statistics.median(predicted) / statistics.median(measured)


def median_step(steps: Sequence[Step]) -> Step:
    rows = [tuple(vars(step).values()) for step in steps]
    return Step(*(statistics.median(column) for column in zip(*rows, strict=True)))


def measure(case: Case, size: Size, args: argparse.Namespace) -> Result:
    """Rounds of plain and ours in turns, the first round of a pair not counted."""
    result = Result(case)
    watched_s = []
    for build in range(args.builds):
        pair = Pair(case, size, args.device, swapped=build % 2 == 1)
        result.num_hooks = pair.num_hooks
        with ExitStack() as undo:
            undo.callback(pair.close)
            memcpy = None
            if not case.resident:
                memcpy = Memcpy(pair, open_device(args.device))
                undo.callback(memcpy.close)
            for number in range(args.rounds + 1):
                one, equal = play(pair, number, args.steps, memcpy)
                result.equal &= equal
                if number:
                    result.rounds.append(one)
            if case.resident and pair.session is not None:
                watched_s.append(watch_cost_s(pair.session, pair.ours))
    result.watch_s = statistics.median(watched_s or [0.0])
    return result


def play(
    pair: Pair, number: int, num_steps: int, memcpy: Memcpy | None
) -> tuple[Round, bool]:
    """One round, and whether all its losses were equal."""
    # the first step of a paged turn finds no update under way
    first = 0 if memcpy is None else 1
    before = pair.moved_bytes()
    trainers = (pair.plain, pair.ours) if number % 2 else (pair.ours, pair.plain)
    runs = {trainer: trainer.run(num_steps + first) for trainer in trainers}
    fetched, offloaded = (
        (now - then) / (num_steps + first)
        for then, now in zip(before, pair.moved_bytes(), strict=True)
    )
    plain, ours = runs[pair.plain], runs[pair.ours]
    beside = plain
    if pair.update is not None:
        beside = pair.plain.run_beside(pair.update, num_steps + first)
        # the two keep to the same batches
        pair.ours.run(num_steps + first)
    one = Round(
        median_step(plain[first:]),
        median_step(ours[first:]),
        median_step(beside[first:]),
        fetched,
        offloaded,
        host_update_s=median_step(plain).update_s * pair.updated_share,
    )
    if memcpy is not None:
        one = replace(one, rate=memcpy.rate())
    return one, [step.loss for step in plain] == [step.loss for step in ours]


def watch_cost_s(session: Session, trainer: Trainer) -> float:
    """What counting every storage adds to a step, which a run's first steps pay."""

    def timed(watch: AbstractContextManager[object]) -> float:
        with watch:
            return trainer.step().wall_s

    return statistics.median(
        timed(session.watch()) - timed(nullcontext()) for _ in range(3)
    )


def arguments() -> argparse.Namespace:
    parser = common_arguments(__doc__)
    size_option(parser, "--resident", Size(hidden=512, layers=12, tokens=64))
    parser.add_argument("--builds", type=int, default=4, help="new pairs of models")
    parser.add_argument("--rounds", type=int, default=15, help="of each pair")
    parser.add_argument("--steps", type=int, default=1, help="of each in a round")
    parser.add_argument("--only", choices=("resident", "paged"))
    parser.add_argument("--axolotl", action="store_true", help="pairs of processes")
    parser.add_argument("--pairs", type=int, default=5, help="of processes")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    console = Console()
    if not console.is_terminal:
        console = Console(width=170)
    if args.axolotl:
        pairs = axolotl_pairs(args.pairs, num_steps=40)
        pages = [axolotl_page(pairs)]
        raw: list[dict] = [asdict(pair) for pair in pairs]
        ratios = [ratio for pair in pairs for ratio in pair.ratios]
        ratio = statistics.median(ratios)
        late = median_interval(ratios)[0] > 1 + RESIDENT_TARGET
        missed = [f"{ratio:.3f} of plain"] if late else []
        missed += [] if all(pair.equal for pair in pairs) else ["losses DIFFER"]
    else:
        results = []
        for case in CASES:
            if args.only in (None, "resident" if case.resident else "paged"):
                size = Size(*(args.resident if case.resident else args.paged))
                results.append(measure(case, size, args))
                console.print(*results[-1].cells(), sep="  ")
                gc.collect()
        pages = [
            Page(title, columns, rows)
            for title, columns, kind in (
                ("Everything resident", RESIDENT_COLUMNS, True),
                ("Paged", PAGED_COLUMNS, False),
            )
            if (rows := [r.cells() for r in results if r.case.resident is kind])
        ]
        raw = [
            {
                "method": result.case.method,
                "plan": result.case.name,
                "num_hooks": result.num_hooks,
                "losses_equal": result.equal,
                "watch_s": result.watch_s,
                "rounds": result.raw_rounds(),
            }
            for result in results
        ]
        missed = [r.failure for r in results if r.failure]
    for page in pages:
        page.show(console)
    if args.output:
        part = "axolotl" if args.axolotl else args.only
        name = "-".join(filter(None, [args.device.type, "overhead", part]))
        write(args.output, name, environment(args.device), pages, raw)
    print(f"missed: {', '.join(missed)}" if missed else "no target is missed")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
