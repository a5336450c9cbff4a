"""What an API remembers, addresses of engines, what an autoscaler shows, rollout replicas: hand-written histories."""

from __future__ import annotations

from typing import Any

import pytest

from tests.analysis.history import History
from tests.analysis.test_checks_scaling import Scaled

# --- memory_is_bounded


def _bounded(most: int = 2, keys: int = 3) -> Scaled:
    h = Scaled()
    h("scale.bounds", service="m", max_history=most, max_keys=keys, at="driver/0")
    return h


def _lost(h: Scaled, operation: str) -> Any:
    return h.answered(h.asked("status", operation=operation), status=404)


@pytest.mark.parametrize(("others", "result"), [(3, "pass"), (4, "fail")])
def test_an_operation_is_forgotten_when_enough_came_after_it(others: int, result: str) -> None:
    h = _bounded()
    for number in range(others + 1):
        h.submitted(f"op-{number}")
        h.status(f"op-{number}", "ACTIVE")
    h.status("op-0", "ACTIVE")
    row = h.end().judged("memory_is_bounded")
    assert row.result == result and (result == "pass" or "still known after 4 others" in row.explain)


def test_an_operation_that_is_not_resolved_is_never_forgotten() -> None:
    h = _bounded()
    h.submitted("op-0")
    h.status("op-0", "FAILED", cleanup="true")
    lost = _lost(h, "op-0")
    row = h.end().judged("memory_is_bounded")
    assert row.result == "fail" and lost.seq in row.witness
    assert h.judged("operations_end").result == "fail"


def test_one_that_is_resolved_may_be_forgotten_where_the_bounds_are_on_record() -> None:
    for bounded in (True, False):
        h = _bounded() if bounded else Scaled()
        h.submitted("op-0")
        h.status("op-0", "ACTIVE")
        _lost(h, "op-0")
        h.end()
        assert h.judged("operations_end").result == ("pass" if bounded else "fail")
        assert h.judged("memory_is_bounded").result == ("pass" if bounded else "inconclusive")


@pytest.mark.parametrize(("others", "result"), [(4, "pass"), (5, "fail")])
def test_a_key_answers_as_at_first_only_while_few_came_after_it(others: int, result: str) -> None:
    h = _bounded()
    for number in range(others + 1):
        h.submitted("", key=f"k{number}", target=1)
    h.submitted("", key="k0", target=1)
    assert h.end().judged("memory_is_bounded").result == result


def test_a_key_is_not_answered_with_what_is_forgotten() -> None:
    h = _bounded(most=100)
    h.submitted("op-0", key="k")
    h.status("op-0", "ACTIVE")
    h.submitted("op-0", key="k")
    _lost(h, "op-0")
    row = h.end().judged("memory_is_bounded")
    assert row.result == "fail" and "a key was answered with op-0" in row.explain


# --- one_engine_an_address


def _engine(h: History, name: str, port: int, inc: int = 0, node: str = "node-0") -> None:
    h("actor.spawned", at=f"{name}/{inc}", cls="Engine", node=node, role="engine")
    h("engine.started", at=f"{name}/{inc}", port=port)


@pytest.mark.parametrize(
    ("second", "result"),
    [((30001, "node-0"), "pass"), ((30000, "node-1"), "pass"), ((30000, "node-0"), "fail")],
)
def test_two_living_engines_have_two_addresses(second: tuple[int, str], result: str) -> None:
    h = History()
    _engine(h, "m-0", 30000)
    _engine(h, "m-1", second[0], node=second[1])
    row = h.end().judged("one_engine_an_address")
    assert row.result == result and bool(row.witness) == (result == "fail")


def test_the_port_of_a_dead_engine_is_free() -> None:
    h = History()
    _engine(h, "m-0", 30000)
    h("actor.died", at="m-0/0", reason="killed")
    _engine(h, "m-1", 30000)
    assert h.end().judged("one_engine_an_address").result == "pass"
    assert History().end().judged("one_engine_an_address").result == "inconclusive"


# --- autoscaler_shows_its_own


@pytest.mark.parametrize(
    ("service", "shown", "result"),
    [
        ("m", "scale_out", "pass"), ("m", None, "fail"), ("m", "scale_in", "fail"), ("other", None, "pass"),
        ("other", "scale_out", "fail"),
    ],
)  # fmt: skip
def test_an_autoscaler_shows_each_service_its_own_action(service: str, shown: str | None, result: str) -> None:
    h = History()
    h("autoscaler.deployed", service="m", scaler="autoscaler-m", api="front-m", at="driver/0")
    h("scale.asked", ask="a", service="m", route="scale_out", direction="scale_out", target=2, key="k", at="front-m/0")
    h("scale.answered", ask="a", status=200, operation="op", state="PENDING", cleanup="unknown", at="front-m/0")
    h("autoscaler.shown", scaler="autoscaler-m", service=service, last_action=shown, at="driver/0")
    assert h.end().judged("autoscaler_shows_its_own").result == result


# --- rollout replicas


def _rollout() -> Scaled:
    h = Scaled()
    h("rollout.scaled", service="m", api="scale-m", at="driver/0")
    return h


@pytest.mark.parametrize(
    ("states", "cleanup", "result"),
    [
        (["CREATING", "ACTIVE"], "false", "pass"),
        (["CREATING", "ACTIVE"], "unknown", "fail"),
        (["CREATING", "FAILED"], "true", "fail"),
        (["CREATING", "CANCELLED"], "false", "pass"),
        (["CONNECTING", "CANCELLED"], "false", "fail"),
        (["CREATING"], "false", "inconclusive"),
    ],
)
def test_a_rollout_operation_ends_explicitly(states: list[str], cleanup: str, result: str) -> None:
    h = _rollout()
    h.submitted("op")
    for state in states:
        h.status("op", state, cleanup=cleanup)
    assert h.end().judged("rollout_status_is_explicit").result == result


def _update(h: Scaled, replica: str) -> None:
    h("engine.post", at=f"{replica}/0", route="/update_weights_from_disk", status=0)


def _chosen(h: Scaled, what: str = "chosen") -> None:
    h("scale.drain", operation="op", replica="m-1", replica_inc=0, what=what, at="scale-m/0")


def test_updates_and_removals_do_not_meet() -> None:
    def course(*acts: str) -> str:
        h = _rollout()
        h.elastic()
        for act in acts:
            if act == "update":
                _update(h, "m-1")
            elif act == "loaded":
                h("engine.weights", at="m-1/0", version="2", weight_hash="x")
            elif act == "other":
                _update(h, "m-0")
            elif act == "killed":
                h.killed("m-1")
                h.removal("g1")
            else:
                _chosen(h, act)
        return h.end().judged("no_end_in_an_update").result

    assert course("update", "loaded", "chosen", "killed") == "pass"
    assert course("update", "chosen") == "fail"
    assert course("update", "killed") == "fail"
    assert course("chosen", "other") == "fail"
    assert course("chosen", "restored", "other") == "pass"
    assert course("chosen", "killed", "other") == "pass"
    assert course("chosen", "killed") == "inconclusive"


def test_a_replacement_of_a_service_without_updates_may_load_while_another_one_drains() -> None:
    h = Scaled()
    h.elastic()
    _update(h, "m-0")
    _chosen(h)
    assert h.end().judged("no_end_in_an_update").result == "inconclusive"
