"""The prefix tree against a model that a reader can check: a list of nodes, each a tuple of edges."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.rollout.prefix_tree import PrefixTree


class NaiveTree:
    """Every node by its path of edges; found by trying all of them."""

    def __init__(self) -> None:
        self.nodes: dict[tuple[str, ...], int | None] = {}

    def below(self, path: tuple[str, ...], rest: str) -> tuple[str, ...] | None:
        """The longest child edge of a node that begins ``rest``."""
        edges = [node[-1] for node in self.nodes if node[:-1] == path and rest.startswith(node[-1])]
        return (*path, max(edges, key=len)) if edges else None

    def walk(self, text: str) -> tuple[str, ...]:
        path: tuple[str, ...] = ()
        while (child := self.below(path, text[len("".join(path)) :])) is not None:
            path = child
        return path

    def insert(self, key: str, value: int) -> int | None:
        path = self.walk(key)
        rest = key[len("".join(path)) :]
        path = (*path, rest) if rest else path
        old = self.nodes.get(path)
        self.nodes[path] = value
        return old

    def search(self, text: str) -> tuple[str, list[int]]:
        found: list[int] = []
        path = self.walk(text)
        for end in range(1, len(path) + 1):
            value = self.nodes[path[:end]]
            if value is None:
                return "".join(path[: end - 1]), found
            found.append(value)
        return "".join(path), found

    def release(self, key: str) -> int | None:
        path = self.walk(key)
        if "".join(path) != key or not path or self.nodes[path] is None:
            return None
        value = self.nodes[path]
        self.nodes[path] = None
        while path and self.nodes[path] is None and not any(node[: len(path)] == path != node for node in self.nodes):
            del self.nodes[path]
            path = path[:-1]
        return value

    def values(self) -> dict[str, int]:
        return {"".join(path): value for path, value in self.nodes.items() if value is not None}


KEYS = st.text("ab", min_size=1, max_size=6)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), KEYS),
        st.tuples(st.just("search"), KEYS),
        st.tuples(st.just("release"), KEYS),
        st.tuples(st.just("clear"), st.just("")),
    ),
    max_size=40,
)


@given(STEPS)
@settings(max_examples=400, deadline=None)
def test_it_does_as_the_naive_tree(steps: list[tuple[str, str]]) -> None:
    tree: PrefixTree[int] = PrefixTree()
    naive = NaiveTree()
    for number, (what, key) in enumerate(steps):
        if what == "insert":
            assert tree.insert(key, number) == naive.insert(key, number)
        elif what == "search":
            assert tree.search(key) == naive.search(key)
        elif what == "release":
            assert tree.release(key) == naive.release(key)
        else:
            assert sorted(tree.clear()) == sorted(naive.values().values())
            naive = NaiveTree()
        assert dict(tree.items()) == naive.values()
        assert len(tree) == len(naive.values()) and sorted(tree.values()) == sorted(naive.values().values())
        assert tree.at(key) == (naive.values().get(key) if key else None)


@given(st.lists(KEYS, max_size=20), KEYS)
@settings(max_examples=200, deadline=None)
def test_a_stored_key_is_found_again_and_the_match_is_the_longest(keys: list[str], text: str) -> None:
    tree: PrefixTree[int] = PrefixTree()
    for number, key in enumerate(keys):
        tree.insert(key, number)
    for key in keys:
        assert tree.search(key)[0] == key
    longest = max((key for key in keys if text.startswith(key)), key=len, default="")
    assert tree.search(text)[0] == longest


def test_edges_are_never_split() -> None:
    tree: PrefixTree[str] = PrefixTree()
    tree.insert("hello world", "whole")
    tree.insert("hello", "part")
    assert tree.search("hello world")[1] == ["whole"] and tree.search("hello there")[1] == ["part"]
    tree.insert("hello there", "below")
    assert tree.search("hello there") == ("hello there", ["part", "below"])
    assert tree.edge_after("hello", " there or not") == (" there", "below")
    assert tree.edge_after("hello", "x") is None and tree.edge_after("hell", "o") is None


def test_a_node_without_value_ends_a_match() -> None:
    """Its text would be taken for known, and its tokens would be lost."""
    tree: PrefixTree[int] = PrefixTree()
    for number, key in enumerate(("a", "ab", "abc")):
        tree.insert(key, number)
    assert tree.release("ab") == 1
    assert tree.search("abc") == ("a", [0]) and tree.get("abc") == [0, None, 2]
    assert tree.release("abc") == 2
    assert tree.search("abc") == ("a", [0]) and list(tree.items()) == [("a", 0)]


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        PrefixTree[int]().insert("", 1)


def test_ten_thousand_levels() -> None:
    tree: PrefixTree[int] = PrefixTree()
    key = ""
    began = time.process_time()
    for number in range(10_000):
        key += f"turn {number};"
        tree.insert(key, number)
    assert tree.search(key + "more") == (key, list(range(10_000)))
    assert len(list(tree.values())) == 10_000
    assert tree.release(key) == 9_999 and len(tree) == 9_999
    assert len(tree.clear()) == 9_999
    assert time.process_time() - began < 10
