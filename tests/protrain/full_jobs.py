"""What tests of full fine-tunes by the training service run in forks, on tiny models."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import yaml
from axolotl_jobs import BASE, PROTRAIN, overrides, same_bits
from safetensors.torch import load_file, save_file
from sampling_jobs import refusal, told
from service_http_jobs import HERE
from service_jobs import ADAM, follow, rows, service, without_room
from starlette.testclient import TestClient
from tiny_models import build_inputs, build_model, model_path
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoModelForCausalLM, Trainer

from axolotl.integrations.protrain.core.checkpoint import OPTIMIZER
from axolotl.integrations.protrain.service.adapters import (
    ABOUT,
    INDEX,
    REST,
    folder_of,
)
from axolotl.integrations.protrain.service.engine import AdapterService
from axolotl.integrations.protrain.service.http import app_of
from axolotl.integrations.protrain.service.losses import Datum
from axolotl.integrations.protrain.service.optimizers import AdamParams
from axolotl.integrations.protrain.service.sampling import SamplingParams

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


def config_of(root: Path, settings: Mapping[str, Any]) -> Path:
    """`config` with other keys."""
    return config(root, **settings)


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
    targets = torch.stack(
        [pad(t, (0, 64 - len(t)), value=-100) for t in given["target_tokens"]]
    )
    weights = torch.stack([pad(w, (0, 64 - len(w))) for w in given["weights"]])
    output = model(input_ids=tokens, attention_mask=mask, use_cache=False)
    flat = output.logits.float().flatten(0, 1), targets.flatten()
    loss = (weights * cross_entropy(*flat, reduction="none").view(targets.shape)).sum()
    loss.backward()
    return float(loss.detach())


def _all_at(of: AdapterService, path: str) -> dict[str, Tensor]:
    """All tensors of a state: weights, buffers, gradients, and the optimizer's."""
    folder = folder_of(of.folder, path)
    found = {**model_at(of, path), **load_file(folder / REST)}
    states = torch.load(folder / OPTIMIZER, weights_only=True)["state"]
    return found | _flat("", states)


def _flat(name: str, value: Any) -> dict[str, Tensor]:
    if not isinstance(value, dict):
        return {name: torch.as_tensor(value)}
    every = (_flat(f"{name}.{key}", inside) for key, inside in value.items())
    return {key: tensor for found in every for key, tensor in found.items()}


def _apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    shared = one.keys() & other.keys()
    return sorted(one.keys() ^ other.keys()) + sorted(
        key for key in shared if not same_bits(one[key], other[key])
    )


def _go_on(of: AdapterService, name: str, saved: str = "end") -> dict[str, Tensor]:
    """A pass, an update over what waits, and a step: all that there is then."""
    of.forward_backward(name, rows(51)).result()
    of.optim_step(name, ADAM).result()
    for one in step(of, name, 6):
        one.result()
    return _all_at(of, of.save(name, saved).result())


def resumed(path: Path, waits: bool = True) -> dict[str, Any]:
    """A model that is saved, with gradients that wait or none, and goes on: what differs where it
    loads that, where another one begins so, and after another server has begun."""
    found: dict[str, Any] = {}
    with service(path) as served:
        served.create("m", 0)
        for one in step(served, "m", 0):
            one.result()
        served.forward_backward("m", rows(50)).result()
        found["waiting"] = refusal(lambda: served.save("m", "waiting"))
        if not waits:
            served.optim_step("m", ADAM).result()
        at = served.save("m", "kept").result()
        wanted = _go_on(served, "m")
        found["forward"] = served.forward_backward("m", rows(9), forward_only=True)
        served.load("m", at, True).result()
        found["loaded"] = _apart(_go_on(served, "m", "loaded"), wanted)
        served.unload("m")
        served.create_from("n", at, True).result()
        found["created"] = _apart(_go_on(served, "n"), wanted)
        # moments and buffers begin anew, and nothing waits
        for one in (served.load("n", at, False), *step(served, "n", 3)):
            one.result()
        fresh = _all_at(served, served.save("n", "fresh").result())
        served.unload("n")
        served.create_from("o", at, False).result()
        found["nothing waits"] = refusal(lambda: served.optim_step("o", ADAM))
        for one in step(served, "o", 3):
            one.result()
        again = _all_at(served, served.save("o", "fresh").result())
        found["without"] = _apart(again, fresh)
        served.forward_backward("o", rows(4)).result()
        found["forward"] = found["forward"].result()[0]
    with service(path) as served:
        served.create_from("p", at, True).result()
        found["another server"] = _apart(_go_on(served, "p"), wanted)
        last = _all_at(served, "tinker://o/weights/_last")
        found["last waits"] = any(key.startswith("grad.") for key in last)
    return found


def changed_files(path: Path) -> dict[str, Any]:
    """Of a model of which a part trains: files that are new in each save, whose inodes they
    share, and what is left of a state when those that it shares with are deleted."""
    found: dict[str, Any] = {}
    base = path.parent / yaml.safe_load(path.read_text())["base_model"]
    with service(path) as served:
        served.create("m", 0)

        def save(name: str, **more: Any) -> str:
            at = served.save("m", name, **more).result()
            about = json.loads((folder_of(served.folder, at) / ABOUT).read_text())
            nodes = (folder_of(served.folder, at) / name for name in about["files"])
            found[name] = (len(about["new"]), [node.stat().st_ino for node in nodes])
            return at

        first = save("first")
        for one in step(served, "m", 0):
            one.result()
        second = save("second")
        save("sampler", whole=False)
        for one in step(served, "m", 1):
            one.result()
        third = save("third")
        wanted = model_at(served, third)
        found["base"] = [at.stat().st_ino for at in base.glob("*.safetensors")]
        with TestClient(app_of(served, None), HERE) as ask:
            run = f"/api/v1/training_runs/m/checkpoints/{third.split('/', 3)[3]}"
            address = ask.get(f"{run}/archive").json()["url"]
            for at in (first, second, "tinker://m/sampler_weights/sampler"):
                served.states.delete(at)
            with tarfile.open(fileobj=BytesIO(ask.get(address).content)) as tar:
                tar.extractall("fetched", filter="data")
            served.unload("m")
            served.create_from("n", third, True).result()
            info = ask.post("/api/v1/get_info", json={"model_id": "n"}).json()
            found["info"] = (info["is_lora"], info["lora_rank"])
        found["left"] = _apart(model_at(served, third), wanted)
        found["live"] = _apart(model_at(served, served.save("n", "x").result()), wanted)
    model = AutoModelForCausalLM.from_pretrained("fetched", dtype=torch.float32)
    model.save_pretrained("whole")
    found["fetched"] = _apart(load_file("whole/model.safetensors"), wanted)
    return found


def _data(scale: float) -> list[Datum]:
    """Rows whose gradients are out of all bounds, but not their loss."""
    data = rows(2)
    for datum in data:
        datum.inputs["weights"].mul_(scale)
    return data


def _over(seed: int) -> list[Datum]:
    """Rows whose loss overflows under `importance_sampling`."""
    (datum,) = rows(seed, 1)
    old = torch.full(datum.tokens.shape, -1e3)
    targets = {"target_tokens": datum.inputs["target_tokens"]}
    ones = {"logprobs": old, "advantages": torch.ones_like(old)}
    return [Datum(datum.tokens, {**targets, **ones})]


def _fail(*_: Any) -> None:
    raise torch.OutOfMemoryError("Tried to allocate 1024 bytes.")


def refused(path: Path) -> dict[str, Any]:
    """What cannot be, why, and what differs afterwards from a model that was not asked."""
    found: dict[str, Any] = {}
    with service(path) as served:
        found["rank"] = refusal(lambda: served.create("r", 4))
        found["layers"] = refusal(lambda: served.create("r", 0, ["attn"]))
        served.create("m", 0)
        found["second"] = refusal(lambda: served.create("s", 0))
        for one in step(served, "m", 0):
            one.result()
        at = served.save("m", "kept").result()
        served.forward_backward("m", rows(50)).result()
        loss = served.forward_backward("m", _over(1), "importance_sampling")
        found["loss"] = str(loss.exception())
        file = next(folder_of(served.folder, at).glob("model-*"))
        whole = file.read_bytes()
        for what, damaged in (
            ("byte", bytes([*whole[:-1], whole[-1] ^ 1])),
            ("end", whole[:-9]),
        ):
            # no other link may have it
            file.unlink()
            file.write_bytes(damaged)
            found[what] = refusal(lambda: served.load("m", at, True))
        file.write_bytes(whole)
        rest = folder_of(served.folder, at) / REST
        tensors = load_file(rest)
        for what, wrong in (("no buffer", None), ("a buffer", torch.zeros(3, 1))):
            name = min(name for name in tensors if name.startswith("buffer."))
            others = {k: v for k, v in tensors.items() if k != name}
            save_file(others if wrong is None else {**others, name: wrong}, rest)
            found[what] = refusal(lambda: served.load("m", at, True))
        save_file(tensors, rest)
        found["after refusals"] = _go_on(served, "m")

        served.forward_backward("m", _data(1e37)).result()
        found["norm"] = refusal(lambda: served.optim_step("m", ADAM))
        found["nothing waits"] = refusal(lambda: served.optim_step("m", ADAM))
        found["after a norm"] = _apart(
            _all_at(served, served.save("m", "norm").result()), found["after refusals"]
        )
        served.forward_backward("m", rows(1)).result()
        served.optim_step("m", AdamParams(learning_rate=1e39)).result()
        found["pass"] = refusal(lambda: served.forward_backward("m", rows(1)))
        found["save"] = refusal(lambda: served.save("m", "huge"))
        served.load("m", at, True).result()
        served.forward_backward("m", rows(50)).result()
        found["after a load"] = _apart(_go_on(served, "m"), found["after refusals"])
        served.forward_backward("m", rows(1)).result()
        hook = register_optimizer_step_post_hook(_fail)
        found["update"] = refusal(lambda: served.optim_step("m", ADAM))
        hook.remove()
        found["lost"] = refusal(lambda: served.forward_backward("m", rows(1)))
        found["lost for a save"] = refusal(lambda: served.save("m", "lost"))
        served.load("m", at, True).result()
        served.forward_backward("m", rows(50)).result()
        found["after a loss"] = _apart(_go_on(served, "m"), found["after refusals"])
        served.unload("m")
        served.create_from("n", at, True).result()
        served.forward_backward("n", rows(50)).result()
        wanted = found.pop("after refusals")
        found["after refusals"] = _apart(_go_on(served, "n"), wanted)
    return found


def short_of_memory(path: Path) -> dict[str, Any]:
    """A second pass of an update that runs out of memory once, and for good: the error,
    what differs after the update, and how often plans changed."""
    found: dict[str, Any] = {}
    wanted: dict[str, Tensor] = {}
    for times in (0, 1, 10):
        with service(path) as served:
            served.create("m", 0)
            for one in step(served, "m", 0):
                one.result()
            served.forward_backward("m", rows(50)).result()

            with without_room(served, times):
                told = refusal(lambda: served.forward_backward("m", rows(51)))
            if told:
                served.forward_backward("m", rows(51)).result()
            served.optim_step("m", ADAM).result()
            saved = _all_at(served, served.save("m", "now").result())
            wanted = wanted or saved
            notches = len(served.report.notches)
            found[str(times)] = (told, _apart(saved, wanted), notches)
            served.unload("m")
    return found


def sampled(path: Path) -> dict[str, Any]:
    """Samples of the weights that a model has, of those that it had, of the base: tokens
    and log-probabilities, or why there are none."""
    found: dict[str, Any] = {}
    greedy = SamplingParams(temperature=0, max_tokens=5, stop=[])
    with service(path) as served:

        def ask(session: str) -> Any:
            asked = served.sampler.sample(session, [5, 9, 40], greedy)
            return str(asked.exception()) if asked.exception() else told(asked.result())

        base = served.sessions.of_path(None).name
        found["base"] = ask(base)
        served.create("m", 0).result()
        found["untrained"] = ask(base)
        for one in step(served, "m", 0):
            one.result()
        served.forward_backward("m", rows(50)).result()
        live = served.save_session("m", "live").result().session
        found["live"] = ask(live)
        at = served.save("m", "one", whole=False).result()
        one = served.sessions.of_path(at).name
        found["of a path"] = ask(one)
        served.forward_backward("m", rows(51)).result()
        found["while gradients wait"] = ask(live)
        found["base meanwhile"] = ask(base)
        served.optim_step("m", ADAM).result()
        found["stale"], found["other"] = ask(live), ask(one)
        now = served.save_session("m", "now").result().session
        found["now"] = ask(now)
        wanted = _all_at(served, served.save("m", "end").result())
        served.unload("m")
        found["unloaded"], found["base again"] = ask(one), ask(base)
        served.create("n", 0)
        for each in step(served, "n", 0):
            each.result()
        served.forward_backward("n", rows(50)).result()
        served.forward_backward("n", rows(51)).result()
        served.optim_step("n", ADAM).result()
        saved = _all_at(served, served.save("n", "end").result())
        found["undisturbed"] = _apart(saved, wanted)
    return found


def linked(path: Path) -> list[int]:
    """Inodes of the base and of a state that is it."""
    keys = yaml.safe_load(path.read_text())
    (base,) = (path.parent / keys["base_model"]).glob("*.safetensors")
    with service(path) as served:
        served.create("new", 0)
        at = folder_of(served.folder, served.save("new", "begins").result())
        (state,) = at.glob("model-*.safetensors")
        return [base.stat().st_ino, state.stat().st_ino]


def saving(path: Path) -> None:
    """Train and save under one name, until somebody ends this process."""
    with service(path) as served:
        served.create("m", 0)
        for number in range(10**6):
            for one in step(served, "m", number):
                one.result()
            served.save("m", "kept").result()
            Path("saved").touch()


def go_on_from(path: Path) -> float:
    """The loss of a model that begins as what was saved last, and learns more."""
    with service(path) as served:
        served.create_from("n", "tinker://m/weights/kept", True).result()
        told = [one.result() for one in step(served, "n", 0)]
        served.save("n", "more").result()
        return _plain(told[0])


def over_an_adapter(path: Path) -> list[str]:
    """Why a server of adapters has no full fine-tune, new or from a state."""
    keys = yaml.safe_load(path.read_text())
    with service(path) as served:
        served.create("m", 0)
        at = served.save("m", "kept").result()
    other = path.with_name("adapters.yaml")
    other.write_text(yaml.safe_dump({**keys, "adapter": "lora"}))
    with service(other) as served:
        served.create("n", 4).result()
        lora = served.save("n", "kept").result()
        told = [refusal(lambda: served.create("o", 0))]
        told.append(refusal(lambda: served.create_from("p", at, True)))
    with service(path) as served:
        return [*told, refusal(lambda: served.create_from("q", lora, True))]
