"""What the commands that serve without Ray share: a world of one process, its signals and exit codes.

``real.serve``, ``real.serve_sessions`` and ``real.autoscaler`` differ in what they serve, not in this.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pydantic

from real.http_call import new_session
from real.http_server import PortTaken, ServerSettings
from real.local import LocalBackend
from real.options import Usage, token_in

Log = Callable[[str], None]


def add_listening(parser: argparse.ArgumentParser, *, grace_s: float) -> None:
    """The options of where a command listens, whom it lets in, and how long it waits at its end (s, by default)."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; any but loopback needs a token")
    parser.add_argument("--port", type=int, default=0, help="0 (default): any free one; the first line tells it")
    parser.add_argument("--token-file", metavar="FILE", help="clients must bring its content as a bearer token")
    parser.add_argument("--grace-s", type=float, default=grace_s, help="for what is in flight when asked to stop")


def listening(given: argparse.Namespace) -> ServerSettings:
    """What these options say. Raises Usage: the file has no token; ValidationError: a value is out of bounds."""
    token = token_in(given.token_file)
    return ServerSettings(host=given.host, port=given.port, token=token, shutdown_grace_s=given.grace_s)


@dataclasses.dataclass
class LocalWorld:
    """One process that serves, and the background tasks of it that failed."""

    backend: LocalBackend
    session: aiohttp.ClientSession
    failed: list[BaseException]

    def exit_code(self, log: Log) -> int:
        """Of the command, when all is closed: 1 when a background task failed; each is logged."""
        for error in self.failed:
            log(f"failed: {type(error).__name__}: {error}")
        return 1 if self.failed else 0


@contextlib.asynccontextmanager
async def local_world(stop: asyncio.Event, emitted: Callable[[str, dict[str, Any]], None]) -> AsyncIterator[LocalWorld]:
    """A world of this process, closed at the end. A background task that fails sets ``stop``."""
    failed: list[BaseException] = []

    def crashed(error: BaseException) -> None:
        failed.append(error)
        stop.set()

    async with new_session() as session:
        backend = LocalBackend(session, emit=emitted, crashed=crashed)
        asyncio.get_running_loop().seatrial_backend = backend  # type: ignore[attr-defined]  # a mark, looked for by name
        try:
            yield LocalWorld(backend, session, failed)
        finally:
            await backend.close()


def run_command(
    serving: Callable[[], Callable[[Log, asyncio.Event], Awaitable[int]]], *refused: type[Exception]
) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit code.

    Args:
        serving: reads the options; gives what serves until its event is set, and returns the exit code.
        refused: what bad usage raises beside Usage, PortTaken and the errors of a model: one line, exit code 2.
    """

    async def until_signalled() -> int:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        return await serve(_log, stop)

    told: tuple[type[Exception], ...] = (Usage, PortTaken, *refused)
    try:
        serve = serving()
        return asyncio.run(until_signalled())
    except pydantic.ValidationError as error:
        for problem in error.errors(include_url=False, include_input=False):
            said = problem["msg"].removeprefix("Value error, ")
            print(f"error: {'.'.join(map(str, problem['loc']))} {said}".replace("  ", " "), file=sys.stderr)
        return 2
    except told as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _log(line: str) -> None:
    """A line on stderr. That nobody reads it any more, or a full disk takes none, is no reason to serve no longer."""
    if sys.stderr is None:  # closed by who started the command; the number may be another file's
        return
    with contextlib.suppress(OSError):  # past Python's buffer, which would keep what could not be written
        os.write(sys.stderr.fileno(), f"{line}\n".encode(errors="backslashreplace"))
