"""A publication barrier as data, and how one stage of it is done everywhere at once. What RolloutController is made on.

Source: serving.md 3.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Literal

from protocol.config import AdminConfig, ControllerConfig
from protocol.errors import (
    ActorDied,
    BarrierError,
    CallCancelled,
    GatePoisoned,
    NoSuchActor,
    Outcome,
    SeatrialError,
)
from protocol.messages import EngineAddress, message
from protocol.ports import ActorHandle, backend
from protocol.serving.admin import AdminResult, operate, reported_weights
from protocol.serving.gate import GateSnapshot
from protocol.serving.peer import PEER_LOST, Peer

Stage = Literal["sealing", "drained", "resuming"]
Topology = dict[str, EngineAddress]

_LOOK_S = 0.25


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """One entrypoint: ``name`` of the replica that it serves, its gate, and the server in front of both."""

    name: str
    gate: ActorHandle
    server: ActorHandle


@message
class BarrierView:
    """A barrier as others see it. ``stage``: sealing, drained or resuming (opened in part).

    One that cannot be completed, for a gate was restarted in it or the topology changed, is *sealing* again: the next
    prepare_pause begins another epoch.

    ``fenced``: entrypoints that were taken out of it by name; their gates stay closed when it ends. ``newest``: the
    version that it cannot go back behind, -1 where none was ever installed.
    """

    epoch: int
    stage: str
    entrypoints: tuple[str, ...]
    fenced: tuple[str, ...] = ()
    newest: int = -1


class Barrier:
    """One seal-to-reopen cycle over a frozen set of entrypoints.

    Args:
        epoch: of every gate in it.
        members: the entrypoints.
        topology: name of each to the backend that served it when the barrier began.
        newest: the newest version that a gate had installed by then, -1 without any.
    """

    def __init__(self, epoch: int, members: tuple[Member, ...], topology: Topology, newest: int = -1) -> None:
        self.epoch = epoch
        self.newest = newest
        self.members = members
        self.topology = topology
        self.stage: Stage = "sealing"
        self.fenced: dict[str, str] = {}
        """Entrypoints that were taken out of it: why."""
        self.changed = ""
        """What of its topology has changed since it was drained; a fence takes those out, or another epoch begins."""
        self.rebuilt = ""
        """The gate that was restarted in it, and not sealed since. The next try seals it, or begins another epoch where
        the barrier was drained before."""

    def view(self) -> BarrierView:
        """As it is now, for others."""
        stage = "sealing" if self.changed or self.rebuilt else self.stage
        return BarrierView(self.epoch, stage, tuple(self.topology), tuple(self.fenced), self.newest)

    def refuse_undrained(self) -> None:
        """A gate that was restarted after the drain is not sealed: it may be open by now, and its turns run.

        Raises BarrierError, *not done*.
        """
        if self.stage == "sealing":
            raise BarrierError(f"epoch {self.epoch} is not drained", outcome=Outcome.NOT_DONE)
        if self.rebuilt:
            text = f"{self.rebuilt} was restarted in the barrier of epoch {self.epoch}: prepare another one"
            raise BarrierError(text, outcome=Outcome.NOT_DONE)

    @property
    def going_on(self) -> tuple[Member, ...]:
        """The entrypoints that will be opened."""
        return tuple(member for member in self.members if member.name not in self.fenced)

    @property
    def active(self) -> Topology:
        """The backends of those."""
        return {name: address for name, address in self.topology.items() if name not in self.fenced}


class Stages:
    """Asks one thing of every gate, or of every backend, at once, by the deadline of the barrier. Emits each stage.

    Args:
        config: longest wait for one call.
        admin: time-outs and attempts of the POSTs to backends.
        members: the entrypoints.
    """

    def __init__(self, config: ControllerConfig, admin: AdminConfig, members: tuple[Member, ...]) -> None:
        self._config = config
        self._admin = admin
        self._members = {member.name: member for member in members}
        self._barrier: Barrier | None = None
        self._unquiet: dict[str, None] = {}
        """Entrypoints whose gates were restarted, and may have turns left that the gates before had granted."""
        self._posts = asyncio.Semaphore(admin.fan_out)

    async def _gates(
        self,
        members: tuple[Member, ...],
        stage: str,
        method: str,
        deadline: float,
        arguments: Callable[[float], tuple[Any, ...]],
    ) -> None:
        """Have every gate do one thing, all at once; ``arguments`` gets the seconds that are left."""
        self._check_deadline(stage, deadline)

        async def one(member: Member) -> None:
            try:
                await self._ask(member.gate, method, arguments, deadline)
            except ActorDied as death:
                again = await self._found_again(member)
                if method != "seal":  # it has to go through all from there
                    raise BarrierError(f"{member.gate.name} was restarted before it had {stage}") from death
                await self._ask(again.gate, method, arguments, deadline)

        await self._stage(stage, members, one)

    async def _found_again(self, member: Member) -> Member:
        """A member with the gate that lives, after the death of the one it had. Raises BarrierError: there is none."""
        gate = member.gate
        try:
            gate = await backend().lookup(gate.name)
        except NoSuchActor:
            pass
        if gate == member.gate:
            raise BarrierError(f"{gate.name} is dead, and not yet restarted")
        again = self._members[member.name] = dataclasses.replace(member, gate=gate)
        self._unquiet[member.name] = None
        if (barrier := self._barrier) is not None:
            barrier.members = tuple(again if one.name == again.name else one for one in barrier.members)
            barrier.rebuilt = gate.name  # whoever found it: it is not sealed in this barrier
        return again

    async def _quiet(self, members: tuple[Member, ...], deadline: float) -> None:
        """Wait for the turns that earlier incarnations of gates had granted: the present ones know nothing of them."""
        waited_for = tuple(member for member in members if member.name in self._unquiet)
        if not waited_for:
            return
        self._check_deadline("quiet", deadline)

        async def one(member: Member) -> None:
            server = Peer(member.server, self._config.call_timeout_s)
            last: SeatrialError | None = None
            while (left_s := deadline - loop_time()) > 0:
                try:
                    async with asyncio.timeout_at(deadline):
                        if await server.call("quiet", member.gate.incarnation):
                            self._unquiet.pop(member.name, None)
                            return
                    last = None
                except TimeoutError:
                    break
                except PEER_LOST as error:
                    last = error
                await asyncio.sleep(min(_LOOK_S, left_s))
            before = f"from before {member.gate.name} was restarted"
            if last is not None:
                raise BarrierError(f"{member.server.name} does not say whether turns are left {before}: {last}")
            raise BarrierError(f"{member.server.name} has turns left {before}")

        await self._stage("quiet", waited_for, one)

    async def _ask(self, gate: ActorHandle, method: str, arguments: Any, deadline: float) -> Any:
        """Call a gate until it answers or the time is up. What a gate is asked to do is idempotent for its epoch."""
        while (left_s := deadline - loop_time()) > 0:
            given = arguments(left_s) if callable(arguments) else arguments
            try:
                async with asyncio.timeout(min(left_s, self._config.call_timeout_s)):
                    return await getattr(gate, method)(*given)
            except (TimeoutError, CallCancelled):
                continue  # slow, or lost: the outcome is unknown, and asking again is harmless
        raise BarrierError(f"{gate.name} did not answer {method} in time", stage=method)

    async def _post(
        self, topology: Topology, stage: str, route: str, body: dict[str, Any], deadline: float | None
    ) -> tuple[AdminResult, ...]:
        """One POST to every backend; a failure or a time-out of any fails the stage, after all have ended."""
        if deadline is not None:
            self._check_deadline(stage, deadline)
        results: list[AdminResult] = []

        async def one(address: EngineAddress) -> None:
            try:
                async with asyncio.timeout_at(deadline), self._posts:
                    result = await operate(address, route, dict(body), self._admin)
            except TimeoutError:
                raise BarrierError(f"{address.name} did not answer {route} in time", stage=stage) from None
            if result.outcome != Outcome.DONE.value:
                raise BarrierError(f"{address.name} {route}: {result.error}", outcome=Outcome(result.outcome))
            results.append(result)

        await self._stage(stage, tuple(topology.values()), one)
        return tuple(results)

    async def _check_served(self, topology: Topology, version: str, deadline: float) -> None:
        """A gate opens only with a version that its backend really serves (G-I6); a label is not believed."""
        self._check_deadline("served", deadline)
        timeout_s = self._config.call_timeout_s

        async def one(address: EngineAddress) -> None:
            client = backend().engines.client(address)
            last: SeatrialError | None = None
            try:
                async with asyncio.timeout_at(deadline), self._posts:
                    while True:
                        try:
                            served, _ = await reported_weights(
                                client, connect_timeout_s=timeout_s, read_timeout_s=timeout_s
                            )
                            break
                        except SeatrialError as error:
                            last = error
                            await asyncio.sleep(self._admin.reconcile_interval_s)
            except TimeoutError:
                raise BarrierError(f"{address.name} did not say what it serves: {last}", stage="served") from None
            if served != version:
                raise BarrierError(
                    f"{address.name} serves version {served!r}, not {version!r}", outcome=Outcome.NOT_DONE
                )

        await self._stage("served", tuple(topology.values()), one)

    async def _stage(self, stage: str, parts: Iterable[Any], one: Callable[[Any], Awaitable[None]]) -> None:
        try:
            await everywhere(stage, tuple(parts), one)
        except SeatrialError as error:
            self._emit("failed", f"{stage}: {error.message}")
            raise
        self._emit(stage)

    async def _snapshots(self, members: tuple[Member, ...], deadline: float) -> dict[str, GateSnapshot]:
        found: dict[str, GateSnapshot] = {}

        async def one(member: Member) -> None:
            try:
                found[member.name] = await self._ask(member.gate, "snapshot", (), deadline)
            except ActorDied:  # a question may be asked again in any case
                again = await self._found_again(member)
                found[member.name] = await self._ask(again.gate, "snapshot", (), deadline)

        await self._stage("asked", members, one)
        return found

    def _deadline(self, timeout_s: float | None, default_s: float) -> float:
        return loop_time() + (default_s if timeout_s is None else timeout_s)

    def _check_deadline(self, stage: str, deadline: float) -> None:
        if loop_time() >= deadline:
            raise BarrierError(f"the time was up before anything was {stage}", stage=stage)

    def _emit(self, stage: str, detail: str = "") -> None:
        epoch = 0 if self._barrier is None else self._barrier.epoch
        backend().emit("controller.stage", epoch=epoch, stage=stage, detail=detail)


async def everywhere(stage: str, parts: tuple[Any, ...], one: Callable[[Any], Awaitable[None]]) -> None:
    """Do one thing to all parts at once, and wait for all of them to end, whatever becomes of any.

    Raises:
        GatePoisoned: *not done*, when any of them is that.
        BarrierError: else, with the first failures attached; *not done* only when every part says so.
    """
    ended = await asyncio.gather(*(one(part) for part in parts), return_exceptions=True)
    failures = [error for error in ended if isinstance(error, BaseException)]
    for error in failures:
        if not isinstance(error, SeatrialError):
            raise error
    if not failures:
        return
    poisoned = [error for error in failures if isinstance(error, GatePoisoned)]
    first = (poisoned or failures)[0]
    nothing = len(failures) == len(parts) and all(
        isinstance(error, SeatrialError) and error.outcome is Outcome.NOT_DONE for error in failures
    )
    text = f"{stage}: {len(failures)} of {len(parts)} failed, first: {first}"
    kind = GatePoisoned if poisoned else BarrierError
    raise kind(
        text,
        outcome=Outcome.NOT_DONE if poisoned or nothing else Outcome.UNKNOWN,
        attached=tuple(failures[:8]),
        stage=stage,
        failed=len(failures),
    )


def refuse_older(model_step: int, newest: int) -> None:
    """Versions of a gate never go back (G-I5). Raises BarrierError, *not done*."""
    if model_step < newest:
        text = f"version {model_step} is older than {newest}, which is installed: publish a newer one"
        raise BarrierError(text, outcome=Outcome.NOT_DONE)


def nobody(error: BaseException | None) -> bool:
    """Whether it says that nobody of the name that was called lives."""
    return isinstance(error, ActorDied) and error.outcome is Outcome.NOT_DONE


def loop_time() -> float:
    """Seconds on the clock that deadlines are given in."""
    return asyncio.get_running_loop().time()
