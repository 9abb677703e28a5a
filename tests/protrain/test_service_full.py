"""The training service trains all of a base as `axolotl train` does, one model at a time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import full_jobs
import pytest
import service_http_jobs
import yaml
from axolotl_jobs import (
    Job,
    Result,
    job,
    overrides,
    weight_differences,
)
from fork_server import Fork, call
from full_jobs import FULL
from service_jobs import RECORDED
from service_server import TINKER_NEEDS, by_client, installed, server

Run = Callable[[Job], Result]

PAGED, RESIDENT = overrides(1, 2), overrides(4, 0)
LIKE: dict[str, tuple[Job, dict[str, Any]]] = {
    "fp32": (job("llama", RECORDED), PAGED),
    "bf16": (job("llama", RECORDED, {"bf16": True}), PAGED),
    "on the device": (job("llama", RECORDED), RESIDENT),
    "a part": (
        job("llama", RECORDED, {"unfrozen_parameters": ["model.layers.1.", "lm_head"]}),
        PAGED,
    ),
    **{
        name: (job("llama", RECORDED, {"optimizer": name, **keys}), plan)
        for name, keys, plan in (
            ("adamw_bnb_8bit", {}, PAGED),
            ("adafactor", {}, PAGED),
            ("sgd", {"optim_args": "momentum=0.9"}, RESIDENT),
        )
    },
}
QUICK = ("fp32", "bf16", "a part")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.full)
        for name in LIKE
    ],
)
def test_a_model_is_that_of_axolotl_train(run: Run, name: str) -> None:
    """Groups that decay otherwise, gradients summed or clipped otherwise, a state that is
    not the optimizer's or weights that are saved as others would differ in the last bits."""
    like, plan = LIKE[name]
    plain = run(like)
    assert not plain.error, plain.error
    root = plain.folder.parent.parent
    config = root / f"served-{like.name}.yaml"
    keys = {**like.settings, **FULL, **plan, "output_dir": f"served-{like.name}"}
    config.write_text(yaml.safe_dump(keys))
    history = [entry for entry in plain.history if "loss" in entry]
    found, weights = call(
        full_jobs.train_as, plain.folder, history, str(config), at=root
    )
    wanted = [entry["grad_norm"] for entry in history]
    assert [norm for _, norm in found] == pytest.approx(wanted, rel=1e-6)
    assert [loss for loss, _ in found] == pytest.approx(
        [entry["loss"] for entry in history], rel=1e-2
    )
    assert not weight_differences(weights, plain.weights, 0.0)


def test_experts_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    """transformers fuses them as it loads, and takes them apart as it saves; and a new
    model begins as the base, whatever was trained before."""
    path = call(full_jobs.config, tmp_path, "qwen3_moe", at=tmp_path)
    ours, again, plain = call(full_jobs.as_plainly, path, at=tmp_path)
    assert ours[0] == again[0] == plain[0]
    assert not weight_differences(ours[1], plain[1], 0.0)
    assert not weight_differences(again[1], plain[1], 0.0)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The YAML of a server that trains all of a tiny Llama."""
    root = tmp_path_factory.mktemp("served")
    return call(full_jobs.config, root, at=root)


MASTERS = {"bf16": True, "protrain_fp32_master": True}
GOES_ON: dict[str, dict[str, Any]] = {
    "paged": {},
    "on the device": RESIDENT,
    "bf16": {"bf16": True},
    "masters": MASTERS,
    "8 bits": {"optimizer": "adamw_bnb_8bit"},
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=() if name in ("paged", "masters") else pytest.mark.full
        )
        for name in GOES_ON
    ],
)
def test_a_state_goes_on_where_it_was_saved(tmp_path: Path, name: str) -> None:
    """A moment, master, count or gradient that a save forgets, or that a load leaves
    behind, is another number after the next update."""
    keys = GOES_ON[name]
    path = call(full_jobs.config_of, tmp_path, keys, at=tmp_path)
    waits = "protrain_fp32_master" not in keys
    found = call(full_jobs.resumed, path, waits, at=tmp_path)
    for what in ("loaded", "created", "without", "another server"):
        assert not found[what], what
    assert "no forward_backward" in found["nothing waits"]
    assert found["last waits"] is waits
    assert ("gradients wait, whose sums" in found["waiting"]) is not waits


def test_a_state_has_changed_files_alone(tmp_path: Path) -> None:
    """A file that is written again costs the disk a base; one that goes with another state
    is missing in this one."""
    keys = {"unfrozen_parameters": ["model.layers.1.", "lm_head"]}
    path = call(full_jobs.config_of, tmp_path, keys, at=tmp_path)
    found = call(full_jobs.changed_files, path, at=tmp_path)
    frozen, trained = found["first"][1]
    assert [found[name][0] for name in ("first", "second", "sampler", "third")] == [
        0,
        1,
        0,
        1,
    ]
    nodes = [found[name][1] for name in ("second", "sampler", "third")]
    assert {node for node, _ in nodes} == {frozen}
    assert nodes[0] == nodes[1] and len({trained, *(n for _, n in nodes)}) == 3
    for what in ("left", "live", "fetched"):
        assert not found[what], what
    assert found["info"] == (False, 0)


def test_a_base_that_trains_whole_is_linked(served: Path) -> None:
    """A model begins as the base: nothing of it is written."""
    base, start = call(full_jobs.linked, served, at=served.parent)
    assert base == start


def test_what_cannot_be_changes_nothing(served: Path) -> None:
    """Gradients that waited would be gone, or weights half read or not finite."""
    found = call(full_jobs.refused, served, at=served.parent)
    for what, words in {
        "rank": "rank 4; this server trains all of its base",
        "layers": "unfrozen_parameters",
        "second": "m trains all of the base, and one model can at a time",
        "loss": "the loss is -inf",
        "byte": "is not what was written",
        "end": "cannot be read",
        "no buffer": "optimizer.safetensors: buffer.",
        "a buffer": " is [3, 1], not [",
        "norm": "the norm of the gradients is inf",
        "nothing waits": "no forward_backward came before",
        "pass": "is not finite since the last optim_step. Load a state",
        "save": "is not finite since the last optim_step, and is not saved",
        "update": "some weights had changed (Tried to allocate 1024 bytes.). Load a",
        "lost": "lost since a load or an update failed. Load a state",
        "lost for a save": "lost since a load or an update failed. Load a state",
    }.items():
        assert words in found[what], (what, found[what])
    for what in ("after refusals", "after a norm", "after a load", "after a loss"):
        assert not found[what], what


def test_each_server_has_its_kind(tmp_path: Path) -> None:
    path = call(full_jobs.config, tmp_path, at=tmp_path)
    new, state, adapter = call(full_jobs.over_an_adapter, path, at=tmp_path)
    for told in (new, state):
        assert "rank 0; allowed are 1 to 32" in told and "without `adapter`" in told
    assert "rank 4; this server trains all of its base" in adapter


def test_a_pass_that_runs_out_of_memory_keeps_those_before(served: Path) -> None:
    """A smaller plan drops all gradients, and those of an earlier request would be gone."""
    found = call(full_jobs.short_of_memory, served, at=served.parent)
    assert [found[times][0] for times in ("0", "1")] == ["", ""]
    assert "the device has no room for this request" in found["10"][0]
    assert [notches for _, _, notches in found.values()] == [0, 1, 3]
    assert not any(differing for _, differing, _ in found.values())


def test_samples_are_of_the_weights_asked_for(served: Path) -> None:
    """Weights that have changed in between would answer in silence."""
    found = call(full_jobs.sampled, served, at=served.parent)
    assert found["base"] == found["untrained"] == found["base again"]
    assert found["live"] == found["of a path"] == found["while gradients wait"]
    assert found["unloaded"] == found["live"] != found["base"]
    assert found["now"] not in (found["live"], found["base"])
    for what in ("base meanwhile", "other"):
        assert "it alone can be sampled from" in found[what]
    assert "a model that has learned since" in found["stale"]
    assert not found["undisturbed"]


def test_a_kill_leaves_the_state_before(tmp_path: Path) -> None:
    """A file that is there for a half, or of another update than its optimizer."""
    path = call(full_jobs.config, tmp_path, at=tmp_path)
    saved, log = tmp_path / "saved", (tmp_path / "log").open("w")
    for seed in range(3):
        saved.unlink(missing_ok=True)
        running = Fork(full_jobs.saving, path, folder=tmp_path, stdout=log, stderr=log)
        while not saved.exists():
            time.sleep(0.05)
        time.sleep(random.Random(seed).random() / 5)
        running.kill()
        loss = call(full_jobs.go_on_from, path, at=tmp_path)
        assert 0 < loss < 20


@pytest.mark.full
def test_a_client_of_tinker_trains_all_of_a_base(served: Path, tmp_path: Path) -> None:
    """The unmodified package: it may know adapters alone."""
    client = installed(tmp_path, "tinker==0.38.0", *TINKER_NEEDS)
    with server(served) as address:
        given = {"TINKER_BASE_URL": address, "TINKER_API_KEY": "tml-test"}
        found = by_client("tinker_full.py", client, given, service_http_jobs.BASE)
    assert found["losses"][1] < found["losses"][0]
    assert found["ends"][0] == found["ends"][1]
    assert found["sampled"] == 5 and "has learned since" in found["stale"]
    assert "one model can at a time" in found["second"]
    assert found["lora"] == [False, 0] and found["again"] == found["ends"][0]
