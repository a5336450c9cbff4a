"""The scenarios of the other parts of wrong publications: a pause that fails, nobody to update, episodes that fail."""

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
) -> str:
    return policy_scenario(
        name, summary, arrivals=f"{{agents: {{{agents}}}}}", publishing=publishing, steps=steps, acceptance=acceptance,
        service="      admin: {connect_timeout_s: 0.3}\n", replicas=3, weights="shards: 2, shard_gb: 0.05",
        output="uniform: {low: 8, high: 16}", limits="time_limit_s: 400, converge_within_s: 60, shadow_s: 200",
    )  # fmt: skip


def _done(times: int) -> str:
    return f"\n- occurs: {{event: publication.ended, where: {{outcome: done}}, at_least: {times}}}\n"


PUBLISHING_PART_SCENARIOS: dict[str, str] = {
    "pause_unreached": _scenario(
        "pause_unreached",
        "One backend is not reached by the pause of a publication, which has to be begun again.",
        publishing="{entrypoint: {admission_timeout_s: 60}}",
        steps="""
- at_s: 0.8
  do: connect_timeout
  target: {link: {from: controller-policy, to: policy-1}}
  with: {method: /pause_generation, count: 5}
- {at_s: 1, do: publish, with: {model_step: 1, attempts: 4, retry_s: 2}}
""",
        acceptance=_done(2),
    ),
    "ranks_nobody": _scenario(
        "ranks_nobody",
        "A version is to be published while health reaches nobody, and so nobody is routed to: not before that ends.",
        publishing=(
            "{update: {transport: nccl, ranks: 3, bucket_gb: 0.04, post_timeout_s: 2, timeout_s: 20}, "
            "controller: {fence: true}, entrypoint: {admission_timeout_s: 60}}"
        ),
        steps="""
- at_s: 0.5
  do: connect_timeout
  target: {link: {from: "health-policy-*", to: "policy-*"}}
  for_s: 12
- {at_s: 9, do: publish, with: {model_step: 1, attempts: 12, retry_s: 1}}
""",
        acceptance=_done(2),
        agents="sessions: 12, turns: 24, think_s: 1.5",
    ),
}
