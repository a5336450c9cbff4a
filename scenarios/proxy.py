"""A routed proxy of somebody else's, as the fleet meets it: a public address, and admin POSTs that say who is there.

An actor at the edge, which records what reaches it. HTTP's two phases are two calls, so that each can be lost alone:
``connect`` (before it is answered nothing can have been done) and ``post``. Source: serving.md 1.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

from protocol.errors import (
    ActorDied,
    CallCancelled,
    ConnectionLost,
    ConnectionRefused,
    ConnectTimeout,
    HttpError,
    Outcome,
    ReadTimeout,
    SeatrialError,
)
from protocol.evidence import observer
from protocol.messages import AdminReply, GenerateRequest
from protocol.ports import ActorHandle, backend, data_call
from protocol.serving.entrypoint import TurnResult
from protocol.serving.registration import CHAT, DELETE, NEW, ProxyRegistrations
from scenarios.schema import ProxyModel

_LOOK_S = 0.5
_ANSWER_S = 10.0
_PROBE_PROMPT_TOKENS = 4


@observer
class RoutedProxy:
    """Forwards a session to one of the registered backends, always the same one, and refuses it without. An actor.

    Args:
        service: whose backends.
        model: its name, as registrations must give it.
        backends: (URL, handle, method of a turn) of everybody who might be registered.
        busy_answers: admin POSTs after the first probe that are answered with 503.
    """

    def __init__(
        self, service: str, model: str, backends: tuple[tuple[str, ActorHandle, str], ...], busy_answers: int
    ) -> None:
        self._service = service
        self._model = model
        self._backends = {url: (handle, method) for url, handle, method in backends}
        self._table: dict[str, None] = {}
        self._sessions: dict[str, str] = {}
        self._turn = 0
        self._busy = busy_answers
        self._started = False

    async def connect(self) -> None:
        """The connection is there."""

    async def post(self, route: str, body: dict[str, Any]) -> AdminReply:
        """An admin POST, or a chat completion. Registration is not idempotent here, as in the originals."""
        if route == CHAT:
            return await self._chat(body)
        url = str(body.get("api_base", ""))
        if self._started and self._busy:
            self._busy -= 1
            self._record(route, url, "busy")
            return AdminReply(503, "try again later", False)
        if route == NEW:
            effect = "duplicate" if url in self._table else "registered"
            self._table[url] = None
        elif not url:
            effect = "deleted_all"
            self._table = {}
        else:
            effect = "absent" if self._table.pop(url, self) is self else "deleted"
        self._record(route, url, effect)
        return AdminReply(200, "{}")

    @data_call
    async def handle(self, request: GenerateRequest) -> TurnResult:
        """A turn of a session. Raises HttpError 503, *not done*, without a backend for it; else as the backend does."""
        url = self._sessions.get(request.session_id)
        if url is None and self._table:
            urls = list(self._table)
            url = self._sessions[request.session_id] = urls[self._turn % len(urls)]
            self._turn += 1
        if url not in self._table:
            raise HttpError(f"{self._service}: no backend", status=503, body="no backend", outcome=Outcome.NOT_DONE)
        backend().emit(
            "proxy.forwarded", service=self._service, session=request.session_id, request=request.request_id, url=url
        )
        handle, method = self._backends[url]
        answer: TurnResult = await getattr(handle, method)(request)
        return answer

    async def table(self) -> tuple[str, ...]:
        """The URLs that are registered, in that order."""
        return tuple(self._table)

    async def _chat(self, body: dict[str, Any]) -> AdminReply:
        session = str(body.get("session_id", ""))
        self._started = True
        name = backend().new_id("probe")
        request = GenerateRequest(
            name, _PROBE_PROMPT_TOKENS, int(body["max_tokens"]), session_id=session, idempotent=False
        )
        try:
            await self.handle(request)
        except SeatrialError as error:
            self._record(CHAT, "", "failed", session)
            return AdminReply(502, str(error), False)
        self._sessions.pop(session, None)
        self._record(CHAT, "", "answered", session)
        return AdminReply(200, json.dumps({"choices": [{"message": {"content": "pong"}}]}))

    def _record(self, route: str, url: str, effect: str, session: str = "") -> None:
        short = {NEW: "new", DELETE: "delete", CHAT: "chat"}[route]
        backend().emit(
            "proxy.post",
            service=self._service, route=short, url=url, session=session, effect=effect, table=len(self._table),
        )  # fmt: skip


class ProxyLink:
    """The proxy as registrations reach it (``protocol.serving.registration.ProxyPort``)."""

    def __init__(self, proxy: ActorHandle) -> None:
        self._proxy = proxy

    @property
    def name(self) -> str:
        return self._proxy.name

    async def post(
        self, route: str, body: dict[str, Any], *, connect_timeout_s: float, read_timeout_s: float
    ) -> AdminReply:
        try:
            async with asyncio.timeout(connect_timeout_s):
                await self._proxy.connect()
        except (TimeoutError, CallCancelled):
            raise ConnectTimeout(f"{route}: no connection to {self.name}") from None
        except ActorDied as error:
            raise ConnectionRefused(f"{route}: nobody listens at {self.name}") from error
        try:
            async with asyncio.timeout(read_timeout_s):
                reply: AdminReply = await self._proxy.post(route, body)
                return reply
        except TimeoutError:
            raise ReadTimeout(f"{route}: {self.name} did not answer within {read_timeout_s:g} s") from None
        except (ActorDied, CallCancelled) as error:
            raise ConnectionLost(f"{route}: {self.name}: {error}") from error


@dataclasses.dataclass(slots=True)
class Front:
    """A proxy that is up, and who tells it which backends there are."""

    service: str
    proxy: ActorHandle
    registrations: ActorHandle
    gateway: ActorHandle
    urls: tuple[tuple[str, str], ...]
    """(replica, URL); the replica is empty for the affinity router."""

    async def snapshot(self, within_s: float) -> None:
        """Record what the proxy has, once it is what it should have or the time is up."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + within_s
        while True:
            try:
                async with asyncio.timeout(_ANSWER_S):
                    table: tuple[str, ...] = await self.proxy.table()
                    routed = {view.address.name for view in await self.gateway.engines() if view.routable}
            except (SeatrialError, TimeoutError):
                return
            due = sorted(url for replica, url in self.urls if not replica or replica in routed)
            if sorted(table) == due or loop.time() >= ends:
                break
            await asyncio.sleep(_LOOK_S)
        backend().emit("proxy.snapshot", service=self.service, table=sorted(table), routable=due)


async def deploy_proxy(
    service: str,
    model: ProxyModel,
    classes: dict[str, type],
    entrypoints: tuple[tuple[str, ActorHandle], ...],
    router: ActorHandle,
    controller: ActorHandle,
    gateway: ActorHandle,
    node: str,
) -> Front:
    """Start a proxy, register what is to be behind it, and see by a real generation that a request gets through.

    Args:
        entrypoints: (replica, handle) of each.

    Raises SeatrialError: a registration or every probe failed.
    """
    port = backend()
    urls: tuple[tuple[str, str], ...]
    backends: tuple[tuple[str, ActorHandle, str], ...]
    if model.registers == "router":
        urls, backends = (("", f"http://{router.name}"),), ((f"http://{router.name}", router, "handle"),)
    else:
        urls = tuple((replica, f"http://{entrypoint.name}") for replica, entrypoint in entrypoints)
        backends = tuple((f"http://{entrypoint.name}", entrypoint, "generate") for _, entrypoint in entrypoints)
    proxy = await port.spawn(
        RoutedProxy, service, model.registrations.model_name, backends, model.busy_answers,
        name=f"proxy-{service}", node=node,
    )  # fmt: skip
    followed = (gateway, urls) if model.registers == "entrypoints" else ()
    registrations = await port.spawn(
        classes.get("registrations", ProxyRegistrations), model.registrations, ProxyLink(proxy), controller, *followed,
        name=f"registrations-{service}", node=node,
    )  # fmt: skip
    port.emit(
        "proxy.deployed",
        service=service,
        proxy=proxy.name,
        registrations=registrations.name,
        urls=[list(pair) for pair in urls],
        connect_attempts=model.registrations.connect_attempts,
    )
    await registrations.replace_registered_session_urls(tuple(url for _, url in urls))
    await registrations.validate_registered_session_urls()
    return Front(service, proxy, registrations, gateway, urls)
