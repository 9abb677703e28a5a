"""What a save takes of host memory and of training's time.

Memory: a Mixtral-shaped model of 1.26 GB, whose experts transformers fuses while it loads, is written
by a fresh process for each way, while the system keeps its high-water mark of resident
memory. Files are compared byte for byte. Limit: one expert's largest tensor and 64 MB.

Time (`--time`): a full fine-tune of a Llama of 152 M parameters in fp32 with AdamW, everything
paged, saves weights and optimizer state in turns while training waits and beside it. The call
of a save beside training copies all of it; that the steps until its end share the cores with
the writer is shown beside it. Limit: a third of the save that training waits for.
What hashing takes of a save is that of `axolotl protrain verify` on it.
"""

from __future__ import annotations

import argparse
import statistics
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


def stalls(rounds: int, room: int) -> int:
    """Runs in this process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from axolotl.integrations.protrain.core.checkpoint import (
        Snapshot,
        differences,
        publish,
        restore,
        staged,
    )
    from axolotl.integrations.protrain.core.engine.device import CpuDevice
    from axolotl.integrations.protrain.core.engine.session import Session
    from axolotl.integrations.protrain.core.layout import build_layout
    from axolotl.integrations.protrain.core.planner.plans import make_plan
    from axolotl.integrations.protrain.core.types import Placement
    from axolotl.integrations.protrain.saving import in_place, later

    torch.manual_seed(0)
    shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 11}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4096, **shape, **heads))
    layout = build_layout(model)
    plan = make_plan(layout, 0, 2, 0, 0, False, Placement.OPTIMIZER_OFFLOADED)
    session = Session(model, layout, plan, CpuDevice())
    optimizer = session.wrap_optimizer(
        torch.optim.AdamW(model.parameters(), fused=True)
    )
    tokens = torch.randint(4096, (1, 192))

    def step() -> float:
        start = time.perf_counter()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    def save(run: Path, beside: bool) -> tuple[float, float, int]:
        """Seconds of the call, of hashing or by which steps were longer, and how many."""
        session.settle()
        start = time.perf_counter()
        checkpoint = run / "checkpoint-1"
        restore(run)
        folder = staged(checkpoint)
        snapshot = Snapshot(room)
        with in_place(), later(snapshot, folder) if beside else nullcontext():
            model.save_pretrained(folder)
            torch.save(optimizer.state_dict(), str(folder / "optimizer.pt"))
        if not beside:
            publish(checkpoint)
            waited = time.perf_counter() - start
            assert differences(checkpoint) == []
            hashing = time.perf_counter() - start - waited
            return waited, hashing, 0
        snapshot.start(checkpoint, lambda: None)
        call = time.perf_counter() - start
        times = [step()]
        while not snapshot.over:
            times.append(step())
        snapshot.check()
        return call, sum(times) - len(times) * median, len(times)

    [step() for _ in range(3)]
    median = statistics.median(step() for _ in range(7))
    print(f"step {median:.2f} s")
    shares = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        for _ in range(rounds):
            waited, hashing, _ = save(Path(folder), beside=False)
            [step() for _ in range(2)]
            call, longer, steps = save(Path(folder), beside=True)
            shares.append(call / waited)
            print(
                f"waiting {waited:.2f} s, of which {hashing:.2f} s hash; beside: call "
                f"{call:.3f} s ({shares[-1]:.1%}), {steps} steps {longer:.1f} s longer",
                flush=True,
            )
    session.close()
    share = statistics.median(shares)
    print(f"median {share:.1%}")
    return 0 if share <= 1 / 3 else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--time", action="store_true", help="stalls, not memory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--room", type=int, default=4 << 30, help="bytes for copies")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--shard", default="50GB", help="max_shard_size")
    args = parser.parse_args()
    if args.child:
        save(*args.child)
        return 0
    if args.time:
        return stalls(args.rounds, args.room)
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
    print(
        f"in place +{peaks['in_place'] / 1e6:.0f} MB, limit "
        f"{(EXPERT_BYTES + ALLOWANCE) / 1e6:.0f} MB; files equal: {equal}"
    )
    return 0 if equal and fits else 1


if __name__ == "__main__":
    sys.exit(main())
