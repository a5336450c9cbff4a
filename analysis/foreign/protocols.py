"""The published protocols: which kind of run a directory holds, and what is asked of it. Fixed before any import."""

from __future__ import annotations

import dataclasses
from typing import Any

from analysis.foreign.files import BOUNDARIES, EVENTS, HISTORY_B, TRAINING, VERDICTS, Files

Criteria = tuple[dict[str, dict[str, Any]], ...]
_DOCUMENTS: Criteria = ({"documents_agree": {}},)


@dataclasses.dataclass(frozen=True)
class Protocol:
    """One kind of published run.

    Args:
        name: as the demos call it.
        scenario: the scenario of the catalog that is the same thing here, or a name of its own.
        files: files beside events.json and verdicts.json without which its criteria have nothing to judge.
        borne_out: lines of the run's own verdict that its evidence must bear out; others may stand as stated.
        more: criteria beside ``files_read``, ``stated_verdict`` and ``documents_agree``.
        faults: how many faults must be injected.
        required: invariants that must have judged something.
        two_clocks: an autoscaler's history has a clock of its own.
    """

    name: str
    scenario: str
    summary: str
    files: tuple[str, ...] = ()
    borne_out: tuple[str, ...] = ()
    more: Criteria = ()
    faults: int = 0
    required: tuple[str, ...] = ("run_finished", "operations_end", "one_operation_at_a_time")
    two_clocks: bool = False

    def acceptance(self, *, documents: bool) -> Criteria:
        """What is asked of a run; ``documents``: there are pages beside it."""
        return (
            {"files_read": {"needed": [EVENTS, VERDICTS, *self.files]}},
            {"stated_verdict": {"pass_key": "E2E_PASS", "borne_out": list(self.borne_out)}},
            *_DOCUMENTS[:documents],
            *self.more,
        )


MANUAL = Protocol(
    "manual 1-2-1",
    "manual_1_2_1",
    "Published run of an elastic judge, imported: scaled out to two and back to one by hand, under load.",
    borne_out=(
        "scale_out_active", "scale_out_added_exactly_one_engine", "scale_out_initial_survived",
        "elastic_engine_served_traffic", "scale_in_completed", "scale_in_removed_exactly_the_elastic_engine",
        "scale_in_initial_survived", "scoring_identical_out", "scoring_identical_in", "load_zero_failures",
        "load_total_requests", "gpu_resources_returned",
    ),
    more=(
        {"resources_returned": {}},
        {"load_answered": {"at_least": 1}},
        {"reached": {"event": "scale.answered", "state": "ACTIVE", "within_s": 600}},
        {"reached": {"event": "scale.answered", "state": "COMPLETED", "within_s": 900}},
    ),
)  # fmt: skip

FAILURES = Protocol(
    "failure injection",
    "failure_injection_genrm",
    "Published run of an elastic judge, imported: a long drain, a deadline while draining, a SIGKILL of the victim.",
    borne_out=(
        "s1_scale_in_completed", "s1_both_long_requests_ok", "s1_requests_served_by_both_engines",
        "s2_deadline_abort_failed_dirty", "s2_mutex_held_while_dirty", "s2_reconcile_cleared_park",
        "s2_reconcile_terminal_status", "s2_abort_to_reconcile_park_s", "s2_long_requests_ok",
        "s3_scale_in_completed_after_crash", "s3_all_requests_survived_on_initial_engine",
    ),
    more=(
        {"resources_returned": {}},
        {"answered_fraction": {"at_least": 1.0}},
        {"victims_busy": {"at_least": 3}},
        # As in the catalog: the victims of S1 and S2 end their calls, that of S3 does not.
        {"occurs": {"event": "request.done", "where": {"replica": "genrm-1"}, "at_least": 1}},
        {"occurs": {"event": "request.done", "where": {"replica": "genrm-2"}, "at_least": 1}},
        {"occurs": {"event": "request.done", "where": {"replica": "genrm-3"}, "at_most": 0}},
        {"occurs": {"event": "scale.answered", "where": {"state": "FAILED", "cleanup": "true"}, "at_least": 1}},
        {"occurs": {"event": "scale.answered", "where": {"status": 409, "code": "CONFLICT"}, "at_least": 1}},
        {"occurs": {"event": "scale.answered", "where": {"status": 409, "code": "LIFECYCLE_RUNNING"}, "at_least": 1}},
        {"occurs": {"event": "scale.reconciled", "where": {"cleanup_required": False}, "at_least": 1}},
        {"reached": {"event": "scale.answered", "state": "COMPLETED", "nth": 2, "within_s": 1800}},
    ),
    faults=1,
    required=("run_finished", "nothing_lost", "operations_end", "one_operation_at_a_time", "faults_hit"),
)  # fmt: skip

AUTOSCALER = Protocol(
    "autoscaler, frozen protocol",
    "autoscaler_cycle",
    "Published run of an elastic judge, imported: an autoscaler adds one under load and removes it, twice.",
    files=(BOUNDARIES, HISTORY_B),
    borne_out=(
        "A1_no_scale_out_in_low", "A2_scale_out_decided_in_high", "A3_elastic_served_in_steady",
        "A4_scale_in_decided_outside_high", "A5_scale_in_completed_final_is_initial", "A7_resources_returned",
        "A8_tui_screenshots", "B1_manual_scale_out_active", "B2_idle_scale_in_within_window",
        "B2_idle_evidence_zero_running", "B2_idle_conditions_all_three", "B3_final_one_initial_survived",
        "B3_resources_returned",
    ),
    more=(
        {"resources_returned": {}},
        {"decided": {"action": "scale_out", "nth": 1, "from_s": 35, "to_s": 49}},
        {"reversals": {"at_most": 2}},
    ),
    required=(
        "run_finished", "operations_end", "autoscaler_keeps_bounds", "autoscaler_cooldown", "autoscaler_one_request",
    ),
    two_clocks=True,
)  # fmt: skip

EXPLORATORY = Protocol(
    "autoscaler, before the frozen protocol",
    "genrm_autoscaler",
    "Published exploratory run of an elastic judge with an autoscaler, imported.",
    files=(BOUNDARIES,),
    more=(
        {"resources_returned": {}},
        {"occurs": {"event": "scale.answered", "where": {"state": "ACTIVE"}, "at_least": 1}},
        {"occurs": {"event": "scale.answered", "where": {"state": "COMPLETED"}, "at_least": 1}},
    ),
    required=("run_finished", "operations_end"),
    two_clocks=True,
)

CONSISTENCY = Protocol(
    "reward consistency",
    "reward_consistency",
    "Published run of an elastic judge, imported: the old replica and the new one give the same judgement.",
    # Whether the scale-in is part of the verdict or of the clean-up differed among these runs; where it is on
    # record it is judged as any operation.
    borne_out=("replies_total",),
    more=({"resources_returned": {}},),
)

DIVERGENCE = Protocol(
    "sampling divergence",
    "sampling_divergence",
    "Published run of an elastic judge, imported: different request histories, the same judgement.",
    more=({"resources_returned": {}},),
    required=("run_finished",),
)

TRAINING_RUN = Protocol(
    "training continuity",
    "train_continuity",
    "Published training run with an elastic judge, imported: scaled out and in while the job goes on.",
    files=(TRAINING,),
    borne_out=(
        "scale_out_active", "scale_in_completed", "elastic_engine_served_rewards", "train_events_before_scaling",
        "train_events_between_operations", "train_events_after_scale_in", "training_finished_after_scale_in",
        "final_capacity_is_initial", "rollout_count", "all_rollouts_landed",
    ),
    more=({"training_continued": {"stall_at_most_s": 120}},),
)  # fmt: skip

UNKNOWN = Protocol(
    "not known",
    "genrm",
    "A published run of an elastic judge of a kind that is not known here, imported.",
    more=({"resources_returned": {}},),
)

PROTOCOLS = (MANUAL, FAILURES, AUTOSCALER, EXPLORATORY, CONSISTENCY, DIVERGENCE, TRAINING_RUN, UNKNOWN)


def recognise(files: Files, name: str) -> Protocol:
    """The protocol of a run: by its verdict's keys, else by what its driver recorded, else by the directory's name.

    What is there decides, and not what is missing: a run without its verdict is still of its kind.
    """
    keys = set(files.mapping(VERDICTS))
    records = files.records(EVENTS)
    said = {str(record.get("event")) for record in records}
    paths = " ".join([name, *(str(record.get("out_dir", "")) for record in records[:3])])
    for record in records:
        if record.get("event") == "verdicts":
            keys |= set(record)
    if "flip_count" in keys or "divergence" in paths:
        return DIVERGENCE
    if any(key.startswith(("s1_", "s2_", "s3_")) for key in keys | said) or "failure_injection" in paths:
        return FAILURES
    if any(key.startswith(("A1_", "A2_", "B1_", "B3_")) for key in keys) or "prereg" in paths:
        return AUTOSCALER
    if {"autoscaler_started", "phase_high_done"} & said or "autoscaler" in paths:
        return EXPLORATORY
    if {"rollout_count", "all_rollouts_landed"} & keys or "first_step_seen" in said or "continuity" in paths:
        return TRAINING_RUN
    if "attribution_covers_both_engines" in keys or "arm_greedy_done" in said or "consistency" in paths:
        return CONSISTENCY
    if {"scoring_identical_out", "load_total_requests"} & keys or "load_started" in said or "e2e_run" in paths:
        return MANUAL
    return UNKNOWN
