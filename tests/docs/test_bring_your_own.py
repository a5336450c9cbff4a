"""docs/bring_your_own.md names every part that can be replaced, and every method of it that anybody asks for."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest

from scenarios.parts import ASKED
from scenarios.schema import COMPONENTS
from tests.docs.pages import DOCS

_ROW = re.compile(r"\| `(?P<part>[a-z_]+)` \| (?P<methods>.*) \| (?P<arguments>.*) \| `(?P<ours>[\w.]+:\w+)` \|")
ROWS = [
    row for line in (DOCS / "bring_your_own.md").read_text(encoding="utf-8").splitlines() if (row := _ROW.match(line))
]
_OF_ITSELF = {"start", "stop"}


def test_every_part_has_a_row() -> None:
    assert sorted(row["part"] for row in ROWS) == sorted(COMPONENTS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["part"])
def test_the_methods_of_a_part_are_those_of_our_class(row: re.Match[str]) -> None:
    module, _, name = row["ours"].partition(":")
    ours = getattr(importlib.import_module(module), name)
    named = set(re.findall(r"`([a-z_]+)`", re.sub(r"\([^)]*\)", "", row["methods"])))
    public = {
        method
        for method, function in inspect.getmembers(ours)
        if not method.startswith("_")
        and (inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function))
    } - _OF_ITSELF
    assert named <= public, f"the page names {named - public}, which {name} does not have"
    if "the rest is its HTTP surface" not in row["methods"]:
        assert public <= named, f"{name} has {public - named}, which the page does not name"


def test_what_is_in_bold_is_looked_for_before_a_run() -> None:
    bold = {row["part"]: tuple(re.findall(r"\*\*`([a-z_]+)`\*\*", row["methods"])) for row in ROWS}
    assert {part: methods for part, methods in bold.items() if methods} == ASKED


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["part"])
def test_a_constructor_takes_as_much_as_the_page_says(row: re.Match[str]) -> None:
    module, _, name = row["ours"].partition(":")
    parameters = list(inspect.signature(getattr(importlib.import_module(module), name)).parameters.values())
    keywords = set(re.findall(r"`([a-z_]+)=", row["arguments"]))
    listed = re.sub(r"\([^)]*\)", "", row["arguments"].partition(";")[0])
    said = 0 if listed == "nothing" else listed.count(",") + 1
    by_position = [one for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD and one.name not in keywords]
    assert len(by_position) == said and keywords <= {one.name for one in parameters}
