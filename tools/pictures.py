"""Draw the pictures of docs/images: `make pictures`, or with the names of some.

`paging` is a step as the planner simulates it, `comparison` the latest results of
benchmarks/compare.py, `plan` a screenshot of the page of a plan (needs Chromium),
`terminal` what three commands print. Each is less than `MOST_BYTES`.
"""

from __future__ import annotations

import argparse
import html
import io
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from axolotl.integrations.protrain.core.layout import build_layout, find_blocks
from axolotl.integrations.protrain.core.planner.cards import gpu_hardware
from axolotl.integrations.protrain.core.planner.demand import Demand
from axolotl.integrations.protrain.core.planner.emulation import Emulation
from axolotl.integrations.protrain.core.planner.memory import MemoryModel
from axolotl.integrations.protrain.core.planner.plans import make_plan
from axolotl.integrations.protrain.core.planner.seconds import (
    DeferredStep,
    block_times,
)
from axolotl.integrations.protrain.core.planner.trace import trace_step
from axolotl.integrations.protrain.core.types import Workload

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
MOST_BYTES = 150_000
sys.path[:0] = [str(ROOT / "tests/protrain"), str(ROOT / "benchmarks")]

STYLE = """
text{font:13px system-ui,sans-serif;fill:#24292f}
.small{font-size:11px}.head{font-weight:600}.inside{fill:#fff;font-size:11px}
.box{fill:#f3f4f6;stroke:#8c959f}.line{stroke:#8c959f;fill:none}
.forward{fill:#0969da}.again{fill:#54aeff}.backward{fill:#0a3069}.update{fill:#8250df}
.weights{fill:#1a7f37}.state{fill:#7d4e00}.gradients{fill:#bc4c00}.wait{fill:#cf222e}
.s0{fill:#8c959f}.s1{fill:#1a7f37}.s2{fill:#54aeff}.s3{fill:#0969da}.s4{fill:#8250df}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.inside{fill:#fff}
.box{fill:#161b22}.backward{fill:#1f6feb}.state{fill:#9e6a03}}
"""


def svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """A picture that says its title to whoever cannot see it."""
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>\n{body}\n</svg>\n"
    )


def text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">'
        f"{html.escape(words)}</text>"
    )


def box(x: float, y: float, width: float, height: float, style: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.5):.2f}" '
        f'height="{height:.1f}" class="{style}" rx="2"/>'
    )


@dataclass(frozen=True)
class Span:
    """Work of a lane from one second to another, of a block or of none."""

    lane: str
    start: float
    end: float
    kind: str
    block: int | None


NUM_BLOCKS = 6
ROWS, LENGTH = 2, 8192
BLOCKS_HELD = 2
CARD = "RTX 4090"
FROZEN, TRAINED = "LoRA: frozen blocks", "full fine-tune, one micro-batch per step"
LANES = {
    "compute": "GPU computes",
    "fetch": "host to GPU",
    "offload": "GPU to host",
}
KINDS = {
    "forward": "forward",
    "again": "recompute and backward",
    "backward": "backward",
    "update": "optimizer update",
    "weights": "weights",
    "state": "optimizer state",
    "gradients": "gradients",
    "wait": "GPU waits",
}


class Recorded(DeferredStep):
    """The planner's own step, which also keeps what each lane does when."""

    def __init__(self, demand: Demand) -> None:
        super().__init__(demand)
        self._block_of = {
            chunk: block
            for block, (start, stop) in enumerate(demand.bounds)
            for chunk in range(start, stop)
        }
        self.spans: list[Span] = []
        self.doing = "forward"
        self.block: int | None = None

    @contextmanager
    def named(self, kind: str, block: int | None = None) -> Iterator[None]:
        before = self.doing, self.block
        self.doing, self.block = kind, block
        yield
        self.doing, self.block = before

    def _run(self, seconds: float, queue_s: float = 0.0) -> None:
        super()._run(seconds, queue_s)
        if seconds:
            self._keep("compute", self.now, seconds)

    def _queue(self, lane: str, seconds: float, ready: float = 0.0) -> float:
        done = super()._queue(lane, seconds, ready)
        self._keep(lane, done, seconds)
        return done

    def _keep(self, lane: str, end: float, seconds: float) -> None:
        self.spans.append(Span(lane, end - seconds, end, self.doing, self.block))

    def _stand(self, seconds: float, lane: str) -> None:
        with self.named("wait"):
            super()._stand(seconds, lane)

    def _fetch_chunk(self, chunk: int) -> None:
        with self.named("weights", self._block_of[chunk]):
            super()._fetch_chunk(chunk)

    def _stage(self, key: object, nbytes: float) -> bool:
        with self.named("state"):
            return super()._stage(key, nbytes)

    def _update(self, work: Any, there: float = 0.0, parts: int = 1) -> float:
        with self.named("update"):
            return super()._update(work, there, parts)

    def _leave(self, nbytes: int, ready: float) -> None:
        with self.named("gradients"):
            super()._leave(nbytes, ready)

    def _await_chunks(self, start: int, stop: int) -> None:
        super()._await_chunks(start, stop)
        self.block = self._block_of[start]

    def backward(self, first: bool = False, last: bool = False) -> None:
        self.doing = "backward"
        super().backward(first, last)


def simulated(trained: bool) -> tuple[list[Span], float, float]:
    """Simulate one step of six blocks of an 8B Llama, all paged, two at a time on the card.

    Returns:
        What each lane does when, the seconds of the step, and the bytes of a block.
    """
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=NUM_BLOCKS,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=2048,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    if not trained:
        model.requires_grad_(False)
        for block in model.model.layers:
            # as small as an adapter
            block.input_layernorm.requires_grad_(True)
    ids = torch.ones(ROWS, LENGTH, dtype=torch.long)

    def loss_of() -> torch.Tensor:
        with Emulation("cuda", torch.bfloat16):
            return model(input_ids=ids, labels=ids, use_cache=False).loss

    trace = trace_step(model, find_blocks(model), loss_of).trace
    layout = build_layout(model, (), trace.blocks)
    hardware = gpu_hardware(CARD, None, 64 << 30)
    workload = Workload(accumulation=1, tokens=ROWS * LENGTH)
    memory = MemoryModel(layout, trace, workload, hardware)
    slots = BLOCKS_HELD * len(layout.pageable) // NUM_BLOCKS
    plan = make_plan(layout, 0, slots, 0, NUM_BLOCKS // 2, False)
    moved = memory.activations(plan.policies).moved
    times = block_times(trace, layout, hardware)

    demand = Demand(memory.trained, plan, times, hardware, moved)
    step = Recorded(demand)
    step.update()
    step.forward(first=True)
    step.block = None
    step.backward(first=True, last=True)
    step.settle()
    redone = {b for b, policy in enumerate(plan.policies) if policy.recomputes}
    spans = [
        replace(span, kind="again")
        if span.kind == "backward" and span.block in redone
        else span
        for span in step.spans
        if span.end - span.start > 1e-4
    ]
    chunk_bytes = max(demand.chunk_bytes)
    return spans, step.now, chunk_bytes


def timeline(y: float, name: str, spans: list[Span], total: float) -> Iterator[str]:
    """Draw the lanes of a step below each other, the seconds to the right."""
    left, width, high = 120.0, 800.0, 24.0
    scale = width / total
    waits = sum(s.end - s.start for s in spans if s.kind == "wait")
    said = (
        f"{name}: {1000 * total:.0f} ms, of which the GPU waits {1000 * waits:.0f} ms"
    )
    yield text(0, y - 10, said, "head")
    for at, (lane, label) in enumerate(LANES.items()):
        top = y + at * (high + 8)
        yield text(0, top + 16, label, "small")
        yield f'<path class="line" d="M{left} {top + high + 3:.0f}h{width}"/>'
        for span in spans:
            if span.lane != lane:
                continue
            x, wide = left + span.start * scale, (span.end - span.start) * scale
            kind = (
                "weights" if lane == "offload" and span.kind == "update" else span.kind
            )
            yield box(x, top, wide - 1, high, kind)
            if span.block is not None and wide > 14:
                yield text(x + wide / 2, top + 16, str(span.block), "inside", "middle")


def paging() -> str:
    """Draw where weights are, and two steps of the planner's simulation."""
    frozen, frozen_s, nbytes = simulated(trained=False)
    trained, trained_s, _ = simulated(trained=True)
    gib = nbytes / 2**30
    parts = [
        text(0, 18, "How paging works", "head"),
        box(0, 30, 330, 110, "box"),
        text(10, 48, "host memory: every block has a home", "head"),
        box(590, 30, 330, 110, "box"),
        text(600, 48, f"GPU memory: {BLOCKS_HELD} slots at fixed addresses", "head"),
        text(460, 68, "weights, before a block runs", "small", "middle"),
        '<path class="line" d="M340 78h232m-8-5l8 5l-8 5"/>',
        '<path class="line" d="M580 108h-232m8-5l-8 5l8 5"/>',
        text(460, 126, "gradients, updated weights and state", "small", "middle"),
    ]
    for block in range(NUM_BLOCKS):
        parts += [
            box(12 + 52 * block, 60, 44, 30, "weights"),
            text(34 + 52 * block, 79, str(block), "inside", "middle"),
            box(12 + 52 * block, 94, 44, 14, "gradients"),
            box(12 + 52 * block, 112, 44, 18, "state"),
        ]
    for slot in range(BLOCKS_HELD):
        parts += [
            box(602 + 76 * slot, 60, 68, 30, "weights"),
            text(636 + 76 * slot, 79, f"{2 + slot}", "inside", "middle"),
        ]
    parts += [
        text(
            602,
            110,
            f"block b uses slot b mod {BLOCKS_HELD}; {gib:.2f} GiB each",
            "small",
        ),
        text(602, 128, "beside them: activations, head, adapters", "small"),
        box(774, 60, 136, 30, "forward"),
        text(842, 79, "block 2 runs", "inside", "middle"),
    ]
    parts += timeline(182, FROZEN, frozen, frozen_s)
    parts += timeline(318, TRAINED, trained, trained_s)
    x = 120.0
    for kind, label in KINDS.items():
        parts += [box(x, 424, 12, 12, kind), text(x + 16, 434, label, "small")]
        x += 26 + 6.2 * len(label)
    about = (
        f"Simulated by the planner: {NUM_BLOCKS} blocks of Llama 3.1 8B, {ROWS} x {LENGTH:,} "
        f"tokens, {CARD}, PCIe 4 x16. Numbers are those of blocks. The first half recomputes."
    )
    parts.append(text(0, 460, about, "small"))
    return svg(
        930, 470, "How paging works: weights are fetched while blocks run", parts
    )


def comparison() -> str:
    """Draw tokens per second over plain training, one field a case."""
    from comparison.report import NOISE, by_case
    from comparison.systems import EQUAL, LABELS, REFERENCE

    newest = max((ROOT / "benchmarks/results").glob("*-cpu-compare.json"))
    shown = {
        "ours": "s3",
        EQUAL: "s2",
        "plain_recompute": "s0",
        "fsdp2": "s1",
        "zero3": "s4",
    }
    parts: list[str] = []
    y = 46.0
    left, unit = 250.0, 480.0
    for case, of_case in by_case(json.loads(newest.read_text())["records"]):
        seconds = {r["system"]: r["step_s"] for r in of_case if "excuse" not in r}
        if REFERENCE not in seconds:
            continue
        low, middle, high = statistics.quantiles(seconds[REFERENCE], n=4)
        noisy = high - low > NOISE * middle
        said = f"{case.name}" + ", noisy: read with care" * noisy
        parts.append(text(0, y, said, "head"))
        y += 8
        for system, style in shown.items():
            if system not in seconds:
                continue
            ratio = middle / statistics.median(seconds[system])
            parts += [
                text(left - 8, y + 12, LABELS[system], "small", "end"),
                box(left, y, unit * ratio, 14, style),
                text(left + unit * ratio + 6, y + 12, f"{ratio:.2f}", "small"),
            ]
            y += 18
        y += 22
    line = f'<path class="line" d="M{left + unit} 30V{y - 20:.0f}"/>'
    head = [
        text(
            0,
            18,
            f"Speed over plain training without a limit of memory ({newest.name[:10]},"
            " two CPU cores)",
            "head",
        ),
        text(left + unit, 34, "plain = 1", "small", "middle"),
        line,
    ]
    about = "FSDP2 and ZeRO-3 are held to no limit of memory; benchmarks/README.md explains."
    parts.append(text(0, y, about, "small"))
    return svg(
        930, int(y + 12), "Speed beside plain training, FSDP2 and ZeRO-3", head + parts
    )


def environment(cache: Path) -> dict[str, str]:
    """Return that of a command: offline, a terminal of 100 columns, colours."""
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HUB_OFFLINE": "1",
        "AXOLOTL_DO_NOT_TRACK": "1",
        "COLUMNS": "100",
        "PYTHONWARNINGS": "ignore",
        # nothing that was measured on another day
        "XDG_CACHE_HOME": str(cache),
    }


def ours(*words: str, folder: Path) -> str:
    """Run a command of this package in a folder; returns what it printed."""
    command = [sys.executable, "-m", "axolotl.integrations.protrain.cli", *words]
    done = subprocess.run(
        command, cwd=folder, env=environment(folder), stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def plan_page(name: str = "llama3-8b-full-24gb") -> bytes:
    """Take a screenshot of the page of a plan, in few colours."""
    from PIL import Image
    from published_models import BASES

    with TemporaryDirectory() as folder:
        here = Path(folder)
        for base, config in BASES.items():
            (here / base).mkdir(parents=True)
            (here / base / "config.json").write_text(json.dumps(config))
        example = str(ROOT / "examples" / f"{name}.yaml")
        ours("plan", example, "--gpu", CARD, "--html", "plan.html", folder=here)
        shot = here / "plan.png"
        subprocess.run(
            [
                *(shutil.which("chromium") or "chromium", "--headless", "--no-sandbox"),
                *("--disable-gpu", "--hide-scrollbars", "--window-size=1200,900"),
                *(f"--screenshot={shot}", str(here / "plan.html")),
            ],
            check=True,
            stderr=subprocess.DEVNULL,
        )
        few = Image.open(shot).convert("RGB").quantize(64)
        out = io.BytesIO()
        few.save(out, "png", optimize=True)
    return out.getvalue()


BEFORE = """# a YAML for FSDP
fsdp_version: 2
fsdp_config:
  offload_params: true
"""


def said_of_training(log: str) -> Iterator[str]:
    """Yield what this plugin and the trainer say of a run, without dates and bars."""
    steps = re.findall(r"{'loss': '([\d.]+)', 'grad_norm': '([\d.]+)'", log)
    for line in log.splitlines():
        if found := re.match(r"\[[^\]]+\] \[INFO\] \[[\w.]+\] (ProTrain.*)", line):
            yield found[1]
            if "moves the model" in line:
                yield "..."
                for number, (loss, norm) in enumerate(steps, 1):
                    yield f"step {number}: loss {loss}, grad_norm {norm}"
        elif line.startswith(("s/step", "tokens/s")) or "predicted)" in line:
            yield line


def terminal() -> str:
    """Record migrate, plan and train of the demo's model on the CPU device."""
    from rich.console import Console
    from rich.terminal_theme import MONOKAI
    from rich.text import Text

    sys.path.insert(0, str(ROOT / "examples"))
    import demo
    import yaml

    demo.build_inputs()
    console = Console(record=True, width=100, file=io.StringIO())

    def show(command: str, lines: Iterable[str]) -> None:
        console.print(Text("$ " + command, style="bold green"))
        for line in lines:
            console.print(Text(line))
        console.print()

    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "examples").mkdir()
        shutil.copytree(demo.WORK, folder / "examples/.demo")
        keys = yaml.safe_load(demo.YAML.read_text())
        for key in ("plugins", "protrain_auto_memory"):
            del keys[key]
        (folder / "your.yaml").write_text(
            BEFORE + yaml.safe_dump(keys, sort_keys=False)
        )
        said = ours("migrate", "your.yaml", "--write", folder=folder)
        show("axolotl-protrain migrate your.yaml --write", said.splitlines())
        said = ours("plan", "your.yaml", folder=folder)
        lines = said.split("Assumed and not known")[0].rstrip().splitlines()
        show("axolotl-protrain plan your.yaml", lines)
        log = subprocess.run(
            [sys.executable, "-m", "axolotl.cli.main", "train", "your.yaml"]
            + ["--launcher", "python"],
            cwd=folder,
            env=environment(folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ).stdout
        show("axolotl train your.yaml", said_of_training(log))
    return console.export_svg(title="axolotl-protrain", theme=MONOKAI)


PICTURES: dict[str, Callable[[], str | bytes]] = {
    "paging.svg": paging,
    "comparison.svg": comparison,
    "plan.png": plan_page,
    "terminal.svg": terminal,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", choices=[*PICTURES, []], default=[*PICTURES]
    )
    IMAGES.mkdir(exist_ok=True)
    for name in parser.parse_args().names:
        drawn = PICTURES[name]()
        drawn = drawn.encode() if isinstance(drawn, str) else drawn
        if len(drawn) > MOST_BYTES:
            sys.exit(f"{name}: {len(drawn):,} bytes, more than {MOST_BYTES:,}")
        (IMAGES / name).write_bytes(drawn)
        print(f"docs/images/{name}: {len(drawn):,} bytes")


if __name__ == "__main__":
    main()
