"""From a job to its plan, the same way for `core.page`, for a YAML and for a dry run.

    Choice      what of a plan is decided beforehand: limits, a mode, knobs
    TracedJob   one micro-batch traced without weights, laid out, and the rest of a step
    Job         a training that is about to begin here: traces itself, times itself

`trace_loss` and `laid_out` make a `TracedJob`; `plan_for` plans it for one machine;
`plan_here` does all of that for a model with weights, on the machine that trains it.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ..engine.chunk_files import read_rate
from ..engine.data_parallel import require_same, require_same_keys
from ..engine.ranks import Ranks
from ..errors import (
    FOREIGN_ERRORS,
    BudgetError,
    ConfigError,
    ProTrainError,
    TraceError,
)
from ..host import host_memory, mapped_bytes
from ..layout import build_layout, find_blocks
from ..layout.packed import memory_of
from ..sizes import format_bytes
from ..types import (
    PAGING_GAIN,
    BlockSeconds,
    Budget,
    Hardware,
    Knobs,
    Layout,
    Trace,
    Workload,
)
from .block_times import measure_blocks, time_outside
from .cache import PeakSeen, cached_hardware, keep, measurement_key, recall
from .emulation import Emulation
from .hardware import device_memory, measure_collectives, weakest
from .memory import MemoryModel
from .meta import meta_copy
from .optimizer_bytes import OptimizerBytes
from .planner import Forecast, Planner
from .search import MODES, ONE_MEMORY
from .seconds import block_times
from .trace import TracedStep, trace_step

Seconds = Mapping[int | None, BlockSeconds]
"""Measured seconds of blocks by their index; under None of what runs outside of them."""


@dataclass(frozen=True)
class Choice:
    """Parts of a plan that are decided beforehand; nothing by default.

    Attributes:
        device_bytes: Limit of the device; None for what the machine has.
        host_bytes: The same of the host.
        modes: Modes to choose from; `key` is what leaves only one, for messages.
        knobs: Set by hand; `filled` names those that nobody asked for.
        shares: A node's ranks share chunks under knobs set by hand.
        disk: Folder for frozen weights for which the host has no room; None for none.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    modes: frozenset[str] = MODES
    key: str | None = None
    knobs: Knobs | None = None
    filled: Collection[str] = ()
    shares: bool = False
    disk: Path | None = None

    def disk_bytes(self, hardware: Hardware) -> int:
        """Free bytes of the disk; of a machine that is not here, enough."""
        if self.disk is None:
            return _ENOUGH_BYTES * bool(hardware.disk_bytes_s)
        there = next(p for p in (self.disk, *self.disk.parents) if p.exists())
        return shutil.disk_usage(there).free


_ENOUGH_BYTES = 1 << 60


@dataclass(frozen=True)
class TracedJob:
    """A training to plan: one micro-batch traced without weights, and the rest of a step.

    Attributes:
        batch: Of which `Job.loss` is timed; None where that cannot be.
        redone_if_paged: Blocks that have to recompute where any weight of theirs pages.
        headroom_bytes: Kept on the device for what is no part of the traced step.
        assumptions: What was not known, and what was taken instead.
        optimizer: Its state, for other jobs of this model and these adapters.
    """

    traced: TracedStep
    layout: Layout
    workload: Workload
    batch: Any
    redone_if_paged: frozenset[int]
    headroom_bytes: int
    assumptions: tuple[str, ...]
    optimizer: OptimizerBytes | None = None

    def loaded_with(self, mapped_bytes: int) -> TracedJob:
        """Return a copy with so many bytes of weights that are pages of their files."""
        return replace(self, workload=replace(self.workload, mapped_bytes=mapped_bytes))


@dataclass(frozen=True)
class Job:
    """A training that is about to begin on this machine.

    Attributes:
        trace: Traces the model, on the meta device.
        loss: Of a copy of the model on a batch where it is, as training runs it.
        choice: What is decided beforehand.
        autocast: Dtype of the region around the forward, None for none.
        compiled: Arguments of `torch.compile` for each block, None for none.
        kernels: What else changes the seconds of a block.
        fp32_master: Weights of 16 bits are updated through fp32 masters.
        folder: Of the cache; None for its default.
        hardware: Known already: nothing is measured then.
        learns: Whether earlier runs tell about the peak.
        same: Values that all ranks must have, by name.
        advice: More to say of a plan for a machine.
    """

    trace: Callable[[nn.Module], TracedJob]
    loss: Callable[[nn.Module, Any], Tensor]
    choice: Choice = Choice()
    autocast: torch.dtype | None = None
    compiled: Mapping[str, Any] | None = None
    kernels: Mapping[str, Any] = field(default_factory=dict)
    fp32_master: bool = False
    folder: str | Path | None = None
    hardware: Hardware | None = None
    learns: bool = False
    same: Mapping[str, Any] = field(default_factory=dict)
    advice: Callable[[Hardware], Iterable[str]] = lambda _: ()


# tracing


def trace_loss(
    model: nn.Module,
    device_type: str,
    loss_of: Callable[[], Tensor],
    autocast: torch.dtype | None,
    others: Iterable[nn.Module] = (),
    skips: bool = True,
) -> TracedStep:
    """Trace a loss whose models run as accelerate prepares them: `model`, which trains,
    and `others`, all on the meta device; `skips` is as for `trace_step`.

    Raises:
        TraceError: It cannot be run without weights.
    """

    def prepared() -> Tensor:
        emulation = Emulation(device_type)
        try:
            with emulation, ExitStack() as undo:
                for each in (model, *others):
                    forward = emulation.prepared(each.forward, autocast)
                    undo.enter_context(patch.object(each, "forward", forward))
                return loss_of()
        except ProTrainError:
            raise
        except FOREIGN_ERRORS as error:
            raise TraceError(
                f"{type(model).__name__} does not run without weights: "
                f"{type(error).__name__}: {textwrap.shorten(str(error), 200)}"
            ) from error

    return trace_step(model, find_blocks(model), prepared, skips)


def adapter_names(model: nn.Module) -> frozenset[str]:
    """Names of weights that PEFT has added, without its copies of whole modules."""
    if getattr(model, "peft_config", None) is None:
        return frozenset()
    return frozenset(
        name
        for name, p in model.named_parameters()
        if p.requires_grad and ".modules_to_save." not in name
    )


def laid_out(
    model: nn.Module, traced: TracedStep, waits: bool, fp32_master: bool = False
) -> tuple[Layout, list[str]]:
    """Lay a model out as its trace tells, and what there is to say about that.

    State of adapters `waits` on the host where that is of use; of several ranks they are
    DDP's.
    """
    notes = []
    adapters, waiting = adapter_names(model), frozenset[str]()
    if waits:
        named = dict(model.named_parameters())
        # those of 16 bits would get masters
        narrow = 2 if fp32_master else 0
        waiting = frozenset(n for n in adapters if named[n].itemsize != narrow)
    if traced.read_outside:
        notes.append(
            f"{len(traced.read_outside)} weights of blocks, {min(traced.read_outside)} for "
            "example, are read outside of their blocks' forward: they stay on the device"
        )
    if traced.drew:
        notes.append(
            "the model reads values that depend on its weights, for example how many "
            "tokens an expert gets: drawn at random, as random weights give them"
        )
    if traced.uncounted:
        notes.append(
            f"{', '.join(traced.uncounted)}: nobody knows how many operations these "
            "take, so their time is that of the bytes they move"
        )
    stay = adapters - waiting | traced.read_outside
    layout = build_layout(model, stay, traced.trace.blocks, waiting, traced.rows)
    return layout, notes


def loss_in(outputs: Any) -> Tensor:
    """The loss among the outputs of a model, or the outputs where they are one."""
    if isinstance(outputs, Tensor):
        return outputs
    # the loss of a reward model is made of its few logits
    return outputs["loss"] if "loss" in outputs else outputs["logits"].sum()


# planning


def plan_for(
    subject: TracedJob,
    hardware: Hardware,
    choice: Choice = Choice(),  # noqa: B008 - a frozen value
    measured: Seconds | None = None,
    anyway: bool = False,
) -> tuple[Forecast, Planner]:
    """Plan a subject on one machine; limits of the choice win over what it has.

    Where updates on the host would give the same bits, they are planned too, and taken if
    they save more than `PAGING_GAIN` of a step, or if nothing else fits.

    `measured` is as for `block_times`; for the rest see `choose`.
    """
    trace, layout = subject.traced.trace, subject.layout
    device_bytes = choice.device_bytes or hardware.device_bytes
    host_bytes = choice.host_bytes or hardware.host_bytes
    if hardware.one_memory:
        device_bytes = host_bytes = min(device_bytes, host_bytes)
    # a lower limit leaves it already
    kept = hardware.desktop_bytes - (hardware.device_bytes - device_bytes)
    budget = Budget(
        device_bytes,
        reserve_bytes=subject.headroom_bytes + max(kept, 0),
        host_bytes=host_bytes,
        disk_bytes=choice.disk_bytes(hardware),
    )
    times = block_times(trace, layout, hardware, measured)
    redone = subject.redone_if_paged

    def planner_for(workload: Workload) -> Planner:
        memory = MemoryModel(layout, trace, workload, hardware)
        return Planner(memory, times, budget, redone_if_paged=redone)

    planner = planner_for(subject.workload)
    if choice.knobs is not None or not subject.workload.host_is_exact:
        return choose(choice, planner, anyway), planner
    on_host = planner_for(subject.workload.on_host())
    needs, forecast = inf, None
    try:
        forecast = choose(choice, planner)
    except BudgetError as error:
        needs = error.needs
    if forecast is None:
        try:
            return choose(choice, on_host), on_host
        except BudgetError as error:
            nearer = on_host if error.needs < needs else planner
        return choose(choice, nearer, anyway), nearer
    with suppress(BudgetError):
        other = choose(choice, on_host)
        if (1 + PAGING_GAIN) * other.step.total_s < forecast.step.total_s:
            return other, on_host
    return forecast, planner


def about_memory(forecast: Forecast) -> list[str]:
    """Say what one memory means for a plan; nothing of a device that has its own."""
    if not forecast.hardware.one_memory:
        return []
    host, budget = forecast.host.phases["train"], forecast.budget
    highest = max(forecast.device.peak_bytes + host, forecast.host.peak_bytes)
    return [
        f"{ONE_MEMORY}. Both together take {format_bytes(highest)} of "
        f"{format_bytes(budget.usable_bytes + host)}; each of "
        "protrain_capacity_bytes and protrain_cpu_capacity_bytes limits that."
    ]


def about_disk(forecast: Forecast, folder: Path | None = None) -> list[str]:
    """Say which part of the weights a plan has on the disk; nothing where nobody asked."""
    plan, layout = forecast.plan, forecast.layout
    if not plan.on_disk:
        unused = (
            f"Nothing lies in {folder} (protrain_disk_dir): the host has room for all."
        )
        return [unused] * (folder is not None)
    nbytes = sum(layout.chunks[index].in_pool.nbytes for index in plan.on_disk)
    frozen = sum(not layout.chunks[index].trainable for index in plan.paged)
    rate = forecast.hardware.disk_bytes_s / 1e9
    return [
        f"{len(plan.on_disk)} of {frozen} frozen chunks that page, {format_bytes(nbytes)}, "
        f"lie on the disk, which reads {rate:.1f} GB/s: the host has no room for them."
    ]


def choose(choice: Choice, planner: Planner, anyway: bool = False) -> Forecast:
    """The plan that is asked for: of one mode, by hand, or the fastest that fits.

    Where none fits it is, `anyway`, the one that lacks the least.

    Raises:
        ConfigError: A knob is outside its legal range, or the mode cannot be had.
        BudgetError: It does not fit.
    """
    modes, key, forecast = choice.modes, choice.key, planner.forecast
    world = planner.memory.workload.world
    if "C" in modes and len(modes) == 1 and world.local_size == 1:
        raise ConfigError(
            f"`{key}: true` shares chunks between the ranks of a node, and here each "
            "node has one. Remove the key, or launch several processes on a node."
        )
    if planner.memory.hardware.one_memory and "A" not in modes:
        raise ConfigError(
            f"`{key}: true` asks for paging. {ONE_MEMORY}. Remove the key."
        )
    asked = _by_hand(choice, planner)
    try:
        return (
            forecast(planner.by_hand(*asked)) if asked else _worthwhile(planner, modes)
        )
    except BudgetError as error:
        if anyway:
            return forecast(planner.asked(*asked) if asked else planner.nearest(modes))
        if asked or key is None:
            raise
        try:
            other = planner.fastest().mode
        except BudgetError:
            raise error from None
        raise BudgetError(
            f"`{key}: true` does not fit: {error} Without it mode {other} does."
        ) from error


def _worthwhile(planner: Planner, modes: frozenset[str]) -> Forecast:
    """The fastest plan, or one that pages nothing and is slower by `PAGING_GAIN` at most."""
    fastest = planner.forecast(planner.fastest(modes))
    if fastest.plan.mode != "A" and "A" in modes:
        with suppress(BudgetError):
            resident = planner.forecast(planner.fastest(frozenset("A")))
            if resident.step.total_s <= (1 + PAGING_GAIN) * fastest.step.total_s:
                return resident
    return fastest


def _by_hand(choice: Choice, planner: Planner) -> tuple[Knobs, int] | None:
    """The knobs and `Plan.shards`."""
    knobs, memory = choice.knobs, planner.memory
    if knobs is None:
        return None
    num_chunks = len(memory.layout.pageable)
    if "n_buffer" in choice.filled:
        # what nobody asked for must not be refused as too many
        most = num_chunks - knobs.n_persist
        knobs = replace(knobs, n_buffer=min(knobs.n_buffer, most))
    if choice.key is not None and knobs.n_persist >= num_chunks:
        raise ConfigError(
            f"protrain_n_persist_override: {knobs.n_persist} leaves nothing to page, "
            f"which `{choice.key}: true` asks for. Keep fewer than {num_chunks} chunks "
            "on the device, or remove one of the keys."
        )
    return knobs, memory.workload.world.local_size if choice.shares else 1


def plan_here(
    job: Job,
    model: nn.Module,
    device: torch.device,
    ranks: Ranks,
    absent: Collection[str] = (),
) -> tuple[Forecast, Planner | None, list[str], str]:
    """Plan a job that is about to begin: the first rank does, for the weakest of all.

    Args:
        job: To be planned.
        model: On the host, `requires_grad` final.
        device: Where to train it.
        ranks: Who trains together.
        absent: Names of weights that this rank has in name only.

    Returns:
        The forecast; on the first rank what makes a smaller plan; assumptions; a hash of
        plan and layout, the same on every rank, empty if alone.

    Raises:
        ProTrainError: There is no plan, or the ranks do not have the same model.
    """
    world, planners = ranks.world, list[Planner]()

    def plan() -> tuple[Forecast, list[str]]:
        subject = job.trace(meta_copy(model)).loaded_with(mapped)
        notes, measured = list(subject.assumptions), dict[int | None, BlockSeconds]()
        if job.hardware is None:
            measured = _measured(job, model, subject, device, notes)

        def planned(machine: Hardware) -> Forecast:
            forecast, planner = plan_for(subject, machine, job.choice, measured)
            planners.append(planner)
            notes.extend(job.advice(machine))
            notes.extend(about_memory(forecast))
            notes.extend(about_disk(forecast, job.choice.disk))
            return forecast

        seen = None
        if job.learns:
            step = subject.layout, subject.traced.trace, subject.workload
            seen = peak_seen(job.folder, device, *step, job.compiled)
        if seen is not None:
            taught = replace(
                hardware,
                unseen_bytes=hardware.unseen_bytes + seen.beyond_bytes,
                unneeded_bytes=max(-seen.beyond_bytes, 0),
            )
            # what nothing fits beside was no lesson
            with suppress(BudgetError):
                forecast = planned(taught)
                notes.append(
                    f"{format_bytes(abs(seen.beyond_bytes))} of device memory "
                    f"{'more' if seen.beyond_bytes > 0 else 'less'} than traced, as a run "
                    f"of {seen.date} showed (protrain_learn_peak)."
                )
                return forecast, notes
        return planned(hardware), notes

    # what cannot be trained at all is refused before anything is measured
    ranks.together(partial(find_blocks, model))
    require_same_keys(ranks.collect(dict(job.same)))
    there = [
        part
        for name, param in model.named_parameters()
        if param.device.type == "cpu" and name not in absent
        for part in memory_of(param)
    ]
    mapped = mapped_bytes(there)
    # the host pool of a node takes the place of what each of its ranks has loaded
    loaded = sum(param.nbytes for param in there) - mapped
    host_bytes = host_memory(given_back=world.local_size * loaded)
    hardware = job.hardware or ranks.together(
        partial(
            this_machine,
            job.choice,
            device,
            host_bytes,
            job.folder,
            world.local_size,
            job.fp32_master,
        )
    )
    if world.size == 1:
        forecast, notes = plan()
        return forecast, planners[0], notes, ""
    gather, reduce, across = measure_collectives(ranks, device)
    hardware = replace(
        hardware, gather_bytes_s=gather, reduce_bytes_s=reduce, across_bytes_s=across
    )
    hardware = weakest(ranks.collect(hardware))
    forecast, notes = ranks.from_first(plan)
    order = tuple(block.name for block in forecast.layout.blocks)
    rows = {c.tensors[0].name: c.rows_bytes for c in forecast.layout.chunks}
    laid_out = forecast.layout.chunk_of
    stay = frozenset(n for n, _ in model.named_parameters() if n not in laid_out)
    own = ranks.together(lambda: build_layout(model, stay, order, rows=rows))
    ranks.together(partial(require_same, own, forecast.layout))
    same = hashlib.sha256(repr((forecast.plan, own)).encode()).hexdigest()[:12]
    notes.append(f"{world.size} ranks, {world.local_size} a node, run plan {same}.")
    return forecast, planners[0] if planners else None, notes, same


# measuring


def this_machine(
    choice: Choice,
    device: torch.device,
    host_bytes: int,
    folder: str | Path | None = None,
    together: int = 1,
    fp32_master: bool = False,
) -> Hardware:
    """Measure this machine, or take its rates from the cache.

    `host_bytes` may be used, and `together` processes measure at once on its links.

    Raises:
        ConfigError: The CPU device has no limit, or the cache cannot be written.
        DiskError: The folder of the choice cannot be written.
    """
    capacity = device_budget(choice.device_bytes, device, host_bytes)
    versions = library_versions()
    # what AdamW on the host updates
    dtype = torch.float32 if fp32_master else torch.bfloat16
    hardware = cached_hardware(
        folder, device, host_bytes, capacity, versions, together, dtype
    )
    return with_disk_rate(hardware, choice, together)


def with_disk_rate(hardware: Hardware, choice: Choice, together: int) -> Hardware:
    """Measure what the disk of a choice reads for all of `together` processes, which do
    this at once, unless that is known.

    Raises:
        DiskError: Its folder cannot be written.
    """
    if choice.disk is None or hardware.disk_bytes_s:
        return hardware
    # each of them sees its share
    return replace(hardware, disk_bytes_s=together * read_rate(choice.disk))


def device_budget(limit: int | None, device: torch.device, host_bytes: int) -> int:
    """Bytes of a device that may be used, beside a host with so many.

    Raises:
        ConfigError: It is the CPU, which has no limit of its own.
    """
    if device.type != "cpu":
        free = device_memory(device, host_bytes)
        # what kernels take unseen grows with what may be used
        return min(free, limit or free)
    if limit is None:
        raise missing_capacity()
    return limit


def missing_capacity() -> ConfigError:
    """Nobody gives the CPU device of a machine without accelerator a budget."""
    return ConfigError(
        "protrain_capacity_bytes: this machine has no accelerator, so ProTrain trains "
        "on its CPU device and needs that device's budget, for example "
        '`protrain_capacity_bytes: "2GiB"`.'
    )


def _measured(
    job: Job,
    model: nn.Module,
    subject: TracedJob,
    device: torch.device,
    notes: list[str],
) -> dict[int | None, BlockSeconds]:
    """Seconds of the blocks, from the cache under everything that changes them, and of
    what is outside them."""
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    key = partial(
        measurement_key,
        "block",
        device,
        library_versions(),
        autocast=str(job.autocast),
        attention=str(attention),
        kernels=dict(job.kernels),
        compiled=job.compiled,
    )
    names, samples = subject.traced.trace.blocks, subject.traced.samples
    blocks = measure_blocks(
        model, names, samples, device, job.autocast, job.folder, key, job.compiled
    )
    times: dict[int | None, BlockSeconds] = dict(blocks.items())
    if subject.batch is None:
        notes.append(
            "seconds outside the blocks are computed, not timed: the loss is the trainer's own"
        )
        return times
    by_name = {names[index]: sample for index, sample in samples.items()}
    try:
        times[None] = time_outside(model, by_name, subject.batch, job.loss, device)
    except FOREIGN_ERRORS as error:
        why = f"{type(error).__name__}: {textwrap.shorten(str(error), 200)}"
        notes.append(f"seconds outside the blocks are computed, not timed: {why}")
    return times


def peak_seen(
    folder: str | Path | None,
    device: torch.device,
    layout: Layout,
    trace: Trace,
    workload: Workload,
    compiled: Mapping[str, Any] | None,
) -> PeakSeen | None:
    """Recall what an earlier run of this step on this device showed of its peak."""
    key = _peak_key(device, layout, trace, workload, compiled)
    return recall(folder, key, PeakSeen)


def keep_peak(
    folder: str | Path | None,
    device: torch.device,
    forecast: Forecast,
    compiled: Mapping[str, Any] | None,
    beyond_bytes: int,
) -> None:
    """Let later runs plan with what this one took beyond its trace.

    Raises:
        ConfigError: The cache cannot be written.
    """
    step = forecast.layout, forecast.trace, forecast.workload
    today = datetime.now(timezone.utc).date().isoformat()
    keep(folder, _peak_key(device, *step, compiled), PeakSeen(beyond_bytes, today))


def _peak_key(
    device: torch.device,
    layout: Layout,
    trace: Trace,
    workload: Workload,
    compiled: Mapping[str, Any] | None,
) -> dict[str, Any]:
    # of the host alone
    workload = replace(workload, loader_bytes=0, mapped_bytes=0)
    if device.type == "cpu":
        # a plan chooses where updates run, for both give the same bits
        workload = workload.on_host()
    step = hashlib.sha256(repr((layout, trace, workload)).encode()).hexdigest()
    # a prediction is this package's own
    versions = library_versions() | {"axolotl-protrain": own_version()}
    key = measurement_key("peak", device, versions, compiled=compiled)
    return {**key, "step": step}


def own_version() -> str:
    """Version of this package."""
    try:
        return version("axolotl-protrain")
    except PackageNotFoundError:
        # run from its sources
        return "unknown"


def library_versions() -> dict[str, str]:
    """Versions of what takes part in a measurement beside torch."""
    found = {"python": platform.python_version()}
    for package in ("transformers", "peft", "bitsandbytes", "axolotl"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
