"""``python -m real.emulated``: one emulated engine process. See docs/engines.md."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import signal
import socket
import sys
import traceback
from typing import Any

import real.needs  # noqa: F401 - first: what is missing is told in one line

# isort: split
from aiohttp import web

from protocol.ports import EngineOptions
from real.emulated.children import Children, Part
from real.emulated.pacer import Pacer
from real.emulated.request_log import RequestLog
from real.emulated.server import Server, token_asked
from real.hosts import is_loopback
from real.options import Usage, token_in
from sim.engine import SimEngine
from sim.profiles import EngineProfile, ProfileError, load_profile

_BACKLOG = 2048  # as uvicorn's


def main() -> None:
    arguments = _parse()
    try:
        token = token_in(arguments.token_file)
        if not token and not is_loopback(arguments.host):
            raise Usage(f"--host {arguments.host}: other machines reach it; give a --token-file, or use 127.0.0.1")
    except Usage as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    try:
        profile = load_profile(arguments.profile)
        options = EngineOptions(**json.loads(arguments.options)) if arguments.options else None
        if options is not None and options.startup_s is not None:
            profile = dataclasses.replace(profile, startup_ns=round(options.startup_s * 1e9))
        if arguments.startup_s is not None:
            profile = dataclasses.replace(profile, startup_ns=round(arguments.startup_s * 1e9))
    except ProfileError as error:
        sys.exit(f"real.emulated: {error}")
    try:
        log = RequestLog(arguments.request_log) if arguments.request_log else None
    except OSError as error:
        sys.exit(f"real.emulated: --request-log {arguments.request_log}: {error.strerror}")
    # Bound, but not listening: the port is taken, and connecting is refused while the engine loads.
    listener = socket.socket(socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((arguments.host, arguments.port))
    except OSError as error:
        sys.exit(f"real.emulated: cannot bind {arguments.host}:{arguments.port} ({error.strerror})")
    asyncio.run(_run(arguments, profile, options, listener, log, token))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m real.emulated", description=__doc__)
    parser.add_argument("--profile", required=True, help="a shipped engine profile, or the path of one")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; any but loopback needs a token")
    parser.add_argument("--token-file", metavar="FILE", help="clients must bring its content as a bearer token")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--name", default="engine-0", help="for logs")
    parser.add_argument("--startup-s", type=float, metavar="SECONDS", help="time to start (default: the profile's)")
    parser.add_argument("--weights-version", help="label of the weights it starts with (default: the profile's)")
    parser.add_argument("--weights-hash", help="their hash (default: the profile's)")
    parser.add_argument(
        "--options", metavar="JSON", help="an EngineOptions: deterministic mode, attention backend, ..."
    )
    parser.add_argument("--rank", type=int, default=0, help="its server seed where the options name none")
    parser.add_argument("--weights-bytes", type=int, help="their size, which is the time to load them")
    parser.add_argument(
        "--request-log", metavar="FILE", help="write every request with an id into it, a line of JSON each"
    )
    return parser.parse_args()


async def _run(
    arguments: argparse.Namespace, profile: EngineProfile, options: EngineOptions | None, listener: socket.socket,
    log: RequestLog | None, token: str,
) -> None:  # fmt: skip
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_crash)
    pacer = Pacer()
    engine = SimEngine(
        pacer.env, profile, name=arguments.name, port=arguments.port, on_exit=_leave, options=options,
        rank=arguments.rank,
    )  # fmt: skip
    wedges = Wedges(engine)
    app = Server(engine, pacer).app
    if token:
        app.middlewares.append(token_asked(token))
    if log is not None:
        app.middlewares.append(log.middleware())
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    children = Children(
        on_death=lambda part: pacer.tell(lambda: engine.lose_child(part)),
        on_stop=lambda part, stopped: pacer.tell(lambda: wedges.child(part, stopped)),
    )

    def ready() -> None:
        # Only now: SGLang takes the signal's default action while it loads.
        loop.add_signal_handler(signal.SIGTERM, lambda: pacer.tell(engine.sigterm))
        tasks.append(loop.create_task(web.SockSite(runner, listener, backlog=_BACKLOG).start()))
        if log is not None:
            log.write("listening")
        print(f"{arguments.name}: listening on {arguments.host}:{arguments.port}", file=sys.stderr, flush=True)

    tasks: list[asyncio.Task[None]] = []
    pacer.drive(engine)
    children.watch()
    loop.add_signal_handler(signal.SIGUSR1, lambda: pacer.tell(lambda: wedges.signalled(True)))
    loop.add_signal_handler(signal.SIGUSR2, lambda: pacer.tell(lambda: wedges.signalled(False)))
    pacer.tell(
        lambda: engine.start(
            version=arguments.weights_version,
            weight_hash=arguments.weights_hash,
            size_bytes=arguments.weights_bytes,
            on_ready=ready,
        )
    )
    await asyncio.Event().wait()  # until the engine says that it ends


class Wedges:
    """Who holds the scheduler: SIGUSR1 until SIGUSR2, and SIGSTOP of the scheduler's process until SIGCONT."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine
        self._held = {"signal": False, "child": False}

    def signalled(self, wedged: bool) -> None:
        self._set("signal", wedged)

    def child(self, part: Part, stopped: bool) -> None:
        if part == "scheduler":
            self._set("child", stopped)
        else:
            print(f"{part} stopped={stopped}: not modelled, nothing changes", file=sys.stderr, flush=True)

    def _set(self, who: str, held: bool) -> None:
        if held != self._held[who]:
            self._held[who] = held
            (self._engine.wedge if held else self._engine.unwedge)()


def _leave(reason: str) -> None:
    """The process ends at once, as SGLang's does: the kernel closes what is open."""
    print(f"exit: {reason}", file=sys.stderr, flush=True)
    os._exit(0 if reason.startswith("sigterm") else 1)


def _crash(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An error in a callback is a defect of this program: half an engine must not go on answering."""
    error = context.get("exception")
    print(f"crash: {context.get('message')}", file=sys.stderr)
    if error is not None:
        traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(70)


if __name__ == "__main__":
    main()
