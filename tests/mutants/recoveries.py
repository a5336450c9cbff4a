"""Wrong recoveries."""

from __future__ import annotations

from protocol.errors import Outcome, SeatrialError
from protocol.messages import EngineAddress, ExportManifest, WeightUpdate
from protocol.ports import EngineClient, backend
from protocol.serving.admin import post_update_weights
from protocol.serving.recovery import Recovery
from protocol.training.checkpoint import exports, load_manifest
from tests.mutants.registry import Mutant


class LoadsUnverified(Recovery):
    """Has the newest export loaded without a look at its shards."""

    async def _latest_whole(
        self, readings: dict[str, int], loaded: tuple[str, ExportManifest] | None
    ) -> tuple[str, ExportManifest] | None:
        storage = backend().storage
        published = await exports(storage, self._config.export_prefix)
        if not published:
            return None
        if loaded is not None and loaded[0] == published[0]:
            return loaded
        return published[0], await load_manifest(storage, published[0])


class InstallsUnknownAsDone(Recovery):
    """Takes a weight update of unknown outcome for done, and publishes without a generation."""

    async def _load(self, client: EngineClient, path: str, manifest: ExportManifest) -> None:
        try:
            await post_update_weights(client, WeightUpdate(path, manifest.version), self._admin)
        except SeatrialError as error:
            if error.outcome is Outcome.NOT_DONE:
                raise
        self._step(client.address, "loaded", path)

    async def _validate(self, client: EngineClient, version: str, weight_hash: str) -> None:
        return


class RecoversTwice(Recovery):
    """Begins another recovery of a replica that is being recovered."""

    async def recover(self, address: EngineAddress, why: str) -> bool:
        backend().background(self._again(address, why), name=f"recovery-{address.name}")
        return True

    async def _again(self, address: EngineAddress, why: str) -> None:
        backend().emit("recovery.began", replica=address.name, replica_inc=address.incarnation, why=why)
        try:
            await self._replace(address, why)
        except SeatrialError as error:
            self._step(address, "retry", str(error))


class DoesNotFence(Recovery):
    """Starts the new process without ending the old one."""

    async def _end_process(self, name: str) -> None:
        return


class PublishesBeforeLoading(Recovery):
    """Routes to the new process as soon as it is ready, and loads its weights afterwards."""

    async def _load_latest(self, client: EngineClient) -> tuple[str, str]:
        await self._gateway.call("add_replica", client.address)
        return await super()._load_latest(client)


class PublishesBeforeReady(Recovery):
    """Routes to the new process before it has started."""

    async def _wait_ready(self, client: EngineClient) -> None:
        await self._gateway.call("add_replica", client.address)
        await super()._wait_ready(client)


def _recovery(name: str, source: str, cls: type, scenario: str, check: str) -> Mutant:
    return Mutant(name, source, "recovery", Recovery, cls, scenario, check)


MUTANTS = (
    _recovery("torn export loaded unverified", "H-10", LoadsUnverified, "torn", "loaded_export_is_whole"),
    _recovery("unknown installed as done", "DESIGN outcomes", InstallsUnknownAsDone, "lost_update", "occurs"),
    _recovery("two recoveries at once", "scaling 9", RecoversTwice, "restart_with_export", "occurs"),
    _recovery("no fence", "scaling 3", DoesNotFence, "wedged", "reached"),
    _recovery("published before its weights", "scaling 4", PublishesBeforeLoading, "restart_serves_export", "occurs"),
    _recovery("route before health", "scaling 4", PublishesBeforeReady, "wedged", "no_route_before_health"),
)
