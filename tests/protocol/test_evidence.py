"""Declaring kinds of evidence: what users' packages may, and what they may not."""

from __future__ import annotations

import pytest

from protocol import evidence
from protocol.evidence import Event, declare, encode, schema


@pytest.fixture(autouse=True)
def own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "KINDS", dict(evidence.KINDS))


def test_a_kind_of_a_users_package_is_encoded_and_is_no_part_of_the_schema() -> None:
    before = [kind.name for kind in schema()]
    declare("mystack.shed", "component", "Load was shed.", requests="int: count")
    line = encode(Event(1, 2, "mystack.shed", "gate", 1, 1, 1, None, {"requests": 3}))
    assert line.endswith('"data":{"requests":3}}\n')
    assert [kind.name for kind in schema()] == before


def test_a_users_package_may_not_declare_what_the_world_sees() -> None:
    with pytest.raises(ValueError, match=r"'mystack.shed': only this package declares world kinds"):
        declare("mystack.shed", "world", "Load was shed.")


def test_declaring_again_is_harmless_only_when_it_says_the_same() -> None:
    declare("mystack.shed", "component", "Load was shed.", requests="int: count")
    declare("mystack.shed", "component", "Load was shed.", requests="int: count")
    with pytest.raises(ValueError, match="declared twice, differently"):
        declare("mystack.shed", "component", "Load was shed.", requests="str: count")
    with pytest.raises(ValueError, match="field 'requests': unknown type 'long'"):
        declare("mystack.other", "component", "Other.", requests="long: count")
