"""What tests of full fine-tunes by the training service run in forks, on tiny models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from axolotl_jobs import BASE, PROTRAIN, overrides
from safetensors.torch import load_file
from service_jobs import ADAM, follow, rows, service
from tiny_models import build_inputs, build_model, model_path
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import AutoModelForCausalLM, Trainer

from axolotl.integrations.protrain.service.adapters import INDEX, folder_of
from axolotl.integrations.protrain.service.engine import AdapterService

FULL: dict[str, Any] = {
    **overrides(1, 2),
    "plugins": [PROTRAIN],
    "protrain_auto_memory": True,
    "protrain_capacity_bytes": "1GiB",
}
"""To lay over `BASE`: paged."""


def config(root: Path, family: str = "llama", **settings: Any) -> Path:
    """The YAML of a server, and what it needs, in a folder."""
    build_inputs(root)
    build_model(root, family)
    model = {"base_model": str(model_path(family)), "output_dir": "out"}
    path = root / "base.yaml"
    path.write_text(yaml.safe_dump({**BASE, **FULL, **model, **settings}))
    return path


def model_at(of: AdapterService, path: str) -> dict[str, Tensor]:
    """All weights of a state, by the keys of the base."""
    folder = folder_of(of.folder, path)
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    found = {name: load_file(folder / name) for name in {*index.values()}}
    assert sum(map(len, found.values())) == len(index)
    return {key: found[name][key] for key, name in index.items()}


def train_as(job: Path, history: list[Mapping[str, float]], path: str) -> Any:
    """Train on the batches of a job of Axolotl, by its settings; losses and weights."""
    keys = yaml.safe_load(Path(path).read_text())
    with service(Path(path)) as served:
        served.create("m", 0)
        losses = follow(served, job, history, keys)
        return losses, model_at(served, served.save("m", "now").result())


def as_plainly(path: Path, steps: int = 3) -> list[Any]:
    """Losses, norms and weights of a model, of the next one, and of a plain loop."""
    found = []
    with service(path) as served:
        for name in ("m", "again"):
            served.create(name, 0)
            told = [answer for n in range(steps) for answer in step(served, name, n)]
            weights = model_at(served, served.save(name, "now").result())
            found.append(([_plain(one.result()) for one in told], weights))
            served.unload(name)
    return [*found, plainly(path, steps)]


def step(of: AdapterService, name: str, number: int) -> list[Any]:
    """What step `number` of a model is answered, of two passes and an update."""
    passes = [of.forward_backward(name, rows(10 * number + k)) for k in range(2)]
    return [*passes, of.optim_step(name, ADAM)]


def _plain(answer: Any) -> float:
    return answer[0] if isinstance(answer, tuple) else answer


def plainly(path: Path, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """What `step` is answered, and the weights, of transformers and torch alone."""
    base = yaml.safe_load(path.read_text())["base_model"]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.eval()
    decay = Trainer.get_decay_parameter_names(None, model)  # type: ignore[arg-type]
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if n in decay], "weight_decay": 0.1},
        {"params": [p for n, p in named.items() if n not in decay], "weight_decay": 0},
    ]
    given: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-12, "fused": True}
    optimizer, told = torch.optim.AdamW(groups, 0.01, **given), []
    for number in range(steps):
        for k in range(2):
            data = rows(10 * number + k)
            # a micro-batch has two rows
            losses = [_loss(model, data[at : at + 2]) for at in range(0, len(data), 2)]
            told.append(sum(losses))
        told.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained("plain")
    return told, load_file("plain/model.safetensors")


def _loss(model: Any, data: list[Any]) -> float:
    tokens = torch.stack([pad(d.tokens, (0, 64 - len(d.tokens))) for d in data])
    ones = [torch.ones(len(d.tokens) + 1, dtype=torch.int64) for d in data]
    mask = torch.stack([pad(one, (0, 64 - len(one))) for one in ones])
    given = {n: [d.inputs[n] for d in data] for n in ("target_tokens", "weights")}
    targets = torch.stack([pad(t, (0, 64 - len(t)), value=-100) for t in given["target_tokens"]])
    weights = torch.stack([pad(w, (0, 64 - len(w))) for w in given["weights"]])
    output = model(input_ids=tokens, attention_mask=mask, use_cache=False)
    flat = output.logits.float().flatten(0, 1), targets.flatten()
    loss = (weights * cross_entropy(*flat, reduction="none").view(targets.shape)).sum()
    loss.backward()
    return float(loss.detach())
