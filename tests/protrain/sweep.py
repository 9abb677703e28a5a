"""Train every language model of transformers plain and paged, and compare all bits.

`make sweep` writes docs/models.md. Each family is a configuration of its own defaults,
shrunk by rule, with random weights, in a process of its own with a time limit:
traced and laid out as a training does it, then three steps of AdamW with clipping, plain,
paged, and paged with every block recomputed.
"""

from __future__ import annotations

import argparse
import copy
import math
import multiprocessing
import os
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from axolotl.utils.dict import DictDefault
from checked_device import CheckedDevice
from shrunk_models import shrunk_config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as TEXT,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGES,
)

from axolotl.integrations.protrain.core.engine.device import CpuDevice
from axolotl.integrations.protrain.core.engine.session import Session
from axolotl.integrations.protrain.core.errors import (
    FOREIGN_ERRORS,
    ConfigError,
    TraceError,
)
from axolotl.integrations.protrain.core.layout import build_layout, find_blocks
from axolotl.integrations.protrain.core.planner.emulation import Emulation
from axolotl.integrations.protrain.core.planner.meta import meta_copy
from axolotl.integrations.protrain.core.planner.plans import make_plan
from axolotl.integrations.protrain.core.planner.trace import trace_step
from axolotl.integrations.protrain.core.types import Layout
from axolotl.integrations.protrain.offline.batches import sample_batch
from axolotl.integrations.protrain.offline.fake_kernels import make_experts_traceable

Batch = dict[str, Tensor]
Run = tuple[list[float], nn.Module]
"""Losses and grad norms, and the model after it."""

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
NUM_STEPS = 3
MOST_PARAMETERS = 150_000_000
CFG = DictDefault(
    micro_batch_size=2,
    sequence_len=32,
    pad_to_sequence_len=False,
    processor_type="AutoProcessor",
    processor_kwargs={"max_pixels": 512},
)

KINDS = ("images", "text", "pixels")
"""Batches to try: with images as Axolotl's collators make them, without, with a square."""


def model_of(family: str) -> nn.Module:
    """A small model of the family, with random weights."""
    config = shrunk_config(family)
    loader = AutoModelForCausalLM if family in TEXT else AutoModelForImageTextToText
    with torch.device("meta"):
        size = sum(p.numel() for p in loader.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size:,} parameters: the rule does not shrink it")
    torch.manual_seed(0)
    model = loader.from_config(config, dtype=torch.float32).train()
    # as Axolotl trains it
    model.config.use_cache = model.config.get_text_config().use_cache = False
    return model


def batches(model: nn.Module, kind: str) -> list[Batch]:
    """One micro-batch a step, of random tokens and pixels.

    Raises:
        ConfigError: Its images are not known.
    """
    cfg = CFG | DictDefault(is_multimodal=kind == "images")
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(NUM_STEPS):
        batch = sample_batch(cfg, model, [])
        if kind == "pixels":
            vision: Any = getattr(model.config, "vision_config", None)
            side = getattr(vision, "image_size", 16)
            batch["pixel_values"] = torch.empty(2, 3, side, side)
        if kind != "text" and not any(map(torch.is_floating_point, batch.values())):
            raise ConfigError("its images are not known")
        for name, value in batch.items():
            if value.is_floating_point():
                batch[name] = torch.randn(value.shape, generator=generator)
        ids, labels = batch["input_ids"], batch["labels"]
        is_text = (ids < 100) & (labels >= 0)
        drawn = torch.randint(8, 250, ids.shape, generator=generator)
        batch["input_ids"] = torch.where(is_text, drawn, ids)
        batch["labels"] = torch.where(is_text, drawn, labels)
        made.append(batch)
    return made


def trains(model: nn.Module, kind: str) -> bool:
    """Whether one plain step with such a batch ends."""
    with suppress(*FOREIGN_ERRORS, ConfigError):
        train(copy.deepcopy(model), batches(model, kind)[:1], None)
        return True
    return False


def traced(model: nn.Module, batch: Batch) -> Layout:
    """The model laid out in the order of its trace."""
    copied = meta_copy(model)
    make_experts_traceable(copied, [])

    def loss_of() -> Tensor:
        with Emulation("cpu", None):
            return copied(**batch)["loss"]

    step = trace_step(copied, find_blocks(copied), loss_of)
    return build_layout(model, (), step.trace.blocks)


def train(
    model: nn.Module, data: Sequence[Batch], session: Session | None
) -> list[float]:
    """Losses and grad norms."""
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if session is not None:
        optimizer = session.wrap_optimizer(optimizer)
    torch.manual_seed(1)
    numbers = []
    for batch in data:
        loss = model(**batch).loss
        loss.backward()
        norm = session.clip_grad_norm(1.0) if session else None
        if norm is None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        numbers += [loss.item(), norm.item()]
        optimizer.step()
        optimizer.zero_grad()
    return numbers


def paged(
    model: nn.Module, data: Sequence[Batch], layout: Layout, recompute: bool
) -> list[float]:
    """The same with every chunk paged, on a checked device."""
    n_checkpoint = len(layout.blocks) * recompute
    plan = make_plan(layout, 0, 2, 0, n_checkpoint, False)
    session = Session(model, layout, plan, CheckedDevice(CpuDevice()))
    try:
        return train(model, data, session)
    finally:
        session.close()


def require_same(ours: Run, plain: Run) -> None:
    """Raises: AssertionError: which number or weight differs first."""
    for at, (own, other) in enumerate(zip(ours[0], plain[0], strict=True)):
        name = f"{('loss', 'grad norm')[at % 2]} of step {at // 2 + 1}"
        assert own == other, f"{name}: {own!r}, not {other!r}"
    weights = plain[1].state_dict()
    odd = [n for n, v in ours[1].state_dict().items() if not v.equal(weights[n])]
    assert not odd, f"weights differ: {', '.join(odd[:3])}"


def sweep(family: str, say: Callable[[str], None]) -> None:
    """Say the name of each stage when it begins; what it raises is the outcome."""
    say("built")
    model = model_of(family)
    say("trained")
    kinds = KINDS if family in IMAGES else ("text",)
    kind = next((kind for kind in kinds if trains(model, kind)), "text")
    if kind != "text":
        say("images")
        say("trained")
    plain, data = copy.deepcopy(model), batches(model, kind)
    numbers = train(plain, data, None)
    assert all(map(math.isfinite, numbers)), f"not finite: {numbers}"
    say("traced")
    layout = traced(model, data[0])
    for stage, recompute in (("paged", False), ("recomputed", True)):
        say(stage)
        ours = copy.deepcopy(model)
        require_same((paged(ours, data, layout, recompute), ours), (numbers, plain))
    say("")


def child(family: str, pipe: Any) -> None:
    """Sends stages, and the error that ended one."""
    torch.set_num_threads(1)
    sys.stderr = sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - to the end
    try:
        sweep(family, lambda stage: pipe.send((stage, "")))
    except Exception as error:  # noqa: BLE001 - any error of any model is its outcome
        at = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(at.filename).name}:{at.lineno}"
        text = textwrap.shorten(str(error), 300)
        pipe.send(("", f"{type(error).__name__}: {text} ({place})"))


@dataclass
class Outcome:
    """Stages that were reached, and what ended the last one, if anything did."""

    family: str
    stages: list[str]
    error: str

    @property
    def trains(self) -> bool:
        """Without paging."""
        return "traced" in self.stages

    @property
    def is_refused(self) -> bool:
        """With a reason, before anything is paged."""
        return self.error.startswith(TraceError.__name__)

    def __str__(self) -> str:
        if self.is_refused:
            return f"{self.family} refused: {self.error}"
        if self.error:
            return f"{self.family} not {self.stages[-1]}: {self.error}"
        return f"{self.family} exact{' with images' * ('images' in self.stages)}"


def outcome(family: str, limit_s: float) -> Outcome:
    """Of one family, in a process of its own."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=child, args=(family, theirs))
    process.start()
    theirs.close()
    stages = ["started"]
    end = time.monotonic() + limit_s
    error = f"no answer in {limit_s:.0f} s"
    try:
        while ours.poll(max(0.0, end - time.monotonic())):
            stage, error_ = ours.recv()
            if not stage:
                error = error_
                break
            stages.append(stage)
    except EOFError:
        process.join()
        error = f"ended with {process.exitcode}"
    process.kill()
    process.join()
    return Outcome(family, stages, error)


HEADER = """\
# Model families

Written by `make sweep`: do not edit. Every model type that transformers {transformers}
registers for causal language models or for images with text, in a configuration of its
own defaults that a rule has shrunk, with torch {torch} on the CPU device: {steps} steps
of AdamW with clipping, plain and paged with two slots. *Exact*: losses, grad norms and
weights are those of the plain run, bit for bit, with blocks that keep what they save and
with blocks that recompute all of it.
"""


def document(outcomes: Sequence[Outcome]) -> str:
    """Which are exact, and what became of the others."""
    versions = {name: version(name) for name in ("transformers", "torch")}
    parts = [HEADER.format(**versions, steps=NUM_STEPS)]
    exact = [o for o in outcomes if not o.error]
    for title, with_images in (("Exact", False), ("Exact, with images", True)):
        names = [o.family for o in exact if ("images" in o.stages) == with_images]
        text = textwrap.fill(", ".join(names), 88, break_on_hyphens=False)
        parts.append(f"## {title}: {len(names)}\n\n{text}\n")
    failed = [o for o in outcomes if o.error and not o.is_refused]
    kinds = {
        "Refused": [o for o in outcomes if o.is_refused],
        "Fails paged": [o for o in failed if o.trains],
        "No plain run either": [o for o in failed if not o.trains],
    }
    for title, others in kinds.items():
        lines = [
            f"| {o.family} | {o.stages[-1]} | {textwrap.shorten(o.error, 160)} |\n"
            for o in others
        ]
        table = "| model type | not | why |\n| --- | --- | --- |\n" if lines else ""
        parts.append(f"## {title}: {len(others)}\n\n{table}{''.join(lines)}")
    return "\n".join(parts)


CONTEXT = multiprocessing.get_context("forkserver")


def main() -> int:
    """The status: 1 if a family that trains plainly fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="only these, and write nothing")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--limit", type=float, default=120, help="seconds a family")
    args = parser.parse_args()
    # rounds small products by the address of an operand otherwise
    os.environ["MKL_CBWR"] = "COMPATIBLE"
    CONTEXT.set_forkserver_preload([Path(__file__).stem])
    outcomes = []
    with ThreadPoolExecutor(args.jobs) as pool:
        families = args.families or sorted({*TEXT, *IMAGES})
        for found in pool.map(partial(outcome, limit_s=args.limit), families):
            outcomes.append(found)
            print(found, flush=True)
    if not args.families:
        DOCUMENT.write_text(document(outcomes))
    failed = [o.family for o in outcomes if o.trains and o.error and not o.is_refused]
    print(f"{len(failed)} of {len(outcomes)} train plainly and fail", *failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
