"""Whatever is sent to the handlers of the control APIs, in whatever order: a documented answer, never an error.

No HTTP and no sockets: the handlers as any world calls them. What they answer is held against the OpenAPI document.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import jsonschema
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from protocol.config import HttpConfig
from protocol.openapi import ApiName, document
from protocol.scaling.http_tables import autoscaler_routes, scale_routes
from protocol.serving.http import HttpAnswer, HttpRequest
from tests.protocol.fake import FakeHandle
from tests.protocol.scaling.autoscaler_world import Stage, stage
from tests.protocol.scaling.world import ScalingWorld, Service, run, service

QUICKLY = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
Asked = tuple[str, str, bytes, tuple[tuple[str, str], ...]]

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 6), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from(["default", "2", "__default__", "scale_out", "key-1", "rollout", "genrm", "a://genrm"]),
)  # fmt: skip
ANY = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
KEYS = ("model_name", "num_replicas", "timeout_secs", "idempotency_key")
SUBMIT = st.one_of(
    ANY,
    st.fixed_dictionaries(
        {"num_replicas": st.one_of(st.integers(1, 4), LEAVES)},
        optional={"timeout_secs": st.one_of(st.none(), st.floats(0.1, 50)), "model_name": LEAVES,
                  "idempotency_key": st.sampled_from(["a", "b", None])},
    ),
    st.dictionaries(st.sampled_from(KEYS), LEAVES),
)  # fmt: skip
CALL = st.one_of(
    ANY,
    st.fixed_dictionaries(
        {}, optional={"text": st.one_of(st.text(max_size=5), LEAVES),
                      "input_ids": st.lists(st.integers(-1, 9), max_size=3),
                      "route_key": st.one_of(st.text(min_size=1, max_size=4), LEAVES), "stream": LEAVES, "rid": LEAVES,
                      "sampling_params": ANY, "model_name": st.sampled_from(["default", None, "other"]), "more": ANY}),
)  # fmt: skip
POLICY = st.dictionaries(
    st.sampled_from(["token_usage_threshold", "condition_duration_secs", "max_delta", "queue_depth_threshold", "odd"]),
    st.one_of(st.floats(-1, 2), LEAVES), max_size=3,
)  # fmt: skip
PATCH = st.one_of(
    ANY,
    st.dictionaries(
        st.sampled_from(["min_engines", "max_engines", "enabled", "metrics_interval_secs", "evaluation_interval_secs",
                         "rollout_service_url", "service_targets", "scale_in_policy", "scale_out_policy",
                         "service_policies", "odd"]),
        st.one_of(LEAVES, POLICY, st.dictionaries(st.sampled_from(["genrm", "other", "rollout"]),
                                                  st.one_of(LEAVES, st.just("a://other"), POLICY), max_size=2)),
        max_size=4,
    ),
)  # fmt: skip
TEXT = st.one_of(st.sampled_from(["genrm", "rollout", "1", "0", "scale_in", "1001"]), st.text(max_size=4))
QUERY = st.lists(st.tuples(st.sampled_from(["service", "limit", "action", "odd"]), TEXT), max_size=3).map(tuple)


def _sent(method: str, path: str, bodies: Any = None, queries: Any = None) -> Any:
    bodies = st.just(b"") if bodies is None else st.one_of(bodies.map(_as_json), st.binary(max_size=6))
    return st.tuples(st.just(method), st.just(path), bodies, st.just(()) if queries is None else queries)


def _as_json(value: Any) -> bytes:
    return json.dumps(value).encode()  # NaN and half surrogates too, as some clients write them


SCALE = st.one_of(
    *(_sent("POST", f"/{one}", SUBMIT) for one in ("scale_out", "scale_in")),
    *(_sent("GET", f"/{one}/LAST") for one in ("scale_out", "scale_in")),
    *(_sent("POST", f"/{one}/LAST/reconcile") for one in ("scale_out", "scale_in")),
    *(_sent("GET", path) for path in ("/engines", "/metrics", "/health", "/scale_out/none", "/scale_in/%00")),
    _sent("POST", "/generate", CALL),
)
SCALER = st.one_of(
    *(_sent("GET", path, None, QUERY) for path in ("/status", "/conditions", "/scale_history", "/metrics_history")),
    _sent("GET", "/config"), _sent("GET", "/health"), _sent("POST", "/start"),
    _sent("POST", "/clear_history", None, QUERY), _sent("PATCH", "/config", PATCH), _sent("POST", "/enable", PATCH),
)  # fmt: skip


TWO: Asked = ("POST", "/scale_out", b'{"num_replicas": 2}', ())
THREE: Asked = ("POST", "/scale_out", b'{"num_replicas": 3}', ())


class Documented:
    """Answers held against the document."""

    def __init__(self, api: ApiName) -> None:
        found = document({"": api})
        self._paths = found["paths"]
        self._parts = found["components"]
        self.statuses: dict[int, int] = {}

    def check(self, asked: Asked, answer: HttpAnswer) -> None:
        method, path, body, query = asked
        told = f"{method} {path} {query} {body!r} gave {answer.status} {answer.body[:300]}"
        assert answer.status != 500, told
        operation = self._operation(method, path)
        found = operation["responses"].get(str(answer.status))
        if found is None and 400 <= answer.status < 500:
            found = operation["responses"].get("4XX")
        assert found is not None, f"not documented: {told}"
        if "$ref" in found:
            found = self._parts["responses"][found["$ref"].rpartition("/")[2]]
        schema = {**found["content"]["application/json"]["schema"], "components": self._parts}
        try:
            jsonschema.Draft202012Validator(schema).validate(json.loads(answer.body))
        except jsonschema.ValidationError as error:
            raise AssertionError(f"{told}: {error.message}") from error
        self.statuses[answer.status] = self.statuses.get(answer.status, 0) + 1

    def _operation(self, method: str, path: str) -> Mapping[str, Any]:
        parts = path.split("/")
        if len(parts) > 2:
            parts[2] = "{id}"
        operation: Mapping[str, Any] = self._paths["/".join(parts)][method.lower()]
        return operation


def test_any_sequence_of_calls_to_a_scale_api_is_answered_as_documented() -> None:
    documented = Documented("scale")

    @QUICKLY
    @example([TWO, THREE, ("POST", "/scale_in/LAST/reconcile", b"", ())], "well")
    @example([TWO], "no_manager")
    @example([TWO], "no_gateway")
    @given(st.lists(SCALE, min_size=1, max_size=12), st.sampled_from(["well", "no_manager", "no_gateway"]))
    def play(asked: list[Asked], how: str) -> None:
        async def body(world: ScalingWorld) -> None:
            made = await service(world, lifecycle={"drain_timeout_s": 5}, scaling={"completion_wait_s": 2})
            if how != "well":
                {"no_manager": made.manager, "no_gateway": made.gateway}[how].dead = True
            await _ask_all(made, asked)

        async def _ask_all(made: Service, asked: list[Asked]) -> None:
            routes = scale_routes(HttpConfig(), made.api)
            last = "none"
            for one in asked:
                method, path, given_body, query = one
                answer = await routes.handle(
                    HttpRequest(method, path.replace("LAST", last), (), given_body, tuple(query))
                )
                assert isinstance(answer, HttpAnswer)
                documented.check(one, answer)
                last = json.loads(answer.body).get("request_id") or last
                await asyncio.sleep(0.5)

        run(body)

    play()
    assert {200, 400, 404, 409, 422, 503} <= set(documented.statuses), documented.statuses


def test_any_sequence_of_calls_to_an_autoscaler_is_answered_as_documented() -> None:
    documented = Documented("autoscaler")

    @QUICKLY
    @given(st.lists(SCALER, min_size=1, max_size=12))
    def play(asked: list[Asked]) -> None:
        async def body(world: ScalingWorld) -> None:
            made: Stage = await stage(world)
            routes = autoscaler_routes(HttpConfig(), FakeHandle(world, "autoscaler", 0, made.api))
            for one in asked:
                method, path, given_body, query = one
                answer = await routes.handle(HttpRequest(method, path, (), given_body, tuple(query)))
                assert isinstance(answer, HttpAnswer)
                documented.check(one, answer)
                await asyncio.sleep(3)
            await made.api.stop()

        run(body)

    play()
    assert {200, 400, 404, 422} <= set(documented.statuses), documented.statuses


def test_a_deeply_nested_body_is_refused() -> None:
    deep = b'{"a":' * 900 + b"1" + b"}" * 900
    deeper = b"[" * 100_000

    async def body(world: ScalingWorld) -> None:
        made = await stage(world)
        routes = autoscaler_routes(HttpConfig(), FakeHandle(world, "autoscaler", 0, made.api))
        for text, statuses in ((deep, (400, 422)), (deeper, (400,))):
            answer = await routes.handle(HttpRequest("PATCH", "/config", (), text))
            assert isinstance(answer, HttpAnswer) and answer.status in statuses, answer
        await made.api.stop()

    run(body)
