"""What tests of the training service run in forks, on tiny models."""

from __future__ import annotations

import atexit
import json
import os
import random
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

import torch
import yaml
from axolotl_jobs import BASE, LORA, PROTRAIN, SEEDING, overrides
from checked_device import check_runs
from recording_plugin import BATCHES_FILE
from safetensors.torch import load_file, save_file
from tiny_models import VOCABULARY, build_inputs, build_model, model_path
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from torch.optim.optimizer import register_optimizer_step_post_hook

from axolotl.integrations.protrain.core.errors import ConfigError, ProTrainError
from axolotl.integrations.protrain.service.adapters import (
    ABOUT,
    REST,
    WEIGHTS,
    folder_of,
)
from axolotl.integrations.protrain.service.base import read
from axolotl.integrations.protrain.service.engine import AdapterService
from axolotl.integrations.protrain.service.losses import Datum
from axolotl.integrations.protrain.service.optimizers import AdamParams
from axolotl.integrations.protrain.versions import DRAWS_BY_NAME

RECORDED: dict[str, Any] = {
    "plugins": [PROTRAIN, SEEDING, "recording_plugin.RecordingPlugin"],
    "lr_scheduler": "constant",
    "gradient_accumulation_steps": 2,
}
"""Keys of a run that keeps its batches, which the service is given then."""
SERVED: dict[str, Any] = {
    **LORA,
    **overrides(1, 2),
    "plugins": [PROTRAIN],
    "protrain_capacity_bytes": "1GiB",
    "lora_r": 8,
    "lora_target_modules": ["lm_head"],
}
"""To lay over `BASE`: paged, and planned for LoRA of rank 8 on all linear layers."""
ADAM = AdamParams(learning_rate=0.01, weight_decay=0.1, grad_clip_norm=1.0)
Saved = dict[str, Tensor]


def config(root: Path, family: str = "llama", **settings: Any) -> Path:
    """The YAML of a server, and what it needs, in a folder."""
    build_inputs(root)
    build_model(root, family)
    model = {"base_model": str(model_path(family)), "output_dir": "out"}
    path = root / "base.yaml"
    path.write_text(yaml.safe_dump({**BASE, **SERVED, **model, **settings}))
    return path


def service(path: Path, **options: Any) -> AdapterService:
    """Serves with what is saved in `state`."""
    torch.set_num_threads(1)
    return AdapterService(path, Path("state"), **options)


def from_a_disk(path: str) -> Any:
    """Losses and norms of two steps with all of the base in memory, and with a byte less;
    whether some of it was on the disk."""
    keys, found = yaml.safe_load(Path(path).read_text()), []
    other = Path(path).with_name("on-disk.yaml")
    for config in (Path(path), other):
        with service(config) as served:
            served.create("m", 8, ["attn", "mlp"], seed=1)
            steps = []
            for seed in range(2):
                loss = served.forward_backward("m", rows(seed)).result()[0]
                steps.append((loss, served.optim_step("m", ADAM).result()))
            found.append((steps, bool(served.report.forecast.plan.on_disk)))
            peak = served.report.forecast.host.peak_bytes
        keys |= {"protrain_disk_dir": "disk", "output_dir": "on-disk"}
        keys["protrain_cpu_capacity_bytes"] = f"{peak - 1}B"
        other.write_text(yaml.safe_dump(keys))
    return found


def rows(seed: int, count: int = 3) -> list[Datum]:
    """Rows of different lengths; the weights of a row sum up to 1."""
    chance = random.Random(seed)
    data = []
    for _ in range(count):
        length = chance.randint(3, 60)
        tokens = torch.tensor(chance.choices(range(3, VOCABULARY), k=length + 1))
        weights = torch.full((length,), 1 / length)
        inputs = {"target_tokens": tokens[1:], "weights": weights}
        data.append(Datum(tokens[:-1], inputs))
    return data


def soft_rows(seed: int, count: int = 4, candidates: int = 5) -> list[Datum]:
    """`rows` with several targets for each token, as a teacher would weigh them; some tokens
    have none."""
    draws, found = torch.Generator().manual_seed(seed), []
    for datum in rows(seed, count):
        logits = torch.randn(datum.tokens.numel(), VOCABULARY, generator=draws)
        best = logits.softmax(-1).topk(candidates)
        weights = best.values / best.values.sum(-1, True) / datum.tokens.numel()
        weights[0] = 0
        inputs = {"target_tokens": best.indices, "weights": weights}
        found.append(Datum(datum.tokens, inputs))
    return found


def saved(of: AdapterService, model: str, name: str = "now") -> Saved:
    """All that a save of an adapter writes."""
    return saved_at(of, of.save(model, name).result())


def saved_at(of: AdapterService, path: str) -> Saved:
    """All of a state."""
    folder = folder_of(of.folder, path)
    return {**load_file(folder / WEIGHTS), **load_file(folder / REST)}


def train_as(job: Path, history: list[Mapping[str, float]], path: str) -> Any:
    """Train on the batches of a job of Axolotl, by its settings; losses and weights."""
    keys = yaml.safe_load(Path(path).read_text())
    with service(Path(path)) as served:
        # of the YAML, or that of the plugin which seeds the process
        seed = keys["seed"] if DRAWS_BY_NAME else 11
        served.create("m", keys["lora_r"], ["attn", "mlp"], seed=seed)
        return follow(served, job, history, keys), saved(served, "m")


def follow(
    served: AdapterService,
    job: Path,
    history: list[Mapping[str, float]],
    keys: Mapping[str, Any],
) -> list[tuple[float, float]]:
    """Losses and norms of a model `m` on the batches of a job of Axolotl."""
    from axolotl.integrations.hatchery.data import batch_to_datums_sft

    steps, losses = keys["gradient_accumulation_steps"], []
    batches = torch.load(job / "out" / BATCHES_FILE, weights_only=True)
    adam, kind = {"grad_clip_norm": 1.0}, keys["optimizer"].removeprefix("paged_")
    if kind.startswith(("adam", "adem", "lion")):
        adam["beta2"] = 0.999
    if kind.startswith(("adam", "adem")):
        adam["eps"] = 1e-8
    for number, entry in enumerate(history):
        some = batches[number * steps : (number + 1) * steps]
        loss, trained = 0.0, [int((b["labels"][:, 1:] != -100).sum()) for b in some]
        for batch, tokens in zip(some, trained, strict=True):
            # a mean of the step's tokens, before that one of micro-batches' means
            tokens = sum(trained) if DRAWS_BY_NAME else steps * tokens
            fields = (batch[k] for k in ("input_ids", "labels", "attention_mask"))
            data = [_datum(d, tokens) for d in batch_to_datums_sft(*fields)]
            loss += served.forward_backward("m", data).result()[0]
        step = AdamParams(entry["learning_rate"], weight_decay=0.01, **adam)
        losses.append((loss, served.optim_step("m", step).result()))
    return losses


def _datum(wire: Mapping[str, Any], tokens: int) -> Datum:
    """Of what Axolotl's own client would send, each token's weight 1 / `tokens`."""
    (chunk,) = wire["model_input"]["chunks"]
    fields = wire["loss_fn_inputs"]
    weights = torch.tensor(fields["weights"]["data"]) / tokens
    targets = torch.tensor(fields["target_tokens"]["data"])
    return Datum(
        torch.tensor(chunk["tokens"]), {"target_tokens": targets, "weights": weights}
    )


SPECS = {
    "a": (4, ["attn"]),
    "b": (8, None),
    "c": (2, ["mlp", "unembed"]),
    "d": (8, ["unembed"]),
    "e": (1, ["attn", "mlp"]),
    "f": (4, ["attn"]),
    "g": (5, ["mlp"]),
    "h": (8, ["attn", "unembed"]),
}
"""Rank and layers of adapters that train side by side."""


def create(of: AdapterService, name: str) -> None:
    rank, kinds = SPECS[name[0]]
    of.create(name, rank, kinds, seed=ord(name[0]))


def step(of: AdapterService, name: str, number: int) -> list[Any]:
    """What step `number` of an adapter is answered, of two passes and an update."""
    passes = [rows(100 * number + ord(name[0]) + k) for k in range(2)]
    asked = [of.forward_backward(name, data) for data in passes]
    return [*asked, of.optim_step(name, ADAM)]


def interleaved(path: Path) -> tuple[list[str], dict[str, int]]:
    """Train all of `SPECS` at random in turns, and each alone; what differs, and where
    in the meantime the first ones were."""
    chance, differing, steps = random.Random(0), [], 3
    order = [name for name in SPECS for _ in range(steps)]
    chance.shuffle(order)
    with service(path, adapter_bytes=1 << 19) as served:
        for name in SPECS:
            create(served, name)
        answers: dict[str, list[Any]] = {name: [] for name in SPECS}
        done = dict.fromkeys(SPECS, 0)
        for name in order:
            answers[name] += step(served, name, done[name])
            done[name] += 1
        told = {name: [a.result() for a in found] for name, found in answers.items()}
        counts = {"away": sum(not a["on_host"] for a in served.status()["adapters"])}
        turned = {name: saved(served, name) for name in SPECS}
    with service(path) as served:
        for name in SPECS:
            create(served, f"{name}-alone")
            alone = [a for n in range(steps) for a in step(served, f"{name}-alone", n)]
            if [_plain(a.result()) for a in alone] != list(map(_plain, told[name])):
                differing.append(f"{name}: answers")
            weights = saved(served, f"{name}-alone")
            assert weights.keys() == turned[name].keys()
            differing += [
                f"{name}: {key}"
                for key, tensor in weights.items()
                if not torch.equal(tensor, turned[name][key])
            ]
    return differing, counts


def _plain(answer: Any) -> Any:
    if not isinstance(answer, tuple):
        return answer
    return answer[0], [row.tolist() for row in answer[1]]


def switched(path: Path) -> dict[str, list[int]]:
    """Bytes after 2 and after 1,000 switches between two adapters: moved by switches,
    fetched of the base, held on the host and on the device."""
    found: dict[str, list[int]] = {"moved": [], "fetched": [], "host": [], "device": []}
    with service(path) as served:
        for name in "ab":
            create(served, name)
        for number in range(1001):
            # as an update and a save make it: both ways
            asked = served.optim_step("ab"[number % 2], ADAM)
            assert asked.exception() is not None
            if number in (2, 1000):
                found["moved"].append(served.live.moved_bytes)
                found["fetched"].append(served.session.counters.fetched_bytes)
                found["host"].append(served.store.used_bytes)
                found["device"].append(served.session.device.used_bytes())
        layouts = served.store.layouts
        found["a switch"] = [layouts[name].kept_bytes for name in "ab"]
    return found


def ahead(path: Path, steps: int = 34) -> dict[str, Any]:
    """Two adapters that always have a request waiting, with every copy checked: what
    differs from each alone, counts of switches, and bytes in use after some and all."""
    check_runs(True)
    found: dict[str, Any] = {"bytes": []}
    with service(path) as served:
        for name in "ab":
            create(served, name)
        # as long as the rest takes to be queued; nothing of it goes home
        first = served.forward_backward("b", rows(1, 60), forward_only=True)
        asked = [step(served, name, n) for n in range(steps) for name in "ab"]
        for some in (asked[: steps // 2], asked[steps // 2 :]):
            turned = [_plain(a.result()) for answers in some for a in answers]
            used = served.session.device.used_bytes()
            found["bytes"].append((used, served.store.used_bytes))
        first.result()
        status = served.status()
        found |= {key: status[key] for key in ("switches", "prefetched")}
        forecast = served.report.forecast
        found["planned"] = sum(vars(forecast.device.states).values())
        found["planned"] += forecast.budget.reserve_bytes
        for name in "ab":
            create(served, f"{name}-alone")
            alone = [step(served, f"{name}-alone", n) for n in range(steps)]
            last = [_plain(a.result()) for a in alone[-1]]
            own = turned[-3:] if name == "b" else turned[-6:-3]
            assert last == own, name
        found["differing"] = [
            f"{name}: {key}"
            for name in "ab"
            for key in differences(saved(served, name), saved(served, f"{name}-alone"))
        ]
    return found


def replaced(path: Path) -> str:
    """Loads that come while copies of what they replace are under way, with every copy
    checked, and a pass after an update that is refused; what that was told."""
    check_runs(True)
    with service(path) as served:
        for name in "ab":
            create(served, name)
        own = served.save("b", "first").result()
        # as long as the rest takes to be queued
        asked = [served.forward_backward("a", rows(1, 60), forward_only=True)]
        # they take turns: b is fetched beside the update of a; then it leaves as updated
        asked += [*step(served, "b", 0), served.load("b", own, True)]
        asked += [*step(served, "a", 0), *step(served, "b", 0)]
        asked.append(served.load("b", own, True))
        for each in asked:
            each.result()
        served.forward_backward("b", rows(1)).result()
        told = served.optim_step("b", AdamParams(learning_rate=1e39)).exception()
        served.forward_backward("b", rows(1)).result()
    return str(told)


@contextmanager
def without_room(of: AdapterService, times: int) -> Iterator[None]:
    """Inside, so many backward passes run out of memory as they begin."""
    left = [times]

    def fail(*_: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("Tried to allocate 1024 bytes")

    # a step with a hook of others in it is not repeated
    fail.__module__ = "torch"
    head = of.session.model.get_output_embeddings()
    handle = head.register_full_backward_pre_hook(fail)
    yield
    handle.remove()


def short_of_memory(path: Path) -> tuple[list[str], list[bool], list[int], bool]:
    """A pass that runs out of memory once, one that does so for good, and neither: the
    error, whether weights and gradients are equal, and how often plans changed; whether the
    plan that repeats takes less in training than there was."""
    errors, equal, notches, kept, lower = [], [], [], [], False
    for times in (0, 1, 10):
        with service(path) as served:
            create(served, "b")
            for asked in step(served, "b", 0):
                asked.result()
            served.forward_backward("b", rows(1)).result()

            with without_room(served, times):
                error = served.forward_backward("b", rows(2)).exception()
            errors.append("" if error is None else str(error))
            if error is not None:
                served.forward_backward("b", rows(2)).result()
            kept.append(saved(served, "b"))
            notches.append(len(served.report.notches))
            if times == 1:
                had = served.report.notches[0]["in_use_bytes"]
                lower = served.report.forecast.device.phases["backward"] < had
            same = (torch.equal(kept[0][key], value) for key, value in kept[-1].items())
            equal.append(all(same) and kept[0].keys() == kept[-1].keys())
    return errors, equal, notches, lower


def update_short_of_memory(path: Path) -> tuple[str, list[str]]:
    """Why an update that runs out of memory is refused, after it has changed weights, and
    what differs then from before the gradients came."""

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 1024 bytes.")

    with service(path) as served:
        create(served, "b")
        for asked in step(served, "b", 0):
            asked.result()
        before = saved(served, "b")
        served.forward_backward("b", rows(1)).result()
        hook = register_optimizer_step_post_hook(fail)
        told = refusal(partial(served.optim_step, "b", ADAM))
        hook.remove()
        differing = differences(saved(served, "b"), before)
        served.forward_backward("b", rows(1)).result()
        with patch.object(torch.nn.utils, "clip_grad_norm_", fail):
            assert refusal(partial(served.optim_step, "b", ADAM)) == told
        return told, differing + differences(saved(served, "b"), before)


def not_finite(path: Path) -> tuple[str, bool, bool]:
    """Why a pass whose loss overflows is refused, whether what it was refused over is as it
    was, and whether nothing has the rows of a pass that was answered."""
    with service(path) as served:
        create(served, "c")
        for asked in step(served, "c", 0):
            asked.result()
        data = rows(1)
        row = weakref.ref(data[0].tokens)
        served.forward_backward("c", data).result()
        del data
        before = saved(served, "c")
        gone = row() is None
        (datum,) = rows(2, 1)
        old = torch.full(datum.tokens.shape, -1e3)
        inputs = {"logprobs": old, "advantages": torch.ones_like(old)}
        targets = {"target_tokens": datum.inputs["target_tokens"]}
        data = [Datum(datum.tokens, {**targets, **inputs})]
        error = served.forward_backward("c", data, "importance_sampling").exception()
        after = saved(served, "c")
        same = all(torch.equal(after[key], value) for key, value in before.items())
        return str(error), same and after.keys() == before.keys(), gone


def begun_again(path: Path) -> list[str]:
    """Ids that come again right after an unload, while another model's request runs: the
    layers of one created from a saved state, and why one that cannot be has no answers."""
    with service(path) as served:
        for name in "ac":
            create(served, name)
        path_ = served.save("c", "kept").result()
        served.create("b", 1, ["attn"]).result()
        told = []
        for wanted in (path_, "tinker://b/weights/none"):
            served.forward_backward("a", rows(1, 60))
            served.unload("b")
            served.create_from("b", wanted, True)
            asked = served.forward_backward("b", rows(2), forward_only=True)
            told.append(str(asked.exception() or served.spec("b").kinds))
        return told


def exported(path: Path) -> dict[str, list[float]]:
    """The largest difference between what the service and PEFT compute, for each row: of
    rows as the service pads them, two at a time to 64 tokens, and of each row alone."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    data = rows(3, 4)
    with service(path) as served:
        for name in "ac":
            create(served, name)
            for asked in step(served, name, 0):
                asked.result()
        _, wanted = served.forward_backward("c", data, forward_only=True).result()
        folder = folder_of(served.folder, served.save("c", "end", whole=False).result())
    base = yaml.safe_load(path.read_text())["base_model"]
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(plain, folder)

    def differences(size: int, length: int | None) -> list[float]:
        found = []
        for first in range(0, len(data), size):
            some = data[first : first + size]
            shape = (size, length or some[0].tokens.numel())
            tokens, mask = torch.zeros(2, *shape, dtype=torch.int64)
            targets = torch.full_like(tokens, -100)
            for row, datum in enumerate(some):
                end = datum.tokens.numel()
                tokens[row, :end], mask[row, : end + 1] = datum.tokens, 1
                targets[row, :end] = datum.inputs["target_tokens"]
            logits = model(input_ids=tokens, attention_mask=mask).logits.detach()
            flat = logits.flatten(0, 1), targets.flatten()
            nll = cross_entropy(*flat, reduction="none").view(shape)
            for row, logprobs in enumerate(wanted[first : first + size]):
                apart = -nll[row, : logprobs.numel()] - logprobs
                found.append(float(apart.abs().max()))
        return found

    return {"padded": differences(2, 64), "alone": differences(1, None)}


def softened(path: Path) -> dict[str, Any]:
    """What differs between one target a token and one candidate, and between rows of
    unlike numbers of candidates and the same ones filled up with a weight of 0; why
    candidates that cannot be are refused."""
    hard, soft = rows(4), [_with(datum, 1) for datum in rows(4)]
    few, many = soft_rows(5, 3), [_with(datum, 9) for datum in soft_rows(5, 3)]
    few[0] = _with(few[0], 2)
    many[0] = _with(few[0], 9)
    few[2], many[2] = rows(6, 1)[0], _with(rows(6, 1)[0], 9)
    found: dict[str, Any] = {}
    with service(path) as served:
        states = []
        for name, data in {
            "hard": hard,
            "soft": soft,
            "few": few,
            "many": many,
        }.items():
            served.create(name, 8, seed=1)
            loss, logprobs = served.forward_backward(name, data).result()
            shapes = [row.shape for row in logprobs]
            assert shapes == [datum.inputs["weights"].shape for datum in data]
            states.append((loss, logprobs, saved(served, name)))
        one, other, few_, many_ = states
        found["losses"] = one[0], other[0]
        pairs = zip(one[1], other[1], strict=True)
        found["logprobs"] = [a.equal(b.flatten()) for a, b in pairs]
        pairs = zip(few_[1], many_[1], strict=True)
        found["of few"] = [
            a.view(len(a), -1).equal(b[:, : a[0].numel()]) for a, b in pairs
        ]
        found["differing"] = differences(one[2], other[2])
        found["of few, differing"] = differences(few_[2], many_[2])
        tokens, inputs = few[1].tokens, few[1].inputs
        wide = {name: values.repeat(1, 20) for name, values in inputs.items()}
        flat = {**inputs, "weights": inputs["weights"][:, 0]}
        rest = {"logprobs": inputs["weights"], "advantages": inputs["weights"]}
        sampled = {"target_tokens": inputs["target_tokens"], **rest}
        for what, given, loss in (
            ("wide", wide, "cross_entropy"),
            ("flat", flat, "cross_entropy"),
            ("none", {k: v[:, :0] for k, v in inputs.items()}, "cross_entropy"),
            ("sampled", sampled, "ppo"),
        ):
            datum = Datum(tokens, given)
            found[what] = refusal(
                partial(served.forward_backward, "few", [datum], loss)
            )
    return found


def _with(datum: Datum, candidates: int) -> Datum:
    """A row with so many candidates, of which those that it has not have a weight of 0."""
    inputs = {}
    for name, values in datum.inputs.items():
        values = values.view(len(values), -1)[:, :candidates]
        inputs[name] = pad(values, (0, candidates - values.shape[1]))
    return Datum(datum.tokens, inputs)


def distilled(path: Path) -> dict[str, Any]:
    """Train by soft targets, and in plain PEFT from the same beginning; losses of both, and
    what differs in the end."""
    batches = [soft_rows(seed) for seed in range(3)]
    with service(path) as served:
        served.create("s", 8, seed=1)
        begin = served.save("s", "begin", whole=False).result()
        losses = []
        for data in batches:
            losses.append(served.forward_backward("s", data).result()[0])
            served.optim_step("s", ADAM).result()
        weights = saved(served, "s")
        folder = folder_of(served.folder, begin)
    wanted, plain = plainly_distilled(path, folder, batches)
    differing = [name for name in plain if not plain[name].equal(weights[name])]
    return {"losses": losses, "plain": wanted, "differing": differing}


def as_distilled(path: Path, told: Mapping[str, Any]) -> list[Any]:
    """Losses of plain PEFT on a client's rows, from where its student began, and what
    differs from where that ended."""
    data = []
    for tokens, *both in told["rows"]:
        targets, weights = map(torch.tensor, both)
        inputs = {"target_tokens": targets, "weights": weights}
        data.append(Datum(torch.tensor(tokens), inputs))
    begin, end = (folder_of(Path("state"), told[at]) for at in ("begin", "end"))
    losses, plain = plainly_distilled(path, begin, [data] * len(told["losses"]))
    found = load_file(end / WEIGHTS)
    return [losses, [name for name in plain if not plain[name].equal(found[name])]]


def plainly_distilled(
    path: Path, folder: Path, batches: list[list[Datum]]
) -> tuple[list[float], Saved]:
    """Losses and weights of an adapter that plain PEFT trains by soft targets, in rows that
    are padded as the service pads them."""
    from peft import PeftModel, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    base = yaml.safe_load(path.read_text())["base_model"]
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(plain, folder, is_trainable=True).eval()
    params = [param for param in model.parameters() if param.requires_grad]
    adam = (ADAM.beta1, ADAM.beta2), ADAM.eps, ADAM.weight_decay
    optimizer = torch.optim.AdamW(params, ADAM.learning_rate, *adam, fused=True)
    losses = []
    for data in batches:
        total = 0.0
        for first in range(0, len(data), 2):
            some = data[first : first + 2]
            ends = [datum.tokens.numel() for datum in some]
            candidates = max(datum.inputs["weights"].shape[1] for datum in some)
            tokens, mask = torch.zeros(2, len(some), 64, dtype=torch.int64)
            targets = torch.zeros(len(some), 64, candidates, dtype=torch.int64)
            weights = torch.zeros(targets.shape)
            for row, (datum, end) in enumerate(zip(some, ends, strict=True)):
                tokens[row, :end], mask[row, : end + 1] = datum.tokens, 1
                few = datum.inputs["weights"].shape[1]
                targets[row, :end, :few] = datum.inputs["target_tokens"]
                weights[row, :end, :few] = datum.inputs["weights"]
            logits = model(input_ids=tokens, attention_mask=mask).logits
            logprobs = logits.log_softmax(-1).gather(-1, targets)
            loss = -(weights * logprobs).sum()
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(params, ADAM.grad_clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    ours = get_peft_model_state_dict(model, save_embedding_layers=False)
    return losses, {name: weight.detach() for name, weight in ours.items()}


def save_for_ever(path: Path, told: Path) -> None:
    """Train two adapters in turns and save each step, until killed."""
    with service(path, adapter_bytes=1 << 19) as served, told.open("w") as log:
        for name in "bc":
            create(served, name)
        for number in range(10_000):
            for name in "bc":
                for asked in step(served, name, number):
                    asked.result()
                served.save(name, f"step-{number % 3}").result()
                print(name, number, file=log, flush=True)


def resumed(path: Path, last: Mapping[str, int]) -> list[str]:
    """Go on for a step from what each adapter has saved last; what differs from one that
    was never interrupted."""
    differing = []
    with service(path) as served:
        for name, number in last.items():
            again, whole = f"{name}-again", f"{name}-whole"
            path_ = f"tinker://{name}/weights/step-{number % 3}"
            served.create_from(again, path_, with_optimizer=True).result()
            create(served, whole)
            for earlier in range(number + 1):
                step(served, whole, earlier)
            for model in (again, whole):
                step(served, model, number + 1)
            found, wanted = saved(served, again), saved(served, whole)
            differing += [
                f"{name}, step {number}: {key}"
                for key, tensor in wanted.items()
                if not torch.equal(found[key], tensor)
            ]
    return differing


def optimized(path: Path) -> dict[str, Any]:
    """Adapters that the optimizer of a YAML trains: what differs between one in turns with
    others, which has been on the disk, and alone; and where it goes on from a save."""
    adam = AdamParams(learning_rate=0.01, weight_decay=0.1)
    found: dict[str, Any] = {}
    rank = yaml.safe_load(path.read_text())["lora_r"]

    def made(name: str) -> int:
        served.create(name, rank, SPECS[name[0]][1], seed=1).result()
        return served.store.layouts[name].nbytes

    def train(name: str, like: str, numbers: range) -> None:
        for number in numbers:
            served.forward_backward(name, rows(10 * number + ord(like))).result()
            served.optim_step(name, adam).result()

    with service(path) as served:
        nbytes = made("b")
    with service(path, adapter_bytes=nbytes * 3 // 2) as served:
        for name in "bch":
            made(name)
        for number in range(3):
            for name in "bch":
                train(name, name, range(number, number + 1))
            if number == 0:
                at = served.save("b", "first").result()
        found["away"] = sum(not a["on_host"] for a in served.status()["adapters"])
        turned = saved(served, "b")
        made("b-alone")
        train("b-alone", "b", range(3))
        served.create_from("b-again", at, with_optimizer=True).result()
        train("b-again", "b", range(1, 3))
        for name in ("b-alone", "b-again"):
            found[name] = differences(saved(served, name), turned)
        found["dtypes"] = sorted({str(one.dtype) for one in turned.values()})
    return found


def of_another_optimizer(path: Path, other: Path) -> dict[str, str]:
    """Why a state of AdamW is refused by a server of another optimizer, with its own
    optimizer and without, and so on."""
    with service(path) as served:
        create(served, "b")
        for asked in step(served, "b", 0):
            asked.result()
        at = served.save("b", "adamw").result()
        about = folder_of(served.folder, at) / ABOUT
    words = json.loads(about.read_text())
    assert words.pop("optimizer") == "adamw"
    # as earlier versions wrote it
    about.write_text(json.dumps(words))
    told = {}
    with service(path) as served:
        told["earlier"] = refusal(partial(served.create_from, "a", at, True))
    with service(other) as served:
        told["its own"] = refusal(partial(served.create_from, "n", at, True))
        told["without"] = refusal(partial(served.create_from, "o", at, False))
        for key, value in (("beta1", 0.8), ("beta2", 0.99), ("eps", 1e-8)):
            adam = AdamParams(**{key: value})
            told[key] = refusal(partial(served.optim_step, "o", adam))
        served.forward_backward("o", rows(1)).result()
        told["step"] = refusal(partial(served.optim_step, "o", AdamParams()))
        told["status"] = served.status()["optimizer"]
    return told


def loaded(path: Path) -> dict[str, list[str]]:
    """Load a state into a model that has gone on from it, with requests before and behind
    it in the queue and gradients of before that wait: what differs from a model that was
    created from the state; and after a load that is refused."""
    found: dict[str, Any] = {}
    with service(path, adapter_bytes=1 << 19) as served:
        create(served, "b")
        for asked in step(served, "b", 0):
            asked.result()
        served.forward_backward("b", rows(7)).result()
        at = served.save("b", "kept").result()
        create(served, "c")
        for whole in (True, False):
            asked = [*step(served, "b", 1), served.forward_backward("b", rows(8))]
            asked.append(served.load("b", at, with_optimizer=whole))
            asked += step(served, "b", 2)
            assert served.save("b", "then").result() and all(a.done() for a in asked)
            assert served.load("b", at, with_optimizer=whole).result() == at
            asked = [*step(served, "b", 2), *step(served, "c", 0)]
            new = f"b-new-{whole}"
            served.create_from(new, at, with_optimizer=whole)
            asked += step(served, new, 2)
            for one in asked:
                one.result()
            wanted = saved(served, new)
            found[f"optimizer: {whole}"] = [
                *differences(saved(served, "b"), wanted),
                *differences(saved_at(served, "tinker://b/weights/then"), wanted),
            ]
        served.forward_backward("b", rows(8)).result()
        before = saved(served, "b")
        other = served.save("c", "other").result()
        scaled = "tinker://b/weights/then"
        about = folder_of(served.folder, scaled) / ABOUT
        words = json.loads(about.read_text())
        # as a server has saved it whose YAML has another lora_alpha
        words["spec"]["alpha"] += 1
        about.write_text(json.dumps(words))
        wrong = {"none": "tinker://b/weights/none", "rank": other, "path": "x"}
        wrong["alpha"] = scaled
        for what, at in wrong.items():
            found[what] = [refusal(partial(served.load, "b", at, True))]
        found["refused"] = differences(saved(served, "b"), before)
        # some had to leave
        assert not all(one["on_host"] for one in served.status()["adapters"])
    return found


def config_of(root: Path, settings: Mapping[str, Any]) -> Path:
    """`config` with other keys."""
    return config(root, **settings)


def refusal(act: Callable[[], Any]) -> str:
    """Why it is refused, at once or by its future; empty if it is not."""
    try:
        found = act()
        error = found.exception() if isinstance(found, Future) else None
    except (ProTrainError, ValueError) as raised:
        error = raised
    return "" if error is None else str(error)


def differences(found: Saved, wanted: Saved) -> list[str]:
    return [
        *(found.keys() ^ wanted.keys()),
        *(k for k in found.keys() & wanted.keys() if not found[k].equal(wanted[k])),
    ]


def misused(path: Path) -> dict[str, Any]:
    """What a service says to those who misuse it, and what differs afterwards."""
    told: dict[str, Any] = {}
    with service(path, adapter_bytes=1 << 19) as served:
        told["second server"] = refusal(lambda: service(path))
        told["id"] = refusal(lambda: served.create("../x", 4))
        told["no layers"] = refusal(lambda: served.create("none", 4, []))
        told["eps"] = refusal(lambda: AdamParams(eps=0.0))
        told["rate"] = refusal(lambda: AdamParams(learning_rate=float("nan")))
        drawn = torch.random.get_rng_state()
        create(served, "c")
        served.turns.answer("c", 0).result()
        told["drawn"] = not drawn.equal(torch.random.get_rng_state())
        for asked in step(served, "c", 0):
            asked.result()
        told["created otherwise"] = refusal(lambda: served.create("c", 1))
        told["created alike"] = refusal(lambda: create(served, "c"))

        first = served.forward_backward("c", rows(1), number=4)
        told["sent again"] = served.forward_backward("c", rows(1), number=4) is first
        told["sent otherwise"] = refusal(
            lambda: served.forward_backward("c", rows(2), number=4)
        )
        told["another kind"] = refusal(lambda: served.optim_step("c", ADAM, number=4))

        before = saved(served, "c")
        served.forward_backward("c", rows(1)).result()
        huge = AdamParams(learning_rate=1e39)
        told["huge rate"] = refusal(lambda: served.optim_step("c", huge))
        after = saved(served, "c")
        told["after a huge rate"] = [
            key for key, tensor in after.items() if not tensor.equal(before[key])
        ]

        served.forward_backward("c", rows(1)).result()
        before = saved(served, "c")
        create(served, "a")
        step(served, "a", 0)[-1].result()
        told["after a switch"] = differences(saved(served, "c"), before)

        # in the way of what leaves for the disk
        (served.folder / "_evicted").mkdir(exist_ok=True)
        (served.folder / "_evicted/_incomplete").touch()
        names = [f"h{number}" for number in range(8)]
        told["full disk"] = [refusal(partial(_begun, served, name)) for name in names]
        (served.folder / "_evicted/_incomplete").unlink()
        told["after a full disk"] = differences(saved(served, "c"), before)

        create(served, "g")
        passed = served.forward_backward("g", rows(1, 40))
        waits = served.optim_step("g", ADAM)
        served.unload("g")
        # it may have run
        passed.exception()
        told["unloaded"] = str(waits.exception())
        create(served, "g")
        told["created again"] = float(served.optim_step("c", ADAM).result())
    told["after the end"] = refusal(lambda: create(served, "b"))
    told["ended twice"] = refusal(served.close)
    with patch.dict(os.environ, WORLD_SIZE="2"):
        told["ranks"] = refusal(lambda: service(path))

    # a save that was killed between its two renames
    kept = folder_of(served.folder, "tinker://c/weights/now")
    aside = kept.parent / "_incomplete/_replaced"
    aside.mkdir(parents=True)
    kept.rename(aside / kept.name)
    served = service(path)
    told["killed"] = served.store.spec_of(kept).rank
    create(served, "d-lost")
    for asked in step(served, "d-lost", 0):
        asked.result()
    (served.folder / "d-lost/weights").mkdir(parents=True)
    (served.folder / "d-lost/weights/_incomplete").touch()
    told["lost"] = refusal(served.close)
    return told


def _begun(of: AdapterService, name: str) -> Any:
    create(of, name)
    return of.turns.answer(name, 0)


DERIVED: dict[str, tuple[dict[str, Any], str]] = {
    "save_steps": ({"save_strategy": None, "save_steps": 3}, ""),
    "each epoch": ({"save_strategy": "epoch", "saves_per_epoch": 1}, ""),
    "mismatch": ({"save_strategy": "best", "save_steps": 300}, ""),
    "the best": (
        {
            "load_best_model_at_end": True,
            "save_strategy": "steps",
            "save_steps": 2,
            "eval_steps": 2,
            "val_set_size": 0.1,
            "metric_for_best_model": "eval_loss",
        },
        "",
    ),
    "stops early": ({"early_stopping_patience": 2, "evals_per_epoch": 2}, ""),
    "evaluation": (
        {
            "eval_strategy": "steps",
            "val_set_size": 0,
            "do_bench_eval": True,
            "eval_table_size": 5,
            "sample_packing": True,
        },
        "",
    ),
    "uploads": ({"hub_model_id": "a/b", "hub_strategy": "every_save"}, ""),
    "resuming": (
        {"resume_from_checkpoint": "none", "auto_resume_from_checkpoints": True},
        "",
    ),
    "batch_size": ({"batch_size": 4, "micro_batch_size": None}, ""),
    "warmup": ({"warmup_steps": 0.1, "warmup_ratio": 0.1}, ""),
    "streaming": (
        {"pretraining_dataset": [{"path": "x"}], "datasets": None, "max_steps": None},
        "",
    ),
    "dpo": ({"rl": "dpo", "rl_beta": 0.1, "sample_packing": True}, ""),
    "grpo": ({"rl": "grpo", "trl": {"num_generations": 3}}, ""),
    "ReLoRA": ({"relora": True, "relora_prune_ratio": 0.5}, ""),
    "optimizer": ({"optimizer": "sgd", "lr_groups": [], "adam_beta2": 0.9}, ""),
    "fp16": ({"fp16": True, "bf16": False}, "`fp16` needs losses that are scaled"),
    "lomo": ({"optimizer": "lomo"}, "optimizer: lomo updates weights inside of"),
    "slip": ({"optimizer": "adam_w"}, "optimizer: adam_w has not been tried"),
    "arguments": (
        {"optimizer": "sgd", "optim_args": "momentum=-1"},
        "optimizer: sgd cannot be made here: Invalid momentum value: -1.0",
    ),
    "logs": ({"use_wandb": True, "wandb_watch": "all", "use_mlflow": False}, ""),
    "offloading": (
        {"activation_offloading": True, "gradient_checkpointing": "offload"},
        "",
    ),
    "compiled": ({"torch_compile": True, "torch_compile_backend": "none"}, ""),
    "chat_template": ({"chat_template": "chatml", "eot_tokens": ["x"]}, ""),
    "8 bits": ({"load_in_8bit": True, "lora_qkv_kernel": True}, ""),
    "unset": ({"output_dir": None, "save_steps": None, "adapter": None}, ""),
    "images": ({"processor_type": "AutoProcessor"}, ""),
    "no adapter": ({"adapter": None, "unfrozen_parameters": ["lm_head"]}, ""),
    "FSDP": ({"fsdp_config": {"offload_params": True}}, "`fsdp_config`"),
    "ranks": ({"context_parallel_size": 2}, "`context_parallel_size: 2`"),
    "GPTQ": ({"gptq": True}, "`gptq: true`"),
    "modules": ({"lora_modules_to_save": ["lm_head"]}, "`lora_modules_to_save`"),
    "experts": ({"lora_target_parameters": ["x"]}, "`lora_target_parameters`"),
    "LoftQ": ({"peft": {"loftq_config": {"loftq_bits": 4}}}, "`peft` gives"),
    "rsLoRA": ({"peft_use_rslora": True}, "`peft_use_rslora` gives"),
    "rewards": ({"reward_model": True}, "`reward_model` makes"),
    "another adapter": ({"adapter": "llama-adapter"}, "adapter: llama-adapter"),
    "no base": ({"base_model": None}, "base_model: missing"),
    "a slip": ({"tokens": {"pad": "x"}}, "Axolotl refuses it: tokens:"),
    "gone": ({"flash_attn_rms_norm": True}, "`flash_attn_rms_norm` is no longer"),
    "away": ({"base_model": "no/such-base"}, "Axolotl refuses it"),
}
"""Keys of YAMLs over an ordinary one, as Axolotl's examples have them, and why a service
refuses them."""


def derived(path: Path) -> dict[str, str]:
    """What happens to each of `DERIVED`: why it is refused, or which keys are said to
    have no effect."""
    found = {}
    ordinary = yaml.safe_load(path.read_text())
    for name, (keys, _) in DERIVED.items():
        path.write_text(yaml.safe_dump({**ordinary, **keys}))
        try:
            _, cfg, unused, _ = read(path)
        except ProTrainError as error:
            found[name] = str(error)
        else:
            assert cfg.save_strategy == "no" and not cfg.save_steps
            told = {key for key in keys if keys[key] and key not in unused}
            found[name] = " ".join(sorted(told))
    return found


def over_experts(root: str) -> tuple[str, float]:
    """Why a service with LoRA on all linear layers does not start over experts that PEFT
    adapts for their names; a loss by the layers that it names instead."""

    def begun(**keys: Any) -> float:
        path = config(Path(root), "deepseek_v3", **keys)
        with service(path) as served:
            served.create("m", 8, ["attn", "unembed"], seed=1)
            return served.forward_backward("m", rows(0)).result()[0]

    try:
        begun()
    except ConfigError as error:
        names = re.findall(r"\((.*)\)", told := str(error))[0].split(", ")
        return told, begun(lora_target_modules=names, lora_target_linear=None)
    return "", 0.0


def over_another(path: Path) -> dict[str, Any]:
    """A state over bases of equal shapes that differ in the middle row of one layer, in
    the rate of rotation, in dtype and shards alone, and one that says nothing of a base:
    why each is refused."""
    told: dict[str, Any] = {}
    base = model_path("llama")
    file, config_file = base / "model.safetensors", base / "config.json"
    weights, words = load_file(file), config_file.read_text()

    def loaded(at: str = "tinker://a/weights/x") -> str:
        with service(path) as served:
            return refusal(lambda: served.create_from(f"b{len(told)}", at, True))

    with service(path) as served:
        create(served, "a")
        step(served, "a", 0)[-1].result()
        served.save("a", "x").result()
        served.save("a", "old").result()
        state = folder_of(served.folder, "tinker://a/weights/old") / ABOUT
    about = json.loads(state.read_text())
    state.write_text(json.dumps({"format": 1, "spec": about["spec"]}))
    told["the same"] = loaded()
    told["earlier"] = loaded("tinker://a/weights/old")
    other = {name: tensor.clone() for name, tensor in weights.items()}
    name = next(name for name in other if "down_proj" in name)
    other[name][other[name].shape[0] // 2] += 1
    save_file(other, file, {"format": "pt"})
    told["weights"] = loaded()
    save_file(weights, file, {"format": "pt"})
    keys = json.loads(words)
    keys["rope_parameters"] = {**(keys.get("rope_parameters") or {}), "rope_theta": 5e5}
    config_file.write_text(json.dumps(keys))
    told["config"] = loaded()
    config_file.write_text(json.dumps({**json.loads(words), "dtype": "bfloat16"}))
    half = {name: tensor.bfloat16() for name, tensor in weights.items()}
    parts = dict(list(half.items())[:5]), dict(list(half.items())[5:])
    index = {}
    for number, part in enumerate(parts):
        save_file(part, base / f"part-{number}.safetensors", {"format": "pt"})
        index |= dict.fromkeys(part, f"part-{number}.safetensors")
    file.unlink()
    (base / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    told["in other files"] = loaded()
    return told


def names(path: Path) -> dict[str, list[str]]:
    """Names that the store uses or has used, each saved twice: why it is refused, and
    what the folder holds afterwards."""
    found: dict[str, list[str]] = {}
    with service(path) as served:
        create(served, "c-names")
        for name in ("replaced", "old-replaced", "_replaced", "_incomplete", "_last"):
            told = [
                refusal(lambda name=name: served.save("c-names", name)) for _ in "12"
            ]  # type: ignore[misc]
            found[name] = told
        found[""] = sorted(
            p.name for p in (served.folder / "c-names/weights").iterdir()
        )
    return found


def never_closed(path: Path) -> None:
    """Train, and end without a word."""
    served = service(path)
    create(served, "f")
    for asked in step(served, "f", 0):
        asked.result()
    atexit._run_exitfuncs()


def together(path: Path) -> list[int]:
    """Numbers that 8 threads were given, which create and train one adapter at once."""
    found: list[int] = []

    def client(of: AdapterService) -> None:
        of.create("t", 2, seed=1)
        for _ in range(10):
            found.append(of.forward_backward("t", rows(1)).number)

    with service(path) as served:
        threads = [Thread(target=client, args=(served,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        served.turns.answer("t", 0).result()
    return sorted(found)
