"""A checkpoint is whole or not there, and damage is named before anything is loaded."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from click.testing import CliRunner
from core_models import adamw, batches, open_session, stack, train, twin
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from axolotl.integrations.protrain.cli import protrain
from axolotl.integrations.protrain.core.checkpoint import (
    STAGING,
    checkpoints,
    discard,
    fault_of,
    load_states,
    locked,
    publish,
    require_space,
    require_whole,
    restore,
    restored_on_failure,
    staged,
)
from axolotl.integrations.protrain.core.errors import CheckpointError

FILES = ("model.bin", "rng_state.pth", "trainer_state.json")
Edit = Callable[[dict[str, Any]], Any]


def save(checkpoint: Path, content: str) -> None:
    """What a run does at a save."""
    with restored_on_failure(checkpoint.parent, publishes=True):
        restore(checkpoint.parent)
        folder = staged(checkpoint)
        folder.mkdir(parents=True)
        for name in FILES:
            (folder / name).write_text(content)
        publish(checkpoint)


def content(checkpoint: Path) -> set[str] | None:
    """Texts of its files, with "missing" for those that are not there."""
    if not checkpoint.exists():
        return None
    paths = [checkpoint / name for name in FILES]
    return {path.read_text() if path.exists() else "missing" for path in paths}


class AtLine:
    """Acts once, before the n-th of the different lines that saving runs; with `others`
    before the n-th of all that it and these files run."""

    def __init__(self, number: int, act: Callable[[], None], *others: str) -> None:
        self._number, self._act = number, act
        self._files = Path(__file__).name, "folders.py", "manifest.py", *others
        self._counts_all = bool(others)
        self._seen: list[tuple[str, int]] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> AtLine | None:
        if not frame.f_code.co_filename.endswith(self._files):
            return None
        line = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and (self._counts_all or line not in self._seen):
            self._seen.append(line)
            if len(self._seen) == self._number:
                self._act()
        return self


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_kill_at_any_line_of_a_removal_leaves_all_or_nothing(tmp_path: Path) -> None:
    """A half of the oldest checkpoint would be what the next run goes on from."""
    for number in range(1, 1000):
        checkpoint = tmp_path / str(number) / "checkpoint-4"
        save(checkpoint, "old")
        process_id = os.fork()
        if not process_id:
            sys.settrace(AtLine(number, lambda: os._exit(9), "shutil.py"))
            discard(str(checkpoint))
            os._exit(0)
        killed = os.waitpid(process_id, 0)[1]
        assert content(checkpoint) in ({"old"}, None), number
        if not killed:
            break
    assert not [*checkpoint.parent.iterdir()] and number > 20
    # nothing can be moved there
    save(checkpoint, "old")
    (checkpoint.parent / STAGING).touch()
    discard(str(checkpoint))
    assert not checkpoint.exists()


@pytest.mark.parametrize("before", [None, "old"])
def test_ctrl_c_at_any_line_leaves_the_old_or_the_new(
    tmp_path: Path, before: str | None
) -> None:
    allowed = (before and {before}, {"new"})
    for number in range(1, 1000):
        run_dir = tmp_path / str(number)
        checkpoint = run_dir / "checkpoint-4"
        if before:
            save(checkpoint, before)
        sys.settrace(AtLine(number, interrupt))
        try:
            save(checkpoint, "new")
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert content(checkpoint) in allowed, number
        assert not (run_dir / STAGING).exists(), number
    assert content(checkpoint) == {"new"}
    assert number > 20


def test_a_kill_at_any_line_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    for number in range(1, 1000):
        run_dir = tmp_path / str(number)
        checkpoint = run_dir / "checkpoint-4"
        save(checkpoint, "old")
        process_id = os.fork()
        if not process_id:
            sys.settrace(AtLine(number, lambda: os._exit(9)))
            save(checkpoint, "new")
            os._exit(0)
        if os.waitpid(process_id, 0)[1] == 0:
            break
        # nothing half-written has the name of a checkpoint, even before the next start
        assert content(checkpoint) in ({"old"}, {"new"}, None), number
        restore(run_dir)
        assert content(checkpoint) in ({"old"}, {"new"}), number
        assert not (run_dir / STAGING).exists(), number
    assert content(checkpoint) == {"new"}
    assert number > 20


def test_a_second_node_publishes_only_what_is_its_own(tmp_path: Path) -> None:
    """On a shared folder the first one has done it; the new one must not go aside."""
    checkpoint = tmp_path / "checkpoint-4"
    save(checkpoint, "new")
    with pytest.raises(FileNotFoundError):
        publish(checkpoint)
    assert content(checkpoint) == {"new"}


WRITE_ERRORS = [
    OSError(28, "No space left on device"),
    SafetensorError("Error while serializing: I/O error: No space left on device"),
    # the two forms in which torch.save reports it
    RuntimeError("PytorchStreamWriter failed writing file data/4: file write failed"),
    RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),
]
OTHER_ERRORS = [KeyError("lr"), RuntimeError("CUDA out of memory"), SystemExit(0)]


@pytest.mark.parametrize("error", WRITE_ERRORS + OTHER_ERRORS, ids=repr)
def test_a_failed_write_removes_its_folder_only(
    tmp_path: Path, error: BaseException
) -> None:
    save(tmp_path / "checkpoint-2", "old")
    is_disk = error in WRITE_ERRORS
    with pytest.raises(CheckpointError if is_disk else type(error)) as caught:
        with restored_on_failure(tmp_path, publishes=True):
            staged(tmp_path / "checkpoint-4").mkdir(parents=True)
            raise error
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
    if is_disk:
        words = f"output_dir: writing a checkpoint into {tmp_path} failed ({error})"
        assert words in str(caught.value)
    else:
        assert caught.value is error


@pytest.mark.parametrize("folder", [".", "not/there/yet"])
def test_room_is_asked_for_before_training(tmp_path: Path, folder: str) -> None:
    require_space(tmp_path / folder, 0)
    with pytest.raises(CheckpointError) as caught:
        require_space(tmp_path / folder, 1 << 60)
    message = str(caught.value)
    assert message.startswith("output_dir: a checkpoint needs 1073741824.00 GiB")
    for way_out in ("save_total_limit", "protrain_save_optimizer_state: false"):
        assert way_out in message


# ------------------------------------------------------------------ what is on the disk


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """A model and the run that trained it, with two checkpoints after two steps."""
    folder = tmp_path_factory.mktemp("run")
    model = stack()
    optimizer = adamw(model)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    train(model, optimizer, [batches(1), batches(1)])
    scheduler.step()
    scheduler.step()
    for step in (2, 4):
        checkpoint = folder / f"checkpoint-{step}"
        checkpoint.mkdir()
        save_file(model.state_dict(), checkpoint / "model.safetensors")
        torch.save(optimizer.state_dict(), checkpoint / "optimizer.pt")
        torch.save(scheduler.state_dict(), checkpoint / "scheduler.pt")
        torch.save(torch.get_rng_state(), checkpoint / "rng_state.pth")
        (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": 2}))
    return model, folder


@pytest.fixture
def newest(trained: tuple[nn.Module, Path], tmp_path: Path) -> Path:
    """A copy to damage, with a whole checkpoint beside it."""
    run_dir = tmp_path / "run"
    shutil.copytree(trained[1], run_dir)
    return checkpoints(run_dir)[0]


def truncate(to: Callable[[int], int]) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        os.truncate(path, to(path.stat().st_size))

    return act


DAMAGES: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "empty": truncate(lambda _: 0),
    "half": truncate(lambda size: size // 2),
    "a byte short": truncate(lambda size: size - 1),
}
ALL_FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", *FILES[1:])


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ALL_FILES)
def test_damage_is_seen_on_the_disk(newest: Path, name: str, damage: str) -> None:
    DAMAGES[damage](newest / name)
    fault = fault_of(newest)
    if (name, damage) == ("rng_state.pth", "missing"):
        assert fault is None
        return
    weights = name == "model.safetensors" and damage == "missing"
    assert fault is not None and ("weights" if weights else name) in fault
    with pytest.raises(CheckpointError) as caught:
        require_whole(newest, weights_only=False)
    assert fault in str(caught.value)
    assert f"The last whole one beside it is {newest.with_name('checkpoint-2')}" in str(
        caught.value
    )


def test_a_shard_that_the_index_names_is_missed(newest: Path) -> None:
    index = {
        "weight_map": {"embed": "model.safetensors", "head": "model-2.safetensors"}
    }
    (newest / "model.safetensors.index.json").write_text(json.dumps(index))
    fault = fault_of(newest)
    assert fault is not None and "model-2.safetensors is missing" in fault


def test_weights_alone_are_whole_where_they_are_asked_for(newest: Path) -> None:
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (newest / name).unlink()
    assert fault_of(newest) is None
    require_whole(newest, weights_only=True)
    with pytest.raises(CheckpointError, match="optimizer.pt is missing"):
        require_whole(newest, weights_only=False)


# -------------------------------------------------------------- what it is compared with


@pytest.fixture
def listed(trained: tuple[nn.Module, Path], tmp_path: Path) -> Path:
    """The same files, published; one is in a folder, as an adapter of several is."""
    checkpoint = tmp_path / "run" / "checkpoint-2"
    shutil.copytree(trained[1] / "checkpoint-2", staged(checkpoint))
    (staged(checkpoint) / "other").mkdir()
    save_file({"embed": torch.zeros(3)}, staged(checkpoint) / "other" / "a.safetensors")
    publish(checkpoint)
    return checkpoint


def verified(folder: Path, *options: str) -> tuple[int, str]:
    """Exit code and output of `axolotl protrain verify`."""
    result = CliRunner().invoke(protrain, ["verify", str(folder), *options])
    return result.exit_code, result.output


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_what_was_written_is_whole(listed: Path) -> None:
    assert fault_of(listed) is None
    for folder in (listed, listed.parent):
        assert verified(folder) == (0, f"{listed}: whole\n")
    assert json.loads(verified(listed, "--json")[1]) == {str(listed): []}


def test_a_list_is_read_without_torch(listed: Path) -> None:
    """Which takes seconds, on a busy machine half a minute."""
    code = f"""if True:
        import atexit, sys
        from {protrain.callback.__module__} import protrain
        atexit.register(lambda: print("torch" in sys.modules))
        protrain(["verify", {str(listed)!r}])
    """
    ran = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert ran.returncode == 0 and ran.stdout.decode() == f"{listed}: whole\nFalse\n"


def test_one_bit_is_named_by_its_tensor(listed: Path) -> None:
    path = listed / "model.safetensors"
    header = header_of(path)
    last = max(header, key=lambda key: header[key]["data_offsets"])
    flip(path, -1)
    assert fault_of(listed) is None
    line = f"{listed}: model.safetensors: {last} differs\n"
    assert verified(listed) == (2, line)
    flip(path, -1)
    flip(path, 9)
    assert verified(listed) == (2, f"{listed}: model.safetensors: header differs\n")


def header_of(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])


@pytest.mark.parametrize("name", [*ALL_FILES, "other/a.safetensors"])
def test_each_file_is_compared(listed: Path, name: str) -> None:
    flip(listed / name, 0)
    code, text = verified(listed.parent)
    assert code == 2 and f"{name}: " in text
    truncate(lambda size: size - 1)(listed / name)
    assert name.rpartition("/")[2] in str(fault_of(listed))
    (listed / name).unlink()
    assert verified(listed) == (2, f"{listed}: {name} is missing\n")


def test_without_a_list_nothing_is_said(trained: tuple[nn.Module, Path]) -> None:
    code, text = verified(trained[1])
    assert code == 3 and text.count("no protrain.json") == 2
    code, text = verified(nowhere := trained[1] / "nowhere")
    assert code == 3 and f"'{nowhere}' does not exist" in text


def test_a_list_that_is_damaged_is_named(listed: Path) -> None:
    truncate(lambda size: size // 2)(listed / "protrain.json")
    code, text = verified(listed)
    assert code == 2 and "protrain.json is truncated or damaged" in text
    assert "protrain.json is truncated" in str(fault_of(listed))
    (listed / "protrain.json").write_text("{}")
    assert verified(listed)[0] == 2 and "protrain.json" in str(fault_of(listed))


def test_the_state_may_be_removed(listed: Path) -> None:
    """As the message of a damaged one says."""
    for name in ("optimizer.pt", "scheduler.pt"):
        (listed / name).unlink()
    assert fault_of(listed) is None


def entry(**change: Any) -> Edit:
    """Changes what a list says of trainer_state.json."""
    return lambda listed: listed["files"]["trainer_state.json"].update(change)


def named(name: str) -> Edit:
    """Gives trainer_state.json another name in a list."""
    return lambda listed: listed["files"].update(
        {name: listed["files"].pop("trainer_state.json")}
    )


NO_HASH = "0" * 32
LISTS: dict[str, Edit | str | bytes] = {
    "not json": "{",
    "not utf-8": b"\xff\xfe{}",
    "a list": "[]",
    "no files": "{}",
    "deep": "[" * 200_000,
    "deep inside": '{"files": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "a surrogate": '{"hash": "xxh3_128", "files": {"\\ud800": {}}}',
    "5,000 digits": '{"files": {"a": {"bytes": ' + "9" * 5000 + "}}}",
    "absolute": named("/etc/hostname"),
    "above": named("../../../../../../etc/hostname"),
    "inside out": named("other/../../checkpoint-2/trainer_state.json"),
    "NUL": named("a\0b"),
    "no name": named(""),
    "text for a number": entry(bytes="18"),
    "a float": entry(bytes=18.0),
    "negative": entry(parts={"": [-1, 18, NO_HASH]}),
    "huge": entry(parts={"": [10**30, 10**31, NO_HASH]}),
    "a fraction": entry(parts={"": [0, 17.5, NO_HASH]}),
    "no hash": entry(parts={"": [0, 18, "x"]}),
    "no parts": entry(parts={}),
    "a gap": entry(parts={"a": [0, 4, NO_HASH], "b": [5, 18, NO_HASH]}),
    "another hash": lambda listed: listed.update(hash="md5"),
}
"""What may be in protrain.json, or is done to it."""


@pytest.mark.parametrize("name", LISTS)
def test_a_list_that_is_none_is_refused_in_one_line(listed: Path, name: str) -> None:
    edit_list(listed, LISTS[name])
    code, text = verified(listed)
    assert code == 2
    (line,) = text.splitlines()
    assert f"{listed}: protrain.json is truncated or damaged (" in line
    assert line.isprintable() and len(line) < 500
    assert "protrain.json is truncated" in str(fault_of(listed))


def edit_list(checkpoint: Path, edit: Edit | str | bytes) -> None:
    path = checkpoint / "protrain.json"
    if isinstance(edit, str):
        edit = edit.encode()
    if not isinstance(edit, bytes):
        listed = json.loads(path.read_text())
        edit(listed)
        edit = json.dumps(listed).encode()
    path.write_bytes(edit)


ODD: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "a loop": lambda path: path.symlink_to(path.name),
    "outside": lambda path: path.symlink_to(Path(__file__)),
}
"""What may be where a file was."""


@pytest.mark.parametrize(
    "name", ["protrain.json", "trainer_state.json", "rng_state.pth"]
)
@pytest.mark.parametrize("odd", ODD)
def test_only_regular_files_inside_the_folder_are_opened(
    listed: Path, odd: str, name: str
) -> None:
    (listed / name).unlink()
    ODD[odd](listed / name)
    code, text = verified(listed)
    assert code == 2
    (line,) = text.splitlines()
    assert line.startswith(f"{listed}: {name} ") and line.isprintable()
    assert name in str(fault_of(listed))


@pytest.mark.parametrize("name", ["a" * 300, "\x1b[2J\x1b]0;x\x07\nfoo"])
def test_a_name_that_no_file_has_is_shown_safely(listed: Path, name: str) -> None:
    edit_list(listed, named(name))
    code, text = verified(listed)
    assert code == 2 and all(line.isprintable() for line in text.splitlines())
    # and trainer_state.json is not listed any longer
    assert len(text.splitlines()) == 2


def test_what_is_not_listed_is_named(listed: Path) -> None:
    (listed / "other" / "model-2.safetensors").write_bytes(b"")
    (listed / "away").symlink_to("/etc")
    (listed / ".cache").mkdir()
    (listed / ".cache" / "downloaded").write_text("")
    assert verified(listed) == (
        2,
        f"{listed}: away is not in protrain.json\n"
        f"{listed}: other/model-2.safetensors is not in protrain.json\n",
    )


def test_a_list_without_weights_is_not_whole(listed: Path) -> None:
    for name in ("model.safetensors", "other/a.safetensors"):
        (listed / name).unlink()
        edit_list(listed, lambda known, name=name: known["files"].pop(name))
    line = f"{listed}: incomplete: protrain.json lists no weights\n"
    assert verified(listed) == (2, line)


@pytest.mark.parametrize("old", [False, True])
def test_a_list_says_what_was_not_saved(
    trained: tuple[nn.Module, Path], tmp_path: Path, old: bool
) -> None:
    """Axolotl goes on where an optimizer's state cannot be pickled."""
    checkpoint = tmp_path / "checkpoint-2"
    shutil.copytree(trained[1] / "checkpoint-2", staged(checkpoint))
    (staged(checkpoint) / "optimizer.pt").unlink()
    publish(checkpoint, meant=("optimizer.pt", "scheduler.pt"))
    if old:
        edit_list(checkpoint, lambda listed: listed.pop("absent"))
    line = f"{checkpoint}: incomplete: optimizer.pt was not saved\n"
    assert verified(checkpoint) == (2, line)


def test_what_was_not_meant_is_not_missed(
    trained: tuple[nn.Module, Path], tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint-2"
    shutil.copytree(trained[1] / "checkpoint-2", staged(checkpoint))
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (staged(checkpoint) / name).unlink()
    publish(checkpoint)
    assert verified(checkpoint) == (0, f"{checkpoint}: whole\n")


@pytest.mark.parametrize(
    ("gone", "weights_only", "way"),
    [
        (("optimizer.pt", "scheduler.pt"), False, ", set "),
        (("optimizer.pt",), False, ", remove scheduler.pt and set "),
        (("scheduler.pt",), True, ", remove optimizer.pt."),
    ],
)
def test_the_way_out_names_files_that_are_there(
    newest: Path, gone: tuple[str, ...], weights_only: bool, way: str
) -> None:
    for name in gone:
        (newest / name).unlink()
    with pytest.raises(CheckpointError) as caught:
        require_whole(newest, weights_only)
    assert f"{gone[0]} is missing" in str(caught.value)
    assert f"To go on from the weights alone{way}" in str(caught.value)
    for name in {"optimizer.pt", "scheduler.pt"} - {*gone}:
        (newest / name).unlink()
    require_whole(newest, weights_only=True)


# ------------------------------------------------------------------- one writer a folder


@contextmanager
def holder(folder: Path) -> Iterator[int]:
    """A process that has locked a folder, and a worker of it, which outlives it."""
    reader, writer = os.pipe()
    process_id = os.fork()
    if not process_id:
        lock = locked(folder)
        if os.fork():
            os.write(writer, b"x")
        signal.pause()
        assert lock
    assert os.read(reader, 1)
    worker = Path(f"/proc/{process_id}/task/{process_id}/children").read_text()
    try:
        yield process_id
    finally:
        os.kill(process_id, signal.SIGKILL)
        os.waitpid(process_id, 0)
        with suppress(ProcessLookupError):
            os.kill(int(worker), signal.SIGKILL)


def test_a_folder_is_locked_until_its_process_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with holder(folder) as process_id:
        with pytest.raises(BlockingIOError, match=f"^process {process_id} on "):
            locked(folder)
        os.kill(process_id, signal.SIGKILL)
        os.waitid(os.P_PID, process_id, os.WEXITED | os.WNOWAIT)
        # its worker is alive
        lock, missing = locked(folder)
        assert missing == ""
    with pytest.raises(BlockingIOError, match=f"^process {os.getpid()} on "):
        locked(folder)
    lock.close()
    locked(folder)[0].close()


def test_a_file_system_without_locks_is_told(tmp_path: Path) -> None:
    def unknown(*_: Any) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    with patch.object(fcntl, "flock", unknown):
        lock, missing = locked(tmp_path)
    assert missing == "Operation not supported" and not lock.closed
    lock.close()


def test_a_link_is_no_lock(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "_lock").symlink_to("file")
    with pytest.raises(OSError, match="symbolic links"):
        locked(tmp_path)
    assert (tmp_path / "file").read_text() == "kept"


# ---------------------------------------------------------------------- what is in them


def moment(edit: Callable[[Tensor], Any], key: str = "exp_avg") -> Edit:
    """Replaces a moment of the first parameter, a matrix of 64 x 16."""

    def act(state: dict[str, Any]) -> None:
        state["state"][0][key] = edit(state["state"][0][key])

    return act


STATES: dict[str, tuple[Edit, str]] = {
    "fewer rows": (moment(lambda m: m[:-1].clone()), "exp_avg has shape"),
    "transposed": (moment(lambda m: m.t().contiguous()), "exp_avg has shape"),
    "flat": (moment(Tensor.flatten, "exp_avg_sq"), "exp_avg_sq has shape"),
    "a number": (moment(lambda m: 0.0), "another structure"),
    "no moment": (lambda s: s["state"][0].pop("exp_avg"), "another structure"),
    "a group more": (
        lambda s: s["param_groups"].append({**s["param_groups"][0], "params": []}),
        "belongs to other parameters",
    ),
    "a parameter less": (
        lambda s: s["param_groups"][0]["params"].pop(),
        "belongs to other parameters",
    ),
    "no groups": (lambda s: s.pop("param_groups"), "another structure"),
}


@pytest.mark.parametrize("paged", [True, False], ids=["paged", "plain"])
@pytest.mark.parametrize("edit", STATES)
def test_a_state_that_does_not_fit_is_refused(
    trained: tuple[nn.Module, Path], newest: Path, edit: str, paged: bool
) -> None:
    """AdamW's fused kernel writes past the end of a moment that is too short."""
    change, words = STATES[edit]
    state = torch.load(newest / "optimizer.pt")
    change(state)
    torch.save(state, newest / "optimizer.pt")
    model = twin(trained[0])
    session = open_session(model) if paged else None
    optimizer: Any = adamw(model)
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    if session:
        optimizer = session.wrap_optimizer(optimizer)
    with pytest.raises(CheckpointError) as caught:
        load_states(newest, optimizer, scheduler)
    assert f"{newest} cannot be resumed: optimizer.pt " in str(caught.value)
    assert words in str(caught.value)
    assert "The last whole one beside it is" in str(caught.value)
    assert not optimizer.state_dict()["state"]
    load_states(newest.with_name("checkpoint-2"), optimizer, scheduler)
    assert optimizer.state_dict()["state"]
    if session:
        session.close()


def test_a_schedule_of_other_groups_is_refused(
    trained: tuple[nn.Module, Path], newest: Path
) -> None:
    schedule = torch.load(newest / "scheduler.pt")
    torch.save({**schedule, "base_lrs": [1.0]}, newest / "scheduler.pt")
    optimizer = adamw(twin(trained[0]))
    with pytest.raises(CheckpointError, match="has 1 base_lrs for 2 parameter groups"):
        load_states(newest, optimizer, LambdaLR(optimizer, lambda step: 1.0))


def test_bytes_that_are_no_state_are_named(
    trained: tuple[nn.Module, Path], newest: Path
) -> None:
    """The table of contents is whole, what it lists is not."""
    path = newest / "optimizer.pt"
    damaged = bytearray(path.read_bytes())
    damaged[100:400] = bytes(300)
    path.write_bytes(damaged)
    optimizer = adamw(twin(trained[0]))
    with pytest.raises(CheckpointError, match="optimizer.pt cannot be read"):
        load_states(newest, optimizer, LambdaLR(optimizer, lambda step: 1.0))


@pytest.mark.parametrize("name", ["replaced", "old-replaced", "first"])
def test_any_name_can_be_saved_again(tmp_path: Path, name: str) -> None:
    """A state named as the folder of what is replaced could not."""
    for words in ("one", "two"):
        restore(tmp_path)
        staged(tmp_path / name).mkdir(parents=True)
        (staged(tmp_path / name) / "words").write_text(words)
        publish(tmp_path / name)
    restore(tmp_path)
    assert (tmp_path / name / "words").read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == [name]
