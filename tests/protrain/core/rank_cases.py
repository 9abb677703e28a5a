"""What several processes do together in the tests of ranks.

`main` runs once a rank, in a fork with torchrun's variables. Every case runs beside plain DistributedDataParallel, and rank 0 writes what was found:
the worst of all ranks.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checked_device import CheckedDevice
from core_models import (
    ALL,
    CPU,
    HOST_STATE,
    adamw,
    batches,
    before_updates,
    freeze,
    make_plan,
    packed_stack,
    slowly,
    stack,
    twin,
)
from safetensors.torch import load_file, save_file
from simulated import SimulatedDevice, at_random
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from axolotl.integrations.protrain.core.engine.device import CpuDevice, Device
from axolotl.integrations.protrain.core.engine.ranks import Ranks
from axolotl.integrations.protrain.core.engine.session import Options, Session
from axolotl.integrations.protrain.core.errors import AccessError
from axolotl.integrations.protrain.core.layout import build_layout, find_blocks
from axolotl.integrations.protrain.core.planner.memory import MemoryModel
from axolotl.integrations.protrain.core.planner.meta import meta_copy
from axolotl.integrations.protrain.core.planner.planner import gradient_order
from axolotl.integrations.protrain.core.planner.trace import trace_step
from axolotl.integrations.protrain.core.types import Update, Workload

STEPS = 3


@dataclass(frozen=True)
class Case:
    """One training, paged and plain.

    Attributes:
        name: Begins with the mode.
        model: A key of `MODELS`.
        trained: Words in the names of what trains; empty for everything.
        accumulation: Micro-batches of a step.
        clip: Largest gradient norm, if any.
        num_clips: How often a step clips, to half of it each further time.
        slow: Copies take random times, and updates of one rank long.
        plan: For `make_plan`.
        options: For `Options`.
        skips: Blocks that odd ranks leave out.
        unused: Whether odd ranks leave a parameter out of the loss.
        evaluates: Whether a forward without gradients comes before each step.
        absent: Whether each rank begins with some of the quantised weights only.
        looks: Whether somebody reads and writes weights and gradients in each step.
        hooks: Whether hooks of the optimizer's step do.
        optimizer: A key of grid.OPTIMIZERS; empty for AdamW.
        resumes: Whether it begins with what a plain run has left.
        mapped: Whether frozen weights are pages of a file, as those of a base are.
    """

    name: str
    trained: tuple[str, ...] = ()
    model: str = "stack"
    accumulation: int = 1
    clip: float | None = None
    slow: bool = False
    plan: tuple[tuple[str, Any], ...] = ()
    dtype: torch.dtype = torch.float32
    skips: tuple[int, ...] = ()
    unused: bool = False
    evaluates: bool = False
    absent: bool = False
    num_clips: int = 1
    looks: bool = False
    hooks: bool = False
    optimizer: str = ""
    resumes: bool = False
    mapped: bool = False

    @property
    def mode(self) -> str:
        return self.name[0]


def grid() -> Iterator[Case]:
    """{A, B, C} x {LoRA, QLoRA, full} x accumulation x clipping."""
    for mode, what, accumulation, clip in product(
        "ABC", ("lora", "qlora", "full"), (1, 3), (None, 0.5)
    ):
        name = f"{mode}-{what}-{accumulation}-{'clip' if clip else 'free'}"
        model = "stack" if what == "full" else what
        plan = (("resident", range(20)),) if mode == "A" else ()
        trained = () if what == "full" else ("lora",)
        yield Case(name, trained, model, accumulation, clip, plan=plan)


HOST = "update", Update.HOST


def special() -> Iterator[Case]:
    """What the grid does not have, in both modes that page."""
    state = (("outside", HOST_STATE),)
    mixed = (*state, ("resident", (1, 3)), ("recompute", (0, 1, 4)))
    disk = (("on_disk", range(99)), ("disk_buffers", 2), ("recompute", (1, 4)))
    stays = (("resident", (2, 3)), ("recompute", (1, 2, 5)))
    for mode in "BC":
        for name, case in {
            "slow": Case("", (), "stack", 3, 0.5, slow=True),
            "slow-lora": Case("", ("lora",), "lora", 2, slow=True),
            "host-state": Case("", (), "stack", 2, 0.5, plan=state),
            "mixed": Case("", (), "stack", 2, 0.5, plan=mixed),
            "swap": Case("", (), "stack", 2, plan=(("swap", (0, 2, 4)),)),
            "bf16": Case("", (), "stack", 2, 0.5, dtype=torch.bfloat16),
            "two-dtypes": Case("", (), "two dtypes", 2, 0.5),
            # what is fetched ahead of block 2 has waited for its update, the last has not
            "skips": Case("", (), "stack", 2, 0.5, slow=True, skips=(0, 3, 4, 5)),
            "skips-adapter": Case("", ("norm",), "stack", 1, skips=(5,)),
            "unused": Case("", (), "stack", 2, 0.5, unused=True),
            "clips-twice": Case("", (), "stack", 1, 0.5, plan=state, num_clips=2),
            "evaluates": Case("", (), "stack", 2, evaluates=True),
            "looks": Case("", (), "stack", 2, 0.5, plan=mixed, slow=True, looks=True),
            "hooks": Case("", (), "stack", 2, 0.5, plan=mixed, hooks=True),
            "absent": Case(
                "", ("lora",), "qlora", plan=(("resident", (1,)),), absent=True
            ),
            "disk": Case("", ("lora",), "lora", 2, 0.5, slow=True, plan=disk),
            "disk-qlora": Case("", ("lora",), "qlora", 2, plan=disk, absent=True),
            "disk-base": Case(
                "", ("lora",), "lora", 2, 0.5, slow=True, plan=disk, mapped=True
            ),
            "disk-packed": Case("", ("norm", "extra"), "packed", 2, plan=disk),
            "packed": Case(
                "", ("norm", "extra"), "packed", 2, 0.5, slow=True, plan=stays
            ),
            "host": Case("", (), "stack", 2, 0.5, plan=(*mixed, HOST), slow=True),
            "host-looks": Case(
                "", (), "stack", 2, 0.5, plan=(*mixed, HOST), looks=True
            ),
            **{
                name.lower().replace(" ", "-"): Case(
                    "", (), "stack", 2, 0.5, plan=state, optimizer=name
                )
                for name in ("amsgrad", "Adafactor", "AdamW8bit", "schedule-free")
            },
            "host-skips": Case(
                "", (), "stack", 2, 0.5, plan=(HOST,), slow=True, skips=(0, 3, 4, 5)
            ),
            "resumes": Case(
                "", (), "stack", plan=state, optimizer="schedule-free", resumes=True
            ),
            "host-8bit": Case("", (), "stack", plan=(HOST,), optimizer="AdamW8bit"),
        }.items():
            yield replace(case, name=f"{mode}-{name}")


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
    theirs, saved = _plain(
        replace(case, name="", plan=(), slow=False, absent=False, mapped=False)
    )
    model = _model(case)
    keep = frozenset(n for n, p in model.named_parameters() if p.requires_grad)
    looked_up = case.mode != "A" and case.trained
    tables = {
        n: 1 for n in dict(model.named_parameters()) if looked_up and "embed" in n
    }
    layout = build_layout(model, keep if case.trained else (), rows=tables)
    shards = ranks.world.local_size if case.mode == "C" else 1
    plan = make_plan(layout, shards=shards, **dict(case.plan))
    device = _device(case, ranks)
    disk = Path(ranks.from_first(tempfile.mkdtemp))
    options = Options(disk=disk)
    if case.mapped:
        _map_frozen(model, disk, ranks)
    absent = _forget_some(model, ranks) if case.absent else ()
    checked = CheckedDevice(device)
    session = Session(model, layout, plan, checked, options, ranks, absent)
    optimizer = session.wrap_optimizer(_optimizer(case, model))
    if saved is not None:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
    net = _wrap(case, model, session.host_kept)
    # the last rank is behind with its shards
    behind_s = 0.02 if case.slow and ranks.rank == ranks.world.size - 1 else 0.0
    with before_updates(partial(time.sleep, behind_s), on_host=False):
        ours = _train(case, model, net, optimizer, session)
    session.close()
    ranks.collect(None)
    chunk_files = len([*disk.glob("*.chunk")])
    ranks.collect(None)
    shutil.rmtree(disk, ignore_errors=True)
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
        "chunk_files": chunk_files,
        "host_tensors": sum(
            len(c.tensors)
            for c in layout.chunks
            if plan.placements[c.index].on_host and c.trainable
        ),
        "host_state": sum(place is HOST_STATE for place in plan.placements),
        **ours.counts,
    }


def _map_frozen(model: nn.Module, folder: Path, ranks: Ranks) -> None:
    """Make frozen weights pages of a file that all ranks open."""
    path = folder / "base.safetensors"
    frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    if not ranks.rank:
        save_file({n: p.detach() for n, p in frozen.items()}, path)
    ranks.collect(None)
    pages = load_file(path)
    for name, param in frozen.items():
        param.data = pages[name]


@cache
def _plain(case: Case) -> tuple[Numbers, Any]:
    """What all cases that differ in where weights are compare with, and begin with."""
    model = _model(case)
    net = _wrap(case, model, frozenset())
    optimizer = _optimizer(case, model)
    saved: Any = None
    if case.resumes:
        _train(case, model, net, optimizer, None)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    return _train(case, model, net, optimizer, None), saved


def _stack(case: Case) -> Any:
    model = stack(dtype=case.dtype, inner=(32, 40, 24, 32, 56, 32), width=20)
    if case.trained:
        freeze(model, case.trained)
    return model


def _two_dtypes(case: Case) -> Any:
    model = _stack(case)
    for layer in model.layers:
        # both in one chunk; the forward multiplies with either
        layer.extra.data = layer.extra.data.bfloat16()
    return model


def _llama(quantised: bool) -> Any:
    # imported here: each takes seconds, in every process
    from odd_models import DOUBLE, SHAPES, quantised_llama
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if quantised:
        return quantised_llama(**DOUBLE)
    model = LlamaForCausalLM(LlamaConfig(**SHAPES))
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))


MODELS: dict[str, Callable[[Case], Any]] = {
    "stack": _stack,
    "two dtypes": _two_dtypes,
    "lora": lambda _: _llama(False),
    "qlora": lambda _: _llama(True),
    # its plain run has the values
    "packed": lambda case: packed_stack(bool(case.name)),
}


def _model(case: Case) -> Any:
    return MODELS[case.model](case)


def _optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if not case.optimizer:
        return adamw(model)
    from grid import OPTIMIZERS, grouped

    return OPTIMIZERS[case.optimizer](grouped([*model.parameters()]))


def _loss(case: Case, net: nn.Module, tokens: Tensor) -> Tensor:
    if "lora" in case.model:
        return net(input_ids=tokens, labels=tokens).loss
    return net(tokens)


def _forget_some(model: nn.Module, ranks: Ranks) -> list[str]:
    """Keep every n-th quantised weight; of the others, names."""
    size, absent = ranks.world.local_size, []
    quantised = [n for n, p in model.named_parameters() if hasattr(p, "quant_state")]
    for number, name in enumerate(quantised):
        if number % size != ranks.local_rank:
            param: Any = model.get_parameter(name)
            param.data.zero_()
            param.quant_state.absmax.zero_()
            param.quant_state.offset.zero_()
            absent.append(name)
    return absent


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


def _look(
    model: nn.Module, session: Session | None, norms: list[float], changes: float
) -> None:
    """Note norms of weights, of a copy too, and gradients, and change both; one rank is
    behind."""
    norms += [param.norm().item() for param in copy.deepcopy(model).parameters()]
    *_, last = model.parameters()
    behind = dist.get_rank() == dist.get_world_size() - 1
    with session.full_params() if session else nullcontext():
        for param in model.parameters():
            if param is last and behind:
                time.sleep(0.05)
            norms.append(param.norm().item())
            param.data.mul_(1 - changes)
            if param.grad is not None:
                norms.append(param.grad.norm().item())
                param.grad.data.mul_(1 + changes)


def _train(
    case: Case,
    model: Any,
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    session: Session | None,
) -> Numbers:
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank % 2 and case.model == "stack":
        model.order = [n for n in ALL if n not in case.skips]
        for layer in model.layers:
            layer.use_extra = not case.unused
    losses, norms = [], []
    look = partial(_look, model, session, norms) if case.looks else id
    # in hooks weights and gradients are shown without being asked for
    _hook(optimizer, partial(_look, model, None, norms) if case.hooks else None)
    for step in range(STEPS):
        look(1e-3)
        data = batches(case.accumulation, seed=step * size + rank)
        if case.evaluates:
            with torch.no_grad():
                losses.append(model(data[0]).item())
        for number, tokens in enumerate(data):
            last = number == len(data) - 1
            if session is not None:
                session.begin_micro_batch(last)
            # in each one, as `Trainer.training_step` does
            _switch(optimizer, "train")
            waits = isinstance(net, DistributedDataParallel) and not last
            with net.no_sync() if waits else nullcontext():
                loss = _loss(case, net, tokens) / len(data)
                loss.backward()
            losses.append(loss.item())
        for number in range(case.num_clips if case.clip is not None else 0):
            largest = case.clip / 2**number
            norm = session.clip_grad_norm(largest) if session else None
            if norm is None:
                norm = nn.utils.clip_grad_norm_(model.parameters(), largest)
            norms.append(norm.item())
        look(1e-2)
        optimizer.step()
        look(1e-3)
        optimizer.zero_grad()
        _switch(optimizer, "eval")
    counts = {}
    if session is not None:
        measured = session.measured()
        counts = {"gathers": measured.num_gathers, "reduces": measured.num_reduces}
        session.settle()
    state = {name: w.clone() for name, w in model.state_dict().items()}
    return Numbers(losses, norms, state, counts)


def _hook(
    optimizer: torch.optim.Optimizer, look: Callable[[float], None] | None
) -> None:
    if look is not None:
        optimizer.register_step_pre_hook(lambda *_: look(1e-2))
        optimizer.register_step_post_hook(lambda *_: look(1e-3))


def _switch(optimizer: Any, mode: str) -> None:
    """To where a schedule-free optimizer trains, or to the mean of that."""
    if hasattr(optimizer, mode):
        getattr(optimizer, mode)()


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


def memory(ranks: Ranks) -> dict[str, Any]:
    """Host memory of weights, gradients and moments, in copies of them all."""
    found = {}
    for mode in "BC":
        # models of earlier cases are views of their host copies
        gc.collect()
        model = stack(width=128, inner=1024)
        layout = build_layout(model)
        shards = ranks.world.local_size if mode == "C" else 1
        plan = make_plan(layout, shards=shards)
        session = Session(model, layout, plan, CpuDevice(), Options(), ranks)
        optimizer = session.wrap_optimizer(adamw(model))
        session.begin_micro_batch(True)
        model(batches(1)[0]).backward()
        optimizer.step()
        session.settle()
        ranks.collect(None)
        copies = 4 * sum(chunk.payload_bytes for chunk in layout.pageable)
        resident, proportional = _shared_bytes()
        found[f"{mode} resident"] = resident / copies
        found[f"{mode} all"] = sum(ranks.collect(proportional)) / copies
        ranks.collect(None)
        session.close()
        del model, session, optimizer
    return found


PEAKS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "paged": ((), {"outside": HOST_STATE}),
    # gradients of a block wait until backward comes to the next one that is paged
    "between": (("layers",), {"resident": (1, 2, 3)}),
    # and those of the head until its end, where no block has any
    "outside": (("embed", "head"), {"outside": HOST_STATE}),
}


def peaks(ranks: Ranks) -> dict[str, Any]:
    """Device bytes that were measured, of those that were predicted."""
    found = {}
    for (name, (words, keys)), dtype in product(
        PEAKS.items(), (torch.float32, torch.bfloat16)
    ):
        model, masters = (
            stack(width=256, inner=1024, dtype=dtype),
            dtype is torch.bfloat16,
        )
        if words:
            freeze(model, words)
        if masters:
            keys = keys | {"outside": HOST_STATE, "inside": HOST_STATE}
        copied = meta_copy(model)
        trace = trace_step(
            copied, find_blocks(copied), partial(copied, batches(1)[0])
        ).trace
        layout = build_layout(model)
        plan = make_plan(layout, **keys)
        plan = replace(plan, gradient_order=gradient_order(layout, trace))
        options = Options(masters, accumulates=True)
        session = Session(model, layout, plan, CpuDevice(), options, ranks)
        optimizer = session.wrap_optimizer(adamw(model))
        net = _wrap(Case(name), model, session.host_kept)
        for seed in range(STEPS):
            with session.watch():
                data = batches(2, seed + 10 * ranks.rank)
                _accumulate(model, net, data, session, optimizer)
        workload = Workload(2, fp32_master=masters, world=ranks.world)
        predicted = MemoryModel(layout, trace, workload, CPU).device(plan).peak_bytes
        measured = session.measured().device_peak_bytes
        found[f"{name} {dtype}"] = measured / predicted
        session.close()
    return found


def _shared_bytes() -> tuple[int, int]:
    """Resident and proportional set size of what `map_shared` has mapped."""
    sizes = {"Rss": 0, "Pss": 0}
    ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *rest = line.split()
        if not key.endswith(":"):
            ours = "memfd:protrain" in line
        elif ours and key[:-1] in sizes:
            sizes[key[:-1]] += 1024 * int(rest[0])
    return sizes["Rss"], sizes["Pss"]


PHASES = ("one", "B", "C", "A", "one", "C", "B", "one")


def resume(ranks: Ranks) -> dict[str, Any]:
    """One curve through several modes and numbers of ranks, a checkpoint between."""
    size, data = ranks.world.size, iter(range(100))
    plain = stack()
    plain_optimizer = adamw(plain)
    model, state = stack(), None
    apart = 0.0
    for phase in PHASES:
        optimizer: torch.optim.Optimizer | None = None
        session, net = _begin(phase, model, ranks)
        if phase != "one" or ranks.rank == 0:
            optimizer = adamw(model)
            optimizer = session.wrap_optimizer(optimizer) if session else optimizer
            if state is not None:
                optimizer.load_state_dict(state)
        for _ in range(2):
            tokens = batches(size, seed=next(data))
            expected = _accumulate(plain, plain, tokens, None, plain_optimizer)
            own = tokens if phase == "one" else [tokens[ranks.rank]]
            loss = torch.zeros(())
            if optimizer is not None:
                loss += _accumulate(model, net, own, session, optimizer)
            shares = 1 if phase == "one" else size
            apart = max(apart, abs(ranks.node_sum(loss).item() / shares - expected))
        saved: list[Any] = [None, None]
        with session.gathered_state() if session else nullcontext():
            if ranks.rank == 0:
                assert optimizer is not None
                # as a trainer saves: rank 0 alone
                saved = [_copied(model.state_dict()), _copied(optimizer.state_dict())]
        dist.broadcast_object_list(saved)
        if session is not None:
            session.close()
        model = stack()
        model.load_state_dict(saved[0])
        state = saved[1]
    return {"losses": apart, "scale": expected}


def _begin(
    phase: str, model: nn.Module, ranks: Ranks
) -> tuple[Session | None, nn.Module]:
    layout = build_layout(model)
    if phase == "A":
        return None, DistributedDataParallel(model)
    if phase == "one":
        if ranks.rank:
            return None, model
        return Session(model, layout, make_plan(layout), CpuDevice()), model
    shards = ranks.world.local_size if phase == "C" else 1
    plan = make_plan(layout, shards=shards, outside=HOST_STATE)
    return Session(model, layout, plan, CpuDevice(), Options(), ranks), model


def _accumulate(
    model: nn.Module,
    net: nn.Module,
    data: Sequence[Tensor],
    session: Session | None,
    optimizer: torch.optim.Optimizer,
) -> float:
    """One step; the mean loss of its micro-batches."""
    total = 0.0
    for number, tokens in enumerate(data):
        if session is not None:
            session.begin_micro_batch(number == len(data) - 1)
        loss = net(tokens) / len(data)
        loss.backward()
        total += loss.item()
    norm = session.clip_grad_norm(0.5) if session else None
    if norm is None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return total


def _copied(state: Any) -> Any:
    return torch.utils._pytree.tree_map(
        lambda value: value.clone() if isinstance(value, Tensor) else value, state
    )


def master(ranks: Ranks) -> dict[str, Any]:
    """bf16 weights through fp32 masters: several ranks, and one with all batches."""
    size = ranks.world.size
    data = [batches(2 * size, seed) for seed in range(STEPS)]
    options = Options(fp32_master=True)

    def opened(shards: int, with_ranks: Ranks | None) -> tuple[Any, Session, Any]:
        model = stack(dtype=torch.bfloat16)
        layout = build_layout(model)
        plan = make_plan(layout, shards=shards, outside=HOST_STATE)
        session = Session(model, layout, plan, CpuDevice(), options, with_ranks)
        return model, session, session.wrap_optimizer(adamw(model))

    alone, session, optimizer = opened(1, None)
    for tokens in data:
        _accumulate(alone, alone, tokens, session, optimizer)
    expected = _copied(optimizer.state_dict()["state"])
    session.close()
    found = {}
    for mode in "BC":
        shards = ranks.world.local_size if mode == "C" else 1
        model, session, optimizer = opened(shards, ranks)
        for tokens in data:
            own = tokens[ranks.rank :: size]
            _accumulate(model, model, own, session, optimizer)
        with session.gathered_state():
            if ranks.local_rank == 0:
                state = optimizer.state_dict()["state"]
                found[mode] = max(
                    _far(state[index][key], values[key])
                    for index, values in expected.items()
                    for key in ("master", "exp_avg", "exp_avg_sq")
                )
            else:
                found[mode] = 0.0
        session.close()
        found[f"{mode} weights"] = max(
            _far(weight, alone.state_dict()[name])
            for name, weight in model.state_dict().items()
        )
    return found


def loads(ranks: Ranks) -> dict[str, Any]:
    """How far ranks are apart in a pass before a load, which the last one makes late, and
    after it: of the model, and of an optimizer with masters."""
    model = stack(dtype=torch.bfloat16)
    layout = build_layout(model)
    options, plan = (
        Options(fp32_master=True),
        make_plan(layout, outside=HOST_STATE, update=Update.HOST),
    )
    session = Session(model, layout, plan, CpuDevice(), options, ranks)
    optimizer = session.wrap_optimizer(adamw(model))
    first = _copied(model.state_dict())
    tokens, found = batches(1)[0], {}
    with before_updates(slowly):
        _accumulate(model, model, [tokens], session, optimizer)
        # the first update, which makes the state, is still to come
        with session.gathered_state():
            state = _copied(optimizer.state_dict()) if ranks.rank == 0 else None
    state = ranks.collect(state)[0]
    found["missing"] = sum("exp_avg" not in own for own in state["state"].values())
    for name, load in {
        "model": partial(model.load_state_dict, first),
        "optimizer": partial(optimizer.load_state_dict, state),
    }.items():
        losses = []
        _accumulate(model, model, [tokens], session, optimizer)
        for act in (lambda: None, load):
            act()
            if ranks.rank == ranks.world.size - 1:
                time.sleep(0.3)
            with torch.no_grad():
                losses.append(model(tokens).item())
        every = ranks.collect(losses)
        found[name] = max(max(own) - min(own) for own in zip(*every, strict=True))
        found[f"{name} changed"] = losses[0] != losses[1]
    session.close()
    return found


def _far(ours: Tensor, theirs: Tensor) -> float:
    return (ours.float() - theirs.float()).abs().max().item()


def collectives(ranks: Ranks) -> dict[str, Any]:
    """What c10d was called for in the training of a full fine-tune or adapter, by mode."""
    found = {}
    for name in ("A-full-3-clip", "B-lora-3-clip", "B-full-3-clip", "C-full-3-clip"):
        # both trainings are counted
        _plain.cache_clear()
        with torch.profiler.profile() as profile:
            run(CASES[name], ranks)
        # `profile.events()` makes a tree of all operators, for half a minute
        events: Any = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
        calls = Counter(event.name() for event in events)
        for kind in ("_allgather_base_", "reduce_", "allreduce_"):
            found[f"{name} {kind}"] = calls[f"c10d::{kind}"]
    return found


def twice(ranks: Ranks) -> dict[str, Any]:
    """What several ranks say to a second backward in one micro-batch."""
    model = stack()
    layout = build_layout(model)
    session = Session(model, layout, make_plan(layout), CpuDevice(), ranks=ranks)
    optimizer = session.wrap_optimizer(adamw(model))
    tokens = batches(1)[0]
    said = ""
    for _ in range(2):
        session.begin_micro_batch(False)
        for _ in range(2):
            # that two add up is nothing new
            model(tokens).backward()
        session.begin_micro_batch(True)
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    session.begin_micro_batch(True)
    model(tokens).backward()
    try:
        model(tokens).backward()
    except AccessError as error:
        said = str(error)
    session.close()
    return {"said": said}


def drops(ranks: Ranks) -> dict[str, Any]:
    """How far an average is from what the ranks give who do not set theirs to None, after a
    step that is skipped once its averages are there."""
    model = stack()
    plain, layer, layout = twin(model), model.layers[2], build_layout(model)
    session = Session(model, layout, make_plan(layout), CpuDevice(), ranks=ranks)
    optimizer, tokens = session.wrap_optimizer(adamw(model)), batches(1)[0]
    session.begin_micro_batch(True)
    model(tokens).backward()
    session.clip_grad_norm(0.5)
    optimizer.zero_grad()
    for last in (False, True):
        session.begin_micro_batch(last)
        model(tokens).backward()
        if ranks.rank == 0:
            layer.extra.grad, layer.use_extra = None, False
    plain(tokens).backward()
    share = 2 * (ranks.world.size - 1) / ranks.world.size
    with session.full_params():
        apart = _far(layer.extra.grad, plain.layers[2].extra.grad * share)
    session.close()
    return {"apart": apart}


MOMENTS = ("opening", "forward", "backward", "update", "closing")


def death(ranks: Ranks, mode: str, moment: str, how: str) -> None:
    """Train until the last rank ends at a moment of the second step."""

    def end(now: str) -> None:
        if now == moment and ranks.rank == ranks.world.size - 1:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(f"ends in {moment}")

    model = stack()
    layout = build_layout(model)
    shards = ranks.world.local_size if mode == "C" else 1
    end("opening")
    plan = make_plan(layout, shards=shards, outside=HOST_STATE)
    session = Session(model, layout, plan, CpuDevice(), Options(), ranks)
    try:
        optimizer = session.wrap_optimizer(adamw(model))
        for step in range(20):
            for micro_batch, tokens in enumerate(batches(2, seed=step)):
                session.begin_micro_batch(micro_batch == 1)
                loss = model(tokens)
                if step:
                    end("forward")
                    model.layers[3].norm.weight.register_hook(lambda _: end("backward"))
                loss.backward()
            session.clip_grad_norm(0.5)
            if step:
                end("update")
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                end("closing")
    finally:
        session.close()


IDLE_S = 2


def idle(ranks: Ranks, idle_rank: str, moment: str) -> None:
    """A rank runs no block in a pass; the others end with an error that names it."""
    model = stack()
    layout = build_layout(model)
    plan = make_plan(layout, shards=ranks.world.local_size)
    session = Session(model, layout, plan, CpuDevice(), Options(), ranks)
    optimizer = session.wrap_optimizer(adamw(model))
    comes = ranks.rank != int(idle_rank)
    for step in range(3):
        tokens = batches(1, seed=step)[0]
        session.begin_micro_batch(True)
        if step == 2 and moment == "evaluation":
            with torch.no_grad():
                model(tokens) if comes else time.sleep(3 * IDLE_S)
        if step == 2 and moment == "forward" and not comes:
            time.sleep(3 * IDLE_S)
        loss = model(tokens)
        if step == 2 and moment == "backward" and not comes:
            time.sleep(3 * IDLE_S)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def unlike(ranks: Ranks, eager_rank: str) -> None:
    """A rank evaluates once more than the others, which go on with their step."""
    model = stack()
    layout = build_layout(model)
    plan = make_plan(layout, shards=ranks.world.local_size)
    session = Session(model, layout, plan, CpuDevice(), Options(), ranks)
    optimizer = session.wrap_optimizer(adamw(model))
    for step in range(2):
        tokens = batches(1, seed=step)[0]
        if step == 1 and ranks.rank == int(eager_rank):
            with torch.no_grad():
                model(tokens)
        session.begin_micro_batch(True)
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


ACTS: dict[str, Callable[[Ranks], dict[str, Any]]] = {
    "collectives": collectives,
    "drops": drops,
    "loads": loads,
    "master": master,
    "memory": memory,
    "peaks": peaks,
    "resume": resume,
    "twice": twice,
}


def main(out: Path, names: Sequence[str]) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    start = f"file://{out.with_suffix('.start')}"
    dist.init_process_group("gloo", init_method=start, rank=rank, world_size=size)
    if names[0] == "death":
        death(Ranks("cpu"), *names[1:])
        return
    if names[0] == "unlike":
        unlike(Ranks("cpu"), *names[1:])
        return
    if names[0] == "idle":
        idle(Ranks("cpu", timedelta(seconds=IDLE_S)), *names[1:])
        return
    found = {}
    for name in names:
        ranks = Ranks("cpu")
        act = ACTS[name] if name in ACTS else partial(run, CASES[name])
        every = ranks.collect(act(ranks))
        found[name] = {
            key: (min if key == "agree" else max)(one[key] for one in every)
            for key in every[0]
        }
        if rank == 0:
            out.write_text(json.dumps(found))
        ranks.close()
    dist.destroy_process_group()
