"""Nothing survives at module or class level from one run to the next (DESIGN.md, "Bit-exact"); no error is hidden."""

from __future__ import annotations

import ast
import importlib
import pathlib
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("protocol", "sim", "scenarios", "analysis", "real")
CONTAINERS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MAKERS = {"list", "dict", "set", "deque", "defaultdict", "Counter", "OrderedDict", "count", "WeakKeyDictionary"}
MUTATORS = {
    "append", "appendleft", "add", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault",
    "update",
}  # fmt: skip
# (file, name): why it may be changed.
ALLOWED = {
    ("protocol/evidence.py", "KINDS"): "kinds are declared while modules are imported, never during a run",
    ("protocol/ports.py", "_process_backend"): "real: one backend per OS process, put there by real/",
}


def _trees() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def _is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.BinOp):
        return _is_mutable(value.left) or _is_mutable(value.right)
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).split(".")[-1] in MAKERS
    return isinstance(value, CONTAINERS)


def _bound(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr | None]]:
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.value
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.value


def _changes(tree: ast.Module, names: set[str]) -> Iterator[tuple[int, str]]:
    """Where code changes one of these module-level containers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node.lineno, node.names[0]
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            if isinstance(node.value, ast.Name) and node.value.id in names:
                yield node.lineno, node.value.id
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            if isinstance(node.func.value, ast.Name) and node.func.value.id in names:
                yield node.lineno, node.func.value.id


def _offences(file: str, tree: ast.Module) -> list[str]:
    names = {name for name, value in _bound(tree.body) if _is_mutable(value)}
    found = [
        f"{file}:{line} changes the module-level {name}"
        for line, name in _changes(tree, names)
        if (file, name) not in ALLOWED
    ]
    for node in tree.body:
        # An empty container at class level is there to be filled. (pydantic copies its models' defaults.)
        if isinstance(node, ast.ClassDef) and not any(
            re.search("Model|Parameters|ComponentConfig", ast.unparse(b)) for b in node.bases
        ):
            for name, value in _bound(node.body):
                if _is_mutable(value) and not getattr(value, "elts", getattr(value, "keys", ())):
                    found.append(f"{file}: {node.name}.{name} is a container that all instances share")
    return found


def test_no_module_or_class_keeps_state() -> None:
    assert [offence for file, tree in _trees() for offence in _offences(file, tree)] == []


@pytest.mark.parametrize(
    "source",
    ["SEEN = []\ndef f(x):\n    SEEN.append(x)", "N = {}\ndef f(x):\n    N[x] = 1", "def f():\n    global n\n    n = 1",
     "class A:\n    seen = {}"],
)  # fmt: skip
def test_planted_state_is_found(source: str) -> None:
    assert _offences("planted.py", ast.parse(source))


# ---- what a run really leaves ----


def _state(modules: list[types.ModuleType]) -> dict[str, str]:
    """Every container at module and class level, as text."""

    def of(owner: Any, where: str) -> Iterator[tuple[str, str]]:
        for name, value in vars(owner).items():
            if isinstance(value, list | dict | set) and not name.startswith("__"):
                yield f"{where}.{name}", f"{len(value)} {sorted(map(str, value))}"
            elif isinstance(value, int | str) and not name.startswith("__"):
                yield f"{where}.{name}", repr(value)
            elif isinstance(value, type) and value.__module__ == where:
                yield from of(value, f"{where}.{name}")

    return {place: text for module in modules for place, text in of(module, module.__name__)}


def test_a_run_leaves_modules_and_classes_as_they_were() -> None:
    from scenarios.load import load
    from scenarios.runner import run_in_sim

    names = [name for package in ("protocol", "sim", "scenarios", "analysis") for name in _modules(package)]
    modules = [importlib.import_module(name) for name in names]
    scenario = load("smoke")
    first = run_in_sim(scenario, 1)  # pydantic and imports finish here what they do once
    before, loaded = _state(modules), set(sys.modules)
    assert len(before) > 100
    other = run_in_sim(scenario, 2)
    again = run_in_sim(scenario, 1)
    assert _state(modules) == before
    assert {name for name in set(sys.modules) - loaded if name.partition(".")[0] in PACKAGES} == set()
    assert first.result.digest == again.result.digest != other.result.digest


def _modules(package: str) -> list[str]:
    paths = sorted((ROOT / package).rglob("*.py"))
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths if not path.stem.startswith("__")]


# ---- errors, types ----


def test_no_handler_swallows_everything_silently() -> None:
    silent = []
    for file, tree in _trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ExceptHandler) or not all(isinstance(one, ast.Pass) for one in node.body):
                continue
            caught = "everything" if node.type is None else ast.unparse(node.type)
            if caught in ("everything", "Exception", "BaseException"):
                silent.append((file, caught))
    # _close_quietly: the run is over and every port inert; a `finally` may raise, and nobody is left to hear it.
    assert silent == [("sim/kernel.py", "BaseException")]


def test_every_ignored_type_error_has_a_reason_or_a_code() -> None:
    bare = []
    for file, _ in _trees():
        for number, line in enumerate((ROOT / file).read_text(encoding="utf-8").splitlines(), 1):
            if "# type: ignore" in line and not re.search(r"# type: ignore\[[a-z-]+(, [a-z-]+)*\]", line):
                bare.append(f"{file}:{number}")
            if re.search(r"#.*\b(TODO|FIXME|XXX|HACK)\b", line):
                bare.append(f"{file}:{number}: unfinished")
    assert bare == []
