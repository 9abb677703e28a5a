"""Host memory while a model is loaded and opened: at most the model and one shard?

Writes a Llama with random weights in safetensors shards, then, in a fresh process for
each case, loads it with `from_pretrained` on the CPU and opens a session with every
chunk paged, while this process samples the child's resident memory. What counts is
above the child's own after its imports, and without the slots, which on the CPU device
lie in host memory too.

    limit = model + largest shard + 5 % of the model

`fp8` is the same model in FP8 with scales for blocks, frozen: its files, not its values,
are the model of the limit, and the room in which it is unpacked counts as slots.

`anonymous` is memory of the process, `file` are pages of the mapped shards, which the
system may drop and read again. The child's high-water mark is read at the end as well,
so that nothing hides between two samples.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INTERVAL_S = 0.005
ALLOWANCE = 0.05
CASES = ("frozen", "full", "fp8")
UNPACKING_BYTES = (4 + 2) << 23
"""Numbers of a piece in fp32, and two buffers with its codes."""


@dataclass(frozen=True)
class Sample:
    """Resident bytes of a process at one time."""

    phase: str
    anonymous: int
    file: int

    @property
    def total(self) -> int:
        return self.anonymous + self.file


# the child


def say(phase: str) -> None:
    """Tell the parent which phase begins and wait until it knows."""
    # in one piece also where Python does not buffer: the parent reads without waiting
    print(f"{phase}\n", end="", flush=True)
    sys.stdin.readline()


def load_and_open(folder: str, trained: str) -> None:
    """What a run does before its first step. Runs in the child."""
    import torch
    import transformers

    from axolotl.integrations.protrain.core.engine.device import CpuDevice
    from axolotl.integrations.protrain.core.engine.session import Session
    from axolotl.integrations.protrain.core.layout import build_layout
    from axolotl.integrations.protrain.core.planner.plans import make_plan
    from axolotl.integrations.protrain.loading import keep_packed

    # what a first model of a process loads and builds is not this model's
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    gc.collect()
    say("baseline")
    time.sleep(0.1)
    say("load")
    unpacks: dict[str, Any] = {}
    if trained == "fp8":
        unpacked = transformers.FineGrainedFP8Config(dequantize=True)
        unpacks = {"quantization_config": unpacked}
    with keep_packed():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, device_map="cpu", **unpacks
        )
    say("loaded")
    model.requires_grad_(trained == "full")
    layout = build_layout(model)
    plan = make_plan(layout, 0, 2, 0, 0, False)
    say("open")
    session = Session(model, layout, plan, CpuDevice())
    say("opened")
    time.sleep(0.1)
    say("close")
    session.close()
    say("closed")
    time.sleep(0.1)
    say("end")


TINY = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


# the parent


def status(pid: int) -> dict[str, int]:
    """Memory fields of /proc/<pid>/status in bytes."""
    fields = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            fields[name] = int(value.split()[0]) * 1024
    return fields


def watch(folder: Path, trained: str) -> tuple[list[Sample], int]:
    """Run the child and sample it; its samples and its high-water mark."""
    command = [sys.executable, __file__, "--child", str(folder), "--trained", trained]
    samples: list[Sample] = []
    phase, peak = "start", 0
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,
        ) as child,
    ):
        assert child.stdin and child.stdout
        os.set_blocking(child.stdout.fileno(), False)
        while child.poll() is None and phase != "end":
            memory = status(child.pid)
            if "RssAnon" in memory:
                file = memory["RssFile"] + memory["RssShmem"]
                samples.append(Sample(phase, memory["RssAnon"], file))
                peak = memory["VmHWM"]
            said = child.stdout.read()
            if said:
                phase = said.decode().split()[-1]
                child.stdin.write(b"\n")
            time.sleep(INTERVAL_S)
        if child.poll() is None:
            child.stdin.write(b"\n")
        if child.wait():
            errors.seek(0)
            raise SystemExit(errors.read().decode())
    return samples, peak


def write_model(folder: Path, args: argparse.Namespace) -> None:
    """A Llama in bf16 with cheap random weights, in shards."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = transformers.LlamaConfig(
        vocab_size=8192,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 11 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    for param in model.parameters():
        param.data.uniform_(-0.05, 0.05)
    model.save_pretrained(folder, max_shard_size=args.shard)


def pack(folder: Path, packed: Path) -> None:
    """Write the blocks' matrices of a model in FP8, with scales for blocks of 128."""
    import json

    import torch
    from safetensors.torch import load_file, save_file

    packed.mkdir()
    names: dict[str, str] = {}
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        for name in [name for name in weights if "_proj" in name]:
            shape = [size // 128 for size in weights[name].shape]
            weights[name] = (weights[name] * 4096).to(torch.float8_e4m3fn)
            weights[f"{name}_scale_inv"] = torch.full(shape, 1 / 4096)
        save_file(weights, packed / file.name, {"format": "pt"})
        names |= dict.fromkeys(weights, file.name)
    index = json.dumps({"metadata": {}, "weight_map": names})
    (packed / "model.safetensors.index.json").write_text(index)
    config = json.loads((folder / "config.json").read_text())
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config["quantization_config"] = settings | {"activation_scheme": "dynamic"}
    (packed / "config.json").write_text(json.dumps(config))


def report(trained: str, samples: list[Sample], peak: int, folder: Path) -> bool:
    """Print one case; True if the limit holds."""
    shards = [file.stat().st_size for file in folder.glob("*.safetensors")]
    model, shard = sum(shards), max(shards)
    baseline = max(s.total for s in samples if s.phase == "baseline")
    slots = slot_share(folder) + UNPACKING_BYTES * (trained == "fp8")
    limit = model + shard + int(ALLOWANCE * model)
    print(
        f"\n{trained}: model {mb(model)}, largest of {len(shards)} shards {mb(shard)}"
    )
    print(f"baseline {mb(baseline)}, slots {mb(slots)}, limit {mb(limit)}")
    print(f"{'phase':10}{'peak':>10}{'anonymous':>12}{'file':>10}")
    for phase in ("load", "loaded", "open", "opened", "close", "closed"):
        seen = [s for s in samples if s.phase == phase]
        if seen:
            top = max(seen, key=lambda s: s.total)
            print(f"{phase:10}{mb(top.total - baseline):>10}", end="")
            print(f"{mb(top.anonymous):>12}{mb(top.file):>10}")
    above = peak - baseline - slots
    verdict = "holds" if above <= limit else "EXCEEDED"
    print(f"high-water mark less baseline and slots {mb(above)}: limit {verdict}")
    return above <= limit


def slot_share(folder: Path) -> int:
    """Bytes of the two slots: two blocks."""
    import json

    config = json.loads((folder / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    return 2 * 2 * (4 * hidden * hidden + 3 * hidden * inner + 2 * hidden)


def mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f} MB"


def model_parser(description: str | None) -> argparse.ArgumentParser:
    """Options of `write_model`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=11)
    parser.add_argument("--shard", default="250MB", help="max_shard_size")
    return parser


def arguments() -> argparse.Namespace:
    parser = model_parser(__doc__)
    parser.add_argument("--trained", choices=CASES)
    parser.add_argument("--child", metavar="FOLDER", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.child:
        load_and_open(args.child, args.trained)
        return
    cases = (args.trained,) if args.trained else CASES
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), args)
        os.sync()
        kept = []
        for case in cases:
            of_it = Path(folder)
            if case == "fp8":
                pack(of_it, of_it / case)
                of_it /= case
            kept.append(report(case, *watch(of_it, case), of_it))
    sys.exit(0 if all(kept) else 1)


if __name__ == "__main__":
    main()
