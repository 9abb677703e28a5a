"""Take each call away that orders something: some test must notice each.

Run by `make mutants`. A mutant is a copy of the package in which one call of a name in
`ORDERING` is gone; the result of a `record` is the first event of that place instead.
Files in `TESTS` are read for such calls, so that new code needs no new mutant.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("src/axolotl/integrations/protrain")
SLOWEST_S = 120
"""A test that takes longer hangs, which somebody would notice too."""

IMPORTED = ("hypothesis", "torch", "torch._dynamo", "transformers", "peft")
"""What all tests import, so that no fork has to."""

ORDERING = frozenset(
    "apply_all begin_use discard end_use forget forget_all hide overwritten record "
    "refresh_stale release settle settle_own show_again synchronize wait "
    "wait_everywhere wait_stalled".split()
)
ANNOUNCEMENTS = ("reads", "writes", "begin_use", "end_use")
"""Of a device, which only the tests' device listens to: not taken away."""
FOLDERS = frozenset("rename rmtree restore register_at_fork mkdir".split())
REFUSALS = frozenset(("require_sound", "require_plan", "restore"))

QUEUES = "races schedules runtime simulated"
RANKS = "| " + " ".join(
    f"ranks.py::test_equals_plain_ddp[2-{case}]"
    for case in ("B-slow", "C-slow", "B-skips", "C-skips", "C-mixed")
)
TESTS: dict[str, tuple[frozenset[str], str]] = {
    "core/engine/access.py": (ORDERING, f"access session optimizer state {RANKS}"),
    "core/engine/apply.py": (
        ORDERING,
        f"races deferred simulated state pieces {RANKS}",
    ),
    "core/engine/embedding.py": (ORDERING, "rows"),
    "core/engine/full_params.py": (ORDERING, "access session"),
    "core/engine/gradients.py": (
        ORDERING,
        f"races deferred schedules optimizer access pieces {RANKS}",
    ),
    "core/engine/host_chunks.py": (
        ORDERING,
        f"races masters access deferred optimizer {RANKS}",
    ),
    "core/engine/optimizer.py": (ORDERING, "races deferred optimizer state access"),
    "core/engine/param_store.py": (ORDERING, "session access structures failures"),
    "core/engine/ranks.py": (ORDERING, RANKS),
    "core/engine/recompute.py": (ORDERING, "hooks policies"),
    "core/engine/reduction.py": (ORDERING, RANKS),
    "core/engine/saved_state.py": (ORDERING, f"optimizer state {RANKS}"),
    "core/engine/session.py": (
        ORDERING,
        f"session access replan races failures {RANKS}",
    ),
    "core/engine/slots.py": (ORDERING, f"{QUEUES} session replan {RANKS}"),
    "core/engine/staging.py": (
        ORDERING,
        "races deferred schedules runtime failures pieces",
    ),
    "core/engine/state.py": (ORDERING, "state deferred optimizer pieces"),
    "core/engine/step.py": (
        ORDERING,
        f"races deferred access session simulated replan failures windows hooks {RANKS}",
    ),
    "core/engine/swap.py": (ORDERING, "policies races windows failures replan"),
    "core/engine/worker.py": (ORDERING, f"runtime races deferred simulated {RANKS}"),
    "core/checkpoint/folders.py": (FOLDERS, "checkpoint"),
    "plugin.py": (
        REFUSALS,
        "../test_bad_input.py::test_a_misspelt_class_is_refused_with_all_else "
        "../test_bad_input.py::test_too_small_a_budget_is_refused_before_loading "
        "../test_resuming.py",
    ),
    "service/live.py": (
        ORDERING,
        "../test_service.py::test_the_next_adapter_comes_while_one_computes",
    ),
}
"""For each file the names of calls, and groups of tests, of which a later one is tried
where the one before has noticed nothing."""

EQUIVALENT = {
    "apply.py Updates.apply: compute.wait(own.written_back)": "compute waits for "
    "operands, which are fetched after that event",
    "full_params.py FullParams._show: self.hide()": "a copy on one of several ranks has "
    "shown the same bytes, which are bound once more",
    "step.py Step.optimizer_step: self.due.apply_all()": "only gives memory back earlier: "
    "a chunk whose step waits has been in no pass since, and has no gradient",
    "swap.py Swap.open_backward: self.settle()": "only gives memory back earlier",
}
"""Mutants that no test can notice, by name, and why."""

CRASH = "tests/ends its process"

STALE = """
def _stale(stream, first=[]):
    if not first:
        first.append(stream.record())
    return first[0]
"""


@dataclass(frozen=True)
class Mutant:
    """One call of a file that is taken away.

    Attributes:
        name: File, function and call; and which, where a function has several alike.
        text: The whole file without it.
    """

    file: str
    name: str
    text: str

    @property
    def groups(self) -> list[list[str]]:
        """Paths of tests, in the groups in which they are tried."""
        first, *others = TESTS[self.file][1].split("|")
        # any change of the engine may be noticed there
        grid = ["grid"] if self.file.startswith("core/engine/") else []
        return [paths(group) for group in (first, *grid, *others)]


def paths(tests: str) -> list[str]:
    """Paths of tests for pytest, out of a line of `TESTS`."""
    core = ROOT / "tests/protrain/core"
    found = []
    for word in tests.split():
        file, colons, test = word.partition("::")
        if not file.startswith(".."):
            file = f"test_{file.removesuffix('.py')}.py"
        found.append(f"{core / file}{colons}{test}")
    return found


def mutants_of(file: str, names: Collection[str]) -> Iterator[Mutant]:
    """All mutants of a file, in the order of its lines."""
    source = (ROOT / PACKAGE / file).read_text("utf-8")
    seen: Counter[str] = Counter()
    for number in range(len(_places(ast.parse(source), names))):
        tree = ast.parse(source)
        function, call, parent = _places(tree, names)[number]
        name = f"{Path(file).name} {function}: {ast.unparse(call)}"
        seen[name] += 1
        name += f" #{seen[name]}" if seen[name] > 1 else ""
        instead: ast.expr = ast.Constant(None)
        if isinstance(call.func, ast.Attribute) and call.func.attr == "record":
            instead = ast.Call(ast.Name("_stale", ast.Load()), [call.func.value], [])
            tree.body += ast.parse(STALE).body
        _replace(parent, call, instead)
        yield Mutant(file, name, ast.unparse(ast.fix_missing_locations(tree)))


def _places(
    tree: ast.AST, names: Collection[str], function: str = ""
) -> list[tuple[str, ast.Call, ast.AST]]:
    """Calls that can be taken away: function, call, and the node that has it."""
    found = []
    for node in ast.iter_child_nodes(tree):
        inside = function
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            inside = f"{function}.{node.name}".lstrip(".")
        if isinstance(node, ast.Call) and _orders(node, names):
            # who waits for a record at once is a mutant already
            inner = isinstance(tree, (ast.Call, ast.Attribute))
            is_record = getattr(node.func, "attr", "") == "record" and not inner
            if is_record or isinstance(tree, (ast.Expr, ast.Lambda, ast.Return)):
                found.append((function, node, tree))
        found += _places(node, names, inside)
    return found


def _orders(call: ast.Call, names: Collection[str]) -> bool:
    if isinstance(call.func, ast.Name):
        return call.func.id in names
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in names:
        return False
    of_device = ast.unparse(call.func.value).endswith("device")
    return not (of_device and call.func.attr in ANNOUNCEMENTS)


def _replace(parent: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for field, value in ast.iter_fields(parent):
        if value is old:
            setattr(parent, field, new)
        elif isinstance(value, list) and any(item is old for item in value):
            value[:] = [new if item is old else item for item in value]


def start(file: str, text: str, groups: list[list[str]], folder: Path) -> int:
    """Fork a process that runs groups of tests until one fails; its id.

    It is a copy of this one, which has imported what all tests import, and finds in
    `folder` a package in which `file` has this text.
    """
    shutil.copytree(ROOT / "src", folder / "src")
    if file:
        (folder / PACKAGE / file).write_text(text, "utf-8")
    process_id = os.fork()
    if process_id:
        return process_id
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT)
    for standard in (1, 2):
        os.dup2(output, standard)
    # what Hypothesis has found stays with the mutant
    os.chdir(folder)
    os.environ |= {"PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
    sys.path.insert(0, str(folder / "src"))
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-q", "-rfE"]
    options += ["--tb=no", "-p", "no:cacheprovider", "-o", f"timeout={SLOWEST_S}"]
    options += ["-x"] if file else []
    codes = (pytest.main([*options, *group]) for group in groups)
    code = next((int(code) for code in codes if code), 0)
    sys.stdout.flush()
    os._exit(code)


def failures(folder: Path, status: int) -> list[str]:
    """Names of tests that have failed, or of files that cannot be imported."""
    output = (folder / "output.txt").read_text("utf-8", "replace")
    if os.waitstatus_to_exitcode(status) < 0:
        return [CRASH]
    lines = [line.partition(" ") for line in output.splitlines()]
    ends = [end for word, _, end in lines if word in ("FAILED", "ERROR") and "/" in end]
    if status and not ends:
        raise SystemExit(f"pytest did not run:\n{output}")
    return [end[end.index("tests/") :].split(" - ")[0] for end in ends]


def fails_anyway(test: str) -> bool:
    """Return whether a test, or a file of tests, fails without any mutant."""
    folder = Path(tempfile.mkdtemp())
    pid = start("", "", [[str(ROOT / test)]], folder)
    _, status = os.waitpid(pid, 0)
    failed = bool(failures(folder, status))
    shutil.rmtree(folder, ignore_errors=True)
    return failed


def run(mutants: list[Mutant], jobs: int) -> Iterator[tuple[Mutant, str, float]]:
    """Each mutant as it ends, the test that notices, empty if none does, and seconds.

    A test that fails without a mutant is said, and left out from then on.
    """
    left, running = mutants[::-1], {}
    sound: dict[str, bool] = {"": True, CRASH: True}
    while left or running:
        while left and len(running) < jobs:
            mutant, folder = left.pop(), Path(tempfile.mkdtemp())
            broken = [test for test, passes in sound.items() if not passes]
            without = [f"--deselect={test}" for test in broken]
            fit = (
                [t for t in g if not t.endswith(tuple(broken))] for g in mutant.groups
            )
            groups = [[*without, *tests] for tests in fit if tests]
            pid = start(mutant.file, mutant.text, groups, folder)
            running[pid] = mutant, folder, time.perf_counter()
        pid, status = _next_end(running)
        mutant, folder, began = running.pop(pid)
        found = failures(folder, status)
        shutil.rmtree(folder, ignore_errors=True)
        test = found[0] if found else ""
        if test not in sound:
            sound[test] = not fails_anyway(test)
            if not sound[test]:
                print(f"fails without a mutant: {test}", flush=True)
        if sound[test]:
            yield mutant, test.rpartition("/")[2], time.perf_counter() - began
        else:
            left.append(mutant)


def _next_end(running: Collection[int]) -> tuple[int, int]:
    """Wait for one of these processes; its id and status."""
    while True:
        pid, status = os.wait()
        if pid in running:
            return pid, status


def main() -> int:
    """Exit code: 1 if a mutant survives that is not equivalent, or an entry is stale."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="only mutants with one of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--list", action="store_true", help="name them, run nothing")
    given = parser.parse_args()
    every = [m for file, (names, _) in TESTS.items() for m in mutants_of(file, names)]
    stale = EQUIVALENT.keys() - {mutant.name for mutant in every}
    for name in sorted(stale):
        print(f"no such mutant any more: {name}")
    words = given.words or [""]
    chosen = [m for m in every if any(w in f"{m.file} {m.name}" for w in words)]
    chosen = [m for m in chosen if m.name not in EQUIVALENT]
    if given.list:
        print("\n".join(mutant.name for mutant in chosen))
        return 0
    for name in IMPORTED:
        importlib.import_module(name)
    survivors = []
    for mutant, caught, seconds in run(chosen, given.jobs):
        survivors += [] if caught else [mutant.name]
        words = caught or "SURVIVES"
        print(f"{words:60.60} {seconds:4.0f} s  {mutant.name}", flush=True)
    print(f"{len(chosen)} mutants, {len(survivors)} survive")
    print("\n".join(survivors))
    return 1 if survivors or stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
