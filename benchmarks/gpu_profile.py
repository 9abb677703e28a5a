"""Where the seconds of a paged step on a GPU go: compute, copies, and what waits for what.

Trains a case of `compare.py` under torch's profiler and prints, for one step, how long
each stream was busy, for how long compute waited while a copy ran and while nothing did,
the rate of the copies, and the kernels and ranges with the largest shares.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from comparison import meters
from comparison.cases import CASES
from comparison.setup import Setup
from comparison.systems import ours

Interval = tuple[float, float]
NUM_ROWS = 14
SHORT_US = 20.0
"""Gaps below this are launches, not waits."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals that touch."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def total(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def overlap(gap: Interval, busy: list[Interval]) -> float:
    """How much of a gap other work covers."""
    return sum(max(0.0, min(gap[1], e) - max(gap[0], b)) for b, e in busy)


def summary(events: list[dict[str, Any]], wall_s: float, num_steps: int) -> list[str]:
    """Lines about one step of several."""
    kernels: list[Interval] = []
    copies: dict[str, list[Interval]] = {"HtoD": [], "DtoH": [], "DtoD": []}
    nbytes: Counter[str] = Counter()
    by_name: Counter[str] = Counter()
    ranges: Counter[str] = Counter()
    for event in events:
        if "dur" not in event:
            continue
        span = (event["ts"], event["ts"] + event["dur"])
        category, name = event.get("cat"), event["name"]
        if category == "kernel":
            kernels.append(span)
            by_name[name[:90]] += event["dur"]
        elif category == "gpu_memcpy":
            for way, spans in copies.items():
                if way in name:
                    spans.append(span)
                    nbytes[way] += event["args"].get("bytes", 0)
        elif name.startswith("protrain::") and category == "user_annotation":
            ranges[name] += event["dur"]
    per_step = 1e-3 / num_steps
    busy = union(kernels)
    gaps = [(a[1], b[0]) for a, b in pairwise(busy)]
    link = union([*copies["HtoD"], *copies["DtoH"]])
    long_gaps = [gap for gap in gaps if gap[1] - gap[0] > SHORT_US]
    waits = sum(overlap(gap, link) for gap in long_gaps)
    lines = [
        f"step                       {wall_s / num_steps * 1e3:9.1f} ms",
        f"kernels                    {total(busy) * per_step:9.1f} ms",
        f"gaps while a copy runs     {waits * per_step:9.1f} ms",
        f"gaps with nothing running  {(total(long_gaps) - waits) * per_step:9.1f} ms",
        f"gaps below {SHORT_US:g} us          "
        f"{(total(gaps) - total(long_gaps)) * per_step:9.1f} ms",
    ]
    for way, spans in copies.items():
        merged = union(spans)
        if merged:
            rate = nbytes[way] / total(merged) * 1e-3
            lines.append(
                f"{way}                       {total(merged) * per_step:9.1f} ms, "
                f"{nbytes[way] / num_steps / 2**30:.2f} GiB, {rate:.1f} GB/s, "
                f"{len(spans) / num_steps:.0f} copies"
            )
    lines.append("ranges of the host thread, ms per step")
    lines += [f"  {us * per_step:9.1f}  {name}" for name, us in ranges.most_common()]
    lines.append("kernels, ms per step")
    lines += [
        f"  {us * per_step:9.1f}  {name}" for name, us in by_name.most_common(NUM_ROWS)
    ]
    lines.append("longest gaps, ms, and how much of each a copy covers")
    lines += [
        f"  {(end - begin) * 1e-3:9.2f}  {overlap((begin, end), link) * 1e-3:9.2f}"
        for begin, end in sorted(gaps, key=lambda gap: gap[0] - gap[1])[:8]
    ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", default="lora-8b-1k", choices=CASES)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--trace", type=Path, help="keep the trace, as .json.gz")
    args = parser.parse_args()
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    setup = Setup(CASES[args.case], torch.device(device_type, 0))
    meters.limit_memory(setup.device, setup.case.capacity_bytes)
    training = ours.open(setup)
    try:
        for number in range(3):
            training.step(setup.batches(number))
    except torch.OutOfMemoryError as error:
        print(
            error,
            torch.cuda.memory_summary(),
            json.dumps(training.record(), default=str),
        )
        sys.exit(1)
    meters.synchronise(setup.device)
    start = time.perf_counter()
    for number in range(3, 3 + args.steps):
        training.step(setup.batches(number))
    meters.synchronise(setup.device)
    plain_s = time.perf_counter() - start
    with torch.profiler.profile() as profile:
        start = time.perf_counter()
        for number in range(5, 5 + args.steps):
            training.step(setup.batches(number))
        meters.synchronise(setup.device)
        wall_s = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        path = args.trace or Path(folder) / "trace.json.gz"
        profile.export_chrome_trace(str(path))
        with gzip.open(path, "rt") as file:
            events = json.load(file)["traceEvents"]
    print(f"{args.case}: {plain_s / args.steps * 1e3:.1f} ms per step without profiler")
    print("\n".join(summary(events, wall_s, args.steps)))
    print(json.dumps(training.record(), default=str, indent=1))


if __name__ == "__main__":
    main()
