"""Order: cause, the process's own counter, a gap above the clock error, or not known."""

from __future__ import annotations

import pytest

from analysis.order import Order, parse_cause
from tests.analysis.history import History


def ordered(h: History, error_ms: int) -> Order:
    order = Order(error_ms * 10**6)
    for event in h.events:
        order.see(event)
    return order


def test_without_clock_error_the_file_order_is_the_order() -> None:
    h = History()
    a, b = h("run.healed", at="a/1", ms=5), h("run.healed", at="b/1", ms=5)
    assert ordered(h, 0).compare(a, b) == "before"
    assert ordered(h, 0).compare(b, a) == "after"


def test_within_the_clock_error_nothing_is_known() -> None:
    h = History()
    a, b = h("run.healed", at="a/1", ms=5), h("run.healed", at="b/1", ms=8)
    assert ordered(h, 3).compare(a, b) == "unordered"
    assert ordered(h, 2).compare(a, b) == "before"
    assert ordered(h, 2).compare(b, a) == "after"


def test_one_process_is_ordered_by_its_counter() -> None:
    h = History()
    a, b = h("run.healed", at="a/1", ms=5), h("run.healed", at="a/1", ms=5)
    assert ordered(h, 99).compare(a, b) == "before"
    assert ordered(h, 99).compare(b, a) == "after"


def test_causes_order_through_other_processes() -> None:
    h = History()
    early = h("run.healed", at="a/1", ms=5)
    sent = h("run.healed", at="a/1", ms=5)
    relay = h("run.healed", at="b/1", ms=4, cause=sent)
    later = h("run.healed", at="b/1", ms=4)
    last = h("run.healed", at="c/1", ms=3, cause=later)
    unrelated = h("run.healed", at="a/1", ms=5)
    order = ordered(h, 99)
    for event in (relay, later, last):
        assert order.compare(early, event) == "before"
        assert order.compare(event, early) == "after"
        assert order.compare(unrelated, event) == "unordered"


def test_a_send_before_the_receipt_does_not_know_it() -> None:
    h = History()
    before = h("run.healed", at="b/1", ms=5)
    sent = h("run.healed", at="a/1", ms=5)
    h("run.healed", at="b/1", ms=5, cause=sent)
    assert ordered(h, 99).compare(sent, before) == "unordered"


def test_many_receipts_only_forget_in_the_safe_direction() -> None:
    h = History()
    first = h("run.healed", at="a/1", ms=5)
    receipt = h("run.healed", at="b/1", ms=5, cause=first)
    for _ in range(5000):
        h("run.healed", at="b/1", ms=5, cause=h("run.healed", at="a/1", ms=5))
    order = ordered(h, 99)
    assert order.compare(first, h.events[-1]) == "before"
    assert order.compare(first, receipt) == "unordered"


def test_a_cause_of_another_form_is_refused() -> None:
    assert parse_cause("worker/3/1/17") == (("worker/3", 1), 17)
    with pytest.raises(ValueError, match="is not actor/incarnation/n"):
        parse_cause("worker")
