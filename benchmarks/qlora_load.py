"""Memory while Axolotl loads a base in 4 bits: does the bf16 model never exist?

Writes a Llama with random bf16 weights in safetensors shards and runs `axolotl train`
on it in a fresh process, QLoRA with every block paged, while this process samples the
child's anonymous memory every 5 ms. Pages of the mapped shards are not counted: the
system may drop them and read them again. What counts is above the child's own after
its imports, after it has quantised a tiny model and prepared its data. On the CPU
device the bytes of the device lie in host memory too and are taken off: slots, and
weights outside of blocks, which never page. A first run leaves what the planner measures
in a cache, so that the second one, which counts, measures nothing: a timed block computes
on the device, whose workspaces nobody takes off.

Three statements are checked when the session is open, before the first step:

    device   storages behind paged parameters and their quant states: slots, no others
    arena    packed bytes and quant states of the blocks, within 1 %
    peak     at most the arena, the largest shard and 5 % of both
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from axolotl.integrations.base import BasePlugin
from load_peak import INTERVAL_S, TINY, mb, model_parser, status, write_model
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "protrain"))
from tiny_models import DATA, TOKENIZER, build_inputs

ALLOWANCE = 0.05
GAPS = 0.01
PHASE, FIGURES = Path("phase"), Path("figures.json")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "AXOLOTL_DO_NOT_TRACK": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "AXOLOTL_DATASET_NUM_PROC": "0",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
}
PLUGINS = [
    "axolotl.integrations.protrain.ProTrainPlugin",
    "qlora_load.LoadProbe",
]
SETTINGS: dict[str, Any] = {
    "plugins": PLUGINS,
    "protrain_capacity_bytes": "4GiB",
    "protrain_cache_dir": "cache",
    "protrain_n_persist_override": 0,
    "protrain_n_buffer_override": 2,
    "base_model": "model",
    "tokenizer_config": str(TOKENIZER),
    "adapter": "qlora",
    "load_in_4bit": True,
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_target_linear": True,
    "lora_mlp_kernel": False,
    "lora_qkv_kernel": False,
    "lora_o_kernel": False,
    "lora_embedding_kernel": False,
    "datasets": [{"path": str(DATA), "ds_type": "json", "type": "completion"}],
    "dataset_prepared_path": "prepared",
    "output_dir": "out",
    # the plan times one block, and bf16 products on a CPU are slow
    "sequence_len": 8,
    "pad_to_sequence_len": True,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 4,
    "max_steps": 1,
    "learning_rate": 0.001,
    "bf16": True,
    "fp16": False,
    "tf32": False,
    "attn_implementation": "sdpa",
    "save_strategy": "no",
}

# the child


class LoadProbe(BasePlugin):
    """Says which phase begins; looks at the model when the session is open."""

    def __init__(self) -> None:
        super().__init__()
        self.trainer: Any = None

    def pre_model_load(self, cfg: Any) -> None:
        _quantise_a_tiny_model()
        _say("baseline")
        _say("load")

    def post_model_load(self, cfg: Any, model: Any) -> None:
        _say("open")

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        self.trainer = trainer
        trainer.add_callback(_Opened(self))


class _Opened(TrainerCallback):
    # shown to it, weights would be those of the arena
    looks_at_weights = False

    def __init__(self, probe: LoadProbe) -> None:
        self._probe = probe

    def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
        _say("opened")
        FIGURES.write_text(json.dumps(_figures(self._probe.trainer)))
        sys.exit(0)


def _say(phase: str) -> None:
    PHASE.write_text(phase)
    time.sleep(20 * INTERVAL_S)


def _quantise_a_tiny_model() -> None:
    """What a first model of a process loads and builds is not this model's."""
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        config = transformers.LlamaConfig(**TINY)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
        transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.bfloat16,
            device_map="cpu",
            quantization_config=transformers.BitsAndBytesConfig(load_in_4bit=True),
        )


def _figures(trainer: Any) -> dict[str, int]:
    """Bytes of an open session, counted from the model's side where that can be."""
    from axolotl.integrations.protrain.core.layout import slot_bytes
    from axolotl.integrations.protrain.core.layout.tensors import model_bindings

    session = trainer.protrain.session
    bound = model_bindings(trainer.model)
    layout, plan = session.layout, session.plan
    specs = [spec for index in plan.paged for spec in layout.chunks[index].tensors]
    tensors = [bound[spec.name].tensor for spec in specs]
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors
    }
    return {
        "num_paged_chunks": len(plan.paged),
        "paged_bytes": sum(tensor.nbytes for tensor in tensors),
        "paged_storage_bytes": sum(storages.values()),
        "slot_bytes": sum(slot_bytes(layout, plan.placements, plan.n_buffer)),
        "arena_bytes": session.measured().host_arena_bytes,
        "device_bytes": session.device.used_bytes(),
    }


# the parent


def watch(folder: Path) -> dict[str, int]:
    """Train in a child; the highest anonymous bytes of each phase."""
    peaks: dict[str, int] = {}
    command = [sys.executable, "-m", "axolotl.cli.train", "qlora.yaml"]
    with (
        (folder / "log.txt").open("w") as log,
        subprocess.Popen(
            command,
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT,
        ) as child,
    ):
        while child.poll() is None:
            anonymous = status(child.pid).get("RssAnon", 0)
            path = folder / PHASE
            phase = path.read_text() if path.exists() else "start"
            peaks[phase] = max(peaks.get(phase, 0), anonymous)
            time.sleep(INTERVAL_S)
    if child.returncode:
        raise SystemExit((folder / "log.txt").read_text())
    return peaks


def report(folder: Path, peaks: dict[str, int]) -> bool:
    """Print the figures; True if the three statements hold."""
    shards = [file.stat().st_size for file in (folder / "model").glob("*.safetensors")]
    seen: dict[str, int] = json.loads((folder / FIGURES).read_text())
    arena, device = seen["arena_bytes"], seen["device_bytes"]
    print(f"bf16 model {mb(sum(shards))}, largest of {len(shards)} shards", end=" ")
    print(f"{mb(max(shards))}; {seen['num_paged_chunks']} paged chunks")
    print(f"anonymous: baseline {mb(peaks['baseline'])}; above it:", end=" ")
    above = {p: peaks[p] - peaks["baseline"] for p in ("load", "open", "opened")}
    print(", ".join(f"{phase} {mb(nbytes)}" for phase, nbytes in above.items()))
    peak = max(above["load"], above["open"] - device, above["opened"] - device)
    limit = int((arena + max(shards)) * (1 + ALLOWANCE))
    statements = {
        f"device: {mb(seen['paged_storage_bytes'])} in storages of paged tensors, "
        f"slots {mb(seen['slot_bytes'])}": seen["paged_storage_bytes"]
        == seen["slot_bytes"],
        f"arena: {arena:,} bytes, {seen['paged_bytes']:,} packed and quant state": (
            seen["paged_bytes"] <= arena <= seen["paged_bytes"] * (1 + GAPS)
        ),
        f"peak: {mb(peak)} without {mb(device)} of the device, limit {mb(limit)}": (
            peak <= limit
        ),
    }
    for text, holds in statements.items():
        print(f"{'holds' if holds else 'FAILS'}  {text}")
    return all(statements.values())


def main() -> None:
    args = model_parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", args)
        build_inputs(folder)
        (folder / "qlora.yaml").write_text(yaml.safe_dump(SETTINGS))
        # fills the cache
        watch(folder)
        for left in (PHASE, FIGURES):
            (folder / left).unlink()
        kept = report(folder, watch(folder))
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
