"""What an engine's front sees of conversations: which earlier generation a prompt goes on from, and what was put in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from protocol.prompt_memory import UNASKED, PromptMemory
from sim.engine_anthropic import COUNT, ROUTE
from sim.engine_json import JsonCall
from sim.engine_openai import CHAT

if TYPE_CHECKING:
    from sim.engine_process import EngineProcess


class Conversations:
    """Of one engine process, from its start."""

    __slots__ = ("_memory",)

    def __init__(self) -> None:
        self._memory = PromptMemory()

    def received(self, process: EngineProcess, route: str, body: dict[str, Any], call: JsonCall) -> None:
        """A generation has been read, and is about to be handed in."""
        if route not in (CHAT, ROUTE):
            return
        (job,) = call.jobs
        continues, length = self._memory.continued(job.prompt)
        self._record(process, route, body, job.rid, len(job.prompt), continues, length)

    def counted(self, process: EngineProcess, route: str, body: dict[str, Any], tokens: int) -> None:
        """A call has been answered that generates nothing."""
        if route == COUNT:
            self._record(process, route, body, "", tokens, "", 0)

    def _record(
        self,
        process: EngineProcess,
        route: str,
        body: dict[str, Any],
        request: str,
        tokens: int,
        continues: str,
        n: int,
    ) -> None:
        process.world.record(
            process,
            "engine.prompt",
            None,
            {
                "request": request,
                "route": route,
                "tokens": tokens,
                "continues": continues,
                "continued_tokens": n,
                "unasked": [name for name in UNASKED if name in body],
            },
        )

    def finished(self, call: JsonCall) -> None:
        """Every job of a call has ended, and none was refused."""
        for job in call.jobs:
            if job.result is not None and job.result.status == 200 and job.result.finish_reason != "abort":
                self._memory.finished(job.rid, [*job.prompt, *job.output.ids])
