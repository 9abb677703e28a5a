"""The examples: every YAML is one that Axolotl takes, and the demo sees a difference."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from axolotl.integrations.base import PluginManager
from axolotl.utils.config import prepare_plugins, validate_config
from axolotl.utils.dict import DictDefault
from axolotl.utils.schemas.config import AxolotlInputConfig

from axolotl.integrations.protrain.args import ProTrainArgs
from axolotl.integrations.protrain.core.planner.hardware import measured_unseen_bytes

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CLIENT = "remote-sft.yaml"
"""Loads no weights: whole with the plugin of another package."""
YAMLS = sorted(set(EXAMPLES.glob("*.yaml")) - {EXAMPLES / CLIENT})
PLUGIN = "axolotl.integrations.protrain.ProTrainPlugin"


@pytest.fixture
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", EXAMPLES / "demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def fresh_plugin_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Axolotl's manager is a process singleton that remembers earlier configs."""
    monkeypatch.setattr(PluginManager, "_instance", None)
    monkeypatch.setattr(PluginManager, "_cfg", None)


@pytest.mark.usefixtures("fresh_plugin_manager")
@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.name)
def test_axolotl_takes_the_example(path: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    known = AxolotlInputConfig.model_fields | ProTrainArgs.model_fields
    assert settings.keys() <= known.keys()  # axolotl itself drops a misspelt key
    assert settings["plugins"] == [PLUGIN]

    # what the demo builds when it runs is not there yet
    if settings["base_model"] == "examples/.demo/model":
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        settings["base_model"] = str(tmp_path)
    cfg = DictDefault(settings)
    prepare_plugins(cfg)
    validated = validate_config(
        cfg,
        capabilities={"bf16": True, "n_gpu": 1, "compute_capability": "sm_89"},
        env_capabilities={"torch_version": "2.13.0"},
    )
    assert validated.protrain_auto_memory is True


def test_the_data_are_the_same_each_time(demo: ModuleType) -> None:
    texts = list(demo.docstrings())
    assert len(texts) >= demo.NUM_ROWS
    assert texts == list(demo.docstrings())


@pytest.mark.parametrize(
    ("loss", "agree"),
    [(8.5, True), (math.nextafter(8.5, 9), False), (math.nan, False)],
)
def test_the_verdict_is_exact(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, loss: float, agree: bool
) -> None:
    monkeypatch.setattr(demo, "RELATIVE_TOLERANCE", 0.0)  # a GPU machine's is wider
    plain = [{"step": 1, "loss": 8.5, "grad_norm": 2.0}]
    _, verdict = demo.parity_table([{**plain[0], "loss": loss}], plain)
    assert verdict is agree


def test_a_gpu_has_the_budget_and_its_kernels(demo: ModuleType) -> None:
    own, on_gpu = (
        ProTrainArgs(protrain_capacity_bytes=budget).protrain_capacity_bytes
        for budget in (
            yaml.safe_load(demo.YAML.read_text())["protrain_capacity_bytes"],
            demo.GPU_BUDGET,
        )
    )
    unseen = measured_unseen_bytes(torch.device("cuda"), on_gpu)
    assert own <= on_gpu - unseen < own + 2**20


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_demo(ranks: int) -> None:
    demo = [sys.executable, EXAMPLES / "demo.py", "--steps=3", f"--ranks={ranks}"]
    subprocess.run(demo, check=True)
