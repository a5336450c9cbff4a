"""What the command itself says before anything starts: no Ray, a port that is taken. Exit code 2, nothing is made."""

from __future__ import annotations

import os
import pathlib
import re
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator

import pytest

from tests.scenarios.conftest import ROOT

pytestmark = pytest.mark.ray


def refused(tmp_path: pathlib.Path, *arguments: str, python: tuple[str, ...] = (), **variables: str) -> list[str]:
    """The lines of stderr of a real run that does not begin; sees to it that it leaves nothing."""
    temporary = tmp_path / "t"
    temporary.mkdir()
    out = tmp_path / "run"
    command = [sys.executable, *python, "-m", "scenarios", "run", *arguments]
    ended = subprocess.run(
        [*command, "--backend", "real", "--engine", "emulated", "--out", str(out)],
        cwd=ROOT, env={**os.environ, "TMPDIR": str(temporary), **variables}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout == "" and "Traceback" not in ended.stderr
    assert not out.exists() and list(temporary.iterdir()) == []
    return ended.stderr.splitlines()


@pytest.fixture
def short_tmp_path() -> Iterator[pathlib.Path]:
    """Ray's sockets lie below it; pytest's own folders are too long for them, which would be refused too."""
    with tempfile.TemporaryDirectory(prefix="st") as folder:
        yield pathlib.Path(folder)


@pytest.mark.parametrize("more", [[], ["--ray", "127.0.0.1:9"]])
def test_without_ray_it_says_how_to_get_it(short_tmp_path: pathlib.Path, more: list[str]) -> None:
    """The packages of this environment, all but Ray."""
    packages = short_tmp_path / "packages"
    packages.mkdir()
    for path in pathlib.Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not re.match(r"ray($|[-_])", path.name):
            (packages / path.name).symlink_to(path)
    lines = refused(short_tmp_path, "smoke", *more, python=("-S",), PYTHONPATH=str(packages))
    assert lines == [
        "error: --backend real --engine emulated: cannot run smoke",
        "       Ray is not installed; pip install 'ray==2.60.*' (or -e '.[real]')",
    ]


def test_a_port_that_is_taken_is_told_before_anything_starts(short_tmp_path: pathlib.Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        lines = refused(short_tmp_path, "manual_1_2_1", "--http", str(port))
    assert lines == [
        "error: --backend real --engine emulated: cannot run manual_1_2_1",
        f"       --http {port}: cannot listen there (Address already in use); 0 takes any free port",
    ]
