"""One system on one case, in this process."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from . import meters
from .cases import Case
from .setup import Setup, Training
from .systems import UNCAPPED

MKL_FUNCTIONS = ("cos", "sin", "exp", "log", "sqrt", "tanh", "erf")
"""Elementwise ones that torch leaves to MKL on a CPU, as far as models use them."""


def measure(
    system: str,
    case: Case,
    device_type: str,
    started: float,
    wait_for_turn: Callable[[int | None], None],
) -> dict[str, Any]:
    """Train and count.

    Args:
        system: Module in `comparison.systems`.
        case: What it trains.
        device_type: cpu or cuda.
        started: When the process was started, seconds of `time.time`.
        wait_for_turn: Is told the device's peak so far; returns when a step may begin.
    """
    device = torch.device(device_type, 0 if device_type == "cuda" else None)
    for name in MKL_FUNCTIONS:
        # a first call by several threads may take a coarser kernel (pytorch#188792)
        getattr(torch.ones(1), name)()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # else even two plain runs differ; all systems pay for it alike
        # (told to warn only, torch leaves flash attention's backward as it is)
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        # its backward adds up in any order, whatever torch is told
        torch.backends.cuda.enable_cudnn_sdp(False)
    setup = Setup(case, device, capped=system not in UNCAPPED)
    if setup.capped:
        meters.limit_memory(device, case.capacity_bytes)
    adapter = importlib.import_module(f".systems.{system}", __package__)
    imported_s = time.time() - started
    training = adapter.open(setup)
    opened_s = time.time() - started

    def device_peak() -> int | None:
        peak = meters.allocated_peak(device)
        return peak[0] if peak else training.peak_bytes()

    wait_for_turn(None)
    losses = [_step(setup, training, 0)[0]]
    first_s = time.time() - started
    for number in range(1, case.warmup):
        wait_for_turn(device_peak())
        losses.append(_step(setup, training, number)[0])
    before = training.moved() if training.moved else None
    seconds = []
    for number in range(case.warmup, case.warmup + case.steps):
        training.between()
        wait_for_turn(device_peak())
        loss, step_s = _step(setup, training, number, watched=False)
        losses.append(loss)
        seconds.append(step_s)
    moved = None
    if training.moved is not None and before is not None:
        pairs = zip(training.moved(), before, strict=True)
        moved = [(now - then) / case.steps for now, then in pairs]
    peak = meters.allocated_peak(device)
    pinned = meters.torch_pinned_bytes(device) + training.pinned_bytes()
    resident = meters.resident_peak_bytes()
    copied = None
    if device.type == "cuda":
        batches = setup.batches(len(losses))
        copied = meters.copied_bytes(partial(training.step, batches))
    return {
        "case": asdict(case),
        "system": system,
        "tokens": case.tokens,
        "step_s": seconds,
        "losses": losses,
        "imported_s": imported_s,
        "opened_s": opened_s,
        "first_step_s": first_s,
        "device_allocated_bytes": device_peak(),
        "device_reserved_bytes": peak[1] if peak else None,
        "host_resident_bytes": resident,
        "host_pinned_bytes": pinned,
        "moved_bytes": moved,
        "copied_bytes": copied,
        "arithmetic": training.arithmetic,
        "config": training.config,
        "record": training.record(),
    }


def _step(
    setup: Setup, training: Training, number: int, watched: bool = True
) -> tuple[float, float]:
    """Loss and seconds of one step."""
    batches = setup.batches(number)
    meters.synchronise(setup.device)
    start = time.perf_counter()
    with training.watch() if watched else nullcontext():
        loss = training.step(batches)
    meters.synchronise(setup.device)
    return float(loss), time.perf_counter() - start
