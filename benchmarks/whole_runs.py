"""Whole `axolotl train` processes, with the plugin and without it."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml
from tables import Page

from axolotl.integrations.protrain.report import WATCHED_STEPS

ROOT = Path(__file__).resolve().parent.parent


def axolotl_pairs(num_pairs: int, num_steps: int) -> list[dict[str, float]]:
    """Train the demo's model with and without the plugin; medians of seconds a step."""
    sys.path.insert(0, str(ROOT / "examples"))
    import demo

    demo.build_inputs()
    base = yaml.safe_load(demo.PAGED_YAML.read_text("utf-8"))
    del base["protrain_auto_memory"], base["protrain_capacity_bytes"]
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(num_pairs):
            pair: dict[str, float] = {}
            for name in ("plain", "ours") if number % 2 else ("ours", "plain"):
                output = Path(folder) / f"{name}-{number}"
                plugins = ["step_clock.StepClock"]
                config = {
                    **base,
                    "output_dir": str(output),
                    "max_steps": num_steps,
                    "save_strategy": "no",
                    "gradient_accumulation_steps": 1,
                    "plugins": plugins,
                }
                del config["save_steps"]
                if name == "ours":
                    plugins.append("axolotl.integrations.protrain.ProTrainPlugin")
                    config["protrain_force_all_persistent"] = True
                    config["protrain_auto_memory"] = True
                    config["protrain_capacity_bytes"] = "8GiB"
                train(config, output.with_suffix(".yaml"))
                clock = json.loads((output / "steps.json").read_text("utf-8"))
                # the watched steps, and one more that fills caches
                for kind in ("wall_s", "cpu_s"):
                    steps = clock[kind][WATCHED_STEPS + 1 :]
                    pair[f"{name}_{kind}"] = statistics.median(steps)
                pair[f"{name}_loss"] = clock["loss"][-1]
            pairs.append(pair)
    return pairs


def train(config: dict[str, object], path: Path) -> None:
    """One process of `axolotl train`.

    Raises:
        RuntimeError: It failed.
    """
    path.write_text(yaml.safe_dump(config), "utf-8")
    folders = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "AXOLOTL_DO_NOT_TRACK": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
    }
    axolotl = str(Path(sys.executable).parent / "axolotl")
    command = [axolotl, "train", str(path), "--launcher=python"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"axolotl train failed:\n{done.stderr[-4000:]}")


def axolotl_page(pairs: Sequence[dict[str, float]]) -> Page:
    """A row for each pair."""
    rows = [
        [
            str(number),
            f"{pair['plain_wall_s'] * 1e3:.1f}",
            f"{pair['ours_wall_s'] * 1e3:.1f}",
            f"{pair['ours_wall_s'] / pair['plain_wall_s']:.3f}",
            f"{pair['ours_cpu_s'] / pair['plain_cpu_s']:.3f}",
            "equal" if pair["plain_loss"] == pair["ours_loss"] else "DIFFER",
        ]
        for number, pair in enumerate(pairs, 1)
    ]
    title = "axolotl train, everything resident, beside a process without the plugin"
    return Page(title, _COLUMNS, rows)


_COLUMNS = (
    "pair",
    "plain ms",
    "ours ms",
    "ours / plain",
    "cpu ours / plain",
    "last loss",
)
