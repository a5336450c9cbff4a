"""Wrong registrations at a routed proxy (serving.md 1.5)."""

from __future__ import annotations

import asyncio
from typing import Any

from protocol.errors import ConnectTimeout, HttpError, Outcome, SeatrialError
from protocol.ports import backend
from protocol.serving.registration import DELETE, ProxyRegistrations
from tests.mutants.registry import Mutant


class RetriesReadTimeouts(ProxyRegistrations):
    """Sends an admin POST again after a read time-out."""

    retried: tuple[type[SeatrialError], ...] = (SeatrialError,)
    most_attempts = 5

    async def _post(self, route: str, body: dict[str, Any], timeout_s: float) -> None:
        operation = backend().new_id("admin")
        attempt = 0
        while True:
            attempt += 1
            failure: SeatrialError | None = None
            try:
                reply = await self._proxy.post(route, dict(body), connect_timeout_s=timeout_s, read_timeout_s=timeout_s)
                if not reply.success:
                    failure = HttpError(status=reply.status, body=reply.body)
            except SeatrialError as error:
                failure = error
            backend().emit(
                "admin.attempt",
                operation=operation,
                route=route,
                target=self._proxy.name,
                attempt=attempt,
                outcome=Outcome.DONE.value if failure is None else failure.outcome.value,
                error="" if failure is None else type(failure).__name__,
            )
            if failure is None:
                return
            if not isinstance(failure, self.retried) or attempt >= self.most_attempts:
                raise failure
            await asyncio.sleep(self._config.connect_backoff_s)


class RetriesAnswers(RetriesReadTimeouts):
    """Sends an admin POST again after an answer that says no."""

    retried = (ConnectTimeout, HttpError)


class RetriesConnectsForEver(RetriesReadTimeouts):
    """Retries connect time-outs without a bound."""

    retried = (ConnectTimeout,)
    most_attempts = 1_000_000


class DeletesAllForOne(ProxyRegistrations):
    """When one entrypoint fails it deletes all, and registers the others anew."""

    async def group_inactive(self, urls: tuple[str, ...]) -> None:
        await self.replace_registered_session_urls(tuple(url for url in self._wanted if url not in urls))


class RegistersBeforeItDeletes(ProxyRegistrations):
    """Registers its backends first, and deletes everything of the model after that."""

    async def replace_registered_session_urls(self, urls: tuple[str, ...]) -> None:
        async with self._one_at_a_time:
            self._wanted = dict.fromkeys(sorted(urls))
            for url in self._wanted:
                await self._register(url)
            await self._post(DELETE, {"model_name": self._config.model_name}, self._config.delete_timeout_s)


class RegistersOnce(ProxyRegistrations):
    """Never makes a registration again that failed when its entrypoint recovered."""

    async def start(self) -> None:
        await super().start()
        self._tasks[0].cancel()


class ForgetsFailedDeletions(ProxyRegistrations):
    """Takes a backend for deleted although the deletion failed."""

    async def _delete(self, url: str) -> None:
        try:
            await super()._delete(url)
        except SeatrialError:
            self._registered.pop(url, None)
            raise


class LeavesItsProbe(ProxyRegistrations):
    """Does not retire the session of its probe."""

    async def _probe(self) -> bool:
        controller, self._controller = self._controller, None
        try:
            return await super()._probe()
        finally:
            self._controller = controller


def _registrations(name: str, source: str, cls: type, scenario: str, check: str) -> Mutant:
    return Mutant(name, source, "registrations", ProxyRegistrations, cls, scenario, check)


MUTANTS = (
    _registrations("registered twice", "P-1", RetriesReadTimeouts, "proxy_stall", "proxy_registered_once"),
    _registrations("retries after an answer", "P-3", RetriesAnswers, "proxy_busy", "proxy_post_delivered_once"),
    _registrations(
        "connects without a bound",
        "P-4",
        RetriesConnectsForEver,
        "proxy_unreachable_for_new",
        "proxy_post_delivered_once",
    ),
    _registrations(
        "registered before deleted", "P-5", RegistersBeforeItDeletes, "proxy_probe", "proxy_follows_the_fleet"
    ),
    _registrations("all deleted for one", "P-5", DeletesAllForOne, "proxy_kill", "proxy_follows_the_fleet"),
    _registrations(
        "failed registration left", "P-6", RegistersOnce, "proxy_unreachable_for_new", "proxy_follows_the_fleet"
    ),
    _registrations(
        "failed deletion forgotten",
        "P-7",
        ForgetsFailedDeletions,
        "proxy_unreachable_for_delete",
        "proxy_registered_once",
    ),
    _registrations("probe session left", "P-8", LeavesItsProbe, "proxy_probe", "proxy_probe"),
)
