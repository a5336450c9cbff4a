"""The control API of rollout replicas over HTTP, asked by a client made by hand and by schemathesis; no Ray."""

from __future__ import annotations

import pathlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from protocol.openapi import as_text, document
from tests.real.served import Process
from tests.real.served_rollouts import ROOM
from tests.real.test_http_scaling import PATIENCE_S, Client, passes_schemathesis


@pytest.fixture
def served(tmp_path: pathlib.Path) -> Iterator[Process]:
    process = Process(["tests.real.served_rollouts"], tmp_path / "served.log")
    process.url = process.until_says(r"serving on (http://\S+) ").group(1)
    yield process
    process.end()


def ended(client: Client, path: str) -> dict[str, Any]:
    """The status of an operation once it is terminal."""
    ends = time.monotonic() + PATIENCE_S
    while True:
        status, body = client.ask("GET", path)
        assert status == 200, body
        if body["status"] in ("ACTIVE", "PARTIAL", "CANCELLED", "COMPLETED", "FAILED"):
            found: dict[str, Any] = body
            return found
        assert time.monotonic() < ends, body
        time.sleep(0.1)


def test_out_and_in_again_by_hand(served: Process) -> None:
    ask = (client := Client(served.url)).ask
    body = {"num_replicas": 3, "idempotency_key": "k"}
    status, admitted = ask("POST", "/rollout/scale_out", body)
    assert (status, admitted["status"], admitted["current"]) == (200, "PENDING", 1)
    operation = admitted["request_id"]
    assert ask("POST", "/rollout/scale_out", body)[1]["request_id"] == operation
    assert ask("POST", "/rollout/scale_in", {"num_replicas": 1})[1]["error"] == "CONFLICT"
    over = ended(client, f"/rollout/scale_out/{operation}")
    assert (over["status"], over["delta"], over["created"], over["cleanup_required"]) == ("ACTIVE", 2, 2, False)
    assert ask("GET", f"/rollout/scale_in/{operation}")[0] == 404
    status, late = ask("DELETE", f"/rollout/scale_out/{operation}")
    assert (status, late["error"]) == (409, "NOT_CANCELLABLE")
    assert ask("GET", "/rollout/engines")[1]["current"] == ask("GET", "/rollout/metrics")[1]["num_engines"] == 3
    assert ask("GET", "/rollout/health") == (200, {"status": "healthy", "instances": {"rollout": "healthy"}})

    status, dry = ask("POST", "/rollout/scale_in", {"num_replicas": 1, "dry_run": True})
    assert (status, dry["status"], dry["replicas"]) == (200, "DRY_RUN", ["engine-2", "engine-1"])
    status, admitted = ask("POST", "/rollout/scale_in", {"num_replicas": 1})
    over = ended(client, f"/rollout/scale_in/{admitted['request_id']}")
    assert (over["status"], over["removed"], over["cleanup_required"]) == ("COMPLETED", 2, False)
    assert ask("POST", "/rollout/scale_in", {"num_replicas": 1})[1]["status"] == "NOOP"
    served.signal(signal.SIGTERM)
    assert served.wait() == 0


def test_a_scale_out_is_cancelled_and_one_that_finds_no_room_says_so(served: Process) -> None:
    ask = (client := Client(served.url)).ask
    status, admitted = ask("POST", "/rollout/scale_out", {"num_replicas": ROOM + 5})
    at = f"/rollout/scale_out/{admitted['request_id']}"
    assert ended(client, at)["failure_categories"] == ["placement"]
    assert ask("GET", "/rollout/engines")[1]["occupied"] == 1 + ROOM
    assert ended(client, f"/rollout/scale_in/{_in(client)}")["status"] == "COMPLETED"
    # A new one is in CREATING for some hundredths of a second: one of several tries finds it there.
    for _ in range(20):
        operation = ask("POST", "/rollout/scale_out", {"num_replicas": 2})[1]["request_id"]
        status, called_off = ask("DELETE", f"/rollout/scale_out/{operation}")
        over = ended(client, f"/rollout/scale_out/{operation}")
        if status == 200:
            assert called_off["status"] in ("PENDING", "CREATING")
            assert (over["status"], over["created"], over["cleanup_required"]) == ("CANCELLED", 0, False)
            break
        assert ended(client, f"/rollout/scale_in/{_in(client)}")["status"] == "COMPLETED"
    else:
        raise AssertionError("no scale-out was caught before it was connected")
    assert ask("DELETE", f"/rollout/scale_in/{operation}")[0] == 405
    assert ask("GET", "/rollout/engines")[1]["occupied"] == 1


def _in(client: Client) -> str:
    return str(client.ask("POST", "/rollout/scale_in", {"num_replicas": 1})[1]["request_id"])


@pytest.fixture(scope="module")
def session_served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """For requests that change nothing."""
    process = Process(["tests.real.served_rollouts"], tmp_path_factory.mktemp("served") / "served.log")
    process.url = process.until_says(r"serving on (http://\S+) ").group(1)
    yield process
    process.end()


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/rollout/scale_out", b"{", 400, "INVALID_REQUEST_ERROR"),
        ("POST", "/rollout/scale_out", [], 422, "INVALID_TYPE"),
        ("POST", "/rollout/scale_out", {}, 422, "INVALID_TYPE"),
        ("POST", "/rollout/scale_out", {"num_replicas": 2, "engine_urls": ["a:1"]}, 422, "INVALID_TYPE"),
        ("POST", "/rollout/scale_out", {"engine_urls": ["http://a:99999"]}, 422, "INVALID_TYPE"),
        ("POST", "/rollout/scale_out", {"engine_urls": ["http://[:1"]}, 422, "INVALID_TYPE"),
        ("POST", "/rollout/scale_out", {"num_replicas": 2, "model_name": "default"}, 422, "INVALID_TYPE"),
        *(("POST", "/rollout/scale_in", {"num_replicas": wrong}, 422, "INVALID_TYPE")
          for wrong in (True, "2", 2.0, None, 0, -1)),
        pytest.param("POST", "/rollout/scale_in", b"x" * 70_000, 413, "REQUEST_TOO_LARGE", id="too long"),
        ("GET", "/rollout/engines?all=1", None, 400, "INVALID_REQUEST_ERROR"),
        ("GET", "/rollout/scale_in/none", None, 404, "UNKNOWN_OPERATION"),
        ("DELETE", "/rollout/scale_out/none", None, 404, "UNKNOWN_OPERATION"),
        ("POST", "/rollout/scale_out/none/reconcile", None, 404, "NOT_FOUND"),
        ("POST", "/rollout/update_weights", {"path": "x"}, 404, "NOT_FOUND"),
        ("POST", "/rollout/generate", {"text": "x"}, 404, "NOT_FOUND"),
    ],
)  # fmt: skip
def test_what_is_refused(session_served: Process, method: str, path: str, body: Any, status: int, code: str) -> None:
    got, answer = Client(session_served.url).ask(method, path, body)
    assert (got, answer["error"]) == (status, code), answer
    assert answer["detail"] and set(answer) <= {"error", "detail", "outcome"}


def test_engines_that_are_not_there_are_no_crash(served: Process) -> None:
    ask = (client := Client(served.url)).ask
    for url in ("http://a..b:1", "http://" + "a" * 64 + ":1", "http://[::1]:1", "http://a b:1", "xn--:0"):
        status, admitted = ask("POST", "/rollout/scale_out", {"engine_urls": [url]})
        assert status == 200, (url, admitted)
        over = ended(client, f"/rollout/scale_out/{admitted['request_id']}")
        assert (over["status"], over["failure_category"]) == ("FAILED", "connect"), (url, over)
    assert ask("GET", "/rollout/engines")[1]["current"] == 1


def test_the_document_that_is_served_is_that_of_the_code(session_served: Process) -> None:
    status, found = Client(session_served.url).ask("GET", "/openapi.json")
    assert status == 200 and as_text(found) == as_text(document({"/rollout": "rollout"}))


def test_schemathesis_finds_nothing(served: Process, tmp_path: pathlib.Path) -> None:
    """Requests made from the document: no 5xx, every status and every body as documented."""
    passes_schemathesis(served.url, tmp_path, operations=8, more_than=100)
