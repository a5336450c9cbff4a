"""The engines of ``python -m real.serve --roster FILE``: a file that may change while the gateway serves.

One URL a line; blank lines and what follows a ``#`` do not count. A URL that appears is routed to once its /ready
answers, one that is gone gets no further call, and what it has in flight may finish. Replace the file (write
another, rename it) rather than write into it. A file that cannot be read or names no engine changes nothing.

The idea is sglang-router's, which takes and drops workers while it serves (see docs/router_peer.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import Callable

from protocol.errors import NetworkError
from protocol.messages import EngineAddress
from protocol.ports import ActorHandle
from real.local import LocalBackend

_POLL_S = 0.5


class BadRoster(Exception):
    """The file is not one; the text names file, line and fix."""


def read_roster(path: str, address: Callable[[str, str], EngineAddress]) -> tuple[EngineAddress, ...]:
    """The engines in a file, each of incarnation 0.

    Args:
        address: makes an address of (URL, where it stands).

    Raises:
        BadRoster: the file cannot be read, names no engine or one twice.
    """
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadRoster(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    found: dict[EngineAddress, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        url = line.partition("#")[0].strip()
        if not url:
            continue
        engine = address(url, f"{path}, line {number}:")
        if engine in found:
            raise BadRoster(f"{path}, line {number}: {url} stands in line {found[engine]} too; delete one of the two")
        found[engine] = number
    if not found:
        raise BadRoster(f"{path}: names no engine; write one http://HOST:PORT a line")
    return tuple(found)


class Roster:
    """Keeps a gateway's engines as they are asked for.

    Args:
        backend: runs what waits for engines.
        gateway: handle of the Gateway.
        probe_timeout_s: of one look at /ready.
        log: gets a line for what changes.
    """

    def __init__(
        self, backend: LocalBackend, gateway: ActorHandle, probe_timeout_s: float, log: Callable[[str], None]
    ) -> None:
        self._backend = backend
        self._gateway = gateway
        self._timeout_s = probe_timeout_s
        self._log = log
        self._wanted: dict[str, EngineAddress] = {}
        self._next: dict[str, int] = {}  # a name that comes back is another incarnation: the gateway revives no old one

    async def set(self, engines: tuple[EngineAddress, ...]) -> None:
        """Route to these and no others. Incarnations are given here."""
        names = {engine.name for engine in engines}
        for name in [name for name in self._wanted if name not in names]:
            gone = self._wanted.pop(name)
            await self._gateway.remove_replica(gone)
            self._log(f"{name} is no longer named")
        for engine in engines:
            if engine.name in self._wanted:
                continue
            incarnation = self._next.get(engine.name, 0)
            self._next[engine.name] = incarnation + 1
            new = EngineAddress(engine.name, incarnation, engine.host, engine.port)
            self._wanted[engine.name] = new
            self._backend.background(self._admit(new), name=f"admit {new.name}")

    async def follow(self, read: Callable[[], tuple[EngineAddress, ...]]) -> None:
        """Do what ``read`` says, for ever. What it cannot read is told once, and the engines stay as they are."""
        told = ""
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                engines = read()
            except BadRoster as error:
                if str(error) != told:
                    told = str(error)
                    self._log(f"the roster stays as it was: {told}")
                continue
            told = ""
            await self.set(engines)

    async def _admit(self, engine: EngineAddress) -> None:
        """Wait until an engine is ready, then have it routed to; from there on the prober watches it."""
        client = self._backend.engines.client(engine)
        while self._wanted.get(engine.name) is engine:
            with contextlib.suppress(NetworkError):  # it does not listen yet
                status, _ = await client.get(
                    "/ready", connect_timeout_s=self._timeout_s, read_timeout_s=self._timeout_s
                )
                if status == 200 and self._wanted.get(engine.name) is engine:
                    await self._gateway.add_replica(engine)
                    return
            await asyncio.sleep(_POLL_S)
