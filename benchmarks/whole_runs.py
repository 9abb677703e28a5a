"""Pairs of `axolotl train` processes, with the plugin and without it, in turns."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from step_clock import TURNS
from tables import Page, median_interval, spread

from axolotl.integrations.protrain.report.run import WATCHED_STEPS

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Clocked:
    """One process: seconds of each step, watched ones left out, and all losses."""

    wall_s: list[float]
    cpu_s: list[float]
    loss: list[float]


@dataclass(frozen=True)
class ProcessPair:
    """Two trainings that took turns."""

    plain: Clocked
    ours: Clocked

    @property
    def ratios(self) -> list[float]:
        """Ours over plain, step by step."""
        return [a / b for a, b in zip(self.ours.wall_s, self.plain.wall_s, strict=True)]

    @property
    def cpu_ratios(self) -> list[float]:
        """The same of CPU time."""
        return [a / b for a, b in zip(self.ours.cpu_s, self.plain.cpu_s, strict=True)]

    @property
    def equal(self) -> bool:
        """Whether all losses are."""
        return self.ours.loss == self.plain.loss


def axolotl_pairs(num_pairs: int, num_steps: int) -> list[ProcessPair]:
    """Train the demo's model with everything resident, beside a plain process."""
    sys.path.insert(0, str(ROOT / "examples"))
    import demo

    demo.build_inputs()
    base = yaml.safe_load(demo.YAML.read_text("utf-8"))
    for key in ("protrain_auto_memory", "protrain_capacity_bytes", "save_steps"):
        del base[key]
    base |= {
        "max_steps": num_steps,
        "save_strategy": "no",
        "gradient_accumulation_steps": 1,
        "plugins": ["step_clock.StepClock"],
    }
    paged = {
        **base,
        "plugins": [
            *base["plugins"],
            "axolotl.integrations.protrain.ProTrainPlugin",
        ],
        "protrain_force_all_persistent": True,
        "protrain_auto_memory": True,
        "protrain_capacity_bytes": "8GiB",
    }
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(num_pairs):
            first_is_ours = number % 2 == 0
            configs = (paged, base) if first_is_ours else (base, paged)
            one, other = _train_in_turns(configs, Path(folder) / str(number))
            plain, ours = (other, one) if first_is_ours else (one, other)
            pairs.append(ProcessPair(plain, ours))
    return pairs


def _train_in_turns(
    configs: Sequence[Mapping[str, object]], folder: Path
) -> list[Clocked]:
    """Two processes of `axolotl train`, the first one beginning.

    Raises:
        RuntimeError: One of them failed.
    """
    folder.mkdir()
    to_first, from_second = os.pipe()
    to_second, from_first = os.pipe()
    os.write(from_second, b"t")
    ends = ((to_first, from_first), (to_second, from_second))
    with ExitStack() as undo:
        runs = []
        for number, (config, pipes) in enumerate(zip(configs, ends, strict=True)):
            output = folder / str(number)
            run = _start({**config, "output_dir": str(output)}, pipes)
            undo.callback(run.kill)
            runs.append((run, output))
        for pipes in ends:
            for end in pipes:
                # else a process that has failed would not be noticed by the other
                os.close(end)
        for run, _ in runs:
            _, said = run.communicate()
            if run.returncode:
                raise RuntimeError(f"axolotl train failed:\n{said[-4000:]}")
    return [_clocked(output) for _, output in runs]


def _start(
    config: Mapping[str, object], pipes: tuple[int, int]
) -> subprocess.Popen[str]:
    path = Path(str(config["output_dir"])).with_suffix(".yaml")
    path.write_text(yaml.safe_dump(dict(config)), "utf-8")
    folders = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "AXOLOTL_DO_NOT_TRACK": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        TURNS: ",".join(map(str, pipes)),
    }
    axolotl = str(Path(sys.executable).parent / "axolotl")
    return subprocess.Popen(
        [axolotl, "train", str(path), "--launcher=python"],
        cwd=ROOT,
        env=environment,
        pass_fds=pipes,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _clocked(output: Path) -> Clocked:
    clock: dict[str, Any] = json.loads((output / "steps.json").read_text("utf-8"))
    # the watched steps, and one more that fills caches
    first = WATCHED_STEPS + 1
    return Clocked(clock["wall_s"][first:], clock["cpu_s"][first:], clock["loss"])


def axolotl_page(pairs: Sequence[ProcessPair]) -> Page:
    """A row for each pair, and one for all of their steps."""
    rows = [
        [
            str(number),
            f"{statistics.median(pair.plain.wall_s) * 1e3:.1f}",
            f"{statistics.median(pair.ours.wall_s) * 1e3:.1f}",
            *_ratio_cells(pair.ratios, pair.cpu_ratios),
            "equal" if pair.equal else "DIFFER",
        ]
        for number, pair in enumerate(pairs, 1)
    ]
    ratios = [ratio for pair in pairs for ratio in pair.ratios]
    cpu_ratios = [ratio for pair in pairs for ratio in pair.cpu_ratios]
    rows.append(["all", "", "", *_ratio_cells(ratios, cpu_ratios), ""])
    title = "axolotl train, everything resident, in turns with one without the plugin"
    return Page(title, _COLUMNS, rows)


def _ratio_cells(ratios: Sequence[float], cpu_ratios: Sequence[float]) -> list[str]:
    low, high = median_interval(ratios)
    return [spread(ratios), f"{low:.3f} to {high:.3f}", spread(cpu_ratios)]


_COLUMNS = (
    "pair",
    "plain ms",
    "ours ms",
    "ours / plain",
    "95 %",
    "cpu ours / plain",
    "losses",
)
