"""Admin POSTs to replicas: pause, continue, flush, update weights.

A POST that may have been executed is not sent again blindly (serving.md 1.2). Only a connect time-out, before which
nothing can have happened, leads to another attempt. When the outcome is unknown the replica is asked what became of it
first, and only what it says decides whether the operation is done or is to be made anew.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from protocol.config import AdminConfig
from protocol.errors import ConnectTimeout, HttpError, NetworkError, Outcome, SeatrialError
from protocol.messages import AdminReply, EngineAddress, WeightUpdate, message
from protocol.ports import ActorHandle, EngineClient, backend
from protocol.serving.peer import PEER_LOST, Peer

UPDATE_WEIGHTS = "/update_weights_from_disk"
FLUSH = "/flush_cache"
"""Empties an engine's prefix cache; refused while it has anything to do."""


@message
class AdminResult:
    """What became of an operation on one replica. ``outcome``: done, not_done or unknown; ``error``: class and text."""

    replica: str
    incarnation: int
    route: str
    outcome: str
    error: str = ""


async def post_admin(client: EngineClient, route: str, body: dict[str, Any], config: AdminConfig) -> AdminReply:
    """One admin operation, with another attempt after a connect time-out only (``connect_attempts`` in all).

    The reply may be one without ``success``: what that says of the effect, :func:`refusal` tells.

    Args:
        client: of the replica.
        route: as ``/pause_generation``.
        body: a JSON object, sent as it is.
        config: time-outs and attempts.

    Raises:
        ConnectTimeout, ConnectionRefused: *not done*. ReadTimeout, ConnectionLost: *unknown*, at once.
        HttpError: 4xx *not done*, 5xx *unknown*, at once.
    """
    return await _post(
        client,
        route,
        lambda: client.post(
            route,
            dict(body),  # of its own for each attempt: an earlier one may still be under way
            connect_timeout_s=config.connect_timeout_s,
            read_timeout_s=config.read_timeout_s,
        ),
        config,
    )


async def post_update_weights(client: EngineClient, update: WeightUpdate, config: AdminConfig) -> AdminReply:
    """``POST /update_weights_from_disk``, with the retry rule and the errors of :func:`post_admin`.

    A 4xx here is *unknown* as well, see :func:`refusal`.
    """
    try:
        return await _post(
            client,
            UPDATE_WEIGHTS,
            lambda: client.update_weights(
                update, connect_timeout_s=config.connect_timeout_s, read_timeout_s=config.update_timeout_s
            ),
            config,
        )
    except HttpError as error:
        error.outcome = Outcome.UNKNOWN
        raise


async def ask_to_load(
    client: EngineClient, update: WeightUpdate, config: AdminConfig
) -> tuple[str, SeatrialError | None]:
    """Post a weight update; afterwards what the replica serves must be asked of it, whatever is returned.

    Returns:
        With what it refused, as ``400: text`` (empty: it did not), and the error where no good answer came. A refusal
        may be for the flush after the load: then the weights have changed, and the prefix cache has not (engines.md 3).

    Raises:
        ConnectTimeout, ConnectionRefused: *not done*.
    """
    try:
        reply = await post_update_weights(client, update, config)
    except SeatrialError as error:
        if error.outcome is Outcome.NOT_DONE:
            raise
        if isinstance(error, HttpError) and error.fields["status"] < 500:
            return _refused(error.fields["status"], str(error.fields["body"])), error
        return "", error
    return ("" if reply.success else _refused(reply.status, reply.body)), None


def _refused(status: int, text: str) -> str:
    return f"{status}: {text[:200]}"


async def _post(
    client: EngineClient, route: str, send: Callable[[], Awaitable[AdminReply]], config: AdminConfig
) -> AdminReply:
    return await post_once(client.address.name, route, send, config.connect_attempts, config.connect_backoff_s)


async def post_once(
    target: str, route: str, send: Callable[[], Awaitable[AdminReply]], connect_attempts: int, backoff_s: float
) -> AdminReply:
    """One admin operation by ``send``, which is called again after a connect time-out only (serving.md 1.2).

    Args:
        target, route: for evidence.
        send: one attempt.
        connect_attempts: in all.
        backoff_s: between two of them.

    Raises whatever the last attempt raised.
    """
    port = backend()
    operation = port.new_id("admin")
    attempt = 0
    while True:
        attempt += 1
        failure: SeatrialError | None = None
        try:
            reply = await send()
            outcome, error = (Outcome.DONE, "") if reply.success else (refusal(route, reply.status), str(reply.status))
        except SeatrialError as raised:
            failure = raised
            outcome, error = raised.outcome, type(raised).__name__
        port.emit(
            "admin.attempt",
            operation=operation,
            route=route,
            target=target,
            attempt=attempt,
            outcome=outcome.value,
            error=error,
        )
        if failure is None:
            return reply
        if not isinstance(failure, ConnectTimeout) or attempt >= connect_attempts:
            raise failure
        await asyncio.sleep(backoff_s)


def refusal(route: str, status: int) -> Outcome:
    """What an answer without success says of the effect: nothing (*unknown*) after a 5xx, and after a weight update.

    SGLang answers 400 to an update that it has made when the flush after it failed (engines.md 3, weights).
    """
    return Outcome.UNKNOWN if route == UPDATE_WEIGHTS or status >= 500 else Outcome.NOT_DONE


async def reported_weights(
    client: EngineClient, *, connect_timeout_s: float | None, read_timeout_s: float | None
) -> tuple[str, str]:
    """(version, hash) of the weights that a replica says it serves; the hash is empty where it reports none.

    Raises:
        NetworkError: as of any GET. HttpError: it answered with another status than 200, or without a version.
    """
    status, text = await client.get("/model_info", connect_timeout_s=connect_timeout_s, read_timeout_s=read_timeout_s)
    if status != 200:
        raise HttpError(f"{client.address.name}: GET /model_info answered {status}", status=status, body=text)
    try:
        info = json.loads(text)
        return str(info["weight_version"]), str(info.get("weight_hash", ""))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HttpError(
            f"{client.address.name}: GET /model_info has no weight_version ({type(error).__name__}: {error})",
            status=status,
            body=text,
            outcome=Outcome.NOT_DONE,
        ) from error


class AdminClient:
    """Admin operations on the whole fleet. An actor.

    Args:
        config: time-outs, how many replicas at once, and the periodic round if there is to be one.
        gateway: handle of the Gateway, which knows the replicas.
        prober: handle of the HealthProber; told to hold its judgement while replicas are paused on purpose.
    """

    def __init__(self, config: AdminConfig, gateway: ActorHandle, prober: ActorHandle | None = None) -> None:
        self._config = config
        self._gateway = Peer(gateway, config.call_timeout_s)
        self._prober = None if prober is None else Peer(prober, config.call_timeout_s)
        self._rounds: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if self._config.round != "none":
            self._rounds = backend().periodic(self._config.round_interval_s, self._round, name="admin-round")

    async def stop(self) -> None:
        if self._rounds is not None:
            self._rounds.cancel()

    async def flush_all(self) -> tuple[AdminResult, ...]:
        """Flush the prefix cache everywhere. A replica with requests refuses it: *not done*.

        Raises ActorDied when the gateway is not there to name the replicas; an operation's failure is in its result.
        """
        return await self._everywhere(await self._roster(), FLUSH, {})

    async def pause_round(self) -> tuple[AdminResult, ...]:
        """Pause every replica, hold, and continue the same ones. Returns the results of both, in that order.

        The continue is sent also when the pause failed or its outcome is unknown: it is harmless, and a replica that
        stays paused serves nothing (serving.md 3). Raises ActorDied as ``flush_all``.
        """
        config = self._config
        replicas = await self._roster()
        if self._prober is not None:
            # Bounded: should this actor die in here, health judges again, and what stays paused is replaced.
            await self._prober.call("hold", config.pause_hold_s + 2 * self._longest(len(replicas)))
        try:
            paused = await self._everywhere(replicas, "/pause_generation", {"mode": config.pause_mode})
            await asyncio.sleep(config.pause_hold_s)
        finally:
            continued = await self._everywhere(replicas, "/continue_generation", {})
            if self._prober is not None:
                await self._prober.call("resume")
        return (*paused, *continued)

    async def _round(self) -> None:
        try:
            await (self.flush_all() if self._config.round == "flush" else self.pause_round())
        except PEER_LOST as error:
            # The gateway or the prober is being restarted. The next round meets its next incarnation.
            backend().emit(
                "admin.attempt",
                operation=backend().new_id("admin"),
                route=self._config.round,
                target="fleet",
                attempt=1,
                outcome=error.outcome.value,
                error=type(error).__name__,
            )

    async def _roster(self) -> tuple[EngineAddress, ...]:
        roster: tuple[EngineAddress, ...] = await self._gateway.call("roster")
        return roster

    def _longest(self, replicas: int) -> float:
        """Longest time, in seconds, that an operation everywhere can take."""
        turns = -(-replicas // self._config.fan_out)
        return turns * (self._config.read_timeout_s + self._config.reconcile_timeout_s)

    async def _everywhere(
        self, replicas: tuple[EngineAddress, ...], route: str, body: dict[str, Any]
    ) -> tuple[AdminResult, ...]:
        slots = asyncio.Semaphore(self._config.fan_out)

        async def one(address: EngineAddress) -> AdminResult:
            async with slots:
                return await self._operate(address, route, body)

        return tuple(await asyncio.gather(*(one(address) for address in replicas)))

    async def _operate(self, address: EngineAddress, route: str, body: dict[str, Any]) -> AdminResult:
        return await operate(address, route, body, self._config)


async def operate(address: EngineAddress, route: str, body: dict[str, Any], config: AdminConfig) -> AdminResult:
    """One idempotent operation on one replica, reconciled: pause, continue or flush. Never raises for its failure.

    An outcome that stays unknown for ``read_timeout_s`` and ``reconcile_timeout_s`` together is reported as that.

    Args:
        address: of the replica.
        route: of the operation; one that may be asked again and again.
        body: a JSON object.
        config: time-outs and attempts.
    """
    client = backend().engines.client(address)
    last: SeatrialError | None = None
    try:
        # The first attempt may use up its whole read time-out, and only then is there something to reconcile.
        async with asyncio.timeout(config.read_timeout_s + config.reconcile_timeout_s):
            while True:
                try:
                    reply = await post_admin(client, route, body, config)
                    if reply.success:
                        return _result(address, route, Outcome.DONE, None)
                    outcome = refusal(route, reply.status)
                    last = HttpError(status=reply.status, body=reply.body, outcome=outcome)
                    if outcome is Outcome.NOT_DONE:
                        return _result(address, route, outcome, last)
                except SeatrialError as error:
                    last = error
                    if error.outcome is not Outcome.UNKNOWN:
                        return _result(address, route, error.outcome, error)
                if await _took_effect(client, route, config):
                    return _result(address, route, Outcome.DONE, None)
    except TimeoutError:
        return _result(address, route, Outcome.UNKNOWN, last)


async def _took_effect(client: EngineClient, route: str, config: AdminConfig) -> bool:
    """Ask the replica, until it answers, whether an operation of unknown outcome has had its effect.

    False sends it anew: pause, continue and flush are all idempotent (engines.md 3). A flush leaves nothing to see,
    so it is always made again.
    """
    timeout_s = config.connect_timeout_s
    while True:
        try:
            status, _ = await client.get("/ready", connect_timeout_s=timeout_s, read_timeout_s=timeout_s)
        except NetworkError:
            await asyncio.sleep(config.reconcile_interval_s)  # no answer is no state: ask again
            continue
        if route == "/pause_generation":
            return status == 503
        return route == "/continue_generation" and status == 200


def _result(address: EngineAddress, route: str, outcome: Outcome, error: SeatrialError | None) -> AdminResult:
    text = "" if error is None else f"{type(error).__name__}: {error}"
    return AdminResult(address.name, address.incarnation, route, outcome.value, text)
