"""Keeps docs/whats_here.md: every module in reading order, one line each.

``python -m tests.whats_here`` rewrites the list. The order is the order of the page itself: a known module stays where
it is and takes the first line of its docstring, a new one goes to the end of its section, a removed one goes. Move
lines by hand to put them in reading order. ``--check`` only tells (exit 1) whether the page is current. Test files are
left out: each is named after what it tests.
"""

from __future__ import annotations

import ast
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "whats_here.md"
SECTIONS = ("protocol", "sim", "real", "scenarios", "analysis", "tests")
ENTRY = re.compile(r"^- `(?P<path>[^`]+\.py)`: ")


def summary(path: pathlib.Path) -> str:
    """The first line of a module's docstring, or "" where it has none."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.strip().partition("\n")[0].strip()


def modules(root: pathlib.Path, section: str) -> list[str]:
    """The modules of a section, sorted. A package's ``__init__`` counts where it says or does something."""
    found = []
    for path in sorted((root / section).rglob("*.py")):
        if path.name.startswith("test_"):
            continue
        if path.name == "__init__.py" and not path.read_text(encoding="utf-8").strip():
            continue
        found.append(path.relative_to(root).as_posix())
    return found


def render(root: pathlib.Path, page: str) -> tuple[str, list[str]]:
    """The current page and what is wrong with ``page``: one line each for a missing, removed or changed module."""
    order = [match["path"] for line in page.splitlines() if (match := ENTRY.match(line))]
    lines_now = {match["path"]: line for line in page.splitlines() if (match := ENTRY.match(line))}
    head = page.partition("\n## ")[0].rstrip("\n")
    problems = [f"{path}: listed twice" for path in sorted({p for p in order if order.count(p) > 1})]
    text = [head]
    known: set[str] = set()
    for section in SECTIONS:
        present = modules(root, section)
        known.update(present)
        kept = [path for path in dict.fromkeys(order) if path in present]
        text += ["", f"## {section}", ""]
        for path in kept + [path for path in present if path not in kept]:
            said = summary(root / path)
            if not said:
                problems.append(f"{path}: has no docstring whose first line could be shown")
            line = f"- `{path}`: {said}"
            text.append(line)
            if path not in lines_now:
                problems.append(f"{path}: not listed")
            elif lines_now[path] != line:
                problems.append(f"{path}: its line differs from its docstring")
    problems += [f"{path}: listed, but there is no such file" for path in order if path not in known]
    return "\n".join(text) + "\n", problems


def main(arguments: list[str]) -> int:
    page = PAGE.read_text(encoding="utf-8")
    text, problems = render(ROOT, page)
    for problem in problems:
        print(problem)
    if arguments == ["--check"]:
        return 1 if problems or text != page else 0
    if arguments:
        print("usage: python -m tests.whats_here [--check]", file=sys.stderr)
        return 2
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
