"""What a proxy is told: registration once, deletion before doubt, probes that leave nothing (serving.md 1)."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import pytest

from protocol.config import ProxyConfig
from protocol.errors import ConnectTimeout, HttpError, Outcome, ReadTimeout, SeatrialError
from protocol.messages import AdminReply
from protocol.serving.registration import CHAT, DELETE, NEW, ProxyRegistrations
from tests.protocol.fake import FakeBackend, FakeHandle, run
from tests.protocol.serving.world import fleet_of, raised

YES = json.dumps({"choices": [{"message": {"content": "pong"}}]})


@dataclasses.dataclass
class FakeProxy:
    """Executes and then does what ``script`` says; a *not done* error comes before the effect."""

    name: str = "proxy"
    table: list[str] = dataclasses.field(default_factory=list)
    posts: list[tuple[str, dict[str, Any]]] = dataclasses.field(default_factory=list)
    script: list[Any] = dataclasses.field(default_factory=list)
    answer: str = YES
    timeouts: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0

    async def post(
        self, route: str, body: dict[str, Any], *, connect_timeout_s: float, read_timeout_s: float
    ) -> AdminReply:
        step = self.script.pop(0) if self.script else None
        self.posts.append((route, body))
        self.timeouts.append((connect_timeout_s, read_timeout_s))
        if step is not None and step.outcome is Outcome.NOT_DONE:
            raise step
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        await asyncio.sleep(0.1)
        self.at_once -= 1
        if route == NEW:
            assert body["api_base"] not in self.table, "registered twice (P-I1)"
            self.table.append(body["api_base"])
        elif route == DELETE:
            self.table = [url for url in self.table if "api_base" in body and url != body["api_base"]]
        if step is not None:
            raise step
        return AdminReply(200, self.answer if route == CHAT else "{}")

    def count(self, route: str) -> int:
        return sum(posted == route for posted, _ in self.posts)


async def of(world: FakeBackend, proxy: FakeProxy, controller: Any = None, **config: Any) -> FakeHandle:
    return await world.spawn(ProxyRegistrations, ProxyConfig(**config), proxy, controller, name="registrations")


def test_replace_deletes_everything_and_registers_in_order() -> None:
    async def body(world: FakeBackend) -> None:
        proxy = FakeProxy(table=["old"])
        table = await of(world, proxy)
        await table.replace_registered_session_urls(("b", "a", "b"))
        assert proxy.posts == [
            (DELETE, {"model_name": "policy"}),
            (NEW, {"model_name": "policy", "api_key": "sk-admin", "api_base": "a"}),
            (NEW, {"model_name": "policy", "api_key": "sk-admin", "api_base": "b"}),
        ]
        assert await table.registered() == ("a", "b") == tuple(proxy.table)
        assert proxy.timeouts == [(30, 30), (180, 180), (180, 180)]

    run(body)


def test_an_error_at_replacing_is_raised_and_the_rest_follows_later() -> None:
    async def body(world: FakeBackend) -> None:
        proxy = FakeProxy(script=[None, None, HttpError(status=503)])
        table = await of(world, proxy)
        assert isinstance(await raised(table.replace_registered_session_urls(("a", "b", "c"))), HttpError)
        assert proxy.table == ["a", "b"]  # of b nobody knows
        await asyncio.sleep(40)
        assert sorted(proxy.table) == ["a", "b", "c"] == sorted(await table.registered())

    run(body)


@pytest.mark.parametrize("error", [ReadTimeout("x"), HttpError(status=500), HttpError(status=400)], ids=str)
def test_only_a_connect_time_out_is_sent_again(error: SeatrialError) -> None:
    async def body(world: FakeBackend) -> None:
        proxy = FakeProxy(script=[ConnectTimeout("x"), ConnectTimeout("x"), error])
        table = await of(world, proxy)
        assert await raised(table.replace_registered_session_urls(("a",))) is error
        assert proxy.count(DELETE) == 3 and proxy.count(NEW) == 0
        proxy.script = [ConnectTimeout("x")] * 5
        assert isinstance(await raised(table.replace_registered_session_urls(("a",))), ConnectTimeout)
        assert proxy.count(DELETE) == 8

    run(body)


def test_a_registration_of_unknown_outcome_is_deleted_before_it_is_made_again() -> None:
    async def body(world: FakeBackend) -> None:
        proxy = FakeProxy()
        table = await of(world, proxy)
        proxy.script = [ReadTimeout("x")]  # after it was executed
        await table.group_recovered(("a",))
        await asyncio.sleep(1)
        assert await table.registered() == ("a",) and proxy.count(NEW) == 1
        await asyncio.sleep(30)
        assert [route for route, _ in proxy.posts] == [NEW, DELETE, NEW] and proxy.table == ["a"]
        await asyncio.sleep(100)
        assert len(proxy.posts) == 3

    run(body)


def test_a_failed_deletion_is_not_forgotten() -> None:
    async def body(world: FakeBackend) -> None:
        proxy = FakeProxy()
        table = await of(world, proxy)
        await table.replace_registered_session_urls(("a", "b"))
        proxy.script = [HttpError(status=500), HttpError(status=500)]
        proxy.script[0].outcome = Outcome.NOT_DONE
        await table.group_inactive(("a",))
        await asyncio.sleep(1)
        assert await table.registered() == ("a", "b")  # P-7
        await asyncio.sleep(70)
        assert await table.registered() == ("b",) == tuple(proxy.table)

    run(body)


def test_groups_come_and_go_without_waiting_for_the_proxy() -> None:
    async def body(world: FakeBackend) -> None:
        proxy = FakeProxy()
        table = await of(world, proxy)
        await table.replace_registered_session_urls(("a", "b"))
        began = asyncio.get_running_loop().time()
        for _ in range(3):
            await table.group_inactive(("a", "unknown"))
            await table.group_recovered(("a", "b"))
        await table.group_inactive(("b",))
        assert asyncio.get_running_loop().time() == began  # outside of the caller's locks
        await asyncio.sleep(5)
        assert proxy.table == ["a"] and proxy.most_at_once == 1
        assert proxy.count(NEW) == 2 and proxy.count(DELETE) == 2  # what was wanted in the end, and no more

    run(body)


def test_a_probe_leaves_nothing_behind_however_it_ends() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 1)).opened()
        proxy = FakeProxy()
        table = await of(world, proxy, fleet.controller)
        await table.validate_registered_session_urls()
        assert not proxy.posts  # nothing is registered
        await table.replace_registered_session_urls(("a",))
        proxy.script = [HttpError(status=502), ReadTimeout("x")]
        await table.validate_registered_session_urls()
        probes = [body for route, body in proxy.posts if route == CHAT]
        assert len(probes) == 3 == len({probe["session_id"] for probe in probes})
        assert (probes[0]["max_tokens"], probes[0]["temperature"]) == (16, 0)
        assert all(probe["return_token_ids"] is False for probe in probes)  # so nobody records them
        # Each session is retired: a late request of it would bind nothing.
        assert (await fleet.router.snapshot()).tombstones == 3
        proxy.answer = "no JSON"
        error = await raised(table.validate_registered_session_urls())
        assert "5 probes failed" in str(error) and (await fleet.router.snapshot()).tombstones == 8

    run(body)


@pytest.mark.parametrize("silent", ["controller", "router"])
def test_a_probe_says_yes_or_no_though_nobody_says_that_its_session_is_retired(silent: str) -> None:
    async def never(_: tuple[str, ...]) -> None:
        await asyncio.sleep(1e6)

    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 1)).opened()
        proxy = FakeProxy()
        table = await of(world, proxy, fleet.controller)
        await table.replace_registered_session_urls(("a",))
        if silent == "router":
            fleet.router.target.retire_sessions = never
        else:
            fleet.controller.target.retire_route_sessions = never
        await table.validate_registered_session_urls()
        assert proxy.count(CHAT) == 1
        proxy.answer = "no JSON"
        assert "5 probes failed" in str(await raised(table.validate_registered_session_urls()))
        assert proxy.count(CHAT) == 6

    run(body)


def test_no_probe_while_gates_are_closed() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 1)).opened()
        proxy = FakeProxy()
        table = await of(world, proxy, fleet.controller)
        await table.replace_registered_session_urls(("a",))
        await fleet.controller.prepare_pause()
        error = await raised(table.validate_registered_session_urls())
        assert isinstance(error, SeatrialError) and error.outcome is Outcome.NOT_DONE and proxy.count(CHAT) == 0

    run(body)


def test_who_is_active_is_learnt_from_the_gateway() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await fleet_of(world, 2)
        proxy = FakeProxy()
        urls = tuple((engine.name, f"http://{engine.name}") for engine in fleet.engines)
        handle = await world.spawn(
            ProxyRegistrations, ProxyConfig(retry_interval_s=5), proxy, fleet.controller, fleet.gateway, urls, name="p"
        )
        await handle.replace_registered_session_urls(tuple(url for _, url in urls))
        await fleet.gateway.set_routable(fleet.engines[1].address, False, "health")
        await asyncio.sleep(3)
        assert proxy.table == ["http://e-0"]
        await fleet.gateway.set_routable(fleet.engines[1].address, True, "")
        await asyncio.sleep(3)
        assert proxy.table == ["http://e-0", "http://e-1"]

    run(body)


def test_no_probe_at_gates_that_were_never_opened() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await fleet_of(world, 2)  # born closed, and nothing published
        proxy = FakeProxy()
        handle = await of(world, proxy, fleet.controller)
        await handle.replace_registered_session_urls(("http://a",))
        error = await raised(handle.validate_registered_session_urls())
        assert isinstance(error, SeatrialError) and error.outcome is Outcome.NOT_DONE and "gate of e-0" in error.message
        assert not proxy.count(CHAT)

    run(body)
