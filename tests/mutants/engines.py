"""Wrong engines, put in place of the simulated one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sim.engine import SimEngine
from sim.engine_types import EngineResult
from tests.mutants.registry import Mutant

_EVERY = 20


class OldWeightsUnderNewLabel(SimEngine):
    """Answers a weight update with success, takes the new label, and keeps the old weights."""

    def load_weights(self, version: str | None, size_bytes: int, weight_hash: str, **options: Any) -> None:
        super().load_weights(version, size_bytes, self.weight_hash, **options)


class RunsTwice(SimEngine):
    """Runs some requests a second time after it has answered them."""

    _submitted = 0

    def submit(self, rid: str, *args: Any, done: Callable[[EngineResult], None] | None, **options: Any) -> None:
        self._submitted += 1
        if self._submitted % _EVERY:
            super().submit(rid, *args, done=done, **options)
            return

        def answered(result: EngineResult) -> None:
            if done is not None:
                done(result)
            self.after(1_000_000, lambda: SimEngine.submit(self, rid, *args, done=None, **options))

        super().submit(rid, *args, done=answered, **options)


class MiscountsTokens(SimEngine):
    """Answers some requests with a token less than it has generated."""

    _submitted = 0

    def submit(self, rid: str, *args: Any, done: Callable[[EngineResult], None] | None, **options: Any) -> None:
        self._submitted += 1
        if self._submitted % _EVERY or done is None:
            super().submit(rid, *args, done=done, **options)
            return
        tell = done

        def answered(result: EngineResult) -> None:
            tell(result._replace(completion_tokens=max(0, result.completion_tokens - 1)))

        super().submit(rid, *args, done=answered, **options)


class ForgetsToAnswer(SimEngine):
    """Finishes some requests and never answers them."""

    _submitted = 0

    def submit(self, rid: str, *args: Any, done: Callable[[EngineResult], None] | None, **options: Any) -> None:
        self._submitted += 1
        super().submit(rid, *args, done=done if self._submitted % _EVERY else None, **options)


class KeepsOldPrefixes(SimEngine):
    """Does not flush its prefix cache when its weights change."""

    def load_weights(self, version: str | None, size_bytes: int, weight_hash: str, **options: Any) -> None:
        options["flush_cache"] = False
        super().load_weights(version, size_bytes, weight_hash, **options)


def _engine(name: str, source: str, cls: type, scenario: str, check: str) -> Mutant:
    return Mutant(name, source, "sim.engine_process:SimEngine", SimEngine, cls, scenario, check)


MUTANTS = (
    _engine("old weights under the new label", "W-I2", OldWeightsUnderNewLabel, "lost_update", "one_version_one_hash"),
    _engine("a request run twice", "DESIGN outcomes", RunsTwice, "once_only", "nothing_twice"),
    _engine("tokens miscounted", "scaling 5.1", MiscountsTokens, "quiet", "answer_is_the_engines"),
    _engine("requests never answered", "engines 3", ForgetsToAnswer, "impatient", "unexplained_failures"),
)
