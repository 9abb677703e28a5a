"""What both the dry run and training ask core's planner, in Axolotl's terms."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .args import ProTrainArgs, overrides
from .core.cost import ALONE
from .core.errors import FOREIGN_ERRORS, BudgetError, ConfigError, TraceError
from .core.layout import build_layout, find_blocks, has_vision_tower
from .core.planner import Forecast, Planner
from .core.profile import (
    Emulation,
    Target,
    TracedStep,
    outputs_as_fp32,
    trace_step,
)
from .core.search import MODES
from .core.types import Budget, Knobs, Layout, Workload, World
from .report.forecast import format_bytes
from .stand_ins import planning_stand_ins


@dataclass(frozen=True)
class Subject:
    """A model without weights, traced.

    Attributes:
        traced: One micro-batch of it.
        layout: Its chunks, in the order of first use.
        redone_if_paged: Blocks that have to recompute where any weight of theirs pages.
        headroom_bytes: Kept on the device for a vision tower that was not traced.
        assumptions: What was not known, and what was taken instead.
    """

    traced: TracedStep
    layout: Layout
    redone_if_paged: frozenset[int]
    headroom_bytes: int
    assumptions: tuple[str, ...]


_IMAGES = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")


def trace_model(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    target: Target,
    args: ProTrainArgs,
    layout: Layout | None = None,
) -> Subject:
    """Trace one micro-batch of a model on the meta device.

    A model with a vision tower that cannot be traced is traced with text alone.

    Args:
        model: As it will be trained.
        batch: The micro-batch.
        target: Where it will run.
        args: The YAML's keys.
        layout: Of the same model, if it is known from another batch.

    Raises:
        TraceError: It cannot be run without weights.
    """
    blocks = find_blocks(model)
    headroom = 0
    assumptions = []
    text = {name: value for name, value in batch.items() if name not in _IMAGES}
    with planning_stand_ins(target.device_type) as used:
        try:
            traced = trace_step(model, blocks, _loss(model, batch, target))
        except TraceError as error:
            if not has_vision_tower(model) or len(text) == len(batch):
                raise
            headroom = args.protrain_vision_headroom_bytes
            assumptions.append(
                f"the vision tower could not be traced ({error}); "
                f"protrain_vision_headroom_bytes reserves {format_bytes(headroom)} for it"
            )
            traced = trace_step(model, blocks, _loss(model, text, target))
    if has_vision_tower(model) and not headroom and len(text) == len(batch):
        headroom = args.protrain_vision_headroom_bytes
        assumptions.append(
            "no images in the batch: protrain_vision_headroom_bytes reserves "
            f"{format_bytes(headroom)} for the vision tower"
        )
    if traced.uncounted:
        assumptions.append(
            f"{', '.join(traced.uncounted)}: nobody knows how many operations these "
            "take, so their time is that of the bytes they move"
        )
    order = traced.trace.blocks
    if layout is None or tuple(block.name for block in layout.blocks) != order:
        layout = build_layout(model, adapter_names(model), order)
    redone: frozenset[int] = frozenset()
    if args.protrain_lora_mlp_forbid_offload:
        redone = _blocks_with_mlp_kernel(model, layout)
        assumptions.append(
            f"protrain_lora_mlp_forbid_offload: {len(redone)} of {len(layout.blocks)} "
            "blocks are under lora_mlp_kernel and recompute where their weights page"
        )
    return Subject(
        traced=traced,
        layout=layout,
        redone_if_paged=redone,
        headroom_bytes=headroom,
        assumptions=(*assumptions, *used),
    )


def _blocks_with_mlp_kernel(model: nn.Module, layout: Layout) -> frozenset[int]:
    """Axolotl sets `forward` on the block's `mlp` itself where the kernel is used."""
    mlps = (
        (block.index, getattr(model.get_submodule(block.name), "mlp", None))
        for block in layout.blocks
    )
    return frozenset(
        index for index, mlp in mlps if mlp is not None and "forward" in vars(mlp)
    )


def _loss(
    model: nn.Module, batch: Mapping[str, Tensor], target: Target
) -> Callable[[], Tensor]:
    def loss_of() -> Tensor:
        try:
            with Emulation(target):
                outputs = model(**batch)
        except FOREIGN_ERRORS as error:
            raise TraceError(
                f"{type(model).__name__} does not run without weights: "
                f"{type(error).__name__}: {textwrap.shorten(str(error), 200)}"
            ) from error
        if target.autocast_dtype is not None:
            outputs = outputs_as_fp32(outputs)
        # the loss of a reward model is made of its few logits
        return outputs["loss"] if "loss" in outputs else outputs["logits"].sum()

    return loss_of


def adapter_names(model: nn.Module) -> frozenset[str]:
    """Names of a PEFT model's adapter weights; empty without an adapter.

    Copies of whole modules (`modules_to_save`) are not among them: those are as large
    as what they copy.
    """
    if getattr(model, "peft_config", None) is None:
        return frozenset()
    return frozenset(
        name
        for name, p in model.named_parameters()
        if p.requires_grad and ".modules_to_save." not in name
    )


@dataclass(frozen=True)
class _Optimizer:
    """What an optimizer holds and takes on the device, in copies of its weights.

    `scratch` is what its update takes on top on a GPU, where torch updates all
    parameters at once; on a CPU it takes two copies of the largest parameter.
    """

    moments: float
    scratch: float = 0.0


_OPTIMIZERS = {
    "adamw_torch_fused": _Optimizer(2),
    "adamw_torch": _Optimizer(2, scratch=1),
    # fp32 adapters with moments of one byte each
    "adamw_8bit": _Optimizer(0.5),
    "adamw_bnb_8bit": _Optimizer(0.5),
    "lion_8bit": _Optimizer(0.25),
    "paged_adamw_32bit": _Optimizer(0),
    "paged_adamw_8bit": _Optimizer(0),
    "paged_lion_8bit": _Optimizer(0),
    "lion_pytorch": _Optimizer(1),
    "sgd": _Optimizer(0, scratch=1),
    "adagrad": _Optimizer(1, scratch=1),
    "rmsprop": _Optimizer(1, scratch=1),
}


def workload_of(
    cfg: Any,
    args: ProTrainArgs,
    batch: Mapping[str, Tensor],
    device_type: str,
    world: World = ALONE,
) -> tuple[Workload, tuple[str, ...]]:
    """What a step of this configuration asks beside its model, and assumptions."""
    name = str(getattr(cfg.optimizer, "value", cfg.optimizer) or "adamw_torch_fused")
    optimizer = _OPTIMIZERS.get(name)
    assumptions = []
    if optimizer is None:
        optimizer = _Optimizer(2, scratch=1)
        assumptions.append(
            f"optimizer {name}: as large as AdamW, two copies of what trains on the "
            "device and one more during the update"
        )
    micro_batch = cfg.micro_batch_size or 1
    evaluates = bool(cfg.val_set_size or cfg.test_datasets)
    batch_bytes = sum(tensor.nbytes for tensor in batch.values())
    waiting = (cfg.dataloader_num_workers or 0) * (cfg.dataloader_prefetch_factor or 2)
    on_cpu = device_type == "cpu"
    workload = Workload(
        accumulation=cfg.gradient_accumulation_steps or 1,
        tokens=batch["input_ids"].numel(),
        fp32_master=args.protrain_fp32_master,
        moment_copies=optimizer.moments,
        update_copies=0.0 if on_cpu else optimizer.scratch,
        update_parameter_copies=2.0 if on_cpu and optimizer.scratch else 0.0,
        eval_ratio=(cfg.eval_batch_size or micro_batch) / micro_batch * evaluates,
        loader_bytes=(1 + waiting) * batch_bytes,
        world=world,
    )
    return workload, tuple(assumptions)


def budget_of(
    args: ProTrainArgs, subject: Subject, device_bytes: int, host_bytes: int
) -> Budget:
    """What the plan may use; the keys of the YAML win over what the machine has."""
    return Budget(
        device_bytes=args.protrain_capacity_bytes or device_bytes,
        reserve_bytes=subject.headroom_bytes,
        host_bytes=args.protrain_cpu_capacity_bytes or host_bytes,
    )


FORCED = {
    "protrain_force_all_persistent": "A",
    "protrain_force_replicated_cpu_offload": "B",
    "protrain_zero3_shard": "C",
}
"""The key that asks for each mode."""


def choose(args: ProTrainArgs, planner: Planner) -> Forecast:
    """The plan that the keys ask for: of one mode, by hand, or the fastest that fits.

    Raises:
        ConfigError: A knob is outside its legal range, or the mode cannot be had.
        BudgetError: It does not fit.
    """
    modes, key = _modes(args, planner.world)
    knobs = _knobs(args, planner)
    if knobs is not None:
        return planner.by_hand(*knobs)
    try:
        return planner.search(modes=modes)
    except BudgetError as error:
        if key is None:
            raise
        try:
            other = planner.search().plan.mode
        except BudgetError:
            raise error from None
        raise BudgetError(
            f"`{key}: true` does not fit: {error} Without it mode {other} does."
        ) from error


def nearest(args: ProTrainArgs, planner: Planner) -> Forecast:
    """Where `choose` finds that nothing fits: the plan that lacks the least."""
    modes, _ = _modes(args, planner.world)
    knobs = _knobs(args, planner)
    return planner.nearest(modes=modes) if knobs is None else planner.asked(*knobs)


def _modes(args: ProTrainArgs, world: World) -> tuple[frozenset[str], str | None]:
    """Those that the keys leave, and the key that leaves only one."""
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


def _knobs(args: ProTrainArgs, planner: Planner) -> tuple[Knobs, int] | None:
    """The overrides and `Plan.shards`."""
    by_hand = overrides(args)
    if by_hand is None:
        return None
    n_buffer = by_hand.n_buffer
    if "n_buffer" in by_hand.filled:
        # what nobody asked for must not be refused as too many
        n_buffer = min(n_buffer, planner.num_chunks - by_hand.n_persist)
    _, key = _modes(args, planner.world)
    if key is not None and by_hand.n_persist >= planner.num_chunks:
        raise ConfigError(
            f"protrain_n_persist_override: {by_hand.n_persist} leaves nothing to page, "
            f"which `{key}: true` asks for. Keep fewer than {planner.num_chunks} chunks "
            "on the device, or remove one of the keys."
        )
    shards = planner.world.local_size if args.protrain_zero3_shard else 1
    knobs = Knobs(by_hand.n_persist, n_buffer, by_hand.n_swap, by_hand.n_checkpoint)
    return knobs, shards
