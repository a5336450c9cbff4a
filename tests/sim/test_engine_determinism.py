"""Sampling of simulated engines, and the scheduler that stops where deterministic mode has no prefix cache."""

from __future__ import annotations

import pytest

from protocol.ports import EngineOptions
from sim.engine import SimEngine
from sim.engine_metrics import metrics_page
from sim.engine_sampling import PPM, Sampler, SamplingAsked
from sim.engine_tokens import Continuation
from sim.profiles import load_profile

HOT = SamplingAsked(PPM, None)


def _say(sampler: Sampler, asked: SamplingAsked, prompt: int, tokens: int = 40) -> list[int]:
    said = Continuation([prompt], lambda state, at: sampler.takes_next_best(asked, state, at))
    said.extend(tokens, "w")
    return said.ids


def test_deterministic_answers_depend_on_the_seed_and_on_nothing_else() -> None:
    one, other = Sampler(True, 1), Sampler(True, 2)
    seeded = SamplingAsked(PPM, 7)
    first = _say(one, seeded, 1000)
    for prompt in range(1001, 1010):
        _say(other, seeded, prompt)  # another history
    assert _say(other, seeded, 1000) == first != _say(one, SamplingAsked(PPM, 8), 1000)
    assert _say(one, HOT, 1000) == _say(one, SamplingAsked(PPM, 42), 1000)  # 42 without one


def test_otherwise_they_depend_on_the_server_seed_and_on_what_was_sampled_before() -> None:
    assert _say(Sampler(False, 1), HOT, 1000) == _say(Sampler(False, 1), SamplingAsked(PPM, 99), 1000)
    assert _say(Sampler(False, 1), HOT, 1000) != _say(Sampler(False, 2), HOT, 1000)
    used = Sampler(False, 1)
    _say(used, HOT, 1001)
    assert _say(used, HOT, 1000) != _say(Sampler(False, 1), HOT, 1000)


def test_few_judgements_are_borderline_at_the_published_temperature() -> None:
    flipped = 0
    for prompt in range(1000):
        said = {tuple(_say(Sampler(False, seed), SamplingAsked(PPM // 10, None), prompt, 1)) for seed in range(8)}
        flipped += len(said) > 1
    assert 20 <= flipped <= 90  # published: 2 of 50, which is 40 of 1000


def test_greedy_is_what_it_was() -> None:
    plain, drawn = Continuation([1000]), Continuation([1000], lambda state, at: False)
    plain.extend(50, "w")
    drawn.extend(50, "w")
    assert plain.ids == drawn.ids


@pytest.mark.parametrize(
    ("options", "stops"),
    [
        (EngineOptions(True, "flashinfer", "ada"), True),
        (EngineOptions(True, "", "ada"), True),
        (EngineOptions(True, "fa3", "ada"), False),
        (EngineOptions(True, "flashinfer", "blackwell"), False),
        (EngineOptions(False, "flashinfer", "ada"), False),
        (None, False),
    ],
)
def test_the_scheduler_stops_at_long_prompts_without_a_prefix_cache(options: EngineOptions | None, stops: bool) -> None:
    import simpy

    env = simpy.Environment(0)
    engine = SimEngine(env, load_profile("qwen3-0.6b-rtx4090"), options=options)
    done: list[str] = []
    engine.start()
    env.run(until=60 * 10**9)
    for number in range(48):
        engine.submit(f"r-{number:02d}", 1800, 64, done=lambda result: done.append(result.rid))
    env.run(until=75 * 10**9)
    assert len(done) == (0 if stops else 48)
    figures = engine.load_figures()
    if stops:
        assert (figures["num_waiting_reqs"], figures["num_running_reqs"]) == (0, 0)  # nobody has reported since
    env.run(until=100 * 10**9)
    page = metrics_page(engine)
    queued = next(line for line in page.splitlines() if line.startswith("sglang:num_queue_reqs"))
    assert queued.endswith(" 48.0" if stops else " 0.0")
    statuses: list[int] = []
    engine.health_generate(statuses.append)
    env.run(until=130 * 10**9)
    assert statuses == [503 if stops else 200]


def test_short_prompts_do_not_stop_it() -> None:
    import simpy

    env = simpy.Environment(0)
    engine = SimEngine(env, load_profile("qwen3-0.6b-rtx4090"), options=EngineOptions(True, "flashinfer", "ada"))
    done: list[str] = []
    engine.start()
    env.run(until=60 * 10**9)
    for number in range(48):
        engine.submit(f"r-{number:02d}", 35, 16, done=lambda result: done.append(result.rid))
    env.run(until=70 * 10**9)
    assert len(done) == 48 and engine.scheduler.stalled_ns < 0
