"""YAML with the line of every key: what an error needs to point at its place in a scenario file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from analysis.errors import BadInput

Path = tuple[str | int, ...]

# An alias repeats what it names, perhaps itself: without bounds a few lines of YAML fill the memory.
_DEEPEST = 40
_MOST_VALUES = 100_000
_LONGEST_NUMBER = 64


class YamlTree:
    """A parsed document and where its parts stand.

    Args:
        text: the document.
        source: what to call it in errors, usually the file's path.
        mapping: whether it is a file, which must be one; else a single value, of which no line is told.

    Raises:
        BadInput: no YAML, no mapping, a key given twice, a tag other than the plain ones, or beyond the bounds of what
            a person writes; names the line.
    """

    def __init__(self, text: str, source: str, *, mapping: bool = True) -> None:
        self.source = source
        self._lines: dict[Path, int] = {}
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            where = f"{source}:{mark.line + 1}" if mark and mapping else source
            said = error.context if "duplicate" in (error.context or "") else error.problem or error.context
            raise BadInput(f"{where}: no YAML: {str(said).partition(';')[0]}") from error
        except yaml.YAMLError as error:
            raise BadInput(f"{source}: no YAML: {str(error).splitlines()[0]}") from error
        except RecursionError as error:
            raise BadInput(f"{source}: nested too deeply; at most {_DEEPEST} levels") from error
        if mapping and not isinstance(root, MappingNode):
            line = root.start_mark.line + 1 if root is not None else 1
            raise BadInput(f"{source}:{line}: a scenario is a mapping of keys (name: ..., topology: ...)")
        self._scalars = yaml.SafeLoader("")
        self._is_file = mapping
        self._values = 0
        self.data: Any = None if root is None else self._value(root, ())

    def line(self, path: Sequence[str | int]) -> int | None:
        """The line of the key at ``path``, or of the nearest part of it that the document has; None for no document."""
        found: int | None = None
        at: Path = ()
        for part in path:
            deeper = (*at, part)
            if deeper in self._lines:
                at = deeper
                found = self._lines[deeper]
        return found

    def place(self, path: Sequence[str | int]) -> str:
        """``file:line`` of a path."""
        line = self.line(path)
        return f"{self.source}:{line}" if line is not None else self.source

    def known_path(self, loc: Sequence[str | int]) -> Path:
        """``loc`` of pydantic without the parts that are no keys of the document (names of union members)."""
        at: list[str | int] = []
        node: Any = self.data
        for part in loc:
            if isinstance(node, dict) and part in node:
                node = node[part]
            elif isinstance(node, list) and isinstance(part, int) and part < len(node):
                node = node[part]
            else:
                continue
            at.append(part)
        return tuple(at)

    def _value(self, node: Node, path: Path) -> Any:
        self._values += 1
        if len(path) > _DEEPEST or self._values > _MOST_VALUES:
            what = f"nested too deeply; at most {_DEEPEST} levels" if len(path) > _DEEPEST else "too many values"
            raise BadInput(f"{self._at(node)}: {what} (an alias that repeats itself?)")
        if isinstance(node, MappingNode):
            return self._mapping(node, path)
        if isinstance(node, SequenceNode):
            items = []
            for number, child in enumerate(node.value):
                self._lines[(*path, number)] = child.start_mark.line + 1
                items.append(self._value(child, (*path, number)))
            return items
        assert isinstance(node, ScalarNode)
        shown = node.value if len(node.value) <= _LONGEST_NUMBER else f"{node.value[:_LONGEST_NUMBER]}..."
        if shown != node.value and node.tag.endswith((":int", ":float")):
            raise BadInput(f"{self._at(node)}: {shown} is too long a number")
        try:
            return self._scalars.construct_object(node)
        except (yaml.YAMLError, ValueError, LookupError) as error:  # what PyYAML's constructors raise
            raise BadInput(f"{self._at(node)}: {shown!r} cannot be read as {node.tag}; quote it") from error

    def _at(self, node: Node) -> str:
        return f"{self.source}:{node.start_mark.line + 1}" if self._is_file else self.source

    def _mapping(self, node: MappingNode, path: Path) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key_node, value_node in node.value:
            at = self._at(key_node)
            if key_node.tag.endswith(":merge"):
                raise BadInput(f"{at}: key '<<': merging is not supported; write the keys out")
            key = self._value(key_node, path) if isinstance(key_node, ScalarNode) else None
            if not isinstance(key, str):
                given = repr(key_node.value) if isinstance(key_node, ScalarNode) else "a list or a mapping"
                raise BadInput(f"{at}: a key must be text, not {given}")
            if key in made:
                raise BadInput(f"{at}: key {key!r} is given twice; remove one")
            self._lines[(*path, key)] = key_node.start_mark.line + 1
            made[key] = self._value(value_node, (*path, key))
        return made


class Places:
    """Where a key stands: a line of the file, or the ``--set`` that gave it.

    Args:
        tree: of the file.
        changed: path and text of each ``--set``.
    """

    def __init__(self, tree: YamlTree, changed: list[tuple[Path, str]]) -> None:
        self.tree = tree
        self.changed = changed

    def of(self, path: Sequence[str | int]) -> str:
        """The change that gave all of it; or the line of the file, with the changes that gave a part of it."""
        for where, change in self.changed:
            if tuple(path[: len(where)]) == where:
                return f"--set {change}"
        parts = [f"--set {change}" for where, change in self.changed if where[: len(path)] == tuple(path)]
        return " with ".join([self.tree.place(path), *parts])

    def name(self, path: Sequence[str | int]) -> str:
        """Place and key: how an error begins."""
        return f"{self.of(path)}: {dotted(path)}"


def dotted(path: Sequence[str | int]) -> str:
    """``steps[2].when.event``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:  # a key of the file may be anything: an error stays one line, and does not colour the terminal
            shown = part if part.isprintable() and part else repr(part)
            text += f".{shown}" if text else shown
    return text
