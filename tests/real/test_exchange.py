"""Exchanges byte for byte through the front of an emulated engine, without Ray: what passes, and what is recorded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import socket
import time
import urllib.parse
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import pytest

from protocol.errors import ConnectionLost, ConnectionRefused, ConnectTimeout
from protocol.messages import EngineAddress, GenerateRequest, HttpHead, RawRequest
from real.engines.client import RealEngineClient, Sessions
from real.engines.front import Front
from real.engines.served import Served
from real.engines.traffic import Message, Traffic
from real.evidence import ProcessLog
from tests.real.served import start_engine

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
VERSION = "default"  # of the profile's own weights
IDS = {(CHAT, True): "return_output_ids_in_sglext"}  # else return_token_ids


class Numbers:
    """Numbers the calls of the one caller."""

    def __init__(self) -> None:
        self._last = 0

    def next_number(self) -> int:
        self._last += 1
        return self._last


class Spoiling(Traffic):
    """Makes answers bad while it is told to."""

    what: str | None = None

    def bad_answer(self, message: Message) -> str | None:
        return self.what


@contextlib.asynccontextmanager
async def fronted(folder: pathlib.Path, traffic: Traffic) -> AsyncIterator[RealEngineClient]:
    engine = start_engine(folder)
    engine.until_ready()
    now = time.monotonic_ns()
    log = ProcessLog(str(folder), "policy-0", 0, now)
    bound = socket.create_server(("127.0.0.1", 0))
    front = Front(
        log, port=urllib.parse.urlsplit(engine.url).port or 0, served=Served(VERSION, "hash"), storage=str(folder),
        traffic=Traffic(), became_ready=lambda: None, in_flight_changed=lambda count: None, is_stopped=lambda: False,
    )  # fmt: skip
    sessions = Sessions()
    try:
        await front.listen(bound)
        address = EngineAddress("policy-0", 0, *bound.getsockname())
        yield RealEngineClient(
            address,
            sessions,
            Numbers(),
            ProcessLog(str(folder), "server", 0, now),
            32,
            traffic,  # type: ignore[arg-type]  # all that a client asks of its caller
        )
    finally:
        await sessions.close()
        front.seal()
        await front.close()
        engine.end()


def turn(path: str, ids: list[int], request: str, stream: bool) -> RawRequest:
    body: dict[str, Any] = {
        "model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 6, "ignore_eos": True,
        "rid": request, "stream_options": {"include_usage": True}, "input_ids": ids, "stream": stream,
        IDS.get((path, stream), "return_token_ids"): True,
    }  # fmt: skip
    return RawRequest("POST", path, (("content-type", "application/json"), ("x-own", "1")), json.dumps(body).encode())


async def read(client: RealEngineClient, request: RawRequest) -> tuple[HttpHead, bytes]:
    pieces = client.exchange(request, connect_timeout_s=5, read_timeout_s=20)
    head = await anext(pieces)
    assert isinstance(head, HttpHead)
    return head, b"".join([piece async for piece in pieces if isinstance(piece, bytes)])


def ids_of(path: str, stream: bool, body: bytes) -> list[int]:
    if not stream:
        answer = json.loads(body)
        found: list[int] = answer["token_ids"] if path == MESSAGES else answer["choices"][0]["response_token_ids"]
        return found
    told = [json.loads(line[6:]) for line in body.decode().split("\n") if line.startswith("data: {")]
    if path == MESSAGES:
        return next(one["token_ids"] for one in told if "token_ids" in one)
    return next(one["sglext"]["output_ids"][0] for one in told if "sglext" in one)


def events(folder: pathlib.Path, name: str, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "events" / f"{name}.jsonl").read_text().splitlines()
    return [event["data"] for event in map(json.loads, lines) if event["kind"] == kind]


@pytest.mark.parametrize("host", ["a..b", "a" * 64, "a b..", "[::1", "::1", "1.2.3.4.5.."])
def test_an_address_that_is_none_is_not_done(host: str, tmp_path: pathlib.Path) -> None:
    """Whoever names an engine by its URL may write anything; aiohttp has a UnicodeError for some of it."""

    async def body() -> None:
        sessions = Sessions()
        log = ProcessLog(str(tmp_path), "server", 0, time.monotonic_ns())
        address = EngineAddress("odd", 0, host, 1)
        client = RealEngineClient(address, sessions, Numbers(), log, 32, Traffic())  # type: ignore[arg-type]  # as above
        given = GenerateRequest("req-1", 4, 4)
        calls: list[Awaitable[Any]] = [
            client.get("/ready", connect_timeout_s=2), client.generate(given), client.post("/x", {}),
            anext(client.stream(given)), anext(client.forward_stream("/x", "{}")),
            anext(client.exchange(RawRequest("GET", "/x", (), b""))),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises((ConnectionRefused, ConnectTimeout)):  # both are not done
                await call
        await sessions.close()

    asyncio.run(body())
    assert {one["outcome"] for one in events(tmp_path, "server-0", "call.done")} == {"not_done"}
    assert len(events(tmp_path, "server-0", "call.done")) == 6


def test_conversations_pass_and_are_seen(tmp_path: pathlib.Path) -> None:
    async def body() -> None:
        async with fronted(tmp_path, Traffic()) as client:
            for path in (CHAT, MESSAGES):
                for stream in (False, True):
                    name = f"{path[4:]}-{stream}"
                    first = [1000, 1001, 1002 + stream]
                    head, answer = await read(client, turn(path, first, f"{name}-1", stream))
                    assert head.status == 200 and b": seatrial" not in answer
                    output = ids_of(path, stream, answer)
                    assert len(output) == 6
                    await read(client, turn(path, [*first, *output, 1500], f"{name}-2", stream))
            head, answer = await read(client, RawRequest("GET", "/v1/models?x=1"))
            assert json.loads(answer)["object"] == "list"
            count = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]}).encode()
            head, answer = await read(client, RawRequest("POST", "/v1/messages/count_tokens?beta=true", (), count))
            assert json.loads(answer)["input_tokens"] > 0
            assert (await read(client, RawRequest("POST", "/nothing")))[0].status == 404

    asyncio.run(body())
    prompts = events(tmp_path, "policy-0-0", "engine.prompt")
    turns = [prompt for prompt in prompts if prompt["request"]]
    assert [prompt["continues"] for prompt in turns] == [
        one for first in turns[::2] for one in ("", first["request"])
    ], "each second turn goes on from its first"
    assert [prompt["unasked"] for prompt in prompts if not prompt["request"]] == [[]]
    finished = events(tmp_path, "policy-0-0", "engine.finished")
    assert [(one["reason"], one["completion_tokens"]) for one in finished] == [("length", 6)] * 8
    assert [one["spans"] for one in finished] == [[[VERSION, 0, 6, "hash"]]] * 8
    assert {one["outcome"] for one in events(tmp_path, "server-0", "call.done")} == {"done"}


@pytest.mark.parametrize("what", ["not_json", "truncated", "refused_while_generating"])
def test_a_bad_answer_is_made_of_a_good_one(tmp_path: pathlib.Path, what: str) -> None:
    async def body() -> None:
        traffic = Spoiling()
        traffic.what = what
        async with fronted(tmp_path, traffic) as client:
            request = turn(CHAT, [1000, 1001], "r", True)
            if what == "truncated":
                with pytest.raises(ConnectionLost):
                    await read(client, request)
            else:
                head, answer = await read(client, request)
                assert head.status == (200 if what == "not_json" else 400) and b"choices" not in answer
            await asyncio.sleep(1.0)

    asyncio.run(body())
    assert [one["reason"] for one in events(tmp_path, "policy-0-0", "engine.finished")] == ["length"]
