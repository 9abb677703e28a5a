"""How fast is the host update, beside DeepSpeedCPUAdam and torch's own AdamW?

Ours is what the runtime does: `HostAdamW` on its thread, a chunk at a time, with
clipping and the rounding of masters. The others do the same work on equal tensors in
the calling thread, and all take turns. A ratio above 1 says that ours is faster: by the
clock, which on a shared machine also counts waits for a core, and by CPU time of all
threads, which with several of them also counts spinning.

A chunk is a block with the shapes of a Llama: seven matrices and two norms.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import commit, package_version
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from axolotl.integrations.protrain.core.layout import aligned
from axolotl.integrations.protrain.core.optim import HostAdamW, HostChunk, HostMemory
from axolotl.integrations.protrain.core.profile.hardware import cpu_name
from axolotl.integrations.protrain.core.runtime import Arena, CpuDevice, HostWorker
from axolotl.integrations.protrain.core.types import Chunk, TensorSpec

FP32, BF16 = torch.float32, torch.bfloat16
HYPERPARAMETERS: dict[str, Any] = {
    "lr": 1e-4,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
}
GROUP = torch.optim.AdamW([torch.ones(1)], **HYPERPARAMETERS).defaults
"""As the trainer's optimizer holds them."""
MAX_NORM, NORM = 1.0, 1.01
"""Clipped a little each turn: gradients are kept, and should not vanish."""
WARMUP = 2
PATTERN = 1 << 20
"""Numbers drawn at random; larger tensors repeat them."""


@dataclass(frozen=True)
class Case:
    """What is updated.

    Attributes:
        name: Of the work.
        weights: Dtype of the weights that the device reads.
        masters: Whether fp32 masters are updated and rounded into them.
        chunk_mb: Megabytes of the weights of a chunk.
        num_chunks: Chunks of a turn.
        clips: Whether gradients are scaled first.
    """

    name: str
    weights: torch.dtype
    masters: bool
    chunk_mb: float
    num_chunks: int
    clips: bool

    @property
    def updated(self) -> torch.dtype:
        return FP32 if self.masters else self.weights

    def moved_bytes(self, foreach: bool) -> int:
        """To and from memory for a parameter, were nothing in a cache.

        Fused kernels read weight, gradient and moments and write all but the gradient;
        foreach makes eight passes with 12 reads and 8 writes.
        """
        size = self.updated.itemsize
        update = (20 if foreach else 7) * size
        return update + 2 * size * self.clips + 6 * self.masters


WORK = (
    ("fp32", FP32, False),
    ("bf16, bf16 state", BF16, False),
    ("bf16, fp32 masters", BF16, True),
)
SIZES = ((1, 2), (20, 1), (200, 1))
CLIPPED_MB = 20


def cases(largest_mb: float) -> list[Case]:
    return [
        Case(*work, size, num_chunks, clips)
        for work in WORK
        for size, num_chunks in SIZES
        if size <= largest_mb
        for clips in (False, True)
        if not clips or size == CLIPPED_MB
    ]


def shapes(numel: int) -> list[tuple[int, ...]]:
    """A block of about so many parameters: 12 squares of its width."""
    width = max(16, round(math.sqrt(numel / 12) / 16) * 16)
    inner = width * 8 // 3 // 16 * 16
    square = (width, width)
    return [
        *[square] * 4,
        (inner, width),
        (inner, width),
        (width, inner),
        (width,),
        (width,),
    ]


def chunks_of(case: Case) -> list[Chunk]:
    found = []
    for index in range(case.num_chunks):
        specs, offset = [], 0
        numel = int(case.chunk_mb * 1e6) // case.weights.itemsize
        for number, shape in enumerate(shapes(numel)):
            spec = TensorSpec(f"{index}.{number}", shape, case.weights, offset)
            specs.append(spec)
            offset = aligned(offset + spec.nbytes)
        found.append(Chunk(index, index, True, tuple(specs), offset))
    return found


def fill(tensor: Tensor, seed: int, scale: float) -> None:
    """The same numbers for every system, in bf16 already where some of it is."""
    random = torch.Generator().manual_seed(seed)
    numbers = scale * torch.randn(min(PATTERN, tensor.numel()), generator=random)
    flat, numbers = tensor.view(-1), numbers.to(BF16)
    for part in flat.split(PATTERN):
        part.copy_(numbers[: part.numel()])


def fill_all(weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    for seed, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
        fill(weight, seed, 0.02)
        fill(gradient, seed + 1_000_000, 0.01)


class Ours:
    """What `PagedAdamW.step` queues, and the wait for it."""

    def __init__(self, case: Case, chunks: Sequence[Chunk]) -> None:
        device = CpuDevice()
        arena = Arena(chunks)
        memory = HostMemory(arena, device, case.masters)
        memory.add(chunks)
        params = {
            spec.name: nn.Parameter(torch.empty(spec.shape, device="meta"))
            for chunk in chunks
            for spec in chunk.tensors
        }
        self._hosts = [HostChunk(chunk, params, memory) for chunk in chunks]
        self.weights = [w for host in self._hosts for w in host.weights]
        self.prepare()
        fill_all(self.weights, [g for host in self._hosts for g in host.gradients])
        for host in self._hosts:
            host.reload()
        self._device, self._worker = device, HostWorker(device)
        group_of = {id(param): 0 for param in params.values()}
        self._adamw = HostAdamW(self._hosts, group_of, [GROUP], "torch", self._worker)
        self._clip: Callable[[Sequence[Tensor]], None] | None = None
        if case.clips:
            self._clip = partial(
                torch.nn.utils.clip_grads_with_norm_,
                max_norm=MAX_NORM,
                total_norm=torch.tensor(NORM),
            )
        self._arena_bytes = arena.nbytes

    def prepare(self) -> None:
        """Give back the gradients that the last update has consumed."""
        for host in self._hosts:
            host.used.update(host.owned)

    def update(self) -> None:
        """One update of every chunk."""
        self._adamw.submit(
            [GROUP],
            self._device.fetch.record(),
            self._clip,
            lambda host: None,
        )
        # a wait for each would wake this thread at each
        self._worker.wait(self._hosts[-1].chunk.index)
        self._worker.drain()

    def nbytes(self) -> int:
        own = sum(host.host_bytes() for host in self._hosts)
        return self._arena_bytes + own + self._adamw.state_bytes()

    def close(self) -> None:
        self._worker.close()


class Peer:
    """Another optimizer on tensors of its own, one optimizer a chunk.

    Args:
        make: Builds it.
        flat: Give it one tensor a chunk, as ZeRO does, instead of one a parameter.
    """

    def __init__(
        self,
        make: Callable[[list[Tensor]], torch.optim.Optimizer],
        case: Case,
        chunks: Sequence[Chunk],
        flat: bool = False,
    ) -> None:
        self.weights: list[Tensor] = []
        self._parts: list[tuple[torch.optim.Optimizer, list[Tensor]]] = []
        self._rounded: list[list[tuple[Tensor, Tensor]]] = []
        self._factor = MAX_NORM / (torch.tensor(NORM) + 1e-6) if case.clips else None
        gradients = []
        for chunk in chunks:
            numels = [spec.numel for spec in chunk.tensors]
            sizes = [sum(numels)] if flat else numels
            leaves = [torch.empty(numel, dtype=case.updated) for numel in sizes]
            for leaf in leaves:
                leaf.grad = torch.empty_like(leaf)
                gradients += leaf.grad.split(numels) if flat else [leaf.grad]
            weights = leaves
            if case.masters:
                weights = [leaf.to(case.weights) for leaf in leaves]
            pairs = [*zip(weights, leaves, strict=True)] if case.masters else []
            self._rounded.append(pairs)
            for weight in weights:
                self.weights += weight.split(numels) if flat else [weight]
            self._parts.append((make(leaves), leaves))
        fill_all(self.weights, gradients)
        for pairs in self._rounded:
            for weight, leaf in pairs:
                leaf.copy_(weight)

    def prepare(self) -> None:
        """Its gradients stay."""

    def update(self) -> None:
        """One update of every chunk."""
        for (optimizer, leaves), pairs in zip(self._parts, self._rounded, strict=True):
            if self._factor is not None:
                for leaf in leaves:
                    assert leaf.grad is not None
                    leaf.grad.mul_(self._factor)
            optimizer.step()
            for weight, leaf in pairs:
                weight.copy_(leaf)

    def nbytes(self) -> int:
        total = 0
        for optimizer, leaves in self._parts:
            total += sum(2 * leaf.nbytes for leaf in leaves)
            for state in optimizer.state.values():
                total += sum(v.nbytes for v in state.values() if isinstance(v, Tensor))
        return total + sum(w.nbytes for pairs in self._rounded for w, _ in pairs)

    def close(self) -> None:
        """Nothing runs beside it."""


def deepspeed_adam(params: list[Tensor]) -> torch.optim.Optimizer:
    """With moments in the dtype of what it updates, as ours has them."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(
        params, **HYPERPARAMETERS, adamw_mode=True, fp32_optimizer_states=False
    )


def torch_adamw(params: list[Tensor], **how: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **HYPERPARAMETERS, **how)


OURS, REFERENCE = "ours", "torch fused"
SYSTEMS: dict[str, Callable[[Case, Sequence[Chunk]], Ours | Peer]] = {
    OURS: Ours,
    REFERENCE: partial(Peer, partial(torch_adamw, fused=True)),
    "DeepSpeed": partial(Peer, deepspeed_adam),
    "DeepSpeed, flat": partial(Peer, deepspeed_adam, flat=True),
    "torch foreach": partial(Peer, partial(torch_adamw, foreach=True)),
}


@dataclass
class Row:
    """One system in one case.

    Attributes:
        seconds: Of an update, in each turn.
        cpu_s: CPU time of it, of all threads.
        bytes_per_param: Weight, gradient, moments and master, as allocated.
        moved_bytes_per_param: See `Case.moved_bytes`.
        max_difference: Of weights to those of torch's fused AdamW after all turns.
        excuse: Why it could not run.
    """

    case: str
    chunk_mb: float
    clips: bool
    threads: int
    system: str
    num_params: int
    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    cpu_ratios: list[float] = field(default_factory=list)
    bytes_per_param: float = 0.0
    moved_bytes_per_param: int = 0
    max_difference: float = 0.0
    excuse: str = ""

    @property
    def params_s(self) -> float:
        return self.num_params / statistics.median(self.seconds)

    def cells(self) -> list[str]:
        head = [
            f"{self.case}{', clipped' * self.clips}",
            f"{self.chunk_mb:g}",
            str(self.threads),
            self.system,
        ]
        if self.excuse:
            return [*head, *["-"] * 6, self.excuse]
        same = f"{self.max_difference:.1e}" if self.max_difference else "equal"
        return [
            *head,
            f"{self.params_s / 1e9:.3f}",
            *(
                "" if self.system == OURS else spread(ratios)
                for ratios in (self.ratios, self.cpu_ratios)
            ),
            f"{self.bytes_per_param:.1f}",
            str(self.moved_bytes_per_param),
            f"{self.moved_bytes_per_param * self.params_s / 1e9:.1f}",
            same,
        ]


COLUMNS = (
    "weights and state",
    "chunk MB",
    "threads",
    "system",
    "Gparam/s",
    "ours is faster by",
    "by CPU time",
    "bytes held",
    "bytes moved",
    "GB/s",
    "weights",
)


def spread(values: Sequence[float]) -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def measure(case: Case, threads: int, rounds: int) -> list[Row]:
    """All systems in turns; small chunks so often that a turn is not a blink."""
    chunks = chunks_of(case)
    num_params = sum(spec.numel for chunk in chunks for spec in chunk.tensors)
    rows, built = {}, {}
    for name, make in SYSTEMS.items():
        row = Row(case.name, case.chunk_mb, case.clips, threads, name, num_params)
        row.moved_bytes_per_param = case.moved_bytes("foreach" in name)
        rows[name] = row
        try:
            built[name] = make(case, chunks)
        except (ImportError, OSError, RuntimeError) as error:
            row.excuse = f"{type(error).__name__}: {error}".splitlines()[0]
    repeats = max(1, int(10e6 / num_params))
    names = list(built)
    for turn in range(WARMUP + rounds):
        for place in range(len(names)):
            # who comes first changes: each finds the caches as the one before left them
            name = names[(turn + place) % len(names)]
            wall_s = cpu_s = 0.0
            for _ in range(repeats):
                built[name].prepare()
                wall, cpu = time.perf_counter(), time.process_time()
                built[name].update()
                wall_s += time.perf_counter() - wall
                cpu_s += time.process_time() - cpu
            if turn >= WARMUP:
                rows[name].seconds.append(round(wall_s / repeats, 7))
                rows[name].cpu_s.append(round(cpu_s / repeats, 7))
    reference = built[REFERENCE].weights
    for name, system in built.items():
        row = rows[name]
        row.bytes_per_param = system.nbytes() / num_params
        row.ratios = ratios(row.seconds, rows[OURS].seconds)
        row.cpu_ratios = ratios(row.cpu_s, rows[OURS].cpu_s)
        row.max_difference = max(
            (a.view(-1) - b.view(-1)).abs().max().item()
            for a, b in zip(system.weights, reference, strict=True)
        )
        system.close()
    return list(rows.values())


def ratios(theirs: Sequence[float], own: Sequence[float]) -> list[float]:
    return [round(a / b, 3) for a, b in zip(theirs, own, strict=True)]


def copy_bytes_s() -> float:
    """Bytes read and written by a copy that no cache holds."""
    source = torch.ones(64 << 20)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return 2 * source.nbytes / statistics.median(seconds[1:])


def versions() -> dict[str, str]:
    packages = {name: package_version(name) for name in ("torch", "deepspeed")}
    return {"python": platform.python_version(), **packages}


def child(threads: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure in a process of its own, whose OpenMP has so many threads."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, __file__, "--child", str(answer)]
        command += ["--rounds", str(args.rounds), "--largest", str(args.largest)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        subprocess.run(command, env=environment, check=True)
        return json.loads(answer.read_text())


def run_child(args: argparse.Namespace) -> None:
    threads = int(os.environ["OMP_NUM_THREADS"])
    torch.set_num_threads(threads)
    rows: list[Row] = []
    for case in cases(args.largest):
        rows += measure(case, threads, args.rounds)
        print(f"{threads} threads: {case.name}, {case.chunk_mb:g} MB", file=sys.stderr)
    answer = {"copy_bytes_s": copy_bytes_s(), "rows": [asdict(row) for row in rows]}
    args.child.write_text(json.dumps(answer))


def markdown(head: Sequence[str], rows: Sequence[Row]) -> str:
    lines = ["# Host AdamW", "", *head, ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    lines += ["| " + " | ".join(row.cells()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--threads", type=int, nargs="+", default=sorted({1, 2, cores} - {0})
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--largest", type=float, default=200, help="MB of a chunk")
    parser.add_argument(
        "--output", type=Path, help="write STEM.md and STEM.json", metavar="STEM"
    )
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.child:
        run_child(args)
        return
    answers = {threads: child(threads, args) for threads in args.threads}
    rows = [Row(**row) for answer in answers.values() for row in answer["rows"]]
    copies = ", ".join(
        f"{answer['copy_bytes_s'] / 1e9:.1f} GB/s with {threads} threads"
        for threads, answer in answers.items()
    )
    load = os.getloadavg()[1]
    known = ", ".join(f"{name} {value}" for name, value in versions().items())
    options = f"--rounds {args.rounds} --largest {args.largest:g}"
    threads = " ".join(map(str, args.threads))
    head = [
        f"{date.today()}, commit {commit()}, {os.cpu_count()} cores of "
        f"{cpu_name()} ({torch.backends.cpu.get_cpu_capability()}), load {load:.1f}; "
        f"{known}.",
        "",
        f"`python benchmarks/host_adam.py --threads {threads} {options}`",
        "",
        f"A copy reads and writes {copies}. DeepSpeed keeps moments in the dtype of what "
        "it updates, as ours does; where that are fp32 masters, every system rounds "
        "them into bf16 weights afterwards, as ZeRO-Offload does. *flat* is one tensor "
        "a chunk instead of nine. Ratios are medians and quartiles; weights are compared "
        "with those of torch fused.",
    ]
    table = Table(*COLUMNS, box=box.SIMPLE)
    for row in rows:
        table.add_row(*row.cells())
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print("\n".join(head))
    console.print(table)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.with_suffix(".md").write_text(markdown(head, rows))
        report = {"head": head, "versions": versions(), "runs": answers}
        args.output.with_suffix(".json").write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
