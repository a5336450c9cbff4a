"""What the shipped protocols do not survive, as docs/principles.md says: who mends one takes its line out there too."""

from __future__ import annotations

import pathlib

from scenarios.load import load, parse
from scenarios.runner import Ran, run_in_sim
from tests.mutants.scaling_scenarios import reconcile, scaling_scenario


def ran(text: str) -> tuple[Ran, set[str]]:
    """One seed of a scenario, and which checks failed."""
    it = run_in_sim(parse(text, "limit.yaml", pathlib.Path()), 1)
    return it, {check.name for check in it.verdict.checks if check.result == "fail"}


def test_a_manager_that_dies_while_its_group_is_made_leaves_a_group_that_nobody_can_name() -> None:
    out = "\n- {at_s: 1, do: scale_out, with: {num_replicas: 2, idempotency_key: out}}"
    kill = "\n- {when: {event: placement.state, nth: 1}, do: restart_empty, target: manager-chat-0}"
    text = scaling_scenario(
        "limit", "A manager dies between a group's creation and the id of it.",
        steps=out + kill + reconcile(75), for_s=30, api="journal: journals", lifecycle="journal: journals",
        service="      gateway: {journal: journals}\n",
        limits="limits: {time_limit_s: 900, converge_within_s: 30, shadow_s: 5}\n",
    )  # fmt: skip
    assert ran(text)[1] == {"no_leaks", "groups_released_once"}
    assert ran(text.replace(kill, ""))[0].verdict.result == "pass"


def test_a_publisher_waits_for_ever_for_an_answer_that_is_lost() -> None:
    shipped = load("publish_live_agents").text
    lost = (
        "- {at_s: 0.5, do: reply_lost, with: {method: barrier, count: 1},"
        " target: {link: {from: publisher-policy, to: controller-policy}}}"
    )
    it, failed = ran(shipped.replace("steps:\n", f"steps:\n  {lost}\n", 1))
    assert failed >= {"run_finished", "every_wait_ends"}
    assert it.result.reason == "deadlock"
