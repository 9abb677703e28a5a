"""`axolotl protrain doctor`: what a machine is judged by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fork_server import Fork
from plan_jobs import run_command

from axolotl.integrations.protrain.cli import doctor
from axolotl.integrations.protrain.core.session import Session


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
    assert (
        lines["device"]["level"] == "poor" and "nvidia-smi" in lines["device"]["advice"]
    )
    assert all(line["advice"] or line["level"] == "good" for line in answer["lines"])
    assert "29 of 29" in lines["parity"]["found"]


def test_numbers_that_differ_are_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Session.__init__

    def other_weights(self: Session, model: torch.nn.Module, *rest: object) -> None:
        with torch.no_grad():
            next(model.parameters())[0] += 1e-3
        opened(self, model, *rest)

    monkeypatch.setattr(Session, "__init__", other_weights)
    line = doctor.parity(torch.device("cpu"))
    assert line.level == "bad" and doctor.EXIT_CODES[doctor.worst([line])] == 3
