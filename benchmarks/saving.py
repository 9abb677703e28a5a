"""What a save takes of host memory beyond training: transformers' own way, and in place.

A Mixtral-shaped model of 1.26 GB, whose experts transformers fuses while it loads, is written
by a fresh process for each way, while the system keeps its high-water mark of resident
memory. Files are compared byte for byte. Limit: one expert's largest tensor and 64 MB.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from filecmp import cmp
from pathlib import Path

ALLOWANCE = 64 << 20
SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 7,
    "num_local_experts": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
EXPERT_BYTES = 2 * SHAPE["hidden_size"] * SHAPE["intermediate_size"]


def status(key: str) -> int:
    """Bytes that the system has counted of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(x.split()[1]) for x in lines if x.startswith(f"{key}:"))


def save(folder: str, way: str, shard: str) -> None:
    """Runs in the child: prints peak above the model, size and seconds."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    from axolotl.integrations.protrain.saving import in_place

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    # what the first save of a process imports is not this model's
    tiny = {key: 8 for key in SHAPE} | {"num_attention_heads": 2}
    ways = in_place if way == "in_place" else nullcontext
    with ways():
        for shape, target in ((tiny, f"{folder}/tiny"), (SHAPE, f"{folder}/{way}")):
            model = MixtralForCausalLM(MixtralConfig(**shape))
            Path("/proc/self/clear_refs").write_text("5")
            before, start = status("VmRSS"), time.perf_counter()
            model.save_pretrained(target, max_shard_size=shard)
    seconds, nbytes = (
        time.perf_counter() - start,
        sum(p.nbytes for p in model.parameters()),
    )
    print(status("VmHWM") - before, nbytes, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--shard", default="50GB", help="max_shard_size")
    args = parser.parse_args()
    if args.child:
        save(*args.child)
        return 0
    peaks = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in ("transformers", "in_place"):
            child = [sys.executable, __file__, "--child", folder, way, args.shard]
            line = subprocess.check_output(child, text=True)  # nosec B603
            peak, nbytes, seconds = map(float, line.splitlines()[-1].split())
            peaks[way] = peak
            print(
                f"{way:14} +{peak / 1e6:8.1f} MB beside {nbytes / 1e6:.0f} MB of model, "
                f"{seconds:.2f} s"
            )
        theirs, ours = (Path(folder, way) for way in peaks)
        names = {p.name for p in theirs.iterdir()} | {p.name for p in ours.iterdir()}
        equal = all(cmp(theirs / name, ours / name, shallow=False) for name in names)
    fits = peaks["in_place"] <= EXPERT_BYTES + ALLOWANCE
    print(f"limit {(EXPERT_BYTES + ALLOWANCE) / 1e6:.0f} MB; files equal: {equal}")
    return 0 if equal and fits else 1


if __name__ == "__main__":
    sys.exit(main())
