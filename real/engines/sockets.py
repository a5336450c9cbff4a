"""Ports of engines: reserved on the machine from the choice to the end of the process that chose."""

from __future__ import annotations

import errno
import socket
from typing import NamedTuple

FIRST_PRIVATE = 20000
_COUNT = 2700  # from 30000 that is up to the kernel's own range, out of which any process is given ports at any time


class Reservation(NamedTuple):
    """A port that is ours. ``lock`` holds it against the other engines of the machine while it is open."""

    port: int
    bound: socket.socket
    lock: socket.socket

    def taken(self) -> bool:
        """Whether somebody listens there. Another server can, though it is bound here, as long as this end does not."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(self.bound.getsockname())
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return True
                raise
        return False

    def close(self) -> None:
        self.bound.close()
        self.lock.close()


def reserve(host: str, first: int) -> Reservation:
    """The lowest free port from ``first`` on, bound but not listened to: a new engine gets that of one that died.

    Raises:
        OSError: none is free.
    """
    for port in range(first, first + _COUNT):
        # Two sockets may be bound to one port until one of them listens; a name of the machine cannot be had twice,
        # and the kernel gives it back however its holder dies.
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            lock.bind(f"\0seatrial-port-{port}")
            bound.bind((host, port))
            return Reservation(port, bound, lock)
        except OSError:
            bound.close()
            lock.close()
    raise OSError(f"no free port among {first} to {first + _COUNT - 1}")
