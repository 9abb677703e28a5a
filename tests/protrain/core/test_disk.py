"""Frozen chunks on a disk train as those in host memory do, bit for bit; what is wrong with
their files is said."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from core_models import (
    ALL,
    adamw,
    assert_same,
    batches,
    freeze,
    make_plan,
    open_session,
    packed_stack,
    stack,
    train,
    twin,
    wrapped,
)
from safetensors.torch import load_file, save_file
from simulated import DeferredDevice
from test_failures import FaultyDevice
from torch import nn

from axolotl.integrations.protrain.core.engine.chunk_files import (
    read_rate,
    remove_unfinished,
    store,
    stored,
)
from axolotl.integrations.protrain.core.engine.session import Session
from axolotl.integrations.protrain.core.errors import AccessError, DiskError
from axolotl.integrations.protrain.core.planner.cards import gpu_hardware
from axolotl.integrations.protrain.core.planner.job import Choice, with_disk_rate

EVERY = range(99)
PLANS: dict[str, dict[str, Any]] = {
    "all": {"n_buffer": 2, "on_disk": EVERY},
    "half": {"n_buffer": 2, "on_disk": range(0, 99, 2)},
    "one buffer": {"n_buffer": 3, "on_disk": EVERY, "disk_buffers": 1},
    "room for all": {"n_buffer": 2, "on_disk": EVERY, "disk_buffers": 12},
    "recompute": {"n_buffer": 3, "on_disk": EVERY, "recompute": ALL},
    "swap": {"n_buffer": 2, "on_disk": EVERY, "swap": (0, 1, 2)},
    "some stay": {"n_buffer": 2, "on_disk": EVERY, "resident": (0, 1, 4)},
}


def from_file(model: nn.Module, path: Path) -> nn.Module:
    """The model with its frozen weights as pages of a file of safetensors."""
    save_file(model.state_dict(), path)
    pages = load_file(path)
    for name, param in model.named_parameters():
        if not param.requires_grad and not name.endswith("bias"):
            param.data = pages[name]
    return model


def frozen(trained: tuple[str, ...] = ("norm", "extra")) -> nn.Module:
    model = stack()
    freeze(model, trained)
    return model


def assert_trains_the_same(
    own: Any, other: Any, session: Session, steps: int = 3
) -> None:
    optimizer, others = wrapped(session), adamw(other)
    for seed in range(steps):
        data = [batches(2, seed)]
        wanted = train(other, others, data, clip=0.5)
        assert train(own, optimizer, data, session, clip=0.5) == wanted
        with torch.no_grad():
            (tokens,) = batches(1, 9)
            assert own(tokens) == other(tokens)
    assert_same(own.state_dict(), other.state_dict())


@pytest.mark.parametrize("plan", PLANS)
def test_it_trains_as_plain(plan: str, tmp_path: Path) -> None:
    own = frozen()
    other = twin(own)
    session = open_session(own, disk=tmp_path, **PLANS[plan])
    assert_trains_the_same(own, other, session)
    assert session.measured().disk_bytes > 0
    session.close()
    assert_same(own.state_dict(), other.state_dict())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("disk_buffers", [1, 3])
def test_copies_out_of_the_ring_may_come_late(
    seed: int, disk_buffers: int, tmp_path: Path
) -> None:
    """A read into a buffer waits for the copy out of it, however late that is."""
    own, device = frozen(), DeferredDevice(seed)
    other = twin(own)
    plan = {"n_buffer": 3, "on_disk": EVERY, "disk_buffers": disk_buffers}
    session = open_session(own, disk=tmp_path, device=device, **plan)
    assert_trains_the_same(own, other, session, 2)
    session.close()
    device.close()


def test_packed_chunks_may_lie_there(tmp_path: Path) -> None:
    own, other = packed_stack(), packed_stack(False)
    session = open_session(own, disk=tmp_path, n_buffer=2, on_disk=EVERY)
    optimizer, others = wrapped(session), adamw(other)
    data = [batches(2, seed) for seed in range(3)]
    assert train(own, optimizer, data, session) == train(other, others, data)
    session.close()


def test_the_host_has_no_frozen_weights(tmp_path: Path) -> None:
    own = frozen()
    session = open_session(own, disk=tmp_path, n_buffer=2, on_disk=EVERY)
    trained = sum(chunk.nbytes for chunk in session.layout.pageable if chunk.trainable)
    assert session.measured().host_arena_bytes < trained + 4096 * 6
    session.close()


def test_files_are_written_once_and_have_the_names_of_their_content(
    tmp_path: Path,
) -> None:
    plan = {"n_buffer": 2, "on_disk": EVERY}
    open_session(frozen(), disk=tmp_path / "new", **plan).close()
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "new").iterdir()}
    assert {path.suffix for path in files} == {".chunk"}
    open_session(frozen(("norm",)), disk=tmp_path / "new", **plan).close()
    for path, before in files.items():
        assert path.stat().st_mtime_ns == before


def test_a_ring_with_room_for_all_reads_each_chunk_once(tmp_path: Path) -> None:
    own = frozen()
    plan = {"n_buffer": 2, "on_disk": EVERY, "disk_buffers": 99}
    session = open_session(own, disk=tmp_path, **plan)
    nbytes = sum(c.nbytes for c in session.layout.pageable if not c.trainable)
    train(own, wrapped(session), [batches(2, seed) for seed in range(2)], session)
    assert session.measured().disk_bytes == nbytes
    session.close()


def test_a_replan_leaves_them_there(tmp_path: Path) -> None:
    own = frozen()
    other = twin(own)
    plan: dict[str, Any] = {"n_buffer": 2, "on_disk": EVERY, "resident": (0, 1)}
    device = FaultyDevice()
    session = open_session(own, disk=tmp_path, device=device, **plan)
    optimizer, others = wrapped(session), adamw(other)
    data = [batches(2, seed) for seed in range(2)]
    assert train(own, optimizer, data, session) == train(other, others, data)
    plan = {"n_buffer": 3, "recompute": (2,), "on_disk": EVERY}
    session.replan(make_plan(session.layout, **plan))
    assert train(own, optimizer, data, session) == train(other, others, data)
    session.close()
    # nor does the ring of the first plan stay
    assert not device.pinned


# what others see


def test_weights_are_true_wherever_somebody_looks(tmp_path: Path) -> None:
    own = frozen()
    other = twin(own)
    session = open_session(own, disk=tmp_path, n_buffer=2, on_disk=EVERY)
    assert_same(own.state_dict(), other.state_dict())
    with session.full_params():
        assert_same(dict(own.named_parameters()), dict(other.named_parameters()))
    copied = deepcopy(own)
    (tokens,) = batches(1)
    assert torch.equal(copied(tokens), other(tokens))
    assert torch.equal(own(tokens), other(tokens))
    session.close()


def writes_data(own: Any, _session: Session) -> None:
    own.layers[2].up.weight.data[0] += 1


def writes_a_small_one(own: Any, _session: Session) -> None:
    """A bias, which stays in memory where it is no page of a file."""
    own.layers[2].down.bias.data += 1


def replaces(own: Any, _session: Session) -> None:
    own.layers[2].up.weight.data = torch.zeros_like(own.layers[2].up.weight)


@pytest.mark.parametrize("in_base", [False, True], ids=["own files", "the base's"])
@pytest.mark.parametrize("write", [writes_data, writes_a_small_one, replaces])
def test_a_write_is_refused_and_taken_back(
    write: Callable[[Any, Session], None], in_base: bool, tmp_path: Path
) -> None:
    own = frozen()
    if in_base:
        from_file(own, tmp_path / "base.safetensors")
    other = twin(own)
    session = open_session(own, disk=tmp_path, n_buffer=2, on_disk=EVERY)
    assert bool([*tmp_path.glob("*.chunk")]) != in_base
    with pytest.raises(AccessError, match=r"layers\.2\..* on the disk"):
        with session.full_params():
            write(own, session)
    assert_trains_the_same(own, other, session, 1)
    session.close()


def test_a_load_of_other_values_is_refused(tmp_path: Path) -> None:
    own = frozen()
    session = open_session(own, disk=tmp_path, n_buffer=2, on_disk=EVERY)
    state = {name: value.clone() for name, value in own.state_dict().items()}
    own.load_state_dict(state)
    state["layers.1.up.weight"][0] += 1
    with pytest.raises(AccessError, match=r"layers\.1\..* on the disk"):
        own.load_state_dict(state)
    session.close()


# what is wrong with files


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def changed(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(64)
        file.write(b"\xff" * 64)


@pytest.mark.parametrize("wrong", [cut, changed])
def test_a_file_that_somebody_changes_meanwhile_is_noticed(
    wrong: Callable[[Path], None], tmp_path: Path
) -> None:
    own = frozen()
    session = open_session(
        own, disk=tmp_path, n_buffer=2, on_disk=EVERY, disk_buffers=1
    )
    optimizer = wrapped(session)
    train(own, optimizer, [batches(1)], session)
    for path in tmp_path.iterdir():
        wrong(path)
    with pytest.raises(DiskError, match=r"protrain_disk_dir: .*\.chunk: "):
        train(own, optimizer, [batches(1)], session)
    session.close()


def test_a_file_of_other_content_is_not_believed(tmp_path: Path) -> None:
    plan = {"n_buffer": 2, "on_disk": EVERY}
    open_session(frozen(), disk=tmp_path, **plan).close()
    for path in tmp_path.iterdir():
        changed(path)
    own = frozen()
    session = open_session(own, disk=tmp_path, **plan)
    with pytest.raises(DiskError, match="its content is not what its name says"):
        own(batches(1)[0])
    session.close()


def test_a_file_that_is_replaced_or_deleted_does_not_matter(tmp_path: Path) -> None:
    own = frozen()
    other = twin(own)
    session = open_session(own, disk=tmp_path, n_buffer=2, on_disk=EVERY)
    for path in tmp_path.iterdir():
        path.unlink()
    assert_trains_the_same(own, other, session, 1)
    session.close()
    assert_same(own.state_dict(), other.state_dict())


def test_who_measures_leaves_no_file_and_draws_no_number(tmp_path: Path) -> None:
    """Ranks measure at once, and training goes on with the numbers that come next."""
    state = torch.get_rng_state()
    with ThreadPoolExecutor(2) as ranks:
        rates = [*ranks.map(read_rate, [tmp_path] * 2)]
    assert min(rates) > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert not [*tmp_path.iterdir()]


def test_ranks_that_measure_at_once_each_see_a_share(tmp_path: Path) -> None:
    """Only this sees a plan for ranks whose reads take many times as long as they do."""
    card, choice = gpu_hardware("4090", None, 1 << 30), Choice(disk=tmp_path)
    alone, shared = (with_disk_rate(card, choice, num).disk_bytes_s for num in (1, 999))
    assert shared > 99 * alone
    known = replace(card, disk_bytes_s=5.0)
    assert with_disk_rate(known, choice, 2) == known
    assert with_disk_rate(card, Choice(), 2) == card


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(DiskError, match="protrain_disk_dir: .*cannot be written"):
        open_session(frozen(), disk=file / "in", n_buffer=2, on_disk=EVERY)


def test_a_file_system_without_direct_reads_serves(tmp_path: Path) -> None:
    """/dev/shm knows none."""
    own = frozen()
    other = twin(own)
    folder = Path("/dev/shm") / f"protrain-test-{os.getpid()}"
    try:
        session = open_session(own, disk=folder, n_buffer=2, on_disk=EVERY)
        assert_trains_the_same(own, other, session, 1)
        session.close()
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def test_a_disk_that_turns_slow_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = frozen()
    other = twin(own)
    read = os.preadv

    def slow(*args: Any) -> int:
        time.sleep(0.02)
        return read(*args)

    session = open_session(own, disk=tmp_path, n_buffer=2, on_disk=EVERY)
    monkeypatch.setattr(os, "preadv", slow)
    assert_trains_the_same(own, other, session, 1)
    assert session.measured().disk_wait_s > 0.02
    session.close()


def test_a_disk_that_fails_in_the_middle_is_one_error_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has trained is that of the last whole step."""
    own = frozen()
    other = twin(own)
    session = open_session(own, disk=tmp_path, n_buffer=2, on_disk=EVERY)
    assert_trains_the_same(own, other, session, 1)

    def fail(*_args: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(DiskError, match=r"Input/output error\. Training cannot go on"):
        for _ in range(2):
            own(batches(1)[0]).backward()
    session.close()
    assert_same(own.state_dict(), other.state_dict())


def test_a_folder_without_room_is_named_and_keeps_no_part(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(DiskError, match="cannot be written"):
            store(tmp_path, torch.zeros(1 << 20, dtype=torch.uint8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [*tmp_path.iterdir()]


def test_runs_that_prepare_at_once_share_one_whole_file(tmp_path: Path) -> None:
    content = torch.arange(1 << 20).view(torch.uint8)
    with ThreadPoolExecutor(4) as runs:
        paths = {*runs.map(store, [tmp_path] * 4, [content] * 4)}
    (path,) = paths
    assert [*tmp_path.iterdir()] == [path]
    assert path.read_bytes() == content.numpy().tobytes()


def test_a_damaged_file_is_written_anew(tmp_path: Path) -> None:
    """Where ranks read parts of it, no hash is compared later."""
    content = torch.arange(1 << 20).view(torch.uint8)
    path = store(tmp_path, content)
    whole = path.read_bytes()
    path.write_bytes(b"x" + whole[1:])
    assert store(tmp_path, content, compares=True) == path
    assert path.read_bytes() == whole
    changed = path.stat().st_mtime_ns
    assert store(tmp_path, content, compares=True).stat().st_mtime_ns == changed


WRITES = """
import sys, torch
from pathlib import Path
from axolotl.integrations.protrain.core.engine.chunk_files import store
content = torch.randint(256, (1 << 26,), dtype=torch.uint8)
while True:
    print("writes", flush=True)
    store(Path(sys.argv[1]), content)
    content[0] += 1
"""


def test_what_a_killed_run_left_is_removed_and_what_one_writes_is_not(
    tmp_path: Path,
) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", WRITES, str(tmp_path)], stdout=subprocess.PIPE
    )
    try:
        assert run.stdout is not None
        run.stdout.readline()
        written = list[Path]()
        while not written:
            run.send_signal(signal.SIGCONT)
            time.sleep(0.001)
            run.send_signal(signal.SIGSTOP)
            os.waitpid(run.pid, os.WUNTRACED)
            # bytes are in it once it is locked
            incomplete = tmp_path.glob("_incomplete-*")
            written = [path for path in incomplete if path.stat().st_size]
        assert remove_unfinished(tmp_path) == 0
        assert [*tmp_path.glob("_incomplete-*")] == written
    finally:
        run.kill()
        run.communicate()
    assert remove_unfinished(tmp_path) == len(written)
    assert not [*tmp_path.glob("_incomplete-*")]


def test_what_is_written_is_never_removed(tmp_path: Path) -> None:
    contents = [torch.full((1,), n, dtype=torch.uint8) for n in range(256)]
    with ThreadPoolExecutor(1) as run:
        writes = run.submit(lambda: [store(tmp_path, content) for content in contents])
        while not writes.done():
            remove_unfinished(tmp_path)
    assert {*writes.result()} == {*tmp_path.iterdir()}


def test_files_are_listed_by_their_last_use(tmp_path: Path) -> None:
    old, new = (torch.full((5000,), n, dtype=torch.uint8) for n in range(2))
    for content in old, new:
        path = store(tmp_path, content)
        os.utime(path, (0, path.stat().st_mtime))
    used = store(tmp_path, new)
    found = stored(tmp_path, unused_s=60)
    assert used not in found.paths and len(found.paths) == 1
    assert len(stored(tmp_path).paths) == 2 and found.nbytes == 8192


@pytest.mark.parametrize("plan", PLANS)
def test_what_lies_in_the_bases_own_files_is_read_there(
    plan: str, tmp_path: Path
) -> None:
    own = from_file(frozen(), tmp_path / "base.safetensors")
    other = twin(own)
    session = open_session(own, disk=tmp_path / "disk", **PLANS[plan])
    assert_trains_the_same(own, other, session)
    assert session.measured().disk_bytes
    session.close()
    assert not [*tmp_path.glob("disk/*.chunk")]
    assert_same(own.state_dict(), other.state_dict())


def test_a_weight_that_was_written_since_has_a_file_of_its_own(tmp_path: Path) -> None:
    own = from_file(frozen(), tmp_path / "base.safetensors")
    with torch.no_grad():
        next(p for p in own.parameters() if not p.requires_grad).add_(1)
    other = twin(own)
    plan = {"n_buffer": 2, "on_disk": EVERY}
    session = open_session(own, disk=tmp_path / "disk", **plan)
    assert_trains_the_same(own, other, session, 1)
    session.close()
    assert [*tmp_path.glob("disk/*.chunk")]
