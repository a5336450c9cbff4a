"""The affinity router over HTTP: one session server a session, nothing twice, refusals in the client's own format."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import pytest

from protocol.config import AffinityConfig, ControllerConfig, GateConfig, GatewayConfig
from protocol.errors import ConnectionLost, ReadTimeout
from protocol.messages import HttpHead, RawRequest
from protocol.ports import ActorHandle, EngineSpec
from protocol.rollout.trace_store import RolloutTraceStore
from protocol.serving.affinity import AffinitySnapshot
from protocol.serving.affinity_http import RETIRE, HttpAffinityRouter
from protocol.serving.gate import RequestGate
from protocol.serving.gateway import Gateway
from protocol.serving.session_server import SessionServer
from protocol.serving.turn_hooks import TraceHooks, Turn
from sim.simulation import Simulation
from tests.protocol.serving.session_world import CHAT, MESSAGES, PATHS, SETTINGS, Seen, Stage, _ready, turn
from tests.sim.worlds import Evidence

both = pytest.mark.parametrize("path", PATHS)
streamed = pytest.mark.parametrize("stream", [False, True])
CONFIG = AffinityConfig(forward_timeout_s=60.0, suspect_s=10.0, tombstone_ttl_s=3600.0)


class Server:
    """A session server that does as it is told, and knows what it was asked."""

    def __init__(self) -> None:
        self.does = "answers"
        self.seen: list[str] = []
        self.open = 0
        self.given_up: tuple[str, ...] = ()

    async def now(self, does: str) -> None:
        self.does = does

    async def asked(self) -> tuple[str, ...]:
        return tuple(self.seen)

    async def is_open(self) -> int:
        return self.open

    async def give_up(self, session_ids: tuple[str, ...]) -> None:
        if self.does == "does not hear":
            await asyncio.sleep(1e6)
        self.given_up += session_ids

    async def heard(self) -> tuple[str, ...]:
        return self.given_up

    async def http(self, request: RawRequest) -> AsyncGenerator[HttpHead | bytes, None]:
        self.seen.append(request.target)
        self.open += 1
        try:
            if self.does == "is silent":
                await asyncio.sleep(1e6)
            if self.does == "is empty":
                return
            if self.does == "breaks":
                raise ConnectionLost("as told")
            await asyncio.sleep(1.0)
            yield HttpHead(503 if self.does == "has no engine" else 200, (("content-type", "text/event-stream"),))
            yield b"data: one\n\n"
            if self.does == "breaks in the middle":
                raise ConnectionLost("as told")
            if self.does == "is silent in the middle":
                await asyncio.sleep(1e6)
            await asyncio.sleep(1.0)
            yield b"data: [DONE]\n\n"
        finally:
            self.open -= 1


@dataclasses.dataclass
class Two:
    """A router before two servers."""

    router: ActorHandle
    servers: tuple[ActorHandle, ActorHandle]
    port: Any
    stage: Stage

    async def ask(self, request: RawRequest, **leaving: Any) -> Seen:
        return await self.stage.ask(request, **leaving)

    async def retire(self, *sessions: Any) -> Seen:
        return await self.ask(posted(RETIRE, {"session_ids": sessions}))

    async def asked(self) -> list[tuple[str, ...]]:
        return [await server.asked() for server in self.servers]

    async def in_flight(self) -> list[int]:
        snapshot: AffinitySnapshot = await self.router.snapshot()
        return [one.in_flight for one in snapshot.backends]

    async def bindings(self) -> int:
        snapshot: AffinitySnapshot = await self.router.snapshot()
        return snapshot.bindings


def posted(path: str, body: Any) -> RawRequest:
    return RawRequest("POST", path, (("content-type", "application/json"),), json.dumps(body).encode())


def two(body: Callable[[Two], Coroutine[Any, Any, Any]], router: type = HttpAffinityRouter, **affinity: Any) -> None:
    simulation = Simulation(seed=1, nodes=1, gpus_per_node=1, sinks=[Evidence().record])

    async def driver(port: Any) -> None:
        first, second = [await port.spawn(Server, name=f"server-{number}") for number in (0, 1)]
        config = CONFIG.model_copy(update=affinity)
        made = await port.spawn(router, config, (("e-0", first), ("e-1", second)), name="router")
        stage = Stage(made, made, None, None, simulation)  # type: ignore[arg-type]  # no engine here
        await body(Two(made, (first, second), port, stage))

    with simulation:
        simulation.run(driver, time_limit_s=5000.0)


def refused(seen: Seen, path: str, status: int, retry: str = "false") -> str:
    """What a refusal says, once it is one in the format of its path."""
    assert seen.status == status and dict(seen.headers)["x-should-retry"] == retry
    assert (seen.json.get("type") == "error") == ("/v1/messages" in path)
    return str(seen.json["error"]["message"])


# --- which server ---


async def stays(world: Two) -> None:
    """A session is asked of one server, whatever becomes of its turns."""
    for _ in range(2):
        for number, path in enumerate((CHAT, MESSAGES, f"/prefix{CHAT}?x=1", f"{MESSAGES}/")):
            assert (await world.ask(turn(path, session=number))).ended
            assert (await world.ask(turn(path, session=str(number)))).ended
    first, second = await world.asked()
    assert not set(first) & set(second) and len(first) == len(second) == 8  # a path is a session here
    assert await world.in_flight() == [0, 0] and await world.bindings() == 4
    await world.router.set_backend("e-0", False)
    await world.ask(turn(CHAT, session=0))
    await world.router.set_backend("e-0", True)
    assert await world.asked() == [first, second]


def test_a_session_stays_with_its_server() -> None:
    two(stays)


class Moves(HttpAffinityRouter):
    """Binds a session anew when its backend is not healthy (A-1)."""

    def _acquire(self, session: str) -> str:
        bound = self._bindings.get(session)
        if bound is not None and not self._backends[bound].healthy:
            del self._bindings[session]
        return super()._acquire(session)


def test_a_router_that_moves_sessions_is_seen() -> None:
    with pytest.raises(AssertionError):
        two(stays, Moves)


def test_what_is_no_generation_binds_nothing_and_goes_where_its_session_is() -> None:
    async def body(world: Two) -> None:
        await world.ask(turn(CHAT, session="a"))  # e-0
        count = f"{MESSAGES}/count_tokens"
        for session in ("a", "b", None, ["no", "id"]):
            assert (await world.ask(turn(count, session=session))).status == 200
        assert (await world.ask(RawRequest("GET", "/v1/models"))).status == 200
        assert await world.bindings() == 1
        assert await world.asked() == [(CHAT, count), (count, count, count, "/v1/models")]  # the fewest assigned
        await world.router.set_backend("e-0", False)
        assert "not healthy" in refused(await world.ask(turn(count, session="a")), count, 503, "true")
        assert (await world.ask(turn(count, session="b"))).status == 200
        await world.retire("a")
        assert "retired" in refused(await world.ask(turn(count, session="a")), count, 410)

    two(body)


# --- refusals ---


@both
@streamed
def test_refusals_are_in_the_clients_own_format(path: str, stream: bool) -> None:
    async def body(world: Two) -> None:
        for session in (None, "", True, {"no": "id"}):
            assert "session_id" in refused(await world.ask(turn(path, session=session, stream=stream)), path, 400)
        for text in (b"no json", b"[]", b""):
            refused(await world.ask(RawRequest("POST", path, (), text)), path, 400)
        assert (await world.ask(turn(path, session="a", stream=stream))).ended
        assert "1 sessions are bound" in refused(await world.ask(turn(path, session="b")), path, 503, "true")
        await world.router.set_backend("e-0", False)
        said = refused(await world.ask(turn(path, session="a", stream=stream)), path, 503, "true")
        assert said == "session a is bound to e-0, which is not healthy"
        await world.router.replace_backends((("e-1", world.servers[1]),))
        assert "is gone" in refused(await world.ask(turn(path, session="a")), path, 503, "true")
        assert (await world.retire("a")).json == {"retired": 1}
        assert "retired" in refused(await world.ask(turn(path, session="a", stream=stream)), path, 410)
        assert await world.asked() == [(path,), ()] and await world.in_flight() == [0]

    two(body, max_sessions=1)


@pytest.mark.parametrize(
    "route",
    [
        "/update_weights_from_disk", "/update_weights_from_tensor", "/update_weight_version", "/pause_generation",
        "/continue_generation", "/flush_cache", "/abort_request", "/release_memory_occupation",
        "/resume_memory_occupation", "/sleep", "/wakeup", "/wake_up", "/terminate", "/start_profile",
        "/flush_cache/", "/x/../flush_cache", "/%66lush_cache", "/flush_cache?a=1",
    ],
)  # fmt: skip
def test_what_is_meant_for_engines_is_refused(route: str) -> None:
    async def body(world: Two) -> None:
        for request in (posted(route, {"session_id": "a"}), posted(route, {}), RawRequest("GET", route)):
            assert "ask the engine itself" in refused(await world.ask(request), route, 403)
        assert await world.asked() == [(), ()] and await world.bindings() == 0

    two(body)


@pytest.mark.parametrize("route", ["/", "/set_internal_state", "/load_lora_adapter", "/generate", "/v1/completions"])
def test_what_an_engine_has_besides_is_refused_but_for_reading_and_counting(route: str) -> None:
    async def body(world: Two) -> None:
        await world.ask(turn(CHAT, session="a"))
        for request in (posted(route, {}), posted(route, {"session_id": "a"}), RawRequest("DELETE", route)):
            assert "nothing for a session" in refused(await world.ask(request), route, 403)
        passed = ("/tokenize", "/detokenize", "/v1/responses", "/v1/models", f"{MESSAGES}/count_tokens/")
        for path in passed:
            method = "GET" if path == "/v1/models" else "POST"
            assert (await world.ask(RawRequest(method, path, (), b"{}"))).status == 200
        assert await world.asked() == [(CHAT,), passed] and await world.bindings() == 1

    two(body)


# --- failures ---

BEFORE = {"is silent": 504, "is empty": 502, "breaks": 502, "has no engine": 503}


@both
@pytest.mark.parametrize("does", [*BEFORE, "is killed", "is dead"])
def test_what_fails_before_the_head_is_told_and_never_sent_again(path: str, does: str) -> None:
    async def body(world: Two) -> None:
        first = world.servers[0]
        await first.now("is silent" if does.startswith("is killed") else does)
        asked = asyncio.ensure_future(world.ask(turn(path, session="a")))
        if does == "is killed":
            await asyncio.sleep(5.0)
            await world.port.kill(first)
        elif does == "is dead":
            asked.cancel()
            await world.port.kill(first)
            await asyncio.sleep(5.0)
            asked = asyncio.ensure_future(world.ask(turn(path, session="a")))
        seen = await asked
        if does == "has no engine":
            assert seen.status == 503 and seen.ended  # the answer of the server, as it is
        elif does == "is dead":
            assert seen.status in (502, 503)
        else:
            refused(seen, path, BEFORE.get(does, 502))
        assert await world.servers[1].asked() == () and await world.in_flight() == [0, 0]
        if not does.startswith("is "):
            assert await first.asked() == (path,)
        if does not in ("is silent",):  # a slow one is not suspect
            for session in ("b", "c"):  # where there are fewest in flight is one that fails at once
                assert (await world.ask(turn(path, session=session))).ended
            assert len(await world.servers[1].asked()) == 2

    two(body)


@both
@pytest.mark.parametrize("does", ["breaks in the middle", "is silent in the middle", "is killed in the middle"])
def test_what_fails_after_the_head_breaks_the_connection(path: str, does: str) -> None:
    async def body(world: Two) -> None:
        await world.servers[0].now(does.replace("killed", "silent"))
        asked = asyncio.ensure_future(world.ask(turn(path, session="a", stream=True)))
        if "killed" in does:
            await asyncio.sleep(5.0)
            await world.port.kill(world.servers[0])
        seen = await asked
        assert seen.error == ("ReadTimeout" if "silent" in does else "ConnectionLost")
        assert (seen.status, seen.body) == (200, b"data: one\n\n")
        assert await world.servers[1].asked() == () and await world.in_flight() == [0, 0]
        if "killed" not in does:
            assert await world.servers[0].asked() == (path,) and await world.servers[0].is_open() == 0

    two(body)


@both
@pytest.mark.parametrize("leave", [{"leave_after_s": 0.5}, {"leave_after": 0}, {"leave_after": 1}, {"leave_after": 2}])
def test_a_client_that_leaves_holds_nothing(path: str, leave: dict[str, Any]) -> None:
    async def body(world: Two) -> None:
        await world.ask(turn(path, session="a", stream=True), **leave)
        await asyncio.sleep(1.0)
        assert await world.in_flight() == [0, 0]
        assert [await server.is_open() for server in world.servers] == [0, 0]  # the server knows that it has gone
        assert (await world.ask(turn(path, session="a"))).ended
        assert await world.asked() in ([(path, path), ()], [(path,), ()])

    two(body)


# --- the end of an episode ---


@both
def test_a_turn_under_way_of_a_session_that_is_retired_is_given_up(path: str) -> None:
    async def body(world: Two) -> None:
        loop = asyncio.get_running_loop()
        await world.servers[0].now("is silent")
        mine = asyncio.ensure_future(world.ask(turn(path, session="a")))
        await asyncio.sleep(1.0)
        other = asyncio.ensure_future(world.ask(turn(path, session="b", stream=True)))
        await asyncio.sleep(0.5)
        began = loop.time()
        assert (await world.retire("a", "a", 17)).json == {"retired": 2}
        assert loop.time() - began < 1.0 and await world.servers[0].is_open() == 0
        assert "was retired" in refused(await mine, path, 410)
        for session in ("a", "17", 17):
            refused(await world.ask(turn(path, session=session)), path, 410)
        assert (await other).ended
        assert await world.asked() == [(path,), (path,)] and await world.in_flight() == [0, 0]

    two(body)


def test_an_answer_that_has_begun_goes_on_though_its_session_is_retired() -> None:
    async def body(world: Two) -> None:
        asked = asyncio.ensure_future(world.ask(turn(CHAT, session="a", stream=True)))
        await asyncio.sleep(1.5)
        assert await world.in_flight() == [1, 0]
        assert (await world.retire("a")).status == 200
        assert (await asked).ended and await world.in_flight() == [0, 0]

    two(body)


async def left_behind(world: Two, *sessions: str) -> None:
    """Their clients leave before the head, one after another."""
    for session in sessions:
        await world.ask(turn(CHAT, session=session), leave_after_s=0.5)


async def heard(world: Two) -> list[tuple[str, ...]]:
    return [await server.heard() for server in world.servers]


def test_a_retirement_is_over_when_the_server_of_the_session_has_heard_of_it() -> None:
    async def body(world: Two) -> None:
        await left_behind(world, "a", "b", "c")
        await world.servers[0].now("does not hear")
        assert "may still be sent" in refused(await world.retire("a", "b"), RETIRE, 504, "true")
        assert await heard(world) == [(), ("b",)]  # who is silent keeps nothing from the others
        refused(await world.ask(turn(CHAT, session="a")), CHAT, 410)
        refused(await world.retire("a"), RETIRE, 504, "true")  # said again, it is not forgotten who has not heard
        await world.servers[0].now("answers")
        assert (await world.retire("a", "b", "never-seen")).status == 200
        assert await heard(world) == [("a",), ("b",)]
        await world.port.kill(world.servers[0])
        assert (await world.retire("c")).status == 200  # what is dead sends nothing

    two(body)


def test_a_server_is_told_of_sessions_only_that_left_a_turn_there() -> None:
    async def body(world: Two) -> None:
        for session in ("read", "read too"):
            assert (await world.ask(turn(CHAT, session=session))).ended
        await world.ask(turn(CHAT, session="head only"), leave_after=1)
        await world.ask(turn(f"{MESSAGES}/count_tokens", session="read"), leave_after_s=0.5)
        for server in world.servers:
            await server.now("does not hear")
        began = asyncio.get_running_loop().time()
        assert (await world.retire("read", "read too", "head only")).status == 200
        assert asyncio.get_running_loop().time() - began < 1.0

    two(body)


def test_all_servers_have_one_deadline_which_ends_before_that_of_the_controller() -> None:
    async def body(world: Two) -> None:
        loop = asyncio.get_running_loop()
        await left_behind(world, "a", "b")
        for server in world.servers:
            await server.now("does not hear")
        began = loop.time()
        with pytest.raises(ReadTimeout, match="may still be sent"):
            await world.router.retire_sessions(("a", "b"))
        assert loop.time() - began < ControllerConfig().call_timeout_s

    two(body)


def test_a_server_that_was_taken_out_of_the_table_is_told_of_its_turns() -> None:
    async def body(world: Two) -> None:
        await left_behind(world, "a")
        await world.router.replace_backends((("e-1", world.servers[1]),))
        assert (await world.retire("a")).status == 200 and await heard(world) == [("a",), ()]

    two(body)


def test_a_retirement_that_nobody_repeats_is_forgotten_with_its_tombstone() -> None:
    async def body(world: Two) -> None:
        await left_behind(world, "a")
        await world.servers[0].now("does not hear")
        refused(await world.retire("a"), RETIRE, 504, "true")
        await asyncio.sleep(100.0)
        assert (await world.retire("b")).status == 200  # which forgets what is over
        await world.servers[0].now("answers")
        assert (await world.retire("a")).status == 200 and await heard(world) == [(), ()]

    two(body, tombstone_ttl_s=60.0)


def test_a_retirement_that_cannot_be_read_is_refused() -> None:
    async def body(world: Two) -> None:
        for wrong in ({}, [], {"session_ids": "a"}, {"session_ids": ["a", None]}, {"session_ids": [""]}, None):
            refused(await world.ask(posted(RETIRE, wrong)), RETIRE, 400)
        refused(await world.ask(RawRequest("GET", RETIRE)), RETIRE, 405)
        assert (await world.ask(turn(CHAT, session="a"))).ended  # nothing was retired
        assert (await world.retire()).json == {"retired": 0}

    two(body)


# --- before real session servers ---


def served(
    body: Callable[[Stage, list[Stage]], Coroutine[Any, Any, Any]],
    *,
    closed: bool = False,
    gated: bool = True,
    hooks: Any = TraceHooks,
) -> Evidence:
    """A router before two session servers: (all of it, each of them)."""
    evidence = Evidence()
    simulation = Simulation(seed=1, nodes=1, gpus_per_node=8, sinks=[evidence.record])

    async def driver(port: Any) -> None:
        gateway = await port.spawn(Gateway, GatewayConfig(), name="gateway")
        store = await port.spawn(RolloutTraceStore, name="trace")
        stages = []
        for number in (0, 1):
            address = await port.engines.launch(EngineSpec("tiny-cpu"), name=f"policy-{number}")
            await _ready(address)
            await gateway.add_replica(address)
            config = GateConfig(initially_closed=closed, initial_model_step=None if closed else 0)
            gate = await port.spawn(RequestGate, config, name=f"gate-{number}") if gated else None
            made = (SETTINGS, address, gateway, gate, hooks(store))
            server = await port.spawn(SessionServer, *made, name=f"server-{number}")
            stages.append(Stage(server, store, gate, address, simulation))
        pairs = tuple((stage.engine.name, stage.server) for stage in stages)
        router = await port.spawn(HttpAffinityRouter, CONFIG, pairs, gateway, name="router")
        await body(dataclasses.replace(stages[0], server=router), stages)

    with simulation:
        simulation.run(driver, time_limit_s=600.0)
    return evidence


def test_answers_are_those_of_the_session_servers() -> None:
    async def body(routed: Stage, stages: list[Stage]) -> None:
        for path in PATHS:
            for stream in (False, True):
                direct = await stages[0].ask(turn(path, session=f"direct-{path}-{stream}", stream=stream))
                seen = await routed.ask(turn(path, session=f"routed-{path}-{stream}", stream=stream))
                assert seen.status == 200 and seen.ended == stream
                assert len(seen.body) == len(direct.body) and dict(seen.headers)["x-seatrial-request-id"]
                assert await routed.store.keys(f"routed-{path}-{stream}")

    evidence = served(body)
    assert {event.data["target"] for event in evidence.of("affinity.bound")} == {"policy-0", "policy-1"}


class SlowToAsk(TraceHooks):
    """Takes five seconds before a turn is sent."""

    async def on_request(self, turn: Turn) -> None:
        await super().on_request(turn)
        await asyncio.sleep(5.0)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_a_turn_in_its_request_hook_is_not_sent_once_its_session_is_retired(gated: bool, left: bool) -> None:
    async def body(routed: Stage, stages: list[Stage]) -> None:
        leaves = {"leave_after_s": 1.0} if left else {}
        asked = asyncio.ensure_future(routed.ask(turn(CHAT, session="a"), **leaves))
        await asyncio.sleep(2.0)
        await routed.server.retire_sessions(("a",))
        if not left:
            refused(await asked, CHAT, 410)
        await asyncio.sleep(10.0)
        assert (await routed.ask(turn(CHAT, session="b"))).status == 200

    evidence = served(body, hooks=SlowToAsk, gated=gated)
    assert len(evidence.of("engine.finished")) == 1  # of b
    assert [event.data["label"] for event in evidence.of("gate.settled")] == (
        ["failed: never sent", "completed"] if gated else []
    )


@both
def test_a_turn_that_waits_at_its_gate_is_not_sent_once_its_session_is_retired(path: str) -> None:
    async def body(routed: Stage, stages: list[Stage]) -> None:
        asked = asyncio.ensure_future(routed.ask(turn(path, session="a")))
        await asyncio.sleep(2.0)
        await routed.server.retire_sessions(("a",))
        refused(await asked, path, 410)
        gate = stages[0].gate
        assert gate is not None
        epoch = (await gate.snapshot()).epoch + 1
        await gate.seal(epoch)
        await gate.drain(epoch, 5.0)
        await gate.install_version(epoch, 0)
        await gate.reopen(epoch)
        await asyncio.sleep(10.0)
        assert not (await gate.snapshot()).active

    evidence = served(body, closed=True)
    assert evidence.of("affinity.bound") and not evidence.of("engine.prompt")
