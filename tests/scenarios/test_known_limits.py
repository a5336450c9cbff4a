"""What the shipped protocols do not survive, as docs/principles.md says: who mends one takes its line out there too."""

from __future__ import annotations

import pathlib

from analysis.verdict import Judge, Verdict
from scenarios.load import load, parse
from scenarios.runner import preregistered
from scenarios.sim_world import SimStage
from tests.mutants.scaling_scenarios import reconcile, scaling_scenario


def judged(text: str) -> tuple[Verdict, set[str]]:
    """The verdict of one seed, and which checks failed."""
    scenario = parse(text, "limit.yaml", pathlib.Path())
    judge = Judge(preregistered(scenario))
    with SimStage(scenario, 1, batches=[judge.feed_all]) as stage:
        stage.run()
    verdict = judge.verdict()
    return verdict, {check.name for check in verdict.checks if check.result == "fail"}


def test_a_manager_that_dies_while_its_group_is_made_leaves_a_group_that_nobody_can_name() -> None:
    out = "\n- {at_s: 1, do: scale_out, with: {num_replicas: 2, idempotency_key: out}}"
    kill = "\n- {when: {event: placement.state, nth: 1}, do: restart_empty, target: manager-chat-0}"
    text = scaling_scenario(
        "limit", "A manager dies between a group's creation and the id of it.",
        steps=out + kill + reconcile(75), for_s=30, api="journal: journals", lifecycle="journal: journals",
        service="      gateway: {journal: journals}\n",
        limits="limits: {time_limit_s: 900, converge_within_s: 30, shadow_s: 5}\n",
    )  # fmt: skip
    assert judged(text)[1] == {"no_leaks", "groups_released_once"}
    assert judged(text.replace(kill, ""))[0].result == "pass"


def test_a_publisher_waits_for_ever_for_an_answer_that_is_lost() -> None:
    shipped = load("publish_live_agents").text
    lost = (
        "- {at_s: 0.5, do: reply_lost, with: {method: barrier, count: 1},"
        " target: {link: {from: publisher-policy, to: controller-policy}}}"
    )
    verdict, failed = judged(shipped.replace("steps:\n", f"steps:\n  {lost}\n", 1))
    assert failed >= {"run_finished", "every_wait_ends"}
    assert "deadlock" in str([check.observed for check in verdict.checks if check.name == "run_finished"])
