"""`openai` and `anthropic`, which nobody here wrote, against `python -m real.serve_sessions` and an emulated engine."""

from __future__ import annotations

import contextlib
import gzip
import json
import pathlib
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.real.served import Process, start_engine

PATHS = {"openai": "/v1/chat/completions", "anthropic": "/v1/messages"}
READS = (0, 40, 250, 600)
MESSAGES: Any = [{"role": "user", "content": "Say something."}]


@contextlib.contextmanager
def sessions(folder: pathlib.Path, *arguments: str) -> Iterator[Process]:
    """A session server in front of an emulated engine, both processes of their own."""
    with contextlib.ExitStack() as stack:
        engine = start_engine(folder)
        stack.callback(engine.end)
        engine.until_ready()
        log = folder / f"sessions-{time.monotonic_ns()}.log"
        server = Process(["real.serve_sessions", "--engine", engine.url, *arguments], log)
        stack.callback(server.end)
        server.url = server.until_says(r"serving sessions on (http://\S+) ").group(1)
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with sessions(tmp_path_factory.mktemp("sessions"), "--gate") as found:
        yield found


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with sessions(tmp_path_factory.mktemp("failing"), "--hooks", "tests.real.components:FailingHooks") as found:
        yield found


def openai_client(server: Process) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def anthropic_client(server: Process) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def test_openai_turns_of_a_session(server: Process) -> None:
    client = openai_client(server)
    messages = list(MESSAGES)
    for turn in range(3):
        answer = client.chat.completions.create(
            model="m", messages=messages, max_tokens=12, extra_body={"session_id": "openai-1"}
        )
        text = answer.choices[0].message.content
        assert text and answer.id.startswith("lease-")
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And turn {turn}?"}]


def test_openai_streams(server: Process) -> None:
    client = openai_client(server)
    ask: Any = {"model": "m", "messages": MESSAGES, "max_tokens": 12}
    whole = client.chat.completions.create(**ask, extra_body={"session_id": 17})
    chunks = list(
        client.chat.completions.create(
            **ask, stream=True, stream_options={"include_usage": True}, extra_body={"session_id": "openai-2"}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert {chunk.id for chunk in chunks} == {chunks[0].id} and chunks[0].id.startswith("lease-")
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12
    assert all(not getattr(chunk, "sglext", None) for chunk in chunks)


def test_anthropic_turns_and_streams(server: Process) -> None:
    client = anthropic_client(server)
    ask: Any = {"model": "m", "messages": MESSAGES, "max_tokens": 12}
    whole = client.messages.create(**ask, extra_body={"session_id": "anthropic-1"})
    assert whole.id.startswith("lease-") and whole.stop_reason in ("max_tokens", "end_turn")
    said = whole.content[0]
    assert said.type == "text"
    with client.messages.stream(**ask, extra_body={"session_id": "anthropic-2"}) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == said.text and final.id.startswith("lease-")
    assert final.usage.output_tokens == 12


def test_anthropic_counts_tokens_without_a_lease(server: Process) -> None:
    counted = anthropic_client(server).messages.count_tokens(
        model="m", messages=MESSAGES, extra_body={"session_id": "anthropic-3"}
    )
    assert counted.input_tokens > 4


def test_refusals_in_the_clients_own_errors(server: Process) -> None:
    with pytest.raises(openai.BadRequestError, match="must carry a session_id"):
        openai_client(server).chat.completions.create(model="m", messages=MESSAGES, max_tokens=4)
    with pytest.raises(anthropic.BadRequestError, match="must carry a session_id"):
        anthropic_client(server).messages.create(model="m", messages=MESSAGES, max_tokens=4)
    with pytest.raises(openai.BadRequestError, match="context length"):
        openai_client(server).chat.completions.create(
            model="m", messages=MESSAGES, max_tokens=10_000_000, extra_body={"session_id": "long"}
        )
    with pytest.raises(openai.APIStatusError, match="501"):
        openai_client(server).responses.create(model="m", input="x")


def test_a_hook_that_fails_is_an_error_in_every_client(failing: Process) -> None:
    ask: Any = {"model": "m", "messages": MESSAGES, "max_tokens": 8, "extra_body": {"session_id": "s"}}
    with pytest.raises(openai.InternalServerError, match="nothing is recorded here"):
        openai_client(failing).chat.completions.create(**ask)
    with pytest.raises(anthropic.InternalServerError, match="nothing is recorded here"):
        anthropic_client(failing).messages.create(**ask)
    with pytest.raises(openai.APIError, match="nothing is recorded here"):
        list(openai_client(failing).chat.completions.create(**ask, stream=True))
    with (
        pytest.raises(anthropic.APIError, match="nothing is recorded here"),
        anthropic_client(failing).messages.stream(**ask) as s,
    ):
        s.get_final_message()


def raw(server: Process, body: dict[str, Any], read: int, path: str = "/v1/chat/completions") -> bytes:
    """Send by hand, read about so many bytes, and cut the connection."""
    where = urllib.parse.urlsplit(server.url)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection((where.hostname or "", where.port or 0), timeout=2) as connection:
        connection.sendall(head.encode() + data)
        seen = b""
        with contextlib.suppress(TimeoutError):  # a short answer, on a connection that is kept
            while len(seen) < read and (part := connection.recv(min(read - len(seen), 4096))):
                seen += part
        time.sleep(0.05)
    return seen


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_connection_cut_at_any_byte_leaves_the_gate_healthy(server: Process, read: int, stream: bool) -> None:
    body = {
        "model": "m",
        "messages": MESSAGES,
        "max_tokens": 20,
        "stream": stream,
        "session_id": f"cut-{read}-{stream}",
    }
    raw(server, body, read)
    answer = openai_client(server).chat.completions.create(
        model="m", messages=MESSAGES, max_tokens=4, extra_body={"session_id": f"after-{read}-{stream}"}
    )
    assert answer.choices[0].message.content
    assert "poisoned" not in server.log.read_text()


def test_a_turn_whose_connection_was_cut_is_recorded(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = tmp_path / "turns"
    monkeypatch.setenv("TURNS_FILE", str(turns))
    cuts = {
        f"{form}-{stream}-{read}": (form, stream, read) for form in PATHS for stream in (False, True) for read in READS
    }
    with sessions(tmp_path, "--hooks", "tests.real.components:WritingHooks") as server:
        for session, (form, stream, read) in cuts.items():
            body = {"model": "m", "messages": MESSAGES, "max_tokens": 20, "stream": stream, "session_id": session}
            raw(server, body | {"ignore_eos": True}, read, PATHS[form])
        ends = time.monotonic() + 30
        while len(turns.read_text().splitlines() if turns.exists() else ()) < len(cuts):
            assert time.monotonic() < ends, turns.read_text() if turns.exists() else "nothing was recorded"
            time.sleep(0.1)
    assert sorted(turns.read_text().splitlines()) == sorted(f"{session} 20" for session in cuts)


def test_other_paths_pass(server: Process) -> None:
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=5) as answer:
        assert json.load(answer)["object"] == "list"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{server.url}/nothing", timeout=5)
    assert refused.value.code == 404


def test_what_is_no_path_is_not_appended_to_the_engines_address(server: Process) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(b"GET http://elsewhere/v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 400") and b"must be a path that begins with '/'" in answer


def test_a_body_that_was_decoded_is_forwarded_as_one(server: Process) -> None:
    text = json.dumps({"model": "m", "session_id": "zipped", "messages": [{"role": "user", "content": "hi"}]})
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    asked = urllib.request.Request(f"{server.url}/v1/chat/completions", gzip.compress(text.encode()), headers)
    with urllib.request.urlopen(asked, timeout=20) as answer:
        assert json.load(answer)["choices"]


def test_bad_usage_is_told(tmp_path: pathlib.Path) -> None:
    for arguments, said in (
        (["--engine", "nowhere"], "give it as http"),
        (["--engine", "http://127.0.0.1:1", "--hooks", "x"], "package.module:Class"),
        (["--engine", "http://127.0.0.1:1", "--hooks", "json:JSONDecoder"], "has no on_request"),
        (["--engine", "http://127.0.0.1:1", "--engine-kind", "vllm 9"], "no rejection pattern"),
    ):
        process = Process(["real.serve_sessions", *arguments], tmp_path / f"{len(said)}.log")
        assert process.wait() == 2
        assert said in process.log.read_text()
