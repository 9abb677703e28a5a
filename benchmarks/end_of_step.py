"""What the end of a step costs: norm, clipping and update of what is on the host.

A Llama from a configuration is trained several times in one process, in turns, everything
paged through two slots (embedding and head keep their state on the host):

  plain            torch's fused AdamW and `clip_grad_norm_`
  host             `protrain_cpu_optimizer: torch`: AdamW on the host thread
  deferred         the device updates, in the next forward

A round is a forward after an update, a backward, both again with nothing pending, and the
end of the step. The cost of the end is the time of clipping and `step`, until the host is
done, and, paged, what the first forward takes longer than the second, and, because norms
are taken while gradients pass, what the last backward takes longer than the first. On the
CPU device every copy is compute's to wait for: nothing of the deferred way hides, neither
its copies nor its update; on a GPU they run beside blocks.

Ratios are within a round; medians with quartiles.
"""

from __future__ import annotations

import copy
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from pairs import Size, adamw, common_arguments, keep_freed_memory
from rich.console import Console
from tables import Page, environment, spread, write
from torch import Tensor, nn

from axolotl.integrations.protrain.core.engine.device import open_device
from axolotl.integrations.protrain.core.engine.session import Session
from axolotl.integrations.protrain.core.layout import build_layout
from axolotl.integrations.protrain.core.planner.plans import make_plan
from axolotl.integrations.protrain.core.types import Placement, Update

MAX_NORM = 0.5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Round:
    """Seconds: of the end of a step, and of forward and backward without it."""

    end_s: float
    rest_s: float

    @property
    def step_s(self) -> float:
        return self.end_s + self.rest_s


class Way:
    """One model in training; `update` None trains it plainly."""

    def __init__(self, name: str, model: nn.Module, update: Update | None) -> None:
        self.name, self.session = name, None
        self._defers = update is Update.DEVICE
        self._model = model = copy.deepcopy(model)
        device = torch.device("cpu")
        self._optimizer: torch.optim.Optimizer = adamw(model)
        if update is not None:
            layout = build_layout(model)
            plan = make_plan(
                layout,
                0,
                2,
                0,
                0,
                fp32_master=False,
                outside=Placement.OPTIMIZER_OFFLOADED,
            )
            opened = open_device(device)
            plan = replace(plan, update=update)
            self.session = session = Session(model, layout, plan, opened)
            self._optimizer = session.wrap_optimizer(self._optimizer)

    def round(self, tokens: Tensor) -> tuple[Round, float]:
        """And the loss."""
        times = [self._pass(tokens, last=False), self._pass(tokens, last=True)]
        (first, early, _), (second, late, loss) = times
        start = time.perf_counter()
        norm = self.session.clip_grad_norm(MAX_NORM) if self.session else None
        if norm is None:
            nn.utils.clip_grad_norm_(self._model.parameters(), MAX_NORM)
        self._optimizer.step()
        if self.session is not None and not self._defers:
            self.session.settle()
        end_s = time.perf_counter() - start
        self._optimizer.zero_grad()
        if self.session is not None:
            end_s += first - second + late - early
        return Round(end_s, second + early), loss

    def _pass(self, tokens: Tensor, last: bool) -> tuple[float, float, float]:
        """Seconds of forward and backward, and the loss."""
        self._optimizer.zero_grad()
        if self.session is not None:
            self.session.begin_micro_batch(last)
        start = time.perf_counter()
        loss = self._model(input_ids=tokens, labels=tokens).loss
        middle = time.perf_counter()
        loss.backward()
        return middle - start, time.perf_counter() - middle, loss.item()

    def close(self) -> None:
        if self.session is not None:
            self.session.close()


def measure(size: Size, dtype: torch.dtype, rounds: int) -> dict[str, list[Round]]:
    """All ways in turns, and whether their losses are equal."""
    model = size.model("full", torch.device("cpu")).to(dtype)
    with ExitStack() as undo:
        ways = [
            Way("plain", model, None),
            Way("host", model, Update.HOST),
            Way("deferred", model, Update.DEVICE),
        ]
        for way in ways:
            undo.callback(way.close)
        results: dict[str, list[Round]] = {way.name: [] for way in ways}
        for number in range(rounds + 3):
            tokens = size.batch(number, torch.device("cpu"))
            losses = []
            for way in ways:
                one, loss = way.round(tokens)
                losses.append(loss)
                # staging grows with the state, which is there from the second update on
                if number >= 3:
                    results[way.name].append(one)
            if len({*losses}) > 1:
                raise SystemExit(f"losses differ in round {number}: {losses}")
    return results


def page(title: str, results: dict[str, list[Round]]) -> Page:
    rows = []
    plain = results["plain"]
    for name, rounds in results.items():
        ends = [
            one.end_s / other.end_s for one, other in zip(rounds, plain, strict=True)
        ]
        shares = [
            one.end_s / other.step_s for one, other in zip(rounds, plain, strict=True)
        ]
        steps = [
            one.step_s / other.step_s for one, other in zip(rounds, plain, strict=True)
        ]
        milliseconds = spread([1e3 * one.end_s for one in rounds])
        rows.append([name, milliseconds, *map(spread, (ends, shares, steps))])
    heads = ["", "end of step, ms", "of plain's end", "of plain's step", "step / plain"]
    return Page(title, heads, rows)


def main() -> None:
    parser = common_arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    args: Any = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    size = Size(*args.paged)
    pages, raw = [], {}
    for name, dtype in DTYPES.items():
        results = measure(size, dtype, args.rounds)
        what = (
            f"{name}, {size.layers} blocks of width {size.hidden}, {size.tokens} tokens"
        )
        pages.append(page(what, results))
        raw[name] = {
            way: [asdict(r) for r in rounds] for way, rounds in results.items()
        }
        pages[-1].show(Console())
    if args.output:
        facts = environment(torch.device("cpu"))
        write(args.output, "cpu-end-of-step", facts, pages, raw)
    told = (f"{each.title.split(',')[0]} {each.rows[-1][-1]}" for each in pages)
    print(f"deferred, step / plain: {'; '.join(told)}")


if __name__ == "__main__":
    main()
