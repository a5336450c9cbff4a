"""The scenarios of the mutants of scaling: a tiny engine, long requests, so that something is always in flight."""

from __future__ import annotations

import json

_BUSY = """
  service: chat
  arrivals: {closed_loop: {sessions: 8}}
  prompt_tokens: {fixed: 40}
  output_tokens: {fixed: 400}
"""
_LONG = "limits: {time_limit_s: 600, converge_within_s: 20, shadow_s: 2}\n"
ENDS_CLEAN = '\n- reached: {event: scale.answered, where: {state: FAILED, cleanup: "false"}, within_s: 120}\n'


def scaling_scenario(
    name: str,
    summary: str,
    *,
    steps: str,
    for_s: float,
    acceptance: str = " []",
    initial: int = 1,
    api: str = "",
    lifecycle: str = "",
    service: str = "",
    limits: str = _LONG,
    workload: str = _BUSY,
) -> str:
    return (
        f"name: mutant_{name}\nsummary: {json.dumps(summary)}\n"
        "topology:\n  nodes: 1\n  gpus_per_node: 8\n  services:\n    chat:\n"
        f"      initial_replicas: {initial}\n      engine: tiny-cpu\n"
        f"      scaling: {{api: {{{api}}}, lifecycle: {{{lifecycle}}}}}\n{service}"
        f"workload:{workload}  for_s: {for_s}\nsteps:{steps}\nacceptance:{acceptance}\n{limits}"
    )


OUT_2 = "\n- {at_s: 1, do: scale_out, with: {num_replicas: 2, idempotency_key: out}}"
_OUT_3 = "\n- {at_s: 1, do: scale_out, with: {num_replicas: 3, idempotency_key: out}}"
_IN_AT_7 = "\n- {at_s: 7, do: scale_in, with: {num_replicas: 1, idempotency_key: in, timeout_s: 30}}"
_PARKED_AT_7 = "\n- {at_s: 7, do: scale_in, with: {num_replicas: 1, timeout_s: 0.6}}"
_PARKED_AT_12 = "\n- {at_s: 12, do: scale_in, with: {num_replicas: 1, timeout_s: 0.3}}"


def reconcile(at_s: float) -> str:
    return f"\n- {{at_s: {at_s}, do: reconcile, with: {{every_s: 0.5, within_s: 60}}}}"


_COUNT_LOST = """
- when: {event: scale.drain, where: {what: chosen}}
  do: reply_lost
  target: {link: {from: scale-chat-0, to: gateway-chat-0}}
  with: {method: engines, count: 4}
  for_s: 20
"""

_UNPUBLISHED = """
- {at_s: 7, do: sigkill, target: chat-1}
- when: {event: recovery.step, where: {stage: validated}}
  do: request_lost
  target: {link: {from: recovery-chat-0, to: gateway-chat-0}}
  with: {method: "*"}
  for_s: 22
"""

SCALING_SCENARIOS: dict[str, str] = {
    "scale_1_2_1": scaling_scenario(
        "scale_1_2_1",
        "Out to two and back to one under load.",
        steps=OUT_2 + _IN_AT_7,
        for_s=18,
        acceptance="\n- reached: {state: ACTIVE, within_s: 30}\n- reached: {state: COMPLETED, within_s: 60}\n",
    ),
    "scale_confirmed_twice": scaling_scenario(
        "scale_confirmed_twice",
        "Two victims in one operation; the confirmation of the first comes again while the second drains.",
        steps=_OUT_3
        + "\n- {at_s: 12, do: scale_in, with: {num_replicas: 1}}"
        + """
- when: {event: scale.drain, where: {what: chosen}}
  do: duplicate
  target: {link: {from: scale-chat-0, to: manager-chat-0}}
  with: {method: confirm_drained, count: 1, delay_s: 0.6}
  for_s: 20
""",
        for_s=20,
        acceptance="\n- reached: {state: COMPLETED, within_s: 60}\n",
    ),
    "scale_3_2": scaling_scenario(
        "scale_3_2",
        "Out to three and back to two.",
        steps=_OUT_3 + "\n- {at_s: 12, do: scale_in, with: {num_replicas: 2}}",
        for_s=20,
        acceptance="\n- reached: {state: COMPLETED, within_s: 60}\n",
    ),
    "scale_count_lost": scaling_scenario(
        "scale_count_lost",
        "The gateway's answers about what is in flight on a victim are lost for a while.",
        steps=OUT_2 + _IN_AT_7 + _COUNT_LOST,
        for_s=18,
        api="call_timeout_s: 0.2, poll_interval_s: 0.1",
        acceptance="\n- reached: {state: COMPLETED, within_s: 60}\n",
    ),
    "scale_parked": scaling_scenario(
        "scale_parked",
        "The time is up while a victim has calls in flight; a reconcile goes on with it when it is idle.",
        steps=_OUT_3 + _PARKED_AT_12 + reconcile(12.35).replace("every_s: 0.5", "every_s: 0.1"),
        for_s=22,
        acceptance=ENDS_CLEAN + "- occurs: {event: scale.slot, where: {what: retired}, at_most: 1}\n",
    ),
    "scale_parked_briefly": scaling_scenario(
        "scale_parked_briefly",
        "A parked victim that is idle can be cleaned up at once.",
        steps=OUT_2 + _PARKED_AT_7 + reconcile(8),
        for_s=14,
        api="completion_wait_s: 3",
        lifecycle="drain_timeout_s: 40",
        acceptance=ENDS_CLEAN.replace("within_s: 120", "after: scale.drain, within_s: 15"),
    ),
    "scale_parked_then_out": scaling_scenario(
        "scale_parked_then_out",
        "While an operation is not clean, nothing else is admitted.",
        steps=OUT_2
        + _PARKED_AT_7
        + "\n- {at_s: 9, do: scale_out, with: {num_replicas: 4, idempotency_key: four}}"
        + reconcile(13),
        for_s=20,
        acceptance=ENDS_CLEAN,
    ),
    "scale_parked_and_stopped": scaling_scenario(
        "scale_parked_and_stopped",
        "A victim is stopped while it drains; when it is well again it must stay out all the same.",
        steps=OUT_2
        + _PARKED_AT_7
        + "\n- {when: {event: scale.drain, where: {what: chosen}}, after_s: 0.2, do: sigstop, target: chat-1, for_s: 6}"
        + reconcile(28),
        for_s=30,
        acceptance=ENDS_CLEAN,
    ),
    "scale_deaf_watcher": scaling_scenario(
        "scale_deaf_watcher",
        "After a drain was confirmed nothing of the manager is heard until the operation is given up.",
        steps=OUT_2
        + "\n- {at_s: 7, do: scale_in, with: {num_replicas: 1, timeout_s: 4}}"
        + """
- when: {event: scale.drain, where: {what: confirmed}}
  do: request_lost
  target: {link: {from: scale-chat-0, to: manager-chat-0}}
  with: {method: "*"}
  for_s: 12
"""
        + reconcile(25),
        for_s=28,
        api="progress_timeout_s: 0.5, completion_wait_s: 2",
        acceptance=ENDS_CLEAN,
    ),
    "scale_between_two": scaling_scenario(
        "scale_between_two",
        "Of two victims the first one goes so slowly that the operation is given up before its manager sees the abort.",
        steps=_OUT_3
        + "\n- {at_s: 11, do: removal_fails, with: {late_s: 14}, for_s: 10}"
        + "\n- {at_s: 12, do: scale_in, with: {num_replicas: 1, timeout_s: 6}}"
        + "\n- {at_s: 22, do: reconcile, with: {every_s: 1, within_s: 30}}",
        for_s=36,
        api="completion_wait_s: 2",
        acceptance=ENDS_CLEAN + "- occurs: {event: scale.slot, where: {what: retired}, at_most: 1}\n",
    ),
    "scale_never_executed": scaling_scenario(
        "scale_never_executed",
        "The manager begins an operation, its answer is lost, and it is not reached until all is over.",
        steps="".join(
            f"""
- at_s: 0.5
  do: {fault}
  target: {{link: {{from: scale-chat-0, to: manager-chat-0}}}}
  with: {{method: {method}}}
  for_s: 11
"""
            for fault, method in (("reply_lost", "begin"), ("request_lost", "abort"), ("request_lost", "progress"))
        )
        + """
- {at_s: 1, do: scale_out, with: {num_replicas: 2, timeout_s: 3}}
- {at_s: 14, do: reconcile, with: {direction: scale_out, every_s: 1, within_s: 20}}
""",
        for_s=20,
        api="progress_timeout_s: 0.5, completion_wait_s: 2",
        acceptance=ENDS_CLEAN + "- occurs: {event: scale.slot, at_most: 0}\n",
    ),
    "scale_unpublished": scaling_scenario(
        "scale_unpublished",
        "A replica is recovered and the gateway not reached until the attempt is over: the next one must publish it.",
        steps=OUT_2 + _UNPUBLISHED,
        for_s=50,
        service="      recovery: {attempt_timeout_s: 20, backoff_s: 4, call_timeout_s: 1}\n",
        acceptance=(
            "\n- reached: {event: recovery.step, where: {stage: published, replica: chat-1}, within_s: 70}\n"
            "- occurs: {event: recovery.step, where: {stage: retry}, at_least: 1}\n"
        ),
    ),
    "scale_unpublished_victim": scaling_scenario(
        "scale_unpublished_victim",
        "A replica that is recovered and cannot be published is put in drain: it is removed all the same.",
        steps=OUT_2
        + _UNPUBLISHED
        + "\n- {when: {event: recovery.step, where: {stage: validated}}, after_s: 2, do: scale_in, "
        "with: {num_replicas: 1, timeout_s: 60}}",
        for_s=40,
        service="      recovery: {attempt_timeout_s: 20, backoff_s: 4, call_timeout_s: 1}\n",
        acceptance="\n- reached: {state: COMPLETED, within_s: 60}\n",
    ),
    "scale_stuck": scaling_scenario(
        "scale_stuck",
        "The time is up while a placement group is waited for: the operation is not clean before that has ended.",
        steps="""
- {at_s: 1, do: placement_stuck, for_s: 30}
- {at_s: 2, do: scale_out, with: {num_replicas: 2, timeout_s: 3}}
- {at_s: 14, do: reconcile, with: {direction: scale_out, every_s: 1}}
""",
        for_s=20,
        api="completion_wait_s: 2",
        lifecycle="placement_timeout_s: 8",
        acceptance=ENDS_CLEAN,
    ),
    "scale_unplaceable": scaling_scenario(
        "scale_unplaceable",
        "A placement group is not CREATED in time: it must be removed.",
        steps="""
- {at_s: 1, do: placement_stuck, for_s: 30}
- {at_s: 2, do: scale_out, with: {num_replicas: 2}}
""",
        for_s=16,
        lifecycle="placement_timeout_s: 3",
        acceptance=ENDS_CLEAN,
    ),
    "scale_unplaceable_late": scaling_scenario(
        "scale_unplaceable_late",
        "A placement group is not CREATED in time, and its removal comes late: until then nothing is clean.",
        steps="""
- {at_s: 1, do: placement_stuck, for_s: 30}
- {at_s: 1, do: removal_fails, with: {late_s: 9}, for_s: 8}
- {at_s: 2, do: scale_out, with: {num_replicas: 2}}
- {at_s: 9, do: reconcile, with: {direction: scale_out, every_s: 2}}
""",
        for_s=20,
        lifecycle="placement_timeout_s: 3, removal_timeout_s: 2",
        acceptance=ENDS_CLEAN,
    ),
    "scale_removal_refused": scaling_scenario(
        "scale_removal_refused",
        "The removal of a group is refused at first; it must be submitted again.",
        steps=OUT_2 + "\n- {at_s: 6, do: removal_refused, for_s: 5}" + _IN_AT_7 + reconcile(13),
        for_s=18,
        lifecycle="removal_timeout_s: 2",
        acceptance=ENDS_CLEAN,
    ),
    "scale_removal_late": scaling_scenario(
        "scale_removal_late",
        "The removal of a group was accepted and comes late; it must not be submitted again.",
        steps=OUT_2
        + "\n- {at_s: 6, do: removal_fails, with: {late_s: 9}, for_s: 6}"
        + _IN_AT_7
        + "\n- {at_s: 12, do: reconcile, with: {every_s: 1}}",
        for_s=20,
        lifecycle="removal_timeout_s: 2",
        acceptance=ENDS_CLEAN,
    ),
    "scale_killed_victim": scaling_scenario(
        "scale_killed_victim",
        "A victim is killed while it drains: it is removed, and nobody brings it back.",
        steps=OUT_2
        + _IN_AT_7
        + _COUNT_LOST.replace("count: 4", "count: 20")
        + "\n- {when: {event: scale.drain, where: {what: chosen}}, after_s: 0.1, do: sigkill, target: chat-1}",
        for_s=20,
        api="call_timeout_s: 0.2, poll_interval_s: 0.1",
        acceptance="\n- reached: {state: COMPLETED, within_s: 60}\n",
    ),
    "scale_stumble": scaling_scenario(
        "scale_stumble",
        "What the manager says cannot be understood for a while: the operation ends with the last numbers, not clean.",
        steps=OUT_2 + _IN_AT_7 + reconcile(16),
        for_s=20,
        service="      components: {scale_manager: 'tests.mutants.scalers:StumblingManager'}\n",
        acceptance=ENDS_CLEAN,
    ),
    "scale_unknown_capacity": scaling_scenario(
        "scale_unknown_capacity",
        "A replica is not routable and the manager does not answer: nothing may be admitted on a guess.",
        initial=2,
        steps="""
- {when: {event: engine.accepted, where: {actor: chat-1}, from_s: 2}, do: sigstop, target: chat-1, for_s: 12}
- at_s: 6
  do: reply_lost
  target: {link: {from: scale-chat-0, to: manager-chat-0}}
  with: {method: capacity}
  for_s: 6
- {at_s: 8, do: scale_out, with: {num_replicas: 2, idempotency_key: two, attempts: 20}}
""",
        for_s=24,
        api="progress_timeout_s: 0.5",
        acceptance="\n- occurs: {event: scale.answered, where: {state: NOOP}, at_least: 1}\n",
    ),
    "scale_keys": scaling_scenario(
        "scale_keys",
        "Keys are used again: for the same request, for another one, in the other direction, and for a no-op.",
        steps="""
- {at_s: 0.5, do: scale_out, with: {num_replicas: 1, idempotency_key: noop}}
- {at_s: 1, do: scale_out, with: {num_replicas: 2, idempotency_key: out, timeout_s: 100}}
- {at_s: 2, do: scale_out, with: {num_replicas: 2, idempotency_key: out, timeout_s: 100}}
- {at_s: 2.5, do: scale_out, with: {num_replicas: 2, idempotency_key: out, timeout_s: 50}}
- {at_s: 7, do: scale_out, with: {num_replicas: 1, idempotency_key: noop}}
- {at_s: 8, do: scale_out, with: {num_replicas: 3, idempotency_key: out3}}
- {at_s: 14, do: scale_in, with: {num_replicas: 2, idempotency_key: out, timeout_s: 100}}
""",
        for_s=22,
        acceptance="\n- reached: {state: COMPLETED, within_s: 60}\n",
    ),
    "scale_day": scaling_scenario(
        "scale_day",
        "One request is sent again with its key every six hours; after a day the key is fresh.",
        steps="".join(
            f"\n- {{at_s: {1 + 21_600 * number}, do: scale_out, with: {{num_replicas: 2, idempotency_key: out}}}}"
            for number in range(6)
        ),
        for_s=120_000,
        workload=_BUSY.replace("sessions: 8", "sessions: 1, think_s: 900"),
        service="      health: {interval_s: 600, sync_interval_s: 600, slots: 1}\n",
        limits="limits: {time_limit_s: 200000, converge_within_s: 20}\n",
        acceptance="\n- occurs: {event: scale.answered, where: {state: NOOP}, at_least: 1}\n",
    ),
    "scale_careless": scaling_scenario(
        "scale_careless",
        "Clients send a target as text, as a float and as true: nothing is admitted, and no key is used up.",
        steps="".join(
            f"\n- {{at_s: {1 + number}, do: scale_out, with: "
            f"{{num_replicas: 2, idempotency_key: k, attempts: 1, sent_as: {sent_as}}}}}"
            for number, sent_as in enumerate(("text", "float", "boolean", "integer"))
        ),
        for_s=12,
        acceptance="\n- reached: {state: ACTIVE, within_s: 30}\n",
    ),
    "scale_two_services": scaling_scenario(
        "scale_two_services",
        "Two services are scaled at once: neither waits for the other.",
        steps="""
- {at_s: 1, do: scale_out, with: {service: chat, num_replicas: 2}}
- {at_s: 2, do: scale_out, with: {service: draw, num_replicas: 2}}
""",
        for_s=10,
        service="    draw:\n      {initial_replicas: 1, engine: tiny-cpu, scaling: {}}\n",
        acceptance="\n- reached: {state: ACTIVE, nth: 2, within_s: 30}\n",
    ),
    "scale_both_ways": scaling_scenario(
        "scale_both_ways",
        "While replicas are added nobody may remove one.",
        steps=OUT_2
        + "\n- {at_s: 6, do: scale_out, with: {num_replicas: 3}}\n- {at_s: 7, do: scale_in, with: {num_replicas: 1}}",
        for_s=16,
        acceptance="\n- reached: {state: ACTIVE, nth: 2, within_s: 60}\n",
    ),
    "scale_lost_handover": scaling_scenario(
        "scale_lost_handover",
        "The manager's answer to the hand-over is lost: the operation must be carried out all the same.",
        steps="""
- at_s: 0.5
  do: reply_lost
  target: {link: {from: scale-chat-0, to: manager-chat-0}}
  with: {method: begin, count: 1}
  for_s: 30
- {at_s: 1, do: scale_out, with: {num_replicas: 2, timeout_s: 20}}
""",
        for_s=14,
        api="progress_timeout_s: 1",
        acceptance="\n- reached: {state: ACTIVE, within_s: 60}\n",
    ),
    "scale_late": scaling_scenario(
        "scale_late",
        "A replica is ready after the time is up: it must never serve.",
        steps="\n- {at_s: 1, do: scale_out, with: {num_replicas: 2, timeout_s: 1.5}}",
        for_s=14,
        acceptance=ENDS_CLEAN + "- occurs: {event: request.done, where: {replica: chat-1}, at_most: 0}\n",
    ),
    "scale_there_and_back": scaling_scenario(
        "scale_there_and_back",
        "Out to two and back to one: resources are as before.",
        steps=OUT_2 + _IN_AT_7,
        for_s=14,
        acceptance="\n- reached: {state: COMPLETED, within_s: 60}\n- capacity_returned: {}\n",
    ),
    "scale_mute_manager": scaling_scenario(
        "scale_mute_manager",
        "Of an operation nothing is heard any more, while its placement group is waited for.",
        steps="""
- {at_s: 0.5, do: placement_stuck, for_s: 12}
- at_s: 0.5
  do: reply_lost
  target: {link: {from: scale-chat-0, to: manager-chat-0}}
  with: {method: progress}
  for_s: 9
- {at_s: 1, do: scale_out, with: {num_replicas: 2, timeout_s: 2}}
- {at_s: 14, do: reconcile, with: {direction: scale_out, every_s: 1}}
""",
        for_s=20,
        api="progress_timeout_s: 0.5, completion_wait_s: 2",
        lifecycle="placement_timeout_s: 8",
        acceptance=ENDS_CLEAN,
    ),
    "scale_often": scaling_scenario(
        "scale_often",
        "Nine operations and an API that keeps two; the key of the first one is used again at the end.",
        steps="".join(
            f"\n- {{at_s: {1 + 10 * number}, do: scale_out, with: {{num_replicas: 2, idempotency_key: out{number}}}}}"
            f"\n- {{at_s: {6 + 10 * number}, do: scale_in, with: {{num_replicas: 1, idempotency_key: in{number}}}}}"
            for number in range(5)
        )
        + "\n- {at_s: 55, do: scale_out, with: {num_replicas: 2, idempotency_key: out0}}",
        for_s=64,
        api="max_history: 2, max_idempotency_records: 100",
        acceptance="\n- reached: {state: COMPLETED, nth: 5, within_s: 80}\n",
    ),
    "scale_many_keys": scaling_scenario(
        "scale_many_keys",
        "Many no-ops with a key each, and an API that keeps three keys; the first one comes again when there are two.",
        steps="".join(
            f"\n- {{at_s: {1 + number / 4}, do: scale_out, with: {{num_replicas: 1, idempotency_key: k{number}}}}}"
            for number in range(8)
        )
        + "\n- {at_s: 4, do: scale_out, with: {num_replicas: 2, idempotency_key: out}}"
        + "\n- {at_s: 9, do: scale_out, with: {num_replicas: 1, idempotency_key: k0}}",
        for_s=14,
        api="max_history: 1024, max_idempotency_records: 3",
        acceptance="\n- reached: {state: ACTIVE, within_s: 30}\n",
    ),
    "scale_parked_among_others": scaling_scenario(
        "scale_parked_among_others",
        "An operation is not clean for a while, and those of another model come and go meanwhile.",
        steps=OUT_2 + _PARKED_AT_7 + reconcile(12),
        for_s=20,
        api="max_history: 6",
        service="      components: {scale_api: 'tests.mutants.scale_registries:BusyWithOthers'}\n",
        acceptance=ENDS_CLEAN,
    ),
}
