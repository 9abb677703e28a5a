"""A base larger than what a cgroup leaves of the host trains from a disk, as it does plain."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from axolotl_jobs import BASE, LORA
from safetensors.torch import load_file
from tiny_models import VOCABULARY, build_inputs
from transformers import LlamaConfig, LlamaForCausalLM

LIMIT = 2000 << 20
"""Of which Python, torch and Axolotl take 0.5 GiB, and 1 GiB is left free."""
MEMORY = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
FILES = ("memory.limit_in_bytes", "memory.max")
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=32,
    num_attention_heads=16,
    num_key_value_heads=4,
    tie_word_embeddings=False,
)


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A cgroup with that limit; its `cgroup.procs` takes a process in."""
    for above, file in zip(MEMORY, FILES, strict=True):
        group = above / f"protrain-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / file).exists():
            (group / file).write_text(str(LIMIT))
            yield group
            group.rmdir()
            return
        group.rmdir()
    pytest.skip("nobody may make a cgroup with a limit of memory here")


@pytest.mark.full
def test_a_base_larger_than_a_cgroups_memory_trains(
    tmp_path: Path, cgroup: Path
) -> None:
    build_inputs(tmp_path)
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    nbytes = sum(p.nbytes for p in model.parameters())
    model.save_pretrained(tmp_path / "base", max_shard_size="300MB")
    del model
    keys: dict[str, Any] = {
        **BASE,
        **LORA,
        "base_model": "base",
    }
    paged = {
        "protrain_auto_memory": True,
        "protrain_capacity_bytes": "300MiB",
        "protrain_disk_dir": str(tmp_path / "disk"),
    }
    plain = train(tmp_path, "plain", keys)
    ours = train(tmp_path, "ours", keys | paged, cgroup)
    assert ours == plain
    report = json.loads((tmp_path / "ours/protrain/report.json").read_text())
    assert nbytes > 2 * report["host_bytes"]["budget"]
    assert report["plan"]["on_disk"] and report["measured"]["disk_bytes"] > nbytes


def train(
    folder: Path, name: str, keys: dict[str, Any], cgroup: Path | None = None
) -> Any:
    """Losses, norms and trained weights of `axolotl train`."""
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(keys | {"output_dir": name}))
    command = [sys.executable, "-m", "axolotl.cli.train", f"{name}.yaml"]
    if cgroup is not None:
        enter = 'echo $$ > "$0" && exec "$@"'
        command = ["sh", "-c", enter, str(cgroup / "cgroup.procs"), *command]
    # plugins of the tests
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with (folder / f"{name}.log").open("w") as log:
        done = subprocess.run(
            command, cwd=folder, env=environment, stdout=log, stderr=log
        )
    assert done.returncode == 0, (folder / f"{name}.log").read_text()[-4000:]
    state = json.loads((folder / name / "trainer_state.json").read_text())
    steps = state["log_history"]
    shown = [(s["loss"], s["grad_norm"]) for s in steps if "grad_norm" in s]
    weights = load_file(folder / name / "adapter_model.safetensors")
    return shown, {key: value.tolist() for key, value in weights.items()}
