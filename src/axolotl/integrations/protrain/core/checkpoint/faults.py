"""What a run resumes from is looked at first."""

from __future__ import annotations

import json
import math
import os
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from pickle import UnpicklingError  # nosec B403
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import FOREIGN_ERRORS, CheckpointError
from ..manifest import MANIFEST, OPTIMIZER, SCHEDULER, checkpoints, size_faults

STATE = "trainer_state.json"
_WEIGHTS = tuple(
    f"{name}{index}"
    for name in "model.safetensors adapter_model.safetensors pytorch_model.bin "
    "adapter_model.bin".split()
    for index in ("", ".index.json")
)
_EXAMINED = (
    *(STATE, OPTIMIZER, SCHEDULER, "rng_state*.pth", "*config.json", "*.index.json"),
    *("*.safetensors", "pytorch_model*.bin", "adapter_model*.bin"),
)
_WITH_OBJECTS = ("apollo_torch", "galore_torch")
"""Packages whose optimizers keep objects of their own in a state, which torch reads only
if told so: transformers does not, so their plain runs cannot resume."""
_ADAMW_STATE = {"step", "exp_avg", "exp_avg_sq"}


def fault_of(checkpoint: Path, weights_only: bool = True) -> str | None:
    """What is missing in a checkpoint or damaged, by what can be seen without reading
    tensors; None if nothing. If `weights_only`, optimizer.pt and scheduler.pt may both
    be missing."""
    if not checkpoint.is_dir():
        return "there is no such folder"
    has = {name: (checkpoint / name).is_file() for name in (OPTIMIZER, SCHEDULER)}
    required = [STATE]
    if any(has.values()) or not weights_only:
        required += has
    for name in required:
        if not (checkpoint / name).is_file():
            return f"{name} is missing"
    # several adapters have a folder each
    folders = [checkpoint, *(p for p in checkpoint.iterdir() if p.is_dir())]
    if not any((folder / name).is_file() for folder in folders for name in _WEIGHTS):
        return "its weights are missing"
    found = (p for f in folders for kind in _EXAMINED for p in f.glob(kind))
    # a link that leads nowhere is no reason to take the checkpoint for one without
    lists = (p for p in (checkpoint / MANIFEST,) if os.path.lexists(p))
    faults = map(_file_fault, chain(found, lists))
    return next((fault for fault in faults if fault is not None), None)


def require_whole(checkpoint: Path, weights_only: bool) -> None:
    """Refuse to resume from what is not whole.

    Raises:
        CheckpointError: See `fault_of`.
    """
    fault = fault_of(checkpoint, weights_only)
    if fault is not None:
        raise _refusal(checkpoint, fault, weights_only)


def has_state(checkpoint: Path) -> bool:
    """Whether a run that resumes from it goes on with its optimizer and schedule."""
    return all((checkpoint / name).is_file() for name in (OPTIMIZER, SCHEDULER))


def load_states(
    checkpoint: Path, optimizer: torch.optim.Optimizer, scheduler: Any
) -> None:
    """Read optimizer.pt and scheduler.pt, from a mapping of the file.

    Raises:
        CheckpointError: They cannot be read, or are not those of this optimizer.
    """
    own = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
    state = _read(checkpoint / OPTIMIZER, _classes(own))
    schedule = _read(checkpoint / SCHEDULER)
    step = json.loads((checkpoint / STATE).read_text())["global_step"]
    for name, faults in (
        (OPTIMIZER, _optimizer_faults(own, state, step)),
        (SCHEDULER, _scheduler_faults(len(own.param_groups), schedule, step)),
    ):
        try:
            fault = next(faults, None)
        except FOREIGN_ERRORS as error:
            fault = f"has another structure ({error!r})"
        if fault is not None:
            raise _refusal(checkpoint, f"{name} {fault}")
    optimizer.load_state_dict(state)
    scheduler.load_state_dict(schedule)


def _refusal(
    checkpoint: Path, fault: str, weights_only: bool = False
) -> CheckpointError:
    others = (p for p in checkpoints(checkpoint.parent) if p.name != checkpoint.name)
    whole = next((p for p in others if fault_of(p, weights_only) is None), None)
    ways = [f"The last whole one beside it is {whole}."] if whole else []
    if fault.startswith((OPTIMIZER, SCHEDULER)):
        names = (OPTIMIZER, SCHEDULER)
        there = [name for name in names if os.path.lexists(checkpoint / name)]
        acts = [f"remove {' and '.join(there)}"] if there else []
        if not weights_only:
            acts.append("set protrain_save_optimizer_state: false")
        ways.append(f"To go on from the weights alone, {' and '.join(acts)}.")
    ways = ways or ["Resume from another one, or without the key."]
    return CheckpointError(
        f"resume_from_checkpoint: {checkpoint} cannot be resumed: {fault}. "
        + " ".join(ways)
    )


def _file_fault(path: Path) -> str | None:
    if not path.is_file():
        return f"{path.name} is no regular file"
    try:
        if path.suffix == ".json":
            value = json.loads(path.read_text("utf-8"))
            if path.name == STATE and type(value["global_step"]) is not int:
                return f"{STATE} has no global_step"
            if path.name == MANIFEST:
                # the state may have been removed on purpose
                sizes = size_faults(path.parent, allowed=(OPTIMIZER, SCHEDULER))
                return next(sizes, None)
            if path.name.endswith(".index.json"):
                for shard in {*value["weight_map"].values()}:
                    if not (path.parent / shard).is_file():
                        return f"{shard} is missing"
        elif path.suffix == ".safetensors":
            # compares what the header promises with the size of the file
            with safe_open(path, framework="pt"):
                pass
        else:
            # its table of contents is written last
            zipfile.ZipFile(path).close()
    except (OSError, SafetensorError, zipfile.BadZipFile, *FOREIGN_ERRORS) as error:
        return f"{path.name} is truncated or damaged ({error})"
    return None


def _classes(optimizer: torch.optim.Optimizer) -> list[type]:
    """Those of the optimizer's package of which objects are in its state."""
    package = _kind_of(optimizer).__module__.partition(".")[0]
    if package not in _WITH_OBJECTS:
        return []
    return [
        value
        for name, module in sys.modules.items()
        if name.partition(".")[0] == package
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__.startswith(f"{package}.")
    ]


def _read(path: Path, classes: Sequence[type] = ()) -> Any:
    try:
        with torch.serialization.safe_globals([*classes]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, EOFError, UnpicklingError, *FOREIGN_ERRORS) as error:
        line = str(error).partition("\n")[0]
        fault = f"{path.name} cannot be read ({type(error).__name__}: {line})"
        raise _refusal(path.parent, fault) from error


def _optimizer_faults(
    optimizer: torch.optim.Optimizer, saved: Any, global_step: int
) -> Iterator[str]:
    """Why this state would not train on as it did; only AdamW's own is known by name."""
    adamw = _kind_of(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    groups, entries = saved["param_groups"], saved["state"]
    numbers = [group["params"] for group in groups]
    own = [group["params"] for group in optimizer.param_groups]
    sizes, own_sizes = [*map(len, numbers)], [*map(len, own)]
    if sizes != own_sizes:
        yield (
            "belongs to other parameters than this run trains: groups of "
            f"{sizes} / {own_sizes}"
        )
    for group in groups if adamw else ():
        values = [group["lr"], group["eps"], group["weight_decay"], *group["betas"]]
        if not all(map(math.isfinite, values)):
            yield "has a group whose lr, betas, eps or weight_decay is not finite"
    params = dict(zip(sum(numbers, []), sum(own, []), strict=True))
    if adamw and global_step and not entries:
        yield f"has no state after {global_step} steps"
    for number, entry in entries.items():
        if adamw and number not in params:
            yield f"has state of parameter {number}, which is in no group"
        own_faults = _adamw_faults(entry, params[number], global_step) if adamw else ()
        for fault in chain(own_faults, _odd_numbers(entry)):
            yield f"is damaged: of parameter {number} {fault}"


def _adamw_faults(entry: Any, param: Tensor, global_step: int) -> Iterator[str]:
    for key in _ADAMW_STATE - entry.keys():
        yield f"{key} is missing"
    for key, value in entry.items():
        if key == "step":
            if not isinstance(value, (int, float)) and value.numel() != 1:
                yield f"step has shape {tuple(value.shape)}"
            step = float(value)
            if not (0 <= step <= global_step and step.is_integer()):
                yield f"step is {step:g} of {global_step}"
            continue
        if not isinstance(value, Tensor) or value.shape != param.shape:
            shape = tuple(value.shape) if isinstance(value, Tensor) else value
            yield f"{key} has shape {shape} instead of {tuple(param.shape)}"
        if not value.is_floating_point():
            yield f"{key} has {value.dtype} numbers"
        # the fused kernel counts on the order of the parameter's bytes
        if param.is_contiguous() and not value.is_contiguous():
            yield f"{key} is not contiguous"


def _scheduler_faults(num_groups: int, saved: Any, global_step: int) -> Iterator[str]:
    for key in saved.keys() & {"base_lrs", "_last_lr"}:
        if len(saved[key]) != num_groups:
            yield f"has {len(saved[key])} {key} for {num_groups} parameter groups"
        if not all(map(math.isfinite, saved[key])):
            yield f"has {key} that are not finite"
    if not 0 <= saved.get("last_epoch", 0) <= global_step:
        yield f"is at step {saved['last_epoch']} of {global_step}"


def _odd_numbers(values: Any, where: str = "") -> Iterator[str]:
    """Where in nested values a tensor has a number that no training leaves."""
    if type(values) is Tensor and values.is_floating_point() and values.numel():
        wide = values.float() if values.itemsize == 1 else values
        # in one pass and without a copy
        low, high = map(float, wide.aminmax())
        if not math.isfinite(high - low):
            yield f"{where} is not finite"
        if where.endswith("_sq") and low < 0:
            yield f"{where} has squares below zero"
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield from _odd_numbers(value, str(key))
    elif isinstance(values, list):
        for value in values:
            yield from _odd_numbers(value, where)


def _kind_of(optimizer: torch.optim.Optimizer) -> type:
    """The class of an optimizer, without what this package puts in front of it."""
    package = __name__.partition(".core.")[0]
    kinds = type(optimizer).__mro__
    return next(kind for kind in kinds if not kind.__module__.startswith(package))
