"""The Python environment that genuine SGLang runs in on a CPU: made, checked, found.

It is a virtual environment of its own, since SGLang's versions of things are not the driver's. A mark written last
makes it whole; one without it is what an interrupted install left, and is made anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from real.engines.sglang_flags import cpu_environment

SERVER = pathlib.Path(__file__).with_name("server.py")
REQUIREMENTS = pathlib.Path(__file__).with_name("requirements.txt")
DEFAULT = pathlib.Path("~/.cache/seatrial/sglang-cpu")
VARIABLE = "SEATRIAL_SGLANG_PYTHON"
_BEGUN = "seatrial-begun"
_WHOLE = "seatrial-whole.json"
_FREE_BYTES = 4_000_000_000
_PYTHONS = ((3, 11), (3, 13))
_MODULE = "sglang.srt.entrypoints.http_server"


class EnvironmentFailed(Exception):
    """There is no environment, or none could be made: what is wrong and what to do, in one message."""


def interpreter(named: str = "") -> pathlib.Path:
    """The Python of an environment with SGLang for the CPU.

    Args:
        named: ``--engine-python``; empty: ``SEATRIAL_SGLANG_PYTHON``, else the one that was installed by default.

    Raises:
        EnvironmentFailed: what is named cannot be run, or nothing is installed.
    """
    for source, path in (("--engine-python", named), (VARIABLE, os.environ.get(VARIABLE, ""))):
        if path:
            found = _home(pathlib.Path(path))
            if not (found.is_file() and os.access(found, os.X_OK)):
                raise EnvironmentFailed(f"{source} {path}: no Python interpreter there")
            return found.absolute()  # not resolved: the link's place is what makes it that environment's
    folder = _home(DEFAULT)
    if not (folder / _WHOLE).is_file():
        raise EnvironmentFailed(
            f"no environment with SGLang for the CPU: run 'python -m real.engines install sglang-cpu', or name its "
            f"interpreter with --engine-python or {VARIABLE}"
        )
    return _python(folder)


def is_found(python: pathlib.Path) -> bool:
    """Whether an interpreter is the one that is taken where none is named."""
    try:
        return python == _python(_home(DEFAULT).absolute())
    except EnvironmentFailed:
        return False


def _home(path: pathlib.Path) -> pathlib.Path:
    """A path without the ``~`` that it may begin with. Raises EnvironmentFailed: nobody knows whose home that is."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise EnvironmentFailed(f"{path}: there is no such home folder; write the whole path") from None


def install(folder: pathlib.Path, python: str = sys.executable, say: Callable[[str], None] = print) -> pathlib.Path:
    """Make the environment in ``folder``, or see that it is there; returns its interpreter.

    Whole, or not there: what an interrupted install left is removed first, and what a failed one made at the end. Two
    installs into one folder wait for each other.

    Args:
        folder: absent, empty, or made by an install before.
        python: the interpreter whose version the environment gets.
        say: gets a line for each step.

    Raises:
        EnvironmentFailed: wrong Python, too little space, a folder with something else in it, or pip failed.
    """
    folder = _home(folder).absolute()
    version = _version(python)
    recipe = hashlib.sha256(f"{version}\n{REQUIREMENTS.read_text(encoding='utf-8')}".encode()).hexdigest()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder, say):
            if _is_whole(folder, recipe):
                say(f"{folder}: already installed ({_size(folder) / 1e9:.1f} GB)")
                return _python(folder)
            _make(folder, python, recipe, say)
    except OSError as error:
        raise EnvironmentFailed(f"{folder}: {error.strerror or error}") from error
    return _python(folder)


def _make(folder: pathlib.Path, python: str, recipe: str, say: Callable[[str], None]) -> None:
    begun = time.monotonic()
    if folder.exists():
        if any(folder.iterdir()) and not ((folder / _BEGUN).exists() or (folder / _WHOLE).exists()):
            raise EnvironmentFailed(f"{folder}: has files that no install made; name another folder with --into")
        shutil.rmtree(folder)
    free = shutil.disk_usage(folder.parent).free
    if free < _FREE_BYTES:
        raise EnvironmentFailed(
            f"{folder.parent}: {free / 1e9:.1f} GB free, {_FREE_BYTES / 1e9:.0f} GB are needed; free some, or name a "
            f"folder on another disk with --into"
        )
    folder.mkdir()
    try:
        (folder / _BEGUN).touch()
        say(f"{folder}: making a virtual environment")
        _run([python, "-m", "venv", str(folder)])
        pip = [str(_python(folder)), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q"]
        torch = next(line for line in REQUIREMENTS.read_text("utf-8").splitlines() if line.startswith("torch=="))
        say(f"{folder}: installing {torch}")
        _run([*pip, "-c", str(REQUIREMENTS), torch])
        say(f"{folder}: installing SGLang and what it needs")
        _run([*pip, "--no-deps", "-r", str(REQUIREMENTS)])
        say(f"{folder}: importing the server")
        told = verify(_python(folder))
        text = json.dumps({"recipe": recipe, "versions": told}, indent=1)
        (folder / (_WHOLE + ".new")).write_text(text, encoding="utf-8")
        os.replace(folder / (_WHOLE + ".new"), folder / _WHOLE)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    took = time.monotonic() - begun
    say(f"{folder}: installed in {took:.0f} s, {_size(folder) / 1e9:.1f} GB; {told}")


def verify(python: pathlib.Path) -> str:
    """Import SGLang's HTTP server in an environment; returns the versions found.

    Raises:
        EnvironmentFailed: it does not import; the text has the last lines of the error.
    """
    code = (
        f"import sys; sys.path.insert(0, {str(SERVER.parent)!r}); import server, torch, sglang.version as v\n"
        f"import {_MODULE}; print(f'sglang {{v.__version__}}, torch {{torch.__version__}}')"
    )
    with tempfile.TemporaryDirectory(prefix="seatrial-") as temporary:
        return _run([str(python), "-c", code], cpu_environment(temporary)).splitlines()[-1]


def _run(command: list[str], added: dict[str, str] | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        command, env={**environment, **(added or {})}, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        # pip's own complaints about index pages that it skipped would hide the error.
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line and not line.startswith("WARNING")]
        last = "\n  ".join(lines[-12:]) or f"exit code {done.returncode}"
        raise EnvironmentFailed(f"failed: {' '.join(command[:6])} ...\n  {last}")
    return done.stdout


def _version(python: str) -> str:
    """Of an interpreter, as "3.11"; raises EnvironmentFailed for one that SGLang's wheels are not for."""
    try:
        done = subprocess.run(
            [python, "-c", "import sys, venv, ensurepip; print('%d %d' % sys.version_info[:2])"],
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        major, minor = (int(part) for part in done.stdout.split())
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise EnvironmentFailed(f"{python}: no Python with venv and pip: {said.strip().splitlines()[-1]}") from error
    low, high = _PYTHONS
    if not low <= (major, minor) <= high:
        raise EnvironmentFailed(
            f"{python} is Python {major}.{minor}; the engine needs {low[0]}.{low[1]} to {high[0]}.{high[1]}: name one "
            f"with --python"
        )
    return f"{major}.{minor}"


@contextlib.contextmanager
def _alone(folder: pathlib.Path, say: Callable[[str], None]) -> Iterator[None]:
    """The kernel drops the lock when its holder dies; the file stays, as removing it would let two in."""
    with open(folder.parent / f".{folder.name}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{folder}: waiting for another install")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_whole(folder: pathlib.Path, recipe: str) -> bool:
    try:
        told = json.loads((folder / _WHOLE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False
    return isinstance(told, dict) and told.get("recipe") == recipe and os.access(_python(folder), os.X_OK)


def _python(folder: pathlib.Path) -> pathlib.Path:
    return folder / "bin" / "python"


def _size(folder: pathlib.Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))
