"""A scale API that somebody serves over HTTP, as the autoscaler calls it: `protocol.scaling.targets.ServiceTarget`.

Answers are told apart from silence: a status code is an answer, whatever it is; what was lost on the way says whether
the request may have arrived (scaling.md 6.5).
"""

from __future__ import annotations

import json
import urllib.parse
from typing import Any, Final

import aiohttp

from protocol.errors import ConnectionLost
from protocol.scaling.autoscaler_api import AutoscalerApi
from protocol.scaling.bodies import ApiReply
from protocol.scaling.contract import Direction
from protocol.scaling.policy import AutoscalerConfig
from protocol.scaling.targets import ServiceTarget
from real.http_call import answered

_CONNECT_S: Final = 5.0
_ANSWER_S: Final = 30.0
_RECONCILE_S: Final = 150.0
_LONGEST: Final = 4 << 20  # bytes of one answer


class HttpTarget:
    """One service's scale API at a URL.

    Args:
        session: from ``real.http_call.new_session``; its owner closes it.
        url: below which ``/engines``, ``/scale_out`` and the others are.
        token: what the server asks for; empty: nothing.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, token: str = "") -> None:
        self.url = url
        self._session = session
        self._base = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"

    async def engines(self) -> ApiReply:
        """GET /engines."""
        return await self._ask("GET", "/engines")

    async def submit(self, direction: Direction, body: dict[str, Any]) -> ApiReply:
        """POST /scale_out or /scale_in."""
        return await self._ask("POST", f"/{direction}", body)

    async def status(self, direction: Direction, request_id: str) -> ApiReply:
        """GET of an operation."""
        return await self._ask("GET", f"/{direction}/{_part(request_id)}")

    async def reconcile(self, direction: Direction, request_id: str) -> ApiReply:
        """POST .../reconcile."""
        return await self._ask("POST", f"/{direction}/{_part(request_id)}/reconcile", timeout_s=_RECONCILE_S)

    async def close(self) -> None:
        return None  # a connection is given back with each answer

    async def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float = _ANSWER_S
    ) -> ApiReply:
        """Raises ConnectionRefused, ConnectTimeout (not done), ReadTimeout, ConnectionLost (unknown)."""
        data = None if body is None else json.dumps(body)
        async with answered(
            self._session, method, self._base + path, data=data, headers=self._headers,
            connect_timeout_s=_CONNECT_S, read_timeout_s=timeout_s,
        ) as response:  # fmt: skip
            text = await response.content.read(_LONGEST)
            while not response.content.at_eof() and len(text) < _LONGEST:
                text += await response.content.read(_LONGEST - len(text))
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            return ApiReply(response.status, found)
        if response.status == 200:  # done, or not: this is no answer of a scale API
            raise ConnectionLost(f"{self._base}{path}: the answer is no JSON object")
        return ApiReply(response.status, {"error": "ODD_ANSWER", "detail": text[:200].decode(errors="replace")})


def _part(text: str) -> str:
    return urllib.parse.quote(text, safe="")


class HttpAutoscalerApi(AutoscalerApi):
    """The autoscaler whose services are reached over HTTP, or as actors of its world.

    Args:
        config: what it begins with.
        session: for calls to services.
        token: that every service asks for; empty: none.
        begin: start at once.
    """

    def __init__(
        self, config: AutoscalerConfig, session: aiohttp.ClientSession, *, token: str = "", begin: bool = False
    ) -> None:
        super().__init__(config, begin=begin)
        self._session = session
        self._token = token

    def connect(self, url: str) -> ServiceTarget:
        """The target at a URL. Nothing is sent."""
        if url.startswith(("http://", "https://")):
            return HttpTarget(self._session, url, self._token)
        return super().connect(url)
