"""`python -m real.serve_sessions` before two emulated engines: a session stays on one of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import openai
import pytest

from protocol.errors import CallCancelled
from real.local import LocalHandle
from tests.real.served import Process, free_port, start_engine
from tests.real.test_session_clients import MESSAGES, anthropic_client, openai_client

LONG, LONG_S = 8000, 18.0
"""Tokens of a long turn, and seconds that an engine takes for them at least (tests/analysis/test_calibrate.py)."""


class Pair:
    """Two engines, and what serves their sessions."""

    def __init__(self, folder: pathlib.Path, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        self.logs = [folder / "requests-0", folder / "requests-1"]
        self.engines = [self.engine(number) for number in (0, 1)]
        for engine in self.engines:
            engine.until_ready()
        named = [part for engine in self.engines for part in ("--engine", engine.url)]
        self.server = Process(["real.serve_sessions", *named, "--gate"], folder / "sessions.log")
        stack.callback(self.server.end)
        self.server.url = self.server.until_says(r"serving sessions on (http://\S+) ").group(1)
        for engine in self.engines:
            self.server.until_says(f"{named_of(engine)} is healthy")
        self._until_both_are_routed_to()

    def _until_both_are_routed_to(self) -> None:
        """The router asks the gateway in intervals. What was bound to see that is taken back."""
        probes: list[str] = []
        ends = time.monotonic() + 30
        while {number for probe in probes for number in self.where(probe)} != {0, 1}:
            assert time.monotonic() < ends, "one engine gets no sessions"
            probes.append(f"probe-{len(probes)}")
            given = {"model": "m", "messages": MESSAGES, "max_tokens": 1}
            post(self, "/v1/chat/completions", {**given, "session_id": probes[-1], "rid": f"{probes[-1]}.0"})
            time.sleep(0.1)
        assert post(self, "/retire_sessions", {"session_ids": probes}) == (200, {"retired": len(probes)})

    def engine(self, number: int, port: int | None = None) -> Process:
        engine = start_engine(self.folder, port, request_log=self.logs[number])
        self._stack.callback(engine.end)
        return engine

    def where(self, session: str) -> list[int]:
        """The engines that were ever asked anything by a session."""
        return [
            number for number, asked in enumerate(self.asked()) if any(rid.startswith(f"{session}.") for rid in asked)
        ]

    def asked(self) -> list[list[str]]:
        lines = [[json.loads(line) for line in log.read_text().splitlines()] for log in self.logs]
        return [[line["rid"] for line in one if line["event"] == "begun"] for one in lines]

    def asked_by(self, sessions: list[str]) -> list[int]:
        """How often each engine was asked by these."""
        return [sum(rid.partition(".")[0] in sessions for rid in asked) for asked in self.asked()]


def named_of(engine: Process) -> str:
    return engine.url.removeprefix("http://")


@pytest.fixture
def pair(tmp_path: pathlib.Path) -> Iterator[Pair]:
    with contextlib.ExitStack() as stack:
        yield Pair(tmp_path, stack)


def ask(pair: Pair, session: str, number: int, **more: Any) -> None:
    """One turn, by either client, streamed or not."""
    said = [{"role": "user", "content": f"Say something about {number}."}]  # the store takes a turn once
    given: Any = {"model": "m", "messages": said, "max_tokens": 8}
    extra: Any = {"session_id": session, "rid": f"{session}.{number}", **more}
    if number % 4 < 2:
        chat = openai_client(pair.server).chat.completions
        if number % 2:
            assert "".join(
                chunk.choices[0].delta.content or ""
                for chunk in chat.create(**given, stream=True, extra_body=extra)
                if chunk.choices
            )
        else:
            assert chat.create(**given, extra_body=extra).id.startswith("lease-")
    elif number % 2:
        with anthropic_client(pair.server).messages.stream(**given, extra_body=extra) as stream:
            assert "".join(stream.text_stream)
    else:
        assert anthropic_client(pair.server).messages.create(**given, extra_body=extra).id.startswith("lease-")


def post(pair: Pair | str, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    url = pair if isinstance(pair, str) else pair.server.url
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def refusal(pair: Pair, session: str, number: int) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as refused:
        ask(pair, session, 4 * number)
    return refused.value


def test_sessions_stay_on_their_engines_and_nobody_moves_when_one_dies(pair: Pair) -> None:
    sessions = [f"s-{number}" for number in range(6)]
    for number in range(4):  # each client, streamed and not
        for session in sessions:
            ask(pair, session, number)
    homes = {session: pair.where(session) for session in sessions}
    assert sorted(homes.values()) == [[0]] * 3 + [[1]] * 3
    assert pair.asked_by(sessions) == [12, 12]

    # refusals, by clients nobody here wrote
    with pytest.raises(openai.BadRequestError, match="must carry a session_id"):
        openai_client(pair.server).chat.completions.create(model="m", messages=MESSAGES)
    assert post(pair, "/flush_cache", {})[0] == 403
    counted = anthropic_client(pair.server).messages.count_tokens(model="m", messages=MESSAGES)
    assert counted.input_tokens > 4
    retired = next(session for session in sessions if homes[session] == [1])
    for _ in range(2):
        assert post(pair, "/retire_sessions", {"session_ids": [retired]}) == (200, {"retired": 1})
    assert refusal(pair, retired, 2).status_code == 410

    # one engine dies: its sessions are refused, and nobody else's
    mine = [session for session in sessions if homes[session] == [0]]
    others = [session for session in sessions if homes[session] == [1] and session != retired]
    said = len(pair.server.log.read_text())
    pair.engines[0].end()
    assert refusal(pair, mine[0], 3).status_code >= 500  # of its session server, as long as nobody has noticed
    pair.server.until_says(f"{named_of(pair.engines[0])} is not healthy", said)
    ends = time.monotonic() + 30
    while "is not healthy" not in (error := refusal(pair, mine[0], 4)).message:  # the router asks in intervals
        assert error.status_code >= 500 and time.monotonic() < ends, error
        time.sleep(0.1)
    for session in mine:
        error = refusal(pair, session, 4)
        assert error.status_code == 503 and "is not healthy" in error.message
    for session in [*others, "new-1", "new-2"]:
        ask(pair, session, 20)
    for session in [*mine, *others, "new-1"]:
        assert pair.where(session) == ([0] if session in mine else [1])
    assert pair.asked_by([*sessions, "new-1", "new-2"])[0] == 12

    # it is there again, and so are its sessions
    again = pair.engine(0, int(pair.engines[0].url.rpartition(":")[2]))
    again.until_ready()
    ends = time.monotonic() + 30
    while True:
        try:
            ask(pair, mine[0], 24)
            break
        except openai.APIStatusError as error:
            assert error.status_code == 503 and time.monotonic() < ends, error
            time.sleep(0.2)
    assert pair.where(mine[0]) == [0]
    assert "poisoned" not in pair.server.log.read_text()


def test_a_turn_under_way_is_given_up_with_its_session(pair: Pair) -> None:
    told: list[BaseException] = []

    def long() -> None:
        try:
            openai_client(pair.server).chat.completions.create(
                model="m", messages=MESSAGES, max_tokens=LONG,
                extra_body={"session_id": "long", "rid": "long.0", "ignore_eos": True},
            )  # fmt: skip
        except BaseException as error:
            told.append(error)

    caller = threading.Thread(target=long)
    caller.start()
    ends = time.monotonic() + 20
    while not pair.where("long"):
        assert time.monotonic() < ends
        time.sleep(0.05)
    began = time.monotonic()
    assert post(pair, "/retire_sessions", {"session_ids": ["long"]}) == (200, {"retired": 1})
    caller.join(LONG_S)
    assert time.monotonic() - began < LONG_S / 3
    (error,) = told
    assert isinstance(error, openai.APIStatusError) and error.status_code == 410, error
    ask(pair, "short", 0)


def test_retiring_needs_the_token_and_engines_are_waited_for(tmp_path: pathlib.Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-of-some-length")
    engines = [part for _ in (0, 1) for part in ("--engine", f"http://127.0.0.1:{free_port()}")]
    server = Process(["real.serve_sessions", *engines, "--token-file", str(token)], tmp_path / "sessions.log")
    try:
        url = server.until_says(r"serving sessions on (http://\S+) ").group(1)
        assert post(url, "/retire_sessions", {"session_ids": ["a"]})[0] == 401
        bearer = {"Authorization": f"Bearer {token.read_text()}"}
        assert post(url, "/retire_sessions", {"session_ids": ["a", 17]}, **bearer) == (200, {"retired": 2})
        status, body = post(url, "/v1/chat/completions", {"session_id": "b", "messages": MESSAGES}, **bearer)
        assert status == 503 and body["error"]["message"] == "none of 2 backends is healthy"
        assert post(url, "/v1/messages", {"session_id": "a", "messages": MESSAGES}, **bearer)[0] == 410
    finally:
        server.end()
    twice = Process(["real.serve_sessions", *engines[:2], *engines[:2]], tmp_path / "twice.log")
    assert twice.wait() == 2 and "the same address twice" in twice.log.read_text()


class Slow:
    """Gives an item, and then none for long."""

    def __init__(self) -> None:
        self.ended = 0

    async def items(self, count: int) -> AsyncGenerator[int, None]:
        try:
            for item in range(count):
                yield item
            await asyncio.sleep(1000)
        finally:
            self.ended += 1


def test_a_stream_of_this_process_is_cancelled_as_a_call_is() -> None:
    async def body() -> None:
        slow = Slow()
        handle = LocalHandle("slow", slow)
        for read_first in (True, False):
            stream = handle.items(1)
            assert await anext(stream) == 0
            reading = asyncio.ensure_future(anext(stream)) if read_first else None
            await asyncio.sleep(0)
            handle.cancel(stream)
            handle.cancel(stream)
            with pytest.raises(CallCancelled):
                await (reading or anext(stream))
            with pytest.raises(CallCancelled):
                await anext(stream)
        assert slow.ended == 2
        stream = handle.items(0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await anext(stream)
        await stream.aclose()
        reading = asyncio.ensure_future(anext(handle.items(0)))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert slow.ended == 4

    asyncio.run(body())
