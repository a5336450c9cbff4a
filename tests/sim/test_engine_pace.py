"""An engine whose pace wanders: how it is drawn, what it scales, and that nothing is drawn where it does not."""

from __future__ import annotations

import statistics

import pytest

from sim.engine import SimEngine
from sim.engine_cost import ProfileError, parse_profile
from sim.engine_pace import Pace, pace_of
from sim.profiles import EngineProfile
from sim.random import Streams
from tests.sim.engine_world import MS, S, World, tiny
from tests.sim.test_engine_profiles import GOOD

SPREAD, PERIOD_NS = 300_000, 50 * MS


def wandering(**changes: int) -> EngineProfile:
    return tiny(**{"pace_spread_ppm": SPREAD, "pace_period_ns": PERIOD_NS, **changes})


def ticks(profile: EngineProfile, slow_ppm: int | None = None) -> list[int]:
    """Nanoseconds from token to token of one long answer."""
    world = World(profile)
    if slow_ppm is not None:
        world.engine.slow(slow_ppm)
    seen: list[int] = []
    world.engine.submit("r", 20, 400, done=None, on_token=lambda rid, n: seen.append(world.env.now))
    world.run()
    return [after - before for before, after in zip(seen, seen[1:], strict=False)]


def test_a_factor_has_mean_one_and_the_spread_and_holds_to_the_end_of_its_period() -> None:
    pace = Pace(wandering(), Streams(1).stream("pace"))
    drawn = []
    for number in range(20_000):
        pace.draw(number * PERIOD_NS + 7)
        assert pace.until_ns == (number + 1) * PERIOD_NS
        drawn.append(pace.ppm / 1e6)
    assert statistics.fmean(drawn) == pytest.approx(1.0, abs=0.01)
    assert statistics.pstdev(drawn) == pytest.approx(0.3, abs=0.01)


def test_steps_change_with_each_period_and_in_none() -> None:
    plain, paced = ticks(tiny()), ticks(wandering())
    factors = [round(step / usual, 3) for step, usual in zip(paced, plain, strict=True)]
    changes = sum(x != y for x, y in zip(factors, factors[1:], strict=False))
    assert len(set(factors)) > 10 and changes <= sum(paced) // PERIOD_NS + 1
    assert ticks(wandering()) == paced  # the same names, the same draws
    assert ticks(wandering().replace(name="other")) != paced


def test_it_multiplies_with_slow_and_outlives_it() -> None:
    for number, (one, thrice) in enumerate(zip(*(_first(slow) for slow in (None, 3_000_000)), strict=True)):
        assert thrice / one == pytest.approx(3, abs=1e-4), number
    world = World(wandering(pace_period_ns=1000 * S))
    world.submit("r", 20, 10)
    world.run()
    before = world.engine.scheduler.costs.decode_base
    assert before != tiny().decode_base_ps
    for factor, expected in ((2_000_000, 2 * before), (1_000_000, before)):
        world.engine.slow(factor)
        world.run()
        assert world.engine.scheduler.costs.decode_base == pytest.approx(expected, rel=1e-5)


def _first(slow_ppm: int | None) -> list[int]:
    """Steps under the first draw."""
    return ticks(wandering(pace_period_ns=1000 * S), slow_ppm)


def test_without_a_spread_there_is_no_pace_and_no_draw() -> None:
    streams = Streams(1)
    assert pace_of(tiny(pace_period_ns=PERIOD_NS), streams.stream("pace"), "e") is None
    assert ticks(tiny(pace_period_ns=PERIOD_NS)) == ticks(tiny())
    assert not streams.draws()


def test_an_idle_engine_draws_nothing_and_sets_no_timer() -> None:
    stream = Streams(1).stream("pace")
    world = World(started=False)
    engine = SimEngine(world.env, wandering(), pace=stream)
    engine.start()
    world.run()
    engine.slow(2_000_000)
    world.run()
    assert world.env.now < 3 * S and not stream.draws
    engine.submit("r", 20, 5, done=None)
    world.run()
    drawn = stream.draws
    assert drawn
    world.run(until=world.env.now + 100 * S)
    assert stream.draws == drawn


def test_no_step_is_skipped_past_a_draw_and_others_are() -> None:
    def events(profile: EngineProfile) -> int:
        world = World(profile)
        world.submit("r", 20, 400)
        world.run()
        return next(world.env._eid)

    assert events(wandering()) < 20 + 2 * 400 * 3 * MS // PERIOD_NS
    assert events(wandering()) > events(tiny())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ('  pace_spread: {value: 1.1, unit: "1", origin: assumed}', "pace_spread is 1.1; must be at most 1"),
        ('  pace_spread: {value: -0.1, unit: "1", origin: assumed}', "must be finite and not negative"),
        ("  pace_spread: {value: 0.1, unit: ms, origin: assumed}", "unit 'ms'; must be one of 1"),
        ('  pace_spread: {value: 0.1, unit: "1", origin: assumed}', "pace_period is 0 ns; with a pace_spread it must"),
        (
            '  pace_spread: {value: 0.1, unit: "1", origin: assumed}\n'
            "  pace_period: {value: 1, unit: us, origin: assumed}",
            "pace_period is 1000 ns; with a pace_spread it must be at least 1000000 ns",
        ),
    ],
)
def test_a_silly_pace_is_refused(more: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        parse_profile(f"{GOOD}\n{more}\n", "t")


def test_a_profile_may_say_how_its_pace_wanders() -> None:
    more = (
        '  pace_spread: {value: 0.21, unit: "1", origin: fitted}\n'
        "  pace_period: {value: 1.2, unit: s, origin: fitted}\n"
    )
    profile = parse_profile(f"{GOOD}\n{more}", "t")
    assert (profile.pace_spread_ppm, profile.pace_period_ns) == (210_000, 1_200_000_000)
    assert parse_profile(GOOD, "t").pace_spread_ppm == 0
