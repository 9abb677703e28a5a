"""Runs every set of checks and measurements, writes docs/evidence.md: `make everything`.

A set whose row is of this tree is not run again: no file that it depends on differs from the
row's commit, but for comments of Python. So a run that was broken off goes on where it ended,
and after a change only what the change concerns runs again. Logs are in build/evidence.

    python tools/everything.py                 all that is missing, old or failed
    python tools/everything.py --list          says what that is, runs nothing
    python tools/everything.py chaos matrix    these, whether or not they are of today
    python tools/everything.py --minutes 60    begins none that would take longer
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from datetime import date
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE, LOGS = ROOT / "docs" / "evidence.md", ROOT / "build" / "evidence"
sys.path.insert(0, str(ROOT / "benchmarks"))
CODE = ("src", "pyproject.toml")
BENCHMARKS = ("benchmarks", ":!benchmarks/*.md", ":!benchmarks/results")
TESTED = (*CODE, "tests", "examples", "tools", "Makefile")
IMPORTED = [
    ROOT / folder
    for folder in ("benchmarks", "tests/protrain", "tests/protrain/core", "examples")
]
PACKAGE = "src/axolotl/integrations/protrain"
HELPERS = ("tests/conftest.py", "tests/protrain/*.py", ":!tests/protrain/test_*.py")
TRAINED = (
    *(*CODE, f":!{PACKAGE}/service", f":!{PACKAGE}/cli"),
    *(*HELPERS, ":!tests/protrain/core"),
)
"""A training runs no command of ours, serves nobody and needs none of core's tests."""
EMULATED = (
    *(*CODE, "tests/cuda_emulation", "examples"),
    *(*HELPERS, ":!tests/protrain/core/test_*.py"),
)
SWEPT = (
    *(
        "pyproject.toml",
        f"{PACKAGE}/core",
        f"{PACKAGE}/offline",
        "tests/protrain/sweep.py",
    ),
    *("tests/protrain/shrunk_models.py", "tests/protrain/checked_device.py"),
)
MUTATED = (
    *(f"{PACKAGE}/{room}" for room in ("core", "plugin.py", "service/live.py")),
    # tests of the files beside core have helpers in this folder
    *("pyproject.toml", "tests/mutants.py", "tests/protrain/*.py"),
    # cells of the matrix: the tests that mutants are tried by train none
    *(":!tests/protrain/matrix*.py", ":!tests/protrain/experts_plugin.py"),
    # the tests of this tool run no engine
    ":!tests/protrain/test_everything.py",
)
READ_AS_TEXT = ("lint", "test-full-rest", "test-newest")
"""Sets that check comments too: those of Python make no row of another set old."""
RESULT_WIDTH = 90
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"


@dataclass(frozen=True)
class Set:
    """Something to run.

    Attributes:
        name: Of its row.
        command: For a shell, in the root of the repository.
        paths: Files and folders without whose change it would come to the same result.
        shows: Is in the line that says how it passed; else, and of a failure, the last line.
    """

    name: str
    command: str
    paths: tuple[str, ...]
    shows: str = ""


def _parts(files: list[Path]) -> list[Path]:
    """These files and those of this repository that they import or name, and so on."""
    for file in files:
        nodes = [*ast.walk(ast.parse(file.read_text("utf-8")))]
        names = [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)]
        names += [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
        texts = [str(n.value) for n in nodes if isinstance(n, ast.Constant)]
        # a script that they run, or a plugin that they name
        names += [text.partition(".")[0] for text in texts if text.count(".") == 1]
        found = (
            folder / f"{name.replace('.', '/')}{end}"
            for name, folder in product(names, IMPORTED)
            for end in (".py", "/__init__.py")
        )
        files += [part for part in {*found} - {*files} if part.exists()]
    return files


def _measured(name: str, options: str = "") -> Set:
    file = ROOT / "benchmarks" / f"{name.replace('-', '_')}.py"
    parts = [str(part.relative_to(ROOT)) for part in _parts([file])]
    command = f".venv/bin/python benchmarks/{file.name} {options}".strip()
    return Set(name, command, (*CODE, *sorted(parts)))


def _parity() -> tuple[str, ...]:
    """Files of the trainings that are compared with plain ones."""
    folder = ROOT / "tests" / "protrain"
    parts = _parts([folder / "test_parity.py", folder / "test_chaos.py"])
    names = sorted(str(part.relative_to(ROOT)) for part in parts)
    return (*CODE, "tests/conftest.py", *names)


TODAY = date.today().isoformat()
SETS = (
    Set("lint", "make lint", (".",), "Success"),
    Set("demo", "make demo", (*CODE, "examples"), "OK:"),
    Set("demo-2", "make demo-2", (*CODE, "examples"), "OK:"),
    Set("test-full-core", "make test-full-core", (*CODE, *HELPERS)),
    Set("test-full-parity", "make test-full-parity", _parity()),
    Set("test-full-rest", "make test-full-rest", TESTED),
    Set("test-cuda", "make test-cuda", EMULATED),
    Set("test-newest", "make test-newest", TESTED),
    Set("test-oldest", "make test-oldest", (*CODE, *HELPERS)),
    Set("matrix", "make matrix", TRAINED),
    Set("chaos", "make chaos", TRAINED),
    Set("sweep", "make sweep", SWEPT),
    Set("mutants", "make mutants", MUTATED),
    Set("site", "make site", ("docs", "README.md", "tools")),
    Set(
        "gpu-rehearsal",
        "make gpu-rehearsal",
        (*CODE, "benchmarks", ":!benchmarks/*.md"),
    ),
    _measured("five-plans", f"--output benchmarks/results/{TODAY}-five-plans.md"),
    _measured("plan-speed"),
    _measured("published", "--output benchmarks/results/published.md"),
    _measured("start-up", f"--output benchmarks/results/{TODAY}-cpu-start-up.md"),
    _measured("hook-cost"),
    _measured("overhead", "--output benchmarks/results"),
    _measured("step-time"),
    _measured("peak-prediction"),
    _measured("saving"),
    _measured("end-of-step", "--output benchmarks/results"),
    _measured("load-peak"),
    _measured("qlora-load"),
    _measured("generation"),
    _measured("service"),
    Set("compare", "make compare", (*CODE, "benchmarks/*.py", "benchmarks/comparison")),
)
HEADER = f"""\
# Evidence

Written by `make everything`: do not edit. Each row is one command, run whole on the commit it
names. `python tools/everything.py --list` names the rows that a later change has made old.

| {" | ".join(("set", "result", "commit", "date", "minutes", "machine", "command"))} |
|{" --- |" * 7}
"""


@dataclass(frozen=True)
class Row:
    """The end of a set's last run."""

    name: str
    result: str
    commit: str
    date: str
    minutes: str
    machine: str
    command: str

    @property
    def passed(self) -> bool:
        """Whether its command ended with 0."""
        return not self.result.startswith("**failed")


def read_rows() -> dict[str, Row]:
    """The rows of the page, by the names of their sets."""
    lines = PAGE.read_text("utf-8").splitlines() if PAGE.exists() else []
    # a command may have one of its own
    cells = [line[2:-2].split(" | ", 6) for line in lines if line.startswith("| ")]
    rows = [Row(*each) for each in cells[1:] if not each[0].startswith("-")]
    return {row.name: row for row in rows}


def write_rows(rows: dict[str, Row]) -> None:
    """Write the page, in the order of `SETS`."""
    known = [rows[each.name] for each in SETS if each.name in rows]
    lines = [f"| {' | '.join(astuple(row))} |\n" for row in known]
    PAGE.write_text(HEADER + "".join(lines), "utf-8")


def why_run(each: Set, rows: dict[str, Row]) -> str:
    """Say why a set has to run; empty where its row is of this tree and says `passed`."""
    row = rows.get(each.name)
    if row is None:
        return "never run"
    if not row.passed:
        return "failed"
    if _undated(row.command) != _undated(f"`{each.command}`"):
        return "the command has changed"
    changed = _git("diff", "--name-only", row.commit, "--", *each.paths, check=False)
    if changed is None:
        return f"commit {row.commit} is not in this repository"
    names = [file for file in changed.splitlines() if not _is_output(file)]
    as_text = each.name in READ_AS_TEXT
    file = next((f for f in names if as_text or not _same_code(row.commit, f)), "")
    return f"{file} has changed" if file else ""


def _same_code(commit: str, file: str) -> bool:
    """Tell whether a Python file differs in comments and layout alone."""
    old, new = _git("show", f"{commit}:{file}", check=False), ROOT / file
    if not file.endswith(".py") or old is None or not new.exists():
        return False
    before, after = (
        ast.dump(ast.parse(text)) for text in (old, new.read_text("utf-8"))
    )
    return before == after


def _undated(command: str) -> str:
    """A command without the date of a file that it writes."""
    return re.sub(r"\d{4}-\d\d-\d\d", "", command)


def _is_output(file: str) -> bool:
    """Tell what sets write themselves."""
    outputs = "docs/evidence.md docs/compatibility docs/models docs/reliability"
    return file.startswith((*outputs.split(), "benchmarks/results/"))


def _git(*arguments: str, check: bool = True) -> str | None:
    told = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=check
    )
    return None if told.returncode else told.stdout.strip()


def run(each: Set, machine: str) -> Row:
    """Run a set, its output in a log."""
    LOGS.mkdir(parents=True, exist_ok=True)
    log, began = LOGS / f"{each.name}.log", time.monotonic()
    # as in the Makefile: else each process compiles what it imports
    environment = {k: v for k, v in os.environ.items() if k != NO_BYTECODE}
    with log.open("w", encoding="utf-8") as output:
        code = subprocess.run(
            each.command,
            shell=True,
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, "HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1"},
        ).returncode
    lines = [line.strip(" =|│") for line in log.read_text("utf-8").splitlines()]
    # a table ends with a line of box drawings
    told = [line for line in lines if any(map(str.isalnum, line))]
    shown = [line for line in told if code == 0 and each.shows in line]
    last = (shown or told or ["said nothing"])[-1]
    last = last.replace(f"{ROOT}/", "").replace("|", "/")[:RESULT_WIDTH]
    return Row(
        each.name,
        last if code == 0 else f"**failed** ({code}): {last}",
        _git("rev-parse", "--short=9", "HEAD") or "",
        date.today().isoformat(),
        f"{(time.monotonic() - began) / 60:.1f}",
        machine,
        f"`{each.command}`",
    )


def _chosen(names: Iterable[str], rows: dict[str, Row]) -> list[tuple[Set, str]]:
    wanted = set(names)
    if unknown := wanted - {each.name for each in SETS}:
        sys.exit(f"no such set: {', '.join(sorted(unknown))}")
    if wanted:
        return [(each, "asked for") for each in SETS if each.name in wanted]
    return [(each, why) for each in SETS if (why := why_run(each, rows))]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="sets; all that have to run")
    parser.add_argument("--list", action="store_true", help="run nothing")
    parser.add_argument("--minutes", type=float, help="for all of them together")
    given = parser.parse_args()
    rows = read_rows()
    chosen = _chosen(given.names, rows)
    if given.list:
        print("\n".join(f"{each.name}: {why}" for each, why in chosen))
        return int(bool(chosen))
    if _git(
        "status", "--porcelain", "--untracked-files=no", "--", *TESTED, *BENCHMARKS
    ):
        sys.exit("Commit first: a row names the commit that was run.")
    from machine import describe

    facts = describe()
    machine = f"{facts['processor']}, {facts['host memory']}"
    until = time.monotonic() + 60 * (given.minutes or float("inf"))
    failed = 0
    for each, why in chosen:
        row = rows.get(each.name)
        if time.monotonic() + 60 * float(row.minutes if row else 0) > until:
            print(f"{each.name}: no time for it", flush=True)
            continue
        print(f"{each.name}: {why}", flush=True)
        rows[each.name] = run(each, machine)
        write_rows(rows)
        failed += not rows[each.name].passed
        print(f"    {rows[each.name].result}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
