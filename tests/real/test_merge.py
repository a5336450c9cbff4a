"""Logs of several processes become one stream: by time, never against cause, and with what is missing said."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from analysis.verdict import judge
from protocol.evidence import Event, encode
from real.evidence import OBSERVED
from real.merge import SIGNAL_NS, Log, MergeFailed, merge, read_logs

MS = 1_000_000


class Writer:
    """Writes a log by hand."""

    def __init__(self, name: str, inc: int = 1, ahead_ns: int = 0) -> None:
        self.name, self.inc, self.ahead_ns = name, inc, ahead_ns
        self.events: list[Event] = []

    def add(self, t_ms: float, kind: str, cause: Event | None = None, **data: Any) -> Event:
        n = sum(event.n < OBSERVED for event in self.events) + 1
        return self._put(t_ms, kind, self.name, self.inc, n, cause, data)

    def of(self, other: Writer, t_ms: float, kind: str, number: int, **data: Any) -> Event:
        cause = self.events[-1] if self.events else None
        return self._put(t_ms, kind, other.name, other.inc, OBSERVED + number, cause, data)

    def born(self, t_ms: float, role: str = "actor", node: str = "node-0") -> Event:
        return self.add(t_ms, "actor.spawned", cls="C", node=node, role=role)

    def note(self, t_ms: float, cause: Event | None = None) -> Event:
        return self.add(t_ms, "gateway.routable", cause, replica="r", replica_inc=1)

    @property
    def log(self) -> Log:
        return Log((self.name, self.inc), self.events)

    def _put(
        self, t_ms: float, kind: str, actor: str, inc: int, n: int, cause: Event | None, data: dict[str, Any]
    ) -> Event:
        t_ns = round(t_ms * MS) + self.ahead_ns
        lc = max([event.lc for event in self.events] + [cause.lc if cause else 0]) + 1
        event = Event(0, t_ns, kind, actor, inc, n, lc, cause.id if cause else None, data)
        encode(event)  # what is written by hand is of the schema too
        self.events.append(event)
        return event


def _ids(events: list[Event]) -> list[str]:
    return [event.id for event in events]


def test_by_time_where_nothing_else_is_known() -> None:
    a, b = Writer("a"), Writer("b")
    first, third = a.note(1), a.note(3)
    second, fourth = b.note(2), b.note(4)
    merged = merge([a.log, b.log], alive=[("a", 1), ("b", 1)])
    assert _ids(merged.events) == _ids([first, second, third, fourth])
    assert [event.seq for event in merged.events] == [1, 2, 3, 4]
    assert merged.inversion_ns == 0 and merged.tails == []


def test_an_effect_follows_its_cause_whatever_the_clocks_say() -> None:
    sender, receiver = Writer("sender", ahead_ns=5 * MS), Writer("receiver")
    sent = sender.note(10)  # at 15 ms by its own clock
    got = receiver.note(11, cause=sent)
    after = receiver.note(12)
    merged = merge([receiver.log, sender.log], alive=[("sender", 1), ("receiver", 1)])
    assert _ids(merged.events) == _ids([sent, got, after])
    assert merged.inversion_ns == 4 * MS


def test_a_process_keeps_its_own_order_when_its_clock_steps_back() -> None:
    a, b = Writer("a"), Writer("b")
    first, second = a.note(5), a.note(1)
    other = b.note(2)
    assert _ids(merge([a.log, b.log]).events)[:3] == _ids([other, first, second])


def test_a_cause_that_no_log_has_holds_up_nothing() -> None:
    a, lost = Writer("a"), Writer("lost")
    event = a.note(2, cause=lost.note(1))
    assert _ids(merge([a.log], alive=[("a", 1)]).events) == [event.id]


def test_what_is_done_after_the_end_of_the_run_is_no_evidence() -> None:
    a, b = Writer("a"), Writer("b")
    first, last = a.note(1), b.note(2)
    a.note(3)
    assert _ids(merge([a.log, b.log], alive=[("a", 1), ("b", 1)], until_ns=2 * MS).events) == _ids([first, last])


def test_causes_in_a_circle_end() -> None:
    a, b = Writer("a"), Writer("b")
    a.note(1)
    b.note(2, cause=a.events[0])
    a.events[0].cause = "b/1/1"
    assert len(merge([a.log, b.log], alive=[("a", 1), ("b", 1)]).events) == 2


def test_a_death_follows_what_its_victim_did_while_the_signal_was_on_its_way() -> None:
    killer, victim = Writer("killer"), Writer("victim")
    victim.born(1)
    killer.born(1)
    died = killer.of(victim, 10, "actor.died", 7, reason="killed", detail="")
    acted = victim.note(12)
    went_on = killer.note(11)
    ordered = merge([killer.log, victim.log], alive=[("killer", 1)])
    ids = _ids(ordered.events)
    assert ids.index(acted.id) < ids.index(died.id) and ids.index(went_on.id) < ids.index(died.id)
    assert ordered.tails == []


def test_a_process_that_acts_long_after_its_death_is_not_covered_up() -> None:
    killer, victim = Writer("killer"), Writer("victim")
    victim.born(1)
    killer.born(1)
    died = killer.of(victim, 10, "actor.died", 7, reason="killed", detail="")
    acted = victim.note(20 + SIGNAL_NS / MS)
    ids = _ids(merge([killer.log, victim.log], alive=[("killer", 1)]).events)
    assert ids.index(died.id) < ids.index(acted.id)


def test_a_silent_death_is_said_and_judged_a_crash() -> None:
    driver, actor = Writer("driver", 0), Writer("actor")
    driver.born(0, role="driver")
    actor.born(1)
    last = actor.note(2)
    merged = merge([driver.log, actor.log])
    assert [(tail.process, tail.what) for tail in merged.tails] == [(("actor", 1), "silent")]
    death = merged.events[-1]
    assert (death.kind, death.actor, death.data["reason"], death.t_ns) == ("actor.died", "actor", "crashed", last.t_ns)
    crash = next(row for row in judge(merged.events).checks if row.name == "no_crash")
    assert crash.result == "fail"
    assert merge([driver.log, actor.log], alive=[("actor", 1)]).tails == []


def test_a_silent_death_on_a_lost_node_is_the_nodes() -> None:
    driver, actor = Writer("driver", 0), Writer("actor")
    driver.born(0, role="driver")
    actor.born(1, node="node-1")
    driver.add(9, "node.lost", node="node-1", zombie=False)
    assert merge([driver.log, actor.log]).events[-2].data["reason"] == "node_lost"


def test_a_torn_last_line_is_left_out_and_said(tmp_path: pathlib.Path) -> None:
    actor = Writer("a/odd name")
    actor.born(1)
    text = "".join(encode(event) for event in actor.events)
    (tmp_path / "a%2Fodd%20name-1.jsonl").write_text(text + '{"seq":0,"t_ns":12')
    merged = merge(read_logs(tmp_path), alive=[("a/odd name", 1)])
    assert _ids(merged.events) == ["a/odd name/1/1"]
    assert [(tail.process, tail.what) for tail in merged.tails] == [(("a/odd name", 1), "torn")]
    assert "18 bytes" in merged.tails[0].detail


def test_a_bad_line_in_the_middle_is_refused_by_its_number(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a-1.jsonl").write_text("{}\n{}\n")
    with pytest.raises(MergeFailed, match=r"a-1.jsonl: line 1: event has no key"):
        read_logs(tmp_path)
