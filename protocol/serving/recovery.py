"""Recovery: a dead or wedged replica is replaced by a new process that serves the latest whole export.

The order is the point (scaling.md 3, 4 and 9; serving.md 9). Nothing is skipped, and nothing of unknown outcome counts
as done:

1. close admission at the gateway for the old incarnation; health cannot readmit it any more;
2. end the old process and see it gone. A stopped process may continue at any time: two must never serve one name;
3. launch under the same name (incarnation + 1), wait for /ready;
4. find the latest export that is whole, every shard checked; have the engine load it;
5. believe not the answer of that POST but what the engine says that it serves;
6. generate some tokens and look at the version and hash that computed them;
7. publish at the gateway.

One replica has one recovery at a time; a report of a replica that is being recovered, or is no member any more,
changes nothing. Every wait is bounded.
"""

from __future__ import annotations

import asyncio
import dataclasses

from protocol.config import AdminConfig, RecoveryConfig
from protocol.errors import CorruptExport, HttpError, NetworkError, Outcome, SeatrialError, SpawnFailed
from protocol.messages import EngineAddress, ExportManifest, GenerateRequest, WeightUpdate
from protocol.ports import ActorHandle, EngineClient, EngineSpec, backend
from protocol.scaling.contract import RecoveryLeave
from protocol.serving.admin import ask_to_load, reported_weights
from protocol.serving.peer import PEER_LOST, Peer
from protocol.training.checkpoint import exports, verify_export

_PROMPT_TOKENS = 16


class Recovery:
    """Replaces replicas. An actor.

    Args:
        config: attempts, deadlines, where the exports are.
        admin: time-outs and attempts of the weight update.
        gateway: handle of the Gateway.
        spec: how a replica is started; its ``weights_path`` is not used, the latest export is.
        homes: (replica, node) pairs; a replica without one, or whose node is gone, is started on any node.
        exporter: handle of the Exporter, asked to write a broken export again; None when nobody can.
        owner: handle of the ScaleManager, which says whether a replica may be started again, and in which placement
            group; None where replicas are not scaled.
    """

    def __init__(
        self,
        config: RecoveryConfig,
        admin: AdminConfig,
        gateway: ActorHandle,
        spec: EngineSpec,
        homes: tuple[tuple[str, str], ...] = (),
        exporter: ActorHandle | None = None,
        owner: ActorHandle | None = None,
    ) -> None:
        self._config = config
        self._admin = admin
        self._gateway = Peer(gateway, config.call_timeout_s)
        self._spec = dataclasses.replace(spec, weights_path="")
        self._homes = dict(homes)
        self._exporter = None if exporter is None else Peer(exporter, config.repair_timeout_s)
        self._owner = None if owner is None else Peer(owner, config.call_timeout_s)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(config.max_concurrent)

    async def stop(self) -> None:
        for task in tuple(self._running.values()):
            task.cancel()

    async def recover(self, address: EngineAddress, why: str) -> bool:
        """Have a replica replaced. Returns at once: whether this report began a recovery.

        False when the replica is being recovered already. Reporting again is harmless.
        """
        if address.name in self._running:
            return False
        self._running[address.name] = backend().background(self._recover(address, why), name=f"recovery-{address.name}")
        return True

    async def recovering(self) -> tuple[str, ...]:
        """Names of the replicas that are being recovered, in the order in which that began."""
        return tuple(self._running)

    async def _recover(self, address: EngineAddress, why: str) -> None:
        config = self._config
        try:
            async with self._slots:
                backend().emit("recovery.began", replica=address.name, replica_inc=address.incarnation, why=why)
                for attempt in range(1, config.attempts + 1):
                    try:
                        async with asyncio.timeout(config.attempt_timeout_s):
                            await self._replace(address, why)
                        return
                    except (SeatrialError, TimeoutError) as error:
                        self._step(address, "retry", f"attempt {attempt}: {type(error).__name__}: {error}")
                    await asyncio.sleep(config.backoff_s * attempt)
                self._step(address, "gave_up", await self._clean_up(address))
        finally:
            del self._running[address.name]

    async def _replace(self, old: EngineAddress, why: str) -> None:
        port = backend()
        leave = RecoveryLeave(True)
        if self._owner is not None:
            # What is drained, not yet published, or gone for good is not recovery's to bring back (scaling.md 3).
            leave = await self._owner.call("may_recover", old)
            if not leave.allowed:
                self._step(old, "gave_up", f"its owner says {leave.why}")
                return
        if not await self._gateway.call("close_admission", old, why):
            self._step(old, "gave_up", "no member of the gateway any more")
            return
        await self._end_process(old.name)
        home = None if leave.placement is not None else self._homes.get(old.name)
        if home is not None and home not in await port.nodes():
            home = None
        new = await port.engines.launch(self._spec, name=old.name, node=home, placement=leave.placement)
        self._step(new, "launched")
        client = port.engines.client(new)
        await self._wait_ready(client)
        self._step(new, "ready")
        version, weight_hash = await self._load_latest(client)
        await self._validate(client, version, weight_hash)
        self._step(new, "validated", f"version {version}")
        if await self._publish(old, new):
            self._step(new, "published")
        else:
            self._step(new, "gave_up", await self._clean_up(old))

    # --- the old process ---

    async def _end_process(self, name: str) -> None:
        """Raises SeatrialError, *unknown*, when the process is not seen gone in time: it may act yet."""
        engines = backend().engines
        try:
            async with asyncio.timeout(self._config.terminate_timeout_s):
                await engines.terminate(name)
                while await engines.alive(name):
                    await asyncio.sleep(self._config.poll_interval_s)
        except TimeoutError:
            raise SeatrialError(
                f"{name} was not seen gone within {self._config.terminate_timeout_s} s of its SIGKILL"
            ) from None

    async def _clean_up(self, address: EngineAddress) -> str:
        """End what was launched in place of ``address`` for nothing. Returns what became of it.

        Not so where the gateway has a later incarnation, ours for example, whose publication was not answered: it may
        have calls in flight, and health or its drain looks after it.
        """
        try:
            members: tuple[EngineAddress, ...] = await self._gateway.call("roster")
            if any(m.name == address.name and m.incarnation > address.incarnation for m in members):
                return "superseded by a later incarnation"  # under this name: ending it would end that one
            await self._end_process(address.name)
        except SeatrialError as error:
            return f"its process may live: {type(error).__name__}: {error}"
        return "its process is gone"

    # --- the new one ---

    async def _wait_ready(self, client: EngineClient) -> None:
        timeout_s = self._config.probe_timeout_s
        while True:
            try:
                status, _ = await client.get("/ready", connect_timeout_s=timeout_s, read_timeout_s=timeout_s)
                if status == 200:
                    return
            except NetworkError:
                if not await backend().engines.alive(client.address.name):
                    raise SpawnFailed(
                        f"{client.address.name} died while it started", outcome=Outcome.NOT_DONE
                    ) from None
            await asyncio.sleep(self._config.poll_interval_s)

    async def _load_latest(self, client: EngineClient) -> tuple[str, str]:
        """Load the latest whole export; returns the version and hash that must be served (hash empty: not known)."""
        readings: dict[str, int] = {}
        loaded: tuple[str, ExportManifest] | None = None
        while True:
            latest = await self._latest_whole(readings, loaded)
            if latest is None:
                timeout_s = self._config.probe_timeout_s
                return await reported_weights(client, connect_timeout_s=timeout_s, read_timeout_s=timeout_s)
            if latest is loaded:
                return latest[1].version, latest[1].weight_hash
            # Again when a newer one was published meanwhile: a replica must not join with old weights.
            await self._load(client, *latest)
            loaded = latest

    async def _latest_whole(
        self, readings: dict[str, int], loaded: tuple[str, ExportManifest] | None
    ) -> tuple[str, ExportManifest] | None:
        """Path and manifest of the newest export that is whole, or ``loaded`` when that is it; None where none exists.

        ``readings`` counts the vain readings of each path. Raises CorruptExport, *not done*, when none is whole.
        """
        port = backend()
        while True:
            published = await exports(port.storage, self._config.export_prefix)
            candidates = [path for path in published if readings.get(path, 0) < self._config.export_attempts]
            if not candidates:
                if published:
                    raise CorruptExport(f"none of {len(published)} exports is whole", path=published[0])
                return None
            path = candidates[0]
            if loaded is not None and path == loaded[0]:
                return loaded
            try:
                return path, await verify_export(port.storage, path)
            except CorruptExport as error:
                readings[path] = readings.get(path, 0) + 1
                port.emit("export.rejected", path=path, why=error.message, reader=port.me.name)
                if readings[path] == self._config.export_attempts:
                    await self._repair(path)
            await asyncio.sleep(self._config.export_backoff_s)

    async def _repair(self, path: str) -> None:
        """Have a broken export written again: it comes as a newer one. Without success the one before it is used."""
        if self._exporter is None:
            return
        version = path.rpartition("/")[2].partition("-")[2]
        try:
            await self._exporter.call("export", version)
        except SeatrialError as error:
            backend().emit(
                "export.rejected",
                path=path,
                why=f"writing it again failed: {type(error).__name__}: {error}",
                reader=backend().me.name,
            )

    async def _load(self, client: EngineClient, path: str, manifest: ExportManifest) -> None:
        refused, failure = await ask_to_load(client, WeightUpdate(path, manifest.version), self._admin)
        if refused:
            # Perhaps for the flush, and /model_info would not tell. The next attempt has a process with an empty cache.
            raise SeatrialError(f"{client.address.name} answered its update to {manifest.version!r} with {refused}")
        detail = "answered" if failure is None else f"{type(failure).__name__}: {failure}"
        # No answer: what the engine serves decides. The update may be made and its answer lost, or still be under way.
        timeout_s = self._config.probe_timeout_s
        reported = ("", "")
        try:
            async with asyncio.timeout(self._admin.reconcile_timeout_s):
                while reported[0] != manifest.version:
                    try:
                        reported = await reported_weights(client, connect_timeout_s=timeout_s, read_timeout_s=timeout_s)
                    except (NetworkError, HttpError) as error:
                        detail = f"{detail}; {type(error).__name__}"
                    if reported[0] != manifest.version:
                        await asyncio.sleep(self._admin.reconcile_interval_s)
        except TimeoutError:
            raise SeatrialError(
                f"{client.address.name} serves version {reported[0]!r} after its update to {manifest.version!r}"
                f" ({detail})"
            ) from None
        if reported[1] and reported[1] != manifest.weight_hash:
            raise CorruptExport(
                f"{client.address.name} serves weights {reported[1]}, the export has {manifest.weight_hash}", path=path
            )
        self._step(client.address, "loaded", f"{path}: {detail}")

    async def _validate(self, client: EngineClient, version: str, weight_hash: str) -> None:
        """Raises SeatrialError when the tokens of a short generation are not those of the weights that were loaded."""
        request = GenerateRequest(backend().new_id("probe"), _PROMPT_TOKENS, self._config.validate_tokens)
        result = await client.generate(
            request,
            connect_timeout_s=self._config.probe_timeout_s,
            read_timeout_s=self._config.generate_timeout_s,
        )
        served = {(result.weight_version, weight_hash): None}
        for span in result.spans:
            # An engine that reports no hash (SGLang) is judged by its version alone.
            served[(span.version, span.weight_hash if weight_hash and span.weight_hash else weight_hash)] = None
        if result.completion_tokens != self._config.validate_tokens or tuple(served) != ((version, weight_hash),):
            raise SeatrialError(
                f"{client.address.name} generated {result.completion_tokens} of {self._config.validate_tokens} tokens"
                f" with {list(served)}; expected {[(version, weight_hash)]}"
            )

    async def _publish(self, old: EngineAddress, new: EngineAddress) -> bool:
        """Idempotent at owner and gateway, so a lost answer is asked for again until the attempt's deadline.

        Where that comes first the next attempt begins with the same ``old``, which the owner keeps until then.
        """
        while True:
            try:
                if self._owner is not None and not await self._owner.call("adopt", old, new):
                    return False  # it was put in drain meanwhile
                return bool(await self._gateway.call("replace_replica", old, new))
            except PEER_LOST:
                await asyncio.sleep(self._config.poll_interval_s)

    def _step(self, address: EngineAddress, stage: str, detail: str = "") -> None:
        backend().emit(
            "recovery.step", replica=address.name, replica_inc=address.incarnation, stage=stage, detail=detail
        )
