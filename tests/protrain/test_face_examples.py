"""Examples without Axolotl: a plain loop, transformers' Trainer, TRL's SFTTrainer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    "name",
    [
        *("loop", "sft_trainer"),
        pytest.param("transformers_trainer", marks=pytest.mark.full),
    ],
)
def test_losses_norms_and_weights_are_those_of_the_plain_run(
    name: str, tmp_path: Path
) -> None:
    """With accumulated, clipped gradients, evaluations and checkpoints in between."""
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        env={
            **os.environ,
            "MKL_CBWR": "COMPATIBLE",
            "XDG_CACHE_HOME": str(tmp_path),
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert "equal True; weights True" in run.stdout
    assert "mode B: " in run.stdout
