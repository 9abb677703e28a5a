"""A YAML as a job of core: its batch and loss, its optimizer, and what it decides.

`traced_job` traces a model without weights, for a dry run too; `plan_here` plans the one
that is about to be trained. How a plan is made is in `core/planner/job.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from .args import FORCED, ProTrainArgs, args_from, overrides
from .core.engine.ranks import Ranks
from .core.errors import ConfigError, TraceError
from .core.layout import has_vision_tower
from .core.planner import job as core
from .core.planner.emulation import outputs_as_fp32
from .core.planner.job import Choice, Job, Seconds, TracedJob, loss_in
from .core.planner.optimizer_bytes import OptimizerBytes
from .core.planner.planner import Forecast, Planner
from .core.planner.search import MODES
from .core.planner.trace import TracedStep
from .core.sizes import format_bytes
from .core.types import (
    ALONE,
    Hardware,
    Update,
    Workload,
    World,
)
from .offline.batches import sample_batch
from .offline.fake_kernels import fake_kernels, make_experts_traceable, picks_all
from .offline.optimizer_state import optimizer_bytes
from .refusals import HOST_OPTIMIZERS, LORA_KERNELS, refuse_quantised

if TYPE_CHECKING:
    from .generation import Asked
    from .objective import Objective


def traced_job(
    cfg: Any,
    model: nn.Module,
    device_type: str,
    world: World = ALONE,
    real: nn.Module | None = None,
    objective: Objective | None = None,
    adapters_wait: bool = True,
    optimizer: OptimizerBytes | None = None,
    asked: Asked | None = None,
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
        asked: Sequences that are sampled beside a training without an objective, in whose
            plan they are as far as they can be traced.

    Raises:
        TraceError: It cannot be run without weights.
        ConfigError: It takes images in a way that is not known here, or nothing trains.
    """
    args = args_from(cfg)
    _require_training(cfg, model)
    _require_followed(cfg, model)
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
            if name.endswith("ids")
        )
        assumptions.append(f"the trainer's own loss, of {', '.join(shapes)} tokens")
    make_experts_traceable(model, assumptions)
    with fake_kernels(device_type, model) as used:
        traced, headroom = _traced(
            model, batch, device_type, cfg, args, assumptions, objective, real is None
        )
    real = model if real is None else real
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    masters = args.protrain_fp32_master
    mastered = trained - core.adapter_names(real) if masters else ()
    if optimizer is None:
        optimizer = optimizer_bytes(cfg, model, device_type, assumptions, mastered)
    # ReLoRA prunes their state where it finds it; `tiled_mlp` sets gradients itself; a
    # scaler (fp16) would have all gradients copied back for each step
    waits = adapters_wait and optimizer.separable and world.size == 1
    waits = waits and not (cfg.relora or cfg.tiled_mlp or cfg.fp16)
    # Axolotl's kernels keep DoRA's norms until a weight's version changes, which it does
    # with each update here, and under torch's fused optimizers and bitsandbytes' never
    waits = waits and not (cfg.peft_use_dora and any(cfg[key] for key in LORA_KERNELS))
    waits = waits and args.protrain_cpu_optimizer is None
    layout, notes = core.laid_out(real, traced, waits, masters)
    assumptions += notes
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
    if objective is not None and objective.sampled is not None:
        sampled = objective.sampled.traced(model, device_type, autocast_dtype(cfg))
        # answers are scored before they are trained with, too
        ratio = max(workload.eval_ratio, 1.0)
        workload = replace(workload, generation=sampled, eval_ratio=ratio)
    if objective is not None and objective.served is not None:
        ratio = max(workload.eval_ratio, 1.0)
        workload = replace(workload, served=objective.served, eval_ratio=ratio)
    if asked is not None:
        workload = _beside(workload, asked, model, device_type, cfg, assumptions)
    if workload.host_can_update and device_type == "cpu" and not masters:
        workload = replace(workload, host_is_exact=True)
    own, said = None if objective else dict(batch), tuple(assumptions)
    return TracedJob(traced, layout, workload, own, redone, headroom, said, optimizer)


def _beside(
    workload: Workload,
    asked: Asked,
    model: nn.Module,
    device_type: str,
    cfg: Any,
    assumptions: list[str],
) -> Workload:
    """Add what is sampled beside a training, its keys and values on the device."""
    try:
        sampled = asked.traced(model, device_type, autocast_dtype(cfg))
    except TraceError as error:
        assumptions.append(f"samples could not be traced ({error})")
        return workload
    return replace(workload, generation=replace(sampled, away_bytes=0))


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
        + (": fp32, or with an adapter `fp16: true`." if narrow else ".")
    )


_TILED = "MLP", "MoE", "SparseMoeBlock"
"""Ends of the names of classes whose forward `tiled_mlp` replaces."""


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


def _require_followed(cfg: Any, model: nn.Module) -> None:
    """Refuse weights that keys let train in a way that is not followed."""
    if autocast_dtype(cfg) is torch.float16:
        for name, param in model.named_parameters():
            if param.requires_grad and param.dtype is torch.float16:
                raise ConfigError(
                    f"fp16: {name} trains in fp16, and torch's GradScaler refuses such "
                    "gradients: the plain run ends in its first step. Let only adapters "
                    "train (lora_modules_to_save, unfrozen_parameters), without "
                    "`peft_autocast_adapter_dtype: false`, or set `bf16: true`."
                )
    blocks = f"{cfg.lisa_layers_attribute or 'model.layers'}."
    for name, param in model.named_parameters():
        if cfg.lisa_n_layers and name.startswith(blocks) and not param.requires_grad:
            raise ConfigError(
                f"lisa_n_layers: {name} is frozen when training begins, so no optimizer has "
                "it, and LISA would let it train. Name all blocks in "
                f"unfrozen_parameters, `{blocks}*` for example, or remove one of both keys."
            )
    tiled = cfg.tiled_mlp and not cfg.protrain_force_all_persistent
    for owner, module in model.named_modules() if tiled else ():
        if type(module).__name__.endswith(_TILED):
            for name, param in module.named_parameters(owner):
                if param.requires_grad and ".modules_to_save." in name:
                    raise ConfigError(
                        f"tiled_mlp: it adds up the gradient of {name} itself, while that "
                        "leaves for the host. Take parts of the MLP out of "
                        "lora_modules_to_save, remove tiled_mlp, or set "
                        "protrain_force_all_persistent: true, where all of it fits."
                    )


def autocast_dtype(cfg: Any) -> torch.dtype | None:
    """Return the dtype of accelerate's autocast; `bf16: full` asks for none, and for fp16
    there is none on a CPU."""
    if cfg.bf16 == "full":
        return None
    if cfg.bf16 or cfg.bfloat16:
        return torch.bfloat16
    return torch.float16 if cfg.fp16 and cfg.device != "cpu" else None


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
    dry_run: bool,
) -> tuple[TracedStep, int]:
    """A step, with text alone where a vision tower cannot be traced, and its headroom."""
    others = objective.others if objective else {}
    function = None if objective else _loss_function(cfg)

    def trace(batch: Mapping[str, Any]) -> TracedStep:
        loss = objective.loss if objective else partial(_loss_of_output, function)
        loss = partial(loss, model, batch)
        return core.trace_loss(
            model, device_type, loss, autocast_dtype(cfg), others.values()
        )

    text = {name: value for name, value in batch.items() if name not in _IMAGES}
    # without a processor Axolotl makes no batch with images
    takes_images = has_vision_tower(model) and bool(cfg.processor_type)
    headroom = args.protrain_vision_headroom_bytes if takes_images else 0
    reserved = f"protrain_vision_headroom_bytes reserves {format_bytes(headroom)} for"
    try:
        traced = trace(batch)
        if len(text) < len(batch):
            headroom = 0
        elif takes_images:
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
        # a training without a limit asks the device what these have left
        if dry_run or args.protrain_capacity_bytes is not None:
            headroom += nbytes
    if cfg.torch_compile:
        assumptions.append(
            "torch_compile: blocks are compiled one by one, nothing else is; bytes are "
            "those of blocks that are not compiled, which save more (a half at most was "
            "seen), and so are seconds until blocks are measured"
            + (", no CUDA graphs" if cfg.torch_compile_mode in WITHOUT_GRAPHS else "")
        )
    return traced, headroom


def _loss_of_output(
    function: Callable[..., Tensor] | None, model: nn.Module, batch: Mapping[str, Any]
) -> Tensor:
    """Compute the model's own loss, or what a function makes of its output."""
    if function is None:
        return loss_in(model(**batch))
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    output = model(**inputs)
    with picks_all():
        return function(output, batch["labels"], num_items_in_batch=1)


def _loss_function(cfg: Any) -> Callable[..., Tensor] | None:
    """Return what Axolotl's trainer computes in the place of the model's own loss."""
    # imported here: each is there from some version of Axolotl on
    if cfg.use_eaft:
        from axolotl.monkeypatch.loss.eaft import eaft_loss

        given = {"alpha": cfg.eaft_alpha, "k": cfg.eaft_k}
        return partial(
            eaft_loss, **{k: value for k, value in given.items() if value is not None}
        )
    if cfg.use_dft:
        from axolotl.monkeypatch.loss.dft import dft_loss

        return dft_loss
    return None


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
        update=Update.HOST if on_host else Update.DEVICE,
        host_can_update=not on_host and _is_adamw(cfg),
        **optimizer.in_workload,
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
    ends = "input_ids", "prompt_ids", "completion_ids"
    ids = [t for key, t in getattr(batch, "items", dict)() if key.endswith(ends)]
    return sum(t.numel() for t in ids if isinstance(t, Tensor))


def _is_adamw(cfg: Any) -> bool:
    name = getattr(cfg.optimizer, "value", cfg.optimizer)
    return name in HOST_OPTIMIZERS and not cfg.adapter


def choice_of(args: ProTrainArgs) -> Choice:
    """Return what the keys decide of a plan."""
    modes, key = MODES, None
    if args.protrain_zero3_shard is False:
        modes = MODES - {"C"}
    for forced, mode in FORCED.items():
        if getattr(args, forced):
            modes, key = frozenset(mode), forced
            break
    knobs, filled = overrides(args) or (None, ())
    return Choice(
        args.protrain_capacity_bytes,
        args.protrain_cpu_capacity_bytes,
        modes,
        key,
        knobs,
        filled,
        bool(args.protrain_zero3_shard),
        disk_dir(args),
    )


def disk_dir(args: ProTrainArgs) -> Path | None:
    """The folder for frozen weights, if there is one."""
    folder = args.protrain_disk_dir
    return None if folder is None else Path(folder).expanduser()


def plan_for(
    args: ProTrainArgs,
    subject: TracedJob,
    hardware: Hardware,
    measured: Seconds | None = None,
    anyway: bool = False,
) -> tuple[Forecast, Planner]:
    """Plan as the keys ask for it; see `core.planner.job.plan_for`."""
    return core.plan_for(subject, hardware, choice_of(args), measured, anyway)


def plan_here(
    cfg: Any,
    model: nn.Module,
    device: torch.device,
    ranks: Ranks,
    absent: frozenset[str],
    objective: Objective | None = None,
    adapter_bytes: int = 0,
    asked: Asked | None = None,
) -> tuple[Forecast, Planner | None, list[str], str]:
    """Plan what is about to be trained; see `core.planner.job.plan_here`.

    Args:
        cfg: Axolotl's validated configuration.
        model: On the host, `requires_grad` final.
        device: Where to train it.
        ranks: Who trains together.
        absent: Names of weights that this rank has in name only.
        objective: Of a trainer whose loss is more than one forward.
        adapter_bytes: Of the device, for adapters whose optimizer is not the trainer's.
        asked: See `traced_job`.
    """
    args, dtype = args_from(cfg), autocast_dtype(cfg)

    def traced(meta: nn.Module) -> TracedJob:
        subject = traced_job(
            cfg,
            meta,
            device.type,
            ranks.world,
            model,
            objective,
            adapters_wait=not adapter_bytes,
            asked=asked,
        )
        headroom = subject.headroom_bytes + adapter_bytes
        return replace(subject, headroom_bytes=headroom)

    def loss(copied: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            outputs = copied(**batch)
        return loss_in(outputs if dtype is None else outputs_as_fp32(outputs))

    def advice(machine: Hardware) -> list[str]:
        lacking = uncomputed(cfg, machine)
        return [lacking] if lacking else []

    job = Job(
        traced,
        loss,
        choice_of(args),
        dtype,
        compile_keys(cfg),
        {key: bool(value) for key, value in cfg.items() if "kernel" in key},
        args.protrain_fp32_master,
        args.protrain_cache_dir,
        learns=args.protrain_learn_peak,
        same=args.model_dump(exclude={"protrain_cache_dir", "protrain_disk_dir"}),
        advice=advice,
    )
    ranks.together(partial(refuse_quantised, model))
    return core.plan_here(job, model, device, ranks, absent)


def without_gpu(cfg: Any, asks_fp16: bool) -> list[str]:
    """Replace what Axolotl chooses for a GPU, and does not run on the CPU device.

    Args:
        cfg: Axolotl's validated configuration.
        asks_fp16: The YAML does; else it is Axolotl's own choice.

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
    if cfg.fp16 and not asks_fp16:
        cfg.update(bf16=True, fp16=False, torch_dtype=torch.bfloat16)
        notes.append(
            "bf16: true on the CPU device, which `auto` takes for a GPU without."
        )
    return notes


_INITIALISED = ("pissa", "olora", "loftq", "corda", "eva", "lora_ga", "mica")
"""Beginnings of adapters that are computed from the base's weights."""


def started_on_host(cfg: Any) -> list[str]:
    """A line for each key whose weights the plain run draws or computes on the GPU as it
    loads, and this one on the host, where they come out otherwise."""
    how = str(cfg.peft_init_lora_weights or "")
    names = "peft_use_dora reward_model process_reward_model tokens "
    names += (
        "resize_token_embeddings_to_32x fix_untrained_tokens diffusion diffusion_lm"
    )
    keys = {
        f"peft_init_lora_weights: {how}": how.lower().startswith(_INITIALISED),
        "peft.loftq_config": cfg.peft and cfg.peft.loftq_config,
        **{name: cfg[name] for name in names.split()},
    }
    return [
        f"{key}: weights that this makes anew, if any, are made on the host, and on the "
        "GPU without ProTrain, so training begins with other ones than a plain run."
        for key, makes in keys.items()
        if makes
    ]


def about(cfg: Any) -> dict[str, Any]:
    """Describe what is trained, with what and when: the head of a page and of report.json."""
    optimizer = getattr(cfg.optimizer, "value", cfg.optimizer)
    rank = f", rank {cfg.lora_r}" if cfg.adapter and cfg.lora_r else ""
    packages = {"axolotl-protrain": core.own_version(), "torch": torch.__version__}
    return {
        "model": str(cfg.base_model),
        "adapter": f"{cfg.adapter}{rank}" if cfg.adapter else "full fine-tune",
        "rows": f"{cfg.micro_batch_size} x {cfg.sequence_len} tokens, accumulation "
        f"{cfg.gradient_accumulation_steps or 1}",
        "optimizer": str(optimizer),
        "versions": packages | core.library_versions(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
