"""Faults on genuine SGLang: its scheduler is wedged, all of it is stopped and slowed, a child is killed."""

from __future__ import annotations

import asyncio
import pathlib
from typing import Any

import pytest

from protocol.errors import ConnectionLost, ReadTimeout
from protocol.evidence import decode
from protocol.ports import EngineSpec
from tests.conftest import sglang_cpu_python
from tests.contract.faulted import request, told, until, until_ready

pytestmark = [pytest.mark.ray, pytest.mark.sglang_cpu]


def test_processes_of_genuine_sglang(ray_session: None, tmp_path: pathlib.Path) -> None:
    from protocol.faulting import Target
    from real.backend import run_real
    from real.engines.settings import EngineSettings
    from real.faults.injection import real_faults

    python = sglang_cpu_python()
    assert python is not None

    async def body(backend: Any) -> None:
        loop = asyncio.get_running_loop()
        faults = real_faults(backend)
        target = Target("engine-0")
        address = await backend.engines.launch(EngineSpec("tiny-cpu"), name="engine-0")
        client = await until_ready(backend.engines.client(address))

        async def takes(number: int) -> float:
            began = loop.time()
            await client.generate(request(number, 100))
            return loop.time() - began

        await takes(1)
        usual = await takes(2)
        slow = faults.inject("slow", target, {"percent": 400}, must_hit={})
        slowed = await takes(3)
        slow.heal()
        assert slowed > 2 * usual, (slowed, usual)

        for number, name in ((4, "wedge"), (5, "sigstop")):
            call = asyncio.ensure_future(client.generate(request(number, 400)))
            await until(lambda: backend.census.find("engine-0").in_flight == 1)
            fault = faults.inject(name, target, {}, must_hit={"in_flight": {"at_least": 1}})
            if name == "wedge":
                assert (await client.get("/ready", connect_timeout_s=2, read_timeout_s=5))[0] == 200
            else:
                with pytest.raises(ReadTimeout):
                    await client.get("/ready", connect_timeout_s=2, read_timeout_s=2)
            await asyncio.sleep(4 * usual + 4)
            assert not call.done()
            fault.heal()
            assert (await call).completion_tokens == 400 and fault.satisfied()

        nan = faults.inject("metrics_nan", target, {}, must_hit={})
        status, page = await client.get("/metrics")
        values = {line.rsplit(" ", 1)[1] for line in page.splitlines() if line and not line.startswith("#")}
        assert status == 200 and values == {"NaN"} and nan.hits == 1
        nan.heal()

        call = asyncio.ensure_future(client.generate(request(6, 4000)))
        await until(lambda: backend.census.find("engine-0").in_flight == 1)
        began = loop.time()
        faults.inject("sigkill", target, {"part": "scheduler"}, must_hit={}, transient=True)
        with pytest.raises(ConnectionLost):
            await call
        print(f"the death of the scheduler was noticed after {loop.time() - began:.1f} s")

    run_real(body, folder=str(tmp_path), engines=EngineSettings("sglang-cpu", python))
    events = [decode(line) for line in (tmp_path / "events" / "engine-0-1.jsonl").read_bytes().splitlines()]
    assert told(events, "actor.died", "reason") == [("exited",)]
