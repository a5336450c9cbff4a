"""Who falls for what SGLang does unasked (engines.md 3), and the situations in which that shows."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

from protocol.errors import SeatrialError
from protocol.messages import ExportManifest, GenerateRequest, GenerateResult, WeightUpdate
from protocol.ports import EngineClient, backend
from protocol.serving.admin import post_update_weights
from protocol.serving.entrypoint import Entrypoint
from protocol.serving.health import HealthProber
from protocol.serving.recovery import Recovery
from tests.mutants.registry import Mutant

_SOON_S = 5.0
_LATE_S = 60.0
_BUDGET_S = 0.02


class MeetsAPause(Recovery):
    """Right. While its first new process is at work on something, an operator pauses that process in place."""

    paused = False

    async def _load_latest(self, client: EngineClient) -> tuple[str, str]:
        if not self.paused:
            self.paused = True
            backend().background(self._at_work(client), name="at-work")
            await asyncio.sleep(0.2)
            await client.post(
                "/pause_generation", {"mode": "in_place"}, connect_timeout_s=_SOON_S, read_timeout_s=_SOON_S
            )
        return await super()._load_latest(client)

    async def _at_work(self, client: EngineClient) -> None:
        with contextlib.suppress(SeatrialError):  # the process may not live so long
            request = GenerateRequest(backend().new_id("probe"), 64, 300)
            await client.generate(request, connect_timeout_s=_SOON_S, read_timeout_s=_LATE_S)

    async def _validate(self, client: EngineClient, version: str, weight_hash: str) -> None:
        await client.post("/continue_generation", {}, connect_timeout_s=_SOON_S, read_timeout_s=_SOON_S)
        await super()._validate(client, version, weight_hash)


class PutsTheLabelRight(MeetsAPause):
    """After an update that was refused for its flush it puts the label right, and goes on."""

    async def _load(self, client: EngineClient, path: str, manifest: ExportManifest) -> None:
        reply = await post_update_weights(client, WeightUpdate(path, manifest.version), self._admin)
        if not reply.success:
            body = {"new_version": manifest.version, "abort_all_requests": False}
            await client.post("/update_weight_version", body, connect_timeout_s=_SOON_S, read_timeout_s=_SOON_S)
        self._step(client.address, "loaded", path)


class GivesBudgets(Entrypoint):
    """Right. A turn of every fourth session that takes too long is ended by an abort of its request."""

    def named(self, request: GenerateRequest) -> GenerateRequest:
        return request

    async def _forward(self, request: GenerateRequest) -> GenerateResult:
        request = self.named(request)
        forward = asyncio.get_running_loop().create_task(super()._forward(request), name=f"of-{request.request_id}")
        done, _ = await asyncio.wait([forward], timeout=_BUDGET_S)
        if not done and number_of(request) % 4 == 1:
            client = await self._replica()
            await client.post(
                "/abort_request", {"rid": request.request_id}, connect_timeout_s=_SOON_S, read_timeout_s=_SOON_S
            )
        return await forward


def number_of(request: GenerateRequest) -> int:
    """The number of a request's session."""
    return int(request.session_id.rpartition("-")[2])


class NumbersWithoutWidth(GivesBudgets):
    """Its request ids are numbers without a fixed width, so that some begin with others."""

    def named(self, request: GenerateRequest) -> GenerateRequest:
        return dataclasses.replace(request, request_id=f"session-{number_of(request)}")


class AsksReadyAlone(HealthProber):
    """Asks /ready alone, which says 200 after a SIGTERM, too."""

    async def _look_for_leaving(self) -> None:
        return


MUTANTS = (
    Mutant(
        "label put right after a refused flush", "engines 3", "recovery", MeetsAPause, PutsTheLabelRight,
        "paused_while_it_loads", "nothing_served_from_an_old_cache",
    ),
    Mutant(
        "request ids that begin with others", "engines 3", "entrypoint", GivesBudgets, NumbersWithoutWidth,
        "budgets", "abort_ends_the_one_asked",
    ),
    Mutant(
        "blind to a SIGTERM", "engines 3", "health", HealthProber, AsksReadyAlone,
        "told_to_leave", "nothing_to_a_leaving_engine",
    ),
)  # fmt: skip
