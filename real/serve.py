"""Serve our gateway in front of engines that run already, without Ray: ``python -m real.serve --engine URL ...``.

One process: the gateway, its health prober and its HTTP API. An engine is routed to as soon as its /ready answers 200;
one that is not there yet is waited for. Exit codes: 0 when asked to stop (SIGTERM, Ctrl-C), 1 when a background task
failed, 2 for bad usage.
"""

from __future__ import annotations

import argparse
import asyncio
import pathlib
import signal
import sys
import urllib.parse
from collections.abc import Callable
from typing import Any

import pydantic

from protocol.config import GatewayConfig, HealthConfig, HttpConfig
from protocol.messages import EngineAddress
from protocol.serving.gateway import Gateway
from protocol.serving.health import HealthProber
from real.http_call import new_session
from real.http_server import HttpFront, PortTaken, ServerSettings
from real.local import LocalBackend
from real.serve_roster import BadRoster, Roster, read_roster


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
    roster: Callable[[], tuple[EngineAddress, ...]] | None = None,
) -> int:
    """Serve until ``stop`` is set; returns the exit code.

    Args:
        engines: at the start, each of incarnation 0.
        roster: read again and again; engines that it names anew are routed to, those that are gone no longer.

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
            members = Roster(backend, handle, health.probe_timeout_s, log)
            await members.set(engines)
            if roster is not None:
                backend.background(members.follow(roster), name="follow the roster")
            await stop.wait()
            log("stopping: nothing new is accepted, what is in flight may finish")
        finally:
            await backend.close()
    for error in failed:
        log(f"failed: {type(error).__name__}: {error}")
    return 1 if failed else 0


def engine_address(url: str, where: str = "--engine") -> EngineAddress:
    """The address in ``http://host:port``; ``where`` it stands begins the message. Raises Usage."""
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:  # half an IPv6 address, or a port that is none
        raise Usage(f"{where} {url}: give it as http://HOST:PORT") from None
    more = parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None
    more = more or " " in url or not url.isprintable()  # no name of a host has any
    if parts.scheme != "http" or not host or not port or more:
        raise Usage(f"{where} {url}: give it as http://HOST:PORT")
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
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--engine", action="append", metavar="URL", help="http://HOST:PORT; repeatable")
    which.add_argument("--roster", metavar="FILE", help="one such URL a line; read again while serving")
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
        roster = _roster(given.roster) if given.roster is not None else None
        engines = roster() if roster is not None else tuple(engine_address(url) for url in given.engine)
        if len(set(engines)) < len(engines):
            raise Usage("--engine: the same address twice")
        token = token_in(given.token_file)
        settings = ServerSettings(host=given.host, port=given.port, token=token, shutdown_grace_s=given.grace_s)
        gateway = GatewayConfig(attempts=given.attempts, read_timeout_s=given.read_timeout_s)
        return asyncio.run(_until_signalled(engines, settings, gateway, roster))
    except pydantic.ValidationError as error:
        for problem in error.errors(include_url=False, include_input=False):
            print(f"error: {'.'.join(map(str, problem['loc']))} {problem['msg']}".replace("  ", " "), file=sys.stderr)
        return 2
    except (Usage, BadRoster, PortTaken) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _roster(path: str) -> Callable[[], tuple[EngineAddress, ...]]:
    """Reads the file when called. Raises BadRoster."""

    def address(url: str, where: str) -> EngineAddress:
        try:
            return engine_address(url, where)
        except Usage as error:
            raise BadRoster(str(error)) from None

    return lambda: read_roster(path, address)


async def _until_signalled(
    engines: tuple[EngineAddress, ...],
    settings: ServerSettings,
    gateway: GatewayConfig,
    roster: Callable[[], tuple[EngineAddress, ...]] | None,
) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return await serve(
        engines, settings, gateway=gateway, health=HealthConfig(), http=HttpConfig(),
        log=lambda line: print(line, file=sys.stderr, flush=True), stop=stop, roster=roster,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
