"""Seeds, what is refused, and the choice of an attention backend (scaling.md 8)."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.config import JudgeConfig
from protocol.errors import HttpError, Outcome
from protocol.messages import ForwardReply, ForwardRequest
from protocol.ports import EngineOptions
from protocol.serving.determinism import Sampling, attention_backend, check_sampling, keeps_prefixes, request_seed
from protocol.serving.judge import Judge, JudgeCall
from tests.protocol.fake import FakeBackend, run

IDS = (1, 2, 3)


def test_a_seed_is_four_bytes_of_the_content_without_the_highest_bit() -> None:
    sampling = Sampling(temperature=0.1, max_new_tokens=64)
    text = '{"input_ids":[1,2,3],"model":"m","sampling":{"max_new_tokens":64,"temperature":0.1,"top_k":-1,"top_p":1.0}}'
    expected = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") & 0x7FFFFFFF
    assert request_seed("m", IDS, sampling, None) == expected
    assert request_seed("m", IDS, sampling, 7) == 7
    assert request_seed("m", IDS, Sampling(temperature=0), None) is None
    assert request_seed("m", IDS, Sampling(temperature=0.1, top_k=1), None) is not None  # the rule names no top_k


@given(st.lists(st.integers(0, 2**31 - 1), max_size=20), st.floats(1e-6, 10), st.text(max_size=5))
def test_seeds_fit_the_engine_and_follow_every_part(ids: list[int], temperature: float, model: str) -> None:
    sampling = Sampling(temperature=temperature)
    seed = request_seed(model, ids, sampling, None)
    assert seed is not None and 0 <= seed < 2**31 and seed == request_seed(model, tuple(ids), sampling, None)
    others = (
        request_seed(model + "x", ids, sampling, None),
        request_seed(model, [*ids, 1], sampling, None),
        request_seed(model, ids, Sampling(temperature=temperature, max_new_tokens=7), None),
        request_seed(model, ids, Sampling(temperature=temperature, top_p=0.5), None),
    )
    assert sum(other == seed for other in others) == 0


@pytest.mark.parametrize(
    ("sampling", "min_p"),
    [
        (Sampling(temperature=1e-9), 0.0),
        (Sampling(temperature=-1.0), 0.0),
        (Sampling(temperature=float("nan")), 0.0),
        (Sampling(temperature=float("inf")), 0.0),
        (Sampling(temperature=True), 0.0),
        (Sampling(temperature=0.5), 0.1),
    ],
)
def test_sampling_that_no_seed_repeats_is_refused(sampling: Sampling, min_p: float) -> None:
    with pytest.raises(HttpError) as refused:
        check_sampling(sampling, min_p)
    assert refused.value.fields["status"] == 400 and refused.value.outcome is Outcome.NOT_DONE


def test_greedy_takes_min_p_for_it_has_no_effect() -> None:
    check_sampling(Sampling(temperature=0), 0.1)
    check_sampling(Sampling(temperature=0.5), 0.0)


@pytest.mark.parametrize(
    ("deterministic", "gpu", "user", "instance", "named"),
    [
        (True, "ada", "", "", "fa3"),
        (True, "hopper", "", "", "fa3"),
        (True, "blackwell", "", "", "flashinfer"),
        (True, None, "", "", ""),  # the probe failed: nothing is put in anybody's mouth
        (True, None, "triton", "", "triton"),
        (True, "ada", "triton", "", "triton"),
        (True, "ada", "triton", "fa4", "fa4"),
        (False, "ada", "", "", ""),
        (False, "ada", "flashinfer", "", "flashinfer"),
    ],
)
def test_who_names_the_attention_backend(
    deterministic: bool, gpu: str | None, user: str, instance: str, named: str
) -> None:
    assert attention_backend(deterministic, gpu, user, instance) == named


def test_which_engines_keep_their_prefix_cache() -> None:
    assert keeps_prefixes(None) and keeps_prefixes(EngineOptions(attention_backend="flashinfer"))
    assert keeps_prefixes(EngineOptions(deterministic=True, attention_backend="fa3"))
    assert not keeps_prefixes(EngineOptions(deterministic=True, attention_backend="flashinfer"))
    assert not keeps_prefixes(EngineOptions(deterministic=True))


class Gateway:
    """Answers with what it was given."""

    answer: Any = {"output_ids": [5], "meta_info": {"finish_reason": {"type": "stop"}, "completion_tokens": 1}}

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    async def forward(self, request: ForwardRequest) -> ForwardReply:
        self.bodies.append(json.loads(request.body))
        return ForwardReply(json.dumps(self.answer), "e-0", 1, 2)


def test_defaults_are_merged_before_the_seed_is_made() -> None:
    async def body(world: FakeBackend) -> None:
        gateway = Gateway()
        handle = await world.spawn(lambda: gateway, name="gateway")  # type: ignore[arg-type]  # anything that makes one
        judge = await world.spawn(
            Judge, JudgeConfig(model_path="m", temperature=0.3, max_new_tokens=9), handle, name="j"
        )
        reply = await judge.judge(JudgeCall("r-1", IDS, top_p=0.5))
        assert (reply.output_ids, reply.finish_reason, reply.engine, reply.attempts) == ((5,), "stop", "e-0", 2)
        sampling = Sampling(temperature=0.3, top_p=0.5, max_new_tokens=9)
        assert gateway.bodies == [
            {
                "rid": "r-1",
                "input_ids": [1, 2, 3],
                "sampling_params": {
                    "temperature": 0.3,
                    "top_p": 0.5,
                    "top_k": -1,
                    "max_new_tokens": 9,
                    "sampling_seed": request_seed("m", IDS, sampling, None),
                },
            }
        ]
        await judge.judge(JudgeCall("r-2", IDS, temperature=0.0))
        assert "sampling_seed" not in gateway.bodies[1]["sampling_params"]
        with pytest.raises(HttpError):
            await judge.judge(JudgeCall("r-3", IDS, min_p=0.2))
        assert len(gateway.bodies) == 2  # refused before anything was sent
        gateway.answer = {"output_ids": "x"}
        with pytest.raises(HttpError) as odd:
            await judge.judge(JudgeCall("r-4", IDS))
        assert odd.value.outcome is Outcome.UNKNOWN

    run(body)
