"""A routed proxy over HTTP, as registrations reach it: LiteLLM's admin routes (serving.md 1.1)."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from protocol.messages import AdminReply
from protocol.serving.registration import CHAT
from real.http_call import answered, new_session

_API = "/v1"


class HttpProxy:
    """``protocol.serving.registration.ProxyPort``. Crosses to the actor that registers; connects when it is used.

    Args:
        admin_url: where registrations and deletions go; a slash at its end is dropped.
        proxy_url: the public address, which the probe tries; with or without ``/v1``.
        api_key: sent as the bearer of admin POSTs and of the probe.
    """

    def __init__(self, admin_url: str, proxy_url: str, api_key: str = "sk-admin") -> None:
        self._admin = admin_url.rstrip("/")
        self._public = proxy_url.rstrip("/").removesuffix(_API)
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
        self._session: aiohttp.ClientSession | None = None

    @property
    def name(self) -> str:
        return self._admin

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def post(
        self, route: str, body: dict[str, Any], *, connect_timeout_s: float, read_timeout_s: float
    ) -> AdminReply:
        """One attempt. The two times bound connecting, and each wait for an answer after it, separately.

        Raises:
            ConnectTimeout, ConnectionRefused: *not done*; the latter also where the URL, or the name of its host, is
                none. ReadTimeout, ConnectionLost: *unknown*.
        """
        if self._session is None:
            self._session = new_session()
        url = (self._public if route == CHAT else self._admin) + route
        async with answered(
            self._session, "POST", url, data=json.dumps(body), headers=self._headers,
            connect_timeout_s=connect_timeout_s, silence_timeout_s=read_timeout_s,
        ) as response:  # fmt: skip
            text = await response.text(errors="replace")
        return AdminReply(response.status, text, 200 <= response.status < 300)
