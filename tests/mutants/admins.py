"""Wrong admin clients."""

from __future__ import annotations

import asyncio
from typing import Any

from protocol.errors import ConnectTimeout, Outcome, SeatrialError
from protocol.messages import EngineAddress
from protocol.ports import backend
from protocol.serving.admin import AdminClient, AdminResult, post_admin, refusal
from tests.mutants.registry import Mutant


class RetriesEverything(AdminClient):
    """Sends an admin POST again after a read time-out too."""

    retried: tuple[type[SeatrialError], ...] = (SeatrialError,)
    most_attempts = 5

    async def _operate(self, address: EngineAddress, route: str, body: dict[str, Any]) -> AdminResult:
        port = backend()
        client = port.engines.client(address)
        operation = port.new_id("admin")
        attempt = 0
        while True:
            attempt += 1
            failure: SeatrialError | None = None
            try:
                reply = await client.post(
                    route,
                    dict(body),
                    connect_timeout_s=self._config.connect_timeout_s,
                    read_timeout_s=self._config.read_timeout_s,
                )
                outcome = Outcome.DONE if reply.success else refusal(route, reply.status)
            except SeatrialError as error:
                failure, outcome = error, error.outcome
            port.emit(
                "admin.attempt",
                operation=operation,
                route=route,
                target=address.name,
                attempt=attempt,
                outcome=outcome.value,
                error="" if failure is None else type(failure).__name__,
            )
            if failure is None or not isinstance(failure, self.retried) or attempt >= self.most_attempts:
                return AdminResult(address.name, address.incarnation, route, outcome.value)
            await asyncio.sleep(self._config.connect_backoff_s)


class RetriesNothing(RetriesEverything):
    """Gives up after one connect time-out, though nothing was sent."""

    most_attempts = 1


class RetriesWithoutBound(RetriesEverything):
    """Retries connect time-outs for ever."""

    retried = (ConnectTimeout,)
    most_attempts = 1_000_000


class ContinuesOnlyWhatAnswered(AdminClient):
    """After a pause it continues only the replicas that acknowledged it."""

    async def pause_round(self) -> tuple[AdminResult, ...]:
        acknowledged = []
        results = []
        for address in await self._roster():
            try:
                await post_admin(
                    backend().engines.client(address),
                    "/pause_generation",
                    {"mode": self._config.pause_mode},
                    self._config,
                )
                acknowledged.append(address)
            except SeatrialError as error:
                results.append(
                    AdminResult(address.name, address.incarnation, "/pause_generation", error.outcome.value, str(error))
                )
        continued = await self._everywhere(tuple(acknowledged), "/continue_generation", {})
        return (*results, *continued)


class PausesBehindHealthsBack(AdminClient):
    """Pauses the replicas without telling health, which takes them for ill."""

    async def start(self) -> None:
        self._prober = None
        await super().start()


def _admin(name: str, source: str, cls: type, scenario: str, check: str) -> Mutant:
    return Mutant(name, source, "admin", AdminClient, cls, scenario, check)


MUTANTS = (
    _admin("admin retry on a read time-out", "P-1", RetriesEverything, "flush_read_timeout", "admin_once"),
    _admin("no admin retry at all", "P-2", RetriesNothing, "flush_connect_timeout", "occurs"),
    _admin("admin retry without bound", "P-4", RetriesWithoutBound, "flush_unreachable", "occurs"),
    _admin("continue only what answered", "C-13", ContinuesOnlyWhatAnswered, "pause_read_timeout", "occurs"),
    _admin("pause behind health's back", "serving 3.1", PausesBehindHealthsBack, "pause_held", "occurs"),
)
