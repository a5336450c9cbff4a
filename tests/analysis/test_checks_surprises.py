"""Checks of what SGLang does unasked, on hand-written histories: passing, failing."""

from __future__ import annotations

from analysis.checks.base import CheckResult
from tests.analysis.history import History

CACHE, ABORT, LEAVING = "nothing_served_from_an_old_cache", "abort_ends_the_one_asked", "nothing_to_a_leaving_engine"


def ready() -> History:
    h = History()
    h.ready()
    return h


def refused(h: History, weight_hash: str = "hash-2") -> int:
    return h("engine.weights", at="e0/1", version="2", weight_hash=weight_hash, ok=False).seq


# --- a refused flush ---


def cache(h: History) -> CheckResult:
    return h.end().judged(CACHE)


def test_a_generation_after_a_refused_flush_fails() -> None:
    h = ready()
    load, taken = refused(h), h.accepted("r1").seq
    row = cache(h)
    assert row.result == "fail" and row.witness == (load, taken) and "version '2'" in row.explain


def test_a_flush_that_is_done_makes_it_good() -> None:
    h = ready()
    refused(h)
    h("engine.flushed", at="e0/1")
    h.accepted("r1")
    assert cache(h).result == "pass"


def test_a_load_that_changed_nothing_has_left_nothing_behind() -> None:
    h = ready()
    refused(h, "hash-1")
    h.accepted("r1")
    assert cache(h).result == "pass"


def test_another_load_alone_does_not_make_it_good() -> None:
    h = ready()
    refused(h)
    h("engine.weights", at="e0/1", version="3", weight_hash="hash-3", ok=True)  # without a flush
    h.accepted("r1")
    assert cache(h).result == "fail"


def test_the_next_process_begins_with_an_empty_cache() -> None:
    h = ready()
    refused(h)
    h("actor.died", at="e0/1", reason="killed")
    h("engine.ready", at="e0/2", version="2", weight_hash="hash-2")
    h.accepted("r1", at="e0/2")
    assert cache(h).result == "pass"


# --- an abort ---


def asked(h: History, request: str, everything: bool = False) -> int:
    return h("engine.abort_asked", at="e0/1", request=request, everything=everything).seq


def aborted(h: History, request: str, reason: str = "abort") -> int:
    return h("engine.finished", at="e0/1", request=request, reason=reason, spans=[]).seq


def two() -> History:
    h = ready()
    h.accepted("rid-1")
    h.accepted("rid-10")
    return h


def test_the_abort_of_one_that_ends_another_fails() -> None:
    h = two()
    told = asked(h, "rid-1")
    aborted(h, "rid-1")
    end = aborted(h, "rid-10")
    row = h.end().judged(ABORT)
    assert row.result == "fail" and row.witness == (told, end)


def test_what_was_asked_for_itself_or_with_all_or_by_a_pause_passes() -> None:
    for second in ("itself", "all", "pause"):
        h = two()
        asked(h, "rid-1")
        if second == "pause":
            h("engine.paused", at="e0/1", mode="abort")
        else:
            asked(h, "rid-10" if second == "itself" else "", everything=second == "all")
        aborted(h, "rid-10")
        assert h.end().judged(ABORT).result == "pass", second


def test_one_that_came_later_or_ran_to_its_end_passes() -> None:
    h = two()
    asked(h, "rid-1")
    aborted(h, "rid-10", reason="length")
    h.accepted("rid-11")
    aborted(h, "rid-11")
    assert h.end().judged(ABORT).result == "pass"


# --- a SIGTERM ---


def sends(h: History, ms: int, inc: int = 1) -> int:
    return h("call.sent", at="gateway/1", ms=ms, target="e0", target_inc=inc, method="/generate").seq


def test_a_generation_long_after_a_sigterm_fails() -> None:
    h = ready()
    told = h("engine.leaving", at="e0/1", ms=1000).seq
    sends(h, 15_900)
    late = sends(h, 16_100)
    row = h.end().judged(LEAVING)
    assert row.result == "fail" and row.witness == (told, late) and row.explain.startswith("gateway/1 sent")


def test_another_process_or_none_passes() -> None:
    h = ready()
    h("engine.leaving", at="e0/1", ms=1000)
    h("actor.died", at="e0/1", ms=6700, reason="exited")
    sends(h, 30_000, inc=2)
    assert h.end().judged(LEAVING).result == "pass"


def test_without_any_of_it_nothing_is_judged() -> None:
    h = ready()
    h.accepted("r1")
    rows = [h.end().judged(name) for name in (ABORT, LEAVING)]
    assert all(row.result == "inconclusive" and not row.applicable and not row.required for row in rows)
