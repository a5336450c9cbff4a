"""Serve session servers in front of engines that run already: ``python -m real.serve_sessions --engine URL ...``.

One process, without Ray: a session server an engine, a trace store unless told otherwise, request gates if asked for;
before several of them the affinity router, which keeps each session on one engine (docs/session_server.md). Exit
codes: 0 when asked to stop (SIGTERM, Ctrl-C), 1 when a background task failed, 2 for bad usage.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import real.needs  # noqa: F401 - first: what is missing is told in one line

# isort: split
from protocol.config import AffinityConfig, GateConfig, GatewayConfig, HealthConfig, SessionServerConfig
from protocol.messages import EngineAddress
from protocol.ports import ActorHandle
from protocol.rollout.trace_store import RolloutTraceStore
from protocol.serving.affinity_http import HttpAffinityRouter
from protocol.serving.gate import RequestGate
from protocol.serving.gateway import Gateway
from protocol.serving.health import HealthProber
from protocol.serving.session_server import SessionServer
from protocol.serving.settlement import RejectionPattern
from protocol.serving.turn_hooks import NoHooks, TraceHooks
from real.http_server import ServerSettings
from real.local import LocalBackend
from real.options import Usage, engine_address, url_host
from real.serve_roster import Roster
from real.serving import Log, add_listening, listening, local_world, run_command
from real.session_http import SessionFront


async def serve(
    engines: tuple[EngineAddress, ...],
    settings: ServerSettings,
    config: SessionServerConfig,
    hooks: Callable[..., Any],
    *,
    health: HealthConfig,
    gate: bool,
    log: Callable[[str], None],
    stop: asyncio.Event,
) -> int:
    """Serve until ``stop`` is set; returns the exit code.

    Args:
        engines: one or more.
        hooks: called with the handle of the trace store, for each engine; gives the hooks.
        health: how it is watched which of several engines may be asked.
        gate: whether a turn needs a lease of a request gate.

    Raises:
        PortTaken: nothing was served.
    """

    def emitted(kind: str, fields: dict[str, Any]) -> None:
        if kind == "gate.poisoned":
            log(f"the gate is poisoned: {fields['why']}; nothing is admitted any more")
        elif kind == "gateway.routable":
            log(f"{fields['replica']} is healthy")
        elif kind == "gateway.unroutable":
            log(f"{fields['replica']} is not healthy, its sessions are refused: {fields['why']}")
        elif kind == "affinity.bound":
            log(f"session {fields['session']!r} is on {fields['target']}")

    several = len(engines) > 1
    async with local_world(stop, emitted) as world:
        backend = world.backend
        gateway = await backend.spawn(Gateway, GatewayConfig(), name="gateway")
        store = await backend.spawn(RolloutTraceStore, name="traces")
        servers: list[tuple[str, ActorHandle]] = []
        for engine in engines:
            which = f"-{engine.name}" if several else ""
            leases = None
            if gate:
                opened = GateConfig(initially_closed=False, initial_model_step=0)
                leases = await backend.spawn(RequestGate, opened, name=f"gate{which}")
            given = (config, engine, gateway, leases, hooks(store))
            servers.append((engine.name, await backend.spawn(SessionServer, *given, name=f"sessions{which}")))
        if several:
            before = await _affinity(backend, config, tuple(servers), gateway)
            await backend.spawn(HealthProber, health, gateway, name="health")
            await Roster(backend, gateway, health.probe_timeout_s, log).set(engines)
        else:
            before = servers[0][1]
            await gateway.add_replica(engines[0])
        front = await backend.spawn(SessionFront, settings, before, config.max_body_bytes, name="http")
        host, port = await front.address()
        names = ", ".join(engine.name for engine in engines)
        log(f"serving sessions on http://{url_host(host)}:{port} in front of {names}")
        await stop.wait()
        log("stopping: nothing new is accepted, what is in flight may finish")
    return world.exit_code(log)


async def _affinity(
    backend: LocalBackend,
    config: SessionServerConfig,
    servers: tuple[tuple[str, ActorHandle], ...],
    gateway: ActorHandle,
) -> ActorHandle:
    """The router before several session servers; no session is bound to one before its engine is known to be ready."""
    longest_s = config.admission_timeout_s + config.forward_timeout_s + 4 * config.hook_timeout_s
    affinity = AffinityConfig(forward_timeout_s=longest_s)
    router = await backend.spawn(HttpAffinityRouter, affinity, servers, gateway, name="affinity")
    for name, _ in servers:
        await router.set_backend(name, False)
    return router


def hooks_named(name: str) -> Callable[..., Any]:
    """``trace``, ``none``, or a class as ``package.module:Class``, called with the trace store.

    Raises:
        Usage: there is no such class, or it lacks a method. What is given raises it too, where the class does not take
            the trace store.
    """
    if name == "trace":
        return TraceHooks
    if name == "none":
        return lambda store: NoHooks()
    module, colon, attribute = name.partition(":")
    if not colon:
        raise Usage(f"--hooks {name}: trace, none, or package.module:Class")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise Usage(f"--hooks {name}: {error}") from None
    except (Exception, SystemExit) as error:  # it is the user's: its import may do anything
        what = f"{type(error).__name__}: {error}"
        raise Usage(f"--hooks {name}: importing {module!r} failed ({what}); correct the module") from None
    missing = [one for one in ("on_request", "on_response", "on_end") if not hasattr(found, one)]
    if missing:
        raise Usage(f"--hooks {name}: has no {', '.join(missing)}; see docs/session_server.md")

    def made(store: Any) -> Any:
        try:
            return found(store)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise Usage(f"--hooks {name}: cannot be made with the trace store ({what}); correct its __init__") from None

    return made


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m real.serve_sessions", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument(
        "--engine", required=True, action="append", metavar="URL",
        help="http://HOST:PORT; repeatable: each session then stays on one of them",
    )  # fmt: skip
    add_listening(parser, grace_s=30.0)
    parser.add_argument(
        "--hooks", default="trace", metavar="NAME", help="trace (default), none, or package.module:Class"
    )
    parser.add_argument("--gate", action="store_true", help="a turn needs a lease; its answer then has the lease's id")
    parser.add_argument("--engine-kind", default="sglang 0.5.23", help="whose refusal of a too long context is known")
    parser.add_argument("--timeout-s", type=float, default=1200.0, help="longest time for one generation")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    given = _parser().parse_args(arguments)

    def serving() -> Callable[[Log, asyncio.Event], Awaitable[int]]:
        engines = tuple(engine_address(url) for url in given.engine)
        if len(set(engines)) < len(engines):
            raise Usage("--engine: the same address twice")
        settings = listening(given)
        config = SessionServerConfig(forward_timeout_s=given.timeout_s, engine=given.engine_kind, gated_streams=True)
        RejectionPattern(config)  # an engine that is not known is told before anything is started
        hooks = hooks_named(given.hooks)
        return lambda log, stop: serve(
            engines, settings, config, hooks, health=HealthConfig(), gate=given.gate, log=log, stop=stop
        )

    return run_command(serving, ValueError)


if __name__ == "__main__":
    sys.exit(main())
