"""The prefix tree of one session: conversations that share their beginnings, one edge a segment (serving.md 5.3).

Edges are never split: what is inserted below a node is the remainder of its key, as one edge. Every walk is a loop, for
a conversation has a node a segment and may be thousands deep. A tree says nothing of references; its store does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

V = TypeVar("V")


class _Node(Generic[V]):
    __slots__ = ("children", "edge", "parent", "value")

    def __init__(self, parent: _Node[V] | None, edge: str, value: V | None) -> None:
        self.parent = parent
        self.edge = edge
        self.value = value
        self.children: dict[str, _Node[V]] = {}

    def next(self, text: str, at: int) -> _Node[V] | None:
        """The child whose edge is the longest that ``text`` has at position ``at``."""
        best = None
        for edge, child in self.children.items():
            if text.startswith(edge, at) and (best is None or len(edge) > len(best.edge)):
                best = child
        return best


class PrefixTree(Generic[V]):
    """Text keys to values, walked from the root by edges.

    Of two edges of a node that begin alike the longer one is always the older (a younger would have gone below the
    shorter one), so the longest edge that fits is always the right one: a stored key is found again. A walk begins
    where the last one ended if its text goes on from there, as the turns of a conversation do.
    """

    def __init__(self) -> None:
        self._root: _Node[V] = _Node(None, "", None)
        self._size = 0
        self._without_value = 0
        self._last: tuple[str, _Node[V]] = ("", self._root)
        self._last_way: tuple[_Node[V], list[V | None]] = (self._root, [])
        self._forks = False
        """Some edge is the beginning of one beside it: where a walk ended says nothing of where a longer one goes."""

    def __len__(self) -> int:
        """Keys that have a value."""
        return self._size

    def insert(self, key: str, value: V) -> V | None:
        """Put a value at a key; returns the one that was there.

        Raises:
            ValueError: the key is empty.
        """
        if not key:
            raise ValueError("a key of a prefix tree must not be empty")
        node, at = self._walk(key)
        if at < len(key):
            child: _Node[V] = _Node(node, key[at:], value)
            self._forks = self._forks or any(edge.startswith(child.edge) for edge in node.children)
            node.children[child.edge] = child
            self._last = (key, child)
            self._size += 1
            return None
        old, node.value = node.value, value
        self._last_way = (self._root, [])
        if old is None:
            self._size += 1
            self._without_value -= 1
        return old

    def search(self, text: str) -> tuple[str, list[V]]:
        """The longest stored prefix of ``text`` whose every edge has a value, and these values.

        It ends before an edge without one: the tokens of that edge are nowhere, and a caller that was given its text
        would lose them.
        """
        node, at = self._walk(text)
        way = self._way(node)
        if not self._without_value:
            return text[:at], way  # type: ignore[return-value]  # none of them is None
        values: list[V] = []
        for value in way:
            if value is None:
                break
            values.append(value)
        for _ in way[len(values) :]:
            at -= len(node.edge)
            assert node.parent is not None
            node = node.parent
        return text[:at], values

    def get(self, key: str) -> list[V | None] | None:
        """The values on the way to exactly ``key``, None where an edge has none; None: no such key with a value."""
        node, at = self._walk(key)
        if at != len(key) or node.value is None:
            return None
        return self._way(node)

    def at(self, key: str) -> V | None:
        """The value at exactly ``key``; None: no such key with a value."""
        node, at = self._walk(key)
        return node.value if at == len(key) else None

    def edge_after(self, key: str, text: str) -> tuple[str, V | None] | None:
        """The edge, and its value, that a walk of ``key + text`` takes at ``key``, which is a node; None: no edge."""
        node, at = self._walk(key)
        if at != len(key):
            return None
        child = node.next(text, 0)
        return None if child is None else (child.edge, child.value)

    def reach(self, text: str) -> int:
        """How much of ``text`` a walk covers: what is inserted at ``text`` hangs below the node that ends there."""
        return self._walk(text)[1]

    def items(self) -> Iterator[tuple[str, V]]:
        """Every key with a value, a node before its children, children in the order of their insertion."""
        stack: list[tuple[str, _Node[V]]] = [("", self._root)]
        while stack:
            prefix, node = stack.pop()
            if node.value is not None:
                yield prefix, node.value
            for child in reversed(node.children.values()):
                stack.append((prefix + child.edge, child))

    def values(self) -> Iterator[V]:
        """Every value, in the order of ``items``, without building the keys (a deep tree's are long)."""
        stack = [self._root]
        while stack:
            node = stack.pop()
            if node.value is not None:
                yield node.value
            stack.extend(reversed(node.children.values()))

    def release(self, key: str) -> V | None:
        """Take the value of a key away, and prune what has become an empty branch; returns it, None without one."""
        node, at = self._walk(key)
        value = node.value
        if at != len(key) or value is None:
            return None
        node.value = None
        self._size -= 1
        self._without_value += 1
        while node.parent is not None and node.value is None and not node.children:
            del node.parent.children[node.edge]
            self._without_value -= 1
            node = node.parent
        self._last = ("", self._root)
        self._last_way = (self._root, [])
        return value

    def clear(self) -> list[V]:
        """Empty the tree; returns every value that was in it."""
        values = list(self.values())
        self._root = _Node(None, "", None)
        self._size = self._without_value = 0
        self._last = ("", self._root)
        self._last_way = (self._root, [])
        self._forks = False
        return values

    def _walk(self, text: str) -> tuple[_Node[V], int]:
        """The last node of the longest walk whose edges together are a prefix of ``text``, and their length."""
        key, node = self._last
        if self._forks or not text.startswith(key):
            key, node = "", self._root
        at = len(key)
        while (child := node.next(text, at)) is not None:
            at += len(child.edge)
            node = child
        self._last = (text[:at], node)
        return node, at

    def _way(self, node: _Node[V]) -> list[V | None]:
        """The values from the root's child to ``node``; those of the last way are known where it goes on from there."""
        last, known = self._last_way
        values: list[V | None] = []
        at = node
        while at.parent is not None and at is not last:
            values.append(at.value)
            at = at.parent
        values.reverse()
        way = known + values if at is last else values
        self._last_way = (node, way)
        return way[:]
