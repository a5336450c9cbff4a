"""Runs of small scenarios in the simulated world: verdicts, deaths of the driver, users' components."""

from __future__ import annotations

import errno
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from analysis.errors import BadInput
from analysis.rundir import RunDir, verify_manifest
from analysis.verdict import Verdict, judge_run
from analysis.writer import JsonlWriter
from scenarios.load import Scenario
from scenarios.runner import Ran, preflight, run_in_sim
from tests.scenarios.conftest import SMALL

Make = Callable[..., Scenario]


def _result(verdict: Verdict, name: str) -> str:
    return next(row.result for row in verdict.checks if row.name == name)


def _events(ran: Ran, kind: str) -> list[dict[str, Any]]:
    assert ran.directory is not None
    return [event.data for event in ran.directory.read_events() if event.kind == kind]


def _with_steps(*steps: str) -> str:
    return SMALL.replace("acceptance:", "steps:\n" + "".join(f"  - {step}\n" for step in steps) + "acceptance:")


def test_a_run_leaves_a_whole_directory_that_judges_alike_offline(small: Make, tmp_path: pathlib.Path) -> None:
    ran = run_in_sim(small(), 5, out=tmp_path / "run", repeat="again")
    assert ran.verdict.result == "pass", ran.verdict.failed()
    directory = RunDir.open(tmp_path / "run")
    assert sorted(path.name for path in directory.path.iterdir()) == [
        "events.jsonl", "manifest.json", "report.html", "run.json", "trace.json", "verdict.json",
    ]  # fmt: skip
    assert verify_manifest(directory) == []
    assert judge_run(directory) == ran.verdict
    assert json.loads(directory.verdict.read_text()) == ran.verdict.as_json()
    info = directory.info()
    assert (info.seed, info.repeat, info.scenario) == (5, "again", "small")
    assert len(_events(ran, "request.done")) == 60


def test_run_json_is_there_before_the_first_event(small: Make, tmp_path: pathlib.Path) -> None:
    seen: list[list[str]] = []
    run_in_sim(
        small(),
        5,
        out=tmp_path / "run",
        watch=lambda _: seen.append(sorted(p.name for p in (tmp_path / "run").iterdir())),
    )
    assert seen[0] == ["events.jsonl", "run.json"]


def test_the_same_seed_writes_the_same_bytes_and_another_seed_others(small: Make, tmp_path: pathlib.Path) -> None:
    files = []
    for number, seed in enumerate((5, 5, 6)):
        run_in_sim(small(), seed, out=tmp_path / str(number), report=False)
        files.append((tmp_path / str(number) / "events.jsonl").read_bytes())
    assert files[0] == files[1] != files[2]


def test_a_kill_is_recovered_and_a_fault_that_hits_nothing_is_inconclusive(small: Make, tmp_path: pathlib.Path) -> None:
    hit = "{when: {event: engine.accepted, where: {running: 1}}, do: sigkill, target: replica_of_trigger}"
    ran = run_in_sim(small(text=_with_steps(hit)), 5, out=tmp_path / "hit", report=False)
    assert ran.verdict.result == "pass", ran.verdict.failed()
    assert [row["satisfied"] for row in _events(ran, "fault.healed")] == [True]
    assert "published" in [row["stage"] for row in _events(ran, "recovery.step")]
    missed = "{at_s: 1, do: reply_lost, target: {link: {from: admin-chat-0, to: chat-0}}, with: {count: 1}, for_s: 1}"
    ran = run_in_sim(small(text=_with_steps(missed)), 5)
    assert ran.verdict.result == "inconclusive" and _result(ran.verdict, "faults_hit") == "inconclusive"


def test_a_fault_that_waits_for_ever_ends_with_the_workload(small: Make, tmp_path: pathlib.Path) -> None:
    torn = "{at_s: 1, do: torn_export, target: {path: exports}}"
    ran = run_in_sim(small(text=_with_steps(torn)), 5, out=tmp_path / "run", report=False)
    assert ran.result.reason == "completed" and ran.result.simulated_s < 15
    assert ran.verdict.result == "inconclusive" and len(_events(ran, "fault.healed")) == 1


def test_a_full_disk_is_one_message_and_leaves_nothing(
    small: Make, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        written = 0
        closed = False

        def write(self, data: bytes) -> int:
            self.written += len(data)
            if self.written > 100_000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return len(data)

        def close(self) -> None: ...

    original = JsonlWriter.__init__

    def init(self: JsonlWriter, path: pathlib.Path) -> None:
        original(self, path)
        self._file.close()
        self._file = Full()  # type: ignore[assignment]

    monkeypatch.setattr(JsonlWriter, "__init__", init)
    with pytest.raises(BadInput, match="events.jsonl: cannot be written .No space left on device.; the run was not"):
        run_in_sim(small(), 5, out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_verbs_reach_exporter_and_admin(small: Make, tmp_path: pathlib.Path) -> None:
    steps = (
        "{at_s: 1, do: export, with: {version: v9}}",
        "{at_s: 1.5, do: admin, with: {operation: flush}}",
        "{at_s: 2, do: note, with: {text: here}}",
    )
    ran = run_in_sim(small(text=_with_steps(*steps)), 5, out=tmp_path / "run", report=False)
    assert ran.verdict.result == "pass", ran.verdict.failed()
    assert [row["version"] for row in _events(ran, "export.published")] == ["v9"]
    assert {row["target"] for row in _events(ran, "admin.attempt")} == {"chat-0", "chat-1"}
    assert [row["do"] for row in _events(ran, "run.step")] == ["export", "admin", "note"]


def test_first_replicas_load_the_exported_version(small: Make, tmp_path: pathlib.Path) -> None:
    scenario = small("topology.services.chat.weights={version: v1, shards: 3, shard_gb: 0.1}")
    ran = run_in_sim(scenario, 5, out=tmp_path / "run", report=False)
    assert ran.verdict.result == "pass", ran.verdict.failed()
    assert {row["version"] for row in _events(ran, "request.done")} == {"v1"}
    assert len(_events(ran, "storage.read")) == 6


def test_closed_loop_sessions_take_turns(small: Make, tmp_path: pathlib.Path) -> None:
    scenario = small("workload.arrivals={closed_loop: {sessions: 4, turns: 5, think_s: 0.1}}", "workload.for_s=60")
    ran = run_in_sim(scenario, 5, out=tmp_path / "run", report=False)
    assert ran.verdict.result == "pass", ran.verdict.failed()
    assert len(_events(ran, "request.sent")) == 20


def test_clients_and_gateways_share_the_work(small: Make, tmp_path: pathlib.Path) -> None:
    scenario = small("workload.clients=3", "topology.services.chat.gateways=2")
    ran = run_in_sim(scenario, 5, out=tmp_path / "run", report=False)
    assert ran.verdict.result == "pass", ran.verdict.failed()
    events = list(RunDir(tmp_path / "run").read_events())
    assert {e.actor for e in events if e.kind == "request.sent"} == {f"client-chat-0-{n}" for n in range(3)}
    assert {e.actor for e in events if e.kind == "gateway.picked"} == {"gateway-chat-0", "gateway-chat-1"}
    assert sum(e.kind == "request.sent" for e in events) == 60


def test_a_client_gives_up_when_its_patience_ends(small: Make, tmp_path: pathlib.Path) -> None:
    name = "tests.scenarios.components:ForgetfulGateway"
    scenario = small(f"topology.services.chat.components={{gateway: '{name}'}}", "workload.patience_s=7")
    ran = run_in_sim(scenario, 5, out=tmp_path / "run", report=False)
    failed = [row for row in _events(ran, "request.done") if row["outcome"] != "done"]
    assert [(row["outcome"], row["error"]) for row in failed] == [("unknown", "GaveUp")]
    assert ran.verdict.result == "fail" and _result(ran.verdict, "unexplained_failures") == "fail"
    assert _result(ran.verdict, "no_leaks") == "pass"  # the wait was given up, and says so


def test_what_is_left_when_all_is_taken_down_is_a_leak(small: Make, tmp_path: pathlib.Path) -> None:
    name = "tests.scenarios.components:LitteringGateway"
    scenario = small(f"topology.services.chat.components={{gateway: '{name}'}}")
    ran = run_in_sim(scenario, 5, out=tmp_path / "run", report=False)
    found = _events(ran, "leak.found")
    assert [row["what"] for row in found] == ["process", "placement_group", "resources"]
    assert found[0]["detail"] == "actor litter/1 on node-0"
    assert ran.verdict.result == "fail" and [row.name for row in ran.verdict.failed()] == ["no_leaks"]


def test_a_users_class_that_emits_nothing_runs_and_is_judged(small: Make, tmp_path: pathlib.Path) -> None:
    name = "tests.scenarios.components:PlainGateway"
    scenario = small(f"topology.services.chat.components={{gateway: '{name}'}}")
    ran = run_in_sim(scenario, 5, out=tmp_path / "run", report=False)
    assert ran.verdict.result == "pass", ran.verdict.failed()
    assert not _events(ran, "gateway.picked") and len(_events(ran, "request.done")) == 60


def test_a_time_limit_ends_the_run_and_names_who_waits(small: Make, tmp_path: pathlib.Path) -> None:
    name = "tests.scenarios.components:ForgetfulGateway"
    scenario = small(f"topology.services.chat.components={{gateway: '{name}'}}", "limits.time_limit_s=50")
    ran = run_in_sim(scenario, 5, out=tmp_path / "run", report=False)
    assert ran.result.reason in ("time_limit", "deadlock") and ran.verdict.result == "fail"
    assert any("generate" in row["waits_for"] for row in _events(ran, "run.wait"))


def test_an_answer_that_is_none_is_held_against_the_component_that_gave_it(small: Make, tmp_path: pathlib.Path) -> None:
    scenario = small("topology.services.chat.components={gateway: 'tests.scenarios.components:SilentGateway'}")
    ran = run_in_sim(scenario, 5, out=tmp_path / "run", report=False)
    assert ran.result.reason == "completed"
    failed = {row.name: row.explain for row in ran.verdict.failed() if row.result == "fail"}
    assert list(failed) == ["unexplained_failures"] and "NoAnswer: NoneType" in failed["unexplained_failures"]


def test_services_that_do_not_come_up_end_the_run(small: Make) -> None:
    ran = run_in_sim(small("limits.time_limit_s=1"), 5)
    assert ran.result.reason == "time_limit" or "not ready" in ran.result.detail
    assert ran.verdict.result != "pass"


# --- found before anything starts ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("topology.services.chat.engine=gpt-9", "topology.services.chat.engine: no engine profile 'gpt-9'"),
        ("topology.services.chat.export={prefix: other}", "recovery would never find an export"),
        (
            "limits.time_limit_s=2",
            "--set limits.time_limit_s=2: .*service 'chat' goes on until 3 s, .*stopped after 2 s",
        ),
        ("workload.from_s=98", "limits.time_limit_s: the workload of service 'chat' goes on until 101 s"),
        ("steps=[{at_s: 101, do: note, with: {text: late}}]", r"limits.time_limit_s: steps\[0\] goes on until 101 s"),
    ],
)
def test_preflight_refuses(small: Make, change: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        preflight(small(change), "sim")


@pytest.mark.parametrize("change", ["workload.requests=9", "workload.arrivals={closed_loop: {sessions: 1, turns: 2}}"])
def test_a_workload_that_may_end_before_its_time_is_no_matter_of_the_limit(small: Make, change: str) -> None:
    assert preflight(small("limits.time_limit_s=2", change), "sim") == []


def test_preflight_reads_traces_to_the_last_row(small: Make, tmp_path: pathlib.Path) -> None:
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,10,1\n2023-11-16 18:17:04.9,10,{}\n"
    text = SMALL[: SMALL.index("  arrivals")] + "  trace: {format: azure, file: t.csv}\n"
    (tmp_path / "t.csv").write_text(rows.format(0))
    facts = preflight(small(text=text, folder=tmp_path), "sim")
    assert [(fact.requests, fact.zero_output) for fact in facts] == [(1, 1)]
    (tmp_path / "t.csv").write_text(rows.format(3))
    with pytest.raises(BadInput, match="the trace t.csv goes on until 1 s, the run is stopped after 0.5 s; raise it"):
        preflight(small("limits.time_limit_s=0.5", text=text.replace("for_s", "#"), folder=tmp_path), "sim")
    (tmp_path / "t.csv").write_text(rows.format("many"))
    with pytest.raises(BadInput, match=r"t.csv:3: column 'GeneratedTokens': 'many'"):
        preflight(small(text=text, folder=tmp_path), "sim")


def test_blocks_of_a_trace_and_of_an_engine_must_be_of_one_size(small: Make, tmp_path: pathlib.Path) -> None:
    text = SMALL[: SMALL.index("  arrivals")] + "  trace: {format: mooncake, file: t.jsonl}\n"
    (tmp_path / "t.jsonl").write_text('{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}')
    with pytest.raises(BadInput, match="tiny-cpu caches blocks of 32 tokens, Mooncake traces name blocks of 512"):
        preflight(small(text=text, folder=tmp_path), "sim")
    engine = "topology.services.chat.engine=qwen3-0.6b-rtx4090"
    assert preflight(small(engine, text=text, folder=tmp_path), "sim")[0].requests == 1
