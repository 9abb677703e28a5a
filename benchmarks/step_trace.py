"""Print how much of core one training step passes through: files, functions, classes.

    python benchmarks/step_trace.py

Six blocks on the CPU device, all paged, every second one recomputed, two micro-batches,
clipping, fused AdamW: the case of the house's budget. Functions are told by their code
objects, without comprehensions and lambdas; a class counts where one of its methods runs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from axolotl.integrations.protrain import core
from axolotl.integrations.protrain.core.engine.device import CpuDevice
from axolotl.integrations.protrain.core.engine.session import Session
from axolotl.integrations.protrain.core.layout import build_layout
from axolotl.integrations.protrain.core.planner.plans import make_plan
from axolotl.integrations.protrain.core.types import Placement

CORE = str(Path(core.__file__).parent)
NUM_BLOCKS = 6


class Passed(NamedTuple):
    """What a step passes through, by name."""

    files: set[str]
    functions: set[str]
    classes: set[str]


class Block(nn.Module):
    """A residual block with one hidden layer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    """An embedding, blocks and a head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, width), nn.Linear(width, 64)
        self.layers = nn.ModuleList(Block(width) for _ in range(NUM_BLOCKS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def passed() -> Passed:
    """Train two steps to warm up, and trace the next one."""
    model = Model()
    layout = build_layout(model)
    outside = Placement.OPTIMIZER_OFFLOADED
    plan = make_plan(layout, 0, 2, 0, NUM_BLOCKS // 2, False, outside)
    session = Session(model, layout, plan, CpuDevice())
    optimizer = session.wrap_optimizer(
        torch.optim.AdamW(model.parameters(), fused=True)
    )
    tokens = torch.randint(0, 64, (2, 12))

    def step() -> None:
        for last in (False, True):
            session.begin_micro_batch(last)
            (model(tokens) / 2).backward()
        session.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()

    # the first one makes optimizer state, the second updates weights for the first time
    step()
    step()
    codes: dict[CodeType, str] = {}

    def called(frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(CORE):
            codes[code] = code.co_filename[len(CORE) + 1 :]

    sys.setprofile(called)
    # autograd's thread on a CPU is this one
    step()
    sys.setprofile(None)
    session.close()
    named = {c: file for c, file in codes.items() if not c.co_name.startswith("<")}
    functions = {f"{file}:{_qualified(code)}" for code, file in named.items()}
    classes = {
        name.rpartition(".")[0] for name in functions if "." in name.split(":")[1]
    }
    return Passed(
        set(named.values()), functions, {c for c in classes if "<locals>" not in c}
    )


def _qualified(code: CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)


def main() -> None:
    """Print the counts, and what is behind them with `-v`."""
    found = passed()
    for what, names in found._asdict().items():
        print(f"{what}: {len(names)}")
        if "-v" in sys.argv:
            print(*(f"    {name}" for name in sorted(names)), sep="\n")


if __name__ == "__main__":
    main()
