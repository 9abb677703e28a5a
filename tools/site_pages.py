"""Copy the Markdown files, and the files that they link to, for `make site`.

They keep their places, so links lead to the same files as in the repository.
"""

import shutil

from pages import DEFINED, LINK, ROOT, pages

PAGES = ROOT / "build" / "pages"
LEFT_OUT = ("src/", ".github/")


def main() -> None:
    """Begin anew, so that no page stays which is gone."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for page in pages():
        if str(page.relative_to(ROOT)).startswith(LEFT_OUT):
            continue
        text = page.read_text("utf-8")
        linked = [target for target, _ in LINK.findall(text) + DEFINED.findall(text)]
        for path in [page, *((page.parent / target).resolve() for target in linked)]:
            copied = PAGES / path.relative_to(ROOT)
            if path.is_file() and not copied.exists():
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copied)


if __name__ == "__main__":
    main()
