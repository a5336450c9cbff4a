"""What a routed proxy in front of the fleet is told: which backends there are (serving.md 1).

Registration is not idempotent, so one of unknown outcome is never made again blindly: that URL is deleted first. What
is *wanted* is set at once, by whoever learns of it; the POSTs follow in the background, one at a time, so that no
caller and no lock of one waits for a slow proxy. What failed is tried again every ``retry_interval_s``.

Which entrypoints are active is asked of the gateway: nobody who judges or replaces replicas calls anything here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterable
from typing import Any, Protocol

from protocol.config import ProxyConfig
from protocol.errors import HttpError, Outcome, SeatrialError
from protocol.messages import AdminReply
from protocol.ports import ActorHandle, backend
from protocol.serving.admin import post_once
from protocol.serving.gateway import ReplicaView
from protocol.serving.peer import PEER_LOST, Peer

NEW = "/v1/models/new"
DELETE = "/v1/models/delete"
CHAT = "/v1/chat/completions"
_API_KEY = "sk-admin"
_PROBE_TOKENS = 16
_RETIRE_S = 5.0


class ProxyPort(Protocol):
    """One proxy, as whoever registers backends with it sees it. Over HTTP: ``real.http_proxy``."""

    @property
    def name(self) -> str:
        """For evidence."""
        ...

    async def post(
        self, route: str, body: dict[str, Any], *, connect_timeout_s: float, read_timeout_s: float
    ) -> AdminReply:
        """One attempt of a POST. Times in seconds. Raises as ``EngineClient.post``."""
        ...


class ProxyRegistrations:
    """The backends that a proxy is believed to have, and those that it should have. An actor, or part of one.

    Args:
        config: model name, time-outs, attempts.
        proxy: where the POSTs go.
        controller: handle of the RolloutController, asked whether gates are closed, and to retire the probe's session.
        gateway: handle of the Gateway, asked which replicas are routed to; None: only its callers say so.
        urls: (replica, URL) pairs of the entrypoints, for that.
    """

    def __init__(
        self,
        config: ProxyConfig,
        proxy: ProxyPort,
        controller: ActorHandle | None = None,
        gateway: ActorHandle | None = None,
        urls: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self._config = config
        self._proxy = proxy
        self._controller = None if controller is None else Peer(controller, _RETIRE_S)
        self._gateway = None if gateway is None else Peer(gateway, _RETIRE_S)
        self._urls = urls
        self._active = dict.fromkeys(url for _, url in urls)
        self._wanted: dict[str, None] = {}
        self._registered: dict[str, None] = {}
        """What the proxy has, or may have: a URL of which a registration or deletion is of unknown outcome is here."""
        self._doubtful: dict[str, None] = {}
        """Of those, the ones that must be deleted before they can be registered again."""
        self._one_at_a_time = asyncio.Lock()
        self._work: dict[asyncio.Task[None], None] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        port = backend()
        self._tasks.append(port.periodic(self._config.retry_interval_s, self._reconcile, name="proxy-retry"))
        if self._gateway is not None:
            self._tasks.append(port.periodic(self._config.follow_interval_s, self._follow, name="proxy-follow"))

    async def stop(self) -> None:
        for task in (*self._work, *self._tasks):
            task.cancel()

    async def replace_registered_session_urls(self, urls: tuple[str, ...]) -> None:
        """Delete everything of the model, then register each distinct URL in sorted order.

        Raises:
            SeatrialError: of the first that failed; those before it are registered, and retries go on with the rest.
        """
        async with self._one_at_a_time:
            self._wanted = dict.fromkeys(sorted(urls))
            await self._post(DELETE, {"model_name": self._config.model_name}, self._config.delete_timeout_s)
            self._registered = {}
            self._doubtful = {}
            for url in self._wanted:
                await self._register(url)

    async def group_inactive(self, urls: tuple[str, ...]) -> None:
        """Entrypoints that must get no new request. Returns at once; a failed deletion is tried again."""
        for url in urls:
            self._wanted.pop(url, None)
        self._begin()

    async def group_recovered(self, urls: tuple[str, ...]) -> None:
        """Entrypoints that may get requests again. Returns at once; a failed registration is tried again."""
        for url in urls:
            self._wanted[url] = None
        self._begin()

    async def registered(self) -> tuple[str, ...]:
        """What the proxy is believed to have, what is in doubt included."""
        return tuple(self._registered)

    async def validate_registered_session_urls(self) -> None:
        """See by a real generation that the proxy reaches a backend. Nothing to do where nothing is registered.

        The probe's session is retired however it ends, so that neither a binding nor a trace of it is left (P-I5).

        Raises:
            SeatrialError: *not done* when gates are closed, which the probe would wait out; else every probe failed.
        """
        if not self._registered:
            return
        if self._controller is not None:
            if await self._controller.call("barrier") is not None:
                raise SeatrialError("no probe while a publication barrier exists", outcome=Outcome.NOT_DONE)
            closed: tuple[str, ...] = await self._controller.call("closed_gates")
            if closed:
                raise SeatrialError(f"no probe while the gate of {closed[0]} is closed", outcome=Outcome.NOT_DONE)
        config = self._config
        for attempt in range(config.probe_attempts):
            if attempt:
                await asyncio.sleep(config.probe_interval_s)
            if await self._probe():
                return
        raise SeatrialError(f"{self._proxy.name}: {config.probe_attempts} probes failed; no request would get through")

    async def _probe(self) -> bool:
        session = backend().new_id("probe")
        message = {"role": "user", "content": "ping"}
        body = {
            "model": self._config.model_name,
            "session_id": session,
            "messages": [message],
            "max_tokens": _PROBE_TOKENS,
            "temperature": 0,
            "return_token_ids": False,  # as an evaluation: a session server records no trace, for nobody would own it
        }
        timeout_s = self._config.probe_timeout_s
        try:
            # Not through _post: a generation is no admin POST, and one that failed is followed by another session's.
            reply = await self._proxy.post(CHAT, body, connect_timeout_s=timeout_s, read_timeout_s=timeout_s)
            return reply.success and _has_content(reply.body)
        except SeatrialError:
            return False  # a probe says yes or no
        finally:
            if self._controller is not None:
                # The router retires a session before it waits for anybody: a late answer changes nothing there. And
                # where it was not reached, the proxy's answer is what was asked for all the same.
                with contextlib.suppress(SeatrialError):
                    await self._controller.call("retire_route_sessions", (session,))

    # --- who is active ---

    async def _follow(self) -> None:
        """Learn from the gateway who has become inactive or active since the last look."""
        assert self._gateway is not None
        try:
            views: tuple[ReplicaView, ...] = await self._gateway.call("engines")
        except PEER_LOST:
            return
        routed = {view.address.name for view in views if view.routable}
        now = dict.fromkeys(url for replica, url in self._urls if replica in routed)
        gone, back = _missing(self._active, now), _missing(now, self._active)
        self._active = now
        if gone:
            await self.group_inactive(tuple(gone))
        if back:
            await self.group_recovered(tuple(back))

    # --- the table ---

    def _begin(self) -> None:
        task = backend().background(self._reconcile(), name="proxy-reconcile")
        self._work[task] = None
        task.add_done_callback(lambda done: self._work.pop(done, None))

    async def _reconcile(self) -> None:
        """Make the proxy have what is wanted; what fails is left for the next time."""
        async with self._one_at_a_time:
            for url in _missing(self._registered, self._wanted) + list(self._doubtful):
                await self._quietly(self._delete(url))
            for url in _missing(self._wanted, self._registered):
                await self._quietly(self._register(url))

    async def _quietly(self, operation: Any) -> None:
        try:
            await operation
        except SeatrialError:
            return  # recorded; the believed set says what is to be done again

    async def _register(self, url: str) -> None:
        body = {"model_name": self._config.model_name, "api_key": _API_KEY, "api_base": url}
        try:
            await self._post(NEW, body, self._config.register_timeout_s)
        except SeatrialError as error:
            if error.outcome is Outcome.UNKNOWN:
                self._registered[url] = None
                self._doubtful[url] = None
            self._changed(url, "register_failed", error)
            raise
        self._registered[url] = None
        self._changed(url, "registered")

    async def _delete(self, url: str) -> None:
        if url not in self._registered:
            return
        try:
            await self._post(
                DELETE, {"model_name": self._config.model_name, "api_base": url}, self._config.delete_timeout_s
            )
        except SeatrialError as error:
            self._changed(url, "delete_failed", error)
            raise
        self._registered.pop(url)
        self._doubtful.pop(url, None)
        self._changed(url, "deleted")

    async def _post(self, route: str, body: dict[str, Any], timeout_s: float) -> None:
        reply = await post_once(
            self._proxy.name,
            route,
            lambda: self._proxy.post(route, dict(body), connect_timeout_s=timeout_s, read_timeout_s=timeout_s),
            self._config.connect_attempts,
            self._config.connect_backoff_s,
        )
        if not reply.success:
            raise HttpError(status=reply.status, body=reply.body)

    def _changed(self, url: str, what: str, error: SeatrialError | None = None) -> None:
        backend().emit("proxy.changed", url=url, what=what, error="" if error is None else type(error).__name__)


def _missing(these: Iterable[str], there: dict[str, None]) -> list[str]:
    return [url for url in these if url not in there]


def _has_content(text: str) -> bool:
    try:
        return json.loads(text)["choices"][0]["message"]["content"] is not None
    except (ValueError, KeyError, IndexError, TypeError):
        return False
