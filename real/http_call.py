"""One HTTP call to an engine: its errors as ours, each with what is known of the outcome; server-sent events."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Final

import aiohttp
import yarl

from protocol.errors import ConnectionLost, ConnectionRefused, ConnectTimeout, HttpError, ReadTimeout
from protocol.messages import HttpHead, RawRequest

_LONGEST_EVENT = 64 << 20  # one line of a stream; SGLang's text is cumulative, and logprobs are long
_JSON = {"Content-Type": "application/json"}
AS_IT_IS: Final[dict[str, Any]] = {
    "skip_auto_headers": ("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
    "auto_decompress": False,
    "allow_redirects": False,
}
"""Options of a request that a proxy makes: nothing is added to it, and nothing is made of its answer."""


Pairs = tuple[tuple[str, str], ...]


def new_session() -> aiohttp.ClientSession:
    """A session with a connection per call. On one that is kept, a server that closes it looks like one that died."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=1 << 20,
        max_line_size=1 << 16,
    )


def limits(
    *, connect_timeout_s: float | None = None, sock_read_s: float | None = None, total_s: float | None = None
) -> aiohttp.ClientTimeout:
    """Time-outs of a call in seconds. None and infinity are none: aiohttp rounds long ones up, but not infinity."""

    def finite(seconds: float | None) -> float | None:
        return None if seconds == math.inf else seconds

    return aiohttp.ClientTimeout(
        total=finite(total_s), sock_connect=finite(connect_timeout_s), sock_read=finite(sock_read_s)
    )


@contextlib.asynccontextmanager
async def answered(
    session: aiohttp.ClientSession,
    method: str,
    url: str | yarl.URL,
    *,
    data: str | bytes | None = None,
    headers: Mapping[str, str] | Pairs | None = None,
    connect_timeout_s: float | None = None,
    read_timeout_s: float | None = None,
    silence_timeout_s: float | None = None,
    options: Mapping[str, Any] | None = None,
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Send a request; the answer's head has come when the block begins, its body may be read in the block.

    Args:
        read_timeout_s: for the whole answer, counted from the start of the call.
        silence_timeout_s: for each wait for a part of the answer, once there is a connection.
        options: further ones of aiohttp.

    Raises:
        ConnectTimeout, ConnectionRefused: not done. The latter also for a URL that no request can be made of.
        ReadTimeout, ConnectionLost: unknown. Also in the block.
    """
    came = False
    timeout = limits(connect_timeout_s=connect_timeout_s, sock_read_s=silence_timeout_s, total_s=read_timeout_s)
    try:
        async with session.request(
            method, url, data=data, headers=headers, timeout=timeout, **(options or {})
        ) as response:
            came = True
            yield response
    except aiohttp.ConnectionTimeoutError:
        raise ConnectTimeout(f"{url}: no connection within {connect_timeout_s} s") from None
    except aiohttp.ClientConnectorError as error:
        raise ConnectionRefused(f"{url}: {error.strerror or error}") from None
    except aiohttp.SocketTimeoutError:
        raise ReadTimeout(f"{url}: nothing came for {silence_timeout_s} s") from None
    except TimeoutError:
        raise ReadTimeout(f"{url}: no whole answer within {read_timeout_s} s") from None
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
        if isinstance(error, aiohttp.RedirectClientError):  # whoever sent it on had the request
            raise ConnectionLost(f"{url}: it was redirected to {error}, which is no URL") from None
        raise ConnectionRefused(f"{url}: no URL that a request can be made of") from None
    except (aiohttp.ClientError, ConnectionError) as error:
        raise ConnectionLost(f"{url}: {type(error).__name__}: {error}") from None
    except UnicodeError:
        if came:
            raise  # of the block
        if has_a_name(url):
            raise ConnectionLost(f"{url}: it was redirected to a host whose name is none") from None
        raise ConnectionRefused(f"{url}: the host's name is none (a part of it is empty or too long)") from None


def has_a_name(url: str | yarl.URL) -> bool:
    """Whether the host of a URL can be looked up: aiohttp finds that out when it connects, with a UnicodeError."""
    try:
        (yarl.URL(url).raw_host or "").encode("idna")
    except UnicodeError:
        return False
    return True


async def raw(
    session: aiohttp.ClientSession,
    origin: str,
    request: RawRequest,
    *,
    connect_timeout_s: float | None = None,
    read_timeout_s: float | None = None,
) -> AsyncGenerator[HttpHead | bytes, None]:
    """One exchange byte for byte (``EngineClient.exchange``). ``origin``: ``http://host:port``."""
    try:
        url = raw_url(origin, request)
    except aiohttp.InvalidURL as error:
        raise ConnectionRefused(f"{origin}: no URL that a request can be made of: {error.description}") from None
    async with answered(
        session, request.method, url, data=request.body or None, headers=request.headers,
        connect_timeout_s=connect_timeout_s, read_timeout_s=read_timeout_s, options=AS_IT_IS,
    ) as response:  # fmt: skip
        yield head_of(response)
        async for piece in response.content.iter_any():
            yield piece


def raw_url(origin: str, request: RawRequest) -> yarl.URL:
    """Where a request goes, its target as it came. Raises aiohttp.InvalidURL where that is no URL."""
    try:
        return yarl.URL(origin + request.target, encoded=True)
    except ValueError as error:
        raise aiohttp.InvalidURL(origin, str(error)) from None


def head_of(response: aiohttp.ClientResponse) -> HttpHead:
    return HttpHead(response.status, tuple((name, value) for name, value in response.headers.items()))


async def post_text(
    session: aiohttp.ClientSession,
    url: str,
    body: str,
    *,
    connect_timeout_s: float | None = None,
    read_timeout_s: float | None = None,
) -> str:
    """POST JSON text: the text of a 2xx answer (``EngineClient.forward``)."""
    async with answered(
        session, "POST", url, data=body, headers=_JSON,
        connect_timeout_s=connect_timeout_s, read_timeout_s=read_timeout_s,
    ) as response:  # fmt: skip
        text = await response.text(errors="replace")
    if not 200 <= response.status < 300:
        raise HttpError(status=response.status, body=text)
    return text


async def post_stream(
    session: aiohttp.ClientSession,
    url: str,
    body: str,
    *,
    connect_timeout_s: float | None = None,
    read_timeout_s: float | None = None,
) -> AsyncGenerator[str, None]:
    """POST JSON text: the data of each event of a streamed answer (``EngineClient.forward_stream``)."""
    async with answered(
        session, "POST", url, data=body, headers=_JSON,
        connect_timeout_s=connect_timeout_s, read_timeout_s=read_timeout_s,
    ) as response:  # fmt: skip
        if not 200 <= response.status < 300:
            raise HttpError(status=response.status, body=await response.text(errors="replace"))
        async with contextlib.aclosing(events(response.content)) as found:
            async for data in found:
                yield data
                if data == "[DONE]":
                    return
    raise ConnectionLost(f"{url}: the stream ended without [DONE]")


async def events(content: aiohttp.StreamReader) -> AsyncGenerator[str, None]:
    """The data of each server-sent event; several ``data:`` lines of one are joined by newlines.

    Raises:
        ConnectionLost: a line longer than 64 MiB, or the end of the content inside an event.
    """
    lines: list[str] = []
    pending = b""
    async for chunk in content.iter_any():
        *whole, pending = (pending + chunk).split(b"\n")
        if len(pending) > _LONGEST_EVENT:
            raise ConnectionLost(f"a line of a stream is longer than {_LONGEST_EVENT} bytes")
        for raw in whole:
            line = raw.rstrip(b"\r").decode("utf-8", "replace")
            if line.startswith("data:"):
                lines.append(line[5:].removeprefix(" "))
            elif not line and lines:
                yield "\n".join(lines)
                lines = []
            # Comments and the other fields (event, id, retry) say nothing to a client of these routes.
    if lines or pending:
        raise ConnectionLost("a stream ended inside an event")


async def get_text(
    session: aiohttp.ClientSession,
    url: str,
    *,
    connect_timeout_s: float | None = None,
    read_timeout_s: float | None = None,
) -> tuple[int, str]:
    """GET: status and text (``EngineClient.get``)."""
    async with answered(
        session, "GET", url, connect_timeout_s=connect_timeout_s, read_timeout_s=read_timeout_s
    ) as response:
        return response.status, await response.text(errors="replace")
