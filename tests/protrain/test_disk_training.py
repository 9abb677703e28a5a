"""A base that is on the disk trains from its YAML as it does in host memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import disk_jobs
import pytest
import torch
from axolotl_jobs import LORA, PAGED, Job, Result, assert_equal, job, overrides
from fork_server import call
from matrix_bases import EVALUATED, QLORA

from axolotl.integrations.protrain.quantised_file import QuantisedFile

Run = Callable[[Job], Result]
PLAIN_FP4 = {"bnb_4bit_quant_type": "fp4"}
TRAININGS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "LoRA": (LORA | EVALUATED, overrides(0, 2, 2)),
    "LoRA, swap": (LORA, overrides(0, 2, 1, 2)),
    # what swaps makes training need more of the host than loading
    "QLoRA": (QLORA | EVALUATED, overrides(0, 2, 1, 2)),
}


@pytest.mark.parametrize("training", TRAININGS)
def test_a_base_that_has_no_room_on_the_host_trains(
    run: Run, training: str, tmp_path: Path
) -> None:
    """With a byte less than the plan needs, frozen weights go to the disk."""
    keys, knobs = TRAININGS[training]
    plain = job("llama", keys)
    paged = plain.but(PAGED, knobs)
    host = run(paged).report["host_bytes"]["peak"]
    short = paged.but(
        {
            "protrain_disk_dir": str(tmp_path),
            "protrain_cpu_capacity_bytes": f"{host - 1}B",
        }
    )
    ours = run(short)
    assert_equal(ours, run(plain))
    assert ours.report["plan"]["on_disk"]
    assert ours.report["measured"]["disk_bytes"] > 0
    compared = ours.report["compared"]["host arena"]
    assert compared["predicted"] == compared["measured"]
    assert any("lie on the disk" in note for note in ours.report["notes"])
    # the published file, or that of what was quantised, serves
    assert not [*tmp_path.glob("*.chunk")]


def test_a_run_from_the_disk_is_resumed(run: Run, tmp_path: Path) -> None:
    plain = job("llama", LORA)
    paged = plain.but(PAGED, overrides(0, 2, 2))
    host = run(paged).report["host_bytes"]["peak"]
    short = {"protrain_cpu_capacity_bytes": f"{host - 1}B"}
    short["protrain_disk_dir"] = str(tmp_path)
    saves = {"save_strategy": "steps", "save_steps": 1}
    first = run(paged.but(short, saves))
    halfway = {"resume_from_checkpoint": str(first.output / "checkpoint-2")}
    resumed = run(paged.but(short, saves, halfway))
    assert resumed.report["plan"]["on_disk"]
    assert_equal(resumed, run(plain))


def test_a_base_in_4_bits_is_quantised_for_the_first_start_alone(
    run: Run, tmp_path: Path
) -> None:
    """The next start reads it: the same training, also where its file is damaged."""
    knobs = {"protrain_disk_dir": str(tmp_path), **overrides(0, 2, 1, 2)}
    paged = job("llama", QLORA, PAGED, knobs)
    first = run(paged)
    (file,) = tmp_path.glob("*.quantised")
    again = run(paged.but({"save_total_limit": 1}))
    assert_equal(again, first)
    assert [*tmp_path.glob("*.quantised")] == [file]
    # quantised otherwise it is another one
    other = job("llama", QLORA, PAGED, knobs, {"bnb_config_kwargs": PLAIN_FP4})
    assert not run(other).error
    assert len([*tmp_path.glob("*.quantised")]) == 2
    with file.open("r+b") as bytes_:
        bytes_.write(b"damaged")
    changed = file.stat().st_ino
    assert_equal(run(paged.but({"save_total_limit": 2})), first)
    # read, found damaged, and written anew by the start after that
    assert not file.exists()
    assert_equal(run(paged.but({"save_total_limit": 3})), first)
    assert file.stat().st_ino != changed


def test_a_quantised_base_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    content = [torch.arange(3000, dtype=torch.uint8), torch.rand(7, 5), torch.rand(())]
    broken = QuantisedFile(tmp_path, "base")
    broken.keep("weight", content)
    broken.close(whole=False)
    assert not [*tmp_path.iterdir()]
    for start in range(3):
        file = QuantisedFile(tmp_path, "base")
        found = file.find("weight")
        assert file.is_whole == (start > 0) and (found is None) == (start == 0)
        pages = file.keep("weight", content) if found is None else found
        for page, tensor in zip(pages, content, strict=True):
            assert page.dtype == tensor.dtype and torch.equal(page, tensor)
        assert file.find("other") is None
        file.close(whole=True)
    (path,) = tmp_path.iterdir()
    with path.open("r+b") as bytes_:
        bytes_.write(b"damaged")
    assert QuantisedFile(tmp_path, "base").find("weight") is None
    assert not path.exists()
    for nonsense in b"cut off", b"{}" + bytes(16) + (2).to_bytes(8, "little"):
        path.write_bytes(nonsense)
        file = QuantisedFile(tmp_path, "base")
        assert not file.is_whole
        file.close(whole=False)


def test_a_full_disk_while_quantising_is_one_error_that_names_the_folder(
    tmp_path: Path,
) -> None:
    """transformers makes lines of a report of what fails in a conversion."""
    errors = call(disk_jobs.load_over_a_full_disk, tmp_path, at=tmp_path)
    assert len(errors) == len(disk_jobs.LIMITS)
    for error, limit in zip(errors, disk_jobs.LIMITS, strict=True):
        assert f"protrain_disk_dir: {tmp_path / f'disk-{limit}'} cannot be" in error
        assert "room for twice the frozen weights" in error
