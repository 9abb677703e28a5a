"""What `make everything` runs again, and what it takes from docs/evidence.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import everything


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one set that reads `src`, and its page."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src/code.py").write_text("1")
    monkeypatch.setattr(everything, "ROOT", tmp_path)
    monkeypatch.setattr(everything, "PAGE", tmp_path / "evidence.md")
    monkeypatch.setattr(everything, "LOGS", tmp_path / "logs")
    for command in ("init -q", "config user.email a@b", "config user.name a"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    commit(tmp_path)
    return tmp_path


def commit(folder: Path) -> None:
    subprocess.run(["git", "add", "-A"], cwd=folder, check=True)
    subprocess.run(["git", "commit", "-qm", "x"], cwd=folder, check=True)


def test_a_set_runs_again_once_it_failed_or_its_files_changed(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Notices a page that calls a result of another tree one of today."""
    passes = everything.Set("passes", "echo 3 passed; echo x", ("src",), "passed")
    failing = "echo OK; echo no in $PWD/src | cat; exit 4"
    fails = everything.Set("fails", failing, ("src",), "OK")
    sets, rows = (passes, fails), {}
    monkeypatch.setattr(everything, "SETS", sets)
    assert [everything.why_run(each, rows) for each in sets] == ["never run"] * 2
    everything.write_rows({e.name: everything.run(e, "a machine") for e in sets})
    rows = everything.read_rows()
    assert rows["passes"].result == "3 passed"
    assert rows["fails"].result == "**failed** (4): no in src"
    assert [everything.why_run(each, rows) for each in sets] == ["", "failed"]
    (repository / "elsewhere.py").write_text("2")
    commit(repository)
    assert everything.why_run(passes, rows) == ""
    other = everything.Set("passes", "echo 4 passed", ("src",))
    assert everything.why_run(other, rows) == "the command has changed"
    # neither committed nor staged
    code = repository / "src/code.py"
    code.write_text("1  # one")
    assert everything.why_run(passes, rows) == ""
    lint = everything.Set("lint", "echo 3 passed", ("src",))
    linted = {"lint": everything.run(lint, "a machine")}
    assert everything.why_run(lint, linted) == "src/code.py has changed"
    code.unlink()
    assert everything.why_run(passes, rows) == "src/code.py has changed"
    code.write_text("2")
    assert everything.why_run(passes, rows) == "src/code.py has changed"


def test_the_page_has_rows_of_known_sets_alone() -> None:
    names = [each.name for each in everything.SETS]
    assert len({*names}) == len(names)
    assert everything.read_rows().keys() <= {*names}


def test_the_paths_of_all_sets_are_files() -> None:
    """Only this sees a folder that has moved: its sets would never be old."""
    paths = {path.removeprefix(":!") for each in everything.SETS for path in each.paths}
    listed = ["git", "ls-files", "--"]
    assert not [
        path
        for path in sorted(paths)
        if not subprocess.check_output([*listed, path], cwd=everything.ROOT)
    ]
