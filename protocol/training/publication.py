"""A publication: the weights of a model step are exported, put into every backend behind the barrier, and served.

    export -> prepare_pause -> update **all** backends -> resume_requests

How the weights get there is the transport's: each backend reads the export (*disk*), or training ranks bring them
(`protocol.training.weight_sync`). The export is made in any case, for whoever is started later.

Weights change only between the two calls of the controller, on backends of which every gate is drained. What a backend
serves is asked of it, never concluded from an answer: an update may be made and its answer lost, or be refused for the
flush after it (engines.md 3). A backend that does not serve the version fails the publication by name, or is fenced:
left behind a closed gate, by name, while the others go on (`protocol.serving.controller`; serving.md 9).
"""

from __future__ import annotations

import asyncio
from typing import Any

from protocol.config import AdminConfig
from protocol.errors import ActorDied, BarrierError, HttpError, NetworkError, NoSuchActor, Outcome, SeatrialError
from protocol.messages import EngineAddress, ExportManifest, WeightUpdate
from protocol.ports import ActorHandle, EngineClient, backend
from protocol.serving.admin import ask_to_load, reported_weights
from protocol.serving.barrier import BarrierView, everywhere, refuse_older
from protocol.serving.peer import Peer
from protocol.training.checkpoint import load_manifest
from protocol.training.weight_sync import WeightSync


class WeightPublisher:
    """Publishes versions, one at a time. An actor.

    Args:
        admin: time-outs of the weight update, and how many backends at once.
        controller: handle of the RolloutController.
        exporter: handle of the Exporter.
        sync: brings the weights from training ranks; None: each backend reads the export.
        flush: whether backends that read the export empty their prefix caches with it.
        fence: whether a backend that an update does not get into is left behind, or fails the publication.
    """

    def __init__(
        self,
        admin: AdminConfig,
        controller: ActorHandle,
        exporter: ActorHandle,
        sync: WeightSync | None = None,
        flush: bool = True,
        fence: bool = False,
    ) -> None:
        self._admin = admin
        self._controller = controller
        self._exporter = Peer(exporter, None)  # as long as it takes: it has a deadline of its own
        self._sync = sync
        self._flush = flush
        self._fence = fence
        self._newest: int | None = None
        """The newest version that gates may have; None: this incarnation has not asked yet."""
        self._exported: dict[int, str] = {}
        self._loaded: dict[tuple[str, int], str] = {}
        """Path of the export that a backend was last seen to serve; a label alone says nothing of the weights."""
        self._one_at_a_time = asyncio.Lock()

    async def publish(self, model_step: int) -> None:
        """Have every backend serve the weights of ``model_step``, and turns be granted with it.

        Again after a failure it goes on where the barrier is: what is done already is not done again.

        Raises:
            GatePoisoned: *not done*, and no publication will be.
            ActorDied: the controller or the exporter has died; what comes after it is asked the next time.
            BarrierError, StorageError: the barrier stays; nothing is open that serves another version. *Not done* for
                a version that is older than an installed one: nothing has changed, nor is anything written, and a newer
                one may be published.
        """
        async with self._one_at_a_time:
            # Before anything: an older export would be what the next recovery loads.
            newest = await self._published()
            refuse_older(model_step, newest)
            path = await self._export(model_step)
            manifest = await load_manifest(backend().storage, path)
            barrier: BarrierView | None = await self._ask("barrier")
            if barrier is not None:
                refuse_older(model_step, barrier.newest)
            if barrier is None or barrier.stage == "sealing":
                await self._ask("prepare_pause", model_step=model_step)
            if barrier is None or barrier.stage != "resuming":
                # Once the reopening has begun, gates may be open: weights are in everywhere, and stay what they are.
                await self._update(path, manifest)
            self._newest = max(newest, model_step)
            await self._ask("resume_requests", model_step)

    async def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call the controller as long as it takes: its deadlines bound that.

        One that has died is found again by name. A call that was never sent is made there at once. Of any other nobody
        knows what was done, and it fails; the next publication asks the one that lives, which begins another epoch over
        all entrypoints.
        """
        try:
            return await getattr(self._controller, method)(*args, **kwargs)
        except ActorDied as death:
            try:
                self._controller = await backend().lookup(self._controller.name)
            except NoSuchActor:
                raise death from None  # nobody has restarted it yet
            if death.outcome is not Outcome.NOT_DONE:
                raise
        return await getattr(self._controller, method)(*args, **kwargs)

    async def _published(self) -> int:
        """The newest version that gates may have, -1 without any. One that was restarted does not know, and asks."""
        if self._newest is None:
            first = backend().me.incarnation <= 1  # nobody has published before it
            self._newest = -1 if first else int(await self._ask("published"))
        return self._newest

    async def _export(self, model_step: int) -> str:
        path = self._exported.get(model_step)
        if path is None:
            path = str(await self._exporter.call("export", str(model_step)))
            self._exported = {model_step: path}
        return path

    async def _update(self, path: str, manifest: ExportManifest) -> None:
        """Raises BarrierError when any backend does not serve the version afterwards, or there is none at all."""
        # Asked for each publication: a recovered backend has another address (W-1).
        targets: tuple[EngineAddress, ...] = await self._ask("targets")
        if not targets:
            raise BarrierError("no backend to update", outcome=Outcome.NOT_DONE)
        if self._sync is not None:
            await self._by_ranks(self._sync, targets, manifest)
            return
        slots = asyncio.Semaphore(self._admin.fan_out)
        failed: dict[str, SeatrialError] = {}

        async def one(address: EngineAddress) -> None:
            try:
                async with slots:
                    await self._load(backend().engines.client(address), path, manifest)
            except SeatrialError as error:
                failed[address.name] = error
                raise

        try:
            await everywhere("updated", targets, one)
        except BarrierError:
            if not self._fence or len(failed) == len(targets):
                raise
            await self._ask("fence", tuple((name, error.message) for name, error in sorted(failed.items())))

    async def _by_ranks(self, sync: WeightSync, targets: tuple[EngineAddress, ...], manifest: ExportManifest) -> None:
        """The update by training ranks. A label alone is not believed: every backend is asked what it serves."""
        inactive: tuple[EngineAddress, ...] = await self._ask("inactive")
        failed = {failure.name: failure.why for failure in await sync.update(manifest.version, targets, inactive)}
        slots = asyncio.Semaphore(self._admin.fan_out)

        async def one(address: EngineAddress) -> None:
            async with slots:
                if address.name not in failed and not await self._serves(backend().engines.client(address), manifest):
                    failed[address.name] = f"does not serve {manifest.version!r} after its update"

        await asyncio.gather(*(one(address) for address in targets))
        if not failed:
            return
        named = tuple(sorted(failed.items()))
        if not self._fence or len(failed) == len(targets):
            first = "; ".join(f"{name}: {why}" for name, why in named[:4])
            raise BarrierError(f"updated: {len(failed)} of {len(targets)} failed, {first}", failed=len(failed))
        await self._ask("fence", named)

    async def _load(self, client: EngineClient, path: str, manifest: ExportManifest) -> None:
        backend_id = (client.address.name, client.address.incarnation)
        if self._loaded.get(backend_id) == path and await self._serves(client, manifest):
            return  # by an earlier try
        refused, failure = await ask_to_load(client, WeightUpdate(path, manifest.version, self._flush), self._admin)
        if refused:
            # Perhaps for the flush, and then /model_info has the label from before, which may be this very one.
            raise BarrierError(f"{client.address.name} answered its update to {manifest.version!r} with {refused}")
        detail = "answered" if failure is None else f"{type(failure).__name__}: {failure.message}"
        try:
            async with asyncio.timeout(self._admin.reconcile_timeout_s):
                while not await self._serves(client, manifest):
                    await asyncio.sleep(self._admin.reconcile_interval_s)
        except TimeoutError:
            raise BarrierError(
                f"{client.address.name} does not serve {manifest.version!r} after its update ({detail})"
            ) from None
        self._loaded[backend_id] = path

    async def _serves(self, client: EngineClient, manifest: ExportManifest) -> bool:
        """Whether a backend says so; one that reports no hash (SGLang) is judged by its version alone."""
        timeout_s = self._admin.connect_timeout_s
        try:
            served = await reported_weights(client, connect_timeout_s=timeout_s, read_timeout_s=timeout_s)
        except (NetworkError, HttpError):
            return False
        return served[0] == manifest.version and served[1] in ("", manifest.weight_hash)
