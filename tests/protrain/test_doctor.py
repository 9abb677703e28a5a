"""`axolotl protrain doctor`: what a machine is judged by."""

from __future__ import annotations

import json
import resource
from importlib import metadata
from pathlib import Path

import psutil
import pytest
import torch
from click.testing import CliRunner
from fork_server import Fork
from plan_jobs import run_command

from axolotl.integrations.protrain.cli import doctor, protrain
from axolotl.integrations.protrain.core import gpu
from axolotl.integrations.protrain.core.engine.chunk_files import store
from axolotl.integrations.protrain.core.engine.session import Session
from axolotl.integrations.protrain.core.host import RESERVE_BYTES


def test_a_machine_without_a_gpu_works_badly(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        fork = Fork(
            run_command,
            ["doctor", "--json"],
            folder=tmp_path,
            stdout=out,
            stderr=err,
        )
    assert fork.wait(120) == 2, (tmp_path / "err").read_text()
    answer = json.loads((tmp_path / "out").read_text())
    assert answer["level"] == "poor"
    lines = {line["name"]: line for line in answer["lines"]}
    assert lines["versions"]["level"] == lines["parity"]["level"] == "good"
    assert lines["device"]["level"] == "poor" and "CUDA" in lines["device"]["advice"]
    assert all(line["advice"] or line["level"] == "good" for line in answer["lines"])
    assert "29 of 29" in lines["parity"]["found"]


def test_a_folder_of_a_disk_is_measured_and_its_files_are_removed(
    tmp_path: Path,
) -> None:
    """`doctor --disk` and `disk`, as a person types them."""
    folder = tmp_path / "disk"
    reads = [
        line
        for line in doctor.findings(torch.device("cpu"), folder)
        if line.name == "disk reads"
    ]
    assert len(reads) == 1 and "GB/s" in reads[0].found
    path = store(folder, torch.zeros(5000, dtype=torch.uint8))
    command = CliRunner().invoke(protrain, ["disk", str(folder)])
    assert command.output.startswith("1 files, 8.0 KiB, last used 20")
    assert path.exists()
    later = ["disk", str(folder), "--unused-for", "1", "--remove"]
    assert CliRunner().invoke(protrain, later).output.startswith("0 files")
    assert path.exists()
    command = CliRunner().invoke(protrain, ["disk", str(folder), "--remove"])
    assert command.exit_code == 0 and command.output.endswith("deleted\n")
    assert not path.exists()


def test_a_version_that_has_not_been_tried_is_poor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda name: "99.0" if name == "torch" else of(name)
    )
    line = next(doctor.findings(torch.device("cpu")))
    assert line.level == "poor" and "torch 99.0" in line.found
    assert "have not passed with torch 99.0; they have with axolotl<" in line.advice


def test_nothing_is_measured_where_that_may_end_the_process() -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    leaves = psutil.Process().memory_info().vms + RESERVE_BYTES + (1 << 29)
    resource.setrlimit(resource.RLIMIT_AS, (leaves, limits[1]))
    try:
        *others, last = doctor.findings(torch.device("cpu"))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert last.name == "memory nodes"
    (bad,) = (line for line in others if line.level == "bad")
    assert bad.name == "host memory" and "MiB may be used" in bad.found
    assert "ulimit -v" in bad.advice


def test_numbers_that_differ_are_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Session.__init__

    def other_weights(self: Session, model: torch.nn.Module, *rest: object) -> None:
        with torch.no_grad():
            next(model.parameters())[0] += 1e-3
        opened(self, model, *rest)

    monkeypatch.setattr(Session, "__init__", other_weights)
    line = doctor.parity(torch.device("cpu"), gpu("RTX 4090"))
    assert line.level == "bad" and doctor.EXIT_CODES[doctor.worst([line])] == 3
