"""What several processes do together in the tests of ranks; `python rank_cases.py OUT`.

Started by torchrun's variables, each process runs every case beside plain
DistributedDataParallel and rank 0 writes what all of them found.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from core_models import ALL, HOST_STATE, adamw, batches, freeze, make_plan, stack
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from axolotl.integrations.protrain.core.layout import build_layout
from axolotl.integrations.protrain.core.runtime import (
    CheckedDevice,
    CpuDevice,
    Device,
    Ranks,
    SimulatedDevice,
    at_random,
)
from axolotl.integrations.protrain.core.session import Options, Session

STEPS = 3


@dataclass(frozen=True)
class Case:
    """One training, paged and plain.

    Attributes:
        name: For people.
        sharded: Mode C rather than B.
        trained: Words in the names of what trains; empty for everything.
        accumulation: Micro-batches of a step.
        clip: Largest gradient norm, if any.
        slow: Copies take random times.
        plan: For `make_plan`.
        options: For `Options`.
        skips: Blocks that odd ranks leave out.
        unused: Whether odd ranks leave a parameter out of the loss.
    """

    name: str
    sharded: bool
    trained: tuple[str, ...] = ()
    accumulation: int = 1
    clip: float | None = None
    slow: bool = False
    plan: tuple[tuple[str, Any], ...] = ()
    dtype: torch.dtype = torch.float32
    skips: tuple[int, ...] = ()
    unused: bool = False


def grid() -> Iterator[Case]:
    """{B, C} x {adapter, full} x accumulation x clipping."""
    for sharded, full, accumulation, clip in product(
        (False, True), (False, True), (1, 3), (None, 0.5)
    ):
        mode, what = "BC"[sharded], "full" if full else "adapter"
        name = f"{mode}-{what}-{accumulation}-{'clip' if clip else 'free'}"
        yield Case(name, sharded, () if full else ("extra",), accumulation, clip)


def special() -> Iterator[Case]:
    """What the grid does not have, in both modes."""
    for sharded in (False, True):
        mode = "BC"[sharded]
        host_state = (("outside", HOST_STATE),)
        yield Case(f"{mode}-slow", sharded, (), 3, 0.5, slow=True)
        yield Case(f"{mode}-slow-adapter", sharded, ("extra",), 2, slow=True)
        yield Case(f"{mode}-host-state", sharded, (), 2, 0.5, plan=host_state)
        mixed = (*host_state, ("resident", (1, 3)), ("recompute", (0, 1, 4)))
        yield Case(f"{mode}-mixed", sharded, (), 2, 0.5, plan=mixed)
        yield Case(f"{mode}-bf16", sharded, (), 2, 0.5, dtype=torch.bfloat16)
        yield Case(f"{mode}-skips", sharded, (), 2, 0.5, skips=(0, 3, 5))
        yield Case(f"{mode}-skips-adapter", sharded, ("norm",), 1, skips=(5,))
        yield Case(f"{mode}-unused", sharded, (), 2, 0.5, unused=True)


CASES = {case.name: case for case in (*grid(), *special())}


@dataclass
class Numbers:
    """What one training gave on one rank."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    counts: dict[str, int]


def run(case: Case, ranks: Ranks) -> dict[str, Any]:
    """Train both ways and compare; the same on every rank."""
    plain = _model(case)
    theirs = _train(case, plain, _wrap(case, plain, frozenset()), adamw(plain), None)
    model = _model(case)
    keep = frozenset(n for n, p in model.named_parameters() if p.requires_grad)
    layout = build_layout(model, keep if case.trained else ())
    shards = ranks.world.local_size if case.sharded else 1
    plan = make_plan(layout, shards=shards, **dict(case.plan))
    device = _device(case, ranks)
    options = Options(poison=True)
    session = Session(model, layout, plan, CheckedDevice(device), options, ranks)
    optimizer = session.wrap_optimizer(adamw(model))
    ours = _train(
        case, model, _wrap(case, model, session.host_kept), optimizer, session
    )
    session.close()
    if isinstance(device, SimulatedDevice):
        device.close()
    ours.weights = {name: w.clone() for name, w in model.state_dict().items()}
    return {
        "losses": _farthest(ours.losses, theirs.losses),
        "norms": _farthest(ours.norms, theirs.norms),
        "weights": max(
            (ours.weights[name].float() - w.float()).abs().max().item()
            for name, w in theirs.weights.items()
        ),
        "agree": _agree(ours.weights),
        "chunks": len(plan.paged),
        "host_chunks": sum(
            plan.placements[c.index].on_host and c.trainable for c in layout.chunks
        ),
        **ours.counts,
    }


def _model(case: Case) -> Any:
    model = stack(dtype=case.dtype, inner=(32, 40, 24, 32, 56, 32), width=20)
    if case.trained:
        freeze(model, case.trained)
    return model


def _wrap(case: Case, model: nn.Module, ignored: frozenset[str]) -> nn.Module:
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    if trained <= ignored:
        return model
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    uneven = bool(case.skips) or case.unused
    return DistributedDataParallel(model, find_unused_parameters=uneven)


def _device(case: Case, ranks: Ranks) -> Device:
    if not case.slow:
        return CpuDevice()
    seed = ranks.rank
    return SimulatedDevice(at_random(seed, 2e-3), at_random(seed + 10, 2e-3))


def _train(
    case: Case,
    model: Any,
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    session: Session | None,
) -> Numbers:
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank % 2:
        model.order = [n for n in ALL if n not in case.skips]
        for layer in model.layers:
            layer.use_extra = not case.unused
    losses, norms = [], []
    for step in range(STEPS):
        data = batches(case.accumulation, seed=step * size + rank)
        for number, tokens in enumerate(data):
            last = number == len(data) - 1
            if session is not None:
                session.begin_micro_batch(last)
            waits = isinstance(net, DistributedDataParallel) and not last
            with net.no_sync() if waits else nullcontext():
                loss = net(tokens) / len(data)
                loss.backward()
            losses.append(loss.item())
        if case.clip is not None:
            norm = session.clip_grad_norm(case.clip) if session else None
            if norm is None:
                norm = nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    counts = {}
    if session is not None:
        measured = session.measured()
        counts = {"gathers": measured.num_gathers, "reduces": measured.num_reduces}
        session.settle()
    state = {name: w.clone() for name, w in model.state_dict().items()}
    return Numbers(losses, norms, state, counts)


def _farthest(ours: Sequence[float], theirs: Sequence[float]) -> float:
    assert len(ours) == len(theirs)
    return max((abs(a - b) for a, b in zip(ours, theirs, strict=True)), default=0.0)


def _agree(weights: dict[str, Tensor]) -> bool:
    """Whether all ranks have the same bits."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, weights)
    return all(
        torch.equal(first, other[name])
        for other in every[1:]
        for name, first in every[0].items()
    )


def main(out: Path, names: Sequence[str]) -> None:
    dist.init_process_group("gloo")
    found = {}
    for name in names or CASES:
        ranks = Ranks("cpu")
        worst = ranks.collect(run(CASES[name], ranks))
        found[name] = {
            key: min(w[key] for w in worst)
            if key == "agree"
            else max(w[key] for w in worst)
            for key in worst[0]
        }
        if dist.get_rank() == 0:
            out.write_text(json.dumps(found))
        ranks.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
