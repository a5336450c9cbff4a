"""The environment of SGLang on the CPU: whole or not there, found or said to be missing. With a stand-in for pip."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys

import pytest

from real.engines import __main__ as command_line
from real.sglang_cpu import environment
from real.sglang_cpu.environment import EnvironmentFailed, install, interpreter
from tests.processes import is_running
from tests.real.run_command import until

# A "Python" that makes environments holding itself, and tells in a file what pip was asked for.
PYTHON = """\
#!/bin/sh
case "$*" in
  *ensurepip*) echo {version};;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python";;
  *"-m pip"*) echo "$@" >> {asked}; {pip};;
  -c*) {server};;
  *) exit 3;;
esac
"""


def _python(folder: pathlib.Path, *, version: str = "3 11", pip: str = "true", server: str = "echo sglang 0.0") -> str:
    path = folder / "python"
    path.write_text(PYTHON.format(version=version, asked=folder / "asked", pip=pip, server=server))
    path.chmod(0o755)
    return str(path)


def _silent(line: str) -> None:
    pass


def test_install_makes_it_once(tmp_path: pathlib.Path) -> None:
    said: list[str] = []
    folder = tmp_path / "env"
    python = _python(tmp_path)
    assert install(folder, python, said.append) == folder / "bin" / "python"
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 2
    assert asked[0].endswith("torch==2.13.0")
    assert "--no-deps" in asked[1]
    assert "sglang 0.0" in said[-1]
    assert " GB" in said[-1]

    install(folder, python, said.append)
    assert (tmp_path / "asked").read_text().splitlines() == asked
    assert "already installed" in said[-1]


def test_what_an_interrupted_install_left_is_made_anew(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "env"
    stuck = subprocess.Popen(
        [sys.executable, "-c", "import pathlib, sys; from real.sglang_cpu.environment import install;"
         "install(pathlib.Path(sys.argv[1]), sys.argv[2])", str(folder), _python(tmp_path, pip="echo; sleep 600")],
        stdout=subprocess.PIPE, text=True, cwd=environment.SERVER.parent.parent.parent,
    )  # fmt: skip
    assert stuck.stdout is not None
    lines = [stuck.stdout.readline() for _ in range(2)]
    assert "installing torch" in lines[1]
    stuck.kill()
    stuck.wait()
    assert folder.exists()
    (folder / "half").touch()

    said: list[str] = []
    install(folder, _python(tmp_path), said.append)
    assert not (folder / "half").exists()
    assert "installed in" in said[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_install_that_is_ended_leaves_nothing(tmp_path: pathlib.Path, number: signal.Signals) -> None:
    """Nor does pip go on: another install might have begun by then."""
    folder, pid = tmp_path / "env", tmp_path / "pid"
    command = [sys.executable, "-m", "real.engines", "install", "sglang-cpu", "--into", str(folder)]
    begun = subprocess.Popen(
        [*command, "--python", _python(tmp_path, pip=f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 600")],
        stdout=subprocess.DEVNULL, cwd=environment.SERVER.parent.parent.parent,
    )  # fmt: skip
    until(pid.exists, 60)
    begun.send_signal(number)
    assert begun.wait(30) == 130
    assert not folder.exists()
    until(lambda: not is_running(int(pid.read_text())), 10)  # it was killed; init may take its time with what is left


def test_an_older_recipe_is_made_anew(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "env"
    install(folder, _python(tmp_path), _silent)
    newer = tmp_path / "requirements.txt"
    newer.write_text("torch==9.9\n")
    monkeypatch.setattr(environment, "REQUIREMENTS", newer)
    install(folder, _python(tmp_path), _silent)
    assert "torch==9.9" in (tmp_path / "asked").read_text().splitlines()[-2]


@pytest.mark.parametrize(
    ("python", "words"),
    [({"pip": "echo ERROR: no such version >&2; exit 1"}, "no such version"),
     ({"server": "echo ImportError: no sglang >&2; exit 1"}, "ImportError: no sglang")],
)  # fmt: skip
def test_a_failed_install_leaves_nothing_and_says_why(
    tmp_path: pathlib.Path, python: dict[str, str], words: str
) -> None:
    with pytest.raises(EnvironmentFailed, match=words):
        install(tmp_path / "env", _python(tmp_path, **python), _silent)
    assert not (tmp_path / "env").exists()


def test_a_folder_with_something_else_is_refused(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.tex").touch()
    with pytest.raises(EnvironmentFailed, match="files that no install made"):
        install(folder, _python(tmp_path), _silent)
    assert (folder / "thesis.tex").exists()


def test_too_little_space_is_said_before_anything_is_made(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_FREE_BYTES", 10**18)
    with pytest.raises(EnvironmentFailed, match="GB are needed"):
        install(tmp_path / "env", _python(tmp_path), _silent)
    assert not (tmp_path / "env").exists()


@pytest.mark.parametrize("version", ["3 10", "3 14"])
def test_a_python_that_no_wheel_is_for_is_refused(tmp_path: pathlib.Path, version: str) -> None:
    with pytest.raises(EnvironmentFailed, match="the engine needs 3.11 to 3.13"):
        install(tmp_path / "env", _python(tmp_path, version=version), _silent)


def test_command_line_says_one_line_and_exits_with_2(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = _python(tmp_path, version="2 7")
    assert command_line.main(["install", "sglang-cpu", "--into", str(tmp_path / "env"), "--python", python]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert told[0].startswith("error: ")
    assert command_line.main(["install", "sglang-cpu", "--into", str(tmp_path / "env"), "--python", "nowhere"]) == 2
    assert command_line.main(["install", "sglang-cpu", "--into", "~nobody-here/env", "--python", python]) == 2
    assert "error: ~nobody-here/env: there is no such home folder" in capsys.readouterr().err
    assert command_line.main(["tiny-model", str(tmp_path / "model"), "--shards", "99"]) == 2
    assert command_line.main(["tiny-model", str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "config.json").is_file()


# ---- finding it ----


@pytest.fixture
def home(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.delenv(environment.VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_the_tiny_model_without_the_real_install_names_what_installs_it(tmp_path: pathlib.Path) -> None:
    """This project is on no index: a name to give to pip there would be somebody else's."""
    code = (
        "import sys; sys.modules['safetensors'] = None\n"
        "from real.engines.__main__ import main; sys.exit(main(['tiny-model', sys.argv[1]]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "model")], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: safetensors")
    assert done.stderr.endswith("is not installed; pip install -e '.[real]'\n")


def test_nothing_installed_says_what_to_do(home: pathlib.Path) -> None:
    with pytest.raises(EnvironmentFailed, match="python -m real.engines install sglang-cpu"):
        interpreter()


def test_named_before_variable_before_installed(
    home: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = _python(tmp_path)
    installed = install(environment.DEFAULT, python, _silent)
    assert installed == home / ".cache/seatrial/sglang-cpu/bin/python"
    assert interpreter() == installed
    monkeypatch.setenv(environment.VARIABLE, python)
    assert str(interpreter()) == python
    assert str(interpreter(sys.executable)) == sys.executable
    with pytest.raises(EnvironmentFailed, match="--engine-python /nowhere/python: no Python interpreter there"):
        interpreter("/nowhere/python")
    with pytest.raises(EnvironmentFailed, match="~nobody-here/python: there is no such home folder"):
        interpreter("~nobody-here/python")
    monkeypatch.setenv(environment.VARIABLE, "/nowhere/python")
    with pytest.raises(EnvironmentFailed, match=f"{environment.VARIABLE} /nowhere/python"):
        interpreter()


def test_half_made_one_is_not_found(home: pathlib.Path) -> None:
    folder = environment.DEFAULT.expanduser()
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    with pytest.raises(EnvironmentFailed, match="install sglang-cpu"):
        interpreter()


def test_requirements_are_pinned_and_leave_gpu_packages_out() -> None:
    lines = [line for line in environment.REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
    assert all("==" in line for line in lines)
    names = {line.partition("==")[0].lower() for line in lines}
    assert {"sglang", "torch", "transformers"} <= names
    assert not [name for name in names if name.startswith(("nvidia", "triton", "sgl-kernel", "sglang-kernel", "flash"))]


def test_sglang_finds_the_plugin_beside_the_server() -> None:
    """Its entry point lies in a folder that packaging must not drop (.ci/run installs from a wheel)."""
    code = (
        "import sys, importlib.metadata as m\n"
        "print(*[point.value for found in m.distributions(path=sys.argv[1:]) for point in found.entry_points])"
    )
    folder = environment.SERVER.parent / "stand_ins"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "deterministic_on_cpu:register"
