"""Room for checkpoints, and the folders in which they become whole.

Checkpoints of a paged run are ordinary ones. They are written in a folder of their own,
flushed, and get their name at once; only then may older ones go.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import shutil
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO
from weakref import WeakSet

from safetensors import SafetensorError

from ..errors import CheckpointError
from ..manifest import write_manifest
from ..sizes import format_bytes
from ..types import Layout

STAGING = "_incomplete"
"""Folder of a run in which a checkpoint is written. No reader of `checkpoint-*` sees it,
and uploads to the Hub leave out `_*`."""
_REPLACED = "_replaced"
"""In that folder: what had the name of the checkpoint that is being published. No name
that somebody gives to a checkpoint begins so; older versions called it `replaced`."""

_LOCK, _HOLDER = "_lock", 200
"""File in a folder that one process writes at a time, and characters read of its name."""
_NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)

SLACK_BYTES, TOKEN_BYTES = 1 << 20, 136
"""Bytes written beside the tensors: headers, configuration, trainer and random states;
and of tokenizer.json for each token (Llama 2 to Gemma 3: 75 to 136). A write that fails
all the same leaves nothing behind, so this need not be an upper bound."""

# ---------------------------------------------------------------- one writer a folder


def locked(folder: Path) -> tuple[TextIO, str]:
    """A folder for this process alone, until the file is closed or the process ends.

    Returns:
        The open file, and why it keeps nobody away: a file system may know no locks
        (flock(2)). Empty where it does.

    Raises:
        BlockingIOError: Another process has it, and is named.
        OSError: Nothing can be written there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as on_failure:
        lock = on_failure.enter_context(
            open(folder / _LOCK, "a+", errors="replace", opener=_unfollowed)
        )
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            holder = lock.readline(_HOLDER).strip() or "another process"
            raise BlockingIOError(f"{holder} uses it") from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            on_failure.pop_all()
            return lock, str(error.strerror)
        # the lock holds without its name too, for example where the disk is full
        with suppress(OSError):
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {platform.node()}\n")
            lock.flush()
        _locks.add(lock)
        on_failure.pop_all()
    return lock, ""


def _unfollowed(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _leave_locks() -> None:
    for lock in [*_locks]:
        lock.close()


_locks: WeakSet[TextIO] = WeakSet()
# a worker that outlives a run which was killed must not keep its folder
os.register_at_fork(after_in_child=_leave_locks)

# ------------------------------------------------------------------- room on the disk


def checkpoint_bytes(
    layout: Layout, adapter: bool, optimizer_state: bool, fp32_master: bool
) -> int:
    """Bytes that one checkpoint takes on disk, without the tokenizer's."""
    weights = layout.fixed_trainable_bytes
    state = 2 * layout.fixed_trainable_bytes
    if not adapter:
        weights += layout.fixed_frozen_bytes
    for chunk in layout.chunks:
        if chunk.trainable or not adapter:
            weights += chunk.payload_bytes
        for tensor in chunk.tensors if chunk.trainable else ():
            # main weight and two moments in fp32, or two moments like the weight
            on_main = fp32_master and tensor.is_16_bit
            state += 12 * tensor.numel if on_main else 2 * tensor.nbytes
    return weights + (state if optimizer_state else 0)


def require_space(folder: Path, nbytes: int) -> None:
    """Refuse to begin what the disk cannot hold.

    Raises:
        CheckpointError: Less than `nbytes` are free at `folder`.
    """
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < nbytes:
        raise CheckpointError(
            f"output_dir: a checkpoint needs {format_bytes(nbytes)} and "
            f"{folder} has {format_bytes(free)} free. Free some space, choose another output_dir, "
            "keep fewer checkpoints (save_total_limit), or leave the optimizer state "
            "out (protrain_save_optimizer_state: false)."
        )


# ---------------------------------------------------------------------------- writing


def staged(checkpoint: Path) -> Path:
    """Return where to write `checkpoint` until it is published."""
    return checkpoint.parent / STAGING / checkpoint.name


@contextmanager
def restored_on_failure(
    run_dir: Path, publishes: bool, key: str = "output_dir"
) -> Iterator[None]:
    """Forget what was staged if writing or publishing it fails.

    Args:
        run_dir: Folder of all checkpoints.
        publishes: This process does; no other may remove what that one renames.
        key: Which has said where that folder is.

    Raises:
        CheckpointError: A file could not be written.
    """
    try:
        yield
    except BaseException as error:
        if publishes:
            restore(run_dir)
        if not _is_write_error(error):
            raise
        raise CheckpointError(
            f"{key}: writing a checkpoint into {run_dir} failed ({error}). Nothing "
            "is left of it; earlier checkpoints are untouched. Free some space and "
            "resume from the last one."
        ) from error


def restore(run_dir: Path) -> None:
    """Remove what a save has left half-done, and put back what it had moved aside.

    Several processes may do so at once.
    """
    for aside in (run_dir / STAGING).glob("*replaced/*"):
        # a state that somebody named `replaced` holds files
        if aside.is_dir() and not (run_dir / aside.name).exists():
            with suppress(FileNotFoundError):
                aside.rename(run_dir / aside.name)
    shutil.rmtree(run_dir / STAGING, ignore_errors=True)


def publish(checkpoint: Path, meant: Collection[str] = ()) -> None:
    """List and flush what is staged as `checkpoint`, and give it its name.

    One of that name is replaced: `restore` puts it back if this is cut short between two
    renames.

    Args:
        checkpoint: Its path then.
        meant: Names of files without which it is not whole, as the list will say.
    """
    source = staged(checkpoint)
    write_manifest(source, meant)
    for path in (*source.rglob("*"), source):
        _flush(path)
    try:
        source.rename(checkpoint)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        aside = source.parent / _REPLACED
        aside.mkdir()
        checkpoint.rename(aside / checkpoint.name)
        source.rename(checkpoint)
    _flush(checkpoint.parent)
    shutil.rmtree(source.parent, ignore_errors=True)


def discard(checkpoint: str, ignore_errors: bool = True) -> None:
    """`shutil.rmtree` of a checkpoint, which under its name is whole or not there."""
    path = Path(checkpoint)
    aside = path.parent / STAGING
    with suppress(OSError):
        aside.mkdir(exist_ok=True)
        path.rename(aside / f"old-{path.name}")
    shutil.rmtree(aside, ignore_errors)
    # where it could not be renamed
    shutil.rmtree(path, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some network file systems cannot flush folders
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _is_write_error(error: BaseException) -> bool:
    # torch.save has no type of its own for it; these name its writer
    signs = ("PytorchStreamWriter", "inline_container", "iostream error")
    return isinstance(error, (OSError, SafetensorError)) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    )
