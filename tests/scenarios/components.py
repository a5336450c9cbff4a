"""Components of a user's own, for the tests: named in scenarios as ``tests.scenarios.components:Class``."""

from __future__ import annotations

import asyncio
import itertools
import os
import pathlib

from protocol.config import GatewayConfig
from protocol.messages import GenerateRequest, GenerateResult
from protocol.ports import data_call
from protocol.serving.gateway import Gateway


class HashOrderGateway(Gateway):
    """Waits in the order of a set of strings, which is that of the process's hash seed."""

    async def start(self) -> None:
        await super().start()
        for name in {"ada", "bob", "cleo", "dan", "eve", "finn", "gus", "hal"}:  # the defect
            await asyncio.sleep(0.001 * ord(name[0]) ** 2 % 0.0137)


class DrawnHashOrderGateway(HashOrderGateway):
    """The same, but only where orders and delays are drawn from the seed. It may know: it is a defect of a test."""

    async def start(self) -> None:
        if asyncio.get_running_loop()._kernel.explore is None:  # type: ignore[attr-defined]  # of the simulated loop
            await Gateway.start(self)
        else:
            await super().start()


class LeakyGateway(Gateway):
    """Keeps a count at class level, so that a run depends on those before it."""

    runs = 0

    async def start(self) -> None:
        await super().start()
        type(self).runs += 1
        await asyncio.sleep(0.01 * type(self).runs)


class ForgetfulGateway(Gateway):
    """Never answers the tenth request."""

    def __init__(self, config: GatewayConfig) -> None:
        super().__init__(config)
        self._seen = 0

    @data_call
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self._seen += 1
        if self._seen == 10:
            await asyncio.get_running_loop().create_future()
        return await super().generate(request)


class SpinningGateway(ForgetfulGateway):
    """Never comes back from the tenth request: the step goes on for ever, without an await."""

    @data_call
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self._seen += 1
        while self._seen == 10:
            pass
        return await Gateway.generate(self, request)


class ClingingGateway(ForgetfulGateway):
    """As the spinning one, and it catches whatever would end it."""

    @data_call
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self._seen += 1
        while self._seen == 10:
            try:
                while True:
                    pass
            except BaseException:  # noqa: S112 - the defect
                continue
        return await Gateway.generate(self, request)


class ClingingOnceGateway(ClingingGateway):
    """In the first run of all alone, for which it keeps a file."""

    async def start(self) -> None:
        await super().start()
        marker = pathlib.Path(os.environ["SEATRIAL_TEST_MARKER"])
        if marker.exists():
            self._seen = 10
        marker.touch()


class DeafGateway(ForgetfulGateway):
    """As the spinning one, but in C code, which no signal handler of Python interrupts."""

    @data_call
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self._seen += 1
        if self._seen == 10:
            sum(itertools.repeat(0))
        return await Gateway.generate(self, request)


class LitteringGateway(Gateway):
    """Starts an actor and asks for a placement group, and leaves both behind."""

    async def start(self) -> None:
        from protocol.ports import backend

        await super().start()
        await backend().spawn(Gateway, self._config, name="litter")
        await backend().placement_groups.create(((("CPU", 1.0),),), strategy="PACK", name="litter")


class PlainGateway:
    """Knows one replica and nothing else: no health, no counters, no evidence of its own."""

    def __init__(self, config: GatewayConfig) -> None:
        self._client = None

    async def add_replica(self, address: object) -> bool:
        from protocol.ports import backend

        self._client = backend().engines.client(address)  # type: ignore[arg-type]
        return True

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return await self._client.generate(request)  # type: ignore[union-attr]

    async def health_view(self, known_version: int, stall_window_s: float) -> object:
        from protocol.serving.gateway import HealthView

        return HealthView(1, (), (), ())


class PrintingGateway(Gateway):
    """Prints, as code under development does."""

    async def start(self) -> None:
        await super().start()
        print("hello from the gateway")


class MumblingGateway(Gateway):
    """Fails with errors that nobody can print."""

    @data_call
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        class Mute(Exception):
            def __str__(self) -> str:
                raise RuntimeError("no words")

        raise Mute


class FallingGateway(Gateway):
    """Its constructor raises what is no Exception."""

    def __init__(self, config: GatewayConfig) -> None:
        raise BaseException("fell")


class SilentGateway(Gateway):
    """It forgets to return the answer."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        await super().generate(request)
        return None  # type: ignore[return-value]  # that is the mistake
