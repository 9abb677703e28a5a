"""The way of a model to its plan, the same in training and in a dry run.

`traced_job` traces a model without weights and says what a step of it asks; `plan_for`
plans that for one machine; `plan_here` does both for the model about to be trained.
"""

from __future__ import annotations

import hashlib
import math
import platform
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from .args import FORCED, ProTrainArgs, args_from, overrides
from .core.engine.ranks import Ranks
from .core.errors import FOREIGN_ERRORS, BudgetError, ConfigError, TraceError
from .core.host import host_memory, mapped_bytes
from .core.layout import build_layout, find_blocks, has_vision_tower
from .core.planner.block_times import measure_blocks, time_outside
from .core.planner.cache import PeakSeen, cached_hardware, keep, measurement_key, recall
from .core.planner.demand import COMMUNICATE
from .core.planner.emulation import Emulation, outputs_as_fp32
from .core.planner.hardware import device_memory, measure_collectives, weakest
from .core.planner.memory import MemoryModel
from .core.planner.meta import meta_copy
from .core.planner.planner import Forecast, Planner
from .core.planner.search import MODES
from .core.planner.seconds import block_times
from .core.planner.trace import TracedStep, trace_step
from .core.sizes import format_bytes
from .core.types import (
    ALONE,
    PAGING_GAIN,
    BlockSeconds,
    Budget,
    Hardware,
    Knobs,
    Layout,
    Trace,
    Update,
    Workload,
    World,
)
from .data_parallel import require_same, require_same_keys
from .offline.batches import sample_batch
from .offline.fake_kernels import fake_kernels, make_experts_traceable
from .offline.optimizer_state import OptimizerBytes, optimizer_bytes
from .refusals import HOST_OPTIMIZERS, LORA_KERNELS, refuse_quantised
from .report.forecast import format_seconds

if TYPE_CHECKING:
    from .objective import Objective


@dataclass(frozen=True)
class TracedJob:
    """A training to plan: one micro-batch traced without weights, and the rest of a step.

    Attributes:
        batch: Of the model's own loss; None where a trainer's was traced.
        redone_if_paged: Blocks that have to recompute where any weight of theirs pages.
        headroom_bytes: Kept on the device for what is no part of the traced step.
        assumptions: What was not known, and what was taken instead.
        optimizer: Its state, for other jobs of this model and these adapters.
    """

    traced: TracedStep
    layout: Layout
    workload: Workload
    batch: Mapping[str, Any] | None
    redone_if_paged: frozenset[int]
    headroom_bytes: int
    assumptions: tuple[str, ...]
    optimizer: OptimizerBytes | None = None

    def loaded_with(self, mapped_bytes: int) -> TracedJob:
        """Return a copy with so many bytes of weights that are pages of their files."""
        return replace(self, workload=replace(self.workload, mapped_bytes=mapped_bytes))


def traced_job(
    cfg: Any,
    model: nn.Module,
    device_type: str,
    world: World = ALONE,
    real: nn.Module | None = None,
    objective: Objective | None = None,
    adapters_wait: bool = True,
    optimizer: OptimizerBytes | None = None,
) -> TracedJob:
    """Trace the largest micro-batch that the YAML, or the data, allow.

    Args:
        cfg: Axolotl's validated configuration.
        model: As it will be trained, on the meta device.
        device_type: "cuda" or "cpu".
        world: Who trains together.
        real: The same with weights, to be laid out: a bias may be cast in the trace.
        objective: Of a trainer whose loss is more than one forward.
        adapters_wait: Their optimizer is the trainer's, so its state may be on the host.
        optimizer: Known already, of another job of this model and these adapters.

    Raises:
        TraceError: It cannot be run without weights.
        ConfigError: It takes images in a way that is not known here, or nothing trains.
    """
    args = args_from(cfg)
    _require_training(cfg, model)
    if cfg.rl and objective is None:
        raise ConfigError(
            f"rl: {getattr(cfg.rl, 'value', cfg.rl)} is planned from its trainer's loss "
            "on its data, which is there when training begins."
        )
    assumptions: list[str] = []
    batch: Mapping[str, Any]
    if objective is None:
        batch = sample_batch(cfg, model, assumptions)
    else:
        batch = objective.batch
        shapes = (
            f"{name} {' x '.join(map(str, value.shape))}"
            for name, value in batch.items()
            if name.endswith("input_ids")
        )
        assumptions.append(f"the trainer's own loss, of {', '.join(shapes)} tokens")
    make_experts_traceable(model, assumptions)
    with fake_kernels(device_type, model) as used:
        traced, headroom = _traced(
            model, batch, device_type, cfg, args, assumptions, objective
        )
    laid_out = model if real is None else real
    adapters = adapter_names(laid_out)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    mastered = trained - adapters if args.protrain_fp32_master else ()
    if optimizer is None:
        optimizer = optimizer_bytes(cfg, model, device_type, assumptions, mastered)
    waiting: frozenset[str] = frozenset()
    # of several ranks they are DDP's, and ReLoRA prunes their state where it finds it
    if adapters_wait and optimizer.separable and world.size == 1 and not cfg.relora:
        if args.protrain_cpu_optimizer is None:
            named = dict(laid_out.named_parameters())
            # those of 16 bits would get masters
            narrow = 2 if args.protrain_fp32_master else 0
            waiting = frozenset(n for n in adapters if named[n].itemsize != narrow)
    if traced.read_outside:
        assumptions.append(
            f"{len(traced.read_outside)} weights of blocks, {min(traced.read_outside)} for "
            "example, are read outside of their blocks' forward: they stay on the device"
        )
    stay = adapters - waiting | traced.read_outside
    layout = build_layout(laid_out, stay, traced.trace.blocks, waiting, traced.rows)
    redone: frozenset[int] = frozenset()
    if args.protrain_lora_mlp_forbid_offload:
        # Axolotl sets `forward` on the block's `mlp` itself where the kernel is used
        mlps = (
            getattr(model.get_submodule(b.name), "mlp", None) for b in layout.blocks
        )
        redone = frozenset(
            index
            for index, mlp in enumerate(mlps)
            if mlp is not None and "forward" in vars(mlp)
        )
        assumptions.append(
            f"protrain_lora_mlp_forbid_offload: {len(redone)} of {len(layout.blocks)} "
            "blocks are under lora_mlp_kernel and recompute where their weights page"
        )
    assumptions += used
    workload = _workload(cfg, args, optimizer, batch, world)
    own = None if objective else batch
    notes = tuple(assumptions)
    return TracedJob(traced, layout, workload, own, redone, headroom, notes, optimizer)


class _Need(NamedTuple):
    """Arithmetic that a YAML asks of a card, the compute capability from which cards have
    it, and the key under which it is not asked for."""

    what: str
    capability: int
    way_out: str
    asked: Callable[[Any], bool]


def _attends_by(name: str, cfg: Any) -> bool:
    return name == getattr(cfg.attn_implementation, "value", cfg.attn_implementation)


_SDPA = "`attn_implementation: sdpa`"
_NEEDS = (
    # `tf32: auto` has become true by then, of the card that validation is told of
    _Need(
        "bf16",
        80,
        "`bf16: false`, `tf32: false`",
        lambda cfg: cfg.bf16 or cfg.bfloat16,
    ),
    *(
        # as transformers, flash-attn and Axolotl ask for it
        _Need(name, capability, _SDPA, partial(_attends_by, name))
        for name, capability in (
            ("flash_attention_2", 80),
            ("flash_attention_3", 80),
            ("flash_attention_4", 90),
            ("sage", 80),
            ("fp8", 90),
        )
    ),
)


def uncomputed(cfg: Any, card: Hardware) -> str | None:
    """Say what a YAML asks for that a card cannot compute, with the way out; None if it
    computes all, or nobody knows.

    `bf16: auto` is bf16 there too: torch says that it is supported where it is emulated.
    """
    lacking = [n for n in _NEEDS if n.asked(cfg) and card.capability < n.capability]
    if not lacking or not card.capability:
        return None
    needed = max(need.capability for need in lacking)
    keys = ", ".join(dict.fromkeys(need.way_out for need in lacking))
    narrow = any(need.what == "bf16" for need in lacking)
    return (
        f"{card.name} computes no {', no '.join(need.what for need in lacking)}: that "
        f"takes CUDA compute capability {needed / 10:.1f}, and it has "
        f"{card.capability / 10:.1f}."
        + (
            " Axolotl says that training will fail, or torch emulates bf16 without tensor "
            "cores and no Triton kernel compiles."
            if narrow
            else ""
        )
        + f" Take another card, or set {keys}"
        + (" and train in fp32; ProTrain does not train in fp16." if narrow else ".")
    )


def _require_training(cfg: Any, model: nn.Module) -> None:
    if any(param.requires_grad for param in model.parameters()):
        return
    first = next((name for name, _ in model.named_parameters()), "none")
    if cfg.unfrozen_parameters:
        raise ConfigError(
            f"unfrozen_parameters: {cfg.unfrozen_parameters} matches no parameter of "
            f"{type(model).__name__}, so that nothing trains. Give regular expressions "
            f"for names such as {first}, or remove the key to train all of them."
        )
    raise ConfigError(
        f"unfrozen_parameters: no parameter of {type(model).__name__} requires "
        "gradients, so that nothing trains. A plugin has frozen them, or an adapter "
        f"has none: name what trains, for example {first}, or set an adapter."
    )


def autocast_dtype(cfg: Any) -> torch.dtype | None:
    """Return the dtype of accelerate's autocast; `bf16: full` asks for none."""
    if cfg.bf16 == "full":
        return None
    if cfg.bf16 or cfg.bfloat16:
        return torch.bfloat16
    return torch.float16 if cfg.fp16 else None


WITHOUT_GRAPHS = {
    "reduce-overhead": "default",
    "max-autotune": "max-autotune-no-cudagraphs",
}
"""CUDA graphs keep results in memory of their own, which the next block overwrites."""


def compile_keys(cfg: Any) -> dict[str, Any] | None:
    """Return the arguments of `torch.compile`; None if nothing is compiled."""
    if not cfg.torch_compile:
        return None
    # `torch_compile_options` Axolotl sets itself, for the whole process
    mode = WITHOUT_GRAPHS.get(cfg.torch_compile_mode, cfg.torch_compile_mode)
    given = {"backend": cfg.torch_compile_backend, "mode": mode}
    return {key: value for key, value in given.items() if value is not None}


_IMAGES = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")


def _traced(
    model: nn.Module,
    batch: Mapping[str, Any],
    device_type: str,
    cfg: Any,
    args: ProTrainArgs,
    assumptions: list[str],
    objective: Objective | None,
) -> tuple[TracedStep, int]:
    """A step, with text alone where a vision tower cannot be traced, and its headroom."""
    others = objective.others if objective else {}

    def trace(batch: Mapping[str, Any]) -> TracedStep:
        loss_of = partial(
            objective.loss if objective else _loss_of_output, model, batch
        )
        models = model, *others.values()
        loss = partial(_loss, models, device_type, autocast_dtype(cfg), loss_of)
        return trace_step(model, find_blocks(model), loss)

    text = {name: value for name, value in batch.items() if name not in _IMAGES}
    headroom = args.protrain_vision_headroom_bytes if has_vision_tower(model) else 0
    reserved = f"protrain_vision_headroom_bytes reserves {format_bytes(headroom)} for"
    try:
        traced = trace(batch)
        if len(text) < len(batch):
            headroom = 0
        elif has_vision_tower(model):
            assumptions.append(f"no images in the batch: {reserved} the vision tower")
    except TraceError as error:
        if not has_vision_tower(model) or len(text) == len(batch):
            raise
        assumptions.append(
            f"the vision tower could not be traced ({error}); {reserved} it"
        )
        traced = trace(text)
    for name, other in others.items():
        nbytes = sum(param.nbytes for param in other.parameters())
        assumptions.append(f"{name}: {format_bytes(nbytes)} that stay on the device")
        # without a limit the device was asked what it has left
        headroom += nbytes if args.protrain_capacity_bytes is not None else 0
    if cfg.torch_compile:
        assumptions.append(
            "torch_compile: blocks are compiled one by one, nothing else is; bytes are "
            "those of blocks that are not compiled, which save more (a half at most was "
            "seen), and so are seconds until blocks are measured"
            + (", no CUDA graphs" if cfg.torch_compile_mode in WITHOUT_GRAPHS else "")
        )
    _note_unknowns(traced, assumptions)
    return traced, headroom


def _note_unknowns(traced: TracedStep, assumptions: list[str]) -> None:
    if traced.drew:
        assumptions.append(
            "the model reads values that depend on its weights, for example how many "
            "tokens an expert gets: drawn at random, as random weights give them"
        )
    if traced.uncounted:
        assumptions.append(
            f"{', '.join(traced.uncounted)}: nobody knows how many operations these "
            "take, so their time is that of the bytes they move"
        )


def _loss_of_output(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    return _loss_in(model(**batch))


def _loss_in(outputs: Any) -> Tensor:
    # the loss of a reward model is made of its few logits
    return outputs["loss"] if "loss" in outputs else outputs["logits"].sum()


def _loss(
    models: Sequence[nn.Module],
    device_type: str,
    dtype: torch.dtype | None,
    loss_of: Callable[[], Tensor],
) -> Tensor:
    """Run a loss whose models run as accelerate prepares them."""
    emulation = Emulation(device_type)
    try:
        with emulation, ExitStack() as undo:
            for model in models:
                forward = emulation.prepared(model.forward, dtype)
                undo.enter_context(patch.object(model, "forward", forward))
            return loss_of()
    except FOREIGN_ERRORS as error:
        raise TraceError(
            f"{type(models[0]).__name__} does not run without weights: "
            f"{type(error).__name__}: {textwrap.shorten(str(error), 200)}"
        ) from error


def adapter_names(model: nn.Module) -> frozenset[str]:
    """Names of weights that PEFT has added, without its copies of whole modules."""
    if getattr(model, "peft_config", None) is None:
        return frozenset()
    return frozenset(
        name
        for name, p in model.named_parameters()
        if p.requires_grad and ".modules_to_save." not in name
    )


def _workload(
    cfg: Any,
    args: ProTrainArgs,
    optimizer: OptimizerBytes,
    batch: Mapping[str, Any],
    world: World,
) -> Workload:
    """Read what a step of this configuration asks beside the trace of its model."""
    on_host = args.protrain_cpu_optimizer is not None
    evaluates = bool(cfg.val_set_size or cfg.test_datasets)
    tensors = {k: value for k, value in batch.items() if isinstance(value, Tensor)}
    waiting = (cfg.dataloader_num_workers or 0) * (cfg.dataloader_prefetch_factor or 2)
    return Workload(
        accumulation=cfg.gradient_accumulation_steps or 1,
        tokens=batch_tokens(batch),
        fp32_master=args.protrain_fp32_master,
        saves_state=args.protrain_save_optimizer_state and cfg.save_strategy != "no",
        update=Update.HOST if on_host else Update.DEVICE,
        host_can_update=not on_host and _is_adamw(cfg),
        state_bytes=optimizer.state_bytes,
        managed_bytes=optimizer.managed_bytes,
        update_copies=optimizer.update_copies,
        elementwise=optimizer.elementwise,
        update_parameter_copies=optimizer.update_parameter_copies,
        eval_ratio=_eval_ratio(cfg) if evaluates else 0.0,
        loader_bytes=(1 + waiting) * sum(t.nbytes for t in tensors.values()),
        world=world,
    )


def _eval_ratio(cfg: Any) -> float:
    """Tokens of an evaluation's batch, relative to a micro-batch's: Axolotl cuts rows of both."""
    rows, length = cfg.micro_batch_size or 1, cfg.sequence_len or 1
    longer = (cfg.eval_sequence_len or length) / length
    if cfg.pad_to_sequence_len:
        # to a multiple of it
        longer = math.ceil(longer)
    return (cfg.eval_batch_size or rows) / rows * longer


def batch_tokens(batch: Any) -> int:
    """Tokens of a micro-batch, padding included; 0 where it is none of tensors."""
    ids = [t for key, t in getattr(batch, "items", dict)() if key.endswith("input_ids")]
    return sum(t.numel() for t in ids if isinstance(t, Tensor))


def _is_adamw(cfg: Any) -> bool:
    name = getattr(cfg.optimizer, "value", cfg.optimizer)
    return name in HOST_OPTIMIZERS and not cfg.adapter


def plan_for(
    args: ProTrainArgs,
    subject: TracedJob,
    hardware: Hardware,
    measured: Mapping[int | None, BlockSeconds] | None = None,
    anyway: bool = False,
) -> tuple[Forecast, Planner]:
    """Plan a subject on one machine; limits among the keys win over what it has.

    `measured` is as for `block_times`; for the rest see `choose`.
    """
    trace, layout = subject.traced.trace, subject.layout
    device_bytes = args.protrain_capacity_bytes or hardware.device_bytes
    # a lower limit of the YAML leaves it already
    kept = hardware.desktop_bytes - (hardware.device_bytes - device_bytes)
    budget = Budget(
        device_bytes,
        reserve_bytes=subject.headroom_bytes + max(kept, 0),
        host_bytes=args.protrain_cpu_capacity_bytes or hardware.host_bytes,
    )
    times = block_times(trace, layout, hardware, measured)
    memory = MemoryModel(layout, trace, subject.workload, hardware)
    planner = Planner(memory, times, budget, redone_if_paged=subject.redone_if_paged)
    return choose(args, planner, anyway), planner


def choose(args: ProTrainArgs, planner: Planner, anyway: bool = False) -> Forecast:
    """The plan that the keys ask for: of one mode, by hand, or the fastest that fits.

    Where none fits it is, `anyway`, the one that lacks the least.

    Raises:
        ConfigError: A knob is outside its legal range, or the mode cannot be had.
        BudgetError: It does not fit.
    """
    modes, key = _modes(args, planner.memory.workload.world)
    asked, forecast = _by_hand(args, planner, key), planner.forecast
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


def _modes(args: ProTrainArgs, world: World) -> tuple[frozenset[str], str | None]:
    """Modes that the keys leave, and the key that leaves only one."""
    if args.protrain_zero3_shard and world.local_size == 1:
        raise ConfigError(
            "`protrain_zero3_shard: true` shares chunks between the ranks of a node, "
            "and here each node has one. Remove the key, or launch several processes "
            "on a node."
        )
    for key, mode in FORCED.items():
        if getattr(args, key):
            return frozenset(mode), key
    return MODES - {"C"} if args.protrain_zero3_shard is False else MODES, None


def _by_hand(
    args: ProTrainArgs, planner: Planner, key: str | None
) -> tuple[Knobs, int] | None:
    """The overrides and `Plan.shards`."""
    by_hand = overrides(args)
    if by_hand is None:
        return None
    (knobs, filled), memory = by_hand, planner.memory
    num_chunks = len(memory.layout.pageable)
    if "n_buffer" in filled:
        # what nobody asked for must not be refused as too many
        most = num_chunks - knobs.n_persist
        knobs = replace(knobs, n_buffer=min(knobs.n_buffer, most))
    if key is not None and knobs.n_persist >= num_chunks:
        raise ConfigError(
            f"protrain_n_persist_override: {knobs.n_persist} leaves nothing to page, "
            f"which `{key}: true` asks for. Keep fewer than {num_chunks} chunks "
            "on the device, or remove one of the keys."
        )
    return knobs, memory.workload.world.local_size if args.protrain_zero3_shard else 1


def plan_here(
    cfg: Any,
    model: nn.Module,
    device: torch.device,
    ranks: Ranks,
    absent: frozenset[str],
    objective: Objective | None = None,
    adapter_bytes: int = 0,
) -> tuple[Forecast, Planner | None, list[str], str]:
    """Plan what is about to be trained: the first rank does, for the weakest of all.

    Args:
        cfg: Axolotl's validated configuration.
        model: On the host, `requires_grad` final.
        device: Where to train it.
        ranks: Who trains together.
        absent: Names of weights that this rank has in name only.
        objective: Of a trainer whose loss is more than one forward.
        adapter_bytes: Of the device, for adapters whose optimizer is not the trainer's.

    Returns:
        The forecast; on the first rank what makes a smaller plan; assumptions; a hash of
        plan and layout, the same on every rank, empty if alone.

    Raises:
        ProTrainError: There is no plan, or the ranks do not have the same model.
    """
    args, world = args_from(cfg), ranks.world

    def check() -> None:
        refuse_quantised(model)
        find_blocks(model)

    planners: list[Planner] = []

    def subject_for(cfg: Any) -> TracedJob:
        subject = traced_job(
            cfg,
            meta_copy(model),
            device.type,
            world,
            model,
            objective,
            adapters_wait=not adapter_bytes,
        )
        headroom = subject.headroom_bytes + adapter_bytes
        return replace(subject.loaded_with(mapped), headroom_bytes=headroom)

    def plan() -> tuple[Forecast, list[str]]:
        subject = subject_for(cfg)
        notes = list(subject.assumptions)
        if lacking := uncomputed(cfg, hardware):
            notes.append(lacking)
        measured = _measured(cfg, model, subject, device, notes)

        def planned(machine: Hardware) -> Forecast:
            forecast, planner = plan_for(args, subject, machine, measured)
            planners.append(planner)
            if objective is None:
                notes.extend(larger_rows(cfg, subject_for, machine, measured, forecast))
            return forecast

        seen = peak_seen(args, device, subject.layout, subject.traced.trace)
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
    ranks.together(check)
    require_same_keys(ranks.collect(args.model_dump(exclude={"protrain_cache_dir"})))
    there = [
        param
        for name, param in model.named_parameters()
        if param.device.type == "cpu" and name not in absent
    ]
    mapped = mapped_bytes(there)
    # the arena of a node takes the place of what each of its ranks has loaded
    loaded = sum(param.nbytes for param in there) - mapped
    host_bytes = host_memory(given_back=world.local_size * loaded)
    hardware = ranks.together(
        partial(this_machine, args, device, host_bytes, world.local_size)
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


def larger_rows(
    cfg: Any,
    subject_for: Callable[[Any], TracedJob],
    hardware: Hardware,
    measured: Mapping[int | None, BlockSeconds],
    forecast: Forecast,
) -> list[str]:
    """Say what fewer, larger micro-batches of a step would gain, where weights are
    fetched for each of them and compute waits for that."""
    rows, steps = cfg.micro_batch_size or 1, cfg.gradient_accumulation_steps or 1
    waits = forecast.plan.paged and forecast.step.limiter in ("fetch", COMMUNICATE)
    if not waits or steps % 2:
        return []
    keys = {"micro_batch_size": 2 * rows, "gradient_accumulation_steps": steps // 2}
    other = type(cfg)({**cfg, **keys})
    # of twice the rows
    twice = {
        block: BlockSeconds(2 * s.forward_s, 2 * s.backward_s)
        for block, s in measured.items()
    }
    with suppress(BudgetError):
        args, subject = args_from(other), subject_for(other)
        step = plan_for(args, subject, hardware, twice)[0].step
        if step.total_s < (1 - PAGING_GAIN) * forecast.step.total_s:
            named = ", ".join(f"{key}: {value}" for key, value in keys.items())
            return [
                f"Compute waits for weights, which are fetched for each micro-batch. With "
                f"{named} a step of as many tokens is predicted to take "
                f"{format_seconds(step.total_s)} instead of "
                f"{format_seconds(forecast.step.total_s)}."
            ]
    return []


def peak_seen(
    args: ProTrainArgs, device: torch.device, layout: Layout, trace: Trace
) -> PeakSeen | None:
    """Recall what an earlier run of this step on this device showed of its peak."""
    if not args.protrain_learn_peak:
        return None
    key = _peak_key(device, layout, trace)
    return recall(args.protrain_cache_dir, key, PeakSeen)


def keep_peak(
    args: ProTrainArgs, device: torch.device, forecast: Forecast, beyond_bytes: int
) -> None:
    """Let later runs plan with what this one took beyond its trace.

    Raises:
        ConfigError: The cache cannot be written.
    """
    key = _peak_key(device, forecast.layout, forecast.trace)
    today = datetime.now(timezone.utc).date().isoformat()
    keep(args.protrain_cache_dir, key, PeakSeen(beyond_bytes, today))


def _peak_key(device: torch.device, layout: Layout, trace: Trace) -> dict[str, Any]:
    step = hashlib.sha256(repr((layout, trace)).encode()).hexdigest()
    return {**measurement_key("peak", device, _versions()), "step": step}


def this_machine(
    args: ProTrainArgs, device: torch.device, host_bytes: int, together: int = 1
) -> Hardware:
    """Measure this machine, or take its rates from the cache.

    `host_bytes` may be used, and `together` processes measure at once on its links.

    Raises:
        ConfigError: The CPU device has no limit, or the cache cannot be written.
    """
    capacity = device_budget(args, device)
    folder, versions = args.protrain_cache_dir, _versions()
    # what AdamW on the host updates
    dtype = torch.float32 if args.protrain_fp32_master else torch.bfloat16
    return cached_hardware(
        folder, device, host_bytes, capacity, versions, together, dtype
    )


def device_budget(args: ProTrainArgs, device: torch.device) -> int:
    """Bytes of a device that may be used.

    Raises:
        ConfigError: It is the CPU, which has no limit of its own.
    """
    capacity = args.protrain_capacity_bytes
    if device.type != "cpu":
        free = device_memory(device)
        # what kernels take unseen grows with what may be used
        capacity = min(free, capacity or free)
    if capacity is None:
        raise missing_capacity()
    return capacity


def without_gpu(cfg: Any) -> list[str]:
    """Replace what Axolotl chooses for a GPU, and does not run on the CPU device.

    Args:
        cfg: Axolotl's validated configuration; `fp16` is its own choice there, for
            `refusals` has been asked about the YAML's.

    Returns:
        A line for each choice.
    """
    notes = []
    if kernels := [key for key in LORA_KERNELS if cfg[key]]:
        cfg.update(dict.fromkeys(kernels, False))
        notes.append(
            f"{', '.join(kernels)}: off on the CPU device, where Triton's kernels do not "
            "run; results are the same but for rounding."
        )
    if cfg.fp16:
        cfg.update(bf16=True, fp16=False, torch_dtype=torch.bfloat16)
        notes.append(
            "bf16: true on the CPU device, which `auto` takes for a GPU without."
        )
    return notes


def missing_capacity() -> ConfigError:
    """This machine has no accelerator and the YAML gives the CPU device no budget."""
    return ConfigError(
        "protrain_capacity_bytes: this machine has no accelerator, so ProTrain trains "
        "on its CPU device and needs that device's budget, for example "
        '`protrain_capacity_bytes: "2GiB"`.'
    )


def _measured(
    cfg: Any,
    model: nn.Module,
    subject: TracedJob,
    device: torch.device,
    notes: list[str],
) -> dict[int | None, BlockSeconds]:
    """Seconds of the blocks, from the cache under everything that changes them, and of
    what is outside them."""
    folder, dtype = args_from(cfg).protrain_cache_dir, autocast_dtype(cfg)
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    key = partial(
        measurement_key,
        "block",
        device,
        _versions(),
        autocast=str(dtype),
        attention=str(attention),
        kernels={k: bool(v) for k, v in cfg.items() if "kernel" in k},
        compiled=compile_keys(cfg),
    )
    names, samples = subject.traced.trace.blocks, subject.traced.samples
    blocks = measure_blocks(
        model, names, samples, device, dtype, folder, key, compile_keys(cfg)
    )
    times: dict[int | None, BlockSeconds] = dict(blocks.items())
    if subject.batch is None:
        notes.append(
            "seconds outside the blocks are computed, not timed: the loss is the trainer's own"
        )
        return times

    def loss_of(copied: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            outputs = copied(**batch)
        return _loss_in(outputs if dtype is None else outputs_as_fp32(outputs))

    by_name = {names[index]: sample for index, sample in samples.items()}
    try:
        times[None] = time_outside(model, by_name, subject.batch, loss_of, device)
    except FOREIGN_ERRORS as error:
        why = f"{type(error).__name__}: {textwrap.shorten(str(error), 200)}"
        notes.append(f"seconds outside the blocks are computed, not timed: {why}")
    return times


def about(cfg: Any) -> dict[str, Any]:
    """Describe what is trained, with what and when: the head of a page and of report.json."""
    optimizer = getattr(cfg.optimizer, "value", cfg.optimizer)
    rank = f", rank {cfg.lora_r}" if cfg.adapter and cfg.lora_r else ""
    packages = {"axolotl-protrain": _own_version(), "torch": torch.__version__}
    return {
        "model": str(cfg.base_model),
        "adapter": f"{cfg.adapter}{rank}" if cfg.adapter else "full fine-tune",
        "rows": f"{cfg.micro_batch_size} x {cfg.sequence_len} tokens, accumulation "
        f"{cfg.gradient_accumulation_steps or 1}",
        "optimizer": str(optimizer),
        "versions": packages | _versions(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _own_version() -> str:
    try:
        return version("axolotl-protrain")
    except PackageNotFoundError:
        # run from its sources
        return "unknown"


def _versions() -> dict[str, str]:
    """Versions of what takes part in a measurement beside torch."""
    packages = ("transformers", "peft", "bitsandbytes", "axolotl")
    return {"python": platform.python_version()} | {p: version(p) for p in packages}
