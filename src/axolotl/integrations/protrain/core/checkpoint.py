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
    trained = layout.fixed_trainable_bytes
    frozen = layout.fixed_frozen_bytes
    masters = 0
    moments = 2 * layout.fixed_trainable_bytes
    for chunk in layout.chunks:
        payload = chunk.payload_bytes
        if not chunk.trainable:
            frozen += payload
            continue
        trained += payload
        for tensor in chunk.tensors:
            if fp32_master and tensor.is_16_bit:
                masters += 4 * tensor.numel
                moments += 8 * tensor.numel
            else:
                moments += 2 * tensor.nbytes
    weights = trained if adapter else trained + frozen
    return weights + (moments + masters if optimizer_state else 0)


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
    """Remove a new `folder` if writing into it fails: no half checkpoint stays.

    Args:
        folder: Gets a checkpoint.
        existed: It holds one already, which is not ours to remove.

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
    if isinstance(error, (OSError, SafetensorError)):
        return True
    # torch.save has no type of its own for it; these name its writer
    signs = ("PytorchStreamWriter", "inline_container")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
