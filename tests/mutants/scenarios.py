"""The scenarios that the mutants run in: small, each made to show one kind of defect, judged as any other."""

from __future__ import annotations

import json

_SERVICE = """
      initial_replicas: 3
      engine: tiny-cpu
"""

_ARRIVALS = """
  service: chat
  arrivals: {poisson: {rate_per_s: 30}}
  prompt_tokens: {uniform: {low: 20, high: 100}}
  output_tokens: {uniform: {low: 16, high: 64}}
  for_s: 12
"""

_LIMITS = "limits: {time_limit_s: 200, converge_within_s: 40, shadow_s: 40}\n"


def _scenario(
    name: str,
    summary: str,
    *,
    steps: str = "",
    acceptance: str = "",
    service: str = "",
    workload: str = _ARRIVALS,
    extra_workload: str = "",
    nodes: int = 1,
    limits: str = _LIMITS,
) -> str:
    works = "workload:" + workload if not extra_workload else "workload:\n" + _item(workload) + _item(extra_workload)
    return (
        f"name: {name}\nsummary: {json.dumps(summary)}\n"
        f"topology:\n  nodes: {nodes}\n  gpus_per_node: 8\n  services:\n    chat:{_SERVICE}{service}\n"
        f"{works}steps:{steps or ' []'}\nacceptance:{acceptance or ' []'}\n{limits}"
    )


def _item(mapping: str) -> str:
    """A mapping, indented by two, as an item of a list."""
    return "-" + mapping.strip("\n")[1:] + "\n"


_KILL = """
- when: {event: engine.accepted, where: {actor: chat-0}, nth: 40}
  do: sigkill
  target: chat-0
  must_hit: {in_flight: {at_least: 1}}
"""

SCENARIOS: dict[str, str] = {
    "kill": _scenario(
        "mutant_kill",
        "A replica is killed with requests in flight; every request is answered and few had to move.",
        service="      health: {interval_s: 3, sync_interval_s: 3}\n",
        steps=_KILL,
        acceptance="\n- answered_fraction: {at_least: 1.0}\n- occurs: {event: gateway.moved, at_most: 15}\n",
    ),
    "nobody_connects": _scenario(
        "mutant_nobody_connects",
        "For a moment no connection to any replica comes about, faster than health can look at all of them.",
        service=(
            "      gateway: {connect_timeout_s: 0.2, backoff_s: 0.2, routable_wait_s: 1, attempts: 4}\n"
            "      health: {sync_interval_s: 3}\n"
        ),
        steps="""
- at_s: 4
  do: connect_timeout
  target: {link: {from: gateway-chat-0, to: "chat-*"}}
  with: {method: /generate}
  for_s: 0.3
  must_hit: {hits: {at_least: 3}}
""",
        acceptance="\n- answered_fraction: {at_least: 1.0}\n",
    ),
    "lost_replies": _scenario(
        "mutant_lost_replies",
        "Some answers to generations are lost after their effect; idempotent requests are sent again.",
        service="      gateway: {read_timeout_s: 2, backoff_s: 1}\n",
        steps="""
- at_s: 2
  do: reply_lost
  target: {link: {from: "*", to: "*"}}
  with: {method: /generate, count: 4}
""",
        acceptance="\n- answered_fraction: {at_least: 1.0}\n",
    ),
    "lost_replies_once_only": _scenario(
        "mutant_lost_replies_once_only",
        "Answers are lost after their effect, and no request may be sent twice.",
        service="      gateway: {read_timeout_s: 2}\n",
        workload=_ARRIVALS + "  idempotent: false\n",
        steps="""
- at_s: 2
  do: read_timeout
  target: {link: {from: "*", to: "*"}}
  with: {method: /generate, count: 4}
""",
    ),
    "once_only": _scenario(
        "mutant_once_only",
        "No fault; no request may take effect twice.",
        workload=_ARRIVALS + "  idempotent: false\n",
    ),
    "too_long": _scenario(
        "mutant_too_long",
        "Ten requests exceed the context length and are refused with 400, once each.",
        workload="""
  service: chat
  arrivals: {constant: {rate_per_s: 20}}
  prompt_tokens: {fixed: 50}
  output_tokens: {fixed: 16}
  requests: 50
""",
        extra_workload="""
  service: chat
  arrivals: {constant: {rate_per_s: 3}}
  prompt_tokens: {fixed: 600}
  output_tokens: {fixed: 16}
  requests: 10
""",
        acceptance="""
- occurs: {event: engine.refused, at_most: 10}
""",
    ),
    "too_long_served": "",
    "reused_port": _scenario(
        "mutant_reused_port",
        "Answers of a replica are lost, it is killed, and its successor gets its port while those calls are open.",
        service="      gateway: {read_timeout_s: 15}\n",
        steps="""
- at_s: 2
  do: reply_lost
  target: {link: {from: "*", to: chat-0}}
  with: {method: /generate, count: 2}
- when: {event: engine.accepted, where: {actor: chat-0}, from_s: 5}
  do: sigkill
  target: chat-0
""",
        workload=_ARRIVALS.replace("for_s: 12", "for_s: 30"),
    ),
    "flush_read_timeout": _scenario(
        "mutant_flush_read_timeout",
        "A flush is executed and its answer stalls: it may not be sent again blindly.",
        service="      admin: {read_timeout_s: 2}\n",
        steps="""
- at_s: 1
  do: read_timeout
  target: {link: {from: "*", to: "*"}}
  with: {method: /flush_cache, count: 1}
- {at_s: 2, do: admin, with: {operation: flush}}
""",
    ),
    "flush_connect_timeout": _scenario(
        "mutant_flush_connect_timeout",
        "One connection attempt of a flush times out: nothing was sent, and each replica gets its flush.",
        service="      admin: {connect_timeout_s: 0.5}\n",
        steps="""
- at_s: 1
  do: connect_timeout
  target: {link: {from: "*", to: "*"}}
  with: {method: /flush_cache, count: 1}
- {at_s: 2, do: admin, with: {operation: flush}}
""",
        acceptance="\n- occurs: {event: engine.post, where: {route: /flush_cache}, at_least: 3}\n",
    ),
    "flush_unreachable": _scenario(
        "mutant_flush_unreachable",
        "For 20 s no connection of a flush succeeds: five attempts a replica, and no more.",
        service="      admin: {connect_timeout_s: 0.5}\n",
        steps="""
- at_s: 1
  do: connect_timeout
  target: {link: {from: "*", to: "*"}}
  with: {method: /flush_cache}
  for_s: 20
- {at_s: 2, do: admin, with: {operation: flush}}
""",
        workload=_ARRIVALS.replace("for_s: 12", "for_s: 25"),
        acceptance="\n- occurs: {event: admin.attempt, at_most: 15}\n",
    ),
    "pause_read_timeout": _scenario(
        "mutant_pause_read_timeout",
        "A pause takes effect and its answer stalls: the replica must be continued all the same.",
        service="      admin: {read_timeout_s: 2}\n",
        steps="""
- at_s: 1
  do: read_timeout
  target: {link: {from: "*", to: "*"}}
  with: {method: /pause_generation, count: 1}
- {at_s: 2, do: admin, with: {operation: pause}}
""",
        acceptance="\n- occurs: {event: engine.resumed, at_least: 3}\n",
    ),
    "pause_held": _scenario(
        "mutant_pause_held",
        "A planned pause outlasts the patience of health: nobody may be replaced for it.",
        service="      admin: {pause_hold_s: 12}\n      health: {replace_after_s: 3}\n",
        steps="\n- {at_s: 2, do: admin, with: {operation: pause}}\n",
        acceptance="\n- occurs: {event: recovery.began, at_most: 0}\n",
    ),
    "stopped": _scenario(
        "mutant_stopped",
        "A replica is stopped for long: it is replaced, and what waits on it is answered by others.",
        service="      health: {replace_after_s: 5}\n",
        steps="""
- {when: {event: engine.accepted, where: {actor: chat-1}, nth: 30}, do: sigstop, target: chat-1, for_s: 60}
""",
        acceptance=(
            "\n- reached: {event: recovery.step, where: {stage: published}, after: actor.stopped, within_s: 25}\n"
        ),
    ),
    "stopped_for_a_moment": _scenario(
        "mutant_stopped_for_a_moment",
        "A replica is stopped for less than it takes to judge it: nobody is replaced.",
        steps="""
- {when: {event: engine.accepted, where: {actor: chat-1}, nth: 30}, do: sigstop, target: chat-1, for_s: 2.5}
""",
        acceptance="\n- occurs: {event: recovery.began, at_most: 0}\n",
    ),
    "wedged": _scenario(
        "mutant_wedged",
        "A replica stops to make progress while /ready says 200: it is found by its counters and replaced.",
        service="      health: {stall_window_s: 3, stall_check_s: 1}\n",
        steps="""
- {when: {event: engine.accepted, where: {actor: chat-1}, nth: 30}, do: wedge, target: chat-1, for_s: 100}
""",
        acceptance=(
            "\n- reached: {event: recovery.step, where: {stage: published}, after: fault.injected, within_s: 25}\n"
        ),
        workload=_ARRIVALS.replace("for_s: 12", "for_s: 20"),
    ),
    "answers_lost": _scenario(
        "mutant_answers_lost",
        "A replica's answers are lost and it falls idle, with calls open until their time-out: nobody is replaced.",
        service="      gateway: {read_timeout_s: 14}\n      health: {stall_window_s: 3, stall_check_s: 1}\n",
        steps="""
- {at_s: 2, do: reply_lost, target: {link: {from: gateway-chat-0, to: chat-1}}, with: {method: /generate, count: 8}}
""",
        acceptance="\n- occurs: {event: recovery.began, at_most: 0}\n",
        workload=_ARRIVALS.replace("for_s: 12", "for_s: 20"),
    ),
    "quiet": _scenario(
        "mutant_quiet",
        "No fault at all: every request is answered.",
        acceptance="\n- answered_fraction: {at_least: 1.0}\n",
    ),
    "torn": _scenario(
        "mutant_torn",
        "The newest export is torn in writing; the replica that is restarted must not serve it.",
        service="      weights: {version: v1, shard_gb: 0.01}\n",
        steps="""
- {at_s: 1, do: torn_export, target: {path: exports/}, with: {count: 1}}
- {at_s: 2, do: export, with: {version: v2}}
- {when: {event: engine.accepted, from_s: 5}, do: sigkill, target: busiest_replica}
""",
        acceptance="\n- reached: {event: recovery.step, where: {stage: published}, within_s: 60}\n",
        workload=_ARRIVALS.replace("for_s: 12", "for_s: 20"),
    ),
    "lost_update": _scenario(
        "mutant_lost_update",
        "A restarted replica's weight update is lost on its way: it must not serve the weights it started with.",
        service=(
            "      weights: {version: v1, shard_gb: 0.01}\n      admin: {update_timeout_s: 3, reconcile_timeout_s: 2}\n"
        ),
        steps="""
- at_s: 1
  do: request_lost
  target: {link: {from: "*", to: "*"}}
  with: {method: /update_weights_from_disk, count: 1}
- {when: {event: engine.accepted, from_s: 3}, do: sigkill, target: busiest_replica}
""",
        acceptance="""
- occurs: {event: request.done, where: {version: default}, at_most: 0}
- reached: {event: recovery.step, where: {stage: published}, within_s: 60}
""",
        workload=_ARRIVALS.replace("for_s: 12", "for_s: 25"),
    ),
    "restart_with_export": _scenario(
        "mutant_restart_with_export",
        "A killed replica comes back with the exported weights, recovered once.",
        service=(
            "      weights: {version: v1, shard_gb: 0.5}\n"
            "      health: {report_interval_s: 0.5, replace_after_s: 1}\n      recovery: {export_backoff_s: 0.1}\n"
        ),
        steps="\n- {when: {event: engine.accepted, from_s: 3}, do: sigkill, target: busiest_replica}\n",
        acceptance="""
- occurs: {event: recovery.began, at_most: 1}
""",
        workload=_ARRIVALS.replace("for_s: 12", "for_s: 20"),
    ),
    "restart_serves_export": "",
    "export_later": _scenario(
        "mutant_export_later",
        "Weights are exported in mid-run, and a killed replica must come back with them.",
        service=(
            "      components: {trainer: 'tests.mutants.exporters:FillingTrainer'}\n      weights: {shard_gb: 0.01}\n"
        ),
        steps="""
- {at_s: 2, do: export, with: {version: v2}}
- {when: {event: engine.accepted, from_s: 4}, do: sigkill, target: busiest_replica}
""",
        acceptance="\n- reached: {event: recovery.step, where: {stage: published}, within_s: 60}\n",
        workload=_ARRIVALS.replace("for_s: 12", "for_s: 20"),
    ),
    "slow_for_a_while": _scenario(
        "mutant_slow_for_a_while",
        "All replicas are too slow for a while; what they were sent runs on until they see that nobody waits for it.",
        service="      gateway: {read_timeout_s: 0.5, attempts: 5, backoff_s: 0.1, routable_wait_s: 20}\n",
        steps="".join(
            f"\n- {{when: {{event: engine.accepted, where: {{actor: chat-{number}}}, from_s: 3}}, do: slow, "
            f"target: chat-{number}, with: {{percent: 20000}}, for_s: 3.5}}"
            for number in range(3)
        )
        + "\n",
        acceptance="\n- answered_fraction: {at_least: 1.0}\n",
        workload=_ARRIVALS.replace("rate_per_s: 30", "rate_per_s: 12"),
    ),
    "impatient": _scenario(
        "mutant_impatient",
        "No fault; clients that wait a little longer than any answer takes.",
        workload=_ARRIVALS + "  patience_s: 0.25\n",
    ),
    "brief_waits": _scenario(
        "mutant_brief_waits",
        "No fault; a gateway whose time-outs are a little longer than any answer takes.",
        service="      components: {gateway: 'tests.mutants.loops:WaitsBriefly'}\n",
        acceptance="\n- occurs: {event: gateway.moved, at_most: 0}\n",
    ),
    "waiting_gateway_stopped": _scenario(
        "mutant_waiting_gateway_stopped",
        "A gateway with time-outs of its own is stopped past them while its answers arrive: it finds them afterwards.",
        service="      components: {gateway: 'tests.mutants.loops:WaitsByItself'}\n      gateway_cost_s: 0\n",
        steps="""
- {when: {event: gateway.picked, from_s: 3}, do: sigstop, target: gateway-chat-0, for_s: 6}
""",
        acceptance="\n- occurs: {event: gateway.moved, at_most: 0}\n",
    ),
    "gateway_stopped": _scenario(
        "mutant_gateway_stopped",
        "The gateway is stopped for a while: what arrives for it waits.",
        steps="""
- {when: {event: gateway.picked, from_s: 3}, do: sigstop, target: gateway-chat-0, for_s: 2}
""",
        acceptance="\n- answered_fraction: {at_least: 1.0}\n",
    ),
}
SCENARIOS["too_long_served"] = SCENARIOS["too_long"].replace(
    "- occurs: {event: engine.refused, at_most: 10}",
    "- occurs: {event: gateway.released, where: {ok: true}, at_most: 50}",
)
SCENARIOS["restart_serves_export"] = SCENARIOS["restart_with_export"].replace(
    "- occurs: {event: recovery.began, at_most: 1}",
    "- occurs: {event: request.done, where: {version: default}, at_most: 0}",
)
