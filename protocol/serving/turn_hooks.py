"""What a session server does with a turn beside forwarding it: hooks, and the ones that record a trace.

A hook sees a turn three times: before it is sent, once its whole answer is there, and when it has ended. A user's own
hooks are a class with the three methods of :class:`TurnHooks`; docs/session_server.md says what each may do.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from protocol.errors import ActorDied, CallCancelled, SeatrialError, TraceConflict, TraceReleased
from protocol.ports import ActorHandle, backend
from protocol.rollout.segments import MASKED, TokenizedSegment, TraceMatch
from protocol.serving.chat_template import ChatTemplate
from protocol.serving.native import Answer

SESSION = "session_id"
REQUEST = "request_id"
MODEL_STEP = "model_step"
PRIVATE = (SESSION, REQUEST, MODEL_STEP)
"""Fields of a body that are for hooks alone. They never reach a backend."""


class BadSession(ValueError):
    """What stands for the id of a session is none."""


def session_of(body: dict[str, Any]) -> str:
    """The id of the session that a body names, empty where it names none. 17 and "17" are one. Raises BadSession."""
    session = body.get(SESSION)
    if session is None:
        return ""
    if isinstance(session, bool) or not isinstance(session, str | int) or session == "":
        raise BadSession(f"{SESSION} must be a text or an integer, not {json.dumps(session)[:50]}")
    return str(session)


class HookFailed(SeatrialError):
    """A hook cannot do its work with this turn: the client is told, and the turn counts as failed."""


@dataclasses.dataclass(slots=True)
class Turn:
    """One generation on its way through a session server.

    ``body``: the client's JSON object; what a request hook changes in it is forwarded, but for the private fields.
    ``traced``: whether the answer is to be recorded. ``request_id``, ``model_step``: of its lease, empty and -1
    without one. ``ask``: posts a JSON object to another route of the same backend, and gives its JSON answer.
    """

    format: str
    path: str
    body: dict[str, Any]
    session_id: str
    stream: bool
    traced: bool
    request_id: str
    model_step: int
    ask: Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
    unasked: tuple[str, ...] = ()
    """Fields that a request hook has asked for and the client has not: their answers are kept from it."""
    state: Any = None
    """The hooks' own, from one call to the next."""
    engine: str = ""
    """Kind and version of the backend's engine, as the config of the session server names it."""

    def want(self, field: str, value: Any = True) -> None:
        """Ask the backend for something, and keep it from a client that did not ask for it."""
        if not self.body.get(field):
            self.unasked = (*self.unasked, field)
        self.body[field] = value


class TurnHooks(Protocol):
    """What a session server calls. An exception is a failed turn: a native error, never an answer."""

    async def on_request(self, turn: Turn) -> None:
        """Before it is sent; nothing may be written anywhere yet. May change ``turn.body``."""
        ...

    async def on_response(self, turn: Turn, answer: Answer) -> None:
        """The backend's answer is whole, and the client has not seen the end of it. Only of turns that are traced."""
        ...

    async def on_end(self, turn: Turn, label: str) -> None:
        """The turn has ended, well or not. A turn whose end cannot be recorded poisons its gate."""
        ...


class NoHooks:
    """Forwards turns as they are. Private fields are stripped all the same."""

    async def on_request(self, turn: Turn) -> None:
        pass

    async def on_response(self, turn: Turn, answer: Answer) -> None:
        pass

    async def on_end(self, turn: Turn, label: str) -> None:
        pass


@dataclasses.dataclass(frozen=True, slots=True)
class _Sent:
    """What a turn was sent as: the prompt's text, the part of it that the store has, and the ids of the rest.

    ``asked``: the body with its conversation, of which an engine may be sent the ids alone.
    """

    prompt: str
    known: str
    rest_ids: tuple[int, ...]
    asked: dict[str, Any]


class TraceHooks:
    """Records every turn of a session in the trace store, token by token (serving.md 5.1).

    The ids sent for a turn begin with those recorded of the turns before it; only what is new is encoded. Both are
    written in one step after the whole answer has been found to be right, so that the store has no half turn.

    Args:
        store: handle of the RolloutTraceStore, or of an actor with its ``search`` and ``append``.
        template: renders conversations as the backend's model does.
        call_timeout_s: longest wait for one answer of the store; an append is repeated, which is harmless.
        attempts: calls for one append.
    """

    def __init__(
        self,
        store: ActorHandle,
        template: ChatTemplate | None = None,
        *,
        call_timeout_s: float = 5.0,
        attempts: int = 3,
    ) -> None:
        self._store = store
        self._template = template or ChatTemplate()
        self._call_timeout_s = call_timeout_s
        self._attempts = attempts

    async def on_request(self, turn: Turn) -> None:
        if not turn.traced:
            return
        prompt = self._template.prompt(turn.format, turn.body)
        found: TraceMatch = await self._call("search", turn.session_id, prompt)
        rest = prompt[len(found.text) :]
        ids = await encode(turn, rest)
        turn.state = _Sent(prompt, found.text, ids, turn.body)
        if _is_lmdeploy(turn):
            turn.body = _ids_alone(turn)
        turn.body["input_ids"] = [*found.token_ids, *ids]
        if turn.format == "openai" and turn.stream and not _is_lmdeploy(turn):
            turn.want("return_output_ids_in_sglext")
        else:
            turn.want("return_token_ids")
        turn.want("logprobs")

    async def on_response(self, turn: Turn, answer: Answer) -> None:
        sent: _Sent = turn.state
        ids, logprobs = answer.token_ids, answer.logprobs
        if ids is None or logprobs is None:
            missing = "token ids" if ids is None else "logprobs"
            raise HookFailed(f"the backend's answer has no {missing}, so the turn cannot be recorded")
        if len(ids) != len(logprobs) or not ids:
            raise HookFailed(f"the backend's answer has {len(ids)} token ids and {len(logprobs)} logprobs")
        text = self._template.said(answer)
        if answer.stop_token is not None and ids[-1] == answer.stop_token:
            text += self._template.stop
        if not self._template.continued(turn.format, sent.asked, answer).startswith(sent.prompt + text):
            raise HookFailed(
                "the conversation with this answer does not begin as it was sent: the template rewrites it"
            )
        rest = sent.prompt[len(sent.known) :]
        step = turn.model_step if turn.request_id else -1
        said = TokenizedSegment(text, ids, ids, logprobs, request_id=turn.request_id, model_step=step)
        segments: tuple[TokenizedSegment, ...] = (said,)
        if rest:
            read = TokenizedSegment(
                rest, sent.rest_ids, (MASKED,) * len(sent.rest_ids), request_id=turn.request_id, model_step=step
            )
            segments = (read, said)
        await self._append(turn.session_id, sent.known, segments)

    async def on_end(self, turn: Turn, label: str) -> None:
        """The store keeps whole turns alone; the end of a turn is on record in the evidence of its session server."""

    async def _append(self, session: str, known: str, segments: tuple[TokenizedSegment, ...]) -> None:
        """Repeated while its outcome is unknown: the same segments at the same place are taken once."""
        for attempt in range(self._attempts):
            try:
                await self._call("append", session, known, segments)
                return
            except (TraceConflict, TraceReleased) as error:
                raise HookFailed(f"the trace store refuses the turn: {error.message}") from error
            except HookFailed:
                if attempt + 1 == self._attempts:
                    raise

    async def _call(self, method: str, *args: Any) -> Any:
        store = self._store
        try:
            async with asyncio.timeout(self._call_timeout_s):
                return await getattr(store, method)(*args)
        except TimeoutError:
            raise HookFailed(f"{method}: the trace store did not answer within {self._call_timeout_s:g} s") from None
        except (ActorDied, CallCancelled) as error:
            if isinstance(error, ActorDied):
                self._store = await backend().lookup(store.name)  # its next incarnation, for the next call
            raise HookFailed(f"{method}: {type(error).__name__} of the trace store") from error


def _is_lmdeploy(turn: Turn) -> bool:
    return turn.engine.startswith("lmdeploy")


def _ids_alone(turn: Turn) -> dict[str, Any]:
    """The body of a turn for an engine that takes ids in the place of a conversation, never beside one.

    LMDeploy v0.14.0 and later: with ids, messages that are not empty are refused with 400, and on /v1/messages so are
    ``system``, ``tools`` and ``tool_choice`` (lmdeploy/serve/openai/serving_chat_completion.py, `check_request`;
    lmdeploy/serve/anthropic/endpoints/messages.py). Earlier ones take no ids here at all.
    """
    dropped = ("system", "tools", "tool_choice") if turn.format == "anthropic" else ()
    return {**{key: value for key, value in turn.body.items() if key not in dropped}, "messages": []}


async def encode(turn: Turn, text: str) -> tuple[int, ...]:
    """The ids of a text, as the turn's backend encodes it. Raises HookFailed.

    By SGLang's POST /tokenize, or LMDeploy's POST /v1/encode.
    """
    if not text:
        return ()
    if _is_lmdeploy(turn):
        route, field = "/v1/encode", "input_ids"
        answer = await turn.ask(route, {"input": text, "do_preprocess": False, "add_bos": False})
    else:
        route, field = "/tokenize", "tokens"
        answer = await turn.ask(route, {"prompt": text, "add_special_tokens": False})
    tokens = answer.get(field)
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise HookFailed(f"{route} of the backend answered {json.dumps(answer)[:100]}, not {{{field}: [...]}}")
    return tuple(tokens)
