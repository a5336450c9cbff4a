"""sim/random.py: golden values (any change to them changes every run), accuracy against libm, unbiased transforms."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import timeit
from collections import Counter
from fractions import Fraction

import pytest

from sim.random import Stream, Streams, exp, log

CHI2_999 = {9: 27.88, 5: 20.52, 23: 49.73, 99: 148.23}  # 99.9% points of chi-square by degrees of freedom


def stream(name: str = "golden", seed: int = 7) -> Stream:
    return Streams(seed).stream(name)


def chi2(counts: Counter[object], cells: int, total: int) -> float:
    expected = total / cells
    seen = sum((n - expected) ** 2 / expected for n in counts.values())
    return seen + (cells - len(counts)) * expected


# --- golden values -------------------------------------------------------------------------------------------------


def test_raw_draws_are_pinned() -> None:
    s = stream("net/a-b")
    assert [s.next64() for _ in range(4)] == [
        17430081195340460002,
        7716407401380419364,
        4623571437380362023,
        3027162952114839636,
    ]
    assert s.draws == 4


@pytest.mark.parametrize(
    ("method", "args", "expected", "draws"),
    [
        ("unit", (), ["0x1.9266cd55c88b8p-3", "0x1.175e0f741b1d8p-3", "0x1.328862af9d50cp-2"], 3),
        ("below", (1000,), [196, 136, 299], 3),
        ("uniform_ns", (5, 10**9), [196485146, 136409879, 299348398], 3),
        ("chance", (1, 4), [True, True, False], 3),
        ("exponential", (2.0,), None, 3),
        ("normal", (), None, 4),
        ("lognormal", (700.0, 0.8), None, 4),
    ],
)
def test_transforms_are_pinned(method: str, args: tuple[float, ...], expected: list[object] | None, draws: int) -> None:
    s = stream()
    got = [getattr(s, method)(*args) for _ in range(3)]
    shown = [v.hex() if isinstance(v, float) else v for v in got]
    assert shown == (expected if expected is not None else FLOATS[method])
    assert s.draws == draws


FLOATS: dict[str, list[str]] = {
    "exponential": ["0x1.c00508cbfb131p-2", "0x1.2c5a834f12d7ap-2", "0x1.6c484a0e761d9p-1"],
    "normal": ["-0x1.3188b4e30bd21p-2", "-0x1.6e02495d333cdp-2", "-0x1.28b4501dbfe55p+0"],
    "lognormal": ["0x1.13ada6ed7e261p+9", "0x1.06f4de2b31f86p+9", "0x1.14f632542ae48p+8"],
}


def test_shuffle_bits_and_bytes_are_pinned() -> None:
    s = stream()
    items = list(range(10))
    s.shuffle(items)
    assert items == [0, 5, 3, 7, 6, 8, 4, 2, 9, 1]
    assert s.getrandbits(70) == 1013398674749683156515
    assert s.bytes(5).hex() == "2f36211805"
    assert log(3.7).hex() == "0x1.4eeee650ae550p+0"
    assert exp(-1.3).hex() == "0x1.17129308ce281p-2"


# --- derivation ----------------------------------------------------------------------------------------------------


def test_a_stream_depends_on_seed_and_name_alone() -> None:
    forward, backward = Streams(3), Streams(3)
    names = [f"s{i}" for i in range(20)]
    for name in names:
        forward.stream(name).next64()
    firsts = {name: backward.stream(name).next64() for name in reversed(names)}
    again = Streams(3)
    assert {name: again.stream(name).next64() for name in names} == firsts
    assert len(set(firsts.values())) == 20
    assert Streams(4).stream("s0").next64() != firsts["s0"]
    assert forward.stream("s1") is forward.stream("s1")


def test_the_size_of_a_batch_shows_in_no_draw() -> None:
    one, many = stream(), stream()
    one._refill = 1024
    assert [one.next64() for _ in range(5000)] == [many.next64() for _ in range(5000)]
    assert one.draws == many.draws == 5000


def test_draws_are_counted_by_name() -> None:
    streams = Streams(1)
    streams.stream("b").unit()
    streams.stream("a").below(5)
    streams.stream("never")
    streams.stream("a").unit()
    assert list(streams.draws().items()) == [("a", 2), ("b", 1)]


def test_equal_in_a_new_process_under_another_hash_seed() -> None:
    code = "from sim.random import Streams; s = Streams(9).stream('x'); print([s.normal().hex() for _ in range(50)])"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": h},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for h in ("0", "1", "4242")
    }
    assert len(outputs) == 1 and "0x" in outputs.pop()


# --- arithmetic ----------------------------------------------------------------------------------------------------


def ulps(got: float, want: float) -> float:
    return abs(got - want) / math.ulp(want)


def test_log_is_within_one_ulp_of_libm() -> None:
    s = stream("log")
    points = [s.unit() or 0.5 for _ in range(20_000)] + [exp(1400 * s.unit() - 700) for _ in range(20_000)]
    points += [5e-324, 2.2e-308, 1.7976931348623157e308, 2.0, math.e, 1 - 2**-53, 1 + 2**-52]
    assert max(ulps(log(x), math.log(x)) for x in points if x != 1.0) <= 1.0
    assert log(1.0) == 0.0


def test_exp_is_within_one_ulp_of_libm() -> None:
    s = stream("exp")
    points = [1400 * s.unit() - 700 for _ in range(20_000)] + [4 * s.unit() - 2 for _ in range(20_000)]
    points += [709.78, -708.0, 1e-20, -1e-20, 0.5 * math.log(2)]
    assert max(ulps(exp(x), math.exp(x)) for x in points) <= 1.0
    assert exp(0.0) == 1.0 and exp(-800.0) == 0.0 and exp(-math.inf) == 0.0


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_log_refuses(bad: float) -> None:
    with pytest.raises(ValueError, match="must be a finite number above 0"):
        log(bad)


def test_exp_refuses() -> None:
    with pytest.raises(OverflowError, match="exceeds the range"):
        exp(709.8)
    with pytest.raises(ValueError, match="not a number"):
        exp(math.nan)


# --- distributions (fixed seed: these cannot flake) ----------------------------------------------------------------


def test_below_is_uniform_and_in_range() -> None:
    s = stream("below")
    counts: Counter[object] = Counter(s.below(10) for _ in range(100_000))
    assert set(counts) == set(range(10)) and chi2(counts, 10, 100_000) < CHI2_999[9]


def test_below_rejects_where_it_would_be_biased() -> None:
    # With n = 3 * 2**62, plain multiply-and-shift gives the values divisible by 3 half of the mass instead of a third.
    n, s = 3 << 62, stream("biased")
    counts: Counter[object] = Counter(s.below(n) % 3 for _ in range(30_000))
    assert all(abs(v - 10_000) < 300 for v in counts.values()), counts
    assert s.draws > 35_000  # a quarter of the draws is rejected


def test_below_takes_its_whole_range_of_bounds() -> None:
    s = stream()
    assert s.below(1) == 0
    assert 0 <= s.below(1 << 64) < 1 << 64
    for bad in (0, -1, (1 << 64) + 1):
        with pytest.raises(ValueError, match="from 1 to"):
            s.below(bad)


def test_uniform_ns_reaches_both_ends() -> None:
    s = stream("ends")
    assert {s.uniform_ns(-2, 3) for _ in range(500)} == {-2, -1, 0, 1, 2, 3}
    assert s.uniform_ns(5, 5) == 5
    with pytest.raises(ValueError, match="below the lower one"):
        s.uniform_ns(6, 5)


def test_chance_is_exact_at_its_ends_and_takes_one_draw() -> None:
    s = stream("chance")
    assert not any(s.chance(0, 7) for _ in range(1000))
    assert all(s.chance(7, 7) for _ in range(1000))
    hits = sum(s.chance(1, 3) for _ in range(30_000))
    assert abs(hits - 10_000) < 300 and s.draws == 32_000
    with pytest.raises(ValueError, match="0 <= num <= den"):
        s.chance(8, 7)


def test_unit_is_uniform() -> None:
    s = stream("unit")
    values = [s.unit() for _ in range(100_000)]
    assert 0.0 <= min(values) and max(values) < 1.0
    counts: Counter[object] = Counter(int(v * 100) for v in values)
    assert chi2(counts, 100, 100_000) < CHI2_999[99]
    assert all(Fraction(v).denominator <= 2**53 for v in values[:100])


def test_exponential_has_its_mean_variance_and_tail() -> None:
    s = stream("exponential")
    n = 100_000
    values = [s.exponential(2.0) for _ in range(n)]
    assert abs(sum(values) / n - 2.0) < 0.03
    assert abs(sum(v * v for v in values) / n - 8.0) < 0.4
    assert abs(sum(v > 6.0 for v in values) / n - math.exp(-3)) < 0.003
    assert min(values) >= 0.0


def test_normal_has_its_moments_and_tails() -> None:
    s = stream("normal")
    n = 100_000
    values = [s.normal() for _ in range(n)]
    assert abs(sum(values) / n) < 0.013
    assert abs(sum(v * v for v in values) / n - 1.0) < 0.02
    assert abs(sum(v**4 for v in values) / n - 3.0) < 0.15
    assert abs(sum(v > 1.959964 for v in values) / n - 0.025) < 0.002
    # The two values of one polar step must not be correlated.
    assert abs(sum(a * b for a, b in zip(values[::2], values[1::2], strict=True)) / (n / 2)) < 0.02


def test_lognormal_has_its_median_and_spread() -> None:
    s = stream("lognormal")
    values = sorted(s.lognormal(700.0, 0.8) for _ in range(50_001))
    assert abs(values[25_000] / 700.0 - 1.0) < 0.03
    assert abs(math.log(values[42_067] / 700.0) - 0.8) < 0.03  # +1 sigma lies at 84.13%


def test_shuffle_reaches_every_order_equally() -> None:
    s = stream("shuffle")
    counts: Counter[object] = Counter()
    for _ in range(24_000):
        items = [0, 1, 2, 3]
        s.shuffle(items)
        counts[tuple(items)] += 1
    assert chi2(counts, 24, 24_000) < CHI2_999[23]


def test_choice_is_uniform_and_refuses_nothing() -> None:
    s = stream("choice")
    counts: Counter[object] = Counter(s.choice("abcdef") for _ in range(12_000))
    assert chi2(counts, 6, 12_000) < CHI2_999[5]
    with pytest.raises(ValueError, match="empty sequence"):
        s.choice([])


def test_getrandbits_fills_every_bit() -> None:
    s = stream("bits")
    seen_or, seen_and = 0, (1 << 100) - 1
    for _ in range(200):
        value = s.getrandbits(100)
        assert 0 <= value < 1 << 100
        seen_or |= value
        seen_and &= value
    assert seen_or == (1 << 100) - 1 and seen_and == 0
    assert s.getrandbits(0) == 0 and len(s.bytes(13)) == 13 and s.bytes(0) == b""
    with pytest.raises(ValueError, match="must not be negative"):
        s.getrandbits(-1)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        Streams(-1)


def test_a_raw_draw_is_cheap() -> None:
    s = stream("speed")
    per_draw_us = min(timeit.repeat(s.next64, number=100_000, repeat=5)) * 10
    assert per_draw_us < 0.3, f"{per_draw_us:.3f} µs per draw"
