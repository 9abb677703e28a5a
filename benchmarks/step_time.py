"""Does the time model predict what a step takes?

Blocks that compute for milliseconds, because their forward and backward sleep, train
under many plans on a simulated device, whose copies take time of their own beside
compute. `simulate_step` predicts each from block times measured on the plain model and
from the rates of copies and host AdamW measured here. Target: each plan within 10 %,
rank correlation at least 0.9. The paper's closed form stands beside it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from closed_form import closed_form_s
from torch import Tensor, nn

from axolotl.integrations.protrain.core.engine.session import Session
from axolotl.integrations.protrain.core.layout import build_layout, spread_order
from axolotl.integrations.protrain.core.planner.block_times import (
    BlockSample,
    time_block,
)
from axolotl.integrations.protrain.core.planner.demand import Demand
from axolotl.integrations.protrain.core.planner.seconds import (
    Clocks,
    StepTime,
    simulate,
)
from axolotl.integrations.protrain.core.planner.trained_bytes import TrainedBytes
from axolotl.integrations.protrain.core.types import (
    BlockTimes,
    Hardware,
    Layout,
    Placement,
    Plan,
    Policy,
    Update,
    Workload,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "protrain" / "core"))

from simulated import SimulatedDevice, at_rate  # noqa: E402

CPU = torch.device("cpu")
NUM_BLOCKS = 8
WIDTH = 128
WARMUP, ROUNDS = 1, 5
TARGET = 0.1
FAST, EVEN, SLOW = 500e6, 100e6, 30e6
"""Bytes per second of a link that hides, just about hides, and does not hide."""


def run_on_caller(
    self: Clocks, seconds: float, queue_s: float = 0.0, *, run: Any = Clocks._run
) -> None:
    """Blocks here compute on the thread that queues copies: it never runs ahead."""
    run(self, seconds, queue_s)
    self.issued = self.now


class Pause(torch.autograd.Function):
    """The identity, which takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grads[0], None, None


class Block(nn.Module):
    """An MLP with an adapter; `inner` sets its bytes, `pause_s` its time."""

    def __init__(self, inner: int, pause_s: float) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, inner, bias=False)
        self.down = nn.Linear(inner, WIDTH, bias=False)
        self.lora_a = nn.Linear(WIDTH, 4, bias=False)
        self.lora_b = nn.Linear(4, WIDTH, bias=False)
        self.pause_s = pause_s

    def forward(self, x: Tensor) -> Tensor:
        x = Pause.apply(x, self.pause_s, 2 * self.pause_s)
        hidden = torch.nn.functional.silu(self.up(x))
        return x + self.down(hidden) + self.lora_b(self.lora_a(x))


class Model(nn.Module):
    """Blocks of two sizes and two durations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Block(1024 + 512 * (index % 2), (5 + 2 * (index % 3)) / 1000)
            for index in range(NUM_BLOCKS)
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x).square().mean()


@dataclass(frozen=True)
class Case:
    """What to train, under which plan, on how fast a machine.

    Attributes:
        link_bytes_s: Simulated link, each way.
        full: Train everything through the host instead of the adapters.
        n_persist: Resident chunks, evenly spread.
        n_buffer: Slots.
        recompute: Blocks that recompute, the first ones.
        accumulation: Micro-batches.
        state_on_host: Whether the state of resident chunks is on the host.
        host_bytes_s: The host makes the updates, and slower than this; None: the device.
    """

    link_bytes_s: float
    full: bool = False
    n_persist: int = 0
    n_buffer: int = 2
    recompute: int = 0
    accumulation: int = 1
    state_on_host: bool = False
    host_bytes_s: float | None = None

    @property
    def update(self) -> Update:
        return Update.DEVICE if self.host_bytes_s is None else Update.HOST

    @property
    def name(self) -> str:
        parts = [
            "full" if self.full else "frozen",
            f"{self.link_bytes_s / 1e6:.0f} MB/s",
            f"persist {self.n_persist}{' (state on host)' * self.state_on_host}",
            f"slots {self.n_buffer}",
        ]
        if self.recompute:
            parts.append(f"recompute {self.recompute}")
        if self.accumulation > 1:
            parts.append(f"{self.accumulation} micro-batches")
        if self.host_bytes_s is not None:
            parts.append(f"host {self.host_bytes_s / 1e6:.0f} MB/s")
        return ", ".join(parts)


CASES = [
    Case(FAST),
    Case(EVEN),
    Case(SLOW),
    Case(FAST, recompute=8),
    Case(EVEN, recompute=4),
    Case(SLOW, n_buffer=3),
    Case(EVEN, n_buffer=1),
    Case(SLOW, recompute=8),
    Case(SLOW, n_buffer=1),
    Case(SLOW, n_buffer=6),
    Case(SLOW, n_buffer=8),
    Case(EVEN, n_persist=2),
    Case(SLOW, n_persist=2),
    Case(SLOW, n_persist=4, recompute=8),
    Case(SLOW, n_persist=4, accumulation=3),
    Case(FAST, full=True),
    Case(EVEN, full=True),
    Case(SLOW, full=True),
    Case(EVEN, full=True, n_persist=4),
    Case(SLOW, full=True, n_buffer=4, recompute=8),
    Case(SLOW, full=True, n_persist=4, state_on_host=True),
    Case(FAST, full=True, host_bytes_s=50e6),
    Case(EVEN, full=True, n_buffer=4, host_bytes_s=25e6),
    Case(EVEN, full=True, n_persist=2, accumulation=2),
    Case(SLOW, full=True, n_persist=4, host_bytes_s=50e6),
    Case(SLOW, full=True, accumulation=4),
]


@dataclass(frozen=True)
class Result:
    """A case, predicted and measured."""

    case: Case
    step: StepTime
    closed_form_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Relative, positive where the prediction is too long."""
        return self.step.total_s / self.measured_s - 1

    def row(self) -> str:
        paper = (
            f"{self.closed_form_s * 1e3:8.1f}" if self.case.accumulation == 1 else ""
        )
        return (
            f"{self.case.name:58}{self.step.total_s * 1e3:8.1f}"
            f"{self.measured_s * 1e3:9.1f}{self.error:8.1%}  {self.step.limiter:8}"
            f"{paper}"
        )


def build(full: bool) -> tuple[Model, set[str]]:
    """The model and the names of its adapters, which stay on the device."""
    torch.manual_seed(0)
    model = Model()
    if full:
        return model, set()
    for name, param in model.named_parameters():
        param.requires_grad = "lora" in name
    return model, {name for name, p in model.named_parameters() if p.requires_grad}


def adamw(model: nn.Module) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-4, fused=True)


def batch() -> Tensor:
    return torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(0))


def plan_of(case: Case, layout: Layout) -> Plan:
    chunks = [chunk.index for chunk in layout.pageable]
    resident = {chunks[k] for k in spread_order(len(chunks))[: case.n_persist]}
    stays = Placement.OPTIMIZER_OFFLOADED if case.state_on_host else Placement.RESIDENT
    placements = tuple(
        Placement.PARAM_OFFLOADED
        if chunk.pageable and chunk.index not in resident
        else (stays if chunk.pageable else Placement.RESIDENT)
        for chunk in layout.chunks
    )
    return Plan(
        n_persist=case.n_persist,
        n_buffer=case.n_buffer,
        n_swap=0,
        n_checkpoint=case.recompute,
        placements=placements,
        policies=tuple(
            Policy.RECOMPUTE if block < case.recompute else Policy.KEEP
            for block in range(NUM_BLOCKS)
        ),
        origin="benchmark",
        update=case.update,
    )


@lru_cache
def plain_times(full: bool) -> BlockTimes:
    """Block times of the plain model, by hooks; medians."""
    model, _ = build(full)
    optimizer = adamw(model)
    marks: list[float] = []

    def mark(*_: Any) -> None:
        marks.append(time.perf_counter())

    def mark_backward(_module: nn.Module, _args: Any, output: Tensor) -> None:
        output.grad_fn.register_prehook(mark)

    for layer in model.layers:
        layer.register_forward_pre_hook(mark)
        layer.register_forward_hook(mark_backward)
    rows = []
    for _ in range(WARMUP + ROUNDS):
        marks.clear()
        mark()
        loss = model(batch().requires_grad_())
        mark()
        loss.backward()
        mark()
        optimizer.step()
        optimizer.zero_grad()
        mark()
        rows.append([b - a for a, b in zip(marks, marks[1:], strict=False)])
    before, *spans = (
        statistics.median(row) for row in zip(*rows[WARMUP:], strict=True)
    )
    # the last block's forward ends where the weights after it begin, all but at once
    n = NUM_BLOCKS
    sample = BlockSample((batch().requires_grad_(),), {})
    timed = [time_block(block, sample, CPU, None, ROUNDS) for block in model.layers]
    return BlockTimes(
        forward_s=tuple(spans[:n]),
        backward_s=tuple(spans[n + 1 : 2 * n + 1]),
        outside_forward_s=before,
        outside_backward_s=spans[n],
        update_s=spans[2 * n + 1],
        measured=True,
        # torch's checkpoint takes milliseconds of Python beside the forward it repeats
        recompute_s=tuple(block.recompute_s or 0.0 for block in timed),
    )


@lru_cache
def adam_bytes_s() -> float:
    """Fused AdamW on tensors of a block."""
    block, optimizer = block_with_gradients()
    return sum(p.nbytes for p in block.parameters()) / median_s(optimizer.step, 20)


@lru_cache
def memory_bytes_s() -> float:
    """What clipping and an update move, ten times the weights of a block."""
    block, optimizer = block_with_gradients()

    def update() -> None:
        nn.utils.clip_grad_norm_(block.parameters(), 1.0)
        optimizer.step()

    return 10 * sum(p.nbytes for p in block.parameters()) / median_s(update, 20)


def block_with_gradients() -> tuple[nn.Module, torch.optim.AdamW]:
    block = Model().layers[0]
    for param in block.parameters():
        param.grad = torch.ones_like(param)
    return block, adamw(block)


@lru_cache
def copy_bytes_s(link_bytes_s: float) -> float:
    """What a link of that rate gives when the copy itself is counted."""
    source = torch.zeros(2 * 1024 * WIDTH * 4, dtype=torch.uint8)
    target = torch.empty_like(source)
    with closing(
        SimulatedDevice(at_rate(link_bytes_s), at_rate(link_bytes_s))
    ) as device:

        def copy() -> None:
            device.fetch.copy(target, source)
            device.synchronize()

        return source.nbytes / median_s(copy, 5)


def median_s(act: Callable[[], object], rounds: int) -> float:
    act()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def hardware_of(case: Case) -> Hardware:
    link = copy_bytes_s(case.link_bytes_s)
    adam = adam_bytes_s()
    if case.host_bytes_s is not None:
        adam = 1 / (1 / adam + 1 / case.host_bytes_s)
    return Hardware(
        name="simulated",
        source="measured in this process",
        device_bytes=0,
        host_bytes=0,
        unseen_bytes=0,
        flops_16=1,
        flops_32=1,
        attention_16=1,
        memory_bytes_s=memory_bytes_s(),
        kernel_s=0,
        fetch_bytes_s=link,
        offload_bytes_s=link,
        fetch_both_bytes_s=link,
        offload_both_bytes_s=link,
        adam_bytes_s=adam,
    )


@contextmanager
def host_at(bytes_s: float | None) -> Iterator[None]:
    """Slow host AdamW down to what its weights take at that rate, clipping included: to
    scale two bytes are moved where the update moves seven."""

    # torch.optim hides the module that steps of AdamW come from
    module = sys.modules[torch.optim.Adam.__module__]
    plain = module.adam

    def slow(params: list[Tensor], *args: Any, **options: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(9 / 7 * sum(p.nbytes for p in params) / bytes_s)
        plain(params, *args, **options)

    with mock.patch.object(module, "adam", plain if bytes_s is None else slow):
        yield


def measure(case: Case, model: Model, layout: Layout, plan: Plan) -> float:
    """Median seconds of a step in the steady state."""
    delay = at_rate(case.link_bytes_s)
    with closing(SimulatedDevice(delay, delay)) as device, host_at(case.host_bytes_s):
        session = Session(model, layout, plan, device)
        try:
            optimizer = session.wrap_optimizer(adamw(model))
            # a first block without an input that needs gradients has a short backward
            x = batch().requires_grad_()

            def step() -> None:
                for _ in range(case.accumulation):
                    model(x).backward()
                session.clip_grad_norm(1.0)
                optimizer.step()
                optimizer.zero_grad()

            for _ in range(WARMUP):
                step()
            return median_s(step, ROUNDS)
        finally:
            session.close()


def run(case: Case) -> Result:
    """Predict and measure one case."""
    model, adapters = build(case.full)
    layout = build_layout(model, adapters)
    plan = plan_of(case, layout)
    times = plain_times(case.full)
    if case.full:
        on_device = sum(
            chunk.nbytes
            for chunk in layout.chunks
            if not plan.placements[chunk.index].on_host
        )
        share = on_device / sum(chunk.nbytes for chunk in layout.chunks)
        times = replace(times, update_s=times.update_s * share)
    hardware = hardware_of(case)
    workload = Workload(case.accumulation, update=case.update)
    demand = Demand(TrainedBytes(layout, workload), plan, times, hardware)
    with mock.patch.object(Clocks, "_run", run_on_caller):
        step = simulate(demand)
    paper_s = closed_form_s(layout, plan, times, hardware)
    return Result(case, step, paper_s, measure(case, model, layout, plan))


def rank_correlation(results: Sequence[Result]) -> float:
    """Spearman's, of predicted and measured steps."""

    def ranks(values: Sequence[float]) -> list[int]:
        order = sorted(range(len(values)), key=values.__getitem__)
        return [order.index(k) for k in range(len(values))]

    return statistics.correlation(
        ranks([r.step.total_s for r in results]), ranks([r.measured_s for r in results])
    )


@contextmanager
def memory_load() -> Iterator[None]:
    """Another process copies host memory as fast as a core can."""
    code = (
        "import torch\na = torch.ones(1 << 26)\nb = a.clone()\nwhile True: b.copy_(a)"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as process:
        time.sleep(5)
        try:
            yield
        finally:
            process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    told = "while another process copies host memory"
    parser.add_argument("--memory-load", action="store_true", help=told)
    with memory_load() if parser.parse_args().memory_load else nullcontext():
        return measured()


def measured() -> int:
    """0 if all plans are on target."""
    torch.set_num_threads(1)
    print(
        f"{NUM_BLOCKS} blocks, medians of {ROUNDS} steps, torch {torch.__version__}, one "
        f"thread; host AdamW {adam_bytes_s() / 1e9:.1f} GB/s of weights"
    )
    columns = f"{'predicted':>9}{'measured':>9}{'error':>8}  {'limiter':8}{'paper':>8}"
    print(f"{'ms per step':57}{columns}")
    results = []
    for case in CASES:
        results.append(run(case))
        print(results[-1].row(), flush=True)
    worst = max(abs(result.error) for result in results)
    correlation = rank_correlation(results)
    print(f"worst error {worst:.1%}, rank correlation {correlation:.3f}")
    return 0 if worst <= TARGET and correlation >= 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
