"""``python -m real.serve_sessions``: what bad usage gets. Nothing is started for any of it."""

from __future__ import annotations

import pathlib
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
        ([*ENGINE, "--hooks", "..:X"], "--hooks ..:X: importing '..' failed (TypeError: "),
        ([*ENGINE, "--hooks", "json:dumps"], "--hooks json:dumps: has no on_request, on_response, on_end"),
    ],
)
def test_bad_usage_is_one_message_and_exit_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and says in lines[0]


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("raise RuntimeError('not today')", "failed (RuntimeError: not today); correct the module"),
        ("raise SystemExit(0)", "failed (SystemExit: 0); correct the module"),  # which was exit code 0, and no word
        ("def (", "failed (SyntaxError: "),
        (
            "class X:\n    on_request = on_response = on_end = None\n    def __init__(self, store): raise OSError(1)",
            "cannot be made with the trace store (OSError: 1); correct its __init__",
        ),
    ],
)
def test_hooks_that_fail_are_one_message(
    module: str, says: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"hooks_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main([*ENGINE, "--hooks", f"{name}:X"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"error: --hooks {name}:X: ") and says in lines[0]


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([*ENGINE, "--port", str(port)]) == 2
    assert f"error: cannot listen on 127.0.0.1:{port}: " in capsys.readouterr().err
