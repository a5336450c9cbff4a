"""Whatever is sent to the control API of rollout replicas, in whatever order: a documented answer, never an error.

As ``tests/protocol/scaling/test_any_input.py``, whose documents and draws it takes.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from protocol.config import HttpConfig
from protocol.errors import ConnectionRefused, PlacementError
from protocol.messages import EngineAddress
from protocol.rollout.elastic_contract import normalised
from protocol.rollout.elastic_http import rollout_routes
from protocol.serving.http import HttpAnswer, HttpRequest
from tests.protocol.fake import FakeEngines
from tests.protocol.rollout.test_elastic import rollout
from tests.protocol.scaling.test_any_input import ANY, LEAVES, Asked, Documented, _sent
from tests.protocol.scaling.world import ScalingWorld, run

QUICKLY = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
KEY = st.sampled_from(["a", "b", None])
URL = st.one_of(st.sampled_from(["a:1", "http://a:1/", "https://b:2", "a..b:1", "[::1]:1", "a:0"]), st.text(max_size=9))
OUT = st.one_of(
    ANY,
    st.fixed_dictionaries({"num_replicas": st.one_of(st.integers(1, 4), LEAVES)}, optional={"idempotency_key": KEY}),
    st.fixed_dictionaries({"engine_urls": st.lists(URL, max_size=3)}, optional={"timeout_secs": LEAVES}),
)
FLAGS = {name: st.one_of(st.booleans(), LEAVES) for name in ("force", "evict", "dry_run")}
IN = st.one_of(
    ANY,
    st.fixed_dictionaries({"num_replicas": st.one_of(st.integers(1, 4), LEAVES)}, optional={"idempotency_key": KEY}),
    st.fixed_dictionaries({"num_replicas": st.integers(1, 2)}, optional=FLAGS),
)
CALLS = st.one_of(
    _sent("POST", "/scale_out", OUT), _sent("POST", "/scale_in", IN), _sent("DELETE", "/scale_out/LAST"),
    *(_sent("GET", f"/{one}/LAST") for one in ("scale_out", "scale_in")),
    *(_sent("GET", path) for path in ("/engines", "/metrics", "/health", "/scale_out/none", "/scale_in/%00")),
)  # fmt: skip
TWO: Asked = ("POST", "/scale_out", b'{"num_replicas": 3}', ())
CANCEL: Asked = ("DELETE", "/scale_out/LAST", b"", ())


class _Nobody:
    async def get(self, route: str, **_: Any) -> Any:
        raise ConnectionRefused(f"nobody is there for {route}")


class _Engines(FakeEngines):
    def client(self, address: EngineAddress) -> Any:
        known = any((one.name, one.incarnation) == (address.name, address.incarnation) for one in self.every)
        return super().client(address) if known else _Nobody()


def test_any_sequence_of_calls_is_answered_as_documented() -> None:
    documented = Documented("rollout")

    @QUICKLY
    @example([TWO, TWO, CANCEL, CANCEL], "well", 0.0)
    @example([TWO, CANCEL, ("POST", "/scale_in", b'{"num_replicas": 1}', ())], "well", 5.0)
    @example([TWO, ("GET", "/engines", b"", ())], "no_gateway", 1.0)
    @given(
        st.lists(CALLS, min_size=1, max_size=12), st.sampled_from(["well", "no_room", "no_gateway"]),
        st.sampled_from([0.0, 0.5, 5.0]),
    )  # fmt: skip
    def play(asked: list[Asked], how: str, pause_s: float) -> None:
        async def body(world: ScalingWorld) -> None:
            world.engines = _Engines(world)
            made = await rollout(world, initial=2, drain_sleep_s=1)
            if how == "no_gateway":
                made.gateway.dead = True
            if how == "no_room":
                world.placement_groups.create_fails = [PlacementError("no room")] * 20
            routes = rollout_routes(HttpConfig(), made.api)
            last = "none"
            for one in asked:
                method, path, sent, query = one
                answer = await routes.handle(HttpRequest(method, path.replace("LAST", last), (), sent, tuple(query)))
                assert isinstance(answer, HttpAnswer)
                documented.check(one, answer)
                last = json.loads(answer.body).get("request_id") or last
                await asyncio.sleep(pause_s)
            await made.api.stop()

        run(body)

    play()
    assert {200, 400, 404, 409, 422, 503} <= set(documented.statuses), documented.statuses


def test_urls_of_engines_are_an_address_or_an_error_that_says_so() -> None:
    @QUICKLY
    @given(st.text(max_size=20))
    def play(text: str) -> None:
        try:
            host, port = normalised(text)
        except ValueError:
            return
        assert host and 0 <= port < 65536

    play()
