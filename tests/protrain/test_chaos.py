"""A few attacks of each table of docs/reliability.md; `make chaos` makes all of them."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from chaos import (
    ATTACKS,
    COMMON,
    DOCUMENT,
    PAGES,
    SAVES,
    Attack,
    Chaos,
    compare,
    render,
)
from fork_server import Fork
from saving_jobs import difference, weights

from axolotl.integrations.protrain.core.checkpoint import (
    STAGING,
    checkpoints,
    differences,
    fault_of,
)

QUICK = {
    "Struck at a moment/kill -9, save/0",
    "Disk full in a save/within a file, after 300,000 bytes",
    "Damaged checkpoints/optimizer.pt of the newest: truncated",
    "Callbacks, hooks and trainers/hooks of the optimizer's step/full",
}


@pytest.fixture(scope="module")
def chaos(tmp_path_factory: pytest.TempPathFactory) -> Chaos:
    return Chaos(tmp_path_factory.mktemp("chaos"))


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(a, id=a.name, marks=() if a.name in QUICK else pytest.mark.full)
        for a in ATTACKS
    ],
)
@pytest.mark.sampled(2)
def test_attack(chaos: Chaos, attack: Attack) -> None:
    """Ends as the plain run does or with the cause; raises what it ended with if not."""
    assert attack.judge(chaos)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_kills_around_saves_lose_no_checkpoint(chaos: Chaos, ranks: int) -> None:
    """Of the whole launch, 50 times; what goes on each time ends as the plain run."""
    chance, plugin = random.Random(ranks), "saving_jobs.SlowDisk"
    settings = {**SAVES, "max_steps": 8, "save_total_limit": 2}
    plain = chaos.once(settings, ranks=ranks)
    paged = {**settings, **PAGES, "auto_resume_from_checkpoints": True}
    paged["plugins"] = [*COMMON["plugins"], plugin]
    name, kills, ends = chaos.new(), 0, 0
    while kills < 50 or not ends:
        folder = chaos.folder / name
        known = checkpoints(folder)
        kill = partial(
            kill_at_save,
            folder=folder,
            number=chance.randint(1, 3),
            delay_s=chance.uniform(0, 0.3),
        )
        ended = chaos.train(paged, name=name, ranks=ranks, watch=kill)
        kills += ended.exit_code != 0
        saved = checkpoints(folder)
        for checkpoint in saved:
            assert fault_of(checkpoint) is None and differences(checkpoint) == []
        # the newest one is never lost
        assert not known or int(saved[0].name[11:]) >= int(known[0].name[11:])
        if known and known[0].name == "checkpoint-8":
            # a run that resumes at its last step takes another one, plain or not
            assert difference(weights(known[0]), weights(plain.folder)) is None
            name = chaos.new()
        elif ended.exit_code == 0:
            compare(ended, plain)
            ends, name = ends + 1, chaos.new()


def kill_at_save(forks: list[Fork], folder: Path, number: int, delay_s: float) -> None:
    """That long after that many new saves have begun, unless the run ends before."""
    known, seen = {path.name for path in checkpoints(folder)}, set[str]()
    while len(seen) < number and all(fork.poll() is None for fork in forks):
        # it may go meanwhile
        with suppress(FileNotFoundError):
            seen |= {p.name for p in (folder / STAGING).glob("checkpoint-*")} - known
        time.sleep(0.002)
    if len(seen) == number:
        time.sleep(delay_s)
        for fork in forks:
            fork.kill()


def test_the_document_is_of_these_attacks() -> None:
    """If not, run `make chaos`."""
    names = [attack.name for attack in ATTACKS]
    assert len(set(names)) == len(names) and set(names) >= QUICK
    lines = [
        line.rpartition("|")[0].rpartition("|")[0]
        for line in _rows(DOCUMENT.read_text())
    ]
    assert lines == [
        line.rpartition("|")[0].rpartition("|")[0]
        for line in _rows(render(dict.fromkeys(ATTACKS, "")))
    ]


def _rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("|", "#"))]
