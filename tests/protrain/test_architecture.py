"""Imports point one way: what runs a plan cannot know why it was chosen."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

CORE = Path(__file__).resolve().parents[2] / "src/axolotl/integrations/protrain/core"
MODULES = sorted(CORE.rglob("*.py"))
PLUGIN = sorted(CORE.parent.rglob("*.py"))
sys.path.insert(0, str(CORE.parents[4] / "benchmarks"))
import step_trace  # noqa: E402 - a benchmark is no package

LIBRARIES = {
    "torch",
    "functorch",
    "numpy",
    "psutil",
    "pydantic",
    "safetensors",
    "xxhash",
} | sys.stdlib_module_names
NO_TORCH = {
    "manifest",
    *(f"planner/{name}" for name in ("memory", "demand", "trained_bytes", "seconds")),
    *(f"planner/{name}" for name in ("plans", "search", "planner")),
}

IN_A_STEP = {"files": 19, "functions": 190, "classes": 32}
"""Of core, as `benchmarks/step_trace.py` counts them."""
MOST_CALLABLES = 9

BASE = {"types", "errors", "sizes"}
# Each part of core and the parts that it may import, itself aside.
MAY_IMPORT = {
    "__init__": {"api"},
    "api": BASE | {"layout", "host", "engine", "planner"},
    "types": {"errors"},
    "errors": set(),
    "sizes": {"errors"},
    "host": set(),
    "manifest": set(),
    "layout": BASE,
    "engine": BASE | {"layout", "host"},
    "checkpoint": BASE | {"layout", "host", "manifest"},
    "planner": BASE | {"layout", "engine", "host"},
}
# Inside of the planner: what prices a plan, then what chooses one.
PRICES = "trained_bytes demand memory seconds generation plans search planner".split()


class Import(NamedTuple):
    """`path` is what is imported: from the root, or from core where `inside`."""

    line: int
    inside: bool
    path: tuple[str, ...]


def imports(module: Path) -> Iterator[Import]:
    """Every import statement, also those in functions and under TYPE_CHECKING."""
    folder = module.parent.relative_to(CORE).parts
    for node in ast.walk(ast.parse(module.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, False, tuple(alias.name.split(".")))
        elif isinstance(node, ast.ImportFrom):
            path = tuple(node.module.split(".")) if node.module else ()
            if not node.level:
                yield Import(node.lineno, False, path)
                continue
            up = node.level - 1
            assert up <= len(folder), f"{module}:{node.lineno} imports the plugin layer"
            path = folder[: len(folder) - up] + path
            for alias in node.names:
                yield Import(node.lineno, True, (*path, alias.name))


def part_of(module: Path) -> str:
    return module.relative_to(CORE).with_suffix("").parts[0]


def test_core_has_modules() -> None:
    assert MODULES


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(CORE)))
def test_imports_of(module: Path) -> None:
    part = part_of(module)
    assert part in MAY_IMPORT, f"say in MAY_IMPORT what core/{part} may import"
    libraries = LIBRARIES - ({"torch", "functorch"} if part in NO_TORCH else set())
    for line, inside, path in imports(module):
        where = f"{module.relative_to(CORE)}:{line} imports {'.'.join(path)}"
        if inside:
            assert path[0] in MAY_IMPORT[part] | {part}, where
        else:
            assert path[0] in libraries, where


def test_the_direction_has_no_cycle() -> None:
    """What a part may import may not, by any way round, import that part."""
    reachable = {part: set(targets) for part, targets in MAY_IMPORT.items()}
    for _ in MAY_IMPORT:
        for targets in reachable.values():
            targets |= {far for near in targets for far in reachable[near]}
    cyclic = {part for part, targets in reachable.items() if part in targets}
    assert not cyclic - {"session"}


def test_what_prices_a_plan_knows_nothing_of_the_choice() -> None:
    """Each of these modules imports earlier ones alone, and none that traces or measures."""
    for number, name in enumerate(PRICES):
        for line, inside, path in imports(CORE / f"planner/{name}.py"):
            if inside and path[0] == "planner":
                assert path[1] in PRICES[:number], f"{name}:{line}"


def test_modules_import_in_no_circle() -> None:
    """Neither in functions nor for types."""
    root = CORE.parent
    modules = {path.relative_to(root).with_suffix("").parts: path for path in PLUGIN}
    graph = {}
    for name, path in modules.items():
        targets = graph[name] = set()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                above = name[: len(name) - node.level]
                above += tuple(node.module.split(".")) if node.module else ()
                # a name may be a module's own, or a module
                found = {above, *((*above, alias.name) for alias in node.names)}
                targets |= (found & modules.keys()) - {name}
    TopologicalSorter(graph).prepare()


def test_no_class_is_too_large_to_take_in() -> None:
    """Its methods fit on a page when they are listed."""
    large = {
        f"{path.name}:{node.name}": methods
        for path in PLUGIN
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
        for methods in (sum(isinstance(m, ast.FunctionDef) for m in node.body),)
        if methods > 25
    }
    assert not large


def test_few_classes_of_core_keep_callables() -> None:
    """An order that stored callables compose is written nowhere."""
    kept = set()
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                kept |= {f"{path.name}:{node.name}.{n}" for n in _callables(node)}
    assert len(kept) <= MOST_CALLABLES, sorted(kept)


def _callables(owner: ast.ClassDef) -> Iterator[str]:
    """Fields and attributes that are set to what a caller gives as a callable."""
    for node in owner.body:
        if isinstance(node, ast.AnnAssign) and "Callable" in ast.unparse(
            node.annotation
        ):
            yield ast.unparse(node.target)
        if not isinstance(node, ast.FunctionDef) or node.name != "__init__":
            continue
        given = {
            arg.arg
            for arg in (*node.args.args, *node.args.kwonlyargs)
            if arg.annotation and "Callable" in ast.unparse(arg.annotation)
        }
        for assigned in ast.walk(node):
            if (
                isinstance(assigned, ast.Assign)
                and {
                    name.id
                    for name in ast.walk(assigned.value)
                    if isinstance(name, ast.Name)
                }
                & given
            ):
                yield ast.unparse(assigned.targets[0])


def test_a_training_step_passes_through_little_of_core() -> None:
    """Ceilings that only go down: who adds a layer to the step takes one away."""
    for what, names in step_trace.passed()._asdict().items():
        assert len(names) <= IN_A_STEP[what], (what, sorted(names))


@pytest.mark.parametrize("room", ["job.py", "offline", "cli"])
def test_a_plan_is_made_without_what_trains(room: str) -> None:
    """A dry run and training share the way to a plan, not the run itself."""
    place = CORE.parent / room
    modules = [place] if place.is_file() else sorted(place.glob("*.py"))
    assert modules
    for module in modules:
        what_trains = r"from \.+(run|trainer|plugin|recovery) import"
        assert not re.search(what_trains, module.read_text("utf-8")), module


@pytest.mark.parametrize("name", ["turns", "losses", "adapters"])
def test_what_is_served_knows_no_model(name: str) -> None:
    """Adapters are values: only `live` and `engine` see the model they are shown in."""
    text = (CORE.parent / "service" / f"{name}.py").read_text("utf-8")
    assert not re.search(r"^(from|import) (axolotl|transformers|peft)", text, re.M)
    assert not re.search(r"^from \.(live|engine|http) ", text, re.M)


@pytest.mark.parametrize(
    "module", PLUGIN, ids=lambda m: str(m.relative_to(CORE.parent))
)
def test_nothing_rests_on_assertions(module: Path) -> None:
    """`python -O` leaves them out: they only tell mypy what a value is."""
    for node in ast.walk(ast.parse(module.read_text("utf-8"))):
        if isinstance(node, ast.Assert):
            said = re.split(" (?:and|or) ", ast.unparse(node.test))
            narrows = r"[\w.]+ is (not )?None|isinstance\(.*\)"
            assert all(re.fullmatch(narrows, part) for part in said), node.lineno


def test_core_loads_neither_transformers_nor_axolotl() -> None:
    """Only axolotl's two package `__init__` run; they hold nothing but extend_path."""
    script = (
        "import axolotl.integrations.protrain.core.api, sys;"
        "print([name for name in sys.modules"
        " if name.split('.')[0] in ('transformers', 'peft')"
        " or name.startswith('axolotl.utils')])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
