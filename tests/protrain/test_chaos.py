"""A few attacks of each table of docs/reliability.md; `make chaos` makes all of them."""

from __future__ import annotations

import pytest
from chaos import ATTACKS, DOCUMENT, Attack, Chaos, render

QUICK = {
    "Struck at a moment/kill -9, save/0",
    "Disk full in a save/before a write/12",
    "Damaged checkpoints/optimizer.pt: moments of another shape",
    "Damaged checkpoints/optimizer.pt of the newest: truncated",
    "Callbacks, hooks and trainers/norms of weights in every event/full",
    "Callbacks, hooks and trainers/p.data.mul_/full",
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
def test_attack(chaos: Chaos, attack: Attack) -> None:
    """Ends as the plain run does or with the cause; raises what it ended with if not."""
    assert attack.judge(chaos)


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
