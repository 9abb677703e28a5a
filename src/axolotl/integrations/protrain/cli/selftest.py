"""Train a configuration with and without paging, and compare what came out.

Both runs are real `axolotl train` processes on YAMLs derived from the given one. A
second plugin seeds the adapters, which Axolotl initialises before it seeds anything,
and writes the log in full precision.
"""

from __future__ import annotations

import json
import math
import os
import subprocess  # nosec B404
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from axolotl.integrations.base import BasePlugin
from safetensors import safe_open
from transformers import TrainerCallback

from ..args import PLUGIN, lists_plugin
from ..checks import checked_yaml
from ..core.errors import ConfigError, ProTrainError

LOG_FILE = "selftest.json"
COMPARED = ("loss", "grad_norm", "learning_rate")
_DROPPED = frozenset(
    "auto_resume_from_checkpoints early_stopping_patience eval_steps evals_per_epoch "
    "hub_model_id load_best_model_at_end resume_from_checkpoint save_steps "
    "saves_per_epoch".split()
)
_DROPPED_PREFIXES = ("wandb_", "mlflow_", "comet_", "swanlab_", "trackio_")


class SelfTestPlugin(BasePlugin):
    """Listed only in the YAMLs that the self-test writes."""

    def pre_lora_load(self, cfg: Any, model: Any) -> None:
        torch.manual_seed(cfg.seed)

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        return {} if torch.cuda.is_available() else {"use_cpu": True}

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        return [_WriteLog()]


class _WriteLog(TrainerCallback):
    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        Path(args.output_dir, LOG_FILE).write_text(json.dumps(state.log_history))


@dataclass(frozen=True)
class Verdict:
    """Largest differences between the two runs.

    Attributes:
        relative: By logged number, over all `steps`; `weights` over all `tensors`.
        differing: Names of saved tensors that are not equal.
        tolerance: Largest relative difference that passes.
    """

    relative: Mapping[str, float]
    steps: int
    differing: tuple[str, ...]
    tensors: int
    tolerance: float

    @property
    def passed(self) -> bool:
        compared_something = self.steps > 0 and self.tensors > 0
        return compared_something and all(
            value <= self.tolerance for value in self.relative.values()
        )

    def text(self) -> str:
        lines = [
            f"{key:14} {'equal' if value == 0 else f'relative difference {value:.2e}'}"
            for key, value in self.relative.items()
        ]
        equal = self.tensors - len(self.differing)
        lines.append(f"{'':14} {equal} of {self.tensors} tensors bit-equal")
        if self.differing:
            lines.append(f"{'':14} first to differ: {self.differing[0]}")
        allowed = f"{self.tolerance:.0e}" if self.tolerance else "none"
        verdict = "PASSED" if self.passed else "FAILED"
        lines.append(f"{verdict}: {self.steps} steps, difference allowed: {allowed}")
        return "\n".join(lines)


def run_selftest(
    config: Path, steps: int, keep: Path | None, say: Callable[[str], None]
) -> Verdict:
    """Run both trainings and compare them.

    Raises:
        ConfigError: The YAML does not turn ProTrain on.
        ProTrainError: A run failed; the end of its output is in the message.
    """
    raw = checked_yaml(config)
    _check_testable(config, raw)
    with tempfile.TemporaryDirectory(prefix="protrain-selftest-") as temporary:
        folder = keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        paged, plain = folder / "paged", folder / "plain"
        for output in (paged, plain):
            say(f"{output.name} run: {steps} steps")
            _train(derive(raw, steps, output, paged=output is paged), output)
        return compare(paged, plain, _tolerance(raw, paged))


def derive(
    raw: Mapping[str, Any], steps: int, output: Path, paged: bool
) -> dict[str, Any]:
    """The YAML of one of the two runs."""
    kept = {
        key: value
        for key, value in raw.items()
        if key not in _DROPPED and not key.startswith(_DROPPED_PREFIXES)
    }
    own = f"{SelfTestPlugin.__module__}.{SelfTestPlugin.__qualname__}"
    return {
        **kept,
        "plugins": [*raw["plugins"], own],
        "protrain_auto_memory": paged,
        "output_dir": str(output.absolute()),
        "max_steps": steps,
        "logging_steps": 1,
        "eval_strategy": "no",
        "save_strategy": "no",
        "seed": raw.get("seed", 42),
    }


def compare(paged: Path, plain: Path, tolerance: float) -> Verdict:
    """Compare two output folders of the self-test."""
    logs = []
    for folder in (paged, plain):
        history = json.loads((folder / LOG_FILE).read_text())
        logs.append([entry for entry in history if "loss" in entry])
    if len(logs[0]) != len(logs[1]):
        raise ProTrainError(
            f"the paged run logged {len(logs[0])} steps, the plain run {len(logs[1])}"
        )
    steps = list(zip(*logs, strict=True))
    relative = {
        key: max((_relative(a[key], b[key]) for a, b in steps), default=0.0)
        for key in COMPARED
    }
    ours, theirs = _tensors(paged), _tensors(plain)
    distances = {
        name: _distance(name, ours.get(name), theirs.get(name))
        for name in sorted({*ours, *theirs})
    }
    relative["weights"] = max(distances.values(), default=0.0)
    differing = tuple(name for name, value in distances.items() if value > 0)
    return Verdict(relative, len(steps), differing, len(distances), tolerance)


def _check_testable(config: Path, keys: Mapping[str, Any]) -> None:
    problem = None
    if not lists_plugin(keys.get("plugins")):
        problem = f"plugins does not list {PLUGIN}, so there is nothing to test."
    elif keys.get("protrain_auto_memory") is False:
        problem = "protrain_auto_memory is false; set it to true to test paging."
    elif keys.get("protrain_fp32_master"):
        problem = (
            "protrain_fp32_master updates otherwise than a run without paging, on "
            "purpose; set it to false for the self-test."
        )
    if problem is not None:
        raise ConfigError(f"{config}: {problem}")


def _train(keys: Mapping[str, Any], output: Path) -> None:
    config, log = output.with_suffix(".yaml"), output.with_suffix(".log")
    config.write_text(yaml.safe_dump(keys))
    command = [sys.executable, "-m", "axolotl.cli.train", str(config.absolute())]
    # else MKL rounds by the address of a weight, and the two runs' addresses differ
    environment = {"MKL_CBWR": "COMPATIBLE", **os.environ, "AXOLOTL_DO_NOT_TRACK": "1"}
    with log.open("w") as file:
        code = subprocess.run(  # nosec B603
            command, stdout=file, stderr=subprocess.STDOUT, env=environment
        ).returncode
    if code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise ProTrainError(f"the {output.name} run ended with code {code}:\n{tail}")


def _tolerance(raw: Mapping[str, Any], paged: Path) -> float:
    """Largest relative difference of a logged number.

    None where the same device updates: only `protrain_cpu_optimizer` of a GPU lets
    another one do it, which rounds apart by a few bits of the trained weights' dtype.
    """
    report = json.loads((paged / "protrain" / "report.json").read_text())
    trains_on_host = report["measured"]["offloaded_bytes"] > 0
    by_host = trains_on_host and raw.get("protrain_cpu_optimizer") is not None
    if report["device"] == "cpu" or not by_host:
        return 0.0
    return 1e-6 if raw.get("bf16") is False else 2.0**-7


def _relative(ours: float, theirs: float) -> float:
    # an overflow under fp16 has no norm in either run
    if ours == theirs or (math.isnan(ours) and math.isnan(theirs)):
        return 0.0
    difference = abs(ours - theirs) / max(abs(ours), abs(theirs))
    # a NaN on one side only must not pass as small
    return math.inf if math.isnan(difference) else difference


def _tensors(folder: Path) -> dict[str, Path]:
    names: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            names.update((name, file) for name in tensors.keys())
    return names


def _distance(name: str, ours: Path | None, theirs: Path | None) -> float:
    """Norm of the difference over the norm; infinite for a tensor on one side only."""
    if ours is None or theirs is None:
        return math.inf
    with safe_open(ours, framework="pt") as a, safe_open(theirs, framework="pt") as b:
        mine, plain = a.get_tensor(name), b.get_tensor(name)
    if mine.shape != plain.shape or mine.dtype != plain.dtype:
        return math.inf
    if torch.equal(mine, plain):
        return 0.0
    distance = (mine.double() - plain.double()).norm() / plain.double().norm()
    return float(distance.nan_to_num(nan=math.inf))
