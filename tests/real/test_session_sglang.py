"""A session server in front of genuine SGLang: turns of both formats through `openai` and `anthropic`, streamed too.

SGLang gives no token ids on /v1/messages (docs/session_server.md): such a turn can be forwarded, and not recorded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.real.served import Process
from tests.real.sglang_server import Keeper

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
