"""``python -m real.autoscaler`` over a scale API that another process serves; replicas whose pages a test writes."""

from __future__ import annotations

import json
import pathlib
import re
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from real.autoscaler import main
from tests.protocol.scaling.autoscaler_world import page
from tests.real.served import Process, free_port
from tests.real.test_http_scaling import PATIENCE_S, TOKEN, Client

QUICK = {
    "metrics_interval_secs": 0.1, "evaluation_interval_secs": 0.2, "max_engines": 2, "scale_out_cooldown_secs": 0.5,
    "scale_in_cooldown_secs": 0.5, "scale_out_policy": {"condition_duration_secs": 0.3},
    "scale_in_policy": {"condition_duration_secs": 0.3, "throughput_variance_threshold": 1000},
}  # fmt: skip


class Pages:
    """What three replicas say of themselves, each on a port of its own. ``usage``: None: nobody answers."""

    def __init__(self) -> None:
        self.usage: float | None = 0.5
        pages = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                usage = pages.usage
                told = page(token_usage=usage or 0, num_queue_reqs=0, num_running_reqs=1, gen_throughput=100).encode()
                self.send_response(500 if usage is None else 200)
                self.send_header("Content-Length", str(len(told)))
                self.end_headers()
                self.wfile.write(told)

            def log_message(self, *_: Any) -> None:
                return None

        self.servers = [HTTPServer(("127.0.0.1", 0), Handler) for _ in range(3)]
        self.ports = [server.server_port for server in self.servers]
        self._threads = [threading.Thread(target=server.serve_forever, args=(0.01,)) for server in self.servers]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        for server, thread in zip(self.servers, self._threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()


@pytest.fixture
def pages() -> Iterator[Pages]:
    made = Pages()
    yield made
    made.end()


def until(reached: Any) -> Any:
    ends = time.monotonic() + PATIENCE_S
    while not (found := reached()):
        assert time.monotonic() < ends, "waited in vain"
        time.sleep(0.05)
    return found


def started(folder: pathlib.Path, arguments: list[str], name: str) -> Process:
    process = Process(arguments, folder / f"{name}.log")
    process.url = process.until_says(r"serving on (http://\S+) ").group(1)
    return process


def test_out_and_in_over_http(tmp_path: pathlib.Path, pages: Pages) -> None:
    ports = [word for port in pages.ports for word in ("--page-port", str(port))]
    service = started(tmp_path, ["tests.real.served_scaling", "--token", TOKEN, *ports], "service")
    (tmp_path / "token").write_text(TOKEN)
    config = {**QUICK, "service_targets": {"genrm": f"{service.url}/genrm"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [
        "real.autoscaler",
        "--config",
        str(tmp_path / "config.json"),
        "--target-token-file",
        str(tmp_path / "token"),
    ]
    scaler = started(tmp_path, command, "scaler")
    try:
        client = Client(scaler.url)

        def view() -> dict[str, Any]:
            found: dict[str, Any] = client.ask("GET", "/status")[1]["services"].get("genrm", {})
            return found

        def history(action: str) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = client.ask("GET", f"/scale_history?service=genrm&action={action}")[1][
                "history"
            ]
            return found

        assert client.ask("GET", "/health")[1]["started"] is False and view() == {}
        assert client.ask("POST", "/start")[1] == {"started": True, "services": ["genrm"]}
        until(lambda: view()["recent_metrics"] and view()["recent_metrics"]["avg_token_usage"] == 0.5)
        pages.usage = 0.95
        (out,) = until(lambda: history("scale_out"))
        assert (out["status"], out["from_engines"], out["to_engines"]) == ("ACTIVE", 1, 2)
        assert out["triggered_conditions"] == ["token_usage_high"]
        until(lambda: view()["current_engines"] == 2)
        pages.usage = None  # nobody answers: unknown replicas, and nothing is removed on that
        until(lambda: view()["recent_metrics"]["unknown_engines"])
        time.sleep(1.5)
        assert history("scale_in") == [] and view()["recent_metrics"]["avg_token_usage"] is None
        pages.usage = 0.01
        (back,) = until(lambda: history("scale_in"))
        assert (back["status"], back["to_engines"]) == ("COMPLETED", 1)
        assert client.ask("GET", "/openapi.json")[1]["paths"].keys() >= {"/status", "/config"}
        scaler.signal(signal.SIGTERM)
        assert scaler.wait() == 0
        assert re.search(r"genrm: scale_out to 2: accepted \(PENDING\)", scaler.log.read_text())
    finally:
        scaler.end()
        service.end()


def test_a_service_that_is_not_there_is_asked_again_and_again(tmp_path: pathlib.Path) -> None:
    config = {**QUICK, "service_targets": {"genrm": f"http://127.0.0.1:{free_port()}/genrm"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    scaler = started(tmp_path, ["real.autoscaler", "--config", str(tmp_path / "config.json"), "--start"], "scaler")
    try:
        client = Client(scaler.url)
        time.sleep(1.0)
        mine = client.ask("GET", "/status")[1]["services"]["genrm"]
        assert mine["current_engines"] is None and mine["pending_requests"] == []
        assert client.ask("GET", "/health")[1]["status"] == "healthy"  # it is the service that is not there
        for host in ("a..b", "a" * 64):  # no host at all is nobody there as well
            patch = {"service_targets": {"genrm": None, "odd": f"http://{host}/genrm"}, "max_engines": 9}
            assert client.ask("PATCH", "/config", patch)[1]["max_engines"] == 9
            services = client.ask("GET", "/status")[1]["services"]
            assert list(services) == ["odd"] and services["odd"]["current_engines"] is None
        assert client.ask("GET", "/health")[1]["status"] == "healthy"
        assert client.ask("PATCH", "/config", {"service_targets": {"odd": None}})[0] == 200
        assert client.ask("GET", "/status")[1]["services"] == {}
        scaler.signal(signal.SIGINT)
        assert scaler.wait() == 0
    finally:
        scaler.end()


@pytest.mark.parametrize(
    ("text", "arguments", "says"),
    [
        (None, [], "--config {}: No such file or directory"),
        ("{", [], "--config {}: Expecting"),
        ("[]", [], "write a JSON object"),
        ('{"max_engines": 0}', [], "--config {}: max_engines: Input should be greater than or equal to 1"),
        ('{"odd": 1}', [], "--config {}: odd: Extra inputs are not permitted"),
        ('{"max_engines": 2, "max_engines": 3}', [], "--config {}: the key 'max_engines' is written twice"),
        ('{"service_targets": {"genrm": "nonsense"}}', [], "service_targets.genrm: 'nonsense' is no URL of a scale"),
        ('{"service_targets": {"a": "http://x y:1"}}', [], "service_targets.a: 'http://x y:1' is no URL"),
        ('{"rollout_service_url": "file:///x"}', [], "rollout_service_url: 'file:///x' is no URL"),
        ("{}", ["--target-token-file", __file__], f"--target-token-file {__file__}: holds no token"),
        ("{}", ["--host", "0.0.0.0"], "needs a token"),
        ("{}", ["--token-file", "/dev/null"], "--token-file /dev/null: is empty"),
        ("{}", ["--port", "70000"], "port Input should be less than or equal to 65535"),
    ],
)
def test_bad_usage_is_one_message_and_exit_code_2(
    text: str | None, arguments: list[str], says: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    assert main(["--config", str(path), *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and says.format(path) in lines[0]
