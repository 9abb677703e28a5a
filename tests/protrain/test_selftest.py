"""`axolotl protrain selftest`: it passes on what is equal and sees what is not."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from axolotl.utils.dict import DictDefault
from axolotl_jobs import BASE, LORA, PAGED, PROTRAIN, Job, Result, overrides, pair
from click.testing import CliRunner
from fork_server import ENVIRONMENT
from safetensors.torch import load_file, save_file
from tiny_models import build_inputs, build_model, model_path
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from axolotl.integrations.protrain.cli import protrain
from axolotl.integrations.protrain.cli.selftest import (
    LOG_FILE,
    SelfTestPlugin,
    compare,
    derive,
    run_selftest,
)
from axolotl.integrations.protrain.core.errors import ProTrainError

COMMAND = "from axolotl.integrations.protrain.cli import protrain; protrain()"
STEPS = 2
PAIR = pair("llama", LORA, {"max_steps": STEPS}, plan=overrides(1, 2))


def write_config(root: Path, name: str, **settings: Any) -> Path:
    merged = {
        **BASE,
        **LORA,
        **PAGED,
        **overrides(1, 2),
        "base_model": str(model_path("llama")),
        "output_dir": "unused",
        "plugins": [PROTRAIN],
        # dropped by the self-test, or each would change what is compared
        "save_steps": 1,
        "save_strategy": None,
        "wandb_project": "none of its business",
        **settings,
    }
    path = root / f"{name}.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in merged.items() if v is not None}))
    return path


def selftest(config: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", COMMAND, "selftest", config.name, *options],
        cwd=config.parent,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("selftest")
    build_inputs(folder)
    build_model(folder, "llama")
    return folder


@pytest.mark.full
def test_equal_runs_pass(root: Path) -> None:
    """The command itself, which trains a LoRA twice; its runs stay under `kept`."""
    config = write_config(root, "lora")
    ended = selftest(config, "--keep", "kept", "--steps", str(STEPS))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"PASSED: {STEPS} steps, difference allowed: none" in ended.stdout
    report = json.loads((root / "kept/paged/protrain/report.json").read_text())
    assert report["measured"]["fetched_bytes"] > 0
    assert not (root / "kept/plain/protrain").exists()


TRACKERS = "comet mlflow otel_metrics swanlab trackio wandb".split()


def test_neither_run_reports_to_a_tracker() -> None:
    asked = {f"use_{who}": True for who in TRACKERS}
    asked |= {f"{who}_project_name": "mine" for who in TRACKERS}
    raw = {"plugins": [PROTRAIN], "lora_r": 4, **asked}
    derived = derive(raw, STEPS, Path("out"), paged=False)
    assert derived["lora_r"] == 4 and derived.keys().isdisjoint(asked)


def test_no_steps_are_refused() -> None:
    """Only this sees 0 taken for all epochs of both runs."""
    ended = CliRunner().invoke(protrain, ["selftest", "any.yaml", "--steps", "0"])
    assert ended.exit_code == 1 and "--steps" in ended.output


class Lossy(nn.Module):
    """Its loss is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.weight * labels).sum() * float("nan")}


def test_a_loss_that_is_no_number_is_logged_as_one(tmp_path: Path) -> None:
    """Only this sees the Trainer's filter, which logs 0 in its place in both runs."""
    args = TrainingArguments(
        str(tmp_path),
        max_steps=1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        **SelfTestPlugin().get_training_args(DictDefault()),
    )
    trainer = Trainer(Lossy(), args, train_dataset=[{"labels": torch.ones(1)}])
    trainer.train()
    assert math.isnan(trainer.state.log_history[0]["loss"])


@pytest.fixture
def runs(run: Callable[[Job], Result], tmp_path: Path) -> tuple[Path, Path]:
    """Copies of the outputs of a paged and a plain run, to be tampered with."""
    copies = tmp_path / "paged", tmp_path / "plain"
    for trained, copy in zip(PAIR.jobs, copies, strict=True):
        result = run(trained)
        assert not result.error, result.error
        shutil.copytree(result.output, copy)
        (copy / LOG_FILE).write_text(json.dumps(result.history))
    return copies


def test_equal_outputs_are_equal(runs: tuple[Path, Path]) -> None:
    assert compare(*runs, tolerance=0.0).passed


@pytest.mark.parametrize(
    ("key", "value"), [("loss", 1e-9), ("grad_norm", 1e-9), ("loss", float("nan"))]
)
def test_another_number_fails(runs: tuple[Path, Path], key: str, value: float) -> None:
    paged, plain = runs
    history = json.loads((paged / LOG_FILE).read_text())
    history[-2][key] = history[-2][key] + value
    (paged / LOG_FILE).write_text(json.dumps(history))
    verdict = compare(paged, plain, tolerance=0.0)
    assert not verdict.passed
    assert verdict.text().splitlines()[-1].startswith("FAILED")


def forget(runs: tuple[Path, Path], key: str, steps: int) -> None:
    """Make the first numbers of both logs none."""
    for folder in runs:
        history = json.loads((folder / LOG_FILE).read_text())
        for entry in history[:steps]:
            entry[key] = float("nan")
        (folder / LOG_FILE).write_text(json.dumps(history))


def test_a_norm_that_overflowed_in_both_is_equal(runs: tuple[Path, Path]) -> None:
    """Only this sees a step that fp16 skips, as plain training does, fail the self-test."""
    forget(runs, "grad_norm", 1)
    verdict = compare(*runs, tolerance=0.0)
    assert verdict.passed
    said = f"equal, no number in 1 of {STEPS} steps of both runs"
    assert said in verdict.text().splitlines()[1]


@pytest.mark.parametrize(
    ("key", "steps", "words"),
    [
        ("grad_norm", STEPS, "nothing was compared"),
        ("loss", 1, "losses are no numbers in both runs"),
        ("learning_rate", 1, f"no number in 1 of {STEPS} steps"),
    ],
)
def test_what_is_no_number_in_both_fails(
    runs: tuple[Path, Path], key: str, steps: int, words: str
) -> None:
    """Only this sees two runs pass that have lost the same numbers."""
    forget(runs, key, steps)
    verdict = compare(*runs, tolerance=0.0)
    assert not verdict.passed and words in verdict.text()


def test_weights_that_are_no_numbers_in_both_fail(runs: tuple[Path, Path]) -> None:
    for folder in runs:
        file = folder / "adapter_model.safetensors"
        tensors = load_file(file)
        tensors[sorted(tensors)[0]].view(-1)[0] = float("nan")
        save_file(tensors, file)
    verdict = compare(*runs, tolerance=1.0)
    assert not verdict.passed
    said = f"no number in 1 of {verdict.tensors} tensors of both runs"
    assert said in verdict.text()


def test_a_run_without_paging_passes_and_says_so(runs: tuple[Path, Path]) -> None:
    """Only this sees a test of nothing, where both runs fit, that reads like another."""
    words = "no weights were paged: lower protrain_capacity_bytes"
    assert words not in compare(*runs, tolerance=0.0).text()
    file = runs[0] / "protrain" / "report.json"
    report = json.loads(file.read_text())
    report["plan"]["mode"] = "A"
    file.write_text(json.dumps(report))
    verdict = compare(*runs, tolerance=0.0)
    assert verdict.passed and words in verdict.text()


def test_another_weight_fails(runs: tuple[Path, Path]) -> None:
    paged, plain = runs
    file = paged / "adapter_model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[0]
    tensors[name].view(-1)[0] += 1
    save_file(tensors, file)
    verdict = compare(paged, plain, tolerance=0.0)
    assert verdict.differing == (name,)
    assert not verdict.passed
    assert not compare(paged, plain, tolerance=1e-6).passed
    assert name in verdict.text()


def test_a_missing_weight_fails_at_any_tolerance(runs: tuple[Path, Path]) -> None:
    paged, plain = runs
    file = paged / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors.pop(sorted(tensors)[0])
    save_file(tensors or {"none": torch.zeros(1)}, file)
    assert not compare(paged, plain, tolerance=1.0).passed


def test_a_run_that_stopped_early_is_an_error(runs: tuple[Path, Path]) -> None:
    paged, plain = runs
    history = json.loads((paged / LOG_FILE).read_text())
    (paged / LOG_FILE).write_text(json.dumps(history[1:]))
    with pytest.raises(ProTrainError, match=f"{STEPS - 1} steps"):
        compare(paged, plain, tolerance=0.0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"plugins": None}, "does not list"),
        ({"protrain_auto_memory": False}, "set it to true"),
        ({"protrain_fp32_master": True}, "set it to false"),
        pytest.param(
            {"protrain_capacity_bytes": "1KB"},
            "protrain_capacity_bytes",
            marks=pytest.mark.full,
        ),
    ],
    ids=["not listed", "off", "masters", "a run that fails"],
)
def test_what_cannot_be_tested(
    root: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], words: str
) -> None:
    monkeypatch.chdir(root)
    config = write_config(root, "refused", **settings)
    with pytest.raises(ProTrainError, match=words):
        run_selftest(config, STEPS, root / "refused", lambda _line: None)
