"""The scenarios that wrong session servers run in: agents that speak HTTP, two replicas, one kind of trouble each."""

from __future__ import annotations

from tests.mutants.policy_scenarios import policy_scenario


def _scenario(
    name: str,
    summary: str,
    *,
    http: str,
    gates: bool = False,
    steps: str = "",
    acceptance: str = "",
    agents: str = "sessions: 12, turns: 5, think_s: 0.5",
    output: str = "uniform: {low: 8, high: 16}",
    admin: str = "{}",
) -> str:
    server = "session_server: {gated_streams: true, forward_timeout_s: 60, admission_timeout_s: 20}"
    return policy_scenario(
        name, summary, arrivals=f"{{agents: {{{agents}, http: {{{http}}}}}}}", steps=steps, acceptance=acceptance,
        publishing=f"{{gates: {str(gates).lower()}, controller: {{prepare_timeout_s: 20}}, {server}}}",
        service=f"      admin: {admin}\n", prompt="uniform: {low: 4, high: 8}", output=output,
        limits="time_limit_s: 300, converge_within_s: 40, shadow_s: 200",
    )  # fmt: skip


def _links(fault: str, parameters: str, at_s: float = 0.2, to: str = "traces-policy", ends: str = "") -> str:
    """A fault of messages on the way from each session server to the store, or to its own replica."""
    return "\n" + "".join(
        f"- {{at_s: {at_s}, do: {fault}, target: {{link: {{from: entrypoint-policy-{number}, "
        f"to: {to.format(number=number)}}}}}, with: {{{parameters}}}{ends}}}\n"
        for number in (0, 1)
    )


def _refused(name: str, status: int, what: str) -> str:
    return _scenario(
        name,
        f"A replica answers {status} and generates all the same; a version is published meanwhile.",
        http="stream: 0.5",
        gates=True,
        steps=_links("bad_answer", f'what: {what}, method: "/v1/*"', 1.0, "policy-{number}", ", for_s: 1")
        + "- {at_s: 1.4, do: publish, with: {model_step: 1}}\n",
        output="uniform: {low: 120, high: 160}",
        agents="sessions: 48, at_once: 12, turns: 2, think_s: 0.1",
    )


_PUBLISHED = "\n- occurs: {event: publication.ended, where: {outcome: done}, at_least: 2}\n"

SESSION_SCENARIOS: dict[str, str] = {
    "sessions_over_http": _scenario(
        "sessions_over_http",
        "Agents of both formats, some with numbers for ids, and calls that are no generations.",
        http="integer_ids: 0.5, other_calls: 0.5",
        gates=True,
    ),
    "sessions_slow_store": _scenario(
        "sessions_slow_store",
        "What is written to the trace store arrives half a second late.",
        http="anthropic: 0.5",
        steps=_links("delayed_delivery", "method: append, delay_s: 0.5, count: 12"),
    ),
    "sessions_left": _scenario(
        "sessions_left", "Half of the clients leave before the end of their answer.", http="leave: 0.5"
    ),
    "sessions_lost_store": _scenario(
        "sessions_lost_store",
        "The trace store does not hear of some questions and some writes; then a version is published.",
        http="stream: 0.5",
        gates=True,
        steps=_links("request_lost", "method: search, count: 2")
        + _links("request_lost", "method: append, count: 6", 0.4)[1:]
        + "- {at_s: 25, do: publish, with: {model_step: 1}}\n",
        acceptance=_PUBLISHED,
        agents="sessions: 12, turns: 8, think_s: 6",
    ),
    "sessions_nonsense": _scenario(
        "sessions_nonsense",
        "Backends answer with pages in place of JSON.",
        http="stream: 0.5",
        steps=_links("bad_answer", 'what: not_json, method: "/v1/*", count: 6', to="policy-{number}"),
    ),
    "sessions_aborted": _scenario(
        "sessions_aborted",
        "An operator's pause aborts long turns in mid-generation.",
        http="anthropic: 0",
        steps="\n- {at_s: 0.5, do: admin, with: {operation: pause}}\n",
        output="uniform: {low: 40, high: 60}",
        agents="sessions: 24, at_once: 12, turns: 4, think_s: 0.1",
        admin="{pause_mode: abort, pause_hold_s: 0.5}",
    ),
    "sessions_refused": _refused("sessions_refused", 400, "refused_while_generating"),
    "sessions_throttled": _refused("sessions_throttled", 429, "throttled_while_generating"),
    "sessions_published": _scenario(
        "sessions_published",
        "Versions are published under long streamed turns.",
        http="stream: 0.7",
        gates=True,
        steps="\n- {at_s: 1, do: publish, with: {model_step: 1}}\n- {at_s: 2.5, do: publish, with: {model_step: 2}}\n",
        acceptance=_PUBLISHED,
        output="uniform: {low: 40, high: 60}",
        agents="sessions: 72, at_once: 12, turns: 4, think_s: 0.1",
    ),
}
