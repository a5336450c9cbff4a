"""Agents that speak HTTP to session servers: turns of two formats, and clients who leave at every point of an answer.

An ordinary actor at the edge. It reads answers by itself (`scenarios.http_answers`), asks the trace store after each
turn whether that is there, as a learner would, and records what it saw.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Callable
from typing import Any

from protocol.errors import Outcome, SeatrialError
from protocol.evidence import observer
from protocol.messages import HttpHead, RawRequest
from protocol.ports import ActorHandle, backend
from protocol.rollout.segments import TraceMatch
from protocol.serving.chat_template import ChatTemplate
from scenarios.client import ClientReport, record_failure
from scenarios.episodes import chance, run_share, think
from scenarios.http_answers import OTHER_CALLS, PATHS, HttpAnswer, body_of
from scenarios.schema import HttpAgentsModel, WorkloadModel

LEAVES = ("before_head", "after_head", "between_events", "inside_event", "before_end")
_STORE_S = 10.0
_SETTLED_S = 20.0  # a turn whose client has left is on record by then, or never
_LOOK_S = 0.5
_GAP_S = 0.003  # less than from one token to the next


@dataclasses.dataclass(slots=True)
class _Episode:
    """One session as its agent knows it."""

    session: str
    form: str
    integer: bool
    server: ActorHandle
    messages: list[dict[str, str]]
    latest: str = ""
    traced: int = 0
    asked: int = 0
    left: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    """Turns that were left: (request, prompt)."""

    @property
    def session_id(self) -> str | int:
        """As it stands in a body."""
        return int(self.session) if self.integer else self.session


@observer
class HttpAgentClient:
    """Runs one client's share of the episodes. An actor.

    Args:
        workload: of agents that speak HTTP; ``clients`` of them share it.
        number: of the workload in the scenario.
        share: which of the clients this is, from 0.
        seed: of the draws.
        servers: handles of the session servers; a session stays at one.
        store: handle of the trace store.
    """

    def __init__(
        self,
        workload: WorkloadModel,
        number: int,
        share: int,
        seed: int,
        servers: tuple[ActorHandle, ...],
        store: ActorHandle,
    ) -> None:
        assert workload.arrivals is not None and workload.arrivals.agents is not None
        assert workload.arrivals.agents.http is not None
        self._workload = workload
        self._agents = workload.arrivals.agents
        self._http: HttpAgentsModel = workload.arrivals.agents.http
        self._number = number
        self._share = share
        self._seed = seed
        self._servers = list(servers)
        self._store = store
        self._template = ChatTemplate()
        self._sent = 0
        self._answered = 0
        self._emit: Callable[..., None]

    async def start(self) -> None:
        self._emit = backend().emit

    async def run(self) -> ClientReport:
        """Run every episode of this share to its end, and report."""
        streams = f"http.{self._number}.{self._share}."
        await run_share(self._workload, self._share, self._seed, streams, self._episode)
        return ClientReport(self._sent, self._answered)

    async def _episode(
        self, number: int, added: Callable[[], int], output: Callable[[], int], below: Callable[[int], int]
    ) -> None:
        http = self._http
        form = "anthropic" if chance(http.anthropic, below) else "openai"
        integer = chance(http.integer_ids, below)
        session = str(10_000_000 + self._number * 1_000_000 + number) if integer else f"s-{self._number}-{number:06d}"
        server = self._servers[number % len(self._servers)]
        episode = _Episode(session, form, integer, server, [])
        answered = 0
        try:
            for turn in range(self._agents.turns):
                if turn and self._agents.think_s:
                    await think(self._agents.think_s, below)
                if chance(http.other_calls, below):
                    await self._other_call(episode, below)
                leaves = LEAVES[below(len(LEAVES))] if chance(http.leave, below) else ""
                stream, evaluation = chance(http.stream, below), chance(http.evaluation, below)
                answered += await self._turn(episode, turn, added(), output(), stream, evaluation, leaves, below)
        finally:
            await self._end(episode)
            self._emit(
                "session.ended",
                session=session,
                service=self._workload.service,
                turns=answered,
                outcome="completed",
                retired=True,
            )

    async def _turn(
        self,
        episode: _Episode,
        turn: int,
        added: int,
        output: int,
        stream: bool,
        evaluation: bool,
        leaves: str,
        below: Callable[[int], int],
    ) -> bool:
        """One turn; whether the agent has an answer."""
        emit, workload = self._emit, self._workload
        name = backend().new_id("req")
        episode.asked += 1
        # No two prompts of a session are alike: a turn that was left is not asked again word by word.
        words = " ".join(f"w{below(900):03d}" for _ in range(max(added // 2, 1)))
        said = {"role": "user", "content": f"{episode.session} asks {episode.asked}: {words}"}
        messages = [*episode.messages, said]
        body = body_of(episode.form, messages, name, output, stream, workload.ignore_eos)
        body["session_id"] = episode.session_id
        if evaluation:
            body["return_token_ids"] = False
        raw = json.dumps(body).encode()
        emit("turn.sent", request=name, session=episode.session, service=workload.service, turn=turn)
        emit(
            "http.sent",
            request=name,
            session=episode.session,
            format=episode.form,
            stream=stream,
            traced=not evaluation,
            after=episode.latest,
            leaves=leaves,
        )
        emit(
            "request.sent", request=name, prompt_tokens=len(raw) // 4, max_new_tokens=output,
            idempotent=workload.idempotent,
        )  # fmt: skip
        self._sent += 1
        request = RawRequest("POST", PATHS[episode.form], (("content-type", "application/json"),), raw)
        answer = HttpAnswer(episode.form)
        outcome, error = await self._exchange(episode.server, request, answer, leaves, below)
        seen, detail = answer.judged(outcome)
        emit("http.seen", request=name, status=answer.status, seen=seen, detail=detail[:200])
        prompt = self._template.prompt(episode.form, body)
        if seen == "ok":
            self._ended(name, episode, answer)
            self._answered += 1
            if not evaluation:
                if await self._traced(name, episode, prompt + answer.text, "at_once"):
                    episode.traced += 1
                episode.messages = [*messages, {"role": "assistant", "content": answer.text}]
                episode.latest = name
            return True
        if seen == "left" and not evaluation:
            episode.left.append((name, prompt))
        record_failure(emit, name, "unknown", answer.status, error or _CLASSES.get(seen, "HttpError"), 1)
        return False

    async def _exchange(
        self, server: ActorHandle, request: RawRequest, answer: HttpAnswer, leaves: str, below: Callable[[int], int]
    ) -> tuple[str, str]:
        """Read the answer; (``read``, ``left``, ``broken`` or ``gave_up``, class of the error)."""
        pieces = server.http(request)
        events = 1 + below(8)
        try:
            async with contextlib.aclosing(pieces), asyncio.timeout(self._workload.patience_s):
                if leaves == "before_head":
                    await asyncio.sleep(below(300) / 1000)
                    return "left", ""
                async for piece in pieces:
                    if isinstance(piece, HttpHead):
                        answer.head(piece)
                        if leaves == "after_head" or (leaves and not answer.streamed):
                            return "left", ""
                        continue
                    answer.feed(piece)
                    if leaves and not answer.over and self._is_there(leaves, answer, events):
                        if leaves == "inside_event":
                            await asyncio.sleep(_GAP_S)
                        return "left", ""
            return "read", ""
        except TimeoutError:
            return "gave_up", "GaveUp"
        except SeatrialError as error:
            return "broken", type(error).__name__

    def _is_there(self, leaves: str, answer: HttpAnswer, events: int) -> bool:
        """Whether the point of a stream at which the client leaves is reached."""
        return answer.finished if leaves == "before_end" else answer.events >= events

    def _ended(self, name: str, episode: _Episode, answer: HttpAnswer) -> None:
        self._emit(
            "turn.done",
            request=name,
            session=episode.session,
            model_step=answer.model_step,
            lease=answer.lease,
            entrypoint=episode.server.name,
            finish_reason=answer.finish_reason,
        )
        self._emit(
            "request.done",
            request=name,
            outcome=Outcome.DONE.value,
            status=answer.status,
            error="",
            completion_tokens=answer.completion_tokens,
            version=answer.version,
            replica="",
            replica_inc=-1,
            attempts=1,
        )

    # --- what the trace store has ---

    async def _traced(self, name: str, episode: _Episode, text: str, when: str) -> bool:
        """Whether a conversation is there."""
        found, error = False, ""
        try:
            async with asyncio.timeout(_STORE_S):
                match: TraceMatch = await self._store.search(episode.session, text + self._template.stop)
                found = match.text.startswith(text)
        except (SeatrialError, TimeoutError) as failed:
            error = type(failed).__name__
        self._emit("http.traced", request=name, session=episode.session, when=when, found=found, error=error)
        return found

    async def _end(self, episode: _Episode) -> None:
        """The turns that were left are on record as well; then the session is released."""
        for name, prompt in episode.left:
            episode.traced += await self._left_turn(name, episode, prompt)
        released, error = False, ""
        try:
            async with asyncio.timeout(_STORE_S):
                released = bool(await self._store.release_sessions((episode.session,)))
        except (SeatrialError, TimeoutError) as failed:
            error = type(failed).__name__
        self._emit("http.released", session=episode.session, traced=episode.traced, released=released, error=error)

    async def _left_turn(self, name: str, episode: _Episode, prompt: str) -> bool:
        """Whether a turn that was left has been recorded, after whatever its client has not seen."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + _SETTLED_S
        found, error = False, ""
        while not found:
            try:
                async with asyncio.timeout(_STORE_S):
                    keys: tuple[str, ...] = await self._store.keys(episode.session)
                    error = ""
                found = any(key.startswith(prompt) and len(key) > len(prompt) for key in keys)
            except (SeatrialError, TimeoutError) as failed:
                error = type(failed).__name__
            if loop.time() >= ends:
                break
            if not found:
                await asyncio.sleep(_LOOK_S)
        self._emit("http.traced", request=name, session=episode.session, when="end", found=found, error=error)
        return found

    # --- what is no generation ---

    async def _other_call(self, episode: _Episode, below: Callable[[int], int]) -> None:
        call = OTHER_CALLS[below(len(OTHER_CALLS))]
        body: dict[str, Any] | None = None
        if call.counts:
            body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "session_id": episode.session_id}
        raw = b"" if body is None else json.dumps(body).encode()
        request = RawRequest(call.method, call.target, (("content-type", "application/json"),), raw)
        answer = HttpAnswer(episode.form)
        outcome, error = await self._exchange(episode.server, request, answer, "", below)
        as_expected = outcome == "read" and call.is_right(answer)
        self._emit(
            "http.passed",
            route=f"{call.method} {call.target}",
            status=answer.status,
            as_expected=as_expected,
            detail="" if as_expected else f"{outcome} {error} {answer.raw[:100]!r}",
        )


_CLASSES = {"left": "Left", "gave_up": "GaveUp", "broken": "ConnectionLost"}
