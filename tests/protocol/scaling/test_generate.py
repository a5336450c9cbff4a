"""POST /generate of a scaled service is sampled as a judgement is (scaling.md 1.1 and 8), by the judge's code."""

from __future__ import annotations

import json
from typing import Any

import pytest

from protocol.config import JudgeConfig
from protocol.messages import EngineAddress
from protocol.scaling.api import DEFAULT_MODEL, ScaleApi
from protocol.serving.determinism import Sampling, request_seed
from protocol.serving.judge import Judge, JudgeCall
from tests.protocol.scaling.world import ScalingWorld, run, service

IDS = (1, 2, 3)
DEFAULTS = {"temperature": 0.2, "top_p": 1.0, "top_k": -1, "max_new_tokens": 1024}
OWN = JudgeConfig(model_path="own", temperature=0.5, top_k=7, max_new_tokens=9)


def _asked(body: dict[str, Any], config: JudgeConfig | None = None) -> tuple[int, dict[str, Any]]:
    """Status and body of the answer; under ``sent`` what reached an engine."""

    async def play(world: ScalingWorld) -> tuple[int, dict[str, Any]]:
        s = await service(world, api=ScaleApi)
        if config is not None:
            s.api.target._judges = ScaleApi(s.api.target._config, s.api.target._given, {DEFAULT_MODEL: config})._judges
        reply = await s.api.generate(body)
        told = dict(reply.body)
        assert reply.status == 200 or not s.engine("engine-0").generated  # what is refused goes nowhere
        if reply.status == 200:
            told["sent"] = told["answer"]["body"]
        return reply.status, told

    found: tuple[int, dict[str, Any]] = run(play)
    return found


def _seed(model: str, prompt: Any, given: int | None = None, more: Any = None, **sampling: Any) -> int | None:
    return request_seed(model, prompt, Sampling(**{**DEFAULTS, **sampling}), given, more)


def test_defaults_are_merged_and_the_seed_is_that_of_the_content() -> None:
    status, told = _asked({"input_ids": list(IDS)})
    assert status == 200 and told["engine_host"] == "host" and told["engine_port"] == 30_000
    assert told["sent"]["sampling_params"] == {**DEFAULTS, "sampling_seed": _seed("fake", IDS)}
    assert _asked({"input_ids": list(IDS), "sampling_params": {"temperature": None}})[1]["sent"] == told["sent"]


def test_the_requests_sampling_is_over_the_instances() -> None:
    asked = {"input_ids": list(IDS), "sampling_params": {"temperature": 1, "top_p": 0.5, "stop": ["x"]}}
    sent = _asked(asked, OWN)[1]["sent"]["sampling_params"]
    merged = {"temperature": 1.0, "top_p": 0.5, "top_k": 7, "max_new_tokens": 9}
    seed = _seed("own", IDS, more={"stop": ["x"]}, **merged)
    assert sent == {**merged, "stop": ["x"], "sampling_seed": seed}
    assert seed != _seed("own", IDS, **merged) and seed is not None  # all of the request is its content


def test_it_is_what_the_judge_sends() -> None:
    """One contract, two ways in."""

    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        s.api.target._judges[DEFAULT_MODEL] = OWN
        judge = await world.spawn(Judge, OWN, s.gateway, name="judge")
        sent: list[Any] = []
        forward = s.gateway.target.forward

        async def seen(call: Any) -> Any:
            sent.append(call.body)
            return await forward(call)

        s.gateway.target.forward = seen
        await s.api.generate({"input_ids": list(IDS), "rid": "r", "sampling_params": {"temperature": 0.3}})
        with pytest.raises(Exception, match="no generation"):  # this engine echoes
            await judge.judge(JudgeCall("r", IDS, temperature=0.3))
        assert json.loads(sent[0]) == json.loads(sent[1])

    run(body)


def test_a_prompt_of_text_has_a_seed_of_its_own() -> None:
    one, other = (_asked({"text": text})[1]["sent"]["sampling_params"]["sampling_seed"] for text in ("a", "b"))
    assert one == _seed("fake", "a") and one != other


def test_greedy_gets_no_seed_and_the_callers_own_wins() -> None:
    assert (
        "sampling_seed"
        not in _asked({"text": "a", "sampling_params": {"temperature": 0}})[1]["sent"]["sampling_params"]
    )
    own = {"temperature": 0.5, "sampling_seed": 7}
    assert _asked({"text": "a", "sampling_params": own})[1]["sent"]["sampling_params"]["sampling_seed"] == 7
    one = _asked({"text": "a", "sampling_params": {"temperature": 0.5, "top_k": 1}})[1]["sent"]["sampling_params"]
    assert one["sampling_seed"] == _seed("fake", "a", temperature=0.5, top_k=1)


@pytest.mark.parametrize(
    ("sampling", "status", "code", "says"),
    [
        ({"temperature": 0.5, "min_p": 0.1}, 400, "INVALID_SAMPLING", "min_p"),
        ({"min_p": 0.1}, 400, "INVALID_SAMPLING", "min_p"),  # the default temperature is above 0
        ({"temperature": 1e-9}, 400, "INVALID_SAMPLING", "ambiguous: send 0"),
        ({"temperature": -1}, 400, "INVALID_SAMPLING", "0 or more"),
        ({"temperature": float("inf")}, 400, "INVALID_SAMPLING", "finite"),
        ({"temperature": True}, 422, "INVALID_BODY", "sampling_params.temperature"),
        ({"temperature": "0.5"}, 422, "INVALID_BODY", "sampling_params.temperature"),
        ({"top_k": 1.5}, 422, "INVALID_BODY", "sampling_params.top_k"),
        ({"max_new_tokens": "9"}, 422, "INVALID_BODY", "sampling_params.max_new_tokens"),
        ({"sampling_seed": 1.0}, 422, "INVALID_BODY", "sampling_params.sampling_seed"),
        ([], 422, "INVALID_BODY", "sampling_params"),
    ],
)
def test_what_nothing_can_repeat_is_refused_before_it_is_sent(sampling: Any, status: int, code: str, says: str) -> None:
    got, told = _asked({"text": "a", "sampling_params": sampling})
    assert (got, told["error"]) == (status, code) and says in told["detail"]


def test_greedy_takes_min_p() -> None:
    sent = _asked({"text": "a", "sampling_params": {"temperature": 0, "min_p": 0.1}})[1]["sent"]["sampling_params"]
    assert sent == {**DEFAULTS, "temperature": 0.0, "min_p": 0.1}


def test_a_replica_is_an_address() -> None:
    """So that who reads ``engine_host`` and ``engine_port`` can ask it."""

    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        told = (await s.api.generate({"text": "a"})).body
        assert EngineAddress("engine-0", 0, told["engine_host"], told["engine_port"]) == s.engine("engine-0").address

    run(body)
