"""Check the Markdown files: lines of at most 100 characters, links that lead somewhere.

Tables, pictures, addresses that do not fit and records of benchmarks may be wider. `make
lint` runs this; `python tools/pages.py --wrap FILE ...` fills paragraphs that are too wide.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
WIDTH = 100
RECORDS = "benchmarks/results/"
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")
DEFINED = re.compile(r"^\[[^\]]+\]: (?!https?:)([^#\s]*)(?:#(\S*))?$", re.M)
ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)]) +")
STARTS = re.compile(r"(?:[-*+>|]|#+|\d+[.)])$")
"""A word that would begin something else at the beginning of a line."""


def pages() -> list[Path]:
    """Return the Markdown files that git knows or would add."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "*.md"]
    listed = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [ROOT / name for name in listed.stdout.splitlines()]


@cache
def headings(page: Path) -> set[str]:
    """Return the anchors that a page has, as GitHub and the site name them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the number and the words of each line that is in no block of code."""
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code:
            yield number, line


def faults(page: Path) -> Iterator[str]:
    """Yield what is wrong in a page, with the number of the line."""
    name, text = str(page.relative_to(ROOT)), page.read_text("utf-8")
    for number, line in enumerate(text.splitlines(), 1):
        # what has no place to break
        table = line.lstrip().startswith(("|", "!["))
        if len(line) > WIDTH and " " in line.strip() and not table:
            if not name.startswith(RECORDS):
                yield f"{name}:{number}: {len(line)} characters, at most {WIDTH}"
    for number, line in prose(text):
        for target, heading in LINK.findall(line) + DEFINED.findall(line):
            path = (page.parent / target).resolve() if target else page
            if not path.exists():
                yield f"{name}:{number}: {target} is not there"
            elif heading and heading not in headings(path):
                yield f"{name}:{number}: {target} has no heading for #{heading}"


def wrapped(text: str) -> str:
    """Fill each paragraph or item of a list that has a line beyond the width."""
    done: list[str] = []
    block: list[str] = []
    code = False

    def flush() -> None:
        done.extend(filled(block) if any(len(x) > WIDTH for x in block) else block)
        block.clear()

    for line in text.splitlines():
        fence = line.lstrip().startswith("```")
        apart = (
            code or fence or not line.strip() or line.lstrip().startswith(("|", "#"))
        )
        if apart or ITEM.match(line):
            flush()
        if apart:
            done.append(line)
        else:
            block.append(line)
        code = code != fence
        if line.endswith("  "):
            flush()
    flush()
    return "\n".join(done) + "\n"


def filled(block: list[str]) -> list[str]:
    """Fill one paragraph or item."""
    item = ITEM.match(block[0])
    first = item[0] if item else re.match(r"\s*", block[0])[0]  # type: ignore[index]
    words = " ".join(line.strip() for line in block)[len(first.strip()) :].split()
    glued: list[str] = []
    for word in words:
        if glued and STARTS.match(word):
            glued[-1] += f"\0{word}"
        else:
            glued.append(word)
    lines = textwrap.wrap(
        " ".join(glued),
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )
    if block[-1].endswith("  "):
        lines[-1] += "  "
    return [line.replace("\0", " ") for line in lines]


def main() -> int:
    """Print each fault, or fill the files named; return 1 if there are any faults."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wrap", action="store_true")
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args()
    found = [path.resolve() for path in options.files] or pages()
    if options.wrap:
        for page in found:
            page.write_text(wrapped(page.read_text("utf-8")), "utf-8")
        return 0
    lines = [fault for page in found for fault in faults(page)]
    print("\n".join(lines), end="\n" if lines else "")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
