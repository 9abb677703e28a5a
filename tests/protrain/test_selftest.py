"""`axolotl protrain selftest`: it passes on what is equal and sees what is not."""

from __future__ import annotations

import json
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
from axolotl_jobs import BASE, LORA, PAGED, PROTRAIN, Job, Result, overrides, pair
from fork_server import ENVIRONMENT
from safetensors.torch import load_file, save_file
from tiny_models import build_inputs, build_model, model_path

from axolotl.integrations.protrain.cli.selftest import LOG_FILE, compare, run_selftest
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


def test_a_norm_that_overflowed_in_both_is_equal(runs: tuple[Path, Path]) -> None:
    """Only this sees a step that fp16 skips, as plain training does, fail the self-test."""
    for folder in runs:
        history = json.loads((folder / LOG_FILE).read_text())
        history[0]["grad_norm"] = float("nan")
        (folder / LOG_FILE).write_text(json.dumps(history))
    assert compare(*runs, tolerance=0.0).passed


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
