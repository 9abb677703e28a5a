"""Train a small Llama with `axolotl train` twice, paged and plain, and compare.

Builds its inputs under examples/.demo on the first run: a Llama with random weights,
and a tokenizer and a data set made from the docstrings of Python's standard library.
Nothing is downloaded. Exits with 1 when the two runs differ (on a CPU: in any bit; on
several ranks by more than another order of sums makes), or when the device peak exceeds
the budget.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "examples" / ".demo"
YAML = ROOT / "examples" / "demo-cpu.yaml"
NUM_ROWS = 400
VOCAB_SIZE = 4096
# The 160 MiB of the YAML and what a plan takes kernels to need: 200 MiB and 2 %.
GPU_BUDGET = "368MiB"
# A GPU's AdamW and the host's round differently in the last bits.
RELATIVE_TOLERANCE = 1e-3 if torch.cuda.is_available() else 0.0


def docstrings() -> Iterator[str]:
    """The longer docstrings of the standard library's top modules, in a fixed order."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node)
                if text and len(text) > 200:
                    yield text


def tokenizer_of(texts: list[str]) -> Any:
    """A tokenizer of `VOCAB_SIZE` byte pairs, trained on these texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[*special.values()], show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **special)


def build_inputs() -> None:
    """Write the model, the tokenizer and the data, unless an earlier run did."""
    data = WORK / "data.jsonl"
    if data.exists():
        return
    # Seconds to import, and only the first run needs them.
    from transformers import LlamaConfig, LlamaForCausalLM

    texts = list(docstrings())
    tokenizer = tokenizer_of(texts)
    tokenizer.save_pretrained(WORK / "model")

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=12,
        num_attention_heads=6,
        max_position_embeddings=256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(WORK / "model")

    rows = texts[:: max(1, len(texts) // NUM_ROWS)][:NUM_ROWS]
    data.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows), "utf-8")


def configs(ranks: int) -> tuple[Path, Path]:
    """The YAML as it runs on this machine, and the same without paging."""
    paged = yaml.safe_load(YAML.read_text("utf-8"))
    if torch.cuda.is_available():
        paged["protrain_capacity_bytes"] = GPU_BUDGET
    plain = paged | {
        "protrain_auto_memory": False,
        "output_dir": str((WORK / "plain").relative_to(ROOT)),
    }
    if ranks > 1 and not torch.cuda.is_available():
        plain["plugins"] = [*paged["plugins"], "gloo_plugin.GlooPlugin"]
    paths = WORK / "paged.yaml", WORK / "plain.yaml"
    for path, config in zip(paths, (paged, plain), strict=True):
        path.write_text(yaml.safe_dump(config, sort_keys=False), "utf-8")
    return paths


def train(config: Path, steps: int, ranks: int = 1) -> Path:
    """Run `axolotl train` on `config`; returns its output folder."""
    output = ROOT / yaml.safe_load(config.read_text("utf-8"))["output_dir"]
    shutil.rmtree(output, ignore_errors=True)
    axolotl = str(Path(sys.executable).parent / "axolotl")
    command = [axolotl, "train", str(config.relative_to(ROOT)), f"--max-steps={steps}"]
    if ranks > 1:
        command += ["--launcher=torchrun", "--", f"--nproc_per_node={ranks}"]
    else:
        command.append("--launcher=python")  # the default one imports everything twice
    print(f"\n$ {' '.join(command)}", flush=True)
    defaults = {"HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1"}
    if ranks == 1:
        defaults["CUDA_VISIBLE_DEVICES"] = "0"
    elif not torch.cuda.is_available():
        defaults["ACCELERATE_USE_CPU"] = "true"  # else each rank trains for itself
    # Else MKL rounds by the address of a weight, and the two runs' addresses differ.
    defaults["MKL_CBWR"] = "COMPATIBLE"
    environment = defaults | dict(os.environ)
    folders = [str(ROOT / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(folders)
    # where axolotl looks for torchrun, also in an environment that is not activated
    programs = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    environment["PATH"] = os.pathsep.join(programs)
    run = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if run.returncode:
        sys.exit(f"axolotl train stopped with exit code {run.returncode}")
    return output


def logged_steps(output: Path, steps: int) -> list[dict[str, float]]:
    """What the trainer logged at each step; it rounds neither loss nor grad norm."""
    path = output / f"checkpoint-{steps}" / "trainer_state.json"
    history = json.loads(path.read_text("utf-8"))["log_history"]
    entries = [entry for entry in history if "loss" in entry]
    if len(entries) != steps:
        sys.exit(f"{path} has the losses of {len(entries)} steps out of {steps}")
    return entries


def mebibytes(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def unseen_bytes(report: dict[str, Any]) -> int:
    """What the plan keeps for kernels; no tensor, so no measured peak counts it."""
    return report["device_bytes"]["terms"]["context and workspaces"]


def device_bytes(report: dict[str, Any]) -> tuple[int, int]:
    """The highest sum of tensors on the device, and the budget for them."""
    budget = report["device_bytes"]["budget"] - unseen_bytes(report)
    return report["measured"]["device_peak_bytes"], budget


def memory_table(report: dict[str, Any]) -> Table:
    """What moved and how much memory it took, beside what the plain run needs."""
    plan, measured = report["plan"], report["measured"]
    knobs = ("n_persist", "n_buffer", "n_swap", "n_checkpoint")
    # fp32 weights, gradients and the two moments of AdamW.
    plain_bytes = 4 * (WORK / "model" / "model.safetensors").stat().st_size
    table = Table(title="What was paged", show_header=False)
    table.add_row("mode, ranks", f"{plan['mode']}, {plan['num_ranks']}")
    table.add_row("plan", " ".join(f"{knob}={plan[knob]}" for knob in knobs))
    resident = f"{plan['n_persist']} of {plan['num_chunks']}"
    table.add_row("chunks of blocks that stay on the device", resident)
    table.add_row("fetched to the device", mebibytes(measured["fetched_bytes"]))
    table.add_row("offloaded to the host", mebibytes(measured["offloaded_bytes"]))
    table.add_row("host arena", mebibytes(measured["host_arena_bytes"]))
    predicted, unseen = report["device_bytes"]["peak"], unseen_bytes(report)
    peak, budget = device_bytes(report)
    table.add_row("device peak, predicted", mebibytes(predicted - unseen))
    table.add_row("device peak", mebibytes(peak))
    table.add_row("device budget", mebibytes(budget))
    if unseen:
        table.add_row("kept for kernels beside it", mebibytes(unseen))
    table.add_row("plain run, activations not counted", mebibytes(plain_bytes))
    table.add_row("one step", f"{measured['step_s']:.2f} s")
    table.add_row("waited for copies, all steps", f"{measured['stall_s']:.2f} s")
    return table


def parity_table(
    paged: list[dict[str, float]], plain: list[dict[str, float]]
) -> tuple[Table, bool]:
    """Both runs step by step, and whether all their numbers agree."""
    table = Table("step", title="Paged beside plain")
    for heading in ("loss", "plain", "differ", "grad_norm", "plain", "differ"):
        table.add_column(heading, justify="right")
    agree = True
    for ours, theirs in zip(paged, plain, strict=True):
        cells = [str(ours["step"])]
        for name in ("loss", "grad_norm"):
            gap = abs(ours[name] - theirs[name])
            agree &= gap <= RELATIVE_TOLERANCE * abs(theirs[name])  # false for a NaN
            cells += [f"{ours[name]:.8g}", f"{theirs[name]:.8g}"]
            cells.append("equal" if gap == 0 else f"{gap:.1e}")
        table.add_row(*cells)
    return table, agree


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps per run")
    parser.add_argument("--ranks", type=int, default=1, help="processes of each run")
    options = parser.parse_args()
    steps: int = options.steps
    ranks: int = options.ranks

    build_inputs()
    paged, plain = (train(path, steps, ranks) for path in configs(ranks))

    report = json.loads((paged / "protrain" / "report.json").read_text("utf-8"))
    parity, agree = parity_table(logged_steps(paged, steps), logged_steps(plain, steps))
    peak, budget = device_bytes(report)
    console = Console()
    console.print(memory_table(report), parity)
    if not agree:
        console.print("[bold red]FAILED:[/] the paged run computed other numbers")
    if peak > budget:
        console.print(
            f"[bold red]FAILED:[/] {mebibytes(peak - budget)} over the budget"
        )
    if not agree or peak > budget:
        return 1
    console.print(
        f"[bold green]OK:[/] the same numbers as without paging, with {mebibytes(peak)}"
        f" on the device (budget {mebibytes(budget)})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
