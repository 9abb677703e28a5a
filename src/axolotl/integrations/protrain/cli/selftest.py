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
_TRACKERS = "comet mlflow otel swanlab trackio wandb".split()
_DROPPED_PREFIXES = tuple(p for who in _TRACKERS for p in (f"{who}_", f"use_{who}"))


class SelfTestPlugin(BasePlugin):
    """Listed only in the YAMLs that the self-test writes."""

    def pre_lora_load(self, cfg: Any, model: Any) -> None:
        torch.manual_seed(cfg.seed)

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        # the filter would log a loss that is no number as 0
        args = {"logging_nan_inf_filter": False}
        return args if torch.cuda.is_available() else {**args, "use_cpu": True}

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
        unknown: Of those, how many are no numbers in both runs.
        differing: Names of saved tensors that are not equal.
        tolerance: Largest relative difference that passes.
        pages: Whether some weights were on the host.
    """

    relative: Mapping[str, float]
    unknown: Mapping[str, int]
    steps: int
    differing: tuple[str, ...]
    tensors: int
    tolerance: float
    pages: bool

    @property
    def passed(self) -> bool:
        compared_something = self.tensors > 0 and self.unknown["grad_norm"] < self.steps
        return compared_something and all(
            value <= self.tolerance for value in self.relative.values()
        )

    def text(self) -> str:
        lines = []
        for key, value in self.relative.items():
            said = "equal" if value == 0 else f"relative difference {value:.2e}"
            of = f"{self.steps} steps" if key in COMPARED else f"{self.tensors} tensors"
            if number := self.unknown[key]:
                said += f", no number in {number} of {of} of both runs"
            lines.append(f"{key:14} {said}")
        equal = self.tensors - len(self.differing)
        lines.append(f"{'':14} {equal} of {self.tensors} tensors bit-equal")
        if self.differing:
            lines.append(f"{'':14} first to differ: {self.differing[0]}")
        allowed = f"{self.tolerance:.0e}" if self.tolerance else "none"
        verdict = "PASSED" if self.passed else "FAILED"
        last = [f"{verdict}: {self.steps} steps, difference allowed: {allowed}"]
        if self.unknown["loss"]:
            last.append("losses are no numbers in both runs")
        elif self.unknown["grad_norm"] == self.steps:
            last.append("no step has a gradient norm: nothing was compared")
        if not self.pages:
            last.append(
                "no weights were paged: lower protrain_capacity_bytes to test paging"
            )
        return "\n".join([*lines, "; ".join(last)])


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
        key: max((_relative(key, a[key], b[key]) for a, b in steps), default=0.0)
        for key in COMPARED
    }
    unknown = {
        key: sum(not (math.isfinite(a[key]) or math.isfinite(b[key])) for a, b in steps)
        for key in COMPARED
    }
    ours, theirs = _tensors(paged), _tensors(plain)
    names = sorted({*ours, *theirs})
    pairs = ((_tensor(name, ours), _tensor(name, theirs)) for name in names)
    distances = [_distance(mine, plain) for mine, plain in pairs]
    unknown["weights"] = sum(map(math.isnan, distances))
    # a NaN must not pass as small
    distances = [math.inf if math.isnan(value) else value for value in distances]
    relative["weights"] = max(distances, default=0.0)
    differing = tuple(n for n, value in zip(names, distances, strict=True) if value)
    pages = _report(paged)["plan"]["mode"] != "A"
    return Verdict(
        relative, unknown, len(steps), differing, len(names), tolerance, pages
    )


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
    report = _report(paged)
    trains_on_host = report["measured"]["offloaded_bytes"] > 0
    by_host = trains_on_host and raw.get("protrain_cpu_optimizer") is not None
    if report["device"] == "cpu" or not by_host:
        return 0.0
    return 1e-6 if raw.get("bf16") is False else 2.0**-7


def _report(run: Path) -> dict[str, Any]:
    return json.loads((run / "protrain" / "report.json").read_text())


def _relative(key: str, ours: float, theirs: float) -> float:
    same = ours == theirs or (math.isnan(ours) and math.isnan(theirs))
    # an overflow under fp16 has no norm in either run; a loss always is a number
    if same and (math.isfinite(ours) or key == "grad_norm"):
        return 0.0
    difference = abs(ours - theirs) / max(abs(ours), abs(theirs))
    # a NaN must not pass as small
    return math.inf if math.isnan(difference) else difference


def _tensors(folder: Path) -> dict[str, Path]:
    names: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            names.update((name, file) for name in tensors.keys())
    return names


def _tensor(name: str, files: Mapping[str, Path]) -> torch.Tensor | None:
    if name not in files:
        return None
    with safe_open(files[name], framework="pt") as tensors:
        return tensors.get_tensor(name)


def _distance(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> float:
    """Norm of the difference over the norm; infinite for a tensor that one side lacks,
    NaN where both have NaN."""
    if ours is None or theirs is None:
        return math.inf
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return math.inf
    if torch.equal(ours, theirs):
        return 0.0
    mine, plain = ours.double(), theirs.double()
    if mine.isnan().any() and plain.isnan().any():
        return math.nan
    return float(((mine - plain).norm() / plain.norm()).nan_to_num(nan=math.inf))
