"""Small hand-made runs in the published format (scaling_acceptance.md 8), all of them sound; numbers of our own."""

from __future__ import annotations

import copy
import json
import pathlib
from collections.abc import Callable
from typing import Any

Run = dict[str, Any]
"""File name to content: JSON values, or text for what is none."""

HOST = "10.0.0.1"
OLD, NEW = [HOST, 16000], [HOST, 16001]
EPOCH = 1_700_000_000.0
WRAP_UP: dict[str, Any] = {
    "E2E_PASS": True, "functional_pass": True, "cleanup_pass": True, "cleanup_errors": [],
    "leftover_ray_free_gpus": 3.0, "functional_error": None, "PASS": True,
}  # fmt: skip


def write(run: Run, folder: pathlib.Path) -> pathlib.Path:
    """The run as a directory."""
    folder.mkdir(parents=True)
    for name, content in run.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, "utf-8", "surrogatepass")
    return folder


def event(t: float, name: str, **payload: Any) -> Run:
    return {"t": t, "event": name, **payload}


def _whole(events: list[Run], verdicts: Run, end_s: float) -> Run:
    """Events with the verdict in them, and the verdict's file."""
    lines = dict(verdicts)
    events = [
        *events,
        event(end_s, "verdicts", **lines, E2E_PASS=True),
        event(end_s + 5, "cleanup_result", cleanup_pass=True, cleanup_errors=[], leftover_ray_free_gpus=3.0),
        event(end_s + 5, "e2e_done", functional_pass=True, cleanup_pass=True),
    ]
    return {"events.json": events, "verdicts.json": {**lines, **WRAP_UP}}


def _start() -> list[Run]:
    return [
        event(0.0, "e2e_start", model_path="m", out_dir="results/x"),
        event(10.0, "ray_init", gpus=4.0),
        event(11.0, "pg_created", bundles=1, gpu_ids=[0]),
        event(20.0, "serve_run", url="http://127.0.0.1:8000/genrm"),
    ]


def manual() -> Run:
    """One, two, one by hand."""
    scores = {"a": "yes", "b": "no"}
    engines = [{"host": HOST, "port": 16000, "inflight": 0, "served": 0}]
    both = [
        {"host": HOST, "port": 16000, "inflight": 1, "served": 90},
        {"host": HOST, "port": 16001, "inflight": 1, "served": 8},
    ]
    events = [
        *_start(),
        event(60.0, "phase0_engines", current=1, ready=1, engines=engines),
        event(60.1, "baseline_ray_free_gpus", free=3.0),
        event(60.2, "phase0_scores", scores=scores),
        event(61.0, "load_started", workers=8),
        event(65.0, "scale_out_submitted", request_id="op-out", status="PENDING", current=1),
        event(65.1, "scale_out_status", status="CREATING", current=None, ready=None),
        event(109.0, "scale_out_status", status="ACTIVE", current=2, ready=2),
        event(109.0, "scale_out_final", status="ACTIVE", current=2, ready=2, created=1, removed=0),
        event(109.1, "phase1_engines", current=2, ready=2, engines=both),
        event(110.0, "phase1_scores", scores=scores),
        event(130.0, "scale_in_submitted", request_id="op-in", status="PENDING", current=2),
        event(130.1, "scale_in_status", status="DRAINING", current=None, ready=None),
        event(131.0, "scale_in_final", status="COMPLETED", current=1, ready=1, created=0, removed=1),
        event(131.1, "phase2_engines", current=1, ready=1, engines=engines),
        event(131.2, "gpu_snapshot", tag="after-scale-in-1-engine", gpu_mem="0, 100\n1, 4", ray_free_gpus={"GPU": 3.0}),
        event(132.0, "phase2_scores", scores=scores),
        event(133.0, "load_stopped", total=1200, failed=0, p50=0.1, p95=0.2, max=0.7),
    ]
    true = (
        "scale_out_active", "scale_out_added_exactly_one_engine", "scale_out_initial_survived",
        "elastic_engine_served_traffic", "scale_in_completed", "scale_in_removed_exactly_the_elastic_engine",
        "scale_in_initial_survived", "scoring_identical_out", "scoring_identical_in", "load_zero_failures",
        "gpu_resources_returned",
    )  # fmt: skip
    return _whole(events, {**dict.fromkeys(true, True), "load_total_requests": 1200}, 133.5)


def failures() -> Run:
    """A long drain, a deadline while draining, and a SIGKILL of the victim."""
    old, new = f"{HOST}:16000", f"{HOST}:16001"

    def call(engine: str, latency: float) -> Run:
        return {"ok": True, "engine": engine, "finish_reason": "length", "len": 9000, "latency": latency}

    refused = {"error": '/scale_in/op-in-2/reconcile -> 409: {"detail":"physical lifecycle is still stopping"}'}
    events = [
        *_start(),
        event(70.0, "baseline_engines", ids=[OLD]),
        event(70.1, "scale_out_submitted", request_id="op-out-1"),
        event(114.0, "scale_out_final", status="ACTIVE"),
        event(114.1, "s1_engines", initial=[OLD], elastic=NEW),
        event(114.6, "victim_inflight_confirmed", victim=NEW, inflight=1),
        event(114.7, "s1_scale_in_submitted", request_id="op-in-1"),
        event(123.8, "s1_done", scale_in="COMPLETED", requests=[call(old, 8.9), call(new, 8.9)]),
        event(123.9, "scale_out_submitted", request_id="op-out-2"),
        event(167.0, "scale_out_final", status="ACTIVE"),
        event(167.1, "s2_engines", ids=[OLD, NEW], victim=NEW),
        event(167.6, "victim_inflight_confirmed", victim=NEW, inflight=1),
        event(167.7, "s2_scale_in_submitted", request_id="op-in-2", timeout_secs=5.0),
        event(233.5, "s2_registry_failed_dirty", status="FAILED", cleanup_required=True),
        event(233.6, "s2_mutex_check", held=True),
        *(event(233.7 + 10 * step, "s2_reconcile_retry", **refused) for step in range(54)),
        event(774.9, "s2_reconcile_result", status="FAILED", cleanup_required=False, detail=None),
        event(774.9, "s2_requests", requests=[call(new, 19.4), call(old, 19.4)]),
        event(775.0, "scale_out_submitted", request_id="op-out-3"),
        event(819.0, "scale_out_final", status="ACTIVE"),
        event(819.1, "s3_engines", initial=[OLD], victim=NEW),
        event(819.6, "victim_inflight_confirmed", victim=NEW, inflight=1),
        event(819.7, "s3_scale_in_submitted", request_id="op-in-3"),
        event(819.8, "s3_victim_identified", port=16001, pid=4711, status="DRAINING"),
        event(819.9, "s3_victim_killed", pid=4711),
        event(846.0, "s3_done", scale_in="COMPLETED", requests=[call(old, 25.3), call(old, 26.7)]),
    ]
    true = (
        "s1_scale_in_completed", "s1_both_long_requests_ok", "s1_requests_served_by_both_engines",
        "s2_deadline_abort_failed_dirty", "s2_mutex_held_while_dirty", "s2_reconcile_cleared_park",
        "s2_reconcile_terminal_status", "s2_long_requests_ok", "s3_scale_in_completed_after_crash",
        "s3_all_requests_survived_on_initial_engine", "s3_initial_engine_survived",
    )  # fmt: skip
    capacity = {"s1_final_capacity": 1, "s2_final_capacity": 1, "s3_final_capacity": 1}
    return _whole(events, {**dict.fromkeys(true, True), "s2_abort_to_reconcile_park_s": 607.2, **capacity}, 846.1)


def decision(action: str, at_s: float, ended_s: float, running: int) -> Run:
    conditions = ["token_usage_high"] if action == "scale_out" else ["token_usage_low", "no_queue", "throughput_stable"]
    return {
        "request_id": f"op-{action}-{at_s:g}",
        "action": action,
        "status": "ACTIVE" if action == "scale_out" else "COMPLETED",
        "triggered_at": EPOCH + at_s,
        "completed_at": EPOCH + ended_s,
        "from_engines": 1 if action == "scale_out" else 2,
        "to_engines": 2 if action == "scale_out" else 1,
        "triggered_conditions": conditions,
        "metrics_snapshot": {"total_running_reqs": running, "is_empty": False, "unknown_engines": []},
    }


def autoscaler() -> Run:
    """The frozen protocol: LOW, HIGH, STEADY, LOW once more, then round B by hand."""
    free = {"free": "3.0/3.0", "pgs": "1/1", "mem_ok": True}
    events = [
        *_start(),
        event(70.0, "autoscaler_started", started=True),
        event(70.2, "resource_baseline", free_gpus=3.0, mem_mib=[21000, 5, 5, 5], pgs=1),
        event(90.0, "phase_low_done", current=1),
        event(153.0, "phase_high_done", scaled_out=True),
        event(220.0, "tui_screenshot_captured", service="genrm", file="a.svg"),
        event(227.0, "tui_screenshot_captured", service="rollout", file="b.svg"),
        event(227.1, "phase_steady_done", elastic_served=30, screenshots_ok=True),
        event(227.2, "phase_low_prime_done", scaled_in=True),
        event(239.0, "round_a_history", so=True, si=True, si_status="COMPLETED"),
        event(245.0, "round_a_resources", **free),
        event(288.0, "round_b_scaled_out", active=True),
        event(375.0, "round_b_resources", **free, mem_mib=[21100, 5, 5, 5]),
        event(375.1, "round_b_done", scale_in=True, final=1),
    ]
    true = (
        "A1_no_scale_out_in_low", "A2_scale_out_decided_in_high", "A3_elastic_served_in_steady",
        "A4_scale_in_decided_outside_high", "A5_scale_in_completed_final_is_initial", "A6_zero_load_failures",
        "A7_resources_returned", "A8_tui_screenshots", "B1_manual_scale_out_active", "B2_idle_scale_in_within_window",
        "B2_idle_evidence_zero_running", "B2_idle_conditions_all_three", "B3_final_one_initial_survived",
        "B3_resources_returned",
    )  # fmt: skip
    out, in_a = decision("scale_out", 110.2, 155.6, 45), decision("scale_in", 211.4, 216.4, 46)
    in_b = decision("scale_in", 362.6, 367.6, 0)
    starts = [70 + 0.2 * index for index in range(100)] + [90 + 2 * index for index in range(31)]
    tags = ["LOW"] * 100 + ["HIGH"] * 31 + ["STEADY"] * 30 + ["LOW"] * 20
    starts += [154 + 2 * index for index in range(30)] + [227.3 + 0.5 * index for index in range(20)]
    bounds = {"low_start": 70, "low_end": 90, "high_start": 90.1, "high_end": 153, "steady_start": 153.1,
              "steady_end": 227.1, "low_prime_start": 227.15, "run_end": 227.2}  # fmt: skip
    loads = [{"t": at, "phase": tag, "ok": True} for at, tag in zip(starts, tags, strict=True)]
    loads[3], loads[4] = loads[4], loads[3]
    return {
        **_whole(events, {**dict.fromkeys(true, True), "A6_load_total": len(loads)}, 375.2),
        "phase_boundaries.json": {"phases": {key: EPOCH + value for key, value in bounds.items()}, "history": []},
        "scale_history.json": [in_a, out],
        "scale_history_round_b.json": [in_b, in_a, out],
        "load_requests.json": loads,
        "timeline.json": [
            {"t": 70.1, "current": 1, "engines": [[*OLD, 0]]},
            {"t": 153.5, "current": 2, "engines": [[*OLD, 131], [*NEW, 0]]},
            {"t": 211.0, "current": 2, "engines": [[*OLD, 140], [*NEW, 15]]},
            {"t": 216.0, "current": 1, "engines": [[*OLD, 145]]},
            {"t": 238.0, "current": 1, "engines": [[*OLD, 166]]},
        ],
    }


def training() -> Run:
    """A training job of four rollouts during which the judge is scaled out and in. Its log says everything twice."""
    steps = [730, 790, 830, 880]
    rollouts = [740, 800, 845, 895]
    lines = [{"ts": EPOCH + at, "kind": f"step {index}"} for index, at in enumerate(steps)] * 2
    lines += [{"ts": EPOCH + at, "kind": f"rollout {index}"} for index, at in enumerate(rollouts)] * 2
    lines += [
        {"ts": EPOCH + 895, "kind": "All rollouts finished"},
        {"ts": EPOCH + 905, "kind": "All training steps finished"},
    ]
    served = {f"{HOST}:16000": 3}
    both = {**served, f"{HOST}:16001": 1}
    events = [
        event(600, "monitor_start", job_log="x"),
        event(602, "engines_snapshot_failed", error="ConnectionError: refused"),
        event(700, "baseline_engines", ids=[OLD]),
        event(701, "engines_snapshot", current=1, served={f"{HOST}:16000": 0}, inflight={}),
        event(731, "first_step_seen"),
        event(732, "scale_out_submitted", request_id="op-out"),
        event(785, "scale_out_final", status="ACTIVE"),
        event(786, "engines_snapshot", current=2, served=both, inflight={}),
        event(835, "elastic_served_check", served={f"{HOST}:16001": 1}),
        event(836, "scale_in_submitted", request_id="op-in"),
        event(837, "scale_in_final", status="COMPLETED"),
        event(838, "engines_snapshot", current=1, served=served, inflight={}),
        event(910, "engines_snapshot", current=1, served=served, inflight={}),
    ]
    for one in events:
        one["t"] += EPOCH
    true = (
        "final_engines_from_last_snapshot", "scale_out_active", "scale_in_completed", "elastic_engine_served_rewards",
        "train_events_before_scaling", "train_events_between_operations", "train_events_after_scale_in",
        "no_train_stall_over_120s", "training_finished_after_scale_in", "final_capacity_is_initial",
        "all_rollouts_landed",
    )  # fmt: skip
    verdict = {**dict.fromkeys(true, True), "rollout_count": 4, "num_rollout_expected": 4}
    events.append(event(EPOCH + 911, "verdicts", **verdict, E2E_PASS=True))
    lines.sort(key=lambda line: line["ts"])
    return {
        "events.json": events,
        "train_events.json": lines,
        "verdicts.json": {**verdict, "E2E_PASS": True, "functional_error": None},
    }


def consistency() -> Run:
    """The same inputs judged by both engines."""
    events = [
        *_start(),
        event(60.0, "phase0_engines", ids=[OLD]),
        event(60.1, "scale_out_submitted", request_id="op-out", status="PENDING"),
        event(102.0, "scale_out_final", status="ACTIVE", current=2),
        event(102.1, "phase1_engines", initial=[OLD], elastic=NEW),
        event(150.0, "arm_greedy_done", replies=40),
        event(190.0, "arm_official_done", replies=40),
        event(191.0, "scale_in_submitted", request_id="op-in", status="PENDING"),
        event(192.0, "scale_in_final", status="COMPLETED", current=1),
        event(192.1, "phase2_engines", ids=[OLD]),
    ]
    verdict = {
        "attribution_covers_both_engines": True, "attribution_failures": [], "all_replies_complete": True,
        "greedy_verdicts_identical_across_engines": True, "greedy_mismatches": [],
        "official_sampling_instability_rate": 0.0, "official_sampling_unstable_cases": [], "cases": 50,
        "replies_total": 80, "scale_in_removed_exactly_elastic": True,
    }  # fmt: skip
    return _whole(events, verdict, 193.0)


SOUND: dict[str, Callable[[], Run]] = {
    "manual": manual,
    "failures": failures,
    "autoscaler": autoscaler,
    "training": training,
    "consistency": consistency,
}


def altered(kind: str, alter: Callable[[Run], None]) -> Run:
    """A sound run of that kind with one thing changed."""
    run = copy.deepcopy(SOUND[kind]())
    alter(run)
    return run


def find(run: Run, name: str) -> Run:
    """The first event of that name."""
    return next(one for one in run["events.json"] if one["event"] == name)


def state(run: Run, **lines: Any) -> None:
    """Have the verdict say something, in its file and in the events."""
    run["verdicts.json"].update(lines)
    find(run, "verdicts").update(lines)
