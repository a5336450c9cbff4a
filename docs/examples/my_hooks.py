"""Hooks of a session server that a user might write, and what a run says of them (docs/session_server.md)."""

import asyncio

from protocol.serving.turn_hooks import TraceHooks


class Hooks(TraceHooks):
    """Records turns in the background, so that no agent waits for the trace store. That is a defect."""

    async def on_response(self, turn, answer):
        asyncio.create_task(super().on_response(turn, answer))  # noqa: RUF006 - nobody waits for it: that is the point


class CarefulHooks(TraceHooks):
    """Counts the tokens of each session, and records turns before their agents hear of the end."""

    def __init__(self, store):
        super().__init__(store)
        self.tokens = {}

    async def on_response(self, turn, answer):
        await super().on_response(turn, answer)
        self.tokens[turn.session_id] = self.tokens.get(turn.session_id, 0) + len(answer.token_ids)
