"""The gateway's HTTP API as handlers: what is forwarded, what is refused, and how each failure is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from protocol.config import GatewayConfig, HttpConfig
from protocol.errors import ActorDied, ConnectionLost, ConnectionRefused, HttpError, ReadTimeout
from protocol.serving.gateway import Gateway
from protocol.serving.gateway_api import GatewayApi, forwarded
from protocol.serving.http import ONCE, HttpAnswer, HttpRequest, HttpStream
from tests.protocol.fake import FakeBackend, FakeEngine, FakeHandle, fleet, run

CHAT = "/v1/chat/completions"


class Front:
    """An API over a gateway with engines, and shorthands to talk to it."""

    def __init__(
        self, world: FakeBackend, engines: tuple[FakeEngine, ...], handle: FakeHandle, http: HttpConfig
    ) -> None:
        self.world = world
        self.engines = engines
        self.handle = handle
        self.api = GatewayApi(http, handle)

    async def send(
        self, method: str, path: str, body: Any = None, headers: tuple[tuple[str, str], ...] = ()
    ) -> HttpAnswer | HttpStream:
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        return await self.api.handle(HttpRequest(method, path, headers, raw))

    async def ask(
        self, method: str, path: str, body: Any = None, headers: tuple[tuple[str, str], ...] = ()
    ) -> tuple[int, Any, dict[str, str]]:
        """(status, JSON, headers) of a whole answer."""
        answer = await self.send(method, path, body, headers)
        assert isinstance(answer, HttpAnswer)
        return answer.status, json.loads(answer.body), dict(answer.headers)

    async def events(self, path: str, body: Any) -> list[str]:
        answer = await self.send("POST", path, {**body, "stream": True})
        assert isinstance(answer, HttpStream), answer
        return [event async for event in answer.events]

    async def in_flight(self) -> int:
        return sum(view.in_flight for view in await self.handle.engines())


def served(
    body: Callable[[Front], Awaitable[None]], count: int = 2, http: HttpConfig | None = None, **gateway: Any
) -> None:
    async def in_world(world: FakeBackend) -> None:
        engines = await fleet(world, count)
        handle = await world.spawn(Gateway, GatewayConfig(**gateway), name="gateway")
        for engine in engines:
            await handle.add_replica(engine.address)
        front = Front(world, engines, handle, http or HttpConfig())
        await body(front)
        assert await front.in_flight() == 0, "a count was not given back"

    run(in_world)


@pytest.mark.parametrize("path", ["/generate", CHAT, "/v1/completions"])
def test_a_call_is_forwarded_with_an_id_and_its_answer_passed_on(path: str) -> None:
    async def body(front: Front) -> None:
        status, told, headers = await front.ask("POST", path, {"text": "hello", "max_tokens": 3})
        assert status == 200
        assert told["route"] == path
        assert told["body"] == {"text": "hello", "max_tokens": 3, "rid": "http-000001"}
        assert headers == {"x-seatrial-replica": "engine-0/0", "x-seatrial-attempts": "1"}
        assert [view.served for view in await front.handle.engines()] == [1, 0]

    served(body)


def test_a_streamed_call_brings_every_event_and_the_end() -> None:
    async def body(front: Front) -> None:
        events = await front.events(CHAT, {"messages": []})
        assert [json.loads(event)["token"] for event in events[:-1]] == [0, 1, 2]
        assert events[-1] == "[DONE]"
        assert [view.served for view in await front.handle.engines()] == [1, 0]

    served(body)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("failure", [ConnectionRefused("x"), ConnectionLost("x"), HttpError(status=503, body="busy")])
def test_a_failed_attempt_goes_to_another_replica(failure: Exception, stream: bool) -> None:
    async def body(front: Front) -> None:
        front.engines[0].generate_script.append(failure)
        if stream:
            assert (await front.events("/generate", {}))[-1] == "[DONE]"
        else:
            status, _, headers = await front.ask("POST", "/generate", {})
            assert (status, headers["x-seatrial-replica"], headers["x-seatrial-attempts"]) == (200, "engine-1/0", "2")
        assert len(front.world.of("gateway.moved")) == 1

    served(body)


@pytest.mark.parametrize("failure", [ConnectionLost("cut"), HttpError(status=500, body="oom"), ReadTimeout("silent")])
def test_a_stream_that_breaks_after_its_first_event_ends_with_an_error_event(failure: Exception) -> None:
    async def body(front: Front) -> None:
        front.engines[0].generate_script += [None, failure]
        events = await front.events(CHAT, {})
        assert len(events) == 2, "one token, one error, no [DONE]"
        error = json.loads(events[1])["error"]
        assert (error["type"], error["outcome"]) == (type(failure).__name__, "unknown")
        assert not front.world.of("gateway.moved")
        assert front.engines[1].generated == []
        suspect = not isinstance(failure, HttpError)  # a replica is, when its connection breaks
        assert [view.routable for view in await front.handle.engines()] == [not suspect, True]
        assert front.world.of("gateway.released") == [
            {"request": "http-000001", "replica": "engine-0", "replica_inc": 0, "in_flight": 0, "ok": False}
        ]

    served(body)


def test_a_reader_that_leaves_a_stream_ends_it_at_the_engine() -> None:
    async def body(front: Front) -> None:
        answer = await front.send("POST", CHAT, {"stream": True})
        assert isinstance(answer, HttpStream)
        assert await front.in_flight() == 1
        await anext(answer.events)
        await answer.events.aclose()
        assert front.engines[0].running == 0
        assert front.world.of("gateway.released")[0]["ok"] is False

    served(body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_cancelled_call_is_cancelled_at_the_engine(stream: bool) -> None:
    async def body(front: Front) -> None:
        front.engines[0].generate_script.append("hang")
        task = asyncio.ensure_future(front.send("POST", CHAT, {"stream": stream}))
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert front.engines[0].running == 0
        assert front.handle.cancelled == (0 if stream else 1), "a handle must be told: the wait's end does not stop it"
        assert not front.world.of("gateway.moved")

    served(body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_the_replica_is_passed_on_as_it_is(stream: bool) -> None:
    async def body(front: Front) -> None:
        text = '{"object":"error","message":"too long","code":400}'
        front.engines[0].generate_script.append(HttpError(status=400, body=text))
        answer = await front.send("POST", CHAT, {"stream": stream})
        assert answer == HttpAnswer(400, text)
        assert front.engines[1].generated == []

    served(body)


def test_a_refusal_that_is_no_json_becomes_some() -> None:
    async def body(front: Front) -> None:
        front.engines[0].generate_script.append(HttpError(status=404, body="Not Found"))
        status, told, _ = await front.ask("POST", CHAT, {})
        assert (status, told["error"]["message"], told["error"]["outcome"]) == (404, "HTTP 404: Not Found", "not_done")

    served(body)


@pytest.mark.parametrize(
    ("failure", "status", "outcome"),
    [
        (ConnectionRefused("closed"), 503, "not_done"),
        (HttpError(status=500, body="oom"), 502, "unknown"),
        (ConnectionLost("cut"), 502, "unknown"),
        (ReadTimeout("silent"), 504, "unknown"),
    ],
)
def test_a_failure_tells_its_outcome(failure: Any, status: int, outcome: str) -> None:
    async def body(front: Front) -> None:
        for engine in front.engines:
            engine.generate_script += [failure] * 3
        got, told, headers = await front.ask("POST", "/generate", {})
        assert (got, told["error"]["outcome"], told["error"]["attempts"]) == (status, outcome, 2)
        assert told["error"]["type"] == type(failure).__name__
        assert told["error"].get("upstream_status") == (500 if isinstance(failure, HttpError) else None)
        if outcome == "not_done":
            assert headers == {"Retry-After": "1", "x-should-retry": "true"}
        else:
            assert headers == {}

    served(body, attempts=2)


def test_what_may_not_be_sent_twice_is_not() -> None:
    async def body(front: Front) -> None:
        front.engines[0].generate_script.append(ReadTimeout("silent"))
        status, told, headers = await front.ask("POST", "/generate", {}, headers=((ONCE, "false"),))
        assert (status, told["error"]["attempts"]) == (504, 1)
        assert headers == {"x-should-retry": "false"}, "or OpenAI's client makes the call again by itself"
        assert front.engines[1].generated == []

    served(body)


def test_without_a_routable_replica_it_is_503_and_not_done() -> None:
    async def body(front: Front) -> None:
        status, told, headers = await front.ask("POST", CHAT, {})
        assert (status, told["error"]["type"], told["error"]["outcome"]) == (503, "NoReplica", "not_done")
        assert headers["Retry-After"] == "7"
        status, told, _ = await front.ask("GET", "/ready")
        assert (status, told["error"]["type"]) == (503, "NoReplica")
        status, _, _ = await front.ask("GET", "/v1/models")
        assert status == 503
        assert (await front.ask("GET", "/health"))[0] == 200

    served(body, count=0, http=HttpConfig(retry_after_s=7))


def test_a_dead_gateway_is_503_and_one_that_raises_anything_else_500() -> None:
    async def body(front: Front) -> None:
        front.handle.fail_next.append(ValueError("a bug"))
        status, told, headers = await front.ask("POST", CHAT, {})
        assert (status, told["error"]["type"], told["error"]["outcome"]) == (500, "RemoteError", "unknown")
        assert headers == {}
        front.handle.fail_next.append(ActorDied("gateway-0/0 is dead"))
        assert (await front.ask("GET", "/health"))[0] == 502
        front.handle.dead = True
        for method, path in (("POST", CHAT), ("GET", "/health"), ("GET", "/ready"), ("GET", "/metrics")):
            status, told, _ = await front.ask(method, path, {} if method == "POST" else None)
            assert (status, told["error"]["type"], told["error"]["outcome"]) == (503, "ActorDied", "not_done")
        front.handle.dead = False

    served(body)


def test_a_gateway_of_the_users_without_the_method_is_501_by_name() -> None:
    class OnlyGenerate:
        async def generate(self, request: Any) -> Any: ...

    async def body(world: FakeBackend) -> None:
        api = GatewayApi(HttpConfig(), await world.spawn(OnlyGenerate, name="mine"))
        for payload in (b"{}", b'{"stream": true}'):
            answer = await api.handle(HttpRequest("POST", CHAT, (), payload))
            assert isinstance(answer, HttpAnswer) and answer.status == 501
            assert "mine has no method 'forward" in json.loads(answer.body)["error"]["message"]

    run(body)


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1]", "must be a JSON object, not list"),
        (b"\xff\xfe", "not UTF-8: invalid start byte at byte 0"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"n": ' + b"1" * 5_000 + b"}", "not valid JSON"),
        (b'{"stream": "yes"}', 'stream must be true or false, not "yes"'),
        (b'{"rid": 7}', "rid must be a printable string"),
        (b'{"rid": ""}', "rid must be a printable string"),
        (b'{"rid": "\\ud800"}', "rid must be a printable string"),
        (b'{"rid": ["a", "b"]}', "rid must be a printable string"),
    ],
)
def test_a_bad_body_is_400_and_says_why(payload: bytes, says: str) -> None:
    async def body(front: Front) -> None:
        status, told, _ = await front.ask("POST", CHAT, payload)
        assert status == 400
        assert says in told["error"]["message"]
        assert told["error"]["outcome"] == "not_done"
        assert not front.world.of("gateway.picked")

    served(body)


def test_bounds_routes_and_methods() -> None:
    async def body(front: Front) -> None:
        assert (await front.ask("POST", CHAT, b"{" + b" " * 62 + b"}"))[0] == 200
        status, told, _ = await front.ask("POST", CHAT, b"{" + b" " * 63 + b"}")
        assert (status, told["error"]["message"]) == (413, "the body is longer than 64 bytes")
        status, told, _ = await front.ask("GET", "/nope")
        assert status == 404 and "/v1/models" in told["error"]["message"]
        status, _, headers = await front.ask("GET", CHAT)
        assert (status, headers["Allow"]) == (405, "POST")
        status, _, headers = await front.ask("POST", "/metrics", {})
        assert (status, headers["Allow"]) == (405, "GET")
        status, told, _ = await front.ask("POST", CHAT, {}, headers=((ONCE, "perhaps"),))
        assert status == 400 and ONCE in told["error"]["message"]

    served(body, http=HttpConfig(max_body_bytes=64))


@pytest.mark.parametrize(
    ("body", "same"),
    [
        ({"rid": "mine-1", "text": "a"}, True),
        ({"rid": ["a", "b"], "text": ["x", "y"]}, True),
        ({"text": ["x", "y"]}, True),
        ({"input_ids": [[1], [2]]}, True),
        ({"prompt": ["x"]}, True),
        ({"prompt": "x", "n": 2}, True),
        ({"text": "x", "sampling_params": {"n": 2}}, True),
        ({"text": "x", "sampling_params": [{}]}, True),
        ({"text": "x", "sampling_params": {"n": 1}}, False),
        ({"input_ids": [1, 2]}, False),
        ({"prompt": [1, 2], "n": None}, False),
        ({"rid": None, "prompt": "x"}, False),
    ],
)
def test_only_a_call_for_one_completion_without_an_id_gets_one(body: dict[str, Any], same: bool) -> None:
    async def in_world(world: FakeBackend) -> None:
        text = json.dumps(body)
        call, stream = forwarded(HttpRequest("POST", "/generate", (), text.encode()))
        assert (call.body == text) is same
        assert json.loads(call.body) == (body if same else {**body, "rid": call.request_id})
        assert call.request_id == (body["rid"] if isinstance(body.get("rid"), str) else "http-000001")
        assert stream is False

    run(in_world)


def test_models_come_from_a_replica_and_from_the_next_one_when_it_fails() -> None:
    async def body(front: Front) -> None:
        page = '{"object": "list", "data": []}'
        front.engines[0].get_script["/v1/models"] = [ConnectionLost("x")]
        front.engines[1].get_script["/v1/models"] = [(200, page)]
        assert await front.send("GET", "/v1/models") == HttpAnswer(200, page)
        status, told, _ = await front.ask("GET", "/v1/models")  # both give 404 now
        assert (status, told["error"]["type"]) == (503, "NoReplica")

    served(body)


def test_the_pages_of_the_gateway() -> None:
    async def body(front: Front) -> None:
        await front.handle.set_routable(front.engines[1].address, False, "drained")
        status, told, _ = await front.ask("GET", "/ready")
        assert (status, told) == (200, {"status": "ready", "routable": 1})
        _, told, _ = await front.ask("GET", "/engines")
        assert told["engines"][1] == {
            "address": {"name": "engine-1", "incarnation": 0, "host": "host", "port": 30_000},
            "in_flight": 0, "served": 0, "routable": False, "why": "drained",
        }  # fmt: skip
        answer = await front.send("GET", "/metrics")
        assert isinstance(answer, HttpAnswer) and answer.content_type.startswith("text/plain; version=0.0.4")
        samples = {
            (sample.name, sample.labels["replica"]): sample.value
            for family in text_string_to_metric_families(answer.body)
            for sample in family.samples
            if "replica" in sample.labels
        }
        assert samples["seatrial_gateway_routable", "engine-0"] == 1
        assert samples["seatrial_gateway_routable", "engine-1"] == 0

    served(body)


def test_a_long_stream_is_progress_and_not_a_stall() -> None:
    async def body(front: Front) -> None:
        front.engines[0].duration_s, front.engines[0].stream_tokens = 1.0, 20
        answer = await front.send("POST", CHAT, {"stream": True})
        assert isinstance(answer, HttpStream)
        async for _ in answer.events:
            view = await front.handle.health_view(0, 5.0)
            assert view.stalled == ()

    served(body)
