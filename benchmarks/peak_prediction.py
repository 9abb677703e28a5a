"""How far predicted peaks are from bytes counted in real training steps.

Every row trains a small model for two steps on the CPU device and counts each storage
that an operator makes. The counter shares no code with the prediction; both are those
of the tests.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "protrain"))

from counted_steps import Step, peaks  # noqa: E402
from tiny_models import FAMILIES  # noqa: E402

LIMIT = 0.03
"""Relative error that the project promises."""

PRECISIONS = {
    "lora": ("fp32", "bf16"),
    "full": ("fp32", "mixed", "pure"),
    "qlora": ("fp32", "bf16"),
    "lora8": ("fp32", "bf16"),
}
PLANS = ("none", "half", "all")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", choices=[*FAMILIES, "t5"], action="append")
    parser.add_argument("--method", choices=PRECISIONS, action="append")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--accumulation", type=int, default=2)
    args = parser.parse_args()
    print(f"{'training':72} {'predicted':>11} {'counted':>11} {'error':>8}  at")
    worst = ("", 0.0)
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
            )
            found = peaks(step)
            print(
                f"{step.name:72} {found.predicted_bytes:11,} {found.counted_bytes:11,} "
                f"{found.error:+8.3%}  {found.predicted_at}",
                flush=True,
            )
            worst = max(worst, (step.name, found.error), key=lambda row: abs(row[1]))
    print(f"worst: {worst[1]:+.3%}, {worst[0]}; limit {LIMIT:.0%}")
    return int(abs(worst[1]) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
