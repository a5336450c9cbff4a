"""What a component may not reach in the simulated world, by name, with what to use instead (see ``sim/refused.py``)."""

from __future__ import annotations

import _posixsubprocess
import _thread
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

_SLEEP = "use `await asyncio.sleep(s)`, or `await backend().blocking(s)` for work that occupies the whole actor"
_THREAD = "an actor is one thread; put the work in another actor, or use `await backend().blocking(s)`"
_SOCKET = "use the handles and clients of protocol.ports"
_PROCESS = "spawn an actor, or launch an engine through backend().engines"
_SIGNAL = "backend().kill and backend().signal reach actors"
_WAIT = "it would block every actor; use asyncio's Lock, Condition, Event or Queue"

_BLOCKING_WAIT = "a blocking wait on threading's Condition, Event or Queue"

_REFUSED: tuple[tuple[Any, str, str, str], ...] = (
    # (holder, attribute, name in the message, what to use instead)
    (time, "sleep", "time.sleep", _SLEEP),
    (threading.Thread, "start", "threading.Thread.start", _THREAD),
    (_thread, "start_new_thread", "_thread.start_new_thread", _THREAD),
    (_thread, "start_new", "_thread.start_new", _THREAD),
    (threading.Condition, "wait", _BLOCKING_WAIT, _WAIT),
    (socket.socket, "__init__", "socket.socket", _SOCKET),
    (socket, "create_connection", "socket.create_connection", _SOCKET),
    (socket, "create_server", "socket.create_server", _SOCKET),
    (socket, "socketpair", "socket.socketpair", _SOCKET),
    (socket, "getaddrinfo", "socket.getaddrinfo", _SOCKET),
    (socket, "gethostbyname", "socket.gethostbyname", _SOCKET),
    (socket, "gethostname", "socket.gethostname", "use backend().node"),
    (socket, "getfqdn", "socket.getfqdn", "use backend().node"),
    (subprocess.Popen, "__init__", "subprocess.Popen", _PROCESS),
    (_posixsubprocess, "fork_exec", "starting a process", _PROCESS),
    (os, "fork", "os.fork", _PROCESS),
    (os, "forkpty", "os.forkpty", _PROCESS),
    (os, "system", "os.system", _PROCESS),
    (os, "posix_spawn", "os.posix_spawn", _PROCESS),
    (os, "posix_spawnp", "os.posix_spawnp", _PROCESS),
    (os, "execv", "os.execv", _PROCESS),
    (os, "execve", "os.execve", _PROCESS),
    (os, "kill", "os.kill", _SIGNAL),
    (os, "killpg", "os.killpg", _SIGNAL),
    (os, "abort", "os.abort", _SIGNAL),
    (os, "_exit", "os._exit", _SIGNAL),
    (signal, "signal", "signal.signal", _SIGNAL),
    (signal, "alarm", "signal.alarm", _SIGNAL),
    (signal, "setitimer", "signal.setitimer", _SIGNAL),
)


def is_harmless(label: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this very call does not block: a wait that is a mere poll, as ThreadPoolExecutor.submit makes."""
    if label != _BLOCKING_WAIT:
        return False
    timeout = kwargs.get("timeout", args[1] if len(args) > 1 else None)
    return timeout is not None and timeout <= 0


def refusals() -> Iterator[tuple[Any, str, str, str]]:
    """Those that this platform and Python have: (holder, attribute, name in the message, what to use instead)."""
    return (row for row in _REFUSED if row[1] in row[0].__dict__)
