"""Agents that run rollouts: episodes whose turns are recorded in the trace store, as a session server's hooks do.

An ordinary actor at the edge. It has no model, so it makes up what is said: a token is a word of three characters, and
which ones come depends on the rollout, the attempt and the turn. It remembers what it has said, and so can tell whether
the trace store gives back the same.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from protocol.config import TraceAccessConfig
from protocol.errors import SeatrialError
from protocol.evidence import observer
from protocol.messages import GenerateRequest, ObjectRef
from protocol.ports import ActorHandle, backend, data_call
from protocol.rollout.groups import ABORTED, COMPLETED, FAILED, INIT, RolloutGroup, RolloutState
from protocol.rollout.segments import TokenizedSegment, TraceMatch, TrainingTrace
from protocol.rollout.trace_access import TraceAccess
from scenarios.client import ClientReport
from scenarios.episodes import chance, think
from scenarios.schema import EpisodesModel, WorkloadModel
from scenarios.turns import retire, send_turn
from scenarios.workloads.source import tokens

_BLOCKS = 1 << 20  # ids of prefix blocks that a rollout has for itself
_WORD = 3
_WORDS = 36**_WORD
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_REWARDS = 4

Below = Callable[[int], int]


@observer
class RolloutAgent:
    """Draws groups and runs them. An actor.

    Args:
        workload: of rollouts.
        number: of the workload in the scenario.
        seed: of the draws.
        router: handle of the SessionAffinityRouter.
        controller: handle of the RolloutController, told when an episode is over.
        block_tokens: tokens of a prefix block of the engines.
        access: how the trace store is reached.
        store: its name.
    """

    def __init__(
        self,
        workload: WorkloadModel,
        number: int,
        seed: int,
        router: ActorHandle,
        controller: ActorHandle,
        block_tokens: int,
        access: TraceAccessConfig,
        store: str,
    ) -> None:
        assert workload.arrivals is not None and workload.arrivals.rollouts is not None
        self.workload = workload
        self.episodes: EpisodesModel = workload.arrivals.rollouts
        self.router = router
        self.controller = controller
        self.block_tokens = block_tokens
        self.traces = TraceAccess(access, store)
        self.emit: Callable[..., None]
        self.sent = 0
        self.answered = 0
        self._number = number
        self._seed = seed

    async def start(self) -> None:
        self.emit = backend().emit

    async def sample(self, number: int, evaluation: bool = False) -> RolloutGroup:
        """Group ``number`` of the run, not run yet. Whether it is traced is drawn, but an evaluation's always is."""
        prefix = f"{'eval' if evaluation else 'group'}-{self._number}-{number:05d}"
        traced = evaluation or self.chance(prefix, "traced", self.episodes.traced)
        names = [f"{prefix}-{member}" for member in range(self.episodes.members)]
        return RolloutGroup(prefix, tuple(RolloutState(name, name if traced else "", INIT) for name in names))

    @data_call
    async def run_group(self, group: RolloutGroup) -> RolloutGroup:
        """Run every member that is not complete yet, all at once."""
        evaluation = group.group_id.startswith("eval")
        async with asyncio.TaskGroup() as running:
            runs = [
                running.create_task(self._run(member, group.group_id, evaluation), name=f"episode-{member.rollout_id}")
                for member in group.members
            ]
        return dataclasses.replace(group, members=tuple(run.result() for run in runs))

    async def report(self) -> ClientReport:
        """Turns sent and answered so far."""
        return ClientReport(self.sent, self.answered)

    async def _run(self, member: RolloutState, group: str, evaluation: bool) -> RolloutState:
        if member.status == COMPLETED:
            return member
        return await Episode(self, member, group, evaluation).run()

    def stream(self, *key: object) -> Any:
        """Draws for something of this workload: from the first one on, whichever agent asks and however often."""
        from sim.random import Streams  # the draws are the same in both worlds

        return Streams(self._seed).stream(".".join(["rollouts", str(self._number), *map(str, key)]))

    def chance(self, who: str, what: str, fraction: float) -> bool:
        return bool(fraction) and chance(fraction, self.stream(who, what).below)


class Episode:
    """One attempt at one rollout.

    Args:
        agent: who runs it.
        state: of the rollout, whose conversation goes on.
        group: whose members are all request-aware, or none.
        evaluation: it is neither aborted nor failed on purpose.
    """

    def __init__(self, agent: RolloutAgent, state: RolloutState, group: str, evaluation: bool) -> None:
        self._agent = agent
        self._state = dataclasses.replace(state, attempt=state.attempt + 1)
        self._route = f"{state.rollout_id}.{self._state.attempt}"
        self._session = state.session_id
        self._evaluation = evaluation
        self._aware = agent.chance(group, "aware", agent.episodes.request_aware)
        self._text = state.text
        self._prompt = state.prompt
        self._stored = state.stored
        self._kept: TraceMatch | None = None  # what the first look-up found
        self._own: list[tuple[int, int, str]] = []  # token, version and request of what this attempt has recorded
        self._own_segments = 0
        self._refs = list(state.experts)
        self._versions = list(state.model_steps)

    async def run(self) -> RolloutState:
        """Run it to its end; the state says how it ended."""
        agent, state = self._agent, self._state
        turns = agent.episodes.turns
        draws = agent.stream(self._route, "episode")
        adds = self._sizes(agent.workload.prompt_tokens, state.rollout_id, turns)
        gets = self._sizes(agent.workload.output_tokens, self._route, turns)
        stops = draws.below(turns) if self._chance("aborted", agent.episodes.aborted) else turns
        status, done = COMPLETED, state.turns
        try:
            for turn in range(state.turns, turns):
                if turn >= stops:
                    status = ABORTED
                    break
                if turn > state.turns and agent.episodes.think_s:
                    await think(agent.episodes.think_s, draws.below)
                if not await self._turn(turn, adds[turn], gets[turn]):
                    status = FAILED
                    break
                done = turn + 1
        finally:
            await self._retire(done - state.turns, done == turns)
        trace = None
        if status == COMPLETED and self._session:
            trace = await self._export()
            status = FAILED if trace is None else status
        if status == COMPLETED and self._chance("failed", agent.episodes.failed):
            status = FAILED
        return dataclasses.replace(
            state,
            status=status,
            prompt=self._prompt,
            text=self._text,
            stored=self._stored if self._session else 0,
            turns=done,
            model_steps=tuple(dict.fromkeys(self._versions)),
            experts=trace.experts if trace is not None else tuple(self._refs),
            shared=trace is not None and trace.shared,
            reward=float(draws.below(_REWARDS)) if status == COMPLETED else None,
        )

    def _chance(self, what: str, fraction: float) -> bool:
        return not self._evaluation and self._agent.chance(self._route, what, fraction)

    def _sizes(self, model: Any, key: str, turns: int) -> list[int]:
        draw = tokens(model, self._agent.stream(key, "tokens"))
        return [draw() for _ in range(turns)]

    # --- one turn ---

    async def _turn(self, turn: int, adds: int, asks: int) -> bool:
        """Say something, have it answered, record both. Whether the turn is in the transcript now."""
        agent = self._agent
        asked = self._text
        if turn or not self._prompt:
            asked += said(f"{self._state.rollout_id}/{turn}", adds)
        kept = TraceMatch("", (), 0)
        if self._session:
            found = await self._look_up(asked)
            if found is None:
                return False
            kept = found
        prompt = min(len(asked) // _WORD, agent.episodes.window_tokens)
        blocks = range(prompt // agent.block_tokens)
        base = zlib.crc32(self._state.rollout_id.encode()) * _BLOCKS
        request = GenerateRequest(
            backend().new_id("req"), prompt, asks, True, tuple(base + block for block in blocks), self._route, False
        )
        agent.sent += 1
        answer = await send_turn(
            agent.emit, agent.router, request, agent.workload.service, turn, agent.workload.patience_s
        )
        if answer is None:
            return False
        agent.answered += 1
        result = answer.result
        response = said(f"{self._route}/{turn}/{answer.model_step}", result.completion_tokens)
        version = answer.model_step if self._aware else -1
        parts = [asked[len(kept.text) :], response]
        if not await self._record(asked, kept.text, parts, version, result.request_id, again=False):
            return False
        self._text = asked + response
        self._stored = len(self._text)
        self._prompt = self._prompt or asked
        self._versions.append(max(answer.model_step, 0))
        if self._session and self._chance(f"repeated/{turn}", agent.episodes.repeated):
            # Its client did not hear the answer and asked again: the same words, and not the same record.
            await self._record(asked, kept.text, parts, version, f"{result.request_id}-again", again=True)
        return True

    async def _look_up(self, asked: str) -> TraceMatch | None:
        """What the store has of the conversation; the attempt goes on from there even where that is too little."""
        found, error = TraceMatch("", (), 0), ""
        try:
            found = await self._agent.traces.call("search", self._session, asked)
        except SeatrialError as failed:
            error = type(failed).__name__
        self._agent.emit(
            "trace.looked_up", session=self._session, expected=self._stored, found=len(found.text), error=error
        )
        if error:
            return None
        if self._kept is None or len(found.text) < self._stored:  # what was lost is recorded anew from here on
            self._kept, self._own, self._own_segments = found, [], 0
        return found

    async def _record(
        self, asked: str, prefix: str, parts: Sequence[str], version: int, request: str, *, again: bool
    ) -> bool:
        """Put the expert choices into the object store, and the segments into the trace."""
        segments, refs = await self._segments([part for part in parts if part], version, request, again)
        if not self._session:
            self._refs += refs  # nobody else knows of them
            return True
        outcome, error = "done", ""
        try:
            await self._agent.traces.call("append", self._session, prefix, segments)
        except SeatrialError as failed:
            outcome, error = failed.outcome.value, type(failed).__name__
        self._agent.emit(
            "trace.recorded",
            session=self._session,
            request=request,
            chars=len(asked) + len(parts[-1]),
            tokens=sum(len(segment.token_ids) for segment in segments),
            model_step=version,
            outcome=outcome,
            error=error,
            again=again,
        )
        for ref in refs:  # where the store has them it holds them
            backend().objects.give_back(ref, f"turn/{request}")
        if outcome == "done" and not again:
            aware = request if self._aware else ""
            self._own += [(token, version, aware) for segment in segments for token in segment.token_ids]
            self._own_segments += len(segments)
        return outcome == "done"

    async def _segments(
        self, parts: Sequence[str], version: int, request: str, again: bool
    ) -> tuple[tuple[TokenizedSegment, ...], list[ObjectRef]]:
        segments: list[TokenizedSegment] = []
        refs: list[ObjectRef] = []
        size = self._agent.episodes.expert_bytes
        holder = f"turn/{request}" if self._session else f"rollout/{self._state.rollout_id}"
        for part in parts:
            ids = heard(part)
            ref = None
            if size:
                ref = await backend().objects.put(f"experts of {request}".encode(), holder, size_bytes=size)
                refs.append(ref)
            logprob = -0.5 if again else -0.25
            segments.append(
                TokenizedSegment(part, ids, ids, (logprob,) * len(ids), ref, request if self._aware else "", version)
            )
        return tuple(segments), refs

    # --- the end ---

    async def _export(self) -> TrainingTrace | None:
        """The training trace of the whole conversation, compared with what this attempt remembers."""
        trace, error = None, ""
        try:
            trace = await self._agent.traces.call("export_training_trace", self._session, self._text)
        except SeatrialError as failed:
            error = type(failed).__name__
        kept = self._kept or TraceMatch("", (), 0)
        same = False
        steps: list[list[int]] = []
        if trace is not None:
            own = list(zip(trace.token_ids, trace.model_steps, trace.request_ids, strict=True))[-len(self._own) :]
            same = _digest(own) == _digest(self._own)
            for step in trace.model_steps:
                if not steps or steps[-1][0] != step:
                    steps.append([step, 0])
                steps[-1][1] += 1
        self._agent.emit(
            "trace.exported",
            session=self._session,
            chars=len(self._text),
            tokens=len(trace.token_ids) if trace is not None else 0,
            expected_tokens=len(kept.token_ids) + len(self._own),
            experts=len(trace.experts) if trace is not None else 0,
            segments=kept.segments + self._own_segments,
            steps=steps,
            same=same,
            error=error,
        )
        return trace

    async def _retire(self, turns: int, complete: bool) -> None:
        """Whatever became of the attempt: its route is over (A-I6). The trace is not."""
        retired = await retire(self._agent.controller, self._route)
        self._agent.emit(
            "session.ended",
            session=self._route,
            service=self._agent.workload.service,
            turns=turns,
            outcome="completed" if complete else "failed",
            retired=retired,
        )


def said(key: str, count: int) -> str:
    """So many words, the same for the same key."""
    return "".join(_word(zlib.crc32(f"{key}/{number}".encode()) % _WORDS) for number in range(count))


def heard(text: str) -> tuple[int, ...]:
    """The tokens of a text that ``said`` has made."""
    return tuple(int(text[at : at + _WORD], 36) for at in range(0, len(text), _WORD))


def _word(token: int) -> str:
    return _DIGITS[token // 1296] + _DIGITS[token // 36 % 36] + _DIGITS[token % 36]


def _digest(own: list[tuple[int, int, str]]) -> str:
    return hashlib.sha256(json.dumps(own).encode()).hexdigest()
