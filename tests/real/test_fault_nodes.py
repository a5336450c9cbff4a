"""What the loss of a node sends to whom, without a Ray."""

from __future__ import annotations

import itertools
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.evidence import decode
from protocol.faulting import Target

pytest.importorskip("ray")

from real.census import Census, OwnCard
from real.evidence import ProcessLog
from real.faults import nodes
from real.faults.kinds import Site
from real.faults.table import TableWriter

# Keeps the card of an engine, as its host does, and reaps it at once.
HOST = """
import subprocess, sys
sys.path.insert(0, sys.argv[1])
from real.census import OwnCard
engine = subprocess.Popen(["sleep", "60"])
OwnCard(sys.argv[2], name="chat-1", incarnation=1, role="engine", node="node-1", pid=engine.pid)
print(engine.pid, flush=True)
engine.wait()
print("reaped", flush=True)
sys.stdin.read()
"""


class Nodes:
    """A cluster of the run's own, as far as a fault sees it."""

    def __init__(self) -> None:
        self.lost: list[str] = []

    def lose(self, name: str) -> None:
        self.lost.append(name)

    def restore(self, name: str) -> None: ...


@pytest.fixture
def host(tmp_path: pathlib.Path) -> Iterator[subprocess.Popen[str]]:
    root = str(pathlib.Path(__file__).resolve().parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", HOST, root, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def site(folder: pathlib.Path, log: ProcessLog, machines: Nodes, buried: list[Any]) -> Site:
    numbers = itertools.count(1)
    backend: Any = SimpleNamespace(
        log=log, node="node-0", run=SimpleNamespace(nodes=(("node-0", "a"), ("node-1", "b"))),
        caller=SimpleNamespace(next_number=lambda: next(numbers)), bury=lambda *who: buried.append(who),
    )  # fmt: skip
    return Site(backend, TableWriter(str(folder)), Census(str(folder)), machines=machines)


def test_an_engine_that_dies_by_itself_in_that_instant_leads_to_no_signal_to_others(
    tmp_path: pathlib.Path, host: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert host.stdout is not None
    engine = int(host.stdout.readline())
    OwnCard(str(tmp_path), name="gateway", incarnation=2, role="actor", node="node-1", pid=os.getpid())
    OwnCard(str(tmp_path), name="driver", incarnation=0, role="driver", node="node-0", pid=os.getpid())
    sent: list[tuple[int, signal.Signals]] = []
    monkeypatch.setattr(nodes.os, "kill", lambda pid, number: sent.append((pid, number)))
    machines, buried = Nodes(), []
    log = ProcessLog(str(tmp_path), "driver", 0, 0)
    fault = nodes.NodeLoss(site(tmp_path, log, machines, buried), 1, "node_loss", Target("node-1"), {}, lambda _: None)
    assert fault.look() == {"processes": 2}
    signal.pidfd_send_signal(descriptor := os.pidfd_open(engine), signal.SIGKILL)
    os.close(descriptor)
    assert host.stdout.readline() == "reaped\n"
    fault.inject()
    # Signal 19 to pid 0 would stop the whole process group of the driver.
    both = {host.pid, os.getpid()}
    assert {pid for pid, number in sent if number == signal.SIGSTOP} == both == {pid for pid, _ in sent}
    assert machines.lost == ["node-1"] and sorted(buried) == [("chat-1", 1), ("gateway", 2)]
    events = [decode(line) for line in (tmp_path / "events" / "driver-0.jsonl").read_bytes().splitlines()]
    assert [(e.kind, e.actor) for e in events] == [
        ("node.lost", "driver"), ("actor.died", "chat-1"), ("actor.died", "gateway"),
    ]  # fmt: skip
