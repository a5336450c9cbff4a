"""Ports of engines: what a reservation keeps, and what it does not."""

from __future__ import annotations

import contextlib
import os
import socket

import pytest

from real.engines.sockets import reserve

FIRST = 34000 + 20 * (os.getpid() % 200)  # of this test process's own; below it are those of its other tests


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_reserved_port_is_seen_to_be_taken_by_a_server_that_listens_there(host: str) -> None:
    mine = reserve("127.0.0.1", FIRST)
    with contextlib.closing(mine), socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as every server has it
        other.bind((host, mine.port))
        assert not mine.taken(), "bound is not taken: it may never listen"
        other.listen()
        assert mine.taken()
        with pytest.raises(OSError, match="in use"):
            mine.bound.listen()
        with contextlib.closing(reserve("127.0.0.1", mine.port)) as next_one:
            assert next_one.port > mine.port


def test_one_that_is_listened_to_is_kept() -> None:
    with contextlib.closing(reserve("127.0.0.1", FIRST)) as mine, socket.socket() as other:
        mine.bound.listen()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", mine.port))
