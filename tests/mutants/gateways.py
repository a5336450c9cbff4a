"""Wrong gateways."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from protocol.errors import HttpError, Outcome, SeatrialError
from protocol.messages import EngineAddress, GenerateRequest, GenerateResult
from protocol.ports import backend, data_call
from protocol.serving.gateway import Gateway
from protocol.serving.pick_set import PickSet, Replica
from tests.mutants.registry import Mutant


class DropsCountBeforeMoving(Gateway):
    """Gives the count on the failed replica back at once and counts on the new one only after the back-off."""

    def _move(self, request: GenerateRequest, old: Replica, tried: list[Replica], why: str) -> Replica | None:
        new = self._picks.pick_other(tried) or self._picks.pick_other([old])
        if new is None:
            return None
        self._picks.count(new, -1)
        self._uncount(old)
        asyncio.get_running_loop().call_later(self._config.backoff_s * len(tried), self._count, request, old, new, why)
        return new

    def _count(self, request: GenerateRequest, old: Replica, new: Replica, why: str) -> None:
        if new.routable:
            self._picks.count(new, +1)
        else:
            new.in_flight += 1
        fields = {"replica": new.name, "replica_inc": new.incarnation, "old": old.name, "old_inc": old.incarnation}
        self._emit("gateway.moved", request=request.request_id, why=why, **fields)


class CountsLate(PickSet):
    """Picks in one step and counts in a later one."""

    def pick(self) -> Replica:
        replica = super().pick()
        self.count(replica, -1)
        asyncio.get_running_loop().call_later(0.001, self._late, replica)
        return replica

    def _late(self, replica: Replica) -> None:
        if replica.routable:
            self.count(replica, +1)
        else:
            replica.in_flight += 1


class PicksBeforeItCounts(Gateway):
    """Picks a replica and counts the call a moment later: whoever picks in between sees the old count."""

    async def start(self) -> None:
        await super().start()
        self._picks = CountsLate()


class RetriesClientErrors(Gateway):
    """Retries a 4xx on another replica, as if it were a 5xx."""

    def _may_retry(self, request: GenerateRequest, error: SeatrialError, sent: int) -> bool:
        return sent < self._config.attempts and (error.outcome is Outcome.NOT_DONE or request.idempotent)


class ReplaysUnknown(Gateway):
    """Sends a request again after a read time-out though it may not be sent twice."""

    def _may_retry(self, request: GenerateRequest, error: SeatrialError, sent: int) -> bool:
        if isinstance(error, HttpError) and error.fields["status"] < 500:
            return False
        return sent < self._config.attempts


class LeaksCountOnFailure(Gateway):
    """Gives the count back only when the call succeeded."""

    def _uncount(self, replica: Replica) -> None:
        if self._succeeded:
            super()._uncount(replica)

    def _release(self, request: GenerateRequest, replica: Replica, ok: bool) -> None:
        self._succeeded = ok
        super()._release(request, replica, ok)

    _succeeded = True


class ServedCountsFailures(Gateway):
    """Counts a failed call as served."""

    def _release(self, request: GenerateRequest, replica: Replica, ok: bool) -> None:
        super()._release(request, replica, True)


class CountsByAddress(Gateway):
    """Knows a replica by host and port: the next engine on the port inherits the calls of the dead one."""

    async def add_replica(self, address: EngineAddress) -> bool:
        for key, replica in list(self._replicas.items()):
            if (replica.address.host, replica.address.port) != (address.host, address.port):
                continue
            del self._replicas[key]
            replica.address = address
            replica.name = address.name
            replica.incarnation = address.incarnation
            replica.client = backend().engines.client(address)
            replica.closed = replica.removed = replica.suspect = False
            self._replicas[(address.name, address.incarnation)] = replica
            self._newest[address.name] = address.incarnation
            self._roster_version += 1
            if not replica.routable:
                self._route(replica)
            return True
        return await super().add_replica(address)

    async def replace_replica(self, old: EngineAddress, new: EngineAddress) -> bool:
        return await self.add_replica(new)


class RetriesOnTheSameReplica(Gateway):
    """Retries on the replica that has just failed."""

    def _move(self, request: GenerateRequest, old: Replica, tried: list[Replica], why: str) -> Replica | None:
        return old

    def _blame(self, replica: Replica, error: SeatrialError) -> None:
        self._failures["any"] = self._failures.get("any", 0) + 1


class PicksTheDead(Gateway):
    """Goes on picking a replica that refuses connections, until health says otherwise."""

    def _blame(self, replica: Replica, error: SeatrialError) -> None:
        self._failures["any"] = self._failures.get("any", 0) + 1


class TakesUnknownForDone(Gateway):
    """Answers a call of unknown outcome as if the replica had done it."""

    @data_call
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        try:
            return await super().generate(request)
        except SeatrialError as error:
            if error.outcome is not Outcome.UNKNOWN:
                raise
            replica: Any = next(iter(self._replicas.values()))
            return GenerateResult(
                request.request_id, "length", request.prompt_tokens, request.max_new_tokens, engine=replica.name
            )

    def _may_retry(self, request: GenerateRequest, error: SeatrialError, sent: int) -> bool:
        return error.outcome is Outcome.NOT_DONE and super()._may_retry(request, error, sent)


class SendsDeadlineAsClockReading(Gateway):
    """Sends the time at which it loses patience, by its own clock, where a remaining duration is asked for."""

    @data_call
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        config = self._config
        self._config = config.model_copy(update={"read_timeout_s": self._now() + config.read_timeout_s})
        try:
            call = super().generate(request)
        finally:
            given, self._config = self._config, config
        return await _with_config(self, given, call)


async def _with_config(gateway: Gateway, given: Any, call: Any) -> GenerateResult:
    config, gateway._config = gateway._config, given
    try:
        result: GenerateResult = await call
        return result
    finally:
        gateway._config = config


class Hedges(Gateway):
    """Sends every request to two replicas and takes the first answer, also when it may not be sent twice."""

    @data_call
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        calls = [asyncio.ensure_future(super(Hedges, self).generate(request)) for _ in range(2)]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        result = await next(call for call in calls if call.done())
        await asyncio.wait(calls)
        return result


def _gateway(name: str, source: str, cls: type, scenario: str, check: str) -> Mutant:
    return Mutant(name, source, "gateway", Gateway, cls, scenario, check)


class ShutsEveryoneOut(Gateway):
    """Takes a failed connection for a sick replica, also where that leaves nobody at all."""

    def _route_to_the_unreached(self) -> None:
        pass


class ResendsAtOnce(Gateway):
    """Sends a request again to a replica that has not let go of it: the id is live there, and refused."""

    def _held_s(self, replica: Replica, left: Mapping[Replica, float]) -> float:
        return 0.0


MUTANTS = (
    _gateway("count dropped before moved", "M8", DropsCountBeforeMoving, "lost_replies", "gateway_counts"),
    _gateway("counted after the pick", "scaling 5.1", PicksBeforeItCounts, "quiet", "gateway_counts"),
    _gateway("retry of 4xx", "scaling 5.1", RetriesClientErrors, "too_long", "occurs"),
    _gateway(
        "replay of a non-idempotent call", "DESIGN outcomes", ReplaysUnknown, "lost_replies_once_only", "nothing_twice"
    ),
    _gateway("count leaked on failure", "scaling 5.1", LeaksCountOnFailure, "too_long", "gateway_counts"),
    _gateway("served counts failures", "H4", ServedCountsFailures, "too_long_served", "occurs"),
    _gateway("counters by address", "H5", CountsByAddress, "reused_port", "gateway_counts"),
    _gateway("retry on the same replica", "scaling 5.1", RetriesOnTheSameReplica, "kill", "answered_fraction"),
    _gateway("picks the dead", "scaling 5.1", PicksTheDead, "kill", "occurs"),
    _gateway("unknown taken for done", "DESIGN outcomes", TakesUnknownForDone, "lost_replies", "answer_is_the_engines"),
    _gateway(
        "deadline as a clock reading", "DESIGN deadlines", SendsDeadlineAsClockReading, "lost_replies", "nothing_lost"
    ),
    _gateway("hedges what may not be sent twice", "A-I3", Hedges, "once_only", "nothing_twice"),
    _gateway("resent while it runs", "engines 3", ResendsAtOnce, "slow_for_a_while", "answered_fraction"),
    _gateway("nobody left to route to", "scaling 5.1", ShutsEveryoneOut, "nobody_connects", "answered_fraction"),
)
