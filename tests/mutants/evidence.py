"""Wrong evidence and wrong verdict scripts (M39c to M54): published runs that say more than they show.

Each is a sound hand-made run with one thing changed. Caught means: ``import genrm`` and the checks do not let it pass,
and the declared check says so; the sound run passes. Credit is as for other mutants: the check must say *fail*, or
*inconclusive* where the defect is that evidence is absent.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Literal

from analysis.foreign.genrm import import_genrm
from analysis.verdict import Verdict
from tests.mutants.foreign_runs import EPOCH, HOST, Run, altered, find, state, write


@dataclasses.dataclass(frozen=True)
class EvidenceMutant:
    """One wrong run.

    Args:
        name: unique.
        source: M39c to M54, with their letters, or a hazard.
        kind: key of ``SOUND``, the right run.
        alter: makes it wrong; the first line of its docstring says what is wrong.
        check: row that must not pass.
        result: what that row must say.
    """

    name: str
    source: str
    kind: str
    alter: Callable[[Run], None]
    check: str
    result: Literal["fail", "inconclusive"] = "fail"

    @property
    def defect(self) -> str:
        return (self.alter.__doc__ or "").strip().partition("\n")[0]

    def judged(self, folder: pathlib.Path, *, twin: bool = False) -> Verdict:
        """The verdict on the wrong run, or on the right one."""
        run = altered(self.kind, (lambda _: None) if twin else self.alter)
        return import_genrm(write(run, folder / "published"), folder / "run").verdict

    def is_caught(self, verdict: Verdict) -> bool:
        rows = [row for row in verdict.checks if row.name.partition("(")[0] == self.check]
        failed = verdict.result == "fail" if self.result == "fail" else verdict.result != "pass"
        return failed and any(row.result == self.result for row in rows)


_ROUTES = ["POST /scale_out", "GET /scale_out/{id}", "POST /scale_out/{id}/reconcile", "GET /engines"]


def _api(run: Run, told: list[str], field: str = "cleanup_required") -> None:
    schema = {"type": "object", "properties": {"status": {}, field: {"type": "boolean"}}}
    answer = {"200": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Status"}}}}}
    paths: dict[str, dict[str, object]] = {}
    for route in _ROUTES:
        method, path = route.split(" ")
        paths.setdefault(path, {})[method.lower()] = {"responses": answer}
    run["openapi.json"] = {"openapi": "3.1.0", "paths": paths, "components": {"schemas": {"Status": schema}}}
    run["api.md"] = "# API\n\n" + "".join(f"| {route.replace(' ', ' | ')} | x |\n" for route in told)


def undocumented_route(run: Run) -> None:
    """The page that is called the public contract lacks the new route for a reconcile."""
    _api(run, [route for route in _ROUTES if "reconcile" not in route])


def field_not_in_schema(run: Run) -> None:
    """The OpenAPI document lacks cleanup_required in the status of an operation."""
    _api(run, _ROUTES, field="other")


def cache_said_to_survive(run: Run) -> None:
    """A page says that the prefix cache survives deterministic mode on Blackwell, where it is off."""
    run["index.md"] = "# Notes\n\nDeterministic mode takes flashinfer on Blackwell;\nthere the prefix cache survives.\n"


def claim_not_withdrawn(run: Run) -> None:
    """A claim that the re-analysis withdrew stands in the table without a word."""
    run["reanalysis_v2.json"] = {"non_benign_error_lines": 3}
    run["index.md"] = "| criterion 5 | training went on, zero errors in the whole run |\n"


def no_progress_while_scaling(run: Run) -> None:
    """Progress is counted from the end of the scale-out on: none before it, and one verdict line for both windows."""
    run["train_events.json"] = [line for line in run["train_events.json"] if line["ts"] >= EPOCH + 786]


def every_line_twice(run: Run) -> None:
    """Each rollout is logged twice, and all lines are counted: 8 of 4."""
    state(run, rollout_count=8)


def coloured_lines(run: Run) -> None:
    """Colour codes of the terminal break the pattern, so that half of the rollouts are not seen, and it says all."""
    for line in run["train_events.json"]:
        if line["kind"] in ("rollout 1", "rollout 2"):
            line["kind"] = f"\x1b[32mINFO {line['kind']}\x1b[0m"


def summary_as_rollout(run: Run) -> None:
    """The line of the summary at the end counts as a rollout."""
    state(run, rollout_count=5)


def empty_fallback_snapshot(run: Run) -> None:
    """The last look at the engines failed, an empty one stands in, and the capacity is said to be the initial one."""
    run["events.json"] = [
        one for one in run["events.json"] if one["event"] != "engines_snapshot" or one["t"] < EPOCH + 838
    ]
    run["events.json"].insert(
        -1, {"t": EPOCH + 910, "event": "engines_snapshot", "current": None, "served": {}, "inflight": {}}
    )


def stall_after_the_last_event(run: Run) -> None:
    """Training stands still for three minutes after its last event; the gaps between events do not show it."""
    for one in run["events.json"][-2:]:
        one["t"] += 180


def stall_before_the_first_event(run: Run) -> None:
    """Training stood still before its first event; the gaps between events do not show it."""
    for one in run["events.json"]:
        if one["event"] in ("monitor_start", "engines_snapshot_failed", "baseline_engines") or one["t"] == EPOCH + 701:
            one["t"] -= 300


def dead_commit_link(run: Run) -> None:
    """A link to a commit has an id in full that no commit of the page begins with."""
    run["index.md"] = f"| run | commit 0481701 |\n[tree](https://example.org/x/commit/{'9' * 39}a)\n"


def two_newest_commits(run: Run) -> None:
    """Top and bottom of the index name different newest commits."""
    run["index.md"] = "Final head 0481701 carries everything.\n\nThe final head is fdf288d.\n"


def wrong_pin(run: Run) -> None:
    """The index pins another digest of the verdict than that of the file."""
    run["index.md"] = "| verdicts.json | 0123456789abcdef |\n"


def single_sample(run: Run) -> None:
    """One look at the memory right after the scale-in, still full: a loss is reported, and everything is there."""
    find(run, "round_b_resources").update(mem_ok=False, mem_mib=[21000, 9000, 5, 5])
    state(run, B3_resources_returned=False, E2E_PASS=False)
    run["verdicts.json"].update(PASS=False, functional_pass=False)


def baseline_process_gone(run: Run) -> None:
    """The process of the initial replica is missing from the memory sample, which is called within its bounds."""
    find(run, "round_b_resources").update(mem_mib=[5, 5, 5, 5])


def resources_short(run: Run) -> None:
    """The cleanup is called a pass while two of three GPUs are free."""
    find(run, "cleanup_result").update(leftover_ray_free_gpus=2.0)
    run["verdicts.json"].update(leftover_ray_free_gpus=2.0)


def no_pass_key(run: Run) -> None:
    """The verdict lacks E2E_PASS: the script did not get that far."""
    del run["verdicts.json"]["E2E_PASS"]
    del find(run, "verdicts")["E2E_PASS"]


def relaxed_gate(run: Run) -> None:
    """Two of fifty inputs are judged differently; the gate was made informational after the data were there."""
    state(run, official_sampling_instability_rate=0.04, official_sampling_unstable_cases=["neg-33", "pos-48"],
          official_sampling_instability_rate_is_informational=True)  # fmt: skip


def hidden_flips(run: Run) -> None:
    """The rate of flips is said to be zero beside a list of two."""
    state(run, official_sampling_unstable_cases=["neg-33", "pos-48"])


def vacuous_deadline(run: Run) -> None:
    """The generations end before the deadline: what is called failed and dirty is COMPLETED and clean."""
    find(run, "s2_registry_failed_dirty").update(status="COMPLETED", cleanup_required=False, t=169.0)


def idle_victim(run: Run) -> None:
    """The victim was not looked at before the scale-in, or had nothing in flight."""
    for one in run["events.json"]:
        if one["event"] == "victim_inflight_confirmed":
            one["inflight"] = 0


def victim_not_looked_at(run: Run) -> None:
    """Nobody looked at the victim before the scale-ins."""
    run["events.json"] = [one for one in run["events.json"] if one["event"] != "victim_inflight_confirmed"]


def phase_by_label(run: Run) -> None:
    """Phases are taken from the label LOW, which the last phase has too: a decision in LOW is not seen."""
    for row in (*run["scale_history.json"], *run["scale_history_round_b.json"]):
        if row["action"] == "scale_out":
            row["triggered_at"] = EPOCH + 80


def fault_not_injected(run: Run) -> None:
    """The victim's process is not found, its id is null: nothing was killed, and the run is called a pass."""
    find(run, "s3_victim_identified").update(pid=None)
    find(run, "s3_victim_killed").update(pid=None)


def tool_missing(run: Run) -> None:
    """The tool that finds the victim's process is missing: the kill is left out, and the run is called a pass."""
    run["events.json"] = [one for one in run["events.json"] if not one["event"].startswith("s3_victim_")]


def lost_operation(run: Run) -> None:
    """The service was made anew: an id that it accepted is answered with 404, and the poller goes on as if over."""
    events = run["events.json"]
    place = next(index for index, one in enumerate(events) if one["event"] == "scale_in_final")
    events[place] = {
        "t": events[place]["t"],
        "event": "scale_in_poll_error",
        "error": "/scale_in/op-in -> 404: not found",
    }


def contradiction(run: Run) -> None:
    """The verdict says that nothing failed, the load that something did."""
    find(run, "load_stopped").update(failed=7)


def failed_request(run: Run) -> None:
    """A request of the load failed; the verdict says that none did."""
    run["load_requests.json"][50]["ok"] = False


def counted_twice(run: Run) -> None:
    """The verdict counts more requests than the load has."""
    state(run, A6_load_total=2 * len(run["load_requests.json"]))


def two_verdicts(run: Run) -> None:
    """The verdict in the file is another than the one in the events."""
    find(run, "verdicts").update(scale_in_completed=False)


def no_events(run: Run) -> None:
    """There is a verdict and nothing that bears it out."""
    del run["events.json"]


def torn_events(run: Run) -> None:
    """The record of the events is cut off in the middle."""
    run["events.json"] = json.dumps(run["events.json"])[:-900]


def admitted_while_dirty(run: Run) -> None:
    """An operation is admitted while another one is terminal and not clean."""
    find(run, "s2_mutex_check")["held"] = False
    late = find(run, "s2_reconcile_result")
    out = [one for one in run["events.json"] if one["event"] == "scale_out_submitted"][2]
    out["t"] = late["t"] - 5
    seen = find(run, "s2_registry_failed_dirty")
    run["events.json"].append({**seen, "t": late["t"] - 2})
    run["events.json"].sort(key=lambda one: one["t"])


def no_load(run: Run) -> None:
    """There was no load: nothing failed, and nothing was shown."""
    run["load_requests.json"] = []
    state(run, A6_load_total=0)


def never_scaled_in(run: Run) -> None:
    """The history says COMPLETED, and the elastic replica is listed to the end."""
    for row in run["timeline.json"][3:]:
        row["engines"].append([HOST, 16001, 40])


def no_verdict(run: Run) -> None:
    """There is no verdict."""
    del run["verdicts.json"]


def wrong_replica_removed(run: Run) -> None:
    """The initial replica is removed instead of the elastic one."""
    find(run, "phase2_engines")["engines"] = [{"host": HOST, "port": 16001, "inflight": 0, "served": 8}]


EVIDENCE_MUTANTS: tuple[EvidenceMutant, ...] = (
    EvidenceMutant("cache said to survive", "M39c", "manual", cache_said_to_survive, "documents_agree"),
    EvidenceMutant("undocumented route", "M40", "manual", undocumented_route, "documents_agree"),
    EvidenceMutant("field missing from the schema", "M41", "manual", field_not_in_schema, "documents_agree"),
    EvidenceMutant("withdrawn claim", "M42", "training", claim_not_withdrawn, "documents_agree"),
    EvidenceMutant("no progress while scaling", "M43", "training", no_progress_while_scaling, "training_continued"),
    EvidenceMutant("every line counted", "M44", "training", every_line_twice, "stated_verdict"),
    EvidenceMutant("coloured lines not seen", "M44", "training", coloured_lines, "training_continued"),
    EvidenceMutant("summary line counted", "M44", "training", summary_as_rollout, "stated_verdict"),
    EvidenceMutant("empty last look", "M44", "training", empty_fallback_snapshot, "stated_verdict", "inconclusive"),
    EvidenceMutant("stall after the last", "M45", "training", stall_after_the_last_event, "training_continued"),
    EvidenceMutant("stall before the first", "M45", "training", stall_before_the_first_event, "training_continued"),
    EvidenceMutant("dead commit link", "M46", "manual", dead_commit_link, "documents_agree"),
    EvidenceMutant("two newest commits", "M46", "manual", two_newest_commits, "documents_agree"),
    EvidenceMutant("wrong digest in the index", "M46", "manual", wrong_pin, "documents_agree"),
    EvidenceMutant("single memory sample", "M48", "autoscaler", single_sample, "stated_verdict"),
    EvidenceMutant("baseline process gone", "M48b", "autoscaler", baseline_process_gone, "resources_returned"),
    EvidenceMutant("cleanup passes short of a GPU", "M49, H10", "failures", resources_short, "resources_returned"),
    EvidenceMutant("no pass key", "M49, H11", "manual", no_pass_key, "stated_verdict"),
    EvidenceMutant("gate relaxed afterwards", "M50", "consistency", relaxed_gate, "stated_verdict"),
    EvidenceMutant("hidden flips", "M50", "consistency", hidden_flips, "stated_verdict"),
    EvidenceMutant("vacuous deadline", "M51", "failures", vacuous_deadline, "stated_verdict"),
    EvidenceMutant("idle victim", "M51", "failures", idle_victim, "victims_busy"),
    EvidenceMutant("victim not looked at", "M51", "failures", victim_not_looked_at, "victims_busy", "inconclusive"),
    EvidenceMutant("phase by its label", "M52", "autoscaler", phase_by_label, "stated_verdict"),
    EvidenceMutant("fault not injected", "M53", "failures", fault_not_injected, "stated_verdict"),
    EvidenceMutant("fault left out", "M53", "failures", tool_missing, "stated_verdict"),
    EvidenceMutant("accepted id is lost", "M54, H12", "manual", lost_operation, "operations_end"),
    EvidenceMutant("load failed, verdict passes", "M49", "manual", contradiction, "load_answered"),
    EvidenceMutant("request failed, verdict passes", "M49", "autoscaler", failed_request, "unexplained_failures"),
    EvidenceMutant("requests counted twice", "M44", "autoscaler", counted_twice, "stated_verdict"),
    EvidenceMutant("two verdicts", "M49", "manual", two_verdicts, "stated_verdict"),
    EvidenceMutant("verdict without evidence", "M49", "manual", no_events, "files_read", "inconclusive"),
    EvidenceMutant("torn evidence", "M49", "autoscaler", torn_events, "files_read", "inconclusive"),
    EvidenceMutant("no load", "M51", "autoscaler", no_load, "stated_verdict"),
    EvidenceMutant("never scaled in", "M49", "autoscaler", never_scaled_in, "stated_verdict"),
    EvidenceMutant("no verdict", "H11", "failures", no_verdict, "stated_verdict", "inconclusive"),
    EvidenceMutant("admitted while not clean", "M29", "failures", admitted_while_dirty, "one_operation_at_a_time"),
    EvidenceMutant("initial replica removed", "M10", "manual", wrong_replica_removed, "stated_verdict"),
)  # fmt: skip


def rows() -> tuple[list[str], list[str]]:
    """Lines of the museum's second table, and the names of those that got away."""
    import tempfile

    lines, missed = [], []
    for mutant in EVIDENCE_MUTANTS:
        with tempfile.TemporaryDirectory() as folder:
            wrong = mutant.judged(pathlib.Path(folder) / "wrong")
            right = mutant.judged(pathlib.Path(folder) / "right", twin=True)
        caught = mutant.is_caught(wrong) and right.result == "pass"
        if not caught:
            missed.append(mutant.name)
        cells = (mutant.name, mutant.defect, mutant.source, mutant.kind, f"`{mutant.check}`",
                 f"{mutant.result}" if caught else "**not caught**")  # fmt: skip
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return lines, missed
