"""``python -m real.emulated --request-log FILE``: what it writes, and that it outlives a SIGKILL."""

from __future__ import annotations

import asyncio
import json
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import aiohttp
import pytest

from tests.real.emulated_process import ROOT, Client, emulated, free_port, quick_profile, talk


def lines(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_requests_with_an_id_are_written_as_they_begin_and_end(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "requests.jsonl"

    async def body(client: Client) -> None:
        await client.generate([1, 2, 3], new=4, rid="request-1")
        await client.generate([1, 2, 3], new=4)  # without an id
        await client.get("/ready")
        status, _ = await client.post("/generate", {"rid": "request-2", "input_ids": "nonsense"})
        assert status == 400

    began = time.monotonic()
    with emulated(quick_profile(tmp_path), "--request-log", str(path)) as engine:
        talk(engine, body)
    found = lines(path)
    assert [(one["event"], one.get("rid"), one.get("status")) for one in found] == [
        ("listening", None, None),
        ("begun", "request-1", None),
        ("ended", "request-1", 200),
        ("begun", "request-2", None),
        ("ended", "request-2", 400),
    ]
    instants = [one["t"] for one in found]
    assert instants == sorted(instants) and began <= instants[0] and instants[-1] <= time.monotonic()


def test_what_was_written_outlives_a_kill(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "requests.jsonl"
    with emulated(quick_profile(tmp_path), "--request-log", str(path)) as engine:

        async def body(client: Client) -> None:
            call = asyncio.ensure_future(client.generate([1, 2, 3], new=400, rid="request-1"))
            while not any(one["event"] == "begun" for one in lines(path)):
                await asyncio.sleep(0.01)
            engine.signal(signal.SIGKILL)
            with pytest.raises(aiohttp.ClientError):
                await call

        talk(engine, body)
    assert [(one["event"], one.get("rid")) for one in lines(path)] == [("listening", None), ("begun", "request-1")]


def test_a_file_that_cannot_be_opened(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "real.emulated", "--profile", "tiny-cpu", "--port", str(free_port())]
    done = subprocess.run(
        [*command, "--request-log", "/nowhere/log"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert done.stderr == "real.emulated: --request-log /nowhere/log: No such file or directory\n"
