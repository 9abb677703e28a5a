"""A base that is on the disk trains from its YAML as it does in host memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from axolotl_jobs import LORA, PAGED, Job, Result, assert_equal, job, overrides
from matrix_bases import EVALUATED, QLORA

Run = Callable[[Job], Result]
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
    assert [*tmp_path.glob("*.chunk")]
