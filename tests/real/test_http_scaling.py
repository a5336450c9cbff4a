"""The control APIs of scaling over HTTP, asked by a client made by hand and by schemathesis; no Ray."""

from __future__ import annotations

import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from protocol.openapi import as_text, document
from tests.real.served import Process

PATIENCE_S = 20.0
TOKEN = "a-token-of-some-length"


class Client:
    """HTTP/1.1 over a socket, one connection a request, nothing that a library would put right."""

    def __init__(self, url: str) -> None:
        self.host, _, port = url.removeprefix("http://").partition(":")
        self.port = int(port)

    def send(self, raw: bytes, *, half: bool = False) -> tuple[int, dict[str, str], Any]:
        with socket.create_connection((self.host, self.port), timeout=PATIENCE_S) as connection:
            connection.sendall(raw)
            if half:
                connection.shutdown(socket.SHUT_WR)
            got = b""
            while chunk := connection.recv(65536):
                got += chunk
        head, _, body = got.partition(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return int(status.split()[1]), headers, json.loads(body) if body else None

    def ask(self, method: str, path: str, body: Any = None, *, headers: str = "") -> tuple[int, Any]:
        sent = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(sent)}\r\n{headers}\r\n"
        )
        status, _, answer = self.send(head.encode() + sent)
        return status, answer

    def until(self, path: str, key: str, value: str) -> Any:
        ends = time.monotonic() + PATIENCE_S
        while True:
            status, answer = self.ask("GET", path)
            assert status == 200, answer
            if answer[key] == value:
                return answer
            assert time.monotonic() < ends, answer
            time.sleep(0.1)


@pytest.fixture
def served(tmp_path: pathlib.Path) -> Iterator[Process]:
    process = Process(["tests.real.served_scaling"], tmp_path / "served.log")
    process.url = process.until_says(r"serving on (http://\S+) ").group(1)
    yield process
    process.end()


def test_out_and_in_again_by_hand(served: Process) -> None:
    ask = (client := Client(served.url)).ask
    body = {"num_replicas": 2, "idempotency_key": "k", "timeout_secs": 30}
    status, admitted = ask("POST", "/genrm/scale_out", body)
    assert (status, admitted["status"], admitted["current"]) == (200, "PENDING", 1)
    operation = admitted["request_id"]
    assert ask("POST", "/genrm/scale_out", body)[1]["request_id"] == operation
    status, refused = ask("POST", "/genrm/scale_out", {**body, "num_replicas": 3})
    assert (status, refused["error"]) == (409, "IDEMPOTENCY_CONFLICT")
    status, refused = ask("POST", "/genrm/scale_in", {"num_replicas": 1})
    assert (status, refused["error"]) == (409, "CONFLICT")
    over = client.until(f"/genrm/scale_out/{operation}", "status", "ACTIVE")
    assert over["cleanup_required"] is False and (over["current"], over["created"]) == (2, 1)
    assert ask("GET", f"/genrm/scale_in/{operation}")[0] == 404
    status, clean = ask("POST", f"/genrm/scale_out/{operation}/reconcile")
    assert (status, clean["cleanup_required"]) == (200, False)
    assert ask("GET", "/genrm/engines")[1]["current"] == ask("GET", "/genrm/metrics")[1]["num_engines"] == 2
    status, noop = ask("POST", "/genrm/scale_out", {"num_replicas": 2})
    assert (status, noop["status"], "request_id" in noop) == (200, "NOOP", False)

    places = {key: {_answering(client, key) for _ in range(4)} for key in ("a", "b", "c", "d", "e")}
    assert all(len(engines) == 1 for engines in places.values())  # a key stays where it is
    assert set().union(*places.values()) == {"engine-0", "engine-1"}  # and they do not all go to one

    status, admitted = ask("POST", "/genrm/scale_in", {"num_replicas": 1})
    over = client.until(f"/genrm/scale_in/{admitted['request_id']}", "status", "COMPLETED")
    assert over["removed"] == 1 and over["cleanup_required"] is False
    assert {_answering(client, key) for key in places} == {"engine-0"}


def _answering(client: Client, key: str) -> str:
    status, said = client.ask("POST", "/genrm/generate", {"text": "x", "route_key": key})
    assert status == 200 and said["engine_port"] == 30000, said
    name: str = said["answer"]["engine"]
    return name


def test_an_autoscaler_by_hand(served: Process) -> None:
    ask = (client := Client(served.url)).ask
    at = "/genrm/autoscaler"
    assert ask("GET", f"{at}/health")[1]["started"] is False
    assert ask("POST", f"{at}/start") == (200, {"started": True, "services": ["genrm"]})
    ends = time.monotonic() + PATIENCE_S
    while (found := ask("GET", f"{at}/status")[1]["services"]["genrm"])["recent_metrics"] is None:
        assert time.monotonic() < ends
        time.sleep(0.1)
    assert (found["current_engines"], found["recent_metrics"]["avg_token_usage"]) == (1, 0.5)
    status, config = ask("PATCH", f"{at}/config", {"scale_out_policy": {"token_usage_threshold": 0.4,
                                                                       "condition_duration_secs": 0}})  # fmt: skip
    assert (status, config["scale_out_policy"]["token_usage_threshold"]) == (200, 0.4)
    history = _history(client, 1)
    assert [one["action"] for one in history] == ["scale_out"] and history[0]["status"] == "ACTIVE"
    assert ask("GET", "/genrm/engines")[1]["current"] == 2
    assert ask("GET", f"{at}/scale_history?service=genrm&action=scale_in")[1]["total"] == 0
    status, cleared = ask("POST", f"{at}/clear_history?service=genrm")
    assert status == 200 and cleared["cleared"] >= 1
    assert ask("PATCH", f"{at}/config", {"max_engines": 0})[1]["error"] == "INVALID_CONFIG"
    assert ask("POST", f"{at}/enable", {"enabled": False})[1]["enabled"] is False
    assert ask("POST", f"{at}/enable")[1]["enabled"] is True


def _history(client: Client, at_least: int) -> list[dict[str, Any]]:
    ends = time.monotonic() + PATIENCE_S
    while True:
        found: list[dict[str, Any]] = client.ask("GET", "/genrm/autoscaler/scale_history?service=genrm")[1]["history"]
        if len(found) >= at_least:
            return found
        assert time.monotonic() < ends
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/genrm/scale_out", b"{", 400, "INVALID_REQUEST_ERROR"),
        ("POST", "/genrm/scale_out", b"\xff", 400, "INVALID_REQUEST_ERROR"),
        ("POST", "/genrm/scale_out", b'{"num_replicas": NaN}', 400, "INVALID_REQUEST_ERROR"),
        ("POST", "/genrm/scale_out", b"", 400, "INVALID_REQUEST_ERROR"),
        ("POST", "/genrm/scale_out", [], 422, "INVALID_TYPE"),
        *(("POST", "/genrm/scale_in", {"num_replicas": wrong}, 422, "INVALID_TYPE")
          for wrong in (True, "2", 2.0, 2.5, None, 0, -1, 10**12 + 1, 10**300)),
        ("POST", "/genrm/scale_out", {"num_replicas": 1 << 63}, 422, "INVALID_TYPE"),  # no evidence could hold it
        ("POST", "/genrm/scale_in", {"num_replicas": 1, "model_name": "other"}, 400, "UNKNOWN_MODEL"),
        ("POST", "/genrm/scale_in", b"x" * 70_000, 413, "REQUEST_TOO_LARGE"),
        ("GET", "/genrm/engines?all=1", None, 400, "INVALID_REQUEST_ERROR"),
        ("GET", "/genrm/scale_out/", None, 404, "NOT_FOUND"),
        ("GET", "/genrm/scale_out/a/b", None, 404, "NOT_FOUND"),
        ("GET", "/genrm/scale_out/a%0Ab", None, 404, "UNKNOWN_OPERATION"),
        ("GET", "/other/engines", None, 404, "NOT_FOUND"),
        ("DELETE", "/genrm/engines", None, 405, "METHOD_NOT_ALLOWED"),
        ("GET", "/genrm/autoscaler/conditions?service=other", None, 404, "UNKNOWN_SERVICE"),
        ("GET", "/genrm/autoscaler/scale_history?limit=0", None, 422, "INVALID_CONFIG"),
        ("GET", "/genrm/autoscaler/scale_history?limit=1&limit=2", None, 400, "INVALID_REQUEST_ERROR"),
        ("PATCH", "/genrm/autoscaler/config", b'{"a":' * 900 + b"1" + b"}" * 900, 422, "INVALID_CONFIG"),
        ("PATCH", "/genrm/autoscaler/config", b"[" * 50_000, 400, "INVALID_REQUEST_ERROR"),
        ("POST", "/genrm/generate", {"text": "x", "stream": True}, 422, "INVALID_BODY"),
        ("POST", "/genrm/generate", {}, 422, "INVALID_BODY"),
    ],
)  # fmt: skip
def test_what_is_refused(session_served: Process, method: str, path: str, body: Any, status: int, code: str) -> None:
    got, answer = Client(session_served.url).ask(method, path, body)
    assert (got, answer["error"]) == (status, code), answer
    assert answer["detail"] and set(answer) <= {"error", "detail", "outcome"}


@pytest.fixture(scope="module")
def session_served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """For requests that change nothing."""
    process = Process(["tests.real.served_scaling"], tmp_path_factory.mktemp("served") / "served.log")
    process.url = process.until_says(r"serving on (http://\S+) ").group(1)
    yield process
    process.end()


def test_a_body_that_does_not_come_is_waited_for_so_long_and_no_longer(session_served: Process) -> None:
    raw = b"POST /genrm/scale_out HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 10\r\n\r\n{"
    begun = time.monotonic()
    status, _, answer = Client(session_served.url).send(raw)
    assert (status, answer["error"]) == (408, "REQUEST_TIMEOUT")
    assert 0.9 < time.monotonic() - begun < 10


def test_a_method_that_is_not_allowed_names_those_that_are(session_served: Process) -> None:
    raw = b"PUT /genrm/autoscaler/config HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    status, headers, _ = Client(session_served.url).send(raw)
    assert (status, headers["allow"]) == (405, "GET, PATCH")


def test_a_token_is_asked_for_on_every_route(tmp_path: pathlib.Path) -> None:
    process = Process(["tests.real.served_scaling", "--token", TOKEN], tmp_path / "served.log")
    try:
        client = Client(process.until_says(r"serving on (http://\S+) ").group(1))
        for path in ("/openapi.json", "/genrm/engines", "/genrm/autoscaler/config", "/nowhere"):
            status, answer = client.ask("GET", path)
            assert (status, answer["error"]) == (401, "AUTHENTICATION_ERROR")
        assert client.ask("GET", "/genrm/engines", headers=f"Authorization: Bearer {TOKEN}x\r\n")[0] == 401
        assert client.ask("GET", "/genrm/engines", headers=f"Authorization: Bearer {TOKEN}\r\n")[0] == 200
    finally:
        process.end()


def test_it_ends_in_good_order(served: Process) -> None:
    client = Client(served.url)
    assert client.ask("POST", "/genrm/autoscaler/start")[0] == 200
    with socket.create_connection((client.host, client.port), timeout=PATIENCE_S):  # an idle one does not hold it up
        served.signal(signal.SIGTERM)
        assert served.wait() == 0
    served.until_says("stopped")
    with pytest.raises(OSError):
        client.ask("GET", "/genrm/engines")


def test_the_document_that_is_served_is_that_of_the_code(session_served: Process) -> None:
    status, found = Client(session_served.url).ask("GET", "/openapi.json")
    assert status == 200
    assert as_text(found) == as_text(document({"/genrm": "scale", "/genrm/autoscaler": "autoscaler"}))


CHECKS = (
    "not_a_server_error,status_code_conformance,response_schema_conformance,content_type_conformance,unsupported_method"
)


def passes_schemathesis(url: str, folder: pathlib.Path, *, operations: int, more_than: int) -> None:
    """All requests that it makes from the document pass: so many operations, and more than so many requests."""
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--seed", "1", "--no-color",
        "--max-examples", "10", "--continue-on-failure", "--checks", CHECKS, "--generation-deterministic",
    ]  # fmt: skip
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = re.search(r"(\d+) generated, (\d+) passed", ran.stdout)
    assert found is not None and found[1] == found[2] and int(found[1]) > more_than, ran.stdout
    assert f"Tested: {operations}" in ran.stdout


def test_schemathesis_finds_nothing(served: Process, tmp_path: pathlib.Path) -> None:
    """Some 700 requests made from the document: no 5xx, every status and every body as documented."""
    Client(served.url).ask("POST", "/genrm/autoscaler/start")
    passes_schemathesis(served.url, tmp_path, operations=20, more_than=300)
