"""Check the words of src: how docstrings begin, and names that nobody else uses.

A docstring's first sentence has a subject or an imperative verb, so that it is understood
without its neighbour. `make lint` runs this; `python tools/words.py FILE ...` one file.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

BEGINNING = re.compile(
    r"(Of|That|Those|These|Who|Whose|It|Its|Their|They|What|Where|When|Which|Whether|How|"
    r"In what|The same)\b"
)
"""Beginnings that lack a subject of their own."""
PRIVATE = re.compile(
    r"(?<![a-z])(noted|ghosts?|stand[-_]?ins?|notch(es)?|levers?|arenas?|(at|goes|go)[_ ]home)"
    r"(?![a-z])",
    re.IGNORECASE,
)
"""Words that have a standard term: DESIGN.md, section 10, and docs/words.md."""
PUBLIC = {"notches", "levers", "host_arena_bytes", "_levers", "arena"}
"""Keys of --json and report.json and options, which keep their names."""
OWNERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def faults(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield a line and what is wrong there, for each docstring and each name."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 1)
        text = None
        if isinstance(node, OWNERS):
            text = ast.get_docstring(node)
        # a string below a name says what that is
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = node.value.value if isinstance(node.value.value, str) else None
        if text is not None:
            if found := BEGINNING.match(text):
                yield line, f"a docstring begins with {found[1]!r}: name its subject"
            for found in PRIVATE.finditer(re.sub(r"`[^`]*`", "", text)):
                yield line, f"a docstring has the private word {found[0]!r}"
        for kind in ("name", "id", "attr", "arg"):
            name = getattr(node, kind, None)
            if isinstance(name, str) and name not in PUBLIC and PRIVATE.search(name):
                yield line, f"the name {name!r} is a private word"


def main() -> int:
    """Print each fault of the files named, by default of src; return 1 if there are any."""
    files = [Path(name) for name in sys.argv[1:]] or sorted(Path("src").rglob("*.py"))
    lines = {
        f"{file}:{line}: {fault}"
        for file in files
        for line, fault in faults(ast.parse(file.read_text("utf-8")))
    }
    print("\n".join(sorted(lines)), end="\n" if lines else "")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
