"""How long deaths, time-outs, births and placements take: as usual by default, around that in explored runs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from protocol.errors import ActorDied, SeatrialError
from protocol.ports import EngineSpec
from sim.backend import SimBackend
from sim.engine_types import DETOKENIZER_DEATH_NS, MAIN_DEATH_NS, SCHEDULER_DEATH_NS
from sim.random import Streams
from sim.simulation import Simulation
from sim.timings import Timings, ns
from tests.contract.faulted import request, until_ready
from tests.sim.worlds import Echo, Evidence

USUAL = Timings()
SEEDS = range(1, 13)
GPU = (("GPU", 1.0),)
TRIP_NS = 33 * ns(USUAL.link_latency_s)
"""More than a message between nodes takes in an explored run."""


def test_an_explored_duration_is_as_often_short_as_long_and_never_beyond_its_octaves() -> None:
    stream = Streams(5).stream("x")
    for usual, widest in ((ns(0.010), 4), (ns(0.9), 4), (ns(1.0), 2), (ns(66.0), 2)):
        drawn = [stream.around_ns(usual) for _ in range(2000)]
        assert min(drawn) >= usual // widest and max(drawn) <= usual * widest
        assert 900 <= sum(one < usual for one in drawn) <= 1100
        assert min(drawn) < usual * 1.05 / widest and max(drawn) > usual * 0.95 * widest
    assert stream.around_ns(0) == 0


def test_durations_of_one_kind_do_not_shift_those_of_another() -> None:
    def spawns(*, and_deaths: bool) -> list[int]:
        world = Simulation(seed=3, explore=True).world
        found = []
        for _ in range(5):
            if and_deaths:
                world.around("kill_notice", 100)
            found.append(world.around("spawn", 1000))
        return found

    assert spawns(and_deaths=False) == spawns(and_deaths=True)


async def deaths_and_births(port: SimBackend, world: Simulation) -> dict[str, int]:
    """How long each of them took, in nanoseconds of simulated time."""
    took: dict[str, int] = {}
    now = world.world.clock

    began = now._now
    one = await port.spawn(Echo, name="one", node="node-1")
    took["spawn"] = now._now - began

    call = one.slow(1000)
    await asyncio.sleep(0.5)
    began = now._now
    world.system.find("one", 1).die("killed")  # type: ignore[union-attr]  # it was started above
    with pytest.raises(ActorDied):
        await call
    took["kill_notice"] = now._now - began

    began = now._now
    group = await port.placement_groups.create((GPU,), strategy="PACK", name="g")
    await port.placement_groups.wait_created(group, 60)
    took["placement"] = now._now - began

    second = await port.placement_groups.create((GPU,) * 8, strategy="STRICT_PACK", name="fills a node")
    await port.placement_groups.wait_created(second, 60)
    third = await port.placement_groups.create((GPU,) * 8, strategy="STRICT_PACK", name="waits")
    await asyncio.sleep(1)
    began = now._now
    await port.placement_groups.remove(second)
    while (await port.placement_groups.table())[second] != "REMOVED":
        await asyncio.sleep(0.0001)
    took["removal"] = now._now - began
    began = now._now
    await port.placement_groups.wait_created(third, 60)
    took["placement_retry"] = now._now - began
    await port.placement_groups.remove(third)
    await port.placement_groups.remove(group)
    await asyncio.sleep(5)

    two = await port.spawn(Echo, name="two", node="node-1")
    three = await port.spawn(Echo, name="three", node="node-1")
    calls = [two.slow(1000), three.slow(1000)]
    await asyncio.sleep(0.5)
    began = now._now
    world.cluster.lose("node-1")
    for lost in calls:
        with pytest.raises(ActorDied):
            await lost
    took["health_timeout"] = now._now - began
    assert await port.nodes() == ("node-0",)  # the loss of its processes shows with that of the node, not before
    world.cluster.restore("node-1")
    await asyncio.sleep(1)

    for number, name in enumerate(("main", "scheduler", "detokenizer")):
        address = await port.engines.launch(EngineSpec("tiny-cpu"), name=name, node="node-0")
        client = port.engines.client(address)
        await until_ready(client)
        hangs = asyncio.ensure_future(client.generate(request(number, 400), connect_timeout_s=5, read_timeout_s=1000))
        await asyncio.sleep(0.2)
        began = now._now
        process = world.engines.processes[name]
        if name == "main":
            process.die("killed")
        else:
            process.engine.lose_child(name)  # type: ignore[arg-type]  # one of the two names
        with pytest.raises(SeatrialError):
            await hangs
        took[f"engine_{name}"] = now._now - began
    return took


def measured(seed: int, explore: bool) -> dict[str, int]:
    evidence = Evidence()
    with Simulation(seed=seed, explore=explore, nodes=2, gpus_per_node=8, recorder=evidence) as world:
        took: dict[str, int] = world.run(lambda port: deaths_and_births(port, world), time_limit_s=3600)
    return took


DEFAULTS: dict[str, int] = {
    "spawn": ns(USUAL.spawn_s),
    "kill_notice": ns(USUAL.kill_notice_s),
    "placement": ns(USUAL.placement_s),
    "removal": ns(USUAL.removal_s),
    "placement_retry": ns(USUAL.placement_retry_s),
    "health_timeout": ns(USUAL.health_timeout_s),
    "engine_main": MAIN_DEATH_NS,
    "engine_scheduler": SCHEDULER_DEATH_NS,
    "engine_detokenizer": DETOKENIZER_DEATH_NS,
}


def test_by_default_each_takes_its_usual_time_whatever_the_seed() -> None:
    first = measured(1, explore=False)
    for name, usual in DEFAULTS.items():
        assert usual - ns(0.0002) <= first[name] <= usual + ns(0.002), name
    assert measured(2, explore=False) == first


def test_an_explored_run_draws_each_of_them_around_its_usual_time() -> None:
    found: dict[str, Any] = {name: [] for name in DEFAULTS}
    for seed in SEEDS:
        for name, took in measured(seed, explore=True).items():
            found[name].append(took)
    for name, usual in DEFAULTS.items():
        octaves = 4 if usual < ns(1.0) else 2
        assert all(usual // octaves - TRIP_NS <= took <= usual * octaves + TRIP_NS for took in found[name]), name
        # Some are well below the usual time and some well above it, beyond what messages would do.
        assert min(found[name]) < 0.9 * usual and max(found[name]) > 1.1 * usual + TRIP_NS // 4, (name, found[name])
    assert measured(1, explore=True) == {name: found[name][0] for name in DEFAULTS}
