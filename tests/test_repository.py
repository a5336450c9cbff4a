"""Promises of the repository itself: dependencies, who imports whom, documents that list what is there."""

from __future__ import annotations

import ast
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

from tests import whats_here

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("protocol", "sim", "real", "scenarios", "analysis")
SIM_INSTALL = ("protocol", "sim", "scenarios", "analysis")
BACKENDS = ("ray", "torch", "sglang", "aiohttp")
RUN_COMMAND = "pip install -e . && python -m scenarios run fault_injection --backend sim"
TEST_COMMAND = "pip install -e '.[test]' && python -m pytest"


def _project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _modules(*packages: str) -> list[str]:
    names = []
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)


# ---- the sim install ----


def test_core_dependencies_name_no_backend() -> None:
    names = {re.split(r"[^A-Za-z0-9_.-]", line)[0].lower() for line in _project()["project"]["dependencies"]}
    assert names
    assert not names & {*BACKENDS, "sglang-kernel", "torchvision", "triton"}


def test_sim_install_imports_without_the_backends() -> None:
    modules = [m for m in _modules(*SIM_INSTALL) if not m.endswith("__main__")]
    code = f"""
import importlib, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BACKENDS!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
for module in {modules!r}:
    importlib.import_module(module)
print(len({modules!r}))
"""
    done = _python(code)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(modules) > 0


def test_command_line_loads_no_backend_before_one_is_asked_for() -> None:
    done = _python(
        "import sys, scenarios.__main__\n"
        f"print(sorted({{m.partition('.')[0] for m in sys.modules}} & {{'sim', 'real', 'simpy', *{BACKENDS!r}}}))"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_protocol_takes_only_the_parser_of_prometheus_client() -> None:
    for path in sorted((ROOT / "protocol").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            bad = [n for n in names if n.startswith("prometheus_client") and n != "prometheus_client.parser"]
            assert not bad, f"{path}:{node.lineno}: {bad}"


# ---- import contracts and lint rules catch what they are there for ----

PLANTED = [
    ("protocol/serving/planted.py", "import simpy", "protocol.serving.planted must not import simpy"),
    ("protocol/planted.py", "def late():\n    import ray", "protocol.planted must not import ray"),
    ("protocol/planted.py", "from sim import loop", "protocol.planted must not import sim"),
    ("sim/planted.py", "import real", "sim.planted must not import real"),
    ("sim/planted.py", "import torch", "sim.planted must not import torch"),
    ("real/planted.py", "import simpy", "real.planted must not import simpy"),
    ("real/planted.py", "import sim", "real.planted must not import sim"),
    ("real/emulated/planted.py", "import pandas", "real.emulated.planted must not import pandas"),
    ("real/emulated/pacer.py", "import sim", "no import needs the exception real.emulated -> simpy"),
    ("analysis/planted.py", "import sim", "analysis.planted must not import sim"),
    ("analysis/planted.py", "import protocol.ports", "analysis.planted must not import protocol.ports"),
    ("analysis/planted.py", "import ray", "analysis.planted must not import ray"),
    ("scenarios/planted.py", "import sglang", "scenarios.planted must not import sglang"),
]


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of what the linters read."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "*.csv"))
    (tmp_path / "tests").mkdir()
    for name in ("pyproject.toml", "tests/__init__.py", "tests/import_contracts.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def _lint_imports(folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache"], cwd=folder, capture_output=True, text=True, timeout=120
    )


@pytest.mark.dev_tools
def test_import_contracts_hold(checkout: pathlib.Path) -> None:
    done = _lint_imports(checkout)
    assert done.returncode == 0, done.stdout


@pytest.mark.dev_tools
@pytest.mark.parametrize(("file", "source", "message"), PLANTED)
def test_import_contracts_catch_a_planted_violation(
    checkout: pathlib.Path, file: str, source: str, message: str
) -> None:
    (checkout / file).write_text(source + "\n", encoding="utf-8")
    done = _lint_imports(checkout)
    assert done.returncode == 1
    assert message in " ".join(done.stdout.split()), done.stdout


@pytest.mark.dev_tools
@pytest.mark.parametrize(
    "source", ["import time", "import random", "from uuid import uuid4", "import os\nos.urandom(1)"]
)
def test_lint_keeps_clocks_and_randomness_out_of_protocol(checkout: pathlib.Path, source: str) -> None:
    for package, caught in (("protocol", True), ("sim", False)):
        (checkout / package / "planted.py").write_text(source + "\n", encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "ruff", "check", "--no-cache", f"{package}/planted.py"],
            cwd=checkout, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert ("TID251" in done.stdout) is caught, done.stdout + done.stderr


# ---- configuration ----


def test_every_config_key_is_read() -> None:
    """A key of a pydantic model that no code reads is a dead option."""
    read: set[str] = set()
    classes: list[tuple[pathlib.Path, ast.ClassDef]] = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    read.add(node.attr)
                elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in {"get", "getattr"}:
                    read.update(a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))
                elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                    read.add(str(node.slice.value))
                elif isinstance(node, ast.ClassDef):
                    classes.append((path, node))
    models = {"BaseModel"}
    while more := {
        c.name
        for _, c in classes
        if c.name not in models and any(ast.unparse(b).split(".")[-1] in models for b in c.bases)
    }:
        models |= more
    declared = {
        field.target.id: f"{path.relative_to(ROOT)}:{field.lineno} {cls.name}.{field.target.id}"
        for path, cls in classes
        if cls.name in models
        for field in cls.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        # Not fields: pydantic's own settings, class variables, and what begins with an underscore.
        if field.target.id != "model_config" and not field.target.id.startswith("_")
        if not ast.unparse(field.annotation).startswith("ClassVar")
    }
    assert len(models) > 1, "no model found: this test no longer sees them"
    dead = [where for name, where in declared.items() if name not in read]
    assert not dead, "config keys that nothing reads:\n" + "\n".join(dead)


# ---- documents ----


@pytest.mark.parametrize("command", [RUN_COMMAND, TEST_COMMAND])
@pytest.mark.parametrize("file", ["README.md", ".ci/run"])
def test_the_two_commands_are_written_as_they_are_tested(file: str, command: str) -> None:
    assert command in (ROOT / file).read_text(encoding="utf-8")


def test_every_module_is_listed_in_whats_here() -> None:
    page = whats_here.PAGE.read_text(encoding="utf-8")
    text, problems = whats_here.render(ROOT, page)
    assert not problems, "run python -m tests.whats_here\n" + "\n".join(problems)
    assert text == page, "run python -m tests.whats_here"


def test_whats_here_tells_missing_removed_and_changed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "sim").mkdir()
    (tmp_path / "sim" / "loop.py").write_text('"""The loop."""\n', encoding="utf-8")
    (tmp_path / "sim" / "new.py").write_text('"""New."""\n', encoding="utf-8")
    page = "# What\n\n## sim\n\n- `sim/loop.py`: An old line.\n- `sim/gone.py`: Gone.\n"
    text, problems = whats_here.render(tmp_path, page)
    assert [p.partition(":")[0] for p in problems] == ["sim/loop.py", "sim/new.py", "sim/gone.py"]
    assert "- `sim/loop.py`: The loop.\n- `sim/new.py`: New.\n" in text
    assert whats_here.render(tmp_path, text) == (text, [])


def test_links_of_the_documents_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("package", PACKAGES)
def test_package_says_it_is_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


def test_lock_covers_the_dependencies() -> None:
    project = _project()["project"]
    locked = set()
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            assert re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.+!-]+", line), line
            locked.add(_canonical(line.partition("==")[0]))
    extras = project["optional-dependencies"]
    for line in [*project["dependencies"], *extras["test"], *extras["notebooks"], *extras["dev"]]:
        name = re.match(r"[A-Za-z0-9_.-]+", line)
        assert name is not None
        assert _canonical(name[0]) in locked, line


# ---- needs of tests ----

ELSEWHERE = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-c", "pyproject.toml"]
"""Tests in a folder of their own, as ours are run."""


@pytest.mark.parametrize(
    ("ci", "require", "outcome"),
    [("", None, "1 skipped"), ("true", None, "1 error"), ("true", "ray", "1 skipped"), ("", "shared", "1 error")],
)
def test_absent_need_is_a_counted_skip_or_a_failure_where_required(
    tmp_path: pathlib.Path, ci: str, require: str | None, outcome: str
) -> None:
    (tmp_path / "test_one.py").write_text(
        "import pytest\n@pytest.mark.shared\ndef test_one(): pass\n", encoding="utf-8"
    )
    environment = {**os.environ, "CI": ci, "SEATRIAL_SHARED": str(tmp_path / "absent")}
    environment.pop("SEATRIAL_REQUIRE", None)
    environment.pop("PYTEST_ADDOPTS", None)  # of whoever runs these tests, not of that one
    if require is not None:
        environment["SEATRIAL_REQUIRE"] = require
    done = subprocess.run(
        [*ELSEWHERE, str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert outcome in done.stdout.splitlines()[-1], done.stdout + done.stderr
    assert ("not run because shared is absent: 1 tests" in done.stdout) is ("skipped" in outcome)


def test_tests_of_a_group_share_a_process(tmp_path: pathlib.Path) -> None:
    (tmp_path / "test_many.py").write_text(
        "import os, pathlib, pytest\n"
        "@pytest.mark.own_cluster\n"
        "@pytest.mark.parametrize('number', range(16))\n"
        "def test_one(number):\n"
        "    pathlib.Path(__file__).with_name(os.environ['PYTEST_XDIST_WORKER']).touch()\n",
        encoding="utf-8",
    )
    done = subprocess.run(
        [*ELSEWHERE, "-m", "own_cluster", "-n", "2", "--dist", "loadgroup", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
    )  # fmt: skip
    assert done.returncode == 0 and len(list(tmp_path.glob("gw*"))) == 1, done.stdout + done.stderr


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
