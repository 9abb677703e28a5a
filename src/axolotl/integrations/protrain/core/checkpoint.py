"""Room for a checkpoint, before it is written and when it runs out all the same.

Checkpoints of a paged run are ordinary ones; this guards their writing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from .errors import CheckpointError
from .types import Layout

SLACK_BYTES = 32 << 20
"""Tokenizer, configuration, trainer state and random states beside the tensors."""


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


def require_space(folder: Path, nbytes: int, slack: int = SLACK_BYTES) -> None:
    """Refuse to begin what the disk cannot hold.

    Raises:
        CheckpointError: Less than `nbytes` and `slack` are free at `folder`.
    """
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < nbytes + slack:
        raise CheckpointError(
            f"output_dir: a checkpoint needs {nbytes + slack:,} bytes and "
            f"{folder} has {free:,} free. Free some space, choose another output_dir, "
            "keep fewer checkpoints (save_total_limit), or leave the optimizer state "
            "out (protrain_save_optimizer_state: false)."
        )


@contextmanager
def whole_or_nothing(folder: Path, existed: bool) -> Iterator[None]:
    """Remove `folder` if writing into it fails, unless it `existed`: no half checkpoint.

    Raises:
        CheckpointError: A file could not be written.
    """
    try:
        yield
    except BaseException as error:
        if not existed:
            shutil.rmtree(folder, ignore_errors=True)
        if not _is_write_error(error):
            raise
        fate = "is incomplete" if existed else "was removed"
        raise CheckpointError(
            f"output_dir: writing {folder} failed ({error}). It {fate}; earlier "
            "checkpoints are untouched. Free some space and resume from the last one."
        ) from error


def _is_write_error(error: BaseException) -> bool:
    # torch.save has no type of its own for it; these name its writer
    signs = ("PytorchStreamWriter", "inline_container")
    return isinstance(error, (OSError, SafetensorError)) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    )
