"""Take each call away that orders something: some test must notice each.

Run by `make mutants`. A mutant is a copy of the package in which one call of a name in
`ORDERING` is gone; the result of a `record` is the first event of that place instead.
All of the engine is read for such calls, so that new code needs no new mutant. Core's tests
run once on a copy that notes which of them make each call: only these try its mutant, first
those that have noticed others, then the fastest.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import importlib
import json
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
    "apply_all begin_use discard end_use forget forget_all hide leaves overwritten record "
    "refresh_stale release settle settle_own show_again synchronize wait "
    "wait_everywhere wait_stalled".split()
)
ANNOUNCEMENTS = ("reads", "writes", "begin_use", "end_use")
"""Of a device, which only the tests' device listens to: not taken away."""
FOLDERS = frozenset("rename rmtree restore register_at_fork mkdir".split())
REFUSALS = frozenset(("require_sound", "require_plan", "restore"))

CORE = ROOT / "tests/protrain/core"
ENGINE = sorted(
    f"core/engine/{path.name}" for path in (ROOT / PACKAGE / "core/engine").glob("*.py")
)
RANKS = [
    *(
        f"{CORE}/test_ranks.py::test_equals_plain_ddp[2-{case}]"
        for case in (
            "B-slow C-slow B-skips C-skips C-mixed B-looks B-host-skips C-schedule-free"
        ).split()
    ),
    f"{CORE}/test_ranks.py::test_a_load_waits_for_ranks_in_a_pass[2-loads]",
    f"{CORE}/test_ranks.py::test_a_gradient_that_one_rank_sets_to_none_is_in_no_average"
    "[2-drops]",
]
"""Tests in processes of their own, which note no calls: for what the others miss."""

OTHERS: dict[str, tuple[frozenset[str], str]] = {
    "core/checkpoint/folders.py": (FOLDERS, "core/test_checkpoint.py"),
    "plugin.py": (
        REFUSALS,
        "test_bad_input.py::test_a_misspelt_class_is_refused_with_all_else "
        "test_bad_input.py::test_too_small_a_budget_is_refused_before_loading "
        "test_resuming.py",
    ),
    "service/live.py": (
        ORDERING,
        "test_service.py::test_the_next_adapter_comes_while_one_computes "
        "test_service.py::test_what_is_replaced_is_not_copied_any_more",
    ),
}
"""Files beside the engine: names of calls, and tests."""

EQUIVALENT = {
    "apply.py Updates.apply: compute.wait(own.written_back)": "compute waits for "
    "operands, which are fetched after that event",
    "full_params.py FullParams._show: self.hide()": "a copy on one of several ranks has "
    "shown the same bytes, which are bound once more",
    "live.py _Place.__init__: device.compute.record()": "an event of compute before "
    "anything is copied, whichever it is",
    "param_store.py ParamStore.move_out: stream.wait(self._device.compute.record())": "on a "
    "card alone, and closing has waited for all streams: for who checks accesses by thread",
    "param_store.py ParamStore.move_out: stream.record().synchronize()": "the same: each "
    "thread has waited for its copies",
    "step.py Step.optimizer_step: self.due.apply_all()": "only gives memory back earlier: "
    "a chunk whose step waits has been in no pass since, and has no gradient",
    "swap.py Swap.open_backward: self.settle()": "only gives memory back earlier",
}
"""Mutants that no test can notice, by name, and why."""

ON_A_CARD = (
    "device.py CudaDevice.",
    "device.py _timed:",
    "param_store.py ParamStore._fetched_to_host:",
)
"""What core's tests do not run: tests/cuda_emulation has a table of such mutants."""

CRASH = "tests/ends its process"

NOTED = """
def _made(name):
    # a process that a test has started has none
    getattr(__import__("builtins"), "calls_made", set()).add(name)
"""

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


def mutants_of(file: str, names: Collection[str]) -> Iterator[Mutant]:
    """All mutants of a file, in the order of its lines."""
    source = (ROOT / PACKAGE / file).read_text("utf-8")
    for number, name in enumerate(_names(file, _places(ast.parse(source), names))):
        tree = ast.parse(source)
        _, call, parent = _places(tree, names)[number]
        instead: ast.expr = ast.Constant(None)
        if isinstance(call.func, ast.Attribute) and call.func.attr == "record":
            instead = ast.Call(ast.Name("_stale", ast.Load()), [call.func.value], [])
            tree.body += ast.parse(STALE).body
        _replace(parent, call, instead)
        yield Mutant(file, name, ast.unparse(ast.fix_missing_locations(tree)))


def noted(file: str) -> str:
    """The text of a file whose calls that order something note their names."""
    tree = ast.parse((ROOT / PACKAGE / file).read_text("utf-8"))
    places = _places(tree, ORDERING)
    for (_, call, parent), name in zip(places, _names(file, places), strict=True):
        note = ast.Call(ast.Name("_made", ast.Load()), [ast.Constant(name)], [])
        both = ast.Tuple([note, call], ast.Load())
        _replace(parent, call, ast.Subscript(both, ast.Constant(1), ast.Load()))
    tree.body += ast.parse(NOTED).body
    return ast.unparse(ast.fix_missing_locations(tree))


Place = tuple[str, ast.Call, ast.AST]


def _names(file: str, places: list[Place]) -> list[str]:
    """Names of mutants: file, function and call; and which, where several are alike."""
    names, seen = [], Counter[str]()
    for function, call, _ in places:
        name = f"{Path(file).name} {function}: {ast.unparse(call)}"
        seen[name] += 1
        names.append(name + (f" #{seen[name]}" if seen[name] > 1 else ""))
    return names


def _places(tree: ast.AST, names: Collection[str], function: str = "") -> list[Place]:
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


class Noting:
    """Notes seconds of tests, and which of the calls each makes; one `part` of `parts`."""

    def __init__(self, path: Path, part: int, parts: int) -> None:
        self._path, self._part, self._parts = path, part, parts
        builtins.calls_made = set()  # type: ignore[attr-defined]

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave the other parts out."""
        items[:] = items[self._part :: self._parts]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Around a test."""
        made = builtins.calls_made  # type: ignore[attr-defined]
        made.clear()
        began = time.perf_counter()
        outcome = yield
        line = item.nodeid, time.perf_counter() - began, sorted(made)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return outcome  # type: ignore[return-value]


def start(
    texts: dict[str, str],
    groups: list[list[str]],
    folder: Path,
    noting: Noting | None = None,
) -> int:
    """Fork a process that runs groups of tests until one fails; its id.

    It is a copy of this one, which has imported what all tests import, and finds in
    `folder` a package in which some files have these texts.
    """
    shutil.copytree(ROOT / "src", folder / "src")
    for file, text in texts.items():
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
    options += [] if noting else ["-x"]
    plugins = [noting] if noting else []
    codes = (pytest.main([*options, *group], plugins) for group in groups)
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


class Tests:
    """Core's tests, by the calls that each makes; `noticed` counts mutants of each."""

    def __init__(self, jobs: int) -> None:
        self.noticed: Counter[str] = Counter()
        self._of_call: dict[str, list[tuple[float, str]]] = {}
        texts = {file: noted(file) for file in ENGINE}
        running = {}
        for part in range(jobs):
            folder = Path(tempfile.mkdtemp())
            noting = Noting(folder / "calls.jsonl", part, jobs)
            running[start(texts, [[str(CORE)]], folder, noting)] = folder
        for process_id, folder in running.items():
            _, status = os.waitpid(process_id, 0)
            broken = set(failures(folder, status))
            for test in sorted(broken):
                print(f"fails without a mutant: {test}", flush=True)
            for line in (folder / "calls.jsonl").read_text("utf-8").splitlines():
                test, seconds, calls = json.loads(line)
                for call in calls if test not in broken else ():
                    self._of_call.setdefault(call, []).append((seconds, test))
            shutil.rmtree(folder, ignore_errors=True)

    def groups(self, mutant: Mutant) -> list[list[str]]:
        """Groups of tests for a mutant, in the order in which they are tried."""
        if mutant.file in OTHERS:
            return [[f"{CORE.parent}/{t}" for t in OTHERS[mutant.file][1].split()]]
        own = self._of_call.get(mutant.name, [])
        own = sorted(own, key=lambda each: (-self.noticed[each[1]], each[0]))
        tests = [f"{ROOT}/{test}" for _, test in own]
        return [group for group in (tests, RANKS) if group]


def run(
    mutants: list[Mutant], jobs: int, tests: Tests
) -> Iterator[tuple[Mutant, str, float]]:
    """Each mutant as it ends, the test that notices, empty if none does, and seconds."""
    left, running = mutants[::-1], {}
    while left or running:
        while left and len(running) < jobs:
            mutant, folder = left.pop(), Path(tempfile.mkdtemp())
            texts = {mutant.file: mutant.text}
            process_id = start(texts, tests.groups(mutant), folder)
            running[process_id] = mutant, folder, time.perf_counter()
        process_id, status = os.wait()
        if process_id not in running:
            continue
        mutant, folder, began = running.pop(process_id)
        found = failures(folder, status)
        shutil.rmtree(folder, ignore_errors=True)
        tests.noticed.update(found[:1])
        caught = found[0].rpartition("/")[2] if found else ""
        yield mutant, caught, time.perf_counter() - began


def main() -> int:
    """Exit code: 1 if a mutant survives that is not equivalent, or an entry is stale."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="only mutants with one of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--list", action="store_true", help="name them, run nothing")
    given = parser.parse_args()
    files = {**dict.fromkeys(ENGINE, ORDERING), **{f: o[0] for f, o in OTHERS.items()}}
    every = [m for file, names in files.items() for m in mutants_of(file, names)]
    stale = EQUIVALENT.keys() - {mutant.name for mutant in every}
    for name in sorted(stale):
        print(f"no such mutant any more: {name}")
    words = given.words or [""]
    chosen = [m for m in every if any(w in f"{m.file} {m.name}" for w in words)]
    chosen = [m for m in chosen if m.name not in EQUIVALENT]
    chosen = [m for m in chosen if not m.name.startswith(ON_A_CARD)]
    if given.list:
        print("\n".join(mutant.name for mutant in chosen))
        return 0
    # as conftest.py says, which comes too late: torch is imported here
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in IMPORTED:
        importlib.import_module(name)
    survivors = []
    for mutant, caught, seconds in run(chosen, given.jobs, Tests(given.jobs)):
        survivors += [] if caught else [mutant.name]
        words = caught or "SURVIVES"
        print(f"{words:60.60} {seconds:4.0f} s  {mutant.name}", flush=True)
    print(f"{len(chosen)} mutants, {len(survivors)} survive")
    print("\n".join(survivors))
    return 1 if survivors or stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
