"""What the command itself says before anything starts: no Ray, a port that is taken. Exit code 2, nothing is made."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator

import pytest

from tests.scenarios.conftest import ROOT

pytestmark = pytest.mark.ray


def refused(
    tmp_path: pathlib.Path, *arguments: str, engine: str = "emulated", python: tuple[str, ...] = (), **variables: str
) -> list[str]:
    """The lines of stderr of a real run that does not begin; sees to it that it leaves nothing."""
    temporary = tmp_path / "t"
    temporary.mkdir()
    out = tmp_path / "run"
    command = [sys.executable, *python, "-m", "scenarios", "run", *arguments]
    ended = subprocess.run(
        [*command, "--backend", "real", "--engine", engine, "--out", str(out)],
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


@pytest.mark.parametrize("engine", ["emulated", "sglang-cpu"])
def test_what_is_no_interpreter_is_told_though_it_is_content_with_everything(
    short_tmp_path: pathlib.Path, engine: str
) -> None:
    lines = refused(short_tmp_path, "smoke", "--engine-python", "/bin/true", engine=engine)
    assert lines == [
        f"error: --backend real --engine {engine}: cannot run smoke",
        "       --engine-python /bin/true: is no interpreter of Python (exit code 0); name ENV/bin/python",
    ]


@pytest.mark.parametrize("host", ["a..b", "a" * 70])
def test_a_cluster_at_a_host_that_has_no_name_of_one(short_tmp_path: pathlib.Path, host: str) -> None:
    first, second = refused(short_tmp_path, "smoke", "--ray", f"{host}:6379")
    assert first == "error: --backend real --engine emulated: cannot run smoke"
    assert second.startswith(f"       --ray {host}:6379: nobody answers there (")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_while_an_engines_environment_is_asked_leaves_nothing(
    short_tmp_path: pathlib.Path, number: signal.Signals
) -> None:
    temporary = short_tmp_path / "t"
    temporary.mkdir()
    python = short_tmp_path / "python"  # says that it has SGLang, and takes its time over options
    python.write_text('#!/bin/sh\n[ "$1" = -c ] && exec echo there\nexec sleep 60\n')
    python.chmod(0o755)
    out = short_tmp_path / "run"
    command = [sys.executable, "-m", "scenarios", "run", "smoke", "--backend", "real", "--engine", "sglang-cpu"]
    command += ["--engine-python", str(python), "--engine-argument", "page-size=1", "--out", str(out)]
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "TMPDIR": str(temporary)}, stderr=subprocess.PIPE, text=True
    )
    while not list(temporary.iterdir()):
        assert process.poll() is None
        time.sleep(0.05)  # it is to be interrupted as soon as it has begun a folder
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said.strip()) == (3, "interrupted; what was written so far is no verdict")
    assert list(temporary.iterdir()) == [] and not out.exists()
