"""A checkpoint that is written beside training is that of the moment of its save."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from core_models import (
    HOST_STATE,
    adamw,
    assert_same,
    batches,
    open_session,
    stack,
    train,
    twin,
    weights,
)
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._pytree import tree_leaves

from axolotl.integrations.protrain.core.checkpoint import (
    STAGING,
    Snapshot,
    plan_safetensors,
    restore,
    save_without_bytes,
    spec_of,
    staged,
)
from axolotl.integrations.protrain.core.engine.session import Session
from axolotl.integrations.protrain.core.errors import CheckpointError
from axolotl.integrations.protrain.core.types import Update

ROOMY = 1 << 30
WHERE: dict[str, dict[str, Any]] = {
    "paged": {"outside": HOST_STATE},
    "mixed": {"resident": (1, 4), "inside": HOST_STATE},
    "resident": {"resident": range(6)},
    "host": {"outside": HOST_STATE, "update": Update.HOST},
    "masters": {"outside": HOST_STATE, "fp32_master": True},
}
"""Plans."""


@contextmanager
def disk(act: Callable[[], None]) -> Iterator[None]:
    """Does something before each write of the thread that saves."""
    plain = os.pwrite

    def write(*args: Any) -> int:
        if threading.current_thread().name == "protrain-save_0":
            act()
        return plain(*args)

    with patch.object(os, "pwrite", write):
        yield


class Run:
    """A model under a plan that has trained for two steps, and its plain twin."""

    def __init__(self, folder: Path, where: str) -> None:
        dtype = torch.bfloat16 if where == "masters" else torch.float32
        self.checkpoint = folder / "checkpoint-2"
        self.model: Any = stack(dtype=dtype)
        self.plain = twin(self.model)
        self.session: Session = open_session(self.model, **WHERE[where])
        self.optimizer: Any = self.session.wrap_optimizer(adamw(self.model))
        self._reference = adamw(self.plain)
        self.losses: list[Any] = []
        self.expected: list[Any] = []
        self.train(2)

    def train(self, steps: int) -> None:
        data = [batches(1, len(self.losses) + n) for n in range(steps)]
        self.losses += train(self.model, self.optimizer, data, self.session)
        self.expected += train(self.plain, self._reference, data)

    def save(self, room: int) -> Snapshot:
        """What a run does at a save; the checkpoint has the number of its step."""
        run_dir = self.checkpoint.parent
        self.checkpoint = run_dir / f"checkpoint-{len(self.losses)}"
        restore(run_dir)
        folder = staged(self.checkpoint)
        folder.mkdir(parents=True)
        snapshot = Snapshot(room)
        tensors, state = self.model.state_dict(), self.optimizer.state_dict()
        self.weights = weights(self.model)
        self.state = [
            leaf.clone() if isinstance(leaf, Tensor) else leaf
            for leaf in tree_leaves(state)
        ]
        specs = [spec for name in tensors if (spec := spec_of(name, tensors[name]))]
        snapshot.add(folder / "weights", plan_safetensors(specs, {}), tensors)
        snapshot.add(folder / "state", *save_without_bytes(state, folder / "state"))
        snapshot.start(self.checkpoint, lambda: None)
        return snapshot

    def check(self) -> None:
        """The files are of the moment of the save."""
        found = load_file(self.checkpoint / "weights")
        assert found.keys() == self.weights.keys()
        assert all(torch.equal(found[name], self.weights[name]) for name in found)
        saved = tree_leaves(torch.load(self.checkpoint / "state", weights_only=True))
        assert len(saved) == len(self.state)
        for ours, theirs in zip(saved, self.state, strict=True):
            same = (
                torch.equal if isinstance(theirs, Tensor) else theirs.__class__.__eq__
            )
            assert same(ours, theirs)

    def close(self, snapshot: Snapshot) -> None:
        snapshot.join()
        self.session.close()


@pytest.mark.parametrize("where", WHERE)
def test_training_does_not_wait_for_the_disk(tmp_path: Path, where: str) -> None:
    run, released = Run(tmp_path, where), threading.Event()
    with disk(lambda: assert_released(released)):
        snapshot = run.save(ROOMY)
        run.train(2)
        assert not snapshot.over and not run.checkpoint.exists()
        released.set()
        run.close(snapshot)
    snapshot.check()
    run.check()
    if where != "masters":
        assert run.losses == run.expected


def assert_released(released: threading.Event) -> None:
    assert released.wait(30)


@pytest.mark.parametrize("room", [0, 10_000, 30_000])
@pytest.mark.parametrize("where", WHERE)
def test_what_has_no_room_is_written_before_training_goes_on(
    tmp_path: Path, where: str, room: int
) -> None:
    run, later = Run(tmp_path, where), [0]

    def count() -> None:
        later[0] += 1

    with disk(count):
        snapshot = run.save(room)
        snapshot.join()
        run.train(2)
        run.close(snapshot)
    snapshot.check()
    run.check()
    assert bool(later[0]) is bool(room)


def test_copies_take_no_more_than_their_room(tmp_path: Path) -> None:
    tensors = {f"{n}": torch.full((1000,), n, dtype=torch.uint8) for n in range(5)}
    specs = [spec for name in tensors if (spec := spec_of(name, tensors[name]))]
    path = staged(tmp_path / "checkpoint-1") / "weights"
    path.parent.mkdir(parents=True)
    snapshot = Snapshot(3500)
    snapshot.add(path, plan_safetensors(specs, {}), tensors)
    header = path.stat().st_size - 5000
    written = path.read_bytes()[header:]
    # three were copied, and none of their bytes is on the disk yet
    assert [*written[::1000]] == [0, 0, 0, 3, 4]
    for tensor in tensors.values():
        tensor.fill_(9)
    snapshot.start(tmp_path / "checkpoint-1", lambda: None)
    snapshot.join()
    snapshot.check()
    assert [*(tmp_path / "checkpoint-1/weights").read_bytes()[header::1000]] == [
        *range(5)
    ]


def load_others(run: Run) -> None:
    run.model.load_state_dict(stack(seed=3).state_dict())


def write_shown(run: Run) -> None:
    with run.session.full_params():
        for param in run.model.parameters():
            param.data.add_(1)


def write_unannounced(run: Run) -> None:
    """As a step pre-hook does, or who keeps references from one step to another."""
    plain = getattr(run.optimizer, "plain", run.optimizer)
    for state in vars(plain)["state"].values():
        for tensor in filter(torch.is_tensor, state.values()):
            tensor.fill_(7)
    for chunk in run.session._on_host():
        run.session.pool.chunk(chunk.index).fill_(7)


def write_state(run: Run) -> None:
    for state in run.optimizer.state.values():
        state["exp_avg"].zero_()
        state["step"].zero_()


def load_state(run: Run) -> None:
    fresh = adamw(twin(run.plain))
    run.optimizer.load_state_dict(fresh.state_dict())


OTHERS = [load_others, write_shown, write_unannounced, write_state, load_state]


@pytest.mark.parametrize("where", ["paged", "resident"])
@pytest.mark.parametrize("act", OTHERS)
def test_others_who_write_do_not_change_a_checkpoint(
    tmp_path: Path, act: Callable[[Run], None], where: str
) -> None:
    run, released = Run(tmp_path, where), threading.Event()
    with disk(lambda: assert_released(released)):
        snapshot = run.save(ROOMY)
        act(run)
        released.set()
        run.close(snapshot)
    snapshot.check()
    run.check()


@pytest.mark.parametrize("number", [1, 7, 40])
def test_a_full_disk_ends_the_save_and_not_the_step(
    tmp_path: Path, number: int
) -> None:
    run, writes = Run(tmp_path, "paged"), iter(range(1, 1000))
    (tmp_path / "checkpoint-1").mkdir()

    def fill() -> None:
        time.sleep(0.001)
        if next(writes) == number:
            raise OSError(errno.ENOSPC, "No space left on device")

    with disk(fill):
        snapshot = run.save(ROOMY)
        run.train(2)
        run.close(snapshot)
    with pytest.raises(CheckpointError, match="output_dir: .* No space left on device"):
        snapshot.check()
    assert run.losses == run.expected
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert not (tmp_path / STAGING).exists()


def test_a_full_disk_ends_a_save_that_training_waits_for(tmp_path: Path) -> None:
    run, plain = Run(tmp_path, "paged"), os.pwrite

    def write(*args: Any) -> int:
        if len(args[1]) > 1000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(*args)

    with patch.object(os, "pwrite", write), pytest.raises(OSError, match="No space"):
        run.save(0)
    run.session.close()


def save_each_step(folder: Path, rooms: list[int]) -> None:
    """Trains six steps, with a save in this room before each and a slow disk."""
    run = Run(folder, "paged")
    with disk(lambda: time.sleep(0.0005)):
        for room in rooms:
            snapshot = run.save(room)
            run.train(1)
            snapshot.join()


@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=pytest.mark.full)])
def test_a_kill_at_any_moment_leaves_whole_checkpoints(
    tmp_path: Path, kills: int
) -> None:
    random.seed(0)
    # a fork of this process would inherit locks that its other threads hold
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([Session.__module__, "safetensors.torch"])
    reference = Run(tmp_path, "paged")
    moments = {}
    for step in range(2, 6):
        moments[f"checkpoint-{step}"] = weights(reference.model)
        reference.train(1)
    reference.session.close()
    seen = set()
    for number in range(kills):
        run_dir = tmp_path / str(number)
        run_dir.mkdir()
        rooms = random.choices([0, ROOMY], k=4)
        process = server.Process(target=save_each_step, args=(run_dir, rooms))
        process.start()
        # on a busy machine a child may have saved nothing in half a second
        while number % 2 and not [*run_dir.glob("checkpoint-*")]:
            assert process.is_alive()
            time.sleep(0.01)
        time.sleep(random.uniform(0.05, 0.5))
        process.kill()
        process.join()
        restore(run_dir)
        for path in run_dir.iterdir():
            found = load_file(path / "weights")
            assert_same(
                dict(sorted(found.items())), dict(sorted(moments[path.name].items()))
            )
            assert torch.load(path / "state", weights_only=True)["state"]
            seen.add(path.name)
    assert seen


def test_a_file_filled_later_is_that_of_torch(tmp_path: Path) -> None:
    base = torch.arange(24.0)
    value = {
        "views": [base[2:5], base.view(4, 6).T, torch.tensor(7)],
        3: (torch.ones(0), torch.ones(3, dtype=torch.bfloat16), "text"),
    }
    plan, tensors = save_without_bytes(value, tmp_path / "file")
    assert sum(t.nbytes for t in tensors.values()) == 24 * 4 + 8 + 6
    with open(tmp_path / "file", "r+b", 0) as file:
        for key, start, end, offset in plan.pieces:
            os.pwrite(file.fileno(), tensors[key][start:end].numpy(), offset)
    found = tree_leaves(torch.load(tmp_path / "file", weights_only=True))
    for ours, theirs in zip(found, tree_leaves(value), strict=True):
        assert ours == theirs if isinstance(theirs, str) else torch.equal(ours, theirs)
    # what is shared stays shared
    assert (
        found[0].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr()
    )
