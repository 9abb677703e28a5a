"""What this machine gives: the rates that plans are made with, measured.

Prints one column of medians for each round, so that a noisy machine shows, and, with
`--gpu`, what the table of data sheets says.
"""

from __future__ import annotations

import argparse
import dataclasses
import time

import torch

from axolotl.integrations.protrain.core.errors import ConfigError
from axolotl.integrations.protrain.core.planner.cards import gpu_hardware
from axolotl.integrations.protrain.core.planner.hardware import measure_hardware
from axolotl.integrations.protrain.core.types import Hardware

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# name: scale and unit
FIGURES = {
    "flops_16": (1e-9, "GFLOP/s"),
    "flops_32": (1e-9, "GFLOP/s"),
    "memory_bytes_s": (1e-9, "GB/s"),
    "kernel_s": (1e6, "µs"),
    "fetch_bytes_s": (1e-9, "GB/s"),
    "offload_bytes_s": (1e-9, "GB/s"),
    "fetch_both_bytes_s": (1e-9, "GB/s"),
    "offload_both_bytes_s": (1e-9, "GB/s"),
    "adam_bytes_s": (1e-9, "GB/s"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=default)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--matmul",
        type=int,
        nargs=3,
        metavar=("ROWS", "INNER", "COLUMNS"),
        help="size of the products (default: by device)",
    )
    parser.add_argument(
        "--weights", choices=DTYPES, default="bf16", help="what host AdamW updates"
    )
    parser.add_argument("--gpu", help="NAME or NAME:GiB, to compare with")
    parser.add_argument("--link", help="of that GPU, such as pcie4x8")
    args = parser.parse_args()
    try:
        looked_up = (
            gpu_hardware(args.gpu, args.link, host_bytes=0) if args.gpu else None
        )
    except ConfigError as error:
        parser.error(str(error))

    columns: list[tuple[str, Hardware]] = []
    for _ in range(args.rounds):
        start = time.perf_counter()
        measured = measure_hardware(
            args.device,
            matmul=tuple(args.matmul) if args.matmul else None,
            weight_dtype=DTYPES[args.weights],
        )
        columns.append((f"{time.perf_counter() - start:.2f} s", measured))
    if looked_up:
        columns.append((looked_up.name, looked_up))

    threads = torch.get_num_threads()
    print(f"{columns[0][1].name}, torch {torch.__version__}, {threads} threads")
    print(f"{'measured in':30}" + "".join(f"{name:>12}" for name, _ in columns))
    for figure, (scale, unit) in FIGURES.items():
        values = (dataclasses.asdict(hardware)[figure] for _, hardware in columns)
        print(f"{figure:22}{unit:>8}" + "".join(f"{v * scale:12.4g}" for v in values))


if __name__ == "__main__":
    main()
