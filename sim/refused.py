"""What the simulated world refuses, by name: threads, sockets, subprocesses, signals of the host."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

_PORTS = "use the handles and clients of protocol.ports"
_PROCESS = "spawn an actor, or launch an engine through backend().engines"
_THREADS = "put the work in another actor, or use backend().blocking(duration_s)"

REFUSED: dict[str, tuple[bool, str]] = {
    # method of asyncio's loop: (is a coroutine function, what to use instead)
    "run_in_executor": (False, _THREADS),
    "set_default_executor": (False, _THREADS),
    "add_reader": (False, _PORTS),
    "remove_reader": (False, _PORTS),
    "add_writer": (False, _PORTS),
    "remove_writer": (False, _PORTS),
    "add_signal_handler": (False, "backend().signal sends signals to actors"),
    "remove_signal_handler": (False, "backend().signal sends signals to actors"),
    "create_connection": (True, _PORTS),
    "create_server": (True, "spawn an actor"),
    "create_unix_connection": (True, _PORTS),
    "create_unix_server": (True, "spawn an actor"),
    "create_datagram_endpoint": (True, _PORTS),
    "connect_accepted_socket": (True, _PORTS),
    "connect_read_pipe": (True, _PORTS),
    "connect_write_pipe": (True, _PORTS),
    "start_tls": (True, _PORTS),
    "sendfile": (True, _PORTS),
    "getaddrinfo": (True, "addresses are protocol.messages.EngineAddress"),
    "getnameinfo": (True, "addresses are protocol.messages.EngineAddress"),
    "sock_accept": (True, _PORTS),
    "sock_connect": (True, _PORTS),
    "sock_recv": (True, _PORTS),
    "sock_recv_into": (True, _PORTS),
    "sock_recvfrom": (True, _PORTS),
    "sock_recvfrom_into": (True, _PORTS),
    "sock_sendall": (True, _PORTS),
    "sock_sendto": (True, _PORTS),
    "sock_sendfile": (True, _PORTS),
    "subprocess_exec": (True, _PROCESS),
    "subprocess_shell": (True, _PROCESS),
}


def refuse(what: str, instead: str) -> NoReturn:
    raise RuntimeError(f"{what} is refused in the simulated world: {instead}")


class RefusedLoop(asyncio.AbstractEventLoop):
    """Base of ActorLoop: every method of ``REFUSED`` raises RuntimeError that names it and what to use instead."""


def _refused(name: str, is_async: bool, instead: str) -> Any:
    async def refused_async(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        refuse(name, instead)

    def refused(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        refuse(name, instead)

    chosen = refused_async if is_async else refused
    chosen.__name__ = name
    return chosen


for _name, (_is_async, _instead) in REFUSED.items():
    setattr(RefusedLoop, _name, _refused(_name, _is_async, _instead))
