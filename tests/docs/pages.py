"""The pages of the documentation: their code blocks, the commands in them, and what these really print.

A block marked ``console`` is a session: a line that begins with ``$ `` is run, the lines below it are what it prints.
The blocks of a page are one session, in a folder that holds a copy of ``docs/``. A block marked ``yaml FILE`` or
``python FILE`` is that file, word for word. A block marked ``yaml`` is part of a scenario.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in DOCS.glob("*.md")))
_TIME_LIMIT_S = 300
_HOME = "/home/you/seatrial"
_END_OF_OUTPUT = "-- end of output --"
# Seconds of this machine's clock: everything else that is printed is the same everywhere.
_WALL = (
    (re.compile(r"(s simulated) in [\d.]+ s"), r"\1 in 0.0 s"),
    (re.compile(r"[\d.]+ s, [\d,]+ seeds an hour"), "0.0 s, 0 seeds an hour"),
    # Lines of progress, on stderr, which a machine that is busy has the time to print.
    (re.compile(r"^\d+ of \d+ seeds\n", re.MULTILINE), ""),
    (re.compile(r"^\w+: \w+, \d+ s simulated, \d+ events\n", re.MULTILINE), ""),
)


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    file: str
    """The file that it shows, from the root of the repository; empty where it shows none."""
    text: str


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    opened: tuple[int, str] | None = None
    body: list[str] = []
    for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), 1):
        if not line.startswith("```"):
            body.append(line)
        elif opened is None:
            opened, body = (number, line[3:].strip()), []
        else:
            language, _, file = opened[1].partition(" ")
            yield Block(page, opened[0], language, file, "".join(f"{one}\n" for one in body))
            opened = None
    assert opened is None, f"{page}:{opened}: the block is never closed"


def commands(block: Block) -> list[str]:
    """The commands of a session, in order. One that ends in a backslash goes on in the next line; after ``<< 'END'`` a
    command goes on to the line ``END``."""
    found: list[str] = []
    goes_on = False
    for line in block.text.splitlines():
        if goes_on:
            found[-1] += "\n" + line
        elif line.startswith("$ "):
            found.append(line[2:])
        if goes_on or line.startswith("$ "):
            document = "<< 'END'" in found[-1]
            goes_on = line != "END" if document else line.endswith("\\")
    return found


def play(page: str, folder: pathlib.Path) -> list[tuple[Block, str]]:
    """Run the sessions of a page, and give each block with its text as it should be.

    Args:
        folder: an empty folder to run in.
    """
    sessions = [block for block in blocks(page) if block.language == "console"]
    everything = [command for block in sessions for command in commands(block)]
    outputs = iter(_run(everything, folder))
    return [
        (block, "".join(f"$ {command}\n{next(outputs)}" for command in commands(block)))
        for block in sessions
    ]  # fmt: skip


def _run(lines: list[str], folder: pathlib.Path) -> list[str]:
    if not lines:
        return []
    shutil.copytree(DOCS, folder / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    programs = folder / ".bin"
    programs.mkdir()
    (programs / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n', encoding="utf-8")
    (programs / "python").chmod(0o755)
    # The status of a command is kept over the marker, so that `echo $?` works as on a terminal.
    script = "".join(f"{line}\nseen=$?; echo '{_END_OF_OUTPUT}'; (exit $seen)\n" for line in lines)
    environment = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "COLUMNS": "120",
    }
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=_TIME_LIMIT_S,
    )  # fmt: skip
    outputs = done.stdout.replace(str(folder), _HOME).split(_END_OF_OUTPUT + "\n")[:-1]
    assert len(outputs) == len(lines), f"the session ended early:\n{done.stdout}"
    assert "Traceback (most recent call last)" not in done.stdout, done.stdout  # never to be written into a page
    return ["".join(f"{line.rstrip()}\n" for line in output.splitlines()) for output in outputs]


def without_wall_times(text: str) -> str:
    """A text with the seconds that the machine took replaced, which differ from run to run."""
    for pattern, instead in _WALL:
        text = pattern.sub(instead, text)
    return text


def replace_block(page: str, block: Block, text: str) -> None:
    """Write a page anew with another text in one block. Blocks must be replaced from the last to the first."""
    path = ROOT / page
    lines = path.read_text(encoding="utf-8").splitlines()
    length = block.text.count("\n")
    lines[block.line : block.line + length] = text.splitlines()
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
