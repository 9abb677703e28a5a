"""One system on one case, in this process: `python -m comparison.measure`."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from . import meters
from .cases import CASES
from .setup import Setup
from .systems import REFERENCE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system")
    parser.add_argument("case", choices=CASES)
    parser.add_argument("device", choices=("cpu", "cuda"))
    parser.add_argument("output", type=Path)
    parser.add_argument("started", type=float, help="time.time() of the start")
    parser.add_argument("ready", type=int, help="descriptor; gets a byte before a step")
    given = parser.parse_args()
    torch.manual_seed(0)

    def wait_for_turn() -> None:
        os.write(given.ready, b".")
        sys.stdin.readline()

    measured = measure(
        given.system, given.case, given.device, given.started, wait_for_turn
    )
    given.output.write_text(json.dumps(measured))
    sys.stdout.flush()
    # process groups and worker threads of some systems never end
    os._exit(0)


def measure(
    system: str,
    case_name: str,
    device_type: str,
    started: float,
    wait_for_turn: Callable[[], None],
) -> dict[str, Any]:
    """Train and count.

    Args:
        system: Module in `comparison.systems`.
        case_name: Key of `CASES`.
        device_type: cpu or cuda.
        started: When the process was started, seconds of `time.time`.
        wait_for_turn: Returns when a step may begin.
    """
    case = CASES[case_name]
    device = torch.device(device_type, 0 if device_type == "cuda" else None)
    setup = Setup(case, device, capped=system != REFERENCE)
    if setup.capped:
        meters.limit_memory(device, case.capacity_bytes)
    adapter = importlib.import_module(f".systems.{system}", __package__)
    imported_s = time.time() - started
    training = adapter.open(setup)
    opened_s = time.time() - started
    losses: list[float] = []
    seconds: list[float] = []
    first_s = 0.0
    before = (0, 0)
    for number in range(case.warmup + case.steps):
        batch = setup.batch(number)
        meters.synchronise(device)
        wait_for_turn()
        if number == case.warmup and training.moved is not None:
            before = training.moved()
        start = time.perf_counter()
        if number < case.warmup:
            with training.watch():
                loss = training.step(batch)
        else:
            loss = training.step(batch)
        meters.synchronise(device)
        losses.append(float(loss))
        if number >= case.warmup:
            seconds.append(time.perf_counter() - start)
        if number == 0:
            first_s = time.time() - started
    moved = None
    if training.moved is not None:
        now = training.moved()
        moved = [(now[way] - before[way]) / case.steps for way in (0, 1)]
    peak = meters.allocated_peak(device)
    pinned = meters.torch_pinned_bytes(device) + training.pinned_bytes()
    resident = meters.resident_peak_bytes()
    copied = None
    if device.type == "cuda":
        batch = setup.batch(len(losses))
        copied = meters.copied_bytes(lambda: training.step(batch))
    return {
        "case": asdict(case),
        "system": system,
        "tokens": case.tokens,
        "step_s": seconds,
        "losses": losses,
        "imported_s": imported_s,
        "opened_s": opened_s,
        "first_step_s": first_s,
        "device_allocated_bytes": peak[0] if peak else training.peak_bytes(),
        "device_reserved_bytes": peak[1] if peak else None,
        "host_resident_bytes": resident,
        "host_pinned_bytes": pinned,
        "moved_bytes": moved,
        "copied_bytes": copied,
        "arithmetic": training.arithmetic,
        "config": training.config,
        "record": training.record(),
    }


if __name__ == "__main__":
    main()
