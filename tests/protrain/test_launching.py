"""Launching: several nodes, processes that never meet, ranks that die.

A rank that dies takes all processes along, soon, with its error to be read.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from axolotl_jobs import (
    LORA,
    PAGED,
    PROTRAIN,
    SEEDING,
    Job,
    Result,
    free_port,
    job,
    overrides,
    pair,
    weight_differences,
)
from dying_plugin import PHASES, WORDS
from fork_server import ENVIRONMENT
from tiny_models import build_inputs, build_model

from axolotl.integrations.protrain.core.checkpoint import STAGING

LIMIT_S = 60
SHARED = Path("/dev/shm")
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
TORCHRUN = ["-m", "torch.distributed.run"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with inputs."""
    folder = tmp_path_factory.mktemp("deaths")
    build_inputs(folder)
    build_model(folder, "llama")
    return folder


class Launch:
    """Processes of one run, told apart from all others by their environment."""

    def __init__(self, root: Path, folder: Path, wanted: Job, **variables: str) -> None:
        self.mark = uuid.uuid4().hex
        self._shared = set(SHARED.iterdir())
        self.died, self.log = folder / "died", folder / "log.txt"
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self._root = root
        settings = {**wanted.settings, "output_dir": str(folder / "out")}
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

    def codes(self, processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
        """How each of them ended."""
        try:
            return [process.wait(timeout=300) for process in processes]
        finally:
            for process in processes:
                process.kill()

    def seconds_after_death(
        self, processes: Sequence[subprocess.Popen[bytes]]
    ) -> float:
        """How long the last of them lived on."""
        assert all(self.codes(processes))
        return time.time() - float(self.died.read_text())

    def left(self) -> list[str]:
        """Processes, temporary files and shared memory that are still there."""
        return [
            *(str(p) for p in psutil.process_iter() if _marked(p, self.mark)),
            *(str(path) for path in self.temporary.glob("*") if path.is_file()),
            *(str(p) for p in set(SHARED.iterdir()) - self._shared if not _mapped(p)),
        ]


def _mapped(path: Path) -> bool:
    """Whether a process uses shared memory: another test's, for ours have ended."""
    maps = []
    for file in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            maps.append(file.read_text(errors="replace"))
    return any(str(path) in text for text in maps)


def _marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("MARK") == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False


def dying(mode: str) -> Job:
    return job("llama", PAGED, MODES[mode], DYING)


def deaths() -> list[Any]:
    """Each phase and manner of death on one rank or the other."""
    cases = []
    for number, phase in enumerate(PHASES):
        for how in ("raise", "kill"):
            rank = (number + (how == "kill")) % 2
            for mode in MODES if phase == "backward" else ("full",):
                case = f"{rank}:{phase}:{how}"
                cases.append(pytest.param(mode, case, id=f"{mode}-{case}"))
    return cases


@pytest.mark.full
@pytest.mark.parametrize(("mode", "death"), deaths())
def test_under_an_agent(root: Path, tmp_path: Path, mode: str, death: str) -> None:
    launch = Launch(root, tmp_path, dying(mode), DIE=death)
    port = f"--master_port={free_port()}"
    agent = launch.start([*TORCHRUN, "--nproc_per_node=2", port])
    assert launch.seconds_after_death([agent]) < LIMIT_S
    log = launch.log.read_text(errors="replace")
    assert (WORDS if death.endswith("raise") else "SIGKILL") in log
    assert not launch.left()


@pytest.mark.full
@pytest.mark.parametrize("death", ["0:planning:kill", "1:backward:kill"])
def test_without_an_agent(root: Path, tmp_path: Path, death: str) -> None:
    """The survivor notices by itself."""
    launch = Launch(root, tmp_path, dying("full"), DIE=death)
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


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_local", [1, 2])
def test_two_nodes(
    run: Callable[[Job], Result], root: Path, tmp_path: Path, mode: str, num_local: int
) -> None:
    """Two agents on one machine, whose ranks know their nodes by the agent."""
    settings = {"max_grad_norm": 0.0, "save_strategy": "steps", "save_steps": 2}
    jobs = pair("llama", settings, MODES[mode], plan={}, num_ranks=2 * num_local)
    launch = Launch(root, tmp_path, jobs.paged)
    port = str(free_port())
    agents = [
        launch.start(
            [
                *TORCHRUN,
                "--nnodes=2",
                f"--node_rank={node}",
                f"--nproc_per_node={num_local}",
                "--master_addr=127.0.0.1",
                f"--master_port={port}",
            ]
        )
        for node in range(2)
    ]
    assert launch.codes(agents) == [0, 0], launch.log.read_text()
    got = Result(tmp_path, "", 0.0)
    assert (got.report["plan"]["num_nodes"], len(got.report["ranks"])) == (
        2,
        2 * num_local,
    )
    # four ranks add up in another order than two nodes of two, and AdamW divides
    # the last bits of small gradients by their size; a lost rank is 1e-2 apart
    tolerance = 0.0 if num_local == 1 else 1e-5
    assert not weight_differences(got.weights, run(jobs.plain).weights, tolerance)
    # both nodes write to one folder, which only the first may name
    saved = {path.name for path in (tmp_path / "out/checkpoint-2").iterdir()}
    assert {f"rng_state_{rank}.pth" for rank in range(2 * num_local)} < saved
    assert "model.safetensors" in saved or mode != "full"
    assert not (tmp_path / "out" / STAGING).exists()


@pytest.mark.full
def test_ranks_that_never_meet_are_refused(root: Path, tmp_path: Path) -> None:
    wanted = job("llama", PAGED, MODES["resident"])
    launch = Launch(root, tmp_path, wanted, ACCELERATE_USE_CPU="false")
    port = f"--master_port={free_port()}"
    agent = launch.start([*TORCHRUN, "--nproc_per_node=2", port])
    assert launch.codes([agent]) != [0]
    assert "2 processes were launched, and each would train alone" in (
        launch.log.read_text()
    )
