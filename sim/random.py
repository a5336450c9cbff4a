"""Named streams of randomness, the same on every machine.

A stream is derived from (seed, name) alone, so that a new consumer of randomness never shifts the draws of another.
The raw source is NumPy's PCG64, whose ``random_raw`` is part of NumPy's stream-compatibility guarantee; everything
above the raw integers is arithmetic of our own, because library distributions change between releases and libm's
``log`` and ``exp`` between machines (DESIGN.md, "Bit-exact"). Only ``+ - * /``, ``math.sqrt``, ``math.frexp`` and
``math.ldexp`` are used on floats: IEEE 754 fixes their results to the last bit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from itertools import count
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

_MASK = (1 << 64) - 1
_SPAN = 1 << 64
_UNIT = 2.0**-53
_SECOND_NS = 1_000_000_000

# Coefficients of fdlibm (Sun Microsystems, freely redistributable): log within 1 ulp, exp within 1 ulp.
_LN2_HI = 6.93147180369123816490e-01
_LN2_LO = 1.90821492927058770002e-10
_INV_LN2 = 1.44269504088896338700e00
_SQRT_HALF = 0.70710678118654752440


def log(x: float) -> float:
    """Natural logarithm of a finite ``x`` > 0, bit-equal on every machine, within 1 ulp.

    Raises:
        ValueError: ``x`` is not a finite positive number.
    """
    if not 0.0 < x < math.inf:
        raise ValueError(f"log of {x!r}: it must be a finite number above 0")
    m, k = math.frexp(x)
    if m < _SQRT_HALF:
        m += m
        k -= 1
    f = m - 1.0
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    odd = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01))
    even = z * (
        6.666666666666735130e-01
        + w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01))
    )
    half = 0.5 * f * f
    return k * _LN2_HI - ((half - (s * (half + (odd + even)) + k * _LN2_LO)) - f)


def exp(x: float) -> float:
    """e to the power ``x``, bit-equal on every machine, within 1 ulp; 0.0 below the range, as in libm.

    Raises:
        OverflowError: the result exceeds the range of a float.
        ValueError: ``x`` is not a number.
    """
    if x > 709.782712893384:
        raise OverflowError(f"exp({x!r}) exceeds the range of a float")
    if x < -745.1332191019411:
        return 0.0
    if x != x:
        raise ValueError("exp of a value that is not a number")
    k = int(x * _INV_LN2 + (0.5 if x >= 0.0 else -0.5))
    hi = x - k * _LN2_HI
    lo = k * _LN2_LO
    r = hi - lo
    t = r * r
    c = r - t * (
        1.66666666666666019037e-01
        + t
        * (
            -2.77777777770155933842e-03
            + t * (6.61375632143793436117e-05 + t * (-1.65339022054652515390e-06 + t * 4.13813679705723846039e-08))
        )
    )
    if k == 0:
        return 1.0 - ((r * c) / (c - 2.0) - r)
    return math.ldexp(1.0 - ((lo - (r * c) / (2.0 - c)) - hi), k)


class Stream:
    """One stream of raw 64-bit draws and the transforms that the simulated world needs.

    Args:
        key: 128-bit integer that alone fixes every draw.
        name: what the stream is for; used in messages and digests only.
    """

    __slots__ = ("_buffer", "_key", "_raw", "_refill", "_refilled", "_spare", "name")

    def __init__(self, key: int, name: str) -> None:
        self.name = name
        self._key = key
        self._raw: Callable[[int], Any] | None = None  # made at the first draw, for most streams are never drawn from
        self._buffer: list[int] = []
        # Batches grow: most streams of a small run are drawn a few times, a few streams a million times.
        self._refill = 8
        self._refilled = 0
        self._spare: float | None = None

    @property
    def draws(self) -> int:
        """Raw draws taken so far (part of the rolling digest)."""
        return self._refilled - len(self._buffer)

    def _more(self) -> list[int]:
        raw = self._raw
        if raw is None:
            raw = self._raw = np.random.PCG64(self._key).random_raw
        batch: list[int] = raw(self._refill).tolist()
        batch.reverse()  # drawn from the end, in the order of the source, whatever the size of the batch
        self._buffer = batch
        self._refilled += self._refill
        if self._refill < 1024:
            self._refill *= 2
        return batch

    def next64(self) -> int:
        """A raw draw: an integer in [0, 2**64)."""
        return (self._buffer or self._more()).pop()

    def unit(self) -> float:
        """A float in [0, 1), a multiple of 2**-53."""
        return ((self._buffer or self._more()).pop() >> 11) * _UNIT

    def numbered(self) -> Iterator[int]:
        """Raw draws for ever, each made unique by a count from 0 in 64 bits below it."""
        for number in count():
            yield ((self._buffer or self._more()).pop() << 64) | number

    def spread_ns(self, delay_ns: int) -> int:
        """``(delay_ns << below(8)) // 4 + below(1000)``: from a quarter to 32 times, in one step, for every message."""
        spread = (delay_ns << ((self._buffer or self._more()).pop() >> 61)) >> 2  # below(8) rejects nothing
        m = (self._buffer or self._more()).pop() * 1000
        if m & _MASK < 1000:
            while m & _MASK < _SPAN % 1000:
                m = self.next64() * 1000
        return spread + (m >> 64)

    def below(self, n: int) -> int:
        """An integer in [0, n), without bias. ``n`` from 1 to 2**64.

        Raises:
            ValueError: ``n`` is outside of that range.
        """
        if not 0 < n <= _SPAN:
            raise ValueError(f"below({n}): the bound must be from 1 to 2**64")
        m = (self._buffer or self._more()).pop() * n
        if m & _MASK < n:  # Lemire's rejection: only here can a value be over-represented
            threshold = (_SPAN - n) % n
            while m & _MASK < threshold:
                m = self.next64() * n
        return m >> 64

    def uniform_ns(self, lo: int, hi: int) -> int:
        """An integer in [lo, hi], both inclusive, without bias. Used for durations in nanoseconds.

        Raises:
            ValueError: ``hi`` < ``lo``.
        """
        if hi < lo:
            raise ValueError(f"uniform_ns({lo}, {hi}): the upper bound is below the lower one")
        return lo + self.below(hi - lo + 1)

    def around_ns(self, duration_ns: int) -> int:
        """A duration around a usual one: from a quarter to four times of it below a second, else from half to twice.

        Each octave with the same probability, and within it each nanosecond: as often shorter than usual as longer.
        """
        octaves = 2 if duration_ns < _SECOND_NS else 1
        low = (duration_ns << self.below(2 * octaves)) >> octaves
        return self.uniform_ns(low, 2 * low)

    def chance(self, num: int, den: int) -> bool:
        """True with probability num/den, exactly. One draw even where the answer is certain.

        Raises:
            ValueError: not 0 <= num <= den, or den outside of 1 to 2**64.
        """
        if not 0 <= num <= den:
            raise ValueError(f"chance({num}, {den}): needs 0 <= num <= den")
        return self.below(den) < num

    def exponential(self, mean: float) -> float:
        """A draw of the exponential distribution with this mean."""
        return -mean * log(1.0 - self.unit())

    def normal(self) -> float:
        """A draw of the standard normal distribution (Marsaglia's polar method: log and sqrt only)."""
        spare = self._spare
        if spare is not None:
            self._spare = None
            return spare
        while True:
            u = 2.0 * self.unit() - 1.0
            v = 2.0 * self.unit() - 1.0
            q = u * u + v * v
            if 0.0 < q < 1.0:
                scale = math.sqrt(-2.0 * log(q) / q)
                self._spare = v * scale
                return u * scale

    def lognormal(self, median: float, sigma: float) -> float:
        """median * e**(sigma * N(0, 1)): ``median`` in the unit of the result, ``sigma`` in log space."""
        return median * exp(sigma * self.normal())

    def choice(self, items: Sequence[T]) -> T:
        """One of the items, each with the same probability.

        Raises:
            ValueError: there is none.
        """
        if not items:
            raise ValueError(f"choice from an empty sequence (stream {self.name!r})")
        return items[self.below(len(items))]

    def shuffle(self, items: MutableSequence[T]) -> None:
        """Permute in place, every order with the same probability."""
        for i in range(len(items) - 1, 0, -1):
            j = self.below(i + 1)
            items[i], items[j] = items[j], items[i]

    def getrandbits(self, k: int) -> int:
        """An integer of ``k`` random bits (0 for ``k`` = 0).

        Raises:
            ValueError: ``k`` is negative.
        """
        if k < 0:
            raise ValueError(f"getrandbits({k}): the number of bits must not be negative")
        value = 0
        for _ in range((k + 63) >> 6):
            value = value << 64 | self.next64()
        return value >> (-k & 63)

    def bytes(self, n: int) -> bytes:
        """``n`` random bytes."""
        return self.getrandbits(8 * n).to_bytes(n, "little")


class Streams:
    """The named streams of one run.

    Args:
        seed: the run's seed, any non-negative integer.

    Raises:
        ValueError: the seed is negative.
    """

    def __init__(self, seed: int) -> None:
        if seed < 0:
            raise ValueError(f"seed {seed}: a seed must not be negative")
        self.seed = seed
        self._streams: dict[str, Stream] = {}

    def stream(self, name: str) -> Stream:
        """The stream of that name: derived from (seed, name), whatever was asked for before; one object a name."""
        found = self._streams.get(name)
        if found is None:
            digest = hashlib.sha256(f"seatrial stream\0{self.seed}\0{name}".encode()).digest()
            found = self._streams[name] = Stream(int.from_bytes(digest[:16], "big"), name)
        return found

    def draws(self) -> dict[str, int]:
        """Raw draws per stream, by name, sorted; streams that were never drawn from are left out."""
        return {name: stream.draws for name, stream in sorted(self._streams.items()) if stream.draws}
