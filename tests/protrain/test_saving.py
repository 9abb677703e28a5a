"""What a paged run leaves on disk is what a plain one leaves, and either resumes it."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from axolotl_jobs import LORA, PROTRAIN, SEEDING, overrides, same_bits
from checked_device import CHECKED
from matrix_composition import SAMPLING
from peft import PeftModel
from saving_jobs import (
    FAMILY,
    MODEL,
    PAGED,
    REPORT,
    Jobs,
    difference,
    load,
    wait_for_steps,
    weights,
)
from tiny_models import random_model
from transformers import AutoModelForCausalLM

from axolotl.integrations.protrain.core.checkpoint import (
    MANIFEST,
    STAGING,
    checkpoint_bytes,
    differences,
    fault_of,
)
from axolotl.integrations.protrain.core.layout import build_layout

OTHER_PLAN = {**PAGED, "protrain_capacity_bytes": "1GiB", **overrides(1, 3, 2)}
MASTER = {"bf16": True, "protrain_fp32_master": True, **OTHER_PLAN}

HOSTED = {**LORA, "lora_r": 512, "protrain_capacity_bytes": "20MiB"}
"""Adapters so large that their optimizer state is on the host."""
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": LORA,
    "bf16": {"bf16": True},
    "hosted": HOSTED,
}
"""What is trained, paged or not."""

RESUMED: dict[str, tuple[dict[str, Any], str, str]] = {
    f"{kind}_{how}": ({**plan, **KINDS[kind]}, f"{kind}_{first}", f"{kind}_plain")
    for kind in KINDS
    for how, plan, first in (
        ("same", PAGED, "paged"),
        ("other", OTHER_PLAN, "paged"),
        ("to_plain", {}, "paged"),
        ("from_plain", PAGED, "plain"),
    )
} | {
    "master_same": (MASTER, "master", "master"),
    "master_other": ({**MASTER, **overrides(3, 1)}, "master", "master"),
    "hosted_resident": ({**HOSTED, **PAGED}, "hosted_paged", "hosted_plain"),
}
"""Settings of a second half, the run whose first half it continues, and the run in one
go that both must equal."""

ANSWERS = {**SAMPLING, **LORA}
STATELESS = {"protrain_save_optimizer_state": False}
NUM_MOMENTS = 20
MANY = {
    "gradient_accumulation_steps": 4,
    "lr_scheduler": "constant",
    "max_steps": 500,
    "save_steps": 500,
}
EACH = {
    **MANY,
    "max_steps": NUM_MOMENTS,
    "save_steps": 1,
    "save_total_limit": NUM_MOMENTS,
    "save_only_model": True,
}
"""The plain run beside those that are interrupted keeps the weights of every step."""

UNCHECKED = {CHECKED: None}
"""Of an interrupt between two of its notes the race checker makes a race."""

INTERRUPTED = {
    "interrupt_shell": (PAGED, 2, 0.02),
    "interrupt_early": (PAGED, 1, 0.0),
    "interrupt_later": (OTHER_PLAN, 4, 0.03),
    "interrupt_lora": ({**LORA, **PAGED}, 2, 0.01),
}
"""Settings, logged steps to wait for, seconds to wait after that."""

CUT_SHORT = {"rotating": "InterruptedRotation", "pushing": "FailingPush"}
BEST = {
    "max_steps": 6,
    "val_set_size": 0.2,
    "eval_steps": 2,
    "save_total_limit": 1,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": True,
    "load_best_model_at_end": True,
}
"""The first one is called the best, so that it is kept beside the newest."""

SLOW_DISK = {"plugins": [PROTRAIN, SEEDING, "saving_jobs.SlowDisk"]}
SLOWER_DISK = {
    "plugins": [PROTRAIN, SEEDING, "saving_jobs.DiskSlowerThanSteps"],
    "save_steps": 1,
}
BESIDE = {
    "beside_roomy": ({}, "3"),
    "beside_tight": ({"protrain_cpu_capacity_bytes": "2MiB"}, ""),
    "beside_master": (MASTER, "3"),
    "beside_host": ({"protrain_cpu_optimizer": "torch"}, "3"),
    "beside_hosted": (HOSTED, "3"),
    "beside_off": ({"protrain_async_save": False}, ""),
}
"""Settings of runs that save at each step, and a step that is made beside a save."""


@pytest.fixture(scope="module")
def jobs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Jobs]:
    """Every run of this file; all of them begin here, in the background."""
    asked = [getattr(item, "callspec", None) for item in request.session.items]
    names = {case.params.get("name") for case in asked if case is not None}
    jobs = Jobs(tmp_path_factory.mktemp("saving"))
    # first, because mutants are tried on these alone
    for name, plugin in CUT_SHORT.items():
        plugins = {"plugins": [PROTRAIN, SEEDING, f"saving_jobs.{plugin}"]}
        jobs.train(name, PAGED, plugins, {"save_total_limit": 1})
    for name, layers in (("best_plain", {}), ("best_paged", PAGED)):
        jobs.train(name, BEST, layers)
    for kind, settings in KINDS.items():
        jobs.train(f"{kind}_plain", settings)
        jobs.train(f"{kind}_paged", PAGED, settings)
    jobs.train("master", MASTER)
    for name, (settings, first, _) in RESUMED.items():
        if name in names:
            jobs.train(name, settings, resume(first), after=[first])
    # TRL's own resumed run is not the run in one go
    jobs.train("answers", PAGED, ANSWERS)
    for name, layers in (("answers_paged", PAGED), ("answers_plain", {})):
        jobs.train(name, layers, ANSWERS, resume("answers"), after=["answers"])
    add_refusals(jobs)
    jobs.train("stateless", PAGED, STATELESS)
    first = resume("stateless")
    jobs.train("from_stateless", PAGED, STATELESS, first, after=["stateless"])
    for name, (settings, _) in BESIDE.items():
        if name in names:
            jobs.train(name, SLOWER_DISK, PAGED, settings, {"save_total_limit": 2})
    uploads = {**SLOWER_DISK, "plugins": [PROTRAIN, SEEDING, "saving_jobs.Uploads"]}
    jobs.train("uploads", uploads, PAGED, {"save_total_limit": 1})
    beside = {**MANY, **SLOW_DISK, **PAGED, "save_steps": 3}
    jobs.train("interrupt_beside", beside, UNCHECKED, watch=interrupt(4, 0.0))
    add_interrupted(jobs, names)
    add_other_commands(jobs)
    yield jobs
    jobs.close()


def resume(run: str) -> dict[str, str]:
    return {"resume_from_checkpoint": f"{run}/checkpoint-2"}


def copy_checkpoint(
    run: str, target: str, change: Callable[[Path], None] = lambda folder: None
) -> Callable[[Path], None]:
    """Copies the first half of `run` to the folder `target` before a job."""

    def copy(folder: Path) -> None:
        ours = folder / target / "checkpoint-2"
        shutil.copytree(folder / run / "checkpoint-2", ours)
        change(ours)

    return copy


# ------------------------------------------------------- what a checkpoint consists of


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(2)
def test_checkpoints_are_those_of_the_plain_run(jobs: Jobs, kind: str) -> None:
    ours, plain = jobs[f"{kind}_paged"].finished, jobs[f"{kind}_plain"].finished
    assert ours.paged and not plain.paged
    hosted = "host-state" in ours.report["plan"]["placements"]
    assert hosted is (kind == "hosted")
    assert same_checkpoint(ours.folder, plain.folder, step=2) is None
    assert same_checkpoint(ours.folder, plain.folder, step=4) is None
    assert difference(weights(ours.folder), weights(plain.folder)) is None
    assert ours.history == plain.history
    assert files(ours.folder) - files(plain.folder) == {"protrain", "_lock"}
    assert differences(ours.folder / "checkpoint-4") == []


def same_checkpoint(ours: Path, plain: Path, step: int) -> str | None:
    """The first difference between two checkpoints."""
    ours, plain = (folder / f"checkpoint-{step}" for folder in (ours, plain))
    if files(ours) - {MANIFEST} != files(plain) - {MANIFEST}:
        return f"files {files(ours) ^ files(plain)}"
    for name in files(plain) & {"config.json", "adapter_config.json"}:
        if (ours / name).read_text() != (plain / name).read_text():
            return name
    return (
        difference(weights(ours), weights(plain), "model")
        or difference(optimizer(ours), optimizer(plain), "optimizer")
        or difference(load(ours / "scheduler.pt"), load(plain / "scheduler.pt"))
    )


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def optimizer(checkpoint: Path) -> dict[str, Any]:
    """optimizer.pt without the names, which only a paged run adds for its own check."""
    state = load(checkpoint / "optimizer.pt")
    for group in state["param_groups"]:
        group.pop("param_names", None)
    return state


# ------------------------------------------------------------------------------ resume


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.sampled(6)
def test_a_resumed_run_is_the_run_in_one_go(jobs: Jobs, name: str) -> None:
    settings, _, whole = RESUMED[name]
    ours, expected = jobs[name].finished, jobs[whole].finished
    assert ours.paged is settings.get("protrain_auto_memory", False)
    assert ours.history == expected.history
    assert same_checkpoint(ours.folder, expected.folder, step=4) is None
    assert difference(weights(ours.folder), weights(expected.folder)) is None


@pytest.mark.full
def test_answers_after_a_resume_are_those_of_the_plain_run(jobs: Jobs) -> None:
    """Only this sees random numbers that a generation under paging draws beside those of
    its tokens, after a checkpoint."""
    ours, expected = jobs["answers_paged"].finished, jobs["answers_plain"].finished
    assert ours.history == expected.history
    assert difference(weights(ours.folder), weights(expected.folder)) is None


def add_refusals(jobs: Jobs) -> None:
    """Runs that resume from what does not fit them."""
    jobs.train("to_master", MASTER, resume("bf16_paged"), after=["bf16_paged"])
    without = {**MASTER, "protrain_fp32_master": False}
    jobs.train("from_master", without, resume("master"), after=["master"])
    jobs.train(
        "short",
        PAGED,
        resume("short_source"),
        before=copy_checkpoint("full_paged", "short_source", drop_a_parameter),
        after=["full_paged"],
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "to_master",
            "optimizer.pt was written without fp32 master weights: resume with "
            "protrain_fp32_master: false",
        ),
        (
            "from_master",
            "optimizer.pt was written with fp32 master weights: resume with "
            "protrain_fp32_master: true",
        ),
        (
            "short",
            "resume_from_checkpoint: short_source/checkpoint-2 cannot be resumed: "
            "optimizer.pt belongs to other parameters",
        ),
    ],
)
def test_a_state_of_another_kind_is_refused(
    jobs: Jobs, name: str, message: str
) -> None:
    refused = jobs[name]
    assert refused.exit_code == 1
    assert f"CheckpointError: {message}" in refused.log
    assert not (refused.folder / "checkpoint-4").exists()


def drop_a_parameter(checkpoint: Path) -> None:
    state = load(checkpoint / "optimizer.pt")
    group = state["param_groups"][0]
    del state["state"][group["params"].pop()]
    torch.save(state, checkpoint / "optimizer.pt")
    # which says what it was
    (checkpoint / "protrain.json").unlink()


def test_the_optimizer_state_may_be_left_out(jobs: Jobs) -> None:
    ours, plain = jobs["stateless"].finished, jobs["full_plain"].finished
    assert ours.paged
    assert "hold no optimizer state: a resumed run restarts it" in ours.log
    assert not list(ours.folder.rglob("optimizer.pt"))
    assert difference(weights(ours.folder), weights(plain.folder)) is None


def test_resuming_without_optimizer_state_trains_on(jobs: Jobs) -> None:
    first, second = jobs["stateless"].finished, jobs["from_stateless"].finished
    assert second.paged
    assert [entry["step"] for entry in second.history] == [1, 2, 3, 4]
    assert second.history[2]["loss"] == first.history[2]["loss"]
    assert second.history[3]["loss"] != first.history[3]["loss"]
    assert "has weights only: optimizer and learning rate begin anew" in second.log


# ------------------------------------------------------------------------------ Ctrl-C


def interrupt(num_steps: int, delay_s: float) -> Callable[[int, Path], None]:
    """A person who presses Ctrl-C that long after that many steps were logged."""

    def press(process_id: int, log: Path) -> None:
        wait_for_steps(log, num_steps, process_id)
        time.sleep(delay_s)
        with suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGINT)

    return press


def add_interrupted(jobs: Jobs, names: Collection[str]) -> None:
    """And the plain runs beside them."""
    jobs.train("full_moments", EACH)
    if "interrupt_lora" in names:
        jobs.train("lora_moments", EACH, LORA)
    for name, (settings, steps, delay) in INTERRUPTED.items():
        if name in names:
            press, shell = interrupt(steps, delay), name == "interrupt_shell"
            jobs.train(name, MANY, settings, UNCHECKED, watch=press, shell=shell)


@pytest.mark.parametrize(
    "name",
    [
        *("interrupt_early", "interrupt_later"),
        pytest.param("interrupt_lora", marks=pytest.mark.full),
        pytest.param("interrupt_shell", marks=pytest.mark.full),
    ],
)
def test_ctrl_c_saves_the_weights_of_the_moment(jobs: Jobs, name: str) -> None:
    ended = jobs[name]
    assert ended.exit_code == 0, ended.log[-3000:]
    assert ended.paged
    num_steps = ended.log.count("'loss'")
    assert 1 <= num_steps < NUM_MOMENTS
    assert "Ended by an error or a signal after" in " ".join(ended.report["notes"])
    kind = "lora" if name == "interrupt_lora" else "full"
    plain = jobs[f"{kind}_moments"].finished.folder
    # in the middle of an update some weights are those of the next step
    moments = [
        weights(plain / f"checkpoint-{step}") for step in (num_steps, num_steps + 1)
    ]
    saved = weights(ended.folder)
    assert saved.keys() == moments[0].keys()
    for key, tensor in saved.items():
        assert any(same_bits(tensor, moment[key]) for moment in moments), key
    loads_without_the_plugin(jobs, ended.folder, kind)


def loads_without_the_plugin(jobs: Jobs, folder: Path, kind: str) -> None:
    """Raises if Hugging Face's own loaders do not take a checkpoint."""
    if kind == "lora":
        base = AutoModelForCausalLM.from_pretrained(jobs.folder / MODEL)
        PeftModel.from_pretrained(base, str(folder))
    else:
        AutoModelForCausalLM.from_pretrained(folder)


# ---------------------------------------------------------------------- other commands


def add_other_commands(jobs: Jobs) -> None:
    """The same YAML with other commands than train."""
    jobs.command(
        "merge_lora",
        "merge_lora",
        {**LORA, **PAGED, "lora_model_dir": "lora_paged"},
        arguments=["--merge_method=legacy"],
        after=["lora_paged"],
    )
    split = {"val_set_size": 0.2}
    jobs.command("evaluate_on", "evaluate", PAGED, split)
    jobs.command("evaluate_off", "evaluate", split, after=["evaluate_on"])
    jobs.command("inference", "inference", PAGED, stdin="a slot of the page\n")


@pytest.mark.parametrize("name", ["merge_lora", "evaluate_on", "inference"])
def test_only_training_pages(jobs: Jobs, name: str) -> None:
    ended = jobs[name].finished
    assert "Plugin loaded successfully: axolotl.integrations.protrain" in ended.log
    assert "ProTrain plan" not in ended.log
    assert not (ended.folder / REPORT).exists()


def test_an_adapter_merges(jobs: Jobs) -> None:
    merged = weights(jobs["merge_lora"].finished.folder / "merged")
    base = weights(jobs.folder / MODEL)
    adapter = weights(jobs["lora_paged"].folder)
    assert merged.keys() == base.keys()
    for name, tensor in base.items():
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" in adapter:
            a, b = (adapter[f"{prefix}.lora_{half}.weight"] for half in "AB")
            tensor = tensor + LORA["lora_alpha"] / LORA["lora_r"] * b @ a
            assert not torch.equal(merged[name], base[name])
        torch.testing.assert_close(merged[name], tensor, rtol=0, atol=1e-6)


def test_evaluation_is_that_of_the_plain_command(jobs: Jobs) -> None:
    ours, plain = (
        losses(jobs[name].finished.folder) for name in ("evaluate_on", "evaluate_off")
    )
    assert ours == plain
    assert 0 < float(ours["validation"]) < 10


def losses(folder: Path) -> dict[str, str]:
    """Of the training and the validation set, as `axolotl evaluate` wrote them."""
    with (folder / "eval_summary.csv").open() as stream:
        return {row["metric"]: row for row in csv.DictReader(stream)}["loss"]


def test_inference_answers(jobs: Jobs) -> None:
    log = jobs["inference"].finished.log
    assert "Give me an instruction" in log and "a slot of the page" in log


# ---------------------------------------------------- whole checkpoints, and only those


@pytest.mark.parametrize("name", CUT_SHORT)
def test_what_comes_after_a_save_cannot_undo_it(jobs: Jobs, name: str) -> None:
    ended, plain = jobs[name], jobs["full_plain"].finished
    assert ended.exit_code != 0 and "CheckpointError" not in ended.log
    assert "checkpoint-4" in files(ended.folder) and STAGING not in files(ended.folder)
    assert same_checkpoint(ended.folder, plain.folder, step=4) is None


def test_a_push_sees_whole_checkpoints_by_their_names(jobs: Jobs) -> None:
    pushed = [x for x in jobs["pushing"].log.splitlines() if x.startswith("pushed: ")]
    assert jobs["pushing"].log.count("checkpoints, which push_to_hub may read") == 1
    assert [line.split(",")[0][8:] for line in pushed] == [
        f"pushing/checkpoint-{step}" for step in (2, 4)
    ]
    assert all("trainer_state.json" in line for line in pushed)


def test_the_best_checkpoint_is_that_of_the_plain_run(jobs: Jobs) -> None:
    ours, plain = jobs["best_paged"].finished, jobs["best_plain"].finished
    assert files(ours.folder) - files(plain.folder) == {"protrain", "_lock"}
    assert difference(weights(ours.folder), weights(plain.folder)) is None
    found = [best(run.folder / "trainer_state.json") for run in (ours, plain)]
    assert found[0].replace("best_paged", "best_plain") == found[1]
    assert not found[1].endswith("-6")
    for path in plain.folder.glob("checkpoint-*/trainer_state.json"):
        own = best(ours.folder / path.relative_to(plain.folder))
        assert own.replace("best_paged", "best_plain") == best(path)


def best(state: Path) -> str:
    return json.loads(state.read_text())["best_model_checkpoint"]


@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.sampled(4)
def test_a_save_beside_training_is_that_of_its_step(jobs: Jobs, name: str) -> None:
    ended, plain = jobs[name].finished, jobs["full_plain"].finished
    settings, step = BESIDE[name]
    if step:
        assert f"made beside a save: step {step}" in ended.log
    if name == "beside_off":
        assert "made beside a save" not in ended.log
    for number in (3, 4):
        begun, said, *_ = re.finditer(
            rf"{STAGING}/checkpoint-{number}|checkpoint-{number} is complete", ended.log
        )
        assert begun[0] != said[0] and ended.log.count(said[0]) == 1
    last = rf"/step \(.* predicted\), .* tokens/s, peak .*: axolotl-protrain report .*{name}"
    assert re.search(last, ended.log)
    found = {x for x in files(ended.folder) if x.startswith("checkpoint")}
    assert found == {"checkpoint-3", "checkpoint-4"} and STAGING not in files(
        ended.folder
    )
    if settings is MASTER:
        plain = jobs["master"].finished
    if settings is HOSTED:
        plain = jobs["hosted_plain"].finished
    if name != "beside_host":
        assert ended.history == plain.history
        assert same_checkpoint(ended.folder, plain.folder, step=4) is None
        assert difference(weights(ended.folder), weights(plain.folder)) is None
    assert fault_of(ended.folder / "checkpoint-3") is None
    assert differences(ended.folder / "checkpoint-3") == []


def test_what_sends_checkpoints_waits_for_them_and_training_does_not(
    jobs: Jobs,
) -> None:
    ended = jobs["uploads"].finished
    assert "made beside a save: step 3" in ended.log
    sent = [line for line in ended.log.splitlines() if "sent: " in line]
    for step, line in enumerate(sent, 1):
        assert f"uploads/checkpoint-{step}', " in line and MANIFEST in line
        assert f"checkpoint_global_step_{step}'" in line
    assert len(sent) == 4


def test_ctrl_c_waits_for_the_save_under_way(jobs: Jobs) -> None:
    ended = jobs["interrupt_beside"]
    assert ended.exit_code == 0, ended.log[-3000:]
    names = files(ended.folder)
    saved = [ended.folder / x for x in names if x.startswith("checkpoint")]
    assert saved and STAGING not in names
    assert [fault_of(checkpoint) for checkpoint in saved] == [None] * len(saved)


@pytest.mark.parametrize(
    ("name", "with_optimizer", "fp32_master"),
    [
        ("full_paged", True, False),
        ("bf16_paged", True, False),
        ("master", True, True),
        ("stateless", False, False),
    ],
)
def test_the_room_asked_for_is_the_room_taken(
    jobs: Jobs, name: str, with_optimizer: bool, fp32_master: bool
) -> None:
    folder = jobs[name].finished.folder / "checkpoint-4"
    saved = weights(folder)
    model = random_model(FAMILY)
    for key, param in model.named_parameters():
        param.data = saved[key]
    layout = build_layout(model)
    asked = checkpoint_bytes(layout, False, with_optimizer, fp32_master)
    taken = sum(tensor.nbytes for tensor in saved.values())
    if with_optimizer:
        taken += sum(
            value.nbytes
            for entries in load(folder / "optimizer.pt")["state"].values()
            for key, value in entries.items()
            if key != "step"
        )
    assert taken <= asked <= taken + 1024
