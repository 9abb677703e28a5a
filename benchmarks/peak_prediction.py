"""How far predicted peaks are from bytes counted in real training steps.

Every row trains a small model for three steps on the CPU device and counts each storage
that an operator makes. The counter shares no code with the prediction; both are those
of the tests. `--preferences` trains through Axolotl, whose trainers the losses are of.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "protrain"))

from axolotl_jobs import BASE, LORA, PAGED, Workers, job, overrides  # noqa: E402
from counted_steps import Peaks, Step, peaks  # noqa: E402
from counting_plugin import COUNTED_FILE  # noqa: E402
from matrix_composition import PREFERRED, QLORA  # noqa: E402
from tiny_models import FAMILIES, NUM_BLOCKS  # noqa: E402

from axolotl.integrations.protrain.core.types import Placement  # noqa: E402

LIMIT = 0.03
"""Relative error that the project promises."""

PRECISIONS = {
    "lora": ("fp32", "bf16"),
    "full": ("fp32", "mixed", "pure"),
    "qlora": ("fp32", "bf16"),
    "lora8": ("fp32", "bf16"),
}
PLANS = ("none", "half", "all")


BASES = {
    "full": {},
    "lora": LORA,
    "qlora": QLORA,
    "lora8": {**LORA, "load_in_8bit": True, "bf16": True},
}
PLAN_KEYS = {
    "none": overrides(0, 2),
    "half": overrides(NUM_BLOCKS // 2, 2, NUM_BLOCKS // 2),
    "all": overrides(NUM_BLOCKS, 0, NUM_BLOCKS),
}
COUNTED = {"plugins": [*BASE["plugins"], "counting_plugin.CountingPlugin"]}


def preferences(accumulation: int) -> Iterator[tuple[str, Peaks]]:
    """Every objective over every base and plan, as `axolotl train` runs it."""
    steps = {"max_steps": 3, "gradient_accumulation_steps": accumulation}
    with TemporaryDirectory() as folder, closing(Workers(Path(folder))) as workers:
        jobs = {
            f"{objective} {base}-{accumulation}x{BASE['micro_batch_size']} {plan}": job(
                "llama", PAGED, COUNTED, BASES[base], PLAN_KEYS[plan], keys, steps
            )
            for (objective, keys), base, plan in product(
                PREFERRED.items(), BASES, PLANS
            )
        }
        workers.expect(jobs.values())
        for name, wanted in jobs.items():
            result = workers.run(wanted)
            if result.error:
                raise RuntimeError(f"{name}: {result.error}")
            predicted = result.report["device_bytes"]
            counted = json.loads((result.output / COUNTED_FILE).read_text())["step"]
            phases = predicted["phases"]
            at = max(phases, key=phases.__getitem__)
            yield name, Peaks(predicted["peak"], counted, at, "")


def steps(args: argparse.Namespace) -> Iterator[tuple[str, Peaks]]:
    """Every family, method, precision and plan that was asked for."""
    for family, method in product(
        args.family or [*FAMILIES, "t5"], args.method or PRECISIONS
    ):
        for precision, plan in product(PRECISIONS[method], PLANS):
            step = Step(
                family,
                method,
                args.rows,
                args.length,
                resident=plan,
                recompute=plan,
                accumulation=args.accumulation,
                precision=precision,
                compiled=args.compiled,
            )
            yield step.name, peaks(step)
        if method == "full":
            # gradients of the device beside state of the host
            apart = {"swap": "all", "outside": Placement.OPTIMIZER_OFFLOADED}
            step = replace(step, resident="half", recompute="none", **apart)
            yield step.name, peaks(step)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", choices=[*FAMILIES, "t5"], action="append")
    parser.add_argument("--method", choices=PRECISIONS, action="append")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--compiled", action="store_true", help="each block by itself")
    parser.add_argument("--preferences", action="store_true")
    args = parser.parse_args()
    print(f"{'training':72} {'predicted':>11} {'counted':>11} {'error':>8}  at")
    worst = ("", 0.0)
    rows = preferences(args.accumulation) if args.preferences else steps(args)
    for name, found in rows:
        print(
            f"{name:72} {found.predicted_bytes:11,} {found.counted_bytes:11,} "
            f"{found.error:+8.3%}  {found.predicted_at}",
            flush=True,
        )
        worst = max(worst, (name, found.error), key=lambda row: abs(row[1]))
    print(f"worst: {worst[1]:+.3%}, {worst[0]}; limit {LIMIT:.0%}")
    return int(abs(worst[1]) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
