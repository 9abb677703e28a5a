"""The training service trains all of a base as `axolotl train` does, one model at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import full_jobs
import pytest
import yaml
from axolotl_jobs import (
    PROTRAIN,
    SEEDING,
    Job,
    Result,
    job,
    overrides,
    weight_differences,
)
from fork_server import call
from full_jobs import FULL

Run = Callable[[Job], Result]

RECORDED = {
    "plugins": [PROTRAIN, SEEDING, "recording_plugin.RecordingPlugin"],
    "lr_scheduler": "constant",
    "gradient_accumulation_steps": 2,
}
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
