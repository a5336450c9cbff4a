"""The scenarios that wrong weight updates and wrong registrations run in: one service of three replicas."""

from __future__ import annotations

from tests.mutants.policy_scenarios import policy_scenario


def _scenario(
    name: str,
    summary: str,
    *,
    publishing: str,
    steps: str,
    acceptance: str = "",
    agents: str = "sessions: 12, turns: 14, think_s: 1.5",
    components: str = "{}",
    shard_gb: float = 0.05,
    output: str = "uniform: {low: 8, high: 16}",
    further: str = "",
) -> str:
    return policy_scenario(
        name, summary, arrivals=f"{{agents: {{{agents}}}}}", publishing=publishing, steps=steps, acceptance=acceptance,
        service=f"      admin: {{connect_timeout_s: 0.3}}\n      components: {components}\n{further}",
        replicas=3, weights=f"shards: 2, shard_gb: {shard_gb}", output=output,
        limits="time_limit_s: 400, converge_within_s: 60, shadow_s: 200",
    )  # fmt: skip


_HEALTH = "      health: {replace_after_s: 3}\n"
_TWICE = """
- {at_s: 1, do: publish, with: {model_step: 1}}
- {at_s: 4, do: publish, with: {model_step: 2}}
"""


def _done(times: int) -> str:
    return f"\n- occurs: {{event: publication.ended, where: {{outcome: done}}, at_least: {times}}}\n"


def _update(transport: str, controller: str = "fence: true") -> str:
    return (
        f"{{update: {{transport: {transport}, ranks: 3, bucket_gb: 0.04, post_timeout_s: 2, timeout_s: 20}}, "
        f"controller: {{{controller}}}, entrypoint: {{admission_timeout_s: 60}}}}"
    )


def _past_a_failure(route: str, sender: str) -> str:
    """One engine takes no part in the second update; it is replaced, and the third one must meet its successor."""
    return f"""
- {{at_s: 1, do: publish, with: {{model_step: 1}}}}
- at_s: 3
  do: connect_timeout
  target: {{link: {{from: "{sender}", to: policy-1}}}}
  with: {{method: {route}, count: 5}}
- {{at_s: 4, do: publish, with: {{model_step: 2}}}}
- when: {{event: controller.fenced, where: {{what: rejoined}}}}
  after_s: 6
  do: publish
  with: {{model_step: 3}}
"""


def _paused_late(at_s: float) -> str:
    """From ``at_s`` on one engine is not reached by a pause; a version is published meanwhile."""
    return f"""- at_s: {at_s}
  do: connect_timeout
  target: {{link: {{from: controller-policy, to: policy-1}}}}
  with: {{method: /pause_generation, count: 3}}
- {{at_s: 1.5, do: publish, with: {{model_step: 1}}}}
"""


_FROM_TENSOR = "/update_weights_from_tensor"
_PROXY = (
    "{gates: false, proxy: {registers: entrypoints, registrations: "
    "{register_timeout_s: 0.2, delete_timeout_s: 0.2, retry_interval_s: 3}"
)
_KILL = """
- when: {event: engine.accepted, where: {actor: policy-1}, from_s: 2}
  do: sigkill
  target: replica_of_trigger
  must_hit: {in_flight: {at_least: 1}}
"""
_LINK = "{link: {from: registrations-policy, to: proxy-policy}}"

WEIGHT_SCENARIOS: dict[str, str] = {
    "ranks_ipc": _scenario(
        "ranks_ipc", "Two versions come from training ranks, bucket by bucket.", publishing=_update("ipc"), steps=_TWICE
    ),
    "ranks_fence": _scenario(
        "ranks_fence",
        "An engine takes no bucket: it is fenced, replaced, rejoins, and takes part in the next publication.",
        publishing=_update("ipc"),
        steps=_past_a_failure(_FROM_TENSOR, "rank-policy-*"),
        further=_HEALTH,
        agents="sessions: 12, turns: 24, think_s: 1.5",
        acceptance=_done(4),
    ),
    "ranks_restart": _scenario(
        "ranks_restart",
        "A rank is restarted with nothing in the middle of an update; the others leave, and a second try completes.",
        publishing=_update("nccl"),
        steps="""
- {at_s: 2, do: publish, with: {model_step: 1, attempts: 3}}
- when: {event: engine.bucket, where: {actor: policy-0, bucket: 0}, from_s: 1, phase: before}
  do: restart_empty
  target: rank-policy-2
""",
        acceptance=_done(2),
    ),
    "disk_inactive": _scenario(
        "disk_inactive",
        "Health and controller do not reach an engine: the publication goes on without it.",
        publishing="{controller: {fence: true}, entrypoint: {admission_timeout_s: 60}}",
        steps="""
- at_s: 0.5
  do: connect_timeout
  target: {link: {from: "[hc]*-policy*", to: policy-1}}
  for_s: 13
- {at_s: 9, do: publish, with: {model_step: 1}}
- {at_s: 20, do: publish, with: {model_step: 2}}
""",
        acceptance=_done(3),
    ),
    "disk_twice": _scenario(
        "disk_twice", "Two versions are published from their exports.", publishing="{}", steps=_TWICE
    ),
    "slow_load": _scenario(
        "slow_load",
        "An update takes longer than health would wait for a paused engine.",
        publishing="{entrypoint: {admission_timeout_s: 120}}",
        steps="\n- {at_s: 1, do: publish, with: {model_step: 1}}\n",
        shard_gb=8.0,
        further="      health: {replace_after_s: 1}\n",
        acceptance=_done(2),
    ),
    "native_pause": _scenario(
        "native_pause",
        "A native pause is asked for while a publication drains, and is refused: no turn is aborted.",
        publishing="{}",
        components="{publisher: 'tests.mutants.publishing_more:PausesBeside'}",
        steps=_TWICE,
        acceptance="\n- occurs: {event: turn.done, where: {finish_reason: abort}, at_most: 0}\n",
        agents="sessions: 24, turns: 8, think_s: 0.1",
    ),
    "native_abort": _scenario(
        "native_abort",
        "A native pause flags every entrypoint, and reaches one engine late: what ends there meanwhile is aborted.",
        publishing="{}",
        components="{publisher: 'tests.mutants.publishing_more:PausesInBetween'}",
        steps="\n" + _paused_late(1),
        acceptance=_done(2),
        agents="sessions: 24, turns: 4, think_s: 0.2",
        output="uniform: {low: 60, high: 100}",
    ),
    "failed_before_abort": _scenario(
        "failed_before_abort",
        "A turn does not get to its engine; later on a native pause aborts others.",
        publishing="{entrypoint: {connect_timeout_s: 0.3}}",
        components="{publisher: 'tests.mutants.publishing_more:PausesInBetween'}",
        steps="""
- at_s: 0.3
  do: connect_timeout
  target: {link: {from: entrypoint-policy-0, to: policy-0}}
  with: {method: /generate, count: 1}
"""
        + _paused_late(1.2),
        acceptance=_done(2),
        agents="sessions: 24, turns: 4, think_s: 0.2",
        output="uniform: {low: 60, high: 100}",
    ),
    "native_abort_over": _scenario(
        "native_abort_over",
        "A native pause aborts what runs; the turns after it are whole again.",
        publishing="{}",
        components="{publisher: 'tests.mutants.publishing_more:PausesInBetween'}",
        steps="""
- {at_s: 1.5, do: publish, with: {model_step: 1}}
""",
        acceptance=_done(2),
        agents="sessions: 24, turns: 10, think_s: 0.2",
        output="uniform: {low: 40, high: 60}",
    ),
    "replaced_in_barrier": _scenario(
        "replaced_in_barrier",
        "An operator replaces an updated replica before the resumption: it is left out, to the next publication.",
        publishing="{controller: {fence: true}, entrypoint: {admission_timeout_s: 60}}",
        components="{publisher: 'tests.mutants.publishing_more:ReplacedInTheBarrier'}",
        steps="\n- {at_s: 1, do: publish, with: {model_step: 1}}\n- {at_s: 9, do: publish, with: {model_step: 2}}\n",
        acceptance=_done(3),
    ),
    "native_pause_after_failure": _scenario(
        "native_pause_after_failure",
        "After a failed preparation a native pause is asked for, and is refused: the barrier is still there.",
        publishing="{controller: {call_timeout_s: 0.1, prepare_timeout_s: 0.15}}",
        components="{publisher: 'tests.mutants.publishing_more:PausesAfterFailure'}",
        steps="""
- at_s: 0.5
  do: reply_lost
  target: {link: {from: controller-policy, to: gate-policy-0}}
  with: {method: seal, count: 2}
- {at_s: 1, do: publish, with: {model_step: 1, attempts: 3, retry_s: 2}}
""",
        acceptance=_done(2) + "- occurs: {event: turn.done, where: {finish_reason: abort}, at_most: 0}\n",
        agents="sessions: 24, turns: 3, think_s: 0.1",
        output="uniform: {low: 100, high: 150}",
    ),
    "many_wait": _scenario(
        "many_wait",
        "Many turns wait at closed gates; what is asked of a gate does not wait behind them.",
        publishing="{entrypoint: {admission_timeout_s: 100}, controller: {resume_timeout_s: 10}}",
        steps="\n- {at_s: 1, do: publish, with: {model_step: 1, attempts: 3}}\n",
        agents="sessions: 60, turns: 12, think_s: 0.3",
        shard_gb=1.0,
        acceptance=_done(2),
    ),
    "sessions_quick": _scenario(
        "sessions_quick",
        "Sessions are routed without a pause, whatever the trainer does.",
        publishing="{gates: false}",
        steps="",
        acceptance="\n- latency_p99: {at_most_s: 2.5}\n",
    ),
    "proxy_kill": _scenario(
        "proxy_kill",
        "A replica is killed behind a proxy; it is deleted there and registered again, once each.",
        publishing=_PROXY + "}}",
        steps=_KILL,
    ),
    "proxy_stall": _scenario(
        "proxy_stall",
        "The answer of a registration stalls after it was made.",
        publishing=_PROXY + "}}",
        steps=_KILL
        + f"""- when: {{event: proxy.post, where: {{effect: deleted}}}}
  do: reply_lost
  target: {_LINK}
  with: {{method: post, count: 1}}
""",
    ),
    "proxy_busy": _scenario(
        "proxy_busy",
        "The proxy answers two POSTs with 503.",
        publishing=_PROXY + ", busy_answers: 2}}",
        steps=_KILL,
    ),
    "proxy_unreachable_for_new": _scenario(
        "proxy_unreachable_for_new",
        "No connection for a registration in any of its attempts; it is made anew later.",
        publishing=_PROXY + "}}",
        steps=_KILL
        + f"""- when: {{event: proxy.post, where: {{effect: deleted}}}}
  do: request_lost
  target: {_LINK}
  with: {{method: connect, count: 6}}
""",
        agents="sessions: 24, turns: 14, think_s: 1.5",
    ),
    "proxy_unreachable_for_delete": _scenario(
        "proxy_unreachable_for_delete",
        "No connection for a deletion in any of its attempts; the backend is back before it is made anew.",
        publishing=_PROXY.replace("retry_interval_s: 3", "retry_interval_s: 60") + "}}",
        steps=f"""
- {{at_s: 1, do: request_lost, target: {_LINK}, with: {{method: connect, count: 5}}}}"""
        + _KILL,
        agents="sessions: 24, turns: 14, think_s: 1.5",
    ),
    "proxy_probe": _scenario(
        "proxy_probe",
        "A probe goes through the router, and its session is retired.",
        publishing="{proxy: {registers: router}}",
        steps="",
    ),
}
