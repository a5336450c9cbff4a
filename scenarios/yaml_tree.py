"""YAML with the line of every key: what an error needs to point at its place in a scenario file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from analysis.errors import BadInput

Path = tuple[str | int, ...]


class YamlTree:
    """A parsed document and where its parts stand.

    Args:
        text: the document.
        source: what to call it in errors, usually the file's path.

    Raises:
        BadInput: no YAML, no mapping, a key given twice, or a tag other than the plain ones; names the line.
    """

    def __init__(self, text: str, source: str) -> None:
        self.source = source
        self._lines: dict[Path, int] = {}
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            where = f"{source}:{mark.line + 1}" if mark else source
            raise BadInput(f"{where}: no YAML: {error.problem or error.context}") from error
        except yaml.YAMLError as error:
            raise BadInput(f"{source}: no YAML: {str(error).splitlines()[0]}") from error
        if not isinstance(root, MappingNode):
            line = root.start_mark.line + 1 if root is not None else 1
            raise BadInput(f"{source}:{line}: a scenario is a mapping of keys (name: ..., topology: ...)")
        self._scalars = yaml.SafeLoader("")
        self.data: dict[str, Any] = self._value(root, ())

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
        if isinstance(node, MappingNode):
            return self._mapping(node, path)
        if isinstance(node, SequenceNode):
            items = []
            for number, child in enumerate(node.value):
                self._lines[(*path, number)] = child.start_mark.line + 1
                items.append(self._value(child, (*path, number)))
            return items
        assert isinstance(node, ScalarNode)
        try:
            return self._scalars.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            raise BadInput(
                f"{self.source}:{node.start_mark.line + 1}: {node.value!r} cannot be read as {node.tag}; quote it"
            ) from error

    def _mapping(self, node: MappingNode, path: Path) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = self._value(key_node, path) if isinstance(key_node, ScalarNode) else None
            if not isinstance(key, str):
                raise BadInput(f"{self.source}:{line}: a key must be text, not {getattr(key_node, 'value', '')!r}")
            if key == "<<":
                raise BadInput(f"{self.source}:{line}: key '<<': merging is not supported; write the keys out")
            if key in made:
                raise BadInput(f"{self.source}:{line}: key {key!r} is given twice; remove one")
            self._lines[(*path, key)] = line
            made[key] = self._value(value_node, (*path, key))
        return made
