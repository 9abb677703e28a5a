"""What the paging hooks cost: microseconds of Python per block and step.

Runs on the CPU device, where a transfer is a copy whose time the device counts. Two
equal models of tiny blocks, one plain and one with everything paged, take turns; the
difference of the median steps, less the time in copies, is what the hooks, the pager
and the optimizer's bookkeeping took. On a GPU the same Python runs beside kernels.

`cpu` is the same difference in CPU time of the main thread, which other load on the
machine changes less, and `least cpu` that of the fastest rounds; `wall` also contains
waits for the host thread.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from axolotl.integrations.protrain.core.engine.device import CpuDevice, Device
from axolotl.integrations.protrain.core.engine.session import Session
from axolotl.integrations.protrain.core.layout import build_layout
from axolotl.integrations.protrain.core.planner.plans import make_plan

TARGET_US = 60.0
"""For a frozen base, per block and step."""

Pick = Callable[[list[float]], float]


class Block(nn.Module):
    """Attention-like in its parameters: seven matrices and two norms, all tiny."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.linears = nn.ModuleList(
            nn.Linear(width, width, bias=False) for _ in range(7)
        )
        self.lora_a = nn.Linear(width, 2, bias=False)
        self.lora_b = nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norms[0](x)
        for linear in self.linears:
            hidden = linear(hidden)
        return x + self.norms[1](hidden) + self.lora_b(self.lora_a(x))


class Blocks(nn.Module):
    def __init__(self, num_blocks: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@dataclass
class Case:
    """One way to train: what is trainable, and its two runs."""

    name: str
    num_blocks: int
    plain: Callable[[], None]
    paged: Callable[[], None]
    session: Session


@dataclass(frozen=True)
class Step:
    """One step in seconds."""

    wall_s: float
    cpu_s: float
    copies_s: float = 0.0


@dataclass(frozen=True)
class Result:
    """All rounds of a case."""

    plain: list[Step]
    paged: list[Step]
    num_blocks: int

    def per_block_us(self, clock: str, pick: Pick) -> float:
        """What paging took beside its copies."""
        paged, plain, copies = (
            pick([getattr(step, field) for step in steps])
            for steps, field in (
                (self.paged, clock),
                (self.plain, clock),
                (self.paged, "copies_s"),
            )
        )
        return (paged - plain - copies) / self.num_blocks * 1e6

    def row(self) -> str:
        """Medians of the three parts, and the cost by three measures."""
        parts = (
            [step.wall_s for step in self.plain],
            [step.wall_s for step in self.paged],
            [step.copies_s for step in self.paged],
        )
        costs = (
            self.per_block_us("wall_s", statistics.median),
            self.per_block_us("cpu_s", statistics.median),
            self.per_block_us("cpu_s", min),
        )
        return "".join(f"{statistics.median(p) * 1e3:9.2f}" for p in parts) + "".join(
            f"{cost:12.1f}" for cost in costs
        )


def build(name: str, num_blocks: int, width: int, n_buffer: int) -> Case:
    """`frozen`: only the adapters train, and stay; `full`: everything trains."""
    torch.manual_seed(0)
    plain = Blocks(num_blocks, width)
    adapters = set()
    if name == "frozen":
        for param_name, param in plain.named_parameters():
            param.requires_grad = "lora" in param_name
            if param.requires_grad:
                adapters.add(param_name)
    model = copy.deepcopy(plain)
    layout = build_layout(model, adapters)
    plan = make_plan(layout, 0, n_buffer, 0, 0, False)
    session = Session(model, layout, plan, CpuDevice())
    x = torch.randn(1, width)
    return Case(
        name,
        num_blocks,
        plain=step_of(plain, adamw(plain), x, settle=lambda: None),
        paged=step_of(model, session.wrap_optimizer(adamw(model)), x, session.settle),
        session=session,
    )


def adamw(model: nn.Module) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-4, fused=True)


def step_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    settle: Callable[[], None],
) -> Callable[[], None]:
    """Forward, backward, update; `settle` waits for host updates still running."""

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        settle()

    return step


def timed(step: Callable[[], None], device: Device | None = None) -> Step:
    copies = device.stall_s if device else 0.0
    wall, cpu = time.perf_counter(), time.thread_time()
    step()
    return Step(
        time.perf_counter() - wall,
        time.thread_time() - cpu,
        device.stall_s - copies if device else 0.0,
    )


def measure(case: Case, rounds: int, warmup: int) -> Result:
    """Plain and paged take turns, so that what else the machine does hits both."""
    result = Result([], [], case.num_blocks)
    for round_number in range(warmup + rounds):
        plain, paged = timed(case.plain), timed(case.paged, case.session.device)
        if round_number >= warmup:
            result.plain.append(plain)
            result.paged.append(paged)
    return result


def show_profile(case: Case, steps: int) -> None:
    """The functions of a paged step by their own time; the host thread is not seen."""
    profiler = cProfile.Profile()
    with profiler:
        for _ in range(steps):
            case.paged()
    print(f"\n{case.name}: {steps} paged steps")
    pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(25)


@contextmanager
def opened(case: Case) -> Iterator[Case]:
    try:
        yield case
    finally:
        case.session.close()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--width", type=int, default=32, help="of the tiny matrices")
    parser.add_argument("--slots", type=int, default=2, help="n_buffer")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--case", choices=("frozen", "full", "both"), default="both")
    parser.add_argument("--profile", action="store_true", help="where the time goes")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    torch.set_num_threads(1)
    names = ("frozen", "full") if args.case == "both" else (args.case,)
    print(
        f"{args.blocks} blocks of width {args.width}, {args.slots} slots, medians of "
        f"{args.rounds} rounds, torch {torch.__version__}, one thread"
    )
    print(f"{'':8}{'ms per step':>27}{'µs per block and step':>36}")
    columns = ("plain", "paged", "copies"), ("wall", "cpu", "least cpu")
    print(" " * 8 + "".join(f"{c:>9}" for c in columns[0]), end="")
    print("".join(f"{c:>12}" for c in columns[1]))
    least = {}
    for name in names:
        with opened(build(name, args.blocks, args.width, args.slots)) as case:
            result = measure(case, args.rounds, args.warmup)
            least[name] = result.per_block_us("cpu_s", min)
            print(f"{name:8}{result.row()}")
            if args.profile:
                show_profile(case, args.rounds)
    told = ", ".join(f"{name} {cost:.0f}" for name, cost in least.items())
    print(f"µs per block and step: {told}; target of frozen: {TARGET_US:.0f}")
    return int(least.get("frozen", 0) > TARGET_US)


if __name__ == "__main__":
    sys.exit(main())
