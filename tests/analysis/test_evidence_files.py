"""Run directories: written whole, read back equal, cut and changed ones told apart."""

from __future__ import annotations

import json
import math
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.errors import BadInput
from analysis.reader import EventReader, read_json
from analysis.rundir import (
    FILES,
    Preregistered,
    RunDir,
    to_json,
    verify_manifest,
    write_atomic,
    write_manifest,
    write_run_json,
)
from analysis.verdict import judge, judge_run
from analysis.writer import JsonlWriter
from protocol.evidence import KINDS, Event, UndeclaredEvent, decode, encode
from tests.analysis.history import History

ROOT = pathlib.Path(__file__).resolve().parents[2]


def write_run(path: pathlib.Path, events: list[Event], **preregistered: Any) -> RunDir:
    directory = RunDir.create(path)
    write_run_json(
        directory,
        scenario="test",
        scenario_text="name: test\n",
        seed=1,
        backend="sim",
        versions={"seatrial": "0"},
        preregistered=Preregistered(**preregistered),
    )
    with JsonlWriter(directory.events) as writer:
        for event in events:
            writer.record(event)
    write_atomic(directory.verdict, to_json(judge_run(directory).as_json()))
    write_manifest(directory, {"events.jsonl": writer.sha256})
    return directory


def good() -> list[Event]:
    h = History()
    h.ready()
    h.served("r1")
    h.served("r2")
    return h.end().events


@pytest.fixture
def run(tmp_path: pathlib.Path) -> RunDir:
    return write_run(tmp_path / "run", good())


def test_what_is_read_is_what_was_written(run: RunDir) -> None:
    reader = run.read_events()
    assert list(reader) == good()
    assert (reader.cut, reader.lines) == ("", len(good()))
    assert verify_manifest(run) == []


def test_a_cut_last_line_is_tolerated_and_reported(run: RunDir) -> None:
    data = run.events.read_bytes()
    for cut in (1, 40):
        run.events.write_bytes(data[:-cut])
        reader = run.read_events()
        assert list(reader) == good()[:-1]
        assert f"line {len(good())} is cut short after" in reader.cut
        verdict = judge_run(run)
        assert verdict.result == "inconclusive" and "is cut short" in verdict.note


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"kind":"engine.accepted"', '"kind":"engine.acepted"', "kind 'engine.acepted' is not declared"),
        ('"running":0', '"runing":0', "engine.accepted has fields"),
        ('"running":0', '"running":"0"', "engine.accepted.running is '0'; declared as int"),
        ('"running":0', '"running":true', "engine.accepted.running is True; declared as int"),
        ('"running":0', f'"running":{2**63}', "declared as int"),
        ('"seq":3', '"seq":2', "seq 2 does not rise"),
        ('"seq":3', f'"seq":{2**63}', "must be a whole number of 64 bits"),
        ('"t_ns":3000000', f'"t_ns":1{"0" * 4000}', "...; must be a whole number of 64 bits"),
        ('{"seq":3', '["seq":3', "not an event"),
        ('"lc":1,"cause":null', '"lc":1,"cause":"x"', "cause is 'x'; must be actor/incarnation/n"),
        ('"t_ns":3000000', '"t_ns":3.5', "t_ns is 3.5; must be a whole number"),
        ('"lc":1,"cause":null,', '"lc":1,', "event has no key 'cause'"),
    ],
)
def test_a_bad_line_names_file_and_line(run: RunDir, old: str, new: str, said: str) -> None:
    lines = run.events.read_text().splitlines(keepends=True)
    wrong = 3 if old in lines[3] else 1
    assert old in lines[wrong]
    lines[wrong] = lines[wrong].replace(old, new)
    run.events.write_text("".join(lines))
    with pytest.raises(BadInput) as error:
        list(run.read_events())
    assert f"{run.events}: line {wrong + 1}: " in str(error.value) and said in str(error.value)


def test_a_changed_byte_is_reported_wherever_it_is(run: RunDir) -> None:
    for name in [name for name in FILES if (run.path / name).exists()]:
        path = run.path / name
        before = path.read_bytes()
        for position in range(0, len(before), max(1, len(before) // 50)):
            path.write_bytes(before[:position] + bytes([before[position] ^ 1]) + before[position + 1 :])
            assert [line for line in verify_manifest(run) if line.startswith(f"{path}: changed")]
        path.write_bytes(before)
    before = run.manifest.read_bytes()
    for position in range(len(before)):
        run.manifest.write_bytes(before[:position] + bytes([before[position] ^ 1]) + before[position + 1 :])
        assert verify_manifest(run), f"byte {position} of the manifest"
    run.manifest.write_bytes(before)
    assert verify_manifest(run) == []


def test_missing_and_added_files_are_reported(run: RunDir) -> None:
    run.report.write_text("<html>")
    assert verify_manifest(run) == [f"{run.report}: not in manifest.json; added afterwards"]
    run.report.unlink()
    run.verdict.unlink()
    assert verify_manifest(run) == [f"{run.verdict}: missing"]
    run.manifest.unlink()
    assert "did not end by itself" in verify_manifest(run)[0]
    os.mkfifo(run.manifest)  # nobody is to wait for who may write into it
    assert verify_manifest(run) == [f"{run.manifest}: changed (it does not carry its own digest)"]


def test_folders_that_cannot_be_used(tmp_path: pathlib.Path) -> None:
    with pytest.raises(BadInput, match="exists already"):
        RunDir.create(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be made"):
        RunDir.create(tmp_path / "file" / "run")
    with pytest.raises(BadInput, match="no run directory \\(run.json is missing\\)"):
        RunDir.open(tmp_path)


def test_thresholds_cannot_be_written_after_the_run(run: RunDir) -> None:
    with pytest.raises(BadInput, match="must be written before the run"):
        write_run_json(
            run, scenario="t", scenario_text="", seed=1, backend="sim", versions={}, preregistered=Preregistered()
        )


def test_run_json_is_checked(run: RunDir) -> None:
    raw = json.loads(run.run.read_text())
    for change, said in (
        ({"seed": "x"}, "key 'seed'"),
        ({"colour": 1}, "key 'colour'"),
        ({"preregistered": {"converge_within_s": -1}}, "key 'preregistered.converge_within_s'"),
        ({"schema_version": 99}, "this version reads"),
        ({"scenario_text": "other"}, "is not the SHA-256"),
        ({"scenario": "t\x1b[31m"}, "key 'scenario' is no name"),
        ({"scenario": "\ud800"}, "a text in it is none"),
        ({"preregistered": {"converge_within_s": math.inf}}, "key 'preregistered.converge_within_s'"),
    ):
        run.run.write_text(json.dumps({**raw, **change}))
        with pytest.raises(BadInput, match=said):
            run.info()
    run.run.write_text(f'{{"seed": {"9" * 5000}}}')
    with pytest.raises(BadInput, match="not JSON that this package wrote"):
        run.info()
    run.run.write_text("[]")
    with pytest.raises(BadInput, match=r"run\.json: Input should be a valid dictionary"):
        run.info()
    run.run.write_text("{\n nonsense")
    with pytest.raises(BadInput, match=r"run\.json: line 2: not JSON"):
        run.info()


def test_writing_is_all_or_nothing(tmp_path: pathlib.Path) -> None:
    with pytest.raises(BadInput, match="cannot be written"):
        write_atomic(tmp_path / "absent" / "x.json", "{}")
    write_atomic(tmp_path / "x.json", "{}")
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    for what in (tmp_path, pathlib.Path(""), tmp_path / ".."):
        with pytest.raises(BadInput, match="is a directory; name a file in it"):
            write_atomic(what, "{}")
    os.mkfifo(tmp_path / "pipe")  # stands for a device, which a file of its name would replace
    with pytest.raises(BadInput, match="pipe: is no regular file; name another one"):
        write_atomic(tmp_path / "pipe", "{}")
    assert (tmp_path / "pipe").is_fifo()


def test_the_writer_refuses_what_is_not_declared(tmp_path: pathlib.Path) -> None:
    writer = JsonlWriter(tmp_path / "e.jsonl")
    with pytest.raises(UndeclaredEvent, match="'no.kind' is not declared"):
        writer.record(Event(0, 0, "no.kind", "a", 1, 1, 1, None, {}))
    with pytest.raises(UndeclaredEvent, match="declared are"):
        writer.record(Event(0, 0, "run.healed", "a", 1, 1, 1, None, {"faults": "x"}))
    writer.close()
    with pytest.raises(BadInput, match="cannot be written"):
        JsonlWriter(tmp_path / "e.jsonl")


def test_a_killed_writer_leaves_all_but_the_last_chunk(tmp_path: pathlib.Path) -> None:
    script = (
        "import os, signal, pathlib, sys\n"
        "from analysis.writer import JsonlWriter\n"
        "from protocol.evidence import Event\n"
        "writer = JsonlWriter(pathlib.Path(sys.argv[1]), chunk=100)\n"
        "for i in range(250):\n"
        "    writer.record(Event(i, i, 'run.healed', 'w', 1, i, i, None, {'faults': i}))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "e.jsonl")], cwd=ROOT, check=False)
    assert len(list(EventReader(tmp_path / "e.jsonl"))) == 200


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int": st.integers(1 - 2**63, 2**63 - 1),
    "float": st.floats(-1e299, 1e299),
    "str": st.one_of(st.sampled_from(["r1", "r2", "e0", "done", "unknown", ""]), st.text(max_size=8)),
    "bool": st.booleans(),
    "json": st.one_of(st.none(), st.just([["1", 0, 0, "hash-1"]]), st.dictionaries(st.text(max_size=3), st.integers())),
    "int?": st.one_of(st.none(), st.integers(0, 9)),
    "float?": st.one_of(st.none(), st.floats(-1e299, 1e299)),
    "str?": st.one_of(st.none(), st.text(max_size=4)),
}
ENVELOPE = st.tuples(
    st.integers(0, 10**12),
    st.sampled_from(["e0", "e1", "gw", "worker/3"]),
    st.integers(0, 3),
    st.one_of(st.none(), st.just("gw/1/3")),
)


@st.composite
def streams(draw: st.DrawFn) -> list[Event]:
    events = []
    for seq, name in enumerate(draw(st.lists(st.sampled_from(sorted(KINDS)), max_size=25))):
        t_ns, actor, inc, cause = draw(ENVELOPE)
        data = {field: draw(VALUES[type_]) for field, (type_, _) in KINDS[name].fields.items()}
        events.append(Event(seq, t_ns, name, actor, inc, seq, seq, cause, data))
    return events


@settings(max_examples=150, deadline=None)
@given(streams())
def test_judging_a_stream_equals_judging_its_file(
    tmp_path_factory: pytest.TempPathFactory, events: list[Event]
) -> None:
    """Also for streams that make no sense: a check may then raise, but no byte of the verdict may differ."""
    path = tmp_path_factory.mktemp("run") / "events.jsonl"
    with JsonlWriter(path, chunk=3) as writer:
        for event in events:
            writer.record(event)
    assert judge(events).as_json() == judge(EventReader(path)).as_json()


def test_an_object_comes_back_in_its_own_order() -> None:
    plain = {"int": 0, "float": 0.0, "str": "", "bool": True, "json": {"b": 1, "a": {"d": 2, "c": 3}}}
    for name, kind in KINDS.items():
        data = {field: plain[type_.removesuffix("?")] for field, (type_, _) in kind.fields.items()}
        back = decode(encode(Event(0, 0, name, "p", 1, 0, 0, None, data))).data
        assert repr(back) == repr(data)


def test_json_that_is_nested_without_end_is_bad_input(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("[" * 100_000)
    with pytest.raises(BadInput, match=r"run.json: .*nested too deeply"):
        read_json(path)
