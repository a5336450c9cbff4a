"""Placement groups that are removed while Ray places them: what they were to have is there for the next one."""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
import threading
from typing import Any

import pytest

from protocol.ports import Backend

NODE = ((("GPU", 8.0),),)
PART = ((("GPU", 0.5),),)
ROUNDS = 12
"""A removal that does not wait hits the moment in two rounds of five; the node is not whole after one hit."""


def row(state: str, how: str, trial: int) -> dict[str, Any]:
    """A row of Ray's table, as far as it is looked at."""
    return {"state": state, "stats": {"scheduling_state": how, "scheduling_attempt": trial}}


@pytest.mark.ray
@pytest.mark.parametrize(
    "rows",
    [
        [{}],
        [row("REMOVED", "REMOVED", 1)],
        [row("CREATED", "FINISHED", 1)],
        [row("PENDING", "INFEASIBLE", 1)],
        [row("PENDING", "QUEUED", 0), row("PENDING", "QUEUED", 1), row("PREPARED", "QUEUED", 1),
         row("CREATED", "FINISHED", 1)],
        [row("PENDING", "QUEUED", 1), row("PENDING", "NO_RESOURCES", 1), row("PENDING", "NO_RESOURCES", 1)],
        # The second look may be at the beginning of another trial, which finds room.
        [row("PENDING", "NO_RESOURCES", 6), row("PENDING", "NO_RESOURCES", 7), row("PREPARED", "NO_RESOURCES", 7),
         row("CREATED", "FINISHED", 7)],
        # A node was lost, and Ray looks for room for what was there.
        [row("RESCHEDULING", "FINISHED", 2), row("RESCHEDULING", "INFEASIBLE", 2)],
    ],
)  # fmt: skip
def test_a_group_has_settled_when_ray_is_not_placing_it(rows: list[dict[str, Any]]) -> None:
    from real.placement import until_settled

    left = iter(rows)
    waited = sum(1 for _ in until_settled(lambda: next(left)))
    assert (waited, list(left)) == (len(rows) - 1, [])


@pytest.mark.ray
def test_a_group_that_does_not_settle_is_waited_for_no_longer_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    from real import placement

    monkeypatch.setattr(placement, "SETTLES_WITHIN_S", 0.0)
    assert list(placement.until_settled(lambda: row("PENDING", "QUEUED", 1))) == []


class Daemons:
    """Ray's own processes, which can be made to stand still; at the end of the block they go on."""

    def __init__(self) -> None:
        import ray

        started = ray._private.worker._global_node.all_processes
        self._pids = {name: started[name][0].process.pid for name in ("raylet", "gcs_server")}

    def __enter__(self) -> Daemons:
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._pids:
            self.go_on(name)

    def stop(self, name: str) -> None:
        os.kill(self._pids[name], signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        os.kill(self._pids[name], signal.SIGCONT)

    def go_on_after(self, name: str, wait_s: float) -> threading.Timer:
        timer = threading.Timer(wait_s, self.go_on, [name])
        timer.start()
        return timer


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("by", ["remove", "remove_groups_of"])
def test_a_removal_waits_until_ray_has_placed_the_group(tmp_path: pathlib.Path, by: str) -> None:
    from real.backend import RealBackend, run_real
    from real.placement import remove_groups_of

    async def body(backend: RealBackend) -> bool:
        groups = backend.placement_groups
        with Daemons() as daemons:
            daemons.stop("raylet")
            resumed = daemons.go_on_after("raylet", 0.3)
            group = await groups.create(PART, strategy="PACK", name="early")
            if by == "remove":
                await groups.remove(group)
            else:
                remove_groups_of(backend.run.run)
            waited = not resumed.is_alive()
            resumed.join()
        return waited

    assert run_real(body, folder=str(tmp_path))


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_what_was_put_aside_for_a_removed_group_is_free_again(tmp_path: pathlib.Path) -> None:
    from real.backend import run_real

    async def body(backend: Backend) -> None:
        groups = backend.placement_groups
        with Daemons() as daemons:
            for _ in range(ROUNDS):
                # Ray's head gets the raylet's answer, that its part is put aside, and the removal at the same moment.
                daemons.stop("raylet")
                group = await groups.create(PART, strategy="PACK", name="early")
                await asyncio.sleep(0.02)
                daemons.stop("gcs_server")
                daemons.go_on("raylet")
                await asyncio.sleep(0.02)
                resumed = daemons.go_on_after("gcs_server", 0.02)
                await groups.remove(group)
                resumed.join()
        whole = await groups.create(NODE, strategy="PACK", name="whole")
        await groups.wait_created(whole, 10.0)

    run_real(body, folder=str(tmp_path))
