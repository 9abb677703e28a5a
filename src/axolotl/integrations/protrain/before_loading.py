"""Refuses before anything is loaded what no plan fits once it is.

A dry run of the YAML with this machine's memory, in a fork: building a model without
weights patches libraries, and nothing of that may be left when the true one is built.
"""

from __future__ import annotations

import os
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from .args import ProTrainArgs, args_from
from .core.cost import MemoryModel, block_times
from .core.errors import BudgetError, ProTrainError
from .core.profile import host_memory, measured_unseen_bytes
from .core.runtime import Alone, Ranks
from .core.types import Hardware, World
from .planning import Subject, device_budget, plan_for, subject_of

SLOWEST_S = 120
"""A dry run that takes longer is given up: training itself will tell."""

Answer = tuple[bool, str]
"""Whether it is certain that no plan fits, and why; or else why that is not known."""


def require_plan(cfg: Any, device: torch.device, log: Any) -> None:
    """Refuse a training that no plan fits; the first rank of each node looks.

    What cannot be told without weights is logged, and left to `plan_here`, as are ranks
    that accelerate did not join.

    Args:
        cfg: Axolotl's validated configuration.
        device: Where this rank is to train.
        log: Prints a line.

    Raises:
        BudgetError: As `plan_here` does, on all ranks.
    """
    # imported here: the command line reads the plugin without transformers
    from axolotl.utils.distributed import init_distributed_state

    # as Axolotl does when it first asks who is the first rank, next for the dataset
    init_distributed_state()
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size != (cfg.world_size or 1):
        return
    ranks = Ranks(device.type) if world_size > 1 else Alone()

    def look() -> None:
        if ranks.local_rank:
            return
        is_refused, reason = _in_fork(cfg, _unmeasured(cfg, device), ranks.world)
        if is_refused:
            raise BudgetError(reason)
        if reason:
            log.info(f"Whether it fits is known once the base is loaded: {reason}")

    ranks.together(look)
    ranks.close()


def _unmeasured(cfg: Any, device: torch.device) -> Hardware:
    """This machine's memory now, beside rates of no machine: they change no bytes."""
    device_bytes = device_budget(args_from(cfg), device)
    return Hardware(
        name=device.type,
        source="not measured",
        device_bytes=device_bytes,
        host_bytes=host_memory(),
        unseen_bytes=measured_unseen_bytes(device, device_bytes),
        flops_16=1e14,
        flops_32=1e13,
        memory_bytes_s=1e12,
        kernel_s=1e-5,
        fetch_bytes_s=1e10,
        offload_bytes_s=1e10,
        fetch_both_bytes_s=1e10,
        offload_both_bytes_s=1e10,
        adam_bytes_s=1e10,
        overlaps=device.type != "cpu",
        gather_bytes_s=1e10,
        reduce_bytes_s=1e10,
        across_bytes_s=1e10,
    )


def _in_fork(cfg: Any, hardware: Hardware, world: World) -> Answer:
    context = get_context("fork")
    answers, ours = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(ours, cfg, hardware, world))
    process.daemon = True
    process.start()
    ours.close()
    answer = False, f"the dry run took more than {SLOWEST_S} s"
    try:
        if answers.poll(SLOWEST_S):
            answer = answers.recv()
    except EOFError:
        answer = False, "the dry run ended without an answer"
    finally:
        process.kill()
        process.join()
    return answer


def _send(answers: Connection, cfg: Any, hardware: Hardware, world: World) -> None:
    with open(os.devnull, "r+b") as nothing:
        for standard in (0, 1, 2):
            os.dup2(nothing.fileno(), standard)
    # a fork cannot use the GPU of the process it was
    with patch.object(torch.cuda, "is_available", lambda: False):
        answers.send(_dry_run(cfg, hardware, world))


def _dry_run(cfg: Any, hardware: Hardware, world: World) -> Answer:
    # as above
    from .offline.meta_model import meta_model_of

    device_type, args = hardware.name, args_from(cfg)
    try:
        model = meta_model_of(cfg, device_type).model
        subject = subject_of(cfg, model, device_type, world)
        if args.protrain_cpu_capacity_bytes is None:
            # at best the whole base is mapped, and takes memory only where it moves
            subject = subject.loaded_with(sum(p.nbytes for p in model.parameters()))
        try:
            plan_for(args, subject, hardware)
        except BudgetError as error:
            if _depends_on_rates(args, subject, hardware):
                return False, "it depends on rates that are measured then"
            return True, str(error)
    except ProTrainError as error:
        return False, str(error)
    return False, ""


def _depends_on_rates(args: ProTrainArgs, subject: Subject, hardware: Hardware) -> bool:
    """Whether some plan fits under another `Search.swap_interval`: rates change no
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


def _fits(args: ProTrainArgs, subject: Subject, hardware: Hardware) -> bool:
    try:
        plan_for(args, subject, hardware)
    except BudgetError:
        return False
    return True
