"""``python -m real.serve_sessions``: what bad usage gets. Nothing is started for any of it."""

from __future__ import annotations

import socket

import pytest

from real.serve_sessions import main

ENGINE = ["--engine", "http://127.0.0.1:9"]
OTHER = ["--engine", "http://127.0.0.1:10"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([*ENGINE, "--host", "0.0.0.0"], "reachable from other machines and needs a token"),
        ([*ENGINE, *OTHER, "--host", "::"], "reachable from other machines and needs a token"),  # the affinity router
        ([*ENGINE, "--host", "0.0.0.0", "--token-file", "/dev/null"], "--token-file /dev/null: is empty"),
        ([*ENGINE, *ENGINE], "--engine: the same address twice"),
        ([*ENGINE, "--hooks", "odd"], "--hooks odd: trace, none, or package.module:Class"),
    ],
)
def test_bad_usage_is_one_message_and_exit_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and says in lines[0]


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([*ENGINE, "--port", str(port)]) == 2
    assert f"error: cannot listen on 127.0.0.1:{port}: " in capsys.readouterr().err
