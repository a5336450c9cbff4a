"""A weight update by training ranks, in the order of its transport (serving.md 9.3).

- *ipc*: engines give their memory away -> take the step -> bind -> weights back -> update -> offload the trainer -> KV
  back
- *checkpoint_engine*: engines give their memory away -> take the step -> register -> offload the trainer -> bind ->
  weights back -> update -> KV back
- *nccl*: take the step -> flush -> bind -> update

Called between the drain and the reopening of a barrier; nothing here pauses or continues anything. Every rank is told
the same, all at once, and every rank leaves: one that fails, dies or does not answer in time ends the update for all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

from protocol.config import AdminConfig, WeightSyncConfig
from protocol.errors import BarrierError, HttpError, NoSuchActor, Outcome, SeatrialError
from protocol.messages import EngineAddress
from protocol.ports import ActorHandle, backend
from protocol.serving.admin import FLUSH, post_admin
from protocol.serving.peer import Peer
from protocol.training.transports import Binding, Failure, Target

RELEASE = "/release_memory_occupation"
RESUME = "/resume_memory_occupation"
_GRACE_S = 5.0
"""A rank that has not answered so long after its own deadline is not waited for any more."""


class WeightSync:
    """Runs updates by training ranks. Part of the publisher.

    Args:
        config: transport, deadlines.
        admin: time-outs of flushes and of memory calls.
        ranks: handles of the TrainingRanks, by number.
        rendezvous: handle of their Rendezvous.
    """

    def __init__(
        self, config: WeightSyncConfig, admin: AdminConfig, ranks: tuple[ActorHandle, ...], rendezvous: ActorHandle
    ) -> None:
        self._config = config
        self._admin = admin
        self._ranks = ranks
        self._rendezvous = Peer(rendezvous, admin.call_timeout_s)

    async def update(
        self, version: str, active: Sequence[EngineAddress], inactive: Sequence[EngineAddress] = ()
    ) -> tuple[Failure, ...]:
        """Bring the weights of ``version`` from the ranks into every active engine; one deadline for all of it.

        Returns the engines that it did not get into, by name; none of the others lacks anything. An update of which a
        group fails with one of its members is made again without that member.

        Raises:
            BarrierError: *not done*: no active engine. *Unknown*: a rank failed, or no engine took the update.
        """
        if not active:
            raise BarrierError("no active engine to update", outcome=Outcome.NOT_DONE)
        deadline = _now() + self._config.timeout_s
        targets = sorted(active, key=lambda address: address.name)
        # The ranks beside an engine are those of its devices, whoever else takes part.
        fleet = sorted(address.name for address in (*active, *inactive))
        beside = {name: self._beside(number, len(fleet)) for number, name in enumerate(fleet)}
        failed: dict[str, Failure] = {}
        if self._config.transport == "nccl":
            await self._everywhere("taken", "take", version)
            if self._config.flush:
                failed |= await self._post("flushed", targets, FLUSH, {})
        else:
            failed |= await self._post("released", targets, RELEASE, {"tags": ["kv_cache", "weights"]})
            await self._everywhere("taken", "take", version)
        registers = self._config.transport == "checkpoint_engine"
        if registers:
            await self._bind(_without(targets, failed), inactive, beside)
            await self._by_all("registered", "register", version, deadline)
            await self._everywhere("offloaded", "offload")
        while left := _without(targets, failed):
            await self._bind(left, inactive, beside)
            if self._config.transport != "nccl":
                failed |= await self._post("weights_back", left, RESUME, {"tags": ["weights"]})
            new = await self._by_all("updated", "update", version, deadline)
            culprits = [failure for failure in new if failure.culprit] or list(new)
            failed |= {failure.name: failure for failure in culprits}
            if len(culprits) == len(new):
                break  # the others have it; else they only failed with their group, and get another one
        if self._config.transport == "ipc":
            await self._everywhere("offloaded", "offload")
        if self._config.transport != "nccl":
            failed |= await self._post("kv_back", _without(targets, failed), RESUME, {"tags": ["kv_cache"]})
        if not _without(targets, failed):
            first = next(iter(failed.values()))
            raise BarrierError(f"no engine took {version}; {first.name}: {first.why}", failed=len(failed))
        return tuple(failed.values())

    # --- stages ---

    async def _bind(
        self,
        active: Sequence[EngineAddress],
        inactive: Sequence[EngineAddress],
        beside: dict[str, tuple[int, ...]],
    ) -> None:
        """Tell every rank whom the next update is for. Before each one, so that replaced engines are met (W-1)."""
        config = self._config
        targets = [Target(address, "active", beside[address.name]) for address in active]
        targets += [Target(address, "inactive", beside[address.name]) for address in inactive]
        binding = Binding(
            config.transport, config.ranks, round(config.bucket_gb * 1e9), config.master_port, tuple(targets)
        )
        await self._everywhere("bound", "bind", binding)

    def _beside(self, number: int, engines: int) -> tuple[int, ...]:
        """The training ranks on the devices of an engine: all of them are, in order, spread over the engines."""
        ranks = self._config.ranks
        first = number * ranks // engines
        return tuple(range(first, max((number + 1) * ranks // engines, first + 1)))

    async def _by_all(self, stage: str, method: str, version: str, deadline: float) -> tuple[Failure, ...]:
        """A collective of every rank; what any of them could not bring over."""
        left_s = deadline - _now()
        if left_s <= 0:
            raise BarrierError(f"the time was up before anything was {stage}", stage=stage)
        update = backend().new_id("update")
        ended = await self._all(stage, method, update, version, left_s, within_s=left_s + _GRACE_S, update=update)
        failures: dict[str, Failure] = {}
        for of_rank in ended:
            failures |= {failure.name: failure for failure in of_rank or ()}
        return tuple(failures.values())

    async def _everywhere(self, stage: str, method: str, *args: Any) -> None:
        await self._all(stage, method, *args, within_s=self._config.call_timeout_s)

    async def _all(self, stage: str, method: str, *args: Any, within_s: float, update: str = "") -> list[Any]:
        """Call every rank and wait until all have ended. The first failure lets those go that wait for it."""

        async def one(rank: ActorHandle) -> Any:
            try:
                async with asyncio.timeout(within_s):
                    return await getattr(await self._living(rank), method)(*args)
            except TimeoutError:
                error: SeatrialError = BarrierError(f"{rank.name} did not leave {method} within {within_s:g} s")
            except SeatrialError as failure:
                error = failure
            if update:
                await self._give_up(update, f"{rank.name}: {error.message}")
            raise error

        calls: list[Awaitable[Any]] = [one(rank) for rank in self._ranks]
        ended = await asyncio.gather(*calls, return_exceptions=True)
        failures = [error for error in ended if isinstance(error, BaseException)]
        if failures:
            first = next((error for error in failures if not isinstance(error, BarrierError)), failures[0])
            if not isinstance(first, SeatrialError):
                raise first
            self._emit(stage, f"failed: {first.message}")
            raise BarrierError(
                f"{method}: {len(failures)} of {len(self._ranks)} ranks failed, first: {first}",
                attached=(first,), stage=stage, failed=len(failures),
            )  # fmt: skip
        self._emit(stage)
        return ended

    async def _living(self, rank: ActorHandle) -> ActorHandle:
        """A rank that was restarted is another process of the same name; it has nothing until it is told all anew."""
        try:
            return await backend().lookup(rank.name)
        except NoSuchActor:
            return rank

    async def _give_up(self, update: str, why: str) -> None:
        try:
            await self._rendezvous.call("give_up", update, why)
        except SeatrialError:
            return  # the ranks have a deadline of their own

    async def _post(
        self, stage: str, targets: Sequence[EngineAddress], route: str, body: dict[str, Any]
    ) -> dict[str, Failure]:
        """One POST to every engine; who did not do it, by name. All are drained, so a flush succeeds at once."""
        failed: dict[str, Failure] = {}
        slots = asyncio.Semaphore(self._admin.fan_out)

        async def one(address: EngineAddress) -> None:
            try:
                async with slots:
                    reply = await post_admin(backend().engines.client(address), route, dict(body), self._admin)
                if not reply.success:
                    raise HttpError(f"answered {reply.status}: {reply.body[:200]}", status=reply.status)
            except SeatrialError as error:
                failed[address.name] = Failure(address.name, f"{route}: {type(error).__name__}: {error.message}")

        await asyncio.gather(*(one(address) for address in targets))
        self._emit(stage, ", ".join(sorted(failed)[:8]))
        return failed

    def _emit(self, stage: str, detail: str = "") -> None:
        backend().emit("weights.stage", transport=self._config.transport, stage=stage, detail=detail)


def _without(targets: Sequence[EngineAddress], failed: dict[str, Failure]) -> list[EngineAddress]:
    return [address for address in targets if address.name not in failed]


def _now() -> float:
    return asyncio.get_running_loop().time()
