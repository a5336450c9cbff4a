"""Serve our gateway in front of engines that run already, without Ray: ``python -m real.serve --engine URL ...``.

One process: the gateway, its health prober and its HTTP API. An engine is routed to as soon as its /ready answers 200;
one that is not there yet is waited for. Exit codes: 0 when asked to stop (SIGTERM, Ctrl-C), 1 when a background task
failed, 2 for bad usage.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import real.needs  # noqa: F401 - first: what is missing is told in one line

# isort: split
from protocol.config import GatewayConfig, HealthConfig, HttpConfig
from protocol.messages import EngineAddress
from protocol.serving.gateway import Gateway
from protocol.serving.health import HealthProber
from real.http_server import HttpFront, ServerSettings
from real.options import Usage, engine_address, url_host
from real.serve_roster import BadRoster, Roster, read_roster
from real.serving import Log, add_listening, listening, local_world, run_command


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

    def emitted(kind: str, fields: dict[str, Any]) -> None:
        if kind == "gateway.routable":
            log(f"{fields['replica']} is routed to")
        elif kind == "gateway.unroutable":
            log(f"{fields['replica']} is not routed to: {fields['why']}")

    async with local_world(stop, emitted) as world:
        backend = world.backend
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
    return world.exit_code(log)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m real.serve", description=(__doc__ or "").partition("\n\n")[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--engine", action="append", metavar="URL", help="http://HOST:PORT; repeatable")
    which.add_argument("--roster", metavar="FILE", help="one such URL a line; read again while serving")
    add_listening(parser, grace_s=30.0)
    parser.add_argument("--attempts", type=int, default=3, help="sends per call, the first included")
    parser.add_argument("--read-timeout-s", type=float, default=600.0, help="longest time for one answer of an engine")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    given = _parser().parse_args(arguments)

    def serving() -> Callable[[Log, asyncio.Event], Awaitable[int]]:
        roster = _roster(given.roster) if given.roster is not None else None
        engines = roster() if roster is not None else tuple(engine_address(url) for url in given.engine)
        if len(set(engines)) < len(engines):
            raise Usage("--engine: the same address twice")
        settings = listening(given)
        gateway = GatewayConfig(attempts=given.attempts, read_timeout_s=given.read_timeout_s)
        return lambda log, stop: serve(
            engines, settings, gateway=gateway, health=HealthConfig(), http=HttpConfig(), log=log, stop=stop,
            roster=roster,
        )  # fmt: skip

    return run_command(serving, BadRoster)


def _roster(path: str) -> Callable[[], tuple[EngineAddress, ...]]:
    """Reads the file when called. Raises BadRoster."""

    def address(url: str, where: str) -> EngineAddress:
        try:
            return engine_address(url, where)
        except Usage as error:
            raise BadRoster(str(error)) from None

    return lambda: read_roster(path, address)


if __name__ == "__main__":
    sys.exit(main())
