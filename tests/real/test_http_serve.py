"""``python -m real.serve``: what bad usage gets, how it ends, and that it needs no Ray."""

from __future__ import annotations

import contextlib
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest

from protocol.messages import EngineAddress
from real.options import Usage, engine_address
from real.serve import main
from tests.real.run_command import until
from tests.real.served import ROOT, fleet, free_port, start_gateway

ENGINE = ["--engine", "http://127.0.0.1:9"]


def test_it_needs_no_ray() -> None:
    code = "import sys, real.serve; sys.exit(any(m.split('.')[0] in ('ray', 'torch', 'sglang') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([*ENGINE, "--token-file", "/nowhere/token"], "--token-file /nowhere/token: No such file or directory"),
        ([*ENGINE, "--token-file", "/dev/null"], "--token-file /dev/null: is empty"),
        ([*ENGINE, "--port", "70000"], "port Input should be less than or equal to 65535"),
        ([*ENGINE, "--host", "0.0.0.0"], "error: host '0.0.0.0' is reachable from other machines and needs a token"),
        ([*ENGINE, "--attempts", "0"], "attempts Input should be greater than or equal to 1"),
        ([*ENGINE, *ENGINE], "--engine: the same address twice"),
        (["--engine", "127.0.0.1:9"], "give it as http://HOST:PORT"),
        (["--engine", "https://x:1"], "give it as http://HOST:PORT"),
        (["--engine", "http://x:99999"], "give it as http://HOST:PORT"),
        (["--engine", "http://x:1/v1"], "give it as http://HOST:PORT"),
        (["--engine", "http://x:0"], "give it as http://HOST:PORT"),
        (["--engine", "http://a b:1"], "give it as http://HOST:PORT"),
        (["--engine", "http://[::1"], "give it as http://HOST:PORT"),
        (["--engine", "http://me:secret@x:1"], "give it as http://HOST:PORT"),
    ],
)
def test_bad_usage_is_one_message_and_exit_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and says in lines[0]


@pytest.mark.parametrize("host", ["a..b", "a" * 70])
def test_a_host_that_has_no_name_of_one(host: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = tmp_path / "token"
    token.write_text("t" * 16)
    assert main([*ENGINE, "--host", host, "--token-file", str(token)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"error: cannot listen on {host}:0: ")


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main([*ENGINE, "--port", str(taken.getsockname()[1])]) == 2
    assert "in use" in capsys.readouterr().err


def test_addresses() -> None:
    assert engine_address("http://10.0.0.1:30000/") == EngineAddress("10.0.0.1:30000", 0, "10.0.0.1", 30000)
    assert engine_address("http://[::1]:30000") == EngineAddress("[::1]:30000", 0, "::1", 30000)
    with pytest.raises(Usage):
        engine_address("http://10.0.0.1")


def test_it_serves_before_its_engines_are_there(tmp_path: pathlib.Path) -> None:
    class Absent:
        url = f"http://127.0.0.1:{free_port()}"

    gateway = start_gateway(tmp_path, [Absent()])  # type: ignore[list-item]
    try:
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{gateway.url}/ready", timeout=5)
        assert caught.value.code == 503
        assert urllib.request.urlopen(f"{gateway.url}/health", timeout=5).status == 200
        gateway.signal(signal.SIGINT)
        assert gateway.wait() == 0
    finally:
        gateway.end()


def test_sigterm_lets_what_is_in_flight_finish(tmp_path: pathlib.Path) -> None:
    with fleet(tmp_path, 1) as (gateway, _):
        body = b'{"text": "x", "sampling_params": {"max_new_tokens": 500, "ignore_eos": true}}'
        answers: list[bytes] = []

        def call() -> None:
            with urllib.request.urlopen(f"{gateway.url}/generate", data=body, timeout=30) as answer:
                answers.append(answer.read())

        thread = threading.Thread(target=call)
        thread.start()
        time.sleep(0.3)
        gateway.signal(signal.SIGTERM)
        gateway.until_says("stopping")
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(f"{gateway.url}/health", timeout=5)
        thread.join()
        assert b'"completion_tokens": 500' in answers[0]
        assert gateway.wait() == 0


@pytest.mark.parametrize("reader", ["leaves", "has no room"])
def test_it_serves_on_when_nobody_takes_its_log(tmp_path: pathlib.Path, reader: str) -> None:
    roster, port = tmp_path / "roster", free_port()
    roster.write_text("http://127.0.0.1:9")
    command = [sys.executable, "-m", "real.serve", "--roster", str(roster), "--port", str(port)]
    with contextlib.ExitStack() as stack:
        log = subprocess.PIPE if reader == "leaves" else stack.enter_context(open("/dev/full", "w"))
        gateway = stack.enter_context(subprocess.Popen(command, cwd=ROOT, stderr=log))
        stack.callback(gateway.kill)
        if gateway.stderr is not None:
            gateway.stderr.readline()
            gateway.stderr.close()
        until(lambda: served(port), 60)
        roster.write_text("nonsense")  # which is told
        time.sleep(1.5)  # it is read twice a second; that nothing comes of it cannot be waited for
        assert gateway.poll() is None and served(port)
        gateway.send_signal(signal.SIGTERM)
        assert gateway.wait(30) == 0


def served(port: int) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
        return bool(answer.status == 200)
    return False
