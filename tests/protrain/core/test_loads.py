"""Weights are read from the files of which they still are pages, and no others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from axolotl.integrations.protrain.core.checkpoint import load, plan_load
from axolotl.integrations.protrain.core.errors import CheckpointError

ROWS = 3000
"""Of 1,024 int32: some pieces, and an end within a page."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    whole = torch.arange(ROWS * 1024, dtype=torch.int32).view(ROWS, 1024)
    target = tmp_path / "model of two words.safetensors"
    save_file({"a": whole, "b": whole[: ROWS // 2] + 7}, target)
    return target


def loaded(sources: list[torch.Tensor]) -> list[torch.Tensor]:
    targets = [
        torch.zeros_like(s, memory_format=torch.contiguous_format) for s in sources
    ]
    load(list(zip(targets, sources, strict=True)))
    return targets


def test_a_plan_names_every_byte_once_in_the_order_of_the_disk(path: Path) -> None:
    there = load_file(path)
    tensors = [there["b"], there["a"], there["a"][10:20]]
    reads = plan_load(tensors)
    assert reads == sorted(reads, key=lambda read: (read[0], read[1].offset))
    for number, tensor in enumerate(tensors):
        assert {path for path, piece in reads if piece.key == number} == {str(path)}
        own = sorted(piece for _, piece in reads if piece.key == number)
        assert [piece.start for piece in own] == [p.offset - own[0].offset for p in own]
        assert sum(piece.end - piece.start for piece in own) == tensor.nbytes
    for target, tensor in zip(loaded(tensors), tensors, strict=True):
        assert torch.equal(target, tensor)


def test_what_was_written_since_is_not_the_files(path: Path) -> None:
    there = load_file(path)
    # one number, by somebody who repairs an embedding
    there["a"][-2, -1] = -5
    reads = plan_load([there["a"], there["b"]])
    assert {piece.key for _, piece in reads} == {1}
    target, other = loaded([there["a"], there["b"]])
    assert target[-2, -1] == -5
    assert torch.equal(target, there["a"]) and torch.equal(other, there["b"])


def test_what_is_no_piece_of_a_file_is_copied(path: Path) -> None:
    there = load_file(path)
    sources = [there["a"].t(), there["a"].clone(), there["a"][:0], there["a"][:, :5]]
    assert not plan_load(sources)
    for target, source in zip(loaded(sources), sources, strict=True):
        assert torch.equal(target, source)


@pytest.mark.parametrize(
    "name", [b"\xe2\x80\xa8 (x)", b"\x0b\x1c", b"\xff\xfe", b" a "]
)
def test_names_of_any_bytes_are_read(path: Path, name: bytes) -> None:
    """What ends a line elsewhere, and what is no text."""
    moved = path.rename(path.with_name(os.fsdecode(name)))
    mapped = torch.from_file(os.fsencode(moved), size=4096, dtype=torch.uint8)
    ((found, _),) = plan_load([mapped])
    assert found == str(moved)
    assert torch.equal(loaded([mapped])[0], mapped)


def test_a_view_that_negates_is_not_the_files_bytes(path: Path) -> None:
    there = torch.from_file(str(path), size=64, dtype=torch.int32)
    view = torch._neg_view(there)
    assert torch.equal(loaded([view])[0], -there)


@pytest.mark.parametrize("moved", [True, False])
def test_a_name_that_is_another_files_now_is_not_read(path: Path, moved: bool) -> None:
    there = load_file(path)
    if moved:
        path.rename(path.with_suffix(".old"))
    else:
        path.unlink()
    save_file({"a": torch.zeros_like(there["a"]), "b": there["b"]}, path)
    (target,) = loaded([there["a"]])
    assert torch.equal(target, there["a"])


def test_a_file_that_was_cut_short_is_an_error_and_no_crash(path: Path) -> None:
    there = load_file(path)
    os.truncate(path, path.stat().st_size // 4)
    with pytest.raises(CheckpointError, match="ends at byte"):
        loaded([there["a"]])
