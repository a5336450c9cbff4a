"""Training runs with a trace store: what they count, and that they are judged whatever the store says of itself."""

from __future__ import annotations

import pathlib
from typing import Any

import yaml

from analysis.verdict import Judge, Verdict
from protocol.evidence import Event
from protocol.rollout.groups import RolloutGroup
from protocol.rollout.trace_store import RolloutTraceStore
from protocol.training.learner import Learner
from scenarios.load import parse
from scenarios.runner import preregistered
from scenarios.sim_world import SimStage
from tests.mutants.traces_scenarios import TRACES_SCENARIOS


class NeverCleansUp(Learner):
    """Leaves everything where it is."""

    async def _clean_up(self, batch: tuple[RolloutGroup, ...]) -> str:
        return "own"


class SaysNothing(RolloutTraceStore):
    """A store of a user's own: it forgets a session now and then, and tells nobody."""

    async def append(self, session_id: str, prefix: str, segments: Any) -> None:
        await super().append(session_id, prefix, segments)
        if sum(map(len, self._trees.values())) > 60:
            trees = self._trees
            self._trees = {}
            del trees


def run(changes: dict[str, Any], components: dict[str, type], name: str = "traces") -> tuple[list[Event], Verdict]:
    data = yaml.safe_load(TRACES_SCENARIOS[name])
    service = data["topology"]["services"]["policy"]
    service["components"] = {part: f"{cls.__module__}:{cls.__name__}" for part, cls in components.items()}
    for key, value in changes.items():
        service["rollouts"][key] = value
    scenario = parse(yaml.safe_dump(data), "test.yaml", pathlib.Path())
    events: list[Event] = []
    judge = Judge(preregistered(scenario))
    with SimStage(scenario, 1, sinks=[events.append, judge.feed]) as stage:
        assert stage.run().reason == "completed"
    return events, judge.verdict()


def counts(events: list[Event], part: str) -> Any:
    return next(e.data["counts"] for e in events if e.kind == "rollouts.ended" and e.data["part"] == part)


def row(verdict: Verdict, name: str) -> str:
    return next(check.result for check in verdict.checks if check.name == name)


def test_what_a_run_counts_does_not_depend_on_the_cleanup() -> None:
    """E14: releasing sessions changes nothing of what is produced, filtered, failed and trained on."""
    alone = {"evaluator": None, "buffer": {"max_staleness": 9, "keep_expired": True}}
    cleaned, clean = run(alone, {})
    left, dirty = run(alone, {"learner": NeverCleansUp})
    for part in ("producer", "learner"):
        assert counts(cleaned, part) == counts(left, part)
    assert counts(cleaned, "producer")["failed"] and counts(cleaned, "learner")["steps"] > 1
    assert row(clean, "store_holds_the_buffer") == "pass" and row(dirty, "store_holds_the_buffer") == "fail"
    assert row(clean, "no_reference_left") == "pass" and row(dirty, "no_reference_left") == "fail"


def test_a_store_that_says_nothing_of_itself_is_judged_all_the_same() -> None:
    events, verdict = run({}, {"trace_store": SaysNothing})
    assert row(verdict, "trace_survives") == "fail" and verdict.result == "fail"


def test_conversations_have_turns_of_several_versions() -> None:
    events, verdict = run({}, {})
    exported = [event.data["steps"] for event in events if event.kind == "trace.exported"]
    assert verdict.result == "pass" and any(len(steps) > 1 for steps in exported)
    for steps in exported:  # versions of a conversation never go back
        assert [step for step, _ in steps] == sorted({step for step, _ in steps})
