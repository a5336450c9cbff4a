"""Agents at the edge: episodes of turns with tools in between, and a request too late now and then.

An ordinary actor. Beside ``request.sent`` and ``request.done``, which every client emits, it records what an agent
sees: which session and turn a request is, and which version its answer is stamped with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from protocol.errors import SeatrialError
from protocol.evidence import observer
from protocol.messages import GenerateRequest
from protocol.ports import ActorHandle, backend
from scenarios.client import ClientReport
from scenarios.episodes import chance, run_share, think
from scenarios.schema import WorkloadModel
from scenarios.turns import retire, send_turn

_BLOCKS = 1 << 20  # ids of prefix blocks that a session has for itself


@observer
class AgentClient:
    """Runs one client's share of the episodes. An actor.

    Args:
        workload: of agents; ``clients`` of them share it.
        number: of the workload in the scenario.
        share: which of the clients this is, from 0.
        seed: of the draws.
        router: handle of the SessionAffinityRouter.
        controller: handle of the RolloutController, told when an episode is over.
        block_tokens: tokens of a prefix block of the engines.
    """

    def __init__(
        self,
        workload: WorkloadModel,
        number: int,
        share: int,
        seed: int,
        router: ActorHandle,
        controller: ActorHandle,
        block_tokens: int,
    ) -> None:
        self._workload = workload
        self._number = number
        self._share = share
        self._seed = seed
        self._router = router
        self._controller = controller
        self._block_tokens = block_tokens
        self._sent = 0
        self._answered = 0
        self._emit: Callable[..., None]

    async def start(self) -> None:
        self._emit = backend().emit

    async def run(self) -> ClientReport:
        """Run every episode of this share to its end, and report."""
        streams = f"workload.{self._number}.{self._share}."
        await run_share(self._workload, self._share, self._seed, streams, self._episode)
        return ClientReport(self._sent, self._answered)

    async def _episode(
        self, number: int, added: Callable[[], int], output: Callable[[], int], below: Callable[[int], int]
    ) -> None:
        arrivals = self._workload.arrivals
        assert arrivals is not None and arrivals.agents is not None
        agents = arrivals.agents
        session = f"session-{self._number}-{number:06d}"
        answered = prompt = 0
        try:
            for turn in range(agents.turns):
                if turn and agents.think_s:
                    await think(agents.think_s, below)
                prompt += added()
                generated = await self._turn(session, number, turn, prompt, output())
                if generated is None:
                    break
                prompt += generated
                answered += 1
        finally:
            await self._over(session, answered, answered == agents.turns)
        if chance(agents.late, below):
            await self._too_late(session, prompt, output())

    async def _over(self, session: str, turns: int, done: bool) -> None:
        """The episode is over, whatever became of it: its session is retired."""
        self._tell_end(session, turns, done, await retire(self._controller, session))

    def _tell_end(self, session: str, turns: int, done: bool, retired: bool) -> None:
        self._emit(
            "session.ended",
            session=session,
            service=self._workload.service,
            turns=turns,
            outcome="completed" if done else "failed",
            retired=retired,
        )

    async def _turn(self, session: str, number: int, turn: int, prompt: int, output: int) -> int | None:
        """One turn; the tokens that it generated, or None when it failed."""
        name = backend().new_id("req")
        blocks = tuple(number * _BLOCKS + block for block in range(prompt // self._block_tokens))
        workload = self._workload
        request = GenerateRequest(name, prompt, output, workload.ignore_eos, blocks, session, workload.idempotent)
        self._sent += 1
        answer = await send_turn(self._emit, self._router, request, workload.service, turn, workload.patience_s)
        if answer is None:
            return None
        self._answered += 1
        return answer.result.completion_tokens

    async def _too_late(self, session: str, prompt: int, output: int) -> None:
        """A tool that comes back after its episode: no router may serve it."""
        name = backend().new_id("late")
        request = GenerateRequest(name, max(prompt, 1), output, session_id=session, idempotent=False)
        status, error = 200, ""
        try:
            async with asyncio.timeout(self._workload.patience_s):
                await self._router.handle(request)
        except SeatrialError as refused:
            status, error = int(refused.fields.get("status", 0)), type(refused).__name__
        except TimeoutError:
            status, error = 0, "GaveUp"
        self._emit("session.late", session=session, request=name, status=status, error=error)
