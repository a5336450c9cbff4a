"""Managers of the user's own that do not say everything: what is missing is no proof, and no fault either."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from protocol.scaling.contract import Progress
from protocol.scaling.lifecycle import ScaleManager
from tests.protocol.scaling.world import ScalingWorld, run, service


class _Nameless(ScaleManager):
    """Never says which rank its victim has."""

    confirmed = 0

    async def progress(self, operation: str) -> Progress | None:
        progress = await super().progress(operation)
        if progress is None or progress.victim is None:
            return progress
        return dataclasses.replace(progress, victim=dataclasses.replace(progress.victim, rank=None))

    async def confirm_drained(self, operation: str, proof: Any) -> bool:
        self.confirmed += 1
        return await super().confirm_drained(operation, proof)


def test_a_victim_without_a_rank_is_neither_confirmed_nor_reconciled() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world, manager=_Nameless)
        await s.scaled("scale_out", 2)
        into = await s.scaled("scale_in", 1, timeout_secs=5.0)
        assert (into["status"], into["cleanup_required"]) == ("FAILED", True)
        assert s.manager.target.confirmed == 0 and s.engine("engine-1").alive
        refused = await s.api.reconcile("scale_in", into["request_id"])
        assert (refused.status, refused.body["error"]) == (503, "VICTIM_UNKNOWN") and "rank" in refused.body["detail"]
        assert s.engine("engine-1").alive
        s.manager.target.__class__ = ScaleManager
        clean = await s.api.reconcile("scale_in", into["request_id"])
        assert (clean.status, clean.body["cleanup_required"]) == (200, False)

    run(body)


def test_a_confirmation_without_a_rank_is_ignored() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        await s.scaled("scale_out", 2)
        busy = [s.generate(40.0) for _ in range(2)]  # so that the drain takes its time
        operation = await s.admitted("scale_in", 1)
        while (seen := await s.manager.progress(operation)) is None or seen.victim is None:
            await asyncio.sleep(0.1)
        nameless = dataclasses.replace(seen.victim, rank=None)
        assert await s.manager.confirm_drained(operation, nameless) is False
        assert (await s.manager.progress(operation)).phase == "DRAINING"
        for call in busy:
            await call

    run(body)


class _Flagless(ScaleManager):
    async def progress(self, operation: str) -> Progress | None:
        progress = await super().progress(operation)
        return None if progress is None else dataclasses.replace(progress, cleanup_required=None)


def test_a_manager_that_knows_no_flag_for_the_cleanup_is_clean_and_one_that_says_nothing_is_not() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world, manager=_Flagless)
        out = await s.scaled("scale_out", 2)
        assert (out["status"], out["cleanup_required"]) == ("ACTIVE", False)
        busy = [s.generate(20.0) for _ in range(2)]  # so that the drain is not over at once
        operation = await s.admitted("scale_in", 1, timeout_secs=5.0)
        await asyncio.sleep(1)
        s.manager.dead = True
        into = await s.ended("scale_in", operation)
        assert (into["status"], into["cleanup_required"]) == ("FAILED", True)
        for call in busy:
            await call

    run(body)
