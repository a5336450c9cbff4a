"""The registry alone: decisions, replays, exclusion, states, bounds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.config import ScalingConfig
from protocol.scaling.contract import Capacity, Progress
from protocol.scaling.registry import Decision, IllegalTransition, Operation, ScaleRegistry

HOUR = 3600.0


class Registry:
    """A registry with a clock and a capacity that the test sets."""

    def __init__(self, **config: Any) -> None:
        self.now = 0.0
        self.ids = 0
        self.capacity = Capacity(1, 1, 1, 0)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.of = ScaleRegistry(
            ScalingConfig(**config),
            new_id=self.new_id,
            now=lambda: self.now,
            wall_time=lambda: 1e9 + self.now,
            emit=lambda kind, **fields: self.events.append((kind, fields)),
        )

    def new_id(self, prefix: str) -> str:
        self.ids += 1
        return f"{prefix}-{self.ids:06d}"

    def submit(
        self,
        target: object,
        key: str | None = None,
        *,
        direction: Any = "scale_out",
        model: str = "m",
        timeout_s: float | None = None,
    ) -> Decision:
        return self.of.submit(
            direction, model, target, timeout_s=timeout_s, key=key, capacity=self.capacity, protected=1
        )

    def admitted(self, target: int = 2, key: str | None = None, **more: Any) -> Operation:
        decision = self.submit(target, key, **more)
        assert decision.created and decision.request_id, decision
        operation = self.of.get(more.get("direction", "scale_out"), decision.request_id)
        assert operation is not None
        return operation

    def finish(self, operation: Operation, *, dirty: bool = False, state: Any = "FAILED") -> None:
        self.of.finish(operation, state, progress(cleanup_required=dirty))


def progress(**changes: Any) -> Progress:
    fields: dict[str, Any] = {
        "phase": "CREATING", "current": 1, "ready": 1, "created": 0, "removed": 0, "failed": 0, "victim": None,
        "cleanup_required": False, "physical_done": False,
    }  # fmt: skip
    return Progress(**{**fields, **changes})


# --- decisions ---


@pytest.mark.parametrize("bad", [True, "2", 2.0, 2.5, None, [2]])
def test_only_an_integer_is_a_target(bad: object) -> None:
    registry = Registry()
    decision = registry.submit(bad, "k")
    assert decision.code == "INVALID_TYPE" and decision.request_id is None
    assert registry.of.sizes == (0, 0)
    assert registry.submit(2, "k").created  # the key was not consumed


@pytest.mark.parametrize("direction", ["scale_out", "scale_in"])
@pytest.mark.parametrize("target", [0, -1])
def test_nobody_goes_below_the_initial_replicas(direction: str, target: int) -> None:
    registry = Registry()
    assert registry.submit(target, direction=direction).code == "INVALID_RANGE"


def test_a_target_that_is_there_already_is_a_no_op_without_an_id() -> None:
    registry = Registry()
    registry.capacity = Capacity(2, 1, 2, 0)  # one of them drains: current counts, not ready
    out, into = registry.submit(2), registry.submit(3, direction="scale_in")
    assert [(d.status, d.request_id, d.current, d.ready) for d in (out, into)] == [("NOOP", None, 2, 1)] * 2


def test_one_unresolved_operation_of_a_model_in_either_direction() -> None:
    registry = Registry()
    registry.capacity = Capacity(2, 2, 2, 0)
    first = registry.admitted(3)
    assert registry.submit(4).code == "CONFLICT"
    assert registry.submit(1, direction="scale_in").code == "CONFLICT"
    assert registry.submit(3, model="other").created
    registry.finish(first, dirty=True)
    assert registry.submit(4).code == "CONFLICT"  # a dirty terminal holds the model too
    registry.of.cleaned(first, "clean")
    assert first.status == "FAILED"
    assert registry.submit(4).created


def test_the_exclusion_comes_before_the_no_op_and_the_range_before_both() -> None:
    registry = Registry()
    registry.admitted(3)
    assert registry.submit(1).code == "CONFLICT"  # would be a no-op
    assert registry.submit(0).code == "INVALID_RANGE"


# --- replays ---


def test_a_replay_gives_the_operation_with_its_present_state_and_no_conflict() -> None:
    registry = Registry()
    first = registry.admitted(2, "k")
    again = registry.submit(2, "k")
    assert (again.code, again.request_id, again.status, again.created) == ("", first.request_id, "PENDING", False)
    registry.finish(first, dirty=True)
    assert registry.submit(2, "k").status == "FAILED"


def test_a_no_op_is_replayed_word_for_word() -> None:
    registry = Registry()
    first = registry.submit(1, "k")
    registry.capacity = Capacity(0, 0, 0, 0)
    assert registry.submit(1, "k") == first
    assert registry.submit(1).created  # without the key it is looked at anew


@pytest.mark.parametrize("other", [{"target": 3}, {"timeout_s": 5.0}, {"model": "n"}])
def test_a_key_with_another_request_is_a_conflict(other: dict[str, Any]) -> None:
    registry = Registry()
    registry.admitted(2, "k")
    assert registry.submit(**{"target": 2, "key": "k", **other}).code == "IDEMPOTENCY_CONFLICT"


def test_a_key_belongs_to_a_direction() -> None:
    registry = Registry()
    registry.finish(registry.admitted(2, "k"))
    registry.capacity = Capacity(2, 2, 2, 0)
    assert registry.submit(1, "k", direction="scale_in").created


@pytest.mark.parametrize("no_op", [False, True])
def test_the_window_is_24_hours_from_the_first_use_and_no_replay_extends_it(no_op: bool) -> None:
    registry = Registry()
    if no_op:
        registry.submit(1, "k")
    else:
        registry.finish(registry.admitted(2, "k"))
    target = 1 if no_op else 2
    for _ in range(23):
        registry.now += HOUR
        replay = registry.submit(target, "k")
        assert not replay.created
    registry.now += HOUR
    registry.capacity = Capacity(0, 0, 0, 0)
    assert registry.submit(target, "k").created


def test_the_key_of_an_evicted_operation_is_fresh() -> None:
    registry = Registry(max_history=1)
    first = registry.admitted(2, "k")
    registry.finish(first)
    registry.finish(registry.admitted(2))
    assert registry.of.get("scale_out", first.request_id) is None
    second = registry.submit(2, "k")
    assert second.created and second.request_id != first.request_id


def test_an_id_is_known_in_its_direction_only() -> None:
    registry = Registry()
    operation = registry.admitted()
    assert registry.of.get("scale_in", operation.request_id) is None


# --- states ---


def test_states_go_forward_through_what_lies_between() -> None:
    registry = Registry()
    operation = registry.admitted()
    registry.of.advance(operation, "READY")
    assert [f["state"] for k, f in registry.events if k == "scale.state"] == [
        "PENDING", "CREATING", "HEALTH_CHECKING", "READY",
    ]  # fmt: skip
    for state in ("CREATING", "READY", "ACTIVE", "DRAINING"):
        with pytest.raises(IllegalTransition):
            registry.of.advance(operation, state)  # type: ignore[arg-type]
    assert operation.status == "READY"


def test_a_terminal_state_is_set_once() -> None:
    registry = Registry()
    operation = registry.admitted()
    registry.finish(operation, dirty=True)
    with pytest.raises(IllegalTransition):
        registry.of.finish(operation, "ACTIVE", progress(created=1))
    with pytest.raises(IllegalTransition):
        registry.of.advance(operation, "CREATING")
    assert (operation.status, operation.created, operation.cleanup_required) == ("FAILED", 0, True)
    with pytest.raises(IllegalTransition):
        registry.of.finish(registry.admitted(model="n"), "READY", progress())


def test_what_was_not_heard_is_not_made_up() -> None:
    registry = Registry()
    registry.capacity = Capacity(2, 2, 2, 0)
    operation = registry.admitted(3)
    registry.of.finish(operation, "FAILED", None)
    assert (operation.current, operation.ready, operation.cleanup_required) == (2, 2, True)


def test_the_flag_follows_from_progress_unless_it_is_given() -> None:
    registry = Registry()
    for given_flag, dirty, want in ((None, False, False), (None, True, True), (True, False, True)):
        operation = registry.admitted(2, model=f"m-{given_flag}-{dirty}")
        registry.of.finish(operation, "FAILED", progress(cleanup_required=dirty), cleanup_required=given_flag)
        assert operation.cleanup_required is want


def test_only_a_terminal_operation_is_cleaned_up() -> None:
    registry = Registry()
    with pytest.raises(IllegalTransition):
        registry.of.cleaned(registry.admitted(), "clean")


# --- bounds ---


def test_the_oldest_by_update_goes_first_and_is_counted() -> None:
    registry = Registry(max_history=2)
    dirty = registry.admitted(model="dirty")
    registry.finish(dirty, dirty=True)
    done = []
    for number in range(3):
        done.append(registry.admitted(model="m"))
        registry.now += 1
        registry.finish(done[number])
    assert [registry.of.get("scale_out", o.request_id) is not None for o in done] == [False, True, True]
    registry.of.cleaned(dirty, "clean")  # now it is the newest
    assert registry.of.get("scale_out", dirty.request_id) is not None
    assert registry.of.history_truncated == 2


def test_keys_of_no_ops_are_bounded_and_expire() -> None:
    registry = Registry(max_idempotency_records=10)
    for number in range(50):
        registry.submit(1, f"k{number}")
    assert registry.of.sizes == (0, 10)
    registry.now += 24 * HOUR
    registry.submit(1, "last")
    assert registry.of.sizes == (0, 1)


def test_what_is_unresolved_is_never_evicted() -> None:
    registry = Registry(max_history=3, max_idempotency_records=3)
    held = registry.admitted(2, "held", model="held")
    registry.finish(held, dirty=True)
    live = registry.admitted(2, "live", model="live")
    for number in range(20):
        registry.finish(registry.admitted(2, f"k{number}"))
        registry.submit(1, f"n{number}")
    for operation, key in ((held, "held"), (live, "live")):
        assert registry.of.get("scale_out", operation.request_id) is operation
        assert registry.submit(2, key, model=key).request_id == operation.request_id
    operations, keys = registry.of.sizes
    assert operations <= 3 + 2 * 3 and keys <= 3 + 2 * 3


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "finish", "dirty", "clean", "wait"]),
        st.integers(1, 4),
        st.sampled_from([None, "a", "b", "c"]),
        st.sampled_from(["scale_out", "scale_in"]),
        st.sampled_from(["m", "n"]),
    ),
    max_size=80,
)


@settings(max_examples=150, deadline=None)
@given(_STEPS)
def test_whatever_happens_the_promises_hold(steps: list[tuple[str, int, str | None, Any, str]]) -> None:
    registry = Registry(max_history=4, max_idempotency_records=4)
    answered: dict[tuple[str, str], tuple[tuple[str, int], str | None, float]] = {}
    for what, target, key, direction, model in steps:
        unresolved = registry.of.unresolved(model)
        if what == "wait":
            registry.now += 7 * HOUR
        elif what == "clean" and unresolved is not None and unresolved.terminal:
            registry.of.cleaned(unresolved, "clean")
        elif what in ("finish", "dirty") and unresolved is not None and not unresolved.terminal:
            registry.finish(unresolved, dirty=what == "dirty")
        elif what == "submit":
            registry.capacity = Capacity(2, 2, 2, 0)
            decision = registry.submit(target, key, direction=direction, model=model)
            if decision.created:
                assert unresolved is None
            if key is None or decision.code:
                continue
            known = answered.get((direction, key))
            if known is not None and known[0] == (model, target) and registry.now - known[2] < 24 * HOUR:
                evicted = known[1] is not None and registry.of.get(direction, known[1]) is None
                if not decision.created and not evicted and known[1] is not None:
                    assert decision.request_id == known[1]
            if decision.created or known is None:
                answered[direction, key] = ((model, target), decision.request_id, registry.now)
    operations, keys = registry.of.sizes
    assert operations <= 4 + 2 * 2 and keys <= 4 + 2 * 2
