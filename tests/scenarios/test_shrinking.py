"""A ``real:`` block shrinks counts, rates and durations: what it may not change, on which kind of engine."""

from __future__ import annotations

import pytest

from analysis.errors import BadInput
from scenarios.load import Scenario, parse
from scenarios.real_scenario import for_real
from tests.scenarios.conftest import ROOT, SMALL

STEPS = """\
steps:
  - name: kill
    when: {event: engine.accepted, nth: 4, where: {running: 2, actor: chat-1}, from_s: 2}
    do: sigkill
    target: chat-1
acceptance:
  - {name: few, occurs: {event: gateway.moved, where: {replica: chat-1}, at_most: 40}}
  - {name: soon, reached: {event: health.changed, within_s: 9}}
  - {name: some, occurs: {event: gateway.moved, at_least: 3}}
  - answered_fraction: {at_least: 1.0}"""


def changed(kind: str, key: str, value: str) -> Scenario:
    """``SMALL`` with room for more replicas and a step, as its block changes one key of it for a kind of engines."""
    text = (
        SMALL.replace("gpus_per_node: 2", "gpus_per_node: 9").replace("acceptance:", STEPS)
        + f"\nreal: {{set: {{{kind}: {{{key}: {value}}}}}}}\n"
    )
    return for_real(parse(text, "small.yaml", ROOT), kind)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("workload.for_s", "1"),
        ("workload.clients", "1"),
        ("topology.services.chat.initial_replicas", "2"),
        ("topology.services.chat.gateway.read_timeout_s", "900"),
        ("steps.kill.when.nth", "2"),
        ("steps.kill.when.from_s", "1"),
        ("steps.kill.when.where.running", "5"),
        ("steps.kill.when.where.actor", "chat-0"),
        ("acceptance.few.occurs.at_most", "4"),
        ("acceptance.few.occurs.where.replica", "chat-0"),
        ("acceptance.few.occurs.at_least", "1"),
        ("acceptance.soon.reached.within_s", "5"),
        ("acceptance.some.occurs.at_least", "1"),
        ("limits.time_limit_s", "9000"),
        ("limits.converge_within_s", "5"),
    ],
)
def test_what_shrinks_is_good(key: str, value: str) -> None:
    assert changed("emulated", key, value).model.real is not None


SMALLER = "may make counts, rates and durations smaller"
EVENTS = "leaves every criterion on the events that it is on"


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("workload.for_s", "500", SMALLER),
        ("workload.idempotent", "false", SMALLER),
        ("topology.services.chat.initial_replicas", "9", SMALLER),
        ("topology.services.chat.engine", "qwen3-0.6b-rtx4090", SMALLER),
        ("topology.gpus_per_node", "90", SMALLER),
        ("steps.kill.when.nth", "5", SMALLER),
        ("steps.kill.when.from_s", "3", SMALLER),
        ("steps.kill.when.where.running", "1", "as busy a replica, or to a busier one"),
        ("steps.kill.when.where.actor", "gateway-chat-0", "only a replica of the service with a smaller number"),
        ("steps.kill.when.where.actor", "chat-7", "only a replica of the service with a smaller number"),
        ("acceptance.few.occurs.at_most", "41", SMALLER),
        ("acceptance.few.occurs.event", "gateway.routable", EVENTS),
        ("acceptance.few.occurs.where.replica", "chat-5", "only a replica of the service with a smaller number"),
        ("acceptance.few.occurs.where", "{}", EVENTS),
        ("acceptance.few.occurs", "{event: gateway.moved, where: {replica: chat-1}}", EVENTS),
        ("acceptance", "[]", "another length"),
        ("acceptance.soon.reached.within_s", "10", SMALLER),
        ("acceptance.some.occurs.at_least", "0", "something must"),
        ("acceptance.answered_fraction.at_least", "0.5", "at most 0"),
        ("limits.converge_within_s", "500", SMALLER),
        ("limits.shadow_s", "500", SMALLER),
    ],
)
def test_what_does_not_is_refused_with_its_line_and_key(key: str, value: str, why: str) -> None:
    with pytest.raises(BadInput, match=rf"small\.yaml:\d+: real\.set\.emulated.*{why}") as refused:
        changed("emulated", key, value)
    assert "\n" not in str(refused.value)


def test_a_number_is_the_number_that_it_is_whatever_json_makes_of_it() -> None:
    for given, value in (("0.00001", 1e-05), ("1.0e-7", 1e-07)):
        assert changed("emulated", "limits.shadow_s", given).model.limits.shadow_s == value


@pytest.mark.parametrize(
    ("value", "why"), [("2026-01-01", "workload.for_s: must be a valid number"), ("!!binary aGk=", "valid number")]
)
def test_what_json_has_no_word_for_is_refused_as_anything_else(value: str, why: str) -> None:
    with pytest.raises(BadInput, match=rf"small\.yaml:\d+: real\.set\.emulated: --set workload\.for_s=.*{why}"):
        changed("emulated", "workload.for_s", value)


def test_fewer_replicas_let_as_much_more_of_a_fraction_fail_as_they_are_fewer() -> None:
    def asked(fraction: float) -> Scenario:
        text = SMALL.replace("nothing_lost: {}", "answered_fraction: {at_least: 0.9}") + (
            "\nreal: {set: {emulated: {topology.services.chat.initial_replicas: 1, "
            f"acceptance.answered_fraction.at_least: {fraction}}}}}}}\n"
        )
        return for_real(parse(text, "small.yaml", ROOT), "emulated")

    asked(0.8)
    with pytest.raises(BadInput, match=r"is 0\.9 and would become 0\.79: with so many replicas fewer at most 0\.2 may"):
        asked(0.79)


@pytest.mark.parametrize("kind", ["sglang", "sglang-cpu"])
def test_genuine_engines_have_a_model_of_their_own_and_take_longer(kind: str) -> None:
    for key, value in (
        ("workload.for_s", "500"),
        ("topology.services.chat.weights.shards", "4"),
        ("acceptance.soon.reached.within_s", "90"),
        ("limits.converge_within_s", "500"),
    ):
        assert changed(kind, key, value).model.real is not None
    for key, value in (
        ("topology.services.chat.initial_replicas", "9"),
        ("steps.kill.when.nth", "5"),
        ("acceptance.few.occurs.at_most", "41"),
        ("acceptance.answered_fraction.at_least", "0.5"),
    ):
        with pytest.raises(BadInput, match=rf"small\.yaml:\d+: real\.set\.{kind}"):
            changed(kind, key, value)
