"""A rank that dies takes all processes along, soon, with its error to be read."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from axolotl_jobs import LORA, PAGED, PROTRAIN, SEEDING, free_port, job, overrides
from axolotl_worker import ENVIRONMENT
from dying_plugin import PHASES, WORDS
from tiny_models import build_inputs, build_model

LIMIT_S = 60
SHARED_MEMORY = Path("/dev/shm")
MODES: dict[str, dict[str, Any]] = {
    "full": overrides(1, 2, 1),
    "adapter": {**LORA, **overrides(1, 2, 1)},
    "resident": {**LORA, "protrain_force_all_persistent": True},
}
DYING = {
    "plugins": [PROTRAIN, SEEDING, "dying_plugin.DyingPlugin"],
    "save_strategy": "steps",
    "save_steps": 1,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with inputs."""
    folder = tmp_path_factory.mktemp("deaths")
    build_inputs(folder)
    build_model(folder, "llama")
    return folder


class Launch:
    """Processes of one run, told apart from all others by their environment."""

    def __init__(self, root: Path, folder: Path, mode: str, **variables: str) -> None:
        self.mark = uuid.uuid4().hex
        self.died, self.log = folder / "died", folder / "log.txt"
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self._root = root
        keys = {"output_dir": str(folder / "out")}
        settings = job("llama", PAGED, MODES[mode], DYING, keys).settings
        self.config = folder / "config.yaml"
        self.config.write_text(yaml.safe_dump(settings))
        self._environment = {
            **os.environ,
            **ENVIRONMENT,
            "ACCELERATE_USE_CPU": "true",
            "PYTHONPATH": os.pathsep.join(
                [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
            ),
            "TMPDIR": str(self.temporary),
            "DIED": str(self.died),
            "MARK": self.mark,
            **variables,
        }

    def start(
        self, command: Sequence[str], **variables: str
    ) -> subprocess.Popen[bytes]:
        """One process that trains, or one that starts those."""
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *command, "-m", "axolotl.cli.train", str(self.config)],
                cwd=self._root,
                env=self._environment | variables,
                stdout=log,
                stderr=log,
            )

    def seconds_after_death(
        self, processes: Sequence[subprocess.Popen[bytes]]
    ) -> float:
        """How long the last of them lived on."""
        try:
            codes = [process.wait(timeout=300) for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert all(codes)
        return time.time() - float(self.died.read_text())

    def left(self) -> list[str]:
        """Processes and temporary files that are still there."""
        return [
            *(str(p) for p in psutil.process_iter() if _marked(p, self.mark)),
            *(str(path) for path in self.temporary.glob("*") if path.is_file()),
        ]


def _marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("MARK") == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False


def deaths() -> list[Any]:
    """Each phase and manner of death on one rank or the other; few of them by default."""
    cases = []
    for number, phase in enumerate(PHASES):
        for how in ("raise", "kill"):
            rank = (number + (how == "kill")) % 2
            for mode in MODES if phase == "backward" else ("full",):
                by_default = (mode, phase, how) == ("full", "backward", "raise")
                marks = () if by_default else pytest.mark.full
                case = f"{rank}:{phase}:{how}"
                cases.append(pytest.param(mode, case, id=f"{mode}-{case}", marks=marks))
    return cases


@pytest.mark.parametrize(("mode", "death"), deaths())
def test_under_an_agent(root: Path, tmp_path: Path, mode: str, death: str) -> None:
    launch = Launch(root, tmp_path, mode, DIE=death)
    shared = set(SHARED_MEMORY.iterdir())
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2"]
    agent = launch.start([*torchrun, f"--master_port={free_port()}"])
    assert launch.seconds_after_death([agent]) < LIMIT_S
    log = launch.log.read_text(errors="replace")
    assert (WORDS if death.endswith("raise") else "SIGKILL") in log
    assert not launch.left()
    assert set(SHARED_MEMORY.iterdir()) <= shared


@pytest.mark.full
@pytest.mark.parametrize("death", ["0:planning:kill", "1:backward:kill"])
def test_without_an_agent(root: Path, tmp_path: Path, death: str) -> None:
    """The survivor notices by itself."""
    launch = Launch(root, tmp_path, "full", DIE=death)
    port = str(free_port())
    ranks = [
        launch.start(
            [],
            RANK=rank,
            LOCAL_RANK=rank,
            WORLD_SIZE="2",
            LOCAL_WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
        for rank in ("0", "1")
    ]
    assert launch.seconds_after_death(ranks) < LIMIT_S
    assert not launch.left()
