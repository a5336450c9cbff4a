"""How the pace of an engine wanders: a factor on the costs of its iterations that is drawn anew every period.

A machine is not equally fast at all times: on genuine SGLang, what requests take beyond the model is alike for requests
that overlap on one engine, less alike the further they are apart, and hardly alike on two engines (docs/compare.md).
The factor is lognormal with mean 1; the profile gives its standard deviation (``pace_spread``) and how long a draw
holds (``pace_period``). Without a spread nothing is drawn and nothing of this exists.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sim.engine_cost import EngineProfile

if TYPE_CHECKING:
    from sim.random import Stream

_USUAL_PPM = 1_000_000
_LEAST_PPM = 1_000


class Pace:
    """The factor in force. It holds until the first boundary not before ``until_ns``, which is never skipped.

    Periods begin at multiples of their length, and one in which no iteration begins has no draw: an idle engine sets no
    timer and draws nothing.
    """

    __slots__ = ("_median", "_period_ns", "_sigma", "_stream", "ppm", "until_ns")

    def __init__(self, profile: EngineProfile, stream: Stream) -> None:
        from sim.random import log  # brings numpy, which an emulated engine does without unless its pace wanders

        spread = profile.pace_spread_ppm / _USUAL_PPM
        self._sigma = math.sqrt(log(1.0 + spread * spread))
        self._median = _USUAL_PPM / math.sqrt(1.0 + spread * spread)  # so that the mean is the usual pace
        self._period_ns = profile.pace_period_ns
        self._stream = stream
        self.ppm = _USUAL_PPM
        self.until_ns = 0

    def draw(self, now_ns: int) -> None:
        """Begin the period of this instant."""
        self.ppm = max(_LEAST_PPM, round(self._stream.lognormal(self._median, self._sigma)))
        self.until_ns = (now_ns // self._period_ns + 1) * self._period_ns


def pace_of(profile: EngineProfile, stream: Stream | None, name: str) -> Pace | None:
    """The pace of an engine of that name; None where it does not wander.

    Args:
        stream: of this engine alone; None: one that profile and name fix, as on the clock of a machine.
    """
    if not profile.pace_spread_ppm:
        return None
    if stream is None:
        from sim.random import Streams

        stream = Streams(0).stream(pace_stream(profile, name))
    return Pace(profile, stream)


def pace_stream(profile: EngineProfile, name: str) -> str:
    """Name of the stream of an engine's pace. It has the profile's name in it: equal numbers under another name are
    another draw of the same noise, with everything else of the run as it was."""
    return f"engine.pace/{profile.name}/{name}"
