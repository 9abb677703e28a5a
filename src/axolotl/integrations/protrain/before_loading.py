"""Refuse before anything is loaded what no plan fits once it is.

A `Worker` plans the YAML with this machine's memory: building a model without weights
patches libraries, and nothing of that may be left when the true one is built.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .args import ProTrainArgs, args_from
from .core.engine.ranks import Alone, Ranks
from .core.errors import BudgetError, ProTrainError
from .core.host import host_memory
from .core.layout.packed import stored_bytes
from .core.planner.cards import gpu_hardware
from .core.planner.hardware import has_one_memory, measured_unseen_bytes
from .core.planner.job import TracedJob, device_budget
from .core.planner.memory import MemoryModel
from .core.planner.seconds import block_times
from .core.types import Hardware, World
from .job import plan_for, traced_job
from .offline.worker import Worker, WorkerError
from .options import smaller

SLOWEST_S = 120
"""A dry run that takes longer is given up: training itself will tell."""

AT_ONCE_BYTES = 2 << 30
"""A base this small is loaded in the seconds that a dry run takes to import Axolotl."""

Answer = tuple[bool, str]
"""True where it is certain that no plan fits, and why; or else why that is not known."""


def joined(cfg: Any, device: torch.device) -> Ranks | None:
    """All ranks of this training, to be closed; None where accelerate did not join them,
    which is refused once the trainer is there."""
    # imported here: the command line reads the plugin without transformers
    from axolotl.utils.distributed import init_distributed_state

    # as Axolotl does when it first asks who is the first rank, next for the dataset
    init_distributed_state()
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size != (cfg.world_size or 1):
        return None
    return Ranks(device.type) if world_size > 1 else Alone()


def require_plan(cfg: Any, device: torch.device, log: Any, ranks: Ranks) -> None:
    """Refuse a training that no plan fits; the first rank of each node looks.

    What cannot be told without weights is logged, and left to `plan_here`.

    Args:
        cfg: Axolotl's validated configuration.
        device: Where this rank is to train.
        log: Prints a line.
        ranks: See `joined`.

    Raises:
        BudgetError: As `plan_here` does, on all ranks.
    """

    def look() -> None:
        if ranks.local_rank or _loads_at_once(Path(cfg.base_model)):
            return
        log.info("ProTrain looks for a plan that fits before anything is loaded.")
        asked = cfg, _unmeasured(cfg, device), ranks.world
        try:
            with Worker(f"{__name__}:dry_run") as worker:
                ((is_refused, reason),) = worker.ask([asked], SLOWEST_S)
        except WorkerError as error:
            is_refused, reason = False, str(error)
        if is_refused:
            raise BudgetError(reason)
        if reason:
            log.info(f"Whether it fits is known once the base is loaded: {reason}")

    ranks.together(look)


def _loads_at_once(base: Path) -> bool:
    files = (file for kind in ("*.safetensors", "*.bin") for file in base.glob(kind))
    return 0 < sum(file.stat().st_size for file in files) < AT_ONCE_BYTES


def _unmeasured(cfg: Any, device: torch.device) -> Hardware:
    """This machine's memory now, beside rates of some card: they change no bytes."""
    args, host_bytes = args_from(cfg), host_memory()
    limit = args.protrain_capacity_bytes
    device_bytes = device_budget(limit, device, host_bytes)
    return replace(
        gpu_hardware("H100", None, host_bytes),
        name=device.type,
        source="not measured",
        device_bytes=device_bytes,
        unseen_bytes=measured_unseen_bytes(device, device_bytes),
        overlaps=device.type != "cpu",
        one_memory=has_one_memory(device),
        gather_bytes_s=1e10,
        reduce_bytes_s=1e10,
        across_bytes_s=1e10,
        disk_bytes_s=1e10 if args.protrain_disk_dir else 0.0,
    )


def dry_run(asked: tuple[Any, Hardware, World]) -> Answer:
    """Plan a configuration for a machine without its weights, in a fork of a `Worker`."""
    cfg, hardware, world = asked
    # imported here: the plugin has this module
    from axolotl.integrations.base import PluginManager

    from .offline.meta_model import meta_model_of, register_plugins

    PluginManager.get_instance().cfg = cfg
    device_type, args = hardware.name, args_from(cfg)
    started = time.monotonic()
    try:
        # one may bring the model's class; ours has checked these keys as they were written
        register_plugins(type(cfg)({**cfg, "protrain_auto_memory": False}))
        meta = meta_model_of(cfg, device_type)

        def traced(**change: int) -> TracedJob:
            with meta.changed(change):
                subject = traced_job(cfg, meta.model, device_type, world)
            limited = args.protrain_cpu_capacity_bytes is not None
            # what is quantised waits on the disk too
            if limited and args.protrain_disk_dir is None:
                return subject
            # at best the whole base is mapped, and takes memory only where it moves
            base = sum(map(stored_bytes, meta.model.parameters()))
            return subject.loaded_with(base)

        subject = traced()
        try:
            plan_for(args, subject, hardware)
        except BudgetError as error:
            if _depends_on_rates(args, subject, hardware):
                return False, "it depends on rates that are measured then"
            for change in smaller(cfg):
                if time.monotonic() - started > SLOWEST_S / 3:
                    break
                # what cannot be traced is no way out
                with suppress(ProTrainError):
                    plan_for(args, traced(**change), hardware)
                    lines = "".join(f"\n{key}: {n}" for key, n in change.items())
                    return True, f"{error}\nThese lines would make it fit:{lines}"
            return True, str(error)
    except ProTrainError as error:
        return False, str(error)
    return False, ""


def _depends_on_rates(
    args: ProTrainArgs, subject: TracedJob, hardware: Hardware
) -> bool:
    """Tell whether some plan fits under another `Search.swap_interval`: rates change no
    other bytes."""
    trace, layout = subject.traced.trace, subject.layout
    swappable = MemoryModel(layout, trace, subject.workload, hardware).swappable_bytes
    forward_s = sum(block_times(trace, layout, hardware).forward_s)
    links = [
        replace(hardware, offload_bytes_s=swappable / ((interval - 0.5) * forward_s))
        for interval in range(1, len(layout.blocks) + 1)
        if swappable
    ]
    host_bytes = args.protrain_cpu_capacity_bytes or hardware.host_bytes
    host_bytes += swappable * subject.workload.world.local_size
    roomy = args.model_copy(update={"protrain_cpu_capacity_bytes": host_bytes})
    # a search takes a second: most often the host lacks more than all that swaps
    return any(
        _fits(roomy, subject, link) for link in (*links[:1], *links[-1:])
    ) and any(_fits(args, subject, link) for link in links)


def _fits(args: ProTrainArgs, subject: TracedJob, hardware: Hardware) -> bool:
    try:
        plan_for(args, subject, hardware)
    except BudgetError:
        return False
    return True
