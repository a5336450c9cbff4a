"""Who lives, where some of a run's processes are on another machine: what is not seen from here is not called dead."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.faulting import FaultRefused, Target
from real.census import Census, OwnCard, Process
from tests.real.bare_stage import bare_stage


def card(folder: pathlib.Path, name: str, pid: int, *, role: Any = "engine", host: str = "") -> OwnCard:
    """The card of a process: on this machine, or by its host's name on another one."""
    with pytest.MonkeyPatch.context() as patched:
        if host:
            patched.setattr(socket, "gethostname", lambda: host)
        return OwnCard(str(folder), name=name, incarnation=1, role=role, node="node-0", pid=pid)


class Registry:
    """Knows of some deaths. ``asked``: what it was asked about."""

    def __init__(self, *dead: Process) -> None:
        self._dead = dead
        self.asked: list[Process] = []

    def dead_of(self, processes: list[Process]) -> Collection[Process]:
        self.asked += processes
        return [process for process in processes if process in self._dead]


@pytest.fixture
def ended() -> int:
    """The pid of a process that has ended."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    return gone.pid


def names(cards: list[Any]) -> list[str]:
    return [one.name for one in cards]


def test_a_process_of_another_machine_is_dead_when_somebody_knows_that(tmp_path: pathlib.Path, ended: int) -> None:
    card(tmp_path, "chat-0", os.getpid())
    card(tmp_path, "chat-1", ended)
    card(tmp_path, "chat-2", ended, host="elsewhere")
    card(tmp_path, "chat-3", os.getpid(), host="elsewhere")  # that pid is another's there
    registry = Registry(("chat-3", 1))
    census = Census(str(tmp_path), registry.dead_of)
    assert names(census.living()) == ["chat-0", "chat-2"]
    assert registry.asked == [("chat-2", 1), ("chat-3", 1)]
    cards = census.everybody()
    assert [census.is_alive(one) for one in cards] == [True, False, True, False]
    assert [one.is_here for one in cards] == [True, True, False, False]
    with pytest.raises(RuntimeError, match="chat-2 runs on elsewhere"):
        _ = cards[2].alive
    assert names(Census(str(tmp_path)).living()) == ["chat-0", "chat-2", "chat-3"]  # nobody to ask


def test_nobody_is_asked_while_all_are_here(tmp_path: pathlib.Path, ended: int) -> None:
    card(tmp_path, "chat-0", os.getpid())
    card(tmp_path, "chat-1", ended)
    registry = Registry()
    assert names(Census(str(tmp_path), registry.dead_of).living()) == ["chat-0"] and registry.asked == []


def test_the_stage_counts_and_chooses_replicas_of_other_machines(
    tmp_path: pathlib.Path, ended: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr("real.nodes.gpus", lambda: (1.0, 1.0))
    monkeypatch.setattr("real.placement.groups_of", lambda _: [])
    card(tmp_path, "chat-0", ended).in_flight = 5
    card(tmp_path, "chat-1", ended, host="elsewhere").in_flight = 3
    card(tmp_path, "chat-2", ended, host="elsewhere").in_flight = 2
    card(tmp_path, "driver", os.getpid(), role="driver")
    made = bare_stage(tmp_path, Census(str(tmp_path), Registry(("chat-2", 1)).dead_of))
    assert [(one.name, one.in_flight) for one in made.replicas("chat")] == [("chat-1", 3)]
    assert [one.detail for one in made.held()] == ["3 requests in chat-1/1"]
    assert [one.detail for one in made.left()] == ["engine chat-1/1 on node-0"]
    made._note_end()
    made.injector.refused.append("a step that came due while the run was being taken down")
    assert made._end.refused == []
    # Who is not among these and has no recorded death is taken for crashed.
    assert made._end.alive == [("chat-1", 1), ("driver", 1)] and made._end.took_s == 5.0


def test_faults_there_are_done_where_they_need_no_signal_and_else_refused_with_the_reason(
    tmp_path: pathlib.Path, ended: int
) -> None:
    pytest.importorskip("ray")
    from real.faults.kinds import ClockSkew, MetricsFault, Site
    from real.faults.processes import Sigkill, Sigstop
    from real.faults.table import TableWriter

    card(tmp_path, "chat-1", ended, host="elsewhere").in_flight = 3
    card(tmp_path, "chat-2", os.getpid(), host="elsewhere")
    backend: Any = SimpleNamespace(run=SimpleNamespace(nodes=(("node-0", "a"),)))
    site = Site(backend, TableWriter(str(tmp_path)), Census(str(tmp_path), Registry(("chat-2", 1)).dead_of))

    def look(kind: Any, name: str) -> dict[str, int]:
        seen: dict[str, int] = kind(site, 1, "fault", Target(name), {}, lambda _: None).look()
        return seen

    assert look(MetricsFault, "chat-1") == {"in_flight": 3}
    with pytest.raises(FaultRefused, match="'chat-2': it is dead already"):
        look(MetricsFault, "chat-2")
    assert look(ClockSkew, "node-0") == {"processes": 1}
    for kind in (Sigkill, Sigstop):
        with pytest.raises(FaultRefused, match=f"it runs on elsewhere, and signals reach {socket.gethostname()} alone"):
            look(kind, "chat-1")


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_the_registry_knows_who_is_dead_on_other_machines(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from real.backend import RealBackend, run_real
    from tests.real.components import Claimant

    async def body(backend: RealBackend) -> None:
        for name in ("lives", "killed"):
            await (await backend.spawn(Claimant, name=name)).claim(1)
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")  # of this process alone
        assert names(backend.census.living()) == ["driver", "killed", "lives"]
        await backend.kill(await backend.lookup("killed"))
        assert names(backend.census.living()) == ["driver", "lives"]
        backend.ray_has_ended = True  # and can be asked for nothing: nobody knows
        assert names(backend.census.living()) == ["driver", "killed", "lives"]
        backend.ray_has_ended = False

    run_real(body, folder=str(tmp_path))
