"""A client nobody here wrote, `openai`, against `python -m real.serve` in front of emulated engines."""

from __future__ import annotations

import json
import pathlib
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.real.served import Process, fleet, start_engine, start_gateway

MESSAGES: Any = [{"role": "user", "content": "Say something."}]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with fleet(tmp_path_factory.mktemp("served"), 2) as (gateway, _):
        yield gateway


def client_of(gateway: Process, **more: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", **{"api_key": "none", "max_retries": 0, **more})


def in_flight(gateway: Process) -> int:
    with urllib.request.urlopen(f"{gateway.url}/engines", timeout=5) as answer:
        return sum(engine["in_flight"] for engine in json.load(answer)["engines"])


def until_idle(gateway: Process, within_s: float) -> None:
    ends = time.monotonic() + within_s
    while in_flight(gateway):
        assert time.monotonic() < ends, "calls are still in flight"
        time.sleep(0.05)


def test_chat(gateway: Process) -> None:
    answer = client_of(gateway).chat.completions.create(model="m", messages=MESSAGES, max_tokens=12)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 12
    assert answer.id.startswith("http-")


def test_chat_streamed_says_the_same(gateway: Process) -> None:
    client = client_of(gateway)
    whole = client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=12)
    chunks = list(
        client.chat.completions.create(
            model="m", messages=MESSAGES, max_tokens=12, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert len(chunks) > 5, "tokens come one by one"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12


def test_completions(gateway: Process) -> None:
    client = client_of(gateway)
    whole = client.completions.create(model="m", prompt="Once", max_tokens=8)
    streamed = client.completions.create(model="m", prompt="Once", max_tokens=8, stream=True)
    assert whole.choices[0].text == "".join(chunk.choices[0].text for chunk in streamed)


def test_models(gateway: Process) -> None:
    assert len(client_of(gateway).models.list().data) == 1


def test_what_an_engine_refuses_is_a_bad_request_in_its_own_words(gateway: Process) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client_of(gateway).chat.completions.create(model="m", messages=MESSAGES, max_tokens=10_000_000)
    with pytest.raises(openai.BadRequestError, match="messages must be a non-empty list"):
        client_of(gateway).chat.completions.create(model="m", messages=[])


def test_what_the_gateway_refuses_is_a_bad_request_too(gateway: Process) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client_of(gateway).chat.completions.create(
            model="m", messages=MESSAGES, extra_body={"rid": "x" * 300}, max_tokens=1
        )
    body: Any = caught.value.body
    assert body["outcome"] == "not_done" and "rid must be" in body["message"]


def test_a_route_that_is_not_there(gateway: Process) -> None:
    with pytest.raises(openai.NotFoundError, match="no route /v1/embeddings"):
        client_of(gateway).embeddings.create(model="m", input="x")


def test_a_client_that_times_out_frees_what_it_held(gateway: Process) -> None:
    client = client_of(gateway, timeout=0.5)
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=4000, extra_body={"ignore_eos": True})
    until_idle(gateway, 2.0)


def test_a_reader_that_breaks_off_frees_what_it_held(gateway: Process) -> None:
    stream = client_of(gateway).chat.completions.create(
        model="m", messages=MESSAGES, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert in_flight(gateway) == 1
    stream.close()
    until_idle(gateway, 2.0)


def test_an_engine_that_dies(tmp_path: pathlib.Path) -> None:
    """Mid-stream the client is told; a call without a stream is answered by the other engine; then it comes back."""
    with fleet(tmp_path, 2) as (gateway, engines):
        client = client_of(gateway)
        long: Any = {"model": "m", "messages": MESSAGES, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
        # Two streams and two calls: each engine has one of each.
        streams = [iter(client.chat.completions.create(stream=True, **long)) for _ in range(2)]
        for stream in streams:
            next(stream)
        answers: list[Any] = []
        calls = [threading.Thread(target=lambda: answers.append(client.chat.completions.create(**long))) for _ in "12"]
        for call in calls:
            call.start()
        while in_flight(gateway) < 4:
            time.sleep(0.01)
        engines[0].signal(signal.SIGKILL)
        errors = []
        for stream in streams:
            try:
                rest = list(stream)
                assert rest[-1].choices[0].finish_reason == "length"
            except openai.APIError as error:
                errors.append(error)
        assert len(errors) == 1, "one of the streams was on the engine that died"
        body: Any = errors[0].body
        assert (body["type"], body["outcome"]) == ("ConnectionLost", "unknown")
        for call in calls:
            call.join()
        assert [answer.usage.completion_tokens for answer in answers] == [1500, 1500], (
            "nothing that may be retried is lost"
        )
        gateway.until_says(f"{engines[0].url.removeprefix('http://')} is not routed to: ")
        assert client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=2).usage
        engines[1].end()
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=2)
        assert caught.value.status_code == 503
        assert caught.value.response.headers["x-should-retry"] == "true"
        # openai's client repeats a call that was not done, and so rides out the restart of an engine.
        port = int(engines[1].url.rpartition(":")[2])
        again = start_engine(tmp_path, port)
        try:
            patient = client_of(gateway, max_retries=10)
            assert patient.chat.completions.create(model="m", messages=MESSAGES, max_tokens=2).usage
        finally:
            again.end()


def test_the_api_key_is_the_token(tmp_path: pathlib.Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("a-token-of-some-length\n")
    engine = start_engine(tmp_path)
    gateway = start_gateway(tmp_path, [engine], "--token-file", str(secret))
    try:
        gateway.until_says("is routed to")
        with pytest.raises(openai.AuthenticationError):
            client_of(gateway).models.list()
        assert client_of(gateway, api_key="a-token-of-some-length").models.list().data
    finally:
        gateway.end()
        engine.end()
