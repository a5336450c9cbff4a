"""Wrong health probers."""

from __future__ import annotations

from protocol.errors import NetworkError, ReadTimeout
from protocol.serving.health import HealthProber, _Progress, _Watched
from tests.mutants.registry import Mutant


class TimeoutIsHealthy(HealthProber):
    """Takes a probe that timed out for a healthy one: busy, surely."""

    async def _ready(self, watched: _Watched) -> tuple[str, bool]:
        why, refused = await super()._ready(watched)
        return ("", False) if why == ReadTimeout.__name__ else (why, refused)


class BlindToWedges(HealthProber):
    """Believes /ready and never looks for progress."""

    async def _check_stall(self, watched: _Watched) -> None:
        return

    async def _generates(self, watched: _Watched) -> bool | None:
        return True


class TakesIdleForWedged(HealthProber):
    """Takes an engine that has nothing to do for one that gets nothing done: its answers were lost on the way."""

    async def _progress(self, watched: _Watched) -> _Progress | None:
        seen = await super()._progress(watched)
        return None if seen is None else seen._replace(idle=False)


class ProbesByGenerating(HealthProber):
    """Uses /health_generate, which takes a second at least, as the regular probe, with a time-out of a second."""

    async def _ready(self, watched: _Watched) -> tuple[str, bool]:
        timeout_s = self._config.probe_timeout_s
        try:
            status, _ = await watched.client.get(
                "/health_generate", connect_timeout_s=timeout_s, read_timeout_s=timeout_s
            )
        except NetworkError as error:
            return type(error).__name__, False
        return ("" if status == 200 else f"/health_generate {status}"), False


class ReplacesAtTheFirstFailure(HealthProber):
    """Has a replica replaced as soon as one probe failed."""

    async def _failed(self, watched: _Watched, why: str, refused: bool) -> None:
        if watched.healthy:
            await self._take_out(watched, why)
        await self._report(watched, why)


def _prober(name: str, source: str, cls: type, scenario: str, check: str) -> Mutant:
    return Mutant(name, source, "health", HealthProber, cls, scenario, check)


MUTANTS = (
    _prober("time-out taken for healthy", "scaling 9", TimeoutIsHealthy, "stopped", "reached"),
    _prober("blind to wedges", "M39", BlindToWedges, "wedged", "reached"),
    _prober("idle taken for wedged", "run sglang-cpu", TakesIdleForWedged, "answers_lost", "occurs"),
    _prober("probes by generating", "engines 3", ProbesByGenerating, "quiet", "answered_fraction"),
    _prober("replaces at the first failure", "scaling 9", ReplacesAtTheFirstFailure, "stopped_for_a_moment", "occurs"),
)
