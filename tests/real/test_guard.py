"""The guard of a run on a cluster of others: wherever its driver is killed, nothing of the run is left there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import types
import uuid
from collections.abc import Iterator

import pytest

from real.warden import Sweeper
from tests.real.local_ray import ROOT, environment
from tests.real.others_cluster import OthersCluster, cluster_of_others, first_line
from tests.real.run_command import until

pytestmark = [pytest.mark.ray, pytest.mark.own_cluster]

DRIVER = """
import asyncio, json, sys
import ray
from protocol.ports import EngineSpec
from real.backend import run_real
from real.cluster import connect
from real.engines.settings import EngineSettings
from real.guard import post_guard, relieve
from real.warden import Warden
from tests.real.components import Claimant

address, run, folder, until = sys.argv[1:]
own, sys.stdout = sys.stdout, sys.stderr  # Ray has a paragraph for every death
warden = Warden(run, folder)
connect(address, run, [])
posted = post_guard(run, folder)

registry = 0

def here(point):
    if point == until:
        print(json.dumps({"registry": registry}), file=own, flush=True)
        sys.stdin.readline()

async def body(backend):
    async with asyncio.timeout(60):
        await far_and_near(backend)
    here("in the middle")
    assert await backend.engines.alive("engine-0")

async def far_and_near(backend):
    global registry
    registry = backend.registry_pid
    await backend.spawn(Claimant, name="near", node="node-0")
    stopped = await backend.spawn(Claimant, name="far", node="node-1")
    await backend.placement_groups.create(((("GPU", 0.5),),), strategy="PACK", name="group")
    await backend.engines.launch(EngineSpec("tiny-cpu", num_gpus=0.25), name="engine-0", node="node-1")
    while not (await backend.engines.describe("engine-0")).pids:
        await asyncio.sleep(0.1)
    await backend.signal(stopped, "SIGSTOP")

here("before there is a registry")
run_real(body, folder=folder, engines=EngineSettings("emulated", sys.executable), run=run)
here("when the run is closed")
if until == "without its guard":
    ray.kill(posted.guard)
assert relieve(posted) == []
here("when the guard is relieved")
here("without its guard")
"""


class Driver:
    """A driver on a cluster of others, at a point of its course."""

    def __init__(self, cluster: OthersCluster, folder: str, until_point: str) -> None:
        self.run = f"run-{uuid.uuid4().hex}"
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, cluster.address, self.run, folder, until_point], cwd=ROOT, text=True,
            env={**os.environ, **environment(), "RAY_AUTH_MODE": "disabled"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        try:
            self.said = json.loads(first_line(self.process, 150))
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def goes_on(self) -> int:
        self.process.communicate("\n", timeout=60)
        return self.process.returncode

    def processes(self) -> dict[int, str]:
        return Sweeper(self.run, "").processes()


@pytest.fixture(scope="module")
def cluster() -> Iterator[OthersCluster]:
    with cluster_of_others() as made:
        yield made


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="st") as made:
        yield made


@pytest.mark.parametrize("point", ["before there is a registry", "when the run is closed", "in the middle"])
def test_nothing_is_left_of_a_driver_wherever_it_is_killed(cluster: OthersCluster, folder: str, point: str) -> None:
    driver = Driver(cluster, folder, point)
    try:
        there = cluster.actors_and_groups()
        assert f"{driver.run}/guard" in there
        if point == "in the middle":
            assert len(list(cluster.temporary.glob("engine-*"))) == 1
            assert [name for name in there if name.endswith("/group")]
            titles = " ".join(driver.processes().values())
            assert "real.emulated" in titles and "ray::ActorHost" in titles and "ray::EngineHost" in titles
            assert "ray::Guard" not in titles  # the warden would end it before its work
    finally:
        driver.kill()
    until(lambda: not cluster.actors_and_groups(), 60)
    until(lambda: not driver.processes(), 15)
    assert list(cluster.temporary.glob("engine-*")) == []


def test_the_end_of_a_run_is_not_that_of_another_on_the_same_cluster(cluster: OthersCluster, folder: str) -> None:
    drivers = []
    try:
        for name, point in (("second", "in the middle"), ("first", "when the guard is relieved")):
            os.mkdir(own := os.path.join(folder, name))
            drivers.append(Driver(cluster, own, point))
        second, first = drivers  # the one that ends first came second
        assert not [name for name in cluster.actors_and_groups() if first.run in name]
        # Whatever is one for both ends with one of them, and there is no moment at which the other has none yet.
        assert first.said["registry"] != second.said["registry"]
        assert second.goes_on() == 0
        assert first.goes_on() == 0
    finally:
        for driver in drivers:
            driver.kill()
    until(lambda: not cluster.actors_and_groups(), 60)


def test_where_the_guard_is_killed_the_driver_does_its_work(cluster: OthersCluster, folder: str) -> None:
    driver = Driver(cluster, folder, "without its guard")
    try:
        assert cluster.actors_and_groups() == []
        assert driver.processes() == {}
        assert driver.goes_on() == 0
    finally:
        driver.kill()


def test_only_the_death_of_the_driver_is_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a way to it that is cut, and nothing else that Ray may say of a call."""
    from ray.exceptions import (
        ActorDiedError,
        ActorUnavailableError,
        ActorUnschedulableError,
        RaySystemError,
        RuntimeEnvSetupError,
    )

    from real import guard

    answers: list[Exception] = [
        ActorDiedError(),
        ActorUnavailableError("cut", None),
        RaySystemError("of itself"),
        ActorUnschedulableError("no room"),
        RuntimeEnvSetupError("no package"),
        ActorUnavailableError("cut", None),
    ]

    def get(_: object) -> None:
        raise answers.pop()

    monkeypatch.setattr(guard.ray, "get", get)
    monkeypatch.setattr(guard, "_AGAIN_S", 0.01)
    guard._until_death(types.SimpleNamespace(stay=types.SimpleNamespace(remote=lambda: None)))
    assert answers == []


LIVES = """
import sys
import ray
from real.cluster import connect
from real.guard import new_life

connect(sys.argv[1], "run-of-lives", [])
lives = [new_life() for _ in range(6)]
here = ray.get_runtime_context().get_node_id()
waiting = [life.stay.remote() for life in lives]
assert ray.wait(waiting, timeout=5)[0] == []
found = {ray._private.state.actors(life._actor_id.hex())["Address"]["NodeID"] for life in lives}
assert found == {here}, (found, here)
print("here")
"""


def test_a_driver_lives_as_long_as_its_own_node_and_no_other(cluster: OthersCluster) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIVES, cluster.address], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env={**os.environ, **environment(), "RAY_AUTH_MODE": "disabled"},
    )  # fmt: skip
    assert done.stdout.split() == ["here"], done.stdout + done.stderr


NEVER_THERE = """
import sys
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from real import guard
from real.cluster import ClusterFailed, connect, errors_of_ray

def never_placed():
    nowhere = NodeAffinitySchedulingStrategy("ab" * 28, soft=False)
    return ray.remote(num_cpus=0, max_restarts=0)(guard.Life).options(scheduling_strategy=nowhere).remote()

def never_set_up():
    broken = {"working_dir": "gcs://_ray_pkg_0123456789abcdef.zip"}
    return ray.remote(num_cpus=0, max_restarts=0)(guard.Life).options(runtime_env=broken).remote()

connect(sys.argv[1], "run-of-nobody", [])
for guard.new_life in never_placed, never_set_up:
    try:
        with errors_of_ray("here"):
            guard.post_guard("run-of-nobody", sys.argv[2])
    except ClusterFailed as error:
        print(error)
"""


def test_a_guard_that_could_not_see_its_driver_end_is_never_posted(cluster: OthersCluster, folder: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NEVER_THERE, cluster.address, folder], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, **environment(), "RAY_AUTH_MODE": "disabled"}, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    placed, set_up = done.stdout.splitlines()
    assert placed.startswith("--ray here: it starts nothing for this run: ActorUnschedulableError: "), done.stderr
    assert set_up.startswith("--ray here: it starts nothing for this run: RuntimeEnvSetupError: "), done.stderr
    assert cluster.actors_and_groups() == []
