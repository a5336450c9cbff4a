"""Every way in which an engine can end: who hears of it, what the evidence says, and that nothing is left."""

from __future__ import annotations

import asyncio
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import pytest

from protocol.errors import ConnectionLost, ConnectionRefused, Outcome
from protocol.messages import GenerateRequest
from protocol.ports import EngineSpec
from real.engines.leftovers import clear_leftovers
from tests.processes import is_running
from tests.real.engine_world import (
    SPEC,
    events_of,
    gone,
    is_free,
    kinds_of,
    launched,
    open_logs,
    run_with_stubs,
    stub_settings,
)
from tests.real.local_ray import ROOT, environment

if TYPE_CHECKING:
    from real.backend import RealBackend

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]


async def kill_the_process(backend: RealBackend) -> None:
    os.kill((await backend.engines.describe("genrm-0")).main_pid, signal.SIGKILL)


async def kill_the_host(backend: RealBackend) -> None:
    os.kill((await backend.engines.describe("genrm-0")).host_pid, signal.SIGKILL)


async def terminate(backend: RealBackend) -> None:
    await backend.engines.terminate("genrm-0")


async def terminate_a_stopped_host(backend: RealBackend) -> None:
    os.kill((await backend.engines.describe("genrm-0")).host_pid, signal.SIGSTOP)
    await backend.engines.terminate("genrm-0")


async def signal_it(backend: RealBackend) -> None:
    await backend.engines.signal("genrm-0", "SIGKILL", "main")


async def segfault(backend: RealBackend) -> None:
    os.kill((await backend.engines.describe("genrm-0")).main_pid, signal.SIGSEGV)


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (kill_the_process, "killed"),
        (kill_the_host, "killed"),
        (terminate, "killed"),
        (terminate_a_stopped_host, "killed"),
        (signal_it, "killed"),
        (segfault, "crashed"),
    ],
)
def test_a_death_with_a_request_in_flight(
    tmp_path: pathlib.Path, end: Callable[[RealBackend], Awaitable[None]], reason: str
) -> None:
    async def body(backend: RealBackend) -> None:
        client = await launched(backend)
        about = await backend.engines.describe("genrm-0")
        assert about.port == client.address.port and about.main_pid in about.pids
        waiting = asyncio.create_task(client.generate(GenerateRequest("req-0000001", 10, 60_000)))
        while (await backend.engines.describe("genrm-0")).in_flight == 0:
            await asyncio.sleep(0.02)
        await end(backend)
        async with asyncio.timeout(10):
            with pytest.raises(ConnectionLost) as lost:
                await waiting
            while await backend.engines.alive("genrm-0"):
                await asyncio.sleep(0.02)
        assert lost.value.outcome == Outcome.UNKNOWN
        with pytest.raises(ConnectionRefused):
            await client.get("/ready", connect_timeout_s=1.0)
        await backend.engines.terminate("genrm-0")  # silent: it is dead
        assert gone([*about.pids, about.host_pid])
        assert is_free(client.address)
        again = await backend.engines.launch(SPEC, name="genrm-0")
        assert (again.incarnation, again.port) == (2, client.address.port)

    events = run_with_stubs(tmp_path, body)
    (death,) = kinds_of(events, "genrm-0", "actor.died")  # one, and the end of the run is not evidence
    assert (death.inc, death.data["reason"]) == (1, reason)
    (lost,) = [event for event in events if event.kind == "call.done" and event.data["error"] == "ConnectionLost"]
    assert lost.data["outcome"] == "unknown"
    assert open_logs(tmp_path) == []


def test_an_engine_that_is_terminated_while_it_reads_its_weights(tmp_path: pathlib.Path) -> None:
    async def body(backend: RealBackend) -> None:
        await backend.storage.write("exports/7/a", b"begun")
        os.truncate(tmp_path / "storage" / "exports" / "7" / "a", 4 << 30)  # seconds to read, no room on the disk
        await backend.engines.launch(EngineSpec("some-model", "exports/7"), name="genrm-0")
        about = await backend.engines.describe("genrm-0")
        assert about.main_pid == 0
        await backend.engines.terminate("genrm-0")
        assert not await backend.engines.alive("genrm-0") and gone([about.host_pid])

    events = run_with_stubs(tmp_path, body)
    assert [event.kind for event in kinds_of(events, "genrm-0")] == ["actor.spawned", "actor.died"]


def test_a_launch_that_is_terminated_before_its_host_is_there(tmp_path: pathlib.Path) -> None:
    async def body(backend: RealBackend) -> None:
        launch = asyncio.create_task(backend.engines.launch(SPEC, name="genrm-0"))
        while not await backend.engines.alive("genrm-0"):
            await asyncio.sleep(0)
        await backend.engines.terminate("genrm-0")
        address = await launch
        assert not await backend.engines.alive("genrm-0")
        with pytest.raises(ConnectionRefused):
            await backend.engines.client(address).get("/ready")
        again = await backend.engines.launch(SPEC, name="genrm-0")
        assert again.incarnation == 2

    events = run_with_stubs(tmp_path, body)
    first = [event.kind for event in kinds_of(events, "genrm-0") if event.inc == 1]
    # Its host may have come so far as to hear of it, or was told on its arrival.
    assert first[-1] == "actor.died" and first.count("actor.died") == 1 and "engine.ready" not in first


def test_an_engine_that_ends_at_its_start_says_why(tmp_path: pathlib.Path) -> None:
    async def body(backend: RealBackend) -> None:
        address = await backend.engines.launch(SPEC, name="genrm-0")
        async with asyncio.timeout(10):
            while await backend.engines.alive("genrm-0"):
                await asyncio.sleep(0.02)
        with pytest.raises(ConnectionRefused):
            await backend.engines.client(address).get("/ready")
        assert is_free(address)

    events = run_with_stubs(tmp_path, body, "--fail")
    (death,) = kinds_of(events, "genrm-0", "actor.died")
    assert death.data["reason"] == "crashed"
    assert re.fullmatch(r"exit status 1\nstub: the model is not there", death.data["detail"])


def test_an_engine_whose_port_another_server_takes_while_it_starts_ends_and_the_next_has_another(
    tmp_path: pathlib.Path,
) -> None:
    """Or callers, who know the address since its birth, would be answered by that server."""

    async def body(backend: RealBackend) -> None:
        address = await backend.engines.launch(SPEC, name="genrm-0")
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as every server has it
            other.bind((address.host, address.port))
            other.listen()
            async with asyncio.timeout(10):  # it would not even listen for 30
                while await backend.engines.alive("genrm-0"):
                    await asyncio.sleep(0.02)
            again = await backend.engines.launch(SPEC, name="genrm-0")
            assert again.port != address.port and await backend.engines.alive("genrm-0")
            ports.append(address.port)

    ports: list[int] = []
    events = run_with_stubs(tmp_path, body, "--silent-s=30")
    death = kinds_of(events, "genrm-0", "actor.died")[0]
    assert death.data["reason"] == "crashed"
    assert re.match(rf"port {ports[0]} of 127.0.0.1, .* is another server's now", death.data["detail"])


def test_an_interpreter_that_is_not_there(tmp_path: pathlib.Path) -> None:
    import dataclasses

    from real.backend import run_real

    async def body(backend: RealBackend) -> None:
        await backend.engines.launch(SPEC, name="genrm-0")
        async with asyncio.timeout(10):
            while await backend.engines.alive("genrm-0"):
                await asyncio.sleep(0.02)

    settings = dataclasses.replace(stub_settings(tmp_path), python="/nowhere/python")
    run_real(body, folder=str(tmp_path), engines=settings)
    (death,) = kinds_of(events_of(tmp_path), "genrm-0", "actor.died")
    assert death.data["detail"] == "exit status 1\ncannot start /nowhere/python: No such file or directory"


def test_a_stopped_engine_is_silent_and_goes_on(tmp_path: pathlib.Path) -> None:
    async def body(backend: RealBackend) -> None:
        client = await launched(backend)
        await backend.engines.signal("genrm-0", "SIGSTOP")
        waiting = asyncio.create_task(client.generate(GenerateRequest("req-0000001", 10, 10)))
        await asyncio.sleep(0.3)
        assert not waiting.done() and await backend.engines.alive("genrm-0")
        await backend.engines.signal("genrm-0", "SIGCONT")
        async with asyncio.timeout(5):
            assert (await waiting).completion_tokens == 10
        with pytest.raises(LookupError, match="no scheduler process"):
            await backend.engines.signal("genrm-0", "SIGKILL", "scheduler")
        with pytest.raises(LookupError, match="no living engine"):
            await backend.engines.signal("genrm-1", "SIGSTOP")

    events = run_with_stubs(tmp_path, body)
    seen = [event.kind for event in kinds_of(events, "genrm-0")]
    assert seen[3:] == ["actor.stopped", "actor.continued", "engine.accepted", "engine.finished"]


def test_the_end_of_a_run_ends_its_engines(tmp_path: pathlib.Path) -> None:
    pids: list[int] = []

    async def body(backend: RealBackend) -> None:
        for number in range(2):
            await launched(backend, f"genrm-{number}")
            about = await backend.engines.describe(f"genrm-{number}")
            pids.extend([*about.pids, about.host_pid])
        raise KeyError("the body fails")

    with pytest.raises(KeyError):
        run_with_stubs(tmp_path, body)
    assert len(pids) >= 4 and gone(pids)
    assert [event for event in events_of(tmp_path) if event.kind == "actor.died"] == []


DRIVER = """
import asyncio, pathlib, sys
from tests.real.local_ray import local_ray
from tests.real.engine_world import launched, stub_settings

async def body(backend):
    await launched(backend)
    about = await backend.engines.describe("genrm-0")
    print("PIDS", *about.pids, about.host_pid, flush=True)
    await asyncio.sleep(600)

folder = pathlib.Path(sys.argv[1])
with local_ray(num_gpus=2):
    from real.backend import run_real
    run_real(body, folder=str(folder), engines=stub_settings(folder))
"""


def test_a_killed_driver_takes_its_engines_along(tmp_path: pathlib.Path) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)],
        cwd=ROOT, env={**os.environ, **environment()}, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert driver.stdout is not None
        line = next((line for line in driver.stdout if line.startswith("PIDS")), "")
        pids = [int(pid) for pid in line.split()[1:]]
        assert len(pids) >= 2 and all(is_running(pid) for pid in pids)
    finally:
        driver.kill()
        driver.wait()
    assert gone(pids, within_s=20)
    assert open_logs(tmp_path) == []
    # What the killed host could not remove is written down, for the warden of a run.
    (listed,) = (tmp_path / "engines").glob("*.leftovers")
    left = [path for path in listed.read_text().splitlines()[1:] if os.path.exists(path)]
    assert len(left) == 1
    clear_leftovers(str(tmp_path))
    assert not os.path.exists(left[0])
