"""The command line: what it prints, exit codes, and one message for each bad input."""

from __future__ import annotations

import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import time

import jsonschema
import pytest
import yaml

from scenarios.json_schema import scenario_schema
from scenarios.load import CATALOG, catalog
from tests.scenarios.conftest import ROOT, SMALL, Command, component_of


@pytest.mark.parametrize("name", ["sim.py", "analysis.py", "real/__init__.py"])
def test_a_module_of_somebodys_in_the_way_of_ours_is_named(tmp_path: pathlib.Path, name: str) -> None:
    """It was a traceback and exit code 1, which says that a check failed."""
    found = tmp_path / name
    found.parent.mkdir(exist_ok=True)
    found.write_text("")
    ended = subprocess.run(
        [sys.executable, "-m", "scenarios", "run", "smoke", "--backend", "sim"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    package = name.partition("/")[0].removesuffix(".py")
    why = f"{found} hides the package {package!r} of seatrial; rename it, or run this in another folder"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", f"error: {why}\n")
    assert sorted(tmp_path.iterdir()) == [tmp_path / name.partition("/")[0]]


def test_list_show_and_validate(command: Command, small_file: pathlib.Path) -> None:
    listed = command("list")
    assert listed.returncode == 0 and re.search(r"^smoke +real +Two replicas", listed.stdout, re.MULTILINE)
    assert re.search(r"^scale_storm +Four replicas", listed.stdout, re.MULTILINE)  # it has no real: block
    told = {one["name"]: one["real"] for one in json.loads(command("list", "--json").stdout)}
    assert told["smoke"] is True and told["scale_storm"] is False
    shown = command("show", "smoke")
    assert shown.stdout == (CATALOG / "smoke.yaml").read_text()
    assert "seed: 99" in command("show", "smoke", "--set", "seed=99").stdout
    good = command("validate", small_file)
    assert (good.returncode, good.stdout, good.stderr) == (0, "small.yaml: good\n", "")
    passed = command("validate", "fault_injection").stdout
    assert "AzureLLMInferenceTrace_code.csv: 8819 requests over 137.4 s" in passed


def test_smoke_takes_about_a_second_of_a_processor(command: Command) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = command("run", "smoke", "--backend", "sim", "--json")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["result"] == "pass" and told["run_directory"] == "runs/smoke-sim-1"
    # A second alone, and as long again for imports; clocks would tell of what else the machine does.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5


def test_run_writes_a_numbered_folder_and_plain_lines(command: Command, small_file: pathlib.Path) -> None:
    first = command("run", small_file, "--backend", "sim", "--no-report")
    second = command("run", small_file, "--backend", "sim", "--no-report", "--seed", 5)
    assert first.returncode == second.returncode == 0, first.stderr
    assert "evidence in runs/small-sim-5\n" in first.stdout and "runs/small-sim-5-2\n" in second.stdout
    assert re.search(r"^pass +nothing_lost: 60 sent, 60 ended$", first.stdout, re.MULTILINE)
    assert "\x1b" not in first.stdout and first.stderr == ""
    assert not (small_file.parent / "runs/small-sim-5/report.html").exists()


def test_exit_codes_of_verdicts(command: Command, small_file: pathlib.Path) -> None:
    fail = command("run", small_file, "--backend", "sim", "--set", "acceptance=[{latency_p99: {at_most_s: 0.001}}]")
    assert fail.returncode == 1 and "FAIL: small, seed 5" in fail.stdout
    step = "steps=[{at_s: 1, do: sigkill, target: chat-0, must_hit: {in_flight: {at_least: 50}}}]"
    open_ = command("run", small_file, "--backend", "sim", "--set", step)
    assert open_.returncode == 3 and "INCONCLUSIVE" in open_.stdout


def test_the_printed_command_repeats_the_run(command: Command, small_file: pathlib.Path) -> None:
    words = ("run", small_file, "--backend", "sim", "--set", "workload.for_s=1", "--explore", "--seed", "77", "--json")
    told = json.loads(command(*words).stdout)
    again = json.loads(command(*told["repeat"].split()[3:], "--json").stdout)
    assert (again["digest"], again["events"]) == (told["digest"], told["events"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "smok", "--backend", "sim"], "error: unknown scenario 'smok'; did you mean 'smoke'?"),
        (["run", "smoke", "--backend", "simm"], "Invalid value for '--backend': 'simm' is not one of 'sim', 'real'."),
        (["run", "smoke"], "Missing option '--backend'."),
        (["run", "smoke", "--backend", "real"], "error: --backend real: "),
        (["run", "smoke", "--backend", "sim", "--seed", "-3"], "Invalid value for '--seed'"),
        (["run", "smoke", "--backend", "sim", "--set", "sed=1"], "error: --set sed=1: sed: unknown key; did you mean"),
        (["run", "smoke", "--backend", "sim", "--out", "."], "error: .: exists already; name another output folder"),
        (["run", "smoke", "--backend", "sim", "--out", "/proc/no"], "error: /proc/no: cannot be made ("),
        (["run", "absent.yaml", "--backend", "sim"], "error: absent.yaml: no such file"),
        (["run", "smoke", "--backend", "sim", "--set", "workload.for_s=-1"], "workload.for_s: must not be negative"),
        (["run", "smoke", "--backend", "sim", "--set", "steps.0.do=sigkil"], "unknown fault or verb 'sigkil'; did you"),
        (["run", "smoke", "--backend", "sim", "--set", "steps.0.target=chat-7"], "unknown target 'chat-7'"),
        (
            ["run", "smoke", "--backend", "sim", "--set", "acceptance=[{occurs: {event: gateway.move}}]"],
            "event kind 'gateway.move' is unknown; did you mean 'gateway.moved'? docs/evidence.md lists them all",
        ),
        (["prove", "smoke", "--seeds", "0"], "Invalid value for '--seeds'"),
        (["prove", "smoke", "--seed", str(2**63 - 2), "--seeds", "3"], "there are 2; take fewer, or a smaller --seed"),
        (["sweep", "smoke", "--seed", str(2**63 - 1), "--seeds", "2"], "there are 1; take fewer, or a smaller --seed"),
        (["prove", "smoke", "--python", "/no/python"], "error: /no/python: cannot be started"),
        (["sweep", "smoke", "--out", "."], "error: .: exists already"),
        (["sweep", "smoke", "--ray", ""], "Invalid value for '--ray': is empty; name it, or leave the option out"),
        (["run", "smoke", "--backend", "real", "--ray", " "], "Invalid value for '--ray': is empty"),
        (["run", "smoke", "--backend", "real", "--real-model", ""], "Invalid value for '--real-model': is empty"),
        (["sail"], "No such command 'sail'."),
    ],
)
def test_bad_input_is_one_message_exit_2_and_nothing_written(
    command: Command, tmp_path: pathlib.Path, words: list[str], message: str
) -> None:
    done = command(*words)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert len([line for line in done.stderr.splitlines() if "rror" in line]) == 1
    assert list(tmp_path.iterdir()) == []


def test_two_services_that_export_to_one_place_are_told_both_keys_to_set(
    command: Command, small_file: pathlib.Path
) -> None:
    second = "topology.services.other={initial_replicas: 1, engine: tiny-cpu%s}"
    words = ("validate", str(small_file), "--set", "topology.gpus_per_node=4", "--set")
    done = command(*words, second % "")
    fix = "export: {prefix: other-exports} and recovery: {export_prefix: other-exports}"
    assert done.returncode == 2 and done.stderr.rstrip().endswith(f"give other a prefix of its own: {fix}")
    own = ", " + fix.replace(" and ", ", ")
    assert command(*words, second % own).returncode == 0


def test_a_bad_row_of_a_trace_leaves_nothing(command: Command, tmp_path: pathlib.Path) -> None:
    text = SMALL[: SMALL.index("  arrivals")] + "  trace: {format: burstgpt, file: t.csv}\n"
    (tmp_path / "s.yaml").write_text(text)
    (tmp_path / "t.csv").write_text("Timestamp,Request tokens,Response tokens\r\n0,5,5\r\n1,five,5\r\n")
    for words in (["run", "s.yaml", "--backend", "sim"], ["validate", "s.yaml"]):
        done = command(*words)
        assert done.returncode == 2
        assert re.fullmatch(r"error: .*t.csv:3: column 'Request tokens': 'five': is no count.*\n", done.stderr)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.yaml", "t.csv"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written(command: Command, tmp_path: pathlib.Path) -> None:
    tmp_path.chmod(0o500)
    done = command("run", "smoke", "--backend", "sim", "--out", "new")
    tmp_path.chmod(0o700)
    assert done.returncode == 2 and "new: cannot be made (Permission denied)" in done.stderr


def test_an_interrupt_is_one_line_and_exit_3(tmp_path: pathlib.Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "scenarios", "run", "fault_injection", "--backend", "sim", "--out", "run"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    events = tmp_path / "run" / "events.jsonl"
    deadline = time.monotonic() + 60
    while not (events.exists() and events.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3, err
    assert err.splitlines()[-1] == "interrupted; what was written so far is no verdict" and "Traceback" not in err
    assert not (tmp_path / "run" / "manifest.json").exists()


@pytest.mark.parametrize("module", ["click", "yaml", "pydantic"])
def test_an_interrupt_while_it_is_imported_is_the_same_line(tmp_path: pathlib.Path, module: str) -> None:
    pressed = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n"
    (tmp_path / f"{module}.py").write_text(pressed)
    done = subprocess.run(
        [sys.executable, "-m", "scenarios", "list"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    said = "interrupted; what was written so far is no verdict\n"
    assert (done.returncode, done.stdout, done.stderr) == (3, "", said)


def test_who_imports_the_command_line_keeps_its_interrupts() -> None:
    asked = "import signal, scenarios.__main__; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    done = subprocess.run([sys.executable, "-c", asked], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n", done.stderr


def test_prove_and_sweep_from_the_command_line(command: Command, small_file: pathlib.Path) -> None:
    proved = command("prove", small_file, "--set", "workload.for_s=0.5", "--json")
    assert proved.returncode == 0 and json.loads(proved.stdout)["result"] == "pass", proved.stderr
    swept = command("sweep", small_file, "--seeds", 3, "--set", "workload.for_s=0.5", "--out", "sw", "--json")
    assert swept.returncode == 0 and json.loads(swept.stdout)["passed"] == 3, swept.stderr


def test_what_a_component_prints_is_no_result(command: Command, small_file: pathlib.Path) -> None:
    changes = ("--set", component_of("PrintingGateway"), "--set", "workload.for_s=0.5", "--json")
    ran = command("run", small_file, "--backend", "sim", *changes)
    assert json.loads(ran.stdout)["result"] == "pass" and "hello from the gateway" in ran.stderr
    proved = command("prove", small_file, *changes)
    assert proved.returncode == 0 and json.loads(proved.stdout)["result"] == "pass", proved.stderr


@pytest.mark.parametrize(("component", "proved"), [("MumblingGateway", 0), ("FallingGateway", 3)])
def test_a_component_that_fails_oddly_replays_and_fails(
    command: Command, small_file: pathlib.Path, component: str, proved: int
) -> None:
    changes = ("--set", component_of(component), "--set", "workload.for_s=0.5", "--json")
    ran = command("run", small_file, "--backend", "sim", *changes)
    assert ran.returncode == 1 and "Traceback" not in ran.stderr
    assert b" at 0x" not in (small_file.parent / json.loads(ran.stdout)["run_directory"] / "events.jsonl").read_bytes()
    replayed = json.loads((done := command("prove", small_file, *changes)).stdout)
    assert done.returncode == proved and not replayed["divergences"]


# --- the JSON Schema ---


def test_the_schema_accepts_the_catalog_and_refuses_what_the_models_refuse(command: Command) -> None:
    schema = json.loads(command("schema").stdout)
    assert schema == json.loads(json.dumps(scenario_schema()))
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    for path in catalog():
        validator.validate(yaml.safe_load(path.read_text()))
    for key, value in (("sed", 1), ("seed", -1), ("steps", [{"at_s": 1, "do": "sail"}])):
        assert not validator.is_valid({**yaml.safe_load(SMALL), key: value})
    link = {"from": "node-0", "to": "node-0"}
    step = {"at_s": 1, "do": "latency", "target": {"link": link}, "with": {"extra_ms": 3}, "for_s": 1}
    assert not validator.is_valid({**yaml.safe_load(SMALL), "steps": [step]})


def test_the_openapi_document_is_written_whole_or_compared(command: Command, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "openapi.json"
    both = command("openapi", "--out", str(out), "--check", str(out))
    assert (both.returncode, both.stderr) == (2, "error: give --out or --check, not both\n") and not out.exists()
    assert command("openapi", "--out", str(out)).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["openapi.json"]
    assert command("openapi", "--check", str(out)).returncode == 0
    nowhere = command("openapi", "--out", "")
    assert (nowhere.returncode, nowhere.stderr) == (2, "error: .: is a directory; name a file in it\n")
    shown = command("openapi", "--service", "policy", "--kind", "rollout")
    assert {"/policy/scale_out/{id}", "/policy/autoscaler/status"} <= set(json.loads(shown.stdout)["paths"])
    assert "delete" in json.loads(shown.stdout)["paths"]["/policy/scale_out/{id}"]
    alone = command("openapi", "--kind", "rollout")
    assert alone.returncode == 2 and alone.stderr.startswith("error: --kind rollout goes with --service NAME")
