"""Structural faults of a checkpoint: files that are missing, unreadable or of another run."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from pickle import UnpicklingError  # nosec B403
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

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
_MOMENTS = "exp_avg", "exp_avg_sq"


def fault_of(checkpoint: Path, weights_only: bool = True) -> str | None:
    """Say what is missing in a checkpoint or damaged, by what can be seen without
    reading tensors; None if nothing. If `weights_only`, optimizer.pt and scheduler.pt
    may both be missing."""
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
    """Tell whether a run that resumes from it goes on with its optimizer and
    schedule."""
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
    for name, faults in (
        (OPTIMIZER, _optimizer_faults(own, state)),
        (SCHEDULER, _scheduler_faults(len(own.param_groups), schedule)),
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
    """Classes of the optimizer's package of which objects are in its state."""
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


def _optimizer_faults(optimizer: torch.optim.Optimizer, saved: Any) -> Iterator[str]:
    """Name what a state lacks that this optimizer's `step` counts on."""
    numbers = [group["params"] for group in saved["param_groups"]]
    own = [group["params"] for group in optimizer.param_groups]
    sizes, own_sizes = [*map(len, numbers)], [*map(len, own)]
    if sizes != own_sizes:
        yield (
            "belongs to other parameters than this run trains: groups of "
            f"{sizes} / {own_sizes}"
        )
    if _kind_of(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return
    for number, param in zip(sum(numbers, []), sum(own, []), strict=True):
        entry = saved["state"].get(number, {})
        for key in _MOMENTS if entry else ():
            # the fused kernel writes past the end of one that is too short
            if entry[key].shape != param.shape:
                yield (
                    f"is damaged: of parameter {number} {key} has shape "
                    f"{tuple(entry[key].shape)} instead of {tuple(param.shape)}"
                )


def _scheduler_faults(num_groups: int, saved: Any) -> Iterator[str]:
    for key in saved.keys() & {"base_lrs", "_last_lr"}:
        if len(saved[key]) != num_groups:
            yield f"has {len(saved[key])} {key} for {num_groups} parameter groups"


def _kind_of(optimizer: torch.optim.Optimizer) -> type:
    """The class of an optimizer, without what this package puts in front of it."""
    package = __name__.partition(".core.")[0]
    kinds = type(optimizer).__mro__
    return next(kind for kind in kinds if not kind.__module__.startswith(package))
