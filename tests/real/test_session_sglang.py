"""A session server in front of genuine SGLang: turns of both formats through `openai` and `anthropic`, streamed too.

SGLang gives no token ids on /v1/messages (docs/session_server.md): such a turn can be forwarded, and not recorded.
Last, the affinity router before two session servers, of whose engines one is genuine and the other one never there.
"""

from __future__ import annotations

import pathlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.real.served import Process, free_port
from tests.real.sglang_server import Keeper
from tests.real.test_session_affinity import post

pytestmark = pytest.mark.sglang_cpu

MESSAGES: Any = [{"role": "user", "content": "Say something."}]


@pytest.fixture(scope="module")
def server(keeper: Keeper, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("sessions")
    log = folder / f"sessions-{time.monotonic_ns()}.log"
    found = Process(["real.serve_sessions", "--engine", f"http://127.0.0.1:{keeper.server().port}", "--gate"], log)
    try:
        found.url = found.until_says(r"serving sessions on (http://\S+) ").group(1)
        yield found
    finally:
        found.end()


def test_openai_turns_of_a_session(server: Process) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages = list(MESSAGES)
    for turn in range(3):
        ask: Any = {"model": "m", "messages": messages, "max_tokens": 8, "temperature": 0}
        answer = client.chat.completions.create(**ask, extra_body={"session_id": "one", "ignore_eos": True})
        text = answer.choices[0].message.content
        assert text and answer.id.startswith("lease-")
        assert not getattr(answer.choices[0], "response_token_ids", None), "nobody asked for them"
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And turn {turn}?"}]


def test_openai_streams(server: Process) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    ask: Any = {"model": "m", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    chunks = list(
        client.chat.completions.create(**ask, stream=True, extra_body={"session_id": "two", "ignore_eos": True})
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert {chunk.id for chunk in chunks} == {chunks[0].id} and chunks[0].id.startswith("lease-")


def test_anthropic_is_forwarded_and_fails_closed_where_it_should_be_recorded(server: Process) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    ask: Any = {"model": "m", "messages": MESSAGES, "max_tokens": 8}
    unrecorded: Any = {"session_id": "three", "return_token_ids": False}
    assert client.messages.create(**ask, extra_body=unrecorded).id.startswith("lease-")
    with client.messages.stream(**ask, extra_body=unrecorded) as stream:
        assert stream.get_final_message().stop_reason is not None
    with pytest.raises(anthropic.InternalServerError, match="has no token ids"):
        client.messages.create(**ask, extra_body={"session_id": "three"})
    assert client.messages.count_tokens(model="m", messages=MESSAGES).input_tokens > 0
    assert "poisoned" not in server.log.read_text()


def test_a_too_long_context_leaves_the_gate_healthy(server: Process) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    ask: Any = {"model": "m", "messages": MESSAGES, "max_tokens": 1_000_000, "extra_body": {"session_id": "four"}}
    with pytest.raises(openai.BadRequestError, match="context length"):
        client.chat.completions.create(**ask)
    assert "poisoned" not in server.log.read_text()


@pytest.fixture
def routed(keeper: Keeper, tmp_path: pathlib.Path) -> Iterator[Process]:
    there, nobody = f"127.0.0.1:{keeper.server().port}", f"127.0.0.1:{free_port()}"
    named = ["--engine", f"http://{nobody}", "--engine", f"http://{there}"]
    found = Process(["real.serve_sessions", *named, "--gate"], tmp_path / "routed.log")
    try:
        found.url = found.until_says(r"serving sessions on (http://\S+) ").group(1)
        found.until_says(f"{there} is healthy")
        yield found
    finally:
        found.end()


@pytest.mark.slow
def test_sessions_behind_the_affinity_router(routed: Process, keeper: Keeper) -> None:
    """Two conversations side by side, streamed and not; one is retired, the other one and a third go on."""
    client = openai.OpenAI(base_url=f"{routed.url}/v1", api_key="none", max_retries=0)
    talks = {"one": list(MESSAGES), "two": list(MESSAGES)}

    def turn(session: str, stream: bool = False) -> None:
        messages = talks.setdefault(session, list(MESSAGES))
        ask: Any = {"model": "m", "messages": messages, "max_tokens": 8, "temperature": 0}
        ask["extra_body"] = {"session_id": session, "ignore_eos": True}
        if stream:
            chunks = list(client.chat.completions.create(**ask, stream=True))
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert {chunk.id.partition("-")[0] for chunk in chunks} == {"lease"}
        else:
            answer = client.chat.completions.create(**ask)
            text = answer.choices[0].message.content or ""
            assert answer.id.startswith("lease-")
        assert text
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And {len(messages)}?"}]

    _until_it_is_routed_to(routed, turn)
    for stream in (False, True, False):
        for session in ("one", "two"):
            turn(session, stream)
    with pytest.raises(openai.BadRequestError, match="must carry a session_id"):
        client.chat.completions.create(model="m", messages=MESSAGES)
    assert post(routed.url, "/flush_cache", {})[0] == 403
    reader = anthropic.Anthropic(base_url=routed.url, api_key="none", max_retries=0)
    assert reader.messages.count_tokens(model="m", messages=MESSAGES).input_tokens > 0

    for _ in range(2):
        assert post(routed.url, "/retire_sessions", {"session_ids": ["one"]}) == (200, {"retired": 1})
    with pytest.raises(openai.APIStatusError) as refused:
        turn("one")
    assert refused.value.status_code == 410
    turn("two", stream=True)
    unrecorded: Any = {"session_id": "three", "return_token_ids": False}
    answer = reader.messages.create(model="m", messages=MESSAGES, max_tokens=8, extra_body=unrecorded)
    assert answer.id.startswith("lease-")

    _a_turn_under_way_is_given_up(routed, client)
    turn("four")
    assert keeper.server().call("/abort_request", {"rid": "", "abort_all": True})[0] == 200  # nothing is left to do
    log = routed.log.read_text()
    assert "poisoned" not in log and f"is on 127.0.0.1:{keeper.server().port}" in log
    assert len(re.findall(r"session '(one|two|three|four|long)' is on ", log)) == 5  # each is bound once


def _until_it_is_routed_to(routed: Process, turn: Callable[[str], None]) -> None:
    """The router asks the gateway in intervals."""
    ends = time.monotonic() + 30
    while True:
        try:
            return turn("probe")
        except openai.APIStatusError as error:
            assert error.status_code == 503 and "none of 2 backends is healthy" in error.message, error
            assert time.monotonic() < ends, "no session is taken"
            time.sleep(0.1)


def _a_turn_under_way_is_given_up(routed: Process, client: openai.OpenAI) -> None:
    told: list[BaseException] = []

    def long() -> None:
        extra = {"session_id": "long", "ignore_eos": True}
        try:
            client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=4000, extra_body=extra)
        except BaseException as error:
            told.append(error)

    caller = threading.Thread(target=long)
    caller.start()
    routed.until_says("session 'long' is on ")
    time.sleep(0.5)  # at the engine by now
    assert post(routed.url, "/retire_sessions", {"session_ids": ["long"]}) == (200, {"retired": 1})
    caller.join(20)
    (error,) = told
    assert isinstance(error, openai.APIStatusError) and error.status_code == 410, error
