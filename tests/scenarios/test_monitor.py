"""The monitor: a run that is over, one that grows, a control API; what is unknown, and bad input."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import threading
import xml.etree.ElementTree
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from analysis.errors import BadInput
from analysis.foreign.genrm import import_genrm
from scenarios.__main__ import cli
from scenarios.load import load
from scenarios.monitor import command
from scenarios.monitor.board import FIGURES, SHOWN, UNKNOWN, HistoryRow, clean, kind_of, latest, number, svg_of, text_of
from scenarios.monitor.run_source import LIVE, Follower, services_of
from scenarios.monitor.url_source import Served
from scenarios.runner import run_in_sim
from tests.mutants.foreign_runs import SOUND, write


@pytest.fixture(scope="module")
def cycle(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return _ran("autoscaler_cycle", tmp_path_factory.mktemp("monitored") / "cycle")


@pytest.fixture(scope="module")
def manual(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return _ran("manual_1_2_1", tmp_path_factory.mktemp("monitored") / "manual")


def _ran(name: str, out: pathlib.Path) -> pathlib.Path:
    run_in_sim(load(name), 1, out=out, repeat="", report=False)
    return out


def monitor(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["monitor", *map(str, arguments)])


def shown(text: str, name: str) -> str:
    """The value of a figure on a board, its first line."""
    found = re.search(rf"(?:│ |  ){re.escape(name)} +(.*?)(?:   |  │|$)", text, re.MULTILINE)
    assert found is not None, f"{name} is not in\n{text}"
    return found[1].strip()


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.match(r"│ [✔✘–…] +\S+ +scale_", line)]


# --- a run that is over ---


def test_a_run_as_of_some_time(cycle: pathlib.Path) -> None:
    result = monitor(cycle, "--at", 76)
    assert result.exit_code == 0, result.output
    text = result.output
    assert "genrm  autoscaler_cycle, sim, seed 1  75." in text or "genrm  autoscaler_cycle, sim, seed 1  76." in text
    for name, value in (
        ("engines", "1"), ("min / max", "1 / 2"), ("in flight", "48"),
        ("evaluation interval", "5.03 s"), ("cooldown out / in", "20 s / 60 s"), ("operations in all", "0"),
        ("last action", "none yet"), ("unknown engines", "none"),
    ):  # fmt: skip
        assert shown(text, name) == value
    assert re.fullmatch(r"6\d\.\d%", shown(text, "token usage"))
    assert re.search(r"✔ +token_usage_high +0\.6\d : 0\.30 +held \d+ s of 15 s", text)
    assert re.search(r"✘ +token_usage_low +0\.6\d : 0\.05 ", text)
    assert rows(text) == []


def test_the_end_of_a_run(cycle: pathlib.Path) -> None:
    text = monitor(cycle).output
    assert "over: completed" in text
    history = rows(text)
    assert [re.split(r"  +", row)[2] for row in history] == ["scale_in", "scale_out", "scale_in", "scale_out"]
    assert all(row.startswith("│ ✔") and "false" in row for row in history)  # newest first, all over and clean
    assert shown(text, "operations in all") == "3"  # the scale-out by hand is none of the autoscaler's
    assert shown(text, "last action").startswith("scale_in at ")
    assert re.search(r"\? +ttft_high +unknown : 3", text)  # nobody has asked for anything for minutes


def test_what_nobody_knows_is_unknown_and_not_zero(manual: pathlib.Path) -> None:
    text = monitor(manual).output
    assert "no autoscaler looks after this service" in text
    assert shown(text, "engines") == "0" and "over: completed" in text  # all were ended: that is known
    for name in ("queue", "token usage", "throughput", "min / max", "operations in all", "last action", "ttft p95"):
        assert shown(text, name) == UNKNOWN
    assert len(re.findall(r"\? +\w+ +unknown : unknown", text)) == 7
    history = rows(text)
    assert sum("CONFLICT" in row and row.startswith("│ ✘") for row in history) == 1
    assert sum("NOOP" in row and row.startswith("│ –") for row in history) == 1
    assert sum("ACTIVE" in row for row in history) == sum("COMPLETED" in row for row in history) == 1


def test_an_operation_under_way(manual: pathlib.Path) -> None:
    text = monitor(manual, "--at", 70).output
    (under_way,) = [row for row in rows(text) if "CREATING" in row or "HEALTH_CHECKING" in row]
    assert under_way.startswith("│ …")
    assert (shown(text, "engines"), shown(text, "ready")) == ("2", "1")


def test_before_the_first_event_nothing_is_known(cycle: pathlib.Path) -> None:
    text = monitor(cycle, "--at", 0).output
    assert "nothing was seen of this service so far" in text or shown(text, "ready") == "0"
    assert shown(text, "queue") == UNKNOWN


def test_a_picture(cycle: pathlib.Path, tmp_path: pathlib.Path) -> None:
    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    for path in (first, second):
        assert monitor(cycle, "--at", 76, "--svg", path).exit_code == 0
    root = xml.etree.ElementTree.parse(first).getroot()
    texts = " ".join(root.itertext()).replace("\N{NO-BREAK SPACE}", " ")
    assert "token_usage_high" in texts and "75." in texts and "unknown engines" in texts
    assert first.read_bytes() == second.read_bytes()


# --- a run that goes on ---


def _growing(cycle: pathlib.Path, to: pathlib.Path, monkeypatch: pytest.MonkeyPatch, pieces: list[bytes]) -> list[Any]:
    """The boards that a monitor shows while a run is written piece by piece, one between two looks."""
    to.mkdir()
    shutil.copy(cycle / "run.json", to)
    (to / "events.jsonl").touch()

    def slept(_: float) -> None:
        if pieces:
            with (to / "events.jsonl").open("ab") as file:
                file.write(pieces.pop(0))
        else:
            for name in ("verdict.json", "manifest.json"):
                shutil.copy(cycle / name, to)

    monkeypatch.setattr(command.time, "sleep", slept)
    return list(command._of_run(to, None, None, 1.0, 0.1, False, False))


def test_a_run_is_followed_while_it_grows(
    cycle: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (cycle / "events.jsonl").read_bytes()
    cuts = [0, 100_000, 100_001, len(whole) // 2, len(whole) - 10, len(whole)]  # in the middle of lines
    pieces = [whole[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    boards = _growing(cycle, tmp_path / "run", monkeypatch, pieces)
    times = [float(board.when.split(" s")[0]) for board in boards]
    assert times == sorted(times) and times[0] == 0 and len(set(times)) >= 4
    assert boards[0].note and boards[0].figures == {}
    assert boards[-1].over and not any(board.over for board in boards[:4])
    assert text_of(boards[-1]) == monitor(cycle).output


def test_a_real_run_is_followed_where_its_processes_write(cycle: pathlib.Path, tmp_path: pathlib.Path) -> None:
    run, folder = tmp_path / "run", tmp_path / "seatrial-x"
    run.mkdir()
    (folder / "events").mkdir(parents=True)
    shutil.copy(cycle / "run.json", run)
    (run / LIVE).write_text(json.dumps({"folder": str(folder)}))
    lines = (cycle / "events.jsonl").read_bytes().splitlines(keepends=True)
    one, other = folder / "events" / "one.jsonl", folder / "events" / "other.jsonl"
    one.write_bytes(b"".join(lines[0:2000:2]))
    other.write_bytes(b"".join(lines[1:2000:2]) + b'{"seq":')  # a line that is being written
    follower = Follower(run)
    found = follower.look()
    assert [event.t_ns for event in found] == sorted(event.t_ns for event in found) and len(found) == 2000
    one.write_bytes(one.read_bytes() + lines[2000])
    assert [event.seq for event in follower.look()] == [json.loads(lines[2000])["seq"]]
    shutil.rmtree(folder)  # the run ends: the warden takes its folder away
    assert follower.look() == []


def test_a_look_at_a_run_that_goes_on(cycle: pathlib.Path, tmp_path: pathlib.Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(cycle / "run.json", run)
    result = monitor(run, "--once")
    assert result.exit_code == 0 and "nothing was seen of this service so far" in result.output
    assert shown(result.output, "engines") == UNKNOWN


# --- a control API ---


class Canned:
    """A server whose answers a test sets: path without the query to (status, text)."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.asked: list[str] = []
        self.tokens: list[str | None] = []
        canned = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                canned.asked.append(self.path)
                canned.tokens.append(self.headers.get("Authorization"))
                status, body = canned.answers.get(self.path.partition("?")[0], (404, b"{}"))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                return None

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def says(self, path: str, value: Any, status: int = 200) -> None:
        self.answers[path] = (status, json.dumps(value).encode())

    def end(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@pytest.fixture
def canned() -> Iterator[Canned]:
    made = Canned()
    yield made
    made.end()


FRAME = {"total_queue_reqs": 7, "total_running_reqs": 41.0, "avg_token_usage": 0.5, "total_throughput": 1234.5,
         "throughput_variance": None, "max_ttft_p95": 10.0, "max_ttft_p95_overflow": True, "max_queue_time_p95": None,
         "coverage": 1.0, "unknown_engines": ["10.0.0.1:16001"]}  # fmt: skip
REQUEST = {"action": "scale_out", "delta": 1, "from_engines": 1, "to_engines": 2, "reason": "why", "triggered_at": 1e9,
           "status": "CREATING", "request_id": "op-2", "cleanup": "unknown"}  # fmt: skip


def an_autoscaler(canned: Canned, **services: Any) -> None:
    service = {
        "current_engines": 1, "min_engines": 1, "max_engines": 4, "last_scale_time": 1e9,
        "last_scale_action": "scale_out", "last_decision": {"action": "none", "reason": "a request is open"},
        "pending_requests": [REQUEST], "recent_metrics": FRAME, "total_scale_operations": 3, "refusal": "",
    }  # fmt: skip
    canned.says("/status", {"enabled": True, "started": True, "services": services or {"genrm": service}})
    held = {"value": 0.5, "threshold": 0.3, "met": True, "held_secs": 4.0, "required_secs": 15}
    none = {"value": None, "threshold": 3, "met": False, "held_secs": None, "required_secs": 15}
    canned.says("/conditions", {"scale_out": {"token_usage_high": held, "ttft_high": none}, "scale_in": {}})
    over = {**REQUEST, "request_id": "op-1", "status": "FAILED", "triggered_at": 9e8, "error_message": "no room"}
    canned.says("/scale_history", {"history": [{**REQUEST, "status": "ACTIVE"}, over]})
    canned.says(
        "/config", {"evaluation_interval_secs": 30, "scale_out_cooldown_secs": 60, "scale_in_cooldown_secs": 300}
    )


def test_an_autoscaler_over_http(canned: Canned, tmp_path: pathlib.Path) -> None:
    an_autoscaler(canned)
    result = monitor(canned.url, "--once", "--svg", tmp_path / "a.svg")
    assert result.exit_code == 0, result.output
    text = result.stdout
    for name, value in (
        ("engines", "1"), ("min / max", "1 / 4"), ("queue", "7"), ("running", "41"), ("token usage", "50%"),
        ("throughput", "1,234 tokens/s"), ("throughput variance", UNKNOWN), ("ttft p95", "above 10 s"),
        ("queue time p95", UNKNOWN), ("ready", UNKNOWN), ("unknown engines", "10.0.0.1:16001"),
        ("cooldown out / in", "60 s / 300 s"), ("operations in all", "3"), ("last decision", "none: a request is open"),
    ):  # fmt: skip
        assert shown(text, name) == value
    assert re.search(r"✔ +token_usage_high +0\.50 : 0\.30 +held 4 s of 15 s", text)
    assert re.search(r"\? +ttft_high +unknown : 3", text)  # met: false, but nothing was observed
    history = rows(text)
    assert len(history) == 2  # the one that is open is also in the history; it is shown once, as it is now
    assert "op-2" in history[0] and "CREATING" in history[0] and history[0].startswith("│ …")
    assert "op-1" in history[1] and history[1].startswith("│ ✘") and "no room" in text
    assert (tmp_path / "a.svg").is_file()
    assert {path.partition("?")[0] for path in canned.asked} == {"/status", "/conditions", "/scale_history", "/config"}
    assert all(path.partition("?")[2] in ("", "service=genrm", "service=genrm&limit=10") for path in canned.asked)


def test_a_service_that_is_not_there_is_unknown(canned: Canned) -> None:
    an_autoscaler(canned)
    result = monitor(canned.url, "--service", "other", "--once")
    assert result.exit_code == 0
    assert "'other' is not scaled there; known: genrm" in result.output
    assert all(shown(result.output, name) == UNKNOWN for name in FIGURES)


def test_two_services_and_none_named(canned: Canned) -> None:
    an_autoscaler(canned, genrm={}, chat={})
    result = monitor(canned.url, "--once")
    assert isinstance(result.exception, BadInput) and "has genrm, chat; name one of them" in str(result.exception)
    assert "chat" in monitor(canned.url, "--once", "--service", "chat").output


def test_a_server_that_stops_answering_is_unknown(canned: Canned) -> None:
    an_autoscaler(canned)
    served = Served(canned.url, None)
    assert served.board().figures["engines"] == "1"
    canned.says("/status", {}, 503)
    board = served.board()
    assert board.note == "no answer: /status answered 503" and board.figures == {} and board.history == ()
    an_autoscaler(canned)
    canned.says("/conditions", [], 200)  # one route alone: only what it says is unknown
    board = served.board()
    assert board.figures["engines"] == "1" and {row.met for row in board.scale_out} == {None}


def test_a_scale_api_over_http(canned: Canned) -> None:
    engines = [
        {"host": "h", "port": 1, "inflight": 3, "served": 9},
        {"host": "h", "port": 2, "inflight": 4, "served": 1},
    ]
    canned.says("/genrm/engines", {"engines": engines, "current": 2, "ready": 1, "occupied": 2, "pending_cleanup": 1})
    text = monitor(f"{canned.url}/genrm/", "--once").output
    assert text.startswith("genrm ") and "1 not yet cleaned up; a scale API knows no decisions" in text
    assert [shown(text, name) for name in ("engines", "ready", "in flight", "queue")] == ["2", "1", "7", UNKNOWN]


def test_a_token(canned: Canned, tmp_path: pathlib.Path) -> None:
    an_autoscaler(canned)
    (tmp_path / "token").write_text("a-token-of-some-length\n")
    assert monitor(canned.url, "--once", "--token-file", tmp_path / "token").exit_code == 0
    assert set(canned.tokens) == {"Bearer a-token-of-some-length"}
    canned.says("/status", {"error": "AUTHENTICATION_ERROR"}, 401)
    result = monitor(canned.url, "--once")
    assert "answered 401 (give --token-file)" in str(result.exception)


ANY = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6), st.just("[red]\x1b[31m")),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from([*REQUEST, *FRAME, "genrm", "scale_out", "value", "met"]), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


def test_whatever_a_server_answers_is_shown_or_unknown(canned: Canned) -> None:
    an_autoscaler(canned)
    served = Served(canned.url, "genrm")

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(ANY, ANY, ANY, ANY, ANY)
    def play(service: Any, shown_: Any, past: Any, config: Any, services: Any) -> None:
        for odd in ({"genrm": service}, services):
            canned.says("/status", {"services": odd})
            canned.says("/conditions", shown_)
            canned.says("/scale_history", {"history": past})
            canned.says("/config", config)
            board = served.board()
            text = text_of(board)
            assert "\x1b" not in text and text.startswith("genrm ")
            assert "\x1b" not in svg_of(board)

    play()


# --- parts ---


def test_texts() -> None:
    assert (number(3), number(0.0), number(2.5), number(True), number("3"), number(float("nan"))) == (
        "3", "0", "2.50", None, None, None,
    )  # fmt: skip
    assert number(10**400) is number(1e30) is number(float("inf")) is number(float("-inf")) is None
    assert clean("a\x1b[31mb\nc") == "a [31mb c" and len(clean("x" * 500)) == 90
    kinds = ("ACTIVE", "COMPLETED", "PARTIAL", "FAILED", "CANCELLED", "REJECTED", "CONFLICT", "NOOP", "CREATING", "")
    assert list(map(kind_of, kinds)) == ["good"] * 3 + ["bad"] * 4 + ["neutral"] + ["open"] * 2


def test_the_history_has_ten_rows_and_each_operation_once() -> None:
    many = [HistoryRow(f"op-{n}", "scale_out", "ACTIVE", float(n)) for n in range(30)]
    found = latest([HistoryRow("op-29", "scale_out", "CREATING", 29.0), *many])
    assert len(found) == SHOWN and [row.name for row in found][:2] == ["op-29", "op-28"]
    assert found[0].status == "CREATING"


def test_a_run_without_a_scaled_service(tmp_path: pathlib.Path) -> None:
    """Nothing of it is shown unasked; one of its services is on request, and one that it does not have is refused."""
    run = tmp_path / "run"
    _ran("minimal", run)
    asked = monitor(run, "--once")
    assert re.search(r"has no scaled service; give one with --service; what it has is \w+$", str(asked.exception))
    name = str(asked.exception).rpartition(" ")[2]
    assert monitor(run, "--once", "--service", name).exit_code == 0
    refused = monitor(run, "--once", "--service", "nobody")
    assert re.search(rf"--service nobody: .* has {name}$", str(refused.exception))


def test_of_an_imported_run_the_service_is_shown_whose_api_was_asked(tmp_path: pathlib.Path) -> None:
    import_genrm(write(SOUND["manual"](), tmp_path / "in"), tmp_path / "run")
    board = monitor(tmp_path / "run", "--once")
    assert board.exit_code == 0 and board.output.startswith("genrm "), board.output
    assert "nothing but its operations was seen" in board.output
    assert re.search(r"scale_in +2 → 1 +COMPLETED", board.output)
    refused = monitor(tmp_path / "run", "--once", "--service", "nobody")
    assert re.search(r"--service nobody: .* has genrm$", str(refused.exception))


def test_a_scenario_that_is_not_ours_tells_nothing(cycle: pathlib.Path) -> None:
    from analysis.rundir import RunDir

    info = RunDir(cycle).info()
    assert list(services_of(info)) == ["genrm"]
    for text in ("[", "topology: 3", "topology: {services: {a: {scaling: 7}}}", ""):
        found = services_of(info.model_copy(update={"scenario_text": text}))
        assert found in ({}, {"a": None})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["/nowhere"], "/nowhere: does not exist; name a run directory or a URL"),
        (["FILE"], "is no directory; name a run directory or a URL"),
        (["EMPTY"], r"no run directory \(run.json is missing\)"),
        (["CYCLE", "--service", "chat"], "--service chat: .* has genrm"),
        (["CYCLE", "--svg", "/nowhere/a.svg"], "--svg /nowhere/a.svg: its folder does not exist"),
        (["CYCLE", "--svg", "EMPTY"], "is a directory"),
        (["CYCLE", "--svg", ""], "is a directory"),
        (["CYCLE", "--token-file", "x"], "--token-file goes with a URL"),
        (["http://127.0.0.1:9", "--at", "3"], "--at goes with a run"),
        (["http://127.0.0.1:9"], "/status: .*refused"),
        (["ftp://127.0.0.1"], "no URL of a control API"),
        (["http://me:secret@127.0.0.1"], "no URL of a control API"),
        (["http://127.0.0.1:99999"], "no URL of a control API"),
        (["http://127.0.0.1:9/a\nb"], "no URL of a control API"),
        (["http://127.0.0.1:9/a b"], "no URL of a control API"),
        (["http://127.0.0.1:9", "--token-file", "EMPTY"], "Is a directory"),
    ],
)
def test_bad_input_is_one_message(arguments: list[str], says: str, cycle: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    places = {"CYCLE": str(cycle), "EMPTY": str(tmp_path / "empty"), "FILE": str(tmp_path / "file")}
    result = monitor(*(places.get(word, word) for word in arguments))
    assert isinstance(result.exception, BadInput)  # one line and exit code 2: scenarios.__main__.main
    assert re.search(says, str(result.exception)), result.exception


@pytest.mark.parametrize("option", ["--at", "--speed", "--every"])
def test_nan_is_no_number(option: str, cycle: pathlib.Path) -> None:
    result = monitor(str(cycle), option, "nan")
    assert result.exit_code == 2 and f"Invalid value for '{option}': 'nan' is no number" in result.output


def test_a_server_that_is_no_control_api(canned: Canned) -> None:
    result = monitor(canned.url, "--once")
    assert "is neither an autoscaler (/status) nor a scale API (/engines)" in str(result.exception)


def test_broken_evidence_is_named(cycle: pathlib.Path, tmp_path: pathlib.Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(cycle, run)
    with (run / "events.jsonl").open("ab") as file:
        file.write(b"not an event\n")
    result = monitor(run)
    assert isinstance(result.exception, BadInput) and "events.jsonl" in str(result.exception)
