"""Serve our gateway in front of engines that run already, without Ray: ``python -m real.serve --engine URL ...``.

One process: the gateway, its health prober and its HTTP API. An engine is routed to as soon as its /ready answers 200;
one that is not there yet is waited for. Exit codes: 0 when asked to stop (SIGTERM, Ctrl-C), 1 when a background task
failed, 2 for bad usage.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import pathlib
import signal
import sys
import urllib.parse
from collections.abc import Callable
from typing import Any

import pydantic

from protocol.config import GatewayConfig, HealthConfig, HttpConfig
from protocol.errors import NetworkError
from protocol.messages import EngineAddress
from protocol.ports import ActorHandle
from protocol.serving.gateway import Gateway
from protocol.serving.health import HealthProber
from real.http_call import new_session
from real.http_server import HttpFront, PortTaken, ServerSettings
from real.local import LocalBackend

_POLL_S = 0.5


class Usage(Exception):
    """Bad usage; the text says what and how it can be put right."""


async def serve(
    engines: tuple[EngineAddress, ...],
    settings: ServerSettings,
    *,
    gateway: GatewayConfig,
    health: HealthConfig,
    http: HttpConfig,
    log: Callable[[str], None],
    stop: asyncio.Event,
) -> int:
    """Serve until ``stop`` is set; returns the exit code.

    Raises:
        PortTaken: nothing was served.
    """
    failed: list[BaseException] = []

    def crashed(error: BaseException) -> None:
        failed.append(error)
        stop.set()

    def emitted(kind: str, fields: dict[str, Any]) -> None:
        if kind == "gateway.routable":
            log(f"{fields['replica']} is routed to")
        elif kind == "gateway.unroutable":
            log(f"{fields['replica']} is not routed to: {fields['why']}")

    async with new_session() as session:
        backend = LocalBackend(session, emit=emitted, crashed=crashed)
        asyncio.get_running_loop().seatrial_backend = backend  # type: ignore[attr-defined]  # a mark, looked for by name
        try:
            handle = await backend.spawn(Gateway, gateway, name="gateway")
            await backend.spawn(HealthProber, health, handle, name="health")
            front = await backend.spawn(HttpFront, settings, http, handle, name="http")
            host, port = await front.address()
            log(f"serving on http://{url_host(host)}:{port} in front of {', '.join(e.name for e in engines)}")
            for engine in engines:
                backend.background(_admit(backend, handle, engine, health.probe_timeout_s), name=f"admit {engine.name}")
            await stop.wait()
            log("stopping: nothing new is accepted, what is in flight may finish")
        finally:
            await backend.close()
    for error in failed:
        log(f"failed: {type(error).__name__}: {error}")
    return 1 if failed else 0


async def _admit(backend: LocalBackend, gateway: ActorHandle, engine: EngineAddress, timeout_s: float) -> None:
    """Wait until an engine is ready, then have it routed to; from there on the prober watches it."""
    client = backend.engines.client(engine)
    while True:
        with contextlib.suppress(NetworkError):  # it does not listen yet
            status, _ = await client.get("/ready", connect_timeout_s=timeout_s, read_timeout_s=timeout_s)
            if status == 200:
                break
        await asyncio.sleep(_POLL_S)
    await gateway.add_replica(engine)


def engine_address(url: str) -> EngineAddress:
    """The address in ``http://host:port``. Raises Usage."""
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:  # half an IPv6 address, or a port that is none
        raise Usage(f"--engine {url}: give it as http://HOST:PORT") from None
    more = parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None
    if parts.scheme != "http" or not host or not port or more:
        raise Usage(f"--engine {url}: give it as http://HOST:PORT")
    return EngineAddress(f"{url_host(host)}:{port}", 0, host, port)


def url_host(host: str) -> str:
    """A host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


def token_in(path: str | None) -> str:
    """The token in a file; empty without one. Raises Usage."""
    if path is None:
        return ""
    try:
        token = pathlib.Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Usage(f"--token-file {path}: {getattr(error, 'strerror', None) or error}") from None
    if not token:  # who names a file wants a token; served without one, everybody would be let in
        raise Usage(f"--token-file {path}: is empty; write the token into it")
    return token


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m real.serve", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--engine", action="append", required=True, metavar="URL", help="http://HOST:PORT; repeatable")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; any but loopback needs a token")
    parser.add_argument("--port", type=int, default=0, help="0 (default): any free one; the first line tells it")
    parser.add_argument("--token-file", metavar="FILE", help="clients must bring its content as a bearer token")
    parser.add_argument("--grace-s", type=float, default=30.0, help="for what is in flight when asked to stop")
    parser.add_argument("--attempts", type=int, default=3, help="sends per call, the first included")
    parser.add_argument("--read-timeout-s", type=float, default=600.0, help="longest time for one answer of an engine")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    given = _parser().parse_args(arguments)
    try:
        engines = tuple(engine_address(url) for url in given.engine)
        if len(set(engines)) < len(engines):
            raise Usage("--engine: the same address twice")
        token = token_in(given.token_file)
        settings = ServerSettings(host=given.host, port=given.port, token=token, shutdown_grace_s=given.grace_s)
        gateway = GatewayConfig(attempts=given.attempts, read_timeout_s=given.read_timeout_s)
        return asyncio.run(_until_signalled(engines, settings, gateway))
    except pydantic.ValidationError as error:
        for problem in error.errors(include_url=False, include_input=False):
            print(f"error: {'.'.join(map(str, problem['loc']))} {problem['msg']}".replace("  ", " "), file=sys.stderr)
        return 2
    except (Usage, PortTaken) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


async def _until_signalled(engines: tuple[EngineAddress, ...], settings: ServerSettings, gateway: GatewayConfig) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return await serve(
        engines, settings, gateway=gateway, health=HealthConfig(), http=HttpConfig(),
        log=lambda line: print(line, file=sys.stderr, flush=True), stop=stop,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
