"""Faults of the real world alone: nodes of a cluster of its own, links between them, what it refuses, what it costs."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest

from protocol.evidence import Event, decode
from scenarios.faults import FAULTS
from tests.contract.faulted import kinds, told
from tests.docs.fault_ways import WAYS
from tests.real.local_ray import ROOT, environment


def test_every_fault_is_implemented_and_described() -> None:
    pytest.importorskip("ray")
    from real.faults.injection import IMPLEMENTED

    assert sorted(IMPLEMENTED) == sorted(name for name, spec in FAULTS.items() if "real" in spec.worlds)
    assert sorted(WAYS) == sorted(FAULTS)


@pytest.mark.parametrize(
    ("name", "params", "node", "nodes", "own", "why"),
    [
        ("node_loss", {"zombie": True}, "node-1", 2, True, "no zombies"),
        ("node_loss", {"zombie": False}, "node-0", 3, True, "take node-2"),
        ("node_loss", {"zombie": False}, "node-1", 2, False, "leave out --ray"),
        ("node_loss", {"zombie": False}, "node-0", 1, True, "topology.nodes"),
        ("slow", {"percent": 50}, None, 1, True, "cannot be made faster"),
        ("slow_export", {"percent": 100}, None, 1, True, "cannot be made faster"),
        ("node_loss", {"zombie": False}, "node-1", 2, True, ""),
        ("slow", {"percent": 101}, None, 1, True, ""),
        ("sigkill", {"part": "scheduler"}, None, 1, True, ""),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(
    name: str, params: dict[str, Any], node: str | None, nodes: int, own: bool, why: str
) -> None:
    from real.faults.refusals import AskedFault, why_not

    said = why_not(AskedFault(name, params, node), nodes=nodes, own_cluster=own)
    assert why in said and bool(why) == bool(said)


BODY = """
import asyncio, os, sys
sys.path.insert(0, {root!r})
os.environ.update({variables!r})
from real.backend import run_real
from real.cluster import LocalCluster
from real.engines.settings import EngineSettings
from real.faults.injection import real_faults
from tests.real.two_nodes import {body} as body

cluster = LocalCluster({run!r}, [(2.0, None), (2.0, None)])
cluster.start()

async def main(backend):
    faults = real_faults(backend, machines=cluster)
    try:
        async with asyncio.timeout(120):
            await body(backend, faults)
    finally:
        faults.heal_all()

run_real(main, folder={folder!r}, engines=EngineSettings("emulated", sys.executable), run={run!r})
print("ended")
"""


@pytest.mark.ray
@pytest.mark.own_cluster
class TestTwoNodes:
    """Each in a process of its own: a Ray of several raylets is another one than that of the other tests."""

    @pytest.fixture
    def folder(self) -> Iterator[pathlib.Path]:
        # Short: Ray's sockets lie below it.
        with tempfile.TemporaryDirectory(prefix="seatrial-", ignore_cleanup_errors=True) as folder:
            yield pathlib.Path(folder)

    def run(self, folder: pathlib.Path, body: str) -> list[Event]:
        from real.cluster import environment as cluster_environment
        from real.warden import Sweeper

        run = f"test-{os.getpid()}-{time.monotonic_ns()}"
        variables = cluster_environment(run, str(folder), own_cluster=True)
        code = BODY.format(root=str(ROOT), variables=variables, run=run, body=body, folder=str(folder))
        try:
            ran = subprocess.run(
                [sys.executable, "-c", code], env={**os.environ, **environment(), **variables}, capture_output=True,
                text=True, timeout=180, cwd=ROOT,
            )  # fmt: skip
        finally:
            Sweeper(run, "").sweep()
        assert "ended\n" in ran.stdout, ran.stdout + ran.stderr
        print(*(line for line in ran.stdout.splitlines() if "after" in line), sep="\n")
        lines = [line for file in (folder / "events").iterdir() for line in file.read_bytes().splitlines()]
        return sorted((decode(line) for line in lines), key=lambda event: event.t_ns)

    def test_a_lost_node_takes_everything_with_it_and_comes_back_empty(self, folder: pathlib.Path) -> None:
        events = self.run(folder, "lose_a_node")
        assert kinds(events, "node.lost", "node.restored") == ["node.lost", "node.restored"] * 2
        assert told(events, "fault.injected", "observed") == [({"processes": 2},)] * 2
        assert told(events, "fault.healed", "hits", "satisfied") == [(1, True)] * 2
        died = [(event.actor, event.inc, event.data["reason"]) for event in events if event.kind == "actor.died"]
        assert len(set(died)) == len(died)
        assert [name for name, _, reason in died if reason == "node_lost"] == ["counter", "engine-0"] * 2

    def test_links_between_nodes(self, folder: pathlib.Path) -> None:
        events = self.run(folder, "cut_links")
        request, *replies = told(events, "call.fate", "fate", "source", "target")
        assert request == ("held", "near", "far")
        assert sorted(replies) == [("held", "engine-0", "driver"), ("held", "far", "driver")]
