"""Reads a scenario: by catalog name or file, with ``--set`` changes, and says in one line what is wrong with it."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import yaml
from pydantic import ValidationError

from analysis.errors import BadInput
from scenarios.cross_checks import check
from scenarios.fields import did_you_mean, shortened
from scenarios.named import item
from scenarios.schema import ScenarioModel
from scenarios.workloads.source import TRACES
from scenarios.yaml_tree import Path, Places, YamlTree, dotted

HERE = pathlib.Path(__file__).resolve().parent
CATALOG = HERE / "catalog"
_LARGEST_BYTES = 1 << 20
"""Of a scenario file: YAML takes minutes and gigabytes for what is far beyond what a person writes."""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A checked scenario. ``text`` is the file after ``--set``; ``folder`` is where its relative paths start."""

    model: ScenarioModel
    text: str
    source: str
    folder: pathlib.Path
    place: Callable[[Sequence[str | int]], str] = dataclasses.field(compare=False, repr=False)
    """``file:line: key`` of a path of keys: how an error begins."""
    workload_paths: tuple[Path, ...]
    """Where each of ``model.workload`` stands in the text, which may have one without a list."""

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def trace_path(self, file: str) -> pathlib.Path:
        """Where a trace lies: an absolute path, beside the scenario file, or shipped with the package."""
        for folder in (self.folder, TRACES):
            if os.path.isfile(folder / file):  # pathlib's raises where a name is too long
                return folder / file
        return self.folder / file


def catalog() -> Iterator[pathlib.Path]:
    """The files of the catalog, by name."""
    yield from sorted(CATALOG.glob("*.yaml"))


def find(name_or_file: str) -> pathlib.Path:
    """The file of a scenario.

    Raises:
        BadInput: no scenario of the catalog has the name, and no file either.
    """
    shipped = {path.stem: path for path in catalog()}
    if name_or_file in shipped:
        return shipped[name_or_file]
    path = pathlib.Path(name_or_file)
    if path.suffix in (".yaml", ".yml") or "/" in name_or_file:
        return path
    names = list(shipped)
    raise BadInput(f"unknown scenario {name_or_file!r}{did_you_mean(name_or_file, names)}; or name a .yaml file")


def load(name_or_file: str, changes: Sequence[str] = ()) -> Scenario:
    """Read and check a scenario.

    Args:
        name_or_file: a name of the catalog, or a path.
        changes: ``key.inner=value`` as given to ``--set``; values are YAML, list items are numbers from 0, those of
            ``steps`` and ``acceptance`` names, too.

    Raises:
        BadInput: with file, line, key and fix.
    """
    path = find(name_or_file)
    try:
        with open(path, "rb") as file:
            data = file.read(_LARGEST_BYTES + 1)
        text = data.decode("utf-8")
    except FileNotFoundError as error:
        raise BadInput(f"{path}: no such file; 'python -m scenarios list' names the scenarios") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: is no UTF-8 text (byte {error.start + 1})") from error
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from error
    if len(data) > _LARGEST_BYTES:
        most = f"{_LARGEST_BYTES >> 20} MiB"
        raise BadInput(f"{path}: is longer than {most}; a scenario names its traces, it does not hold them")
    return parse(text, _shown(path), path.resolve().parent, changes, pathlib.Path.cwd())


def parse(
    text: str, source: str, folder: pathlib.Path, changes: Sequence[str] = (), here: pathlib.Path | None = None
) -> Scenario:
    """Check the text of a scenario, whose relative paths start at ``folder``, those of the changes at ``here``.

    Raises:
        BadInput: as :func:`load`.
    """
    tree = YamlTree(text, source)
    changed: list[tuple[tuple[str | int, ...], str]] = []
    for change in changes:
        changed.append((_set(tree.data, change), change))
        if here is not None and here.resolve() != folder.resolve():
            _traces_from(here, tree.data, changed[-1][0])
            _given_engines_from(here, folder, tree.data, changed[-1][0])
    if changes:
        text = yaml.safe_dump(tree.data, sort_keys=False, allow_unicode=True, width=120)
    places = Places(tree, changed)
    try:
        model = ScenarioModel.model_validate(tree.data)
    except ValidationError as error:
        raise BadInput(_explain(error, places)) from error
    paths = tuple(path for path, _ in _workloads(tree.data))
    scenario = Scenario(_engines_from(folder, model), text, source, folder, places.name, paths)
    check(scenario.model, scenario.trace_path, places)
    return scenario


def path_of(text: str, key: str) -> Path:
    """Where a key of ``--set`` stands in the text of a scenario, in numbers. Raises BadInput: nowhere."""
    return _set(YamlTree(text, "").data, f"{key}=0")


def _explain(error: ValidationError, places: Places) -> str:
    """The first error as one line: place, key, what is wrong and what to write instead."""
    first = error.errors(include_url=False)[0]
    kind, given = first["type"], first.get("input")
    path = places.tree.known_path(first["loc"])
    message = str(first["msg"])
    if kind == "unknown_key":
        key = ast.literal_eval(first["ctx"]["key"])
        return f"{places.of((*path, key))}: {dotted((*path, key))}: unknown key{first['ctx']['fix']}"
    if kind == "no_switch":
        at = (*path, ast.literal_eval(first["ctx"]["key"]))
        return f"{places.of(at)}: {dotted(at)}: is no switch; write a number or a text, not true or false"
    if kind == "missing":
        missing = (*path, str(first["loc"][-1]))
        return f"{places.of(path)}: {dotted(missing)}: the key is missing; add it"
    if kind in ("greater_than_equal", "greater_than") and isinstance(given, int | float) and given < 0:
        message = "must not be negative"
    elif kind in ("model_type", "dict_type"):
        message = "must be a mapping of keys"
    else:
        message = message.replace("Input should be", "must be")
    shown = "" if isinstance(given, dict | list) or kind in _SAID else f" (given: {shortened(given)})"
    return f"{places.of(path)}: {dotted(path) or 'scenario'}: {message}{shown}"


_SAID = ("unknown_word", "name", "component", "unit_in_value", "number_as_text", "not_finite", "exactly_one")


# --- --set ---


def _set(data: dict[str, Any], change: str) -> tuple[str | int, ...]:
    key, equals, value_text = change.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise BadInput(f"--set {change}: write it as key.inner=value")
    value = YamlTree(value_text, f"--set {change}", mapping=False).data if value_text.strip() else ""
    path: list[str | int] = []
    step: str | int
    node: Any = data
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if isinstance(node, list):
            try:
                # Where its criterion names an entry of ``acceptance``, what follows are the criterion's parameters.
                *entry, step = item(node, part, path)
            except LookupError as error:
                raise BadInput(f"--set {change}: {error}") from error
            path += entry
            for passed in entry:
                node = node[int(passed)]
        elif isinstance(node, dict):
            step = part
        else:
            raise BadInput(f"--set {change}: {dotted(path)} is a plain value; it has no key {part!r}")
        path.append(step)
        if last:
            node[step] = value
        else:
            if isinstance(node, dict) and step not in node:
                node[step] = {}
            node = node[step]
    return tuple(path)


def _workloads(data: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Path and what stands there of each workload: a list of them, or one."""
    found = data.get("workload")
    if isinstance(found, list):
        for number, workload in enumerate(found):
            yield ("workload", number), workload
    else:
        yield ("workload",), found


def _traces_from(here: pathlib.Path, data: dict[str, Any], changed: Sequence[str | int]) -> None:
    """Make the traces in what was changed paths from ``here``, but for names of shipped ones that are not there."""
    for path, workload in _workloads(data):
        where = (*path, "trace", "file")
        trace = workload.get("trace") if isinstance(workload, dict) else None
        file = trace.get("file") if isinstance(trace, dict) else None
        if isinstance(trace, dict) and isinstance(file, str) and tuple(changed) == where[: len(changed)]:
            if os.path.isfile(here / file) or not os.path.isfile(TRACES / file):
                trace["file"] = str(here / file)


def _is_path(engine: object) -> bool:
    """Whether it is a relative path of an engine profile, not the name of a shipped one."""
    found = isinstance(engine, str) and ("/" in engine or engine.endswith((".yaml", ".yml")))
    return found and not os.path.isabs(str(engine))


def _relative(path: pathlib.Path, start: pathlib.Path) -> str:
    found = os.path.relpath(path, start)
    return found if _is_path(found) else f"./{found}"


def _given_engines_from(
    here: pathlib.Path, folder: pathlib.Path, data: dict[str, Any], changed: Sequence[str | int]
) -> None:
    """As traces; made a path from ``folder``, for evidence names profiles and is the same wherever the package lies."""
    topology = data.get("topology")
    services = topology.get("services") if isinstance(topology, dict) else None
    for name, service in services.items() if isinstance(services, dict) else ():
        where = ("topology", "services", name, "engine")
        if isinstance(service, dict) and _is_path(service.get("engine")) and tuple(changed) == where[: len(changed)]:
            service["engine"] = _relative(here / service["engine"], folder)


def _engines_from(folder: pathlib.Path, model: ScenarioModel) -> ScenarioModel:
    """Engine profiles are named by paths from ``folder``; what reads them starts at the current one."""
    services = {
        name: service.model_copy(update={"engine": _relative(folder / service.engine, pathlib.Path.cwd())})
        if _is_path(service.engine)
        else service
        for name, service in model.topology.services.items()
    }
    return model.model_copy(update={"topology": model.topology.model_copy(update={"services": services})})


def _shown(path: pathlib.Path) -> str:
    """A path as short as it can be said."""
    try:
        return str(path.resolve().relative_to(pathlib.Path.cwd()))
    except ValueError:
        return str(path)
