"""What a run resumes from is chosen and looked at before anything is loaded."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from axolotl.utils.dict import DictDefault
from axolotl.utils.train import determine_last_checkpoint
from safetensors.torch import save_file
from torch import nn
from transformers import Trainer, TrainingArguments

from axolotl.integrations.protrain import ProTrainPlugin
from axolotl.integrations.protrain.core.checkpoint import STAGING, locked
from axolotl.integrations.protrain.core.errors import CheckpointError, ConfigError
from axolotl.integrations.protrain.trainer import ProTrainTrainerMixin


def write(checkpoint: Path, kind: str) -> None:
    """One that is whole, has weights only, or was cut short."""
    checkpoint.mkdir(parents=True)
    save_file({"weight": torch.ones(4)}, checkpoint / "model.safetensors")
    if kind != "weights":
        for name in ("optimizer.pt", "scheduler.pt"):
            torch.save({}, checkpoint / name)
    state = checkpoint / "trainer_state.json"
    state.write_text(json.dumps({"global_step": 1}))
    if kind == "cut":
        os.truncate(checkpoint / "optimizer.pt", 100)
    if kind == "no state":
        state.unlink()


def begin(run_dir: Path, **keys: object) -> str | None:
    """What Axolotl resumes from after the plugin's first hook."""
    # so small that no dry run comes first
    base = run_dir.parent / "base"
    base.mkdir(exist_ok=True)
    (base / "config.json").write_text('{"model_type": "llama"}')
    (base / "model.safetensors").write_bytes(b"weights")
    cfg = DictDefault(
        base_model=str(base),
        output_dir=str(run_dir),
        protrain_auto_memory=True,
        protrain_capacity_bytes=1 << 30,
        **keys,
    )
    ProTrainPlugin().load_datasets(cfg)
    return determine_last_checkpoint(cfg)


@pytest.mark.parametrize(
    ("kinds", "chosen"),
    [
        (["whole", "whole"], 2),
        (["whole", "cut"], 1),
        (["whole", "no state", "cut"], 1),
        (["whole", "weights"], 1),
        (["cut", "cut"], None),
        ([], None),
    ],
    ids=str,
)
def test_the_newest_whole_checkpoint_is_chosen(
    tmp_path: Path, kinds: Sequence[str], chosen: int | None
) -> None:
    for step, kind in enumerate(kinds, 1):
        write(tmp_path / f"checkpoint-{step}", kind)
    path = str(tmp_path / f"checkpoint-{chosen}") if chosen else None
    assert begin(tmp_path, auto_resume_from_checkpoints=True) == path
    assert begin(tmp_path) is None


def test_what_a_kill_left_half_done_is_undone(tmp_path: Path) -> None:
    write(tmp_path / STAGING / "replaced" / "checkpoint-9", "whole")
    write(tmp_path / STAGING / "checkpoint-9", "cut")
    chosen = begin(tmp_path, auto_resume_from_checkpoints=True)
    assert chosen == str(tmp_path / "checkpoint-9")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-9", "_lock"}


def test_a_second_start_is_refused_and_touches_nothing(tmp_path: Path) -> None:
    """Whatever else would be wrong with it; the first one is writing a checkpoint."""
    run_dir = tmp_path / "run"
    write(run_dir / STAGING / "checkpoint-9", "cut")
    write(run_dir / STAGING / "replaced" / "checkpoint-6", "whole")
    reader, writer = os.pipe()
    first = os.fork()
    if not first:
        lock = locked(run_dir)
        os.write(writer, b"x")
        signal.pause()
        assert lock
    assert os.read(reader, 1)
    before = [(path, path.stat()) for path in sorted(run_dir.rglob("*"))]
    try:
        with pytest.raises(ConfigError) as caught:
            begin(run_dir, resume_from_checkpoint="nowhere")
        assert [(p, p.stat()) for p in sorted(run_dir.rglob("*"))] == before
        message = f"output_dir: another run writes to {run_dir} (process {first} on "
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)
    finally:
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
    # what was killed holds nothing any longer, and this process goes on after itself
    for _ in range(2):
        assert begin(run_dir, auto_resume_from_checkpoints=True) == str(
            run_dir / "checkpoint-6"
        )
    ProTrainPlugin._claim.close()


def test_a_folder_without_locks_is_noted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def unknown(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with patch.object(fcntl, "flock", unknown), caplog.at_level("WARNING"):
        begin(tmp_path / "run")
    assert "nothing keeps a second run away" in caplog.text
    assert "(No locks available)" in caplog.text


@pytest.mark.parametrize("name", ["FSDP", "DEEPSPEED"])
def test_a_launcher_that_places_weights_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The YAML has no key for it, and accelerate would wrap what pages."""
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(ConfigError, match=f"^ACCELERATE_USE_{name}: .*torchrun`.$"):
        begin(tmp_path)
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "false")
    begin(tmp_path)


class KeepsDecay(Trainer):
    """As Axolotl's from 0.21 on."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        decays = [group["weight_decay"] for group in self.optimizer.param_groups]
        super()._load_optimizer_and_scheduler(checkpoint)
        for group, decay in zip(self.optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay


class ResumesPaged(ProTrainTrainerMixin, KeepsDecay):
    """What `page_trainer` makes of it."""


def test_a_trainers_own_way_to_resume_is_kept(tmp_path: Path) -> None:
    """State of the checkpoint, and the weight decay of the YAML, as in a plain run."""
    checkpoint, model = tmp_path / "checkpoint-1", nn.Linear(4, 4)
    write(checkpoint, "whole")
    for weight_decay in (0.1, 0.0):
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=weight_decay)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        if weight_decay:
            model(torch.ones(4)).sum().backward()
            optimizer.step()
            torch.save(optimizer.state_dict(), checkpoint / "optimizer.pt")
            torch.save(schedule.state_dict(), checkpoint / "scheduler.pt")
    args = TrainingArguments(str(tmp_path / "out"), use_cpu=True, report_to="none")
    trainer = ResumesPaged(model, args, optimizers=(optimizer, schedule))
    trainer._load_optimizer_and_scheduler(str(checkpoint))
    assert optimizer.state[model.weight]["step"] == 1
    assert optimizer.param_groups[0]["weight_decay"] == 0.0


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("cut", "optimizer.pt is truncated"),
        ("no state", "trainer_state.json is missing"),
        ("weights", "optimizer.pt is missing"),
    ],
)
def test_a_checkpoint_that_is_named_has_to_be_whole(
    tmp_path: Path, kind: str, fault: str
) -> None:
    write(tmp_path / "checkpoint-4", "whole")
    write(tmp_path / "checkpoint-6", kind)
    named = {"resume_from_checkpoint": str(tmp_path / "checkpoint-6")}
    with pytest.raises(CheckpointError) as caught:
        begin(tmp_path, **named)
    assert fault in str(caught.value)
    assert f"beside it is {tmp_path / 'checkpoint-4'}." in str(caught.value)


@pytest.mark.parametrize(
    "key", [{"protrain_save_optimizer_state": False}, {"save_only_model": True}]
)
def test_weights_alone_are_resumed_where_the_yaml_says_so(
    tmp_path: Path, key: dict[str, bool], caplog: pytest.LogCaptureFixture
) -> None:
    line = "has weights only: optimizer and learning rate begin anew"
    write(tmp_path / "checkpoint-6", "weights")
    named = {"resume_from_checkpoint": str(tmp_path / "checkpoint-6")}
    with caplog.at_level("WARNING"):
        assert begin(tmp_path, **named, **key) == named["resume_from_checkpoint"]
    # before the base is loaded
    assert line in caplog.text
    caplog.clear()
    write(tmp_path / "checkpoint-7", "whole")
    named = {"resume_from_checkpoint": str(tmp_path / "checkpoint-7")}
    with caplog.at_level("WARNING"):
        begin(tmp_path, **named, **key)
    assert line not in caplog.text


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="checkpoint-7 cannot be resumed: there"):
        begin(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
