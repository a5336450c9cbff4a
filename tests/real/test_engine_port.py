"""What ``terminate`` does about an engine whose host does not answer. No Ray: host, registry, signals are stand-ins."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from real.engines import port as engine_port
from real.engines.port import RealEngines

ray = pytest.importorskip("ray")


class Remote:
    """``handle.method.remote(...)`` of something that is here."""

    def __init__(self, call: Any) -> None:
        self.remote = call


class Stage(RealEngines):
    """The port with an engine whose host is dead, stopped, or out of reach; ``done`` has what was done, in order."""

    def __init__(self, host: str, signals: str) -> None:
        self.done: list[str] = []
        self._how = signals
        self._host_is = host
        self._run = type("Run", (), {"run": "run"})()
        self._log = type("Log", (), {"lc": 0})()
        self._registry = type("Registry", (), {"whereabouts": Remote(self._whereabouts)})()
        self._send_signal = self._signalled
        self.reached = asyncio.Event()

    async def _latest(self, name: str) -> Any:
        return type("Launched", (), {"incarnation": 3})()

    async def _whereabouts(self, *_: Any) -> tuple[int, str]:
        return 4711, "node"

    def _host(self, name: str, incarnation: int) -> Any:
        return type("Host", (), {"terminate": Remote(self._terminated)})()

    async def _terminated(self, lc: int, recorded: bool) -> None:
        if self._host_is == "stopped":
            await asyncio.Event().wait()
        raise ray.exceptions.RayActorError

    async def _signalled(self, where: tuple[int, str], number: signal.Signals) -> None:
        assert (where, number) == ((4711, "node"), signal.SIGKILL)
        self.done.append("signal sent")
        await self.reached.wait()
        if self._how == "node lost":
            raise ray.exceptions.NodeDiedError("its node has been declared dead")
        self.done.append("killed")

    async def _report(self, name: str, incarnation: int, *, recorded: bool = True) -> None:
        self.done.append("reported dead")


@pytest.mark.parametrize("host", ["dead", "stopped"])
@pytest.mark.parametrize(("signals", "ends"), [("obeyed", ["killed"]), ("node lost", [])])
def test_an_engine_is_taken_for_dead_when_it_is_or_its_node_is(
    host: str, signals: str, ends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the simulated world: not after a time of its own, in which the engine may go on under its name."""
    monkeypatch.setattr(engine_port, "_TERMINATED_WITHIN_S", 0.05)

    async def body() -> None:
        stage = Stage(host, signals)
        ending = asyncio.ensure_future(stage.terminate("e"))
        while not stage.done:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert stage.done == ["signal sent"] and not ending.done(), "it is alive, as far as anybody knows"
        stage.reached.set()
        await ending
        assert stage.done == ["signal sent", *ends, "reported dead"]

    asyncio.run(body())
