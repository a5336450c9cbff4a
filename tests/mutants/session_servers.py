"""Wrong session servers, hooks and trace stores behind them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from typing import Any

from protocol.messages import HttpHead, RawRequest
from protocol.rollout.trace_store import RolloutTraceStore
from protocol.serving.downstream import Downstream
from protocol.serving.formats import FORMATS
from protocol.serving.gate import SettlementReceipt
from protocol.serving.native import Answer, NativeFormat
from protocol.serving.session_server import SessionServer
from protocol.serving.turn_forward import Ending, Pieces, TurnForward, rest_of
from protocol.serving.turn_hooks import TraceHooks, Turn
from tests.mutants.registry import Mutant


class _Wrong(SessionServer):
    """A session server whose turns are forwarded by ``forward``."""

    forward: type[TurnForward]

    def _forward_of(self, form: NativeFormat, turn: Turn, out: Downstream, client: Any) -> TurnForward:
        right = super()._forward_of(form, turn, out, client)
        return self.forward(
            right.config, right.client, right.hooks, right.rejection, right.form, right.turn, right.out, right.aborting
        )


class _TellsFirst(TurnForward):
    async def judged(self, answer: Answer) -> Ending | None:
        if answer.finish_reason and self.turn.traced:
            self.later = asyncio.get_running_loop().create_task(super().judged(answer))
            return None
        return await super().judged(answer)


class TellsBeforeItRecords(_Wrong):
    """Tells the client of the end before the response hook has recorded the turn."""

    forward = _TellsFirst


class _Foreign(TurnForward):
    def hook_failed(self, what: str, error: BaseException) -> Ending:
        body = json.dumps({"detail": "Internal Server Error"}).encode()

        def tell() -> None:
            if self.out.begun:
                self.out.write(b"data: " + body + b"\n\n")
            else:
                self.out.whole(500, body)

        return dataclasses.replace(super().hook_failed(what, error), tell=tell)


class FailsInAForeignShape(_Wrong):
    """Tells of a failed hook in the shape of the web framework, not in the client's."""

    forward = _Foreign


class _Trusting(TurnForward):
    async def whole(self, head: HttpHead, pieces: Pieces) -> Ending:
        raw = await rest_of(pieces)
        if raw.startswith(b"<"):
            return self.completed(lambda: self.as_it_is(head, raw))

        async def again() -> Pieces:
            yield raw

        return await super().whole(head, again())


class PassesNonsense(_Wrong):
    """Passes on whatever comes with a 2xx as an answer."""

    forward = _Trusting


class GivesUpWithItsClient(SessionServer):
    """Stops forwarding a generation when its client leaves."""

    def _client_gone(self, request: RawRequest, serving: asyncio.Task[None]) -> None:
        serving.cancel()


class TracesCounts(SessionServer):
    """Takes every POST below /v1/messages for a generation, the counting of tokens too."""

    def _generates(self, request: RawRequest) -> NativeFormat | None:
        if request.method == "POST" and "/v1/messages" in request.path:
            return FORMATS[0]
        return super()._generates(request)


class _Open(TurnForward):
    def outgoing(self) -> bytes:
        return json.dumps(self.turn.body).encode()


class ForwardsPrivateFields(_Wrong):
    """Forwards the fields that are for hooks alone."""

    forward = _Open


class _Whole(TurnForward):
    async def judged(self, answer: Answer) -> Ending | None:
        reason = "stop" if answer.finish_reason == "abort" else answer.finish_reason
        return await super().judged(dataclasses.replace(answer, finish_reason=reason))


class _Impatient(TurnForward):
    async def run(self, request: RawRequest) -> Ending:
        cut = asyncio.get_running_loop().create_task(self._cut(), name="cut")
        try:
            return await super().run(request)
        finally:
            cut.cancel()

    async def _cut(self) -> None:
        await asyncio.sleep(0.15)
        await self.client.post("/abort_request", {"rid": self.turn.body["rid"]}, connect_timeout_s=1, read_timeout_s=1)


class CutsLongTurns(_Wrong):
    """Has the backend abort a turn that takes long, though its client is there and waits."""

    forward = _Impatient


class TakesAbortedForWhole(_Wrong):
    """Records a turn that the backend has aborted in mid-generation as a complete one."""

    forward = _Whole


class _Strict(TurnForward):
    def hook_failed(self, what: str, error: BaseException) -> Ending:
        right = super().hook_failed(what, error)
        return dataclasses.replace(right, receipt=SettlementReceipt(True, False, f"failed: {what}"))


class PoisonsOnAFailedHook(_Wrong):
    """Takes a turn that could not be recorded for one that may still run."""

    forward = _Strict


class _Lenient(TurnForward):
    async def refused(self, head: HttpHead, pieces: Pieces) -> Ending:
        right = await super().refused(head, pieces)
        if 400 <= head.status < 500:
            return dataclasses.replace(right, receipt=SettlementReceipt(True, True, "rejected"))
        return right


class TakesAny4xxForEnded(_Wrong):
    """Takes every 4xx for a refusal before anything was generated."""

    forward = _Lenient


class _ByStatus(TurnForward):
    async def refused(self, head: HttpHead, pieces: Pieces) -> Ending:
        right = await super().refused(head, pieces)
        if head.status == 400:
            return dataclasses.replace(right, receipt=SettlementReceipt(True, True, "rejected"))
        return right


class Takes400ForEnded(_Wrong):
    """Takes a 400 for a refusal of a too long context, whatever its text says."""

    forward = _ByStatus


class StreamsWithoutALease(SessionServer):
    """Forwards streamed turns past the gate, stamped with what it saw last."""

    stamped = 0

    async def _admitted(
        self, request: RawRequest, form: NativeFormat, out: Downstream, body: dict[str, Any], session: str
    ) -> None:
        gate = self._gate
        if body.get("stream"):
            ending = await self._forwarded(request, form, out, body, session, None)
            ending.tell()
            return
        self._gate = gate
        await super()._admitted(request, form, out, body, session)


class SendsNewTextAlone(TraceHooks):
    """Sends the ids of what is new, without those that were recorded before."""

    async def on_request(self, turn: Turn) -> None:
        await super().on_request(turn)
        if turn.traced:
            turn.body["input_ids"] = list(turn.state.rest_ids)


class TellsNumbersFromText(RolloutTraceStore):
    """Keeps a session under the number that its body had, and releases by text."""

    async def append(self, session_id: Any, prefix: str, segments: Any) -> None:
        await super().append(_typed(session_id), prefix, segments)

    async def search(self, session_id: Any, text: str) -> Any:
        return await super().search(_typed(session_id), text)

    async def keys(self, session_id: Any) -> Any:
        return await super().keys(_typed(session_id))


def _typed(session: str) -> str:
    return f"int:{session}" if session.isdigit() else session


def _server(name: str, source: str, cls: Callable[..., Any], scenario: str, check: str) -> Mutant:
    return Mutant(name, source, "session_server", SessionServer, cls, scenario, check)


_TRACED, _TOLD, _TOUCHED = "session_turns_are_traced", "failures_are_told", "only_generations_are_touched"

MUTANTS = (
    _server("end told before the record", "S-11", TellsBeforeItRecords, "sessions_slow_store", _TRACED),
    _server("hook error in a foreign shape", "S-12", FailsInAForeignShape, "sessions_lost_store", _TOLD),
    _server("nonsense passed as an answer", "S-13", PassesNonsense, "sessions_nonsense", _TOLD),
    _server("generation ends with its client", "S-14", GivesUpWithItsClient, "sessions_left", _TRACED),
    _server("token counts are traced", "S-15", TracesCounts, "sessions_over_http", _TOUCHED),
    _server("long turns are cut", "S-22", CutsLongTurns, "sessions_published", "unexplained_failures"),
    _server("aborted turn is whole", "S-22", TakesAbortedForWhole, "sessions_aborted", _TRACED),
    _server("private fields leave", "G-15", ForwardsPrivateFields, "sessions_over_http", _TOUCHED),
    _server("failed record poisons", "G-12", PoisonsOnAFailedHook, "sessions_lost_store", "occurs"),
    _server("any 4xx has ended", "G-6", TakesAny4xxForEnded, "sessions_throttled", "no_update_under_lease"),
    _server("any 400 has ended", "G-7", Takes400ForEnded, "sessions_refused", "no_update_under_lease"),
    _server("streams past the gate", "G-14", StreamsWithoutALease, "sessions_published", "no_update_under_lease"),
    Mutant(
        "number for text", "S-20", "trace_store", RolloutTraceStore, TellsNumbersFromText, "sessions_over_http",
        "sessions_are_released",
    ),
    Mutant(
        "prompt without its beginning", "S-I6", "turn_hooks", TraceHooks, SendsNewTextAlone, "sessions_over_http",
        "prompts_continue_the_record",
    ),
)  # fmt: skip
