"""How a component reaches the trace store, and the two ways to clean up after sessions (serving.md 5.3, 5.4)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from protocol.config import TraceAccessConfig
from protocol.errors import ActorDied, NameTaken, NoSuchActor, ReadTimeout
from protocol.ports import ActorHandle, backend
from protocol.rollout.groups import RolloutGroup, RolloutState, dispose
from protocol.rollout.trace_store import RolloutTraceStore


class TraceAccess:
    """A component's way to the trace store, which is one named actor. Not an actor itself.

    The handle is kept while it is good. It is dropped as soon as the store it leads to is found dead or gone: a handle
    that outlives its run leads to a dead actor for ever.

    Args:
        config: how often the store is tried, and how long an answer is waited for.
        name: of the store.
        cls: what is spawned where there is none.
    """

    def __init__(self, config: TraceAccessConfig, name: str, cls: type = RolloutTraceStore) -> None:
        self._config = config
        self._name = name
        self._cls = cls
        self._kept: ActorHandle | None = None

    async def get_store(self) -> ActorHandle:
        """The store, made if there is none.

        Raises:
            NameTaken, NoSuchActor: somebody else made it each time, and it was gone again.
        """
        found = await self.get_existing_store()
        for attempt in range(self._config.create_attempts):
            if found is not None:
                return found
            if attempt:
                await asyncio.sleep(self._config.create_backoff_s * attempt)
            try:
                found = self._kept = await backend().spawn(self._cls, name=self._name)
            except NameTaken as error:  # somebody else was quicker
                found = await self.get_existing_store()
                if found is None and attempt == self._config.create_attempts - 1:
                    raise error
        if found is None:
            raise NoSuchActor(f"the trace store {self._name} could not be had")
        return found

    async def get_existing_store(self) -> ActorHandle | None:
        """The store if there is one; never makes one. Where there is none, the handle that was kept is dropped."""
        try:
            self._kept = await backend().lookup(self._name)
        except NoSuchActor:
            self._kept = None
        return self._kept

    async def call(self, method: str, *args: Any) -> Any:
        """Call the store; asked again while nobody answers, which every method of it allows, until ``patience_s``.

        Where it has died the one that came after it is asked.

        Raises:
            ActorDied, NoSuchActor: there is no store any more, and nothing of the session is left.
            ReadTimeout (*unknown*): it did not answer in time.
            TraceError: as the store says.
        """
        loop = asyncio.get_running_loop()
        ends = loop.time() + self._config.patience_s
        while True:
            store = self._kept
            if store is None:
                store = await self.get_existing_store()
            if store is None:
                raise NoSuchActor(f"there is no trace store {self._name}")
            try:
                async with asyncio.timeout(min(self._config.call_timeout_s, max(ends - loop.time(), 0.001))):
                    return await getattr(store, method)(*args)
            except TimeoutError:
                if loop.time() >= ends:
                    raise ReadTimeout(f"{self._name} did not answer {method} in time") from None
            except ActorDied:
                # What was asked of a dead store has gone with it, done or not. Another one is asked the same: this
                # process may have learned of a death long past only now, and have had sessions there since.
                self._kept = None
                if await self.get_existing_store() is None or loop.time() >= ends:
                    raise

    async def release_existing_sessions(self, session_ids: Iterable[Any]) -> frozenset[str]:
        """Release sessions if there is a store: ids as text, each once; no call where there are none, no store made.

        Returns:
            Those that were really released.

        Raises:
            ReadTimeout (*unknown*): the store did not answer.
        """
        wanted = tuple(dict.fromkeys(str(session) for session in session_ids))
        if not wanted:
            return frozenset()
        try:
            return frozenset(await self.call("release_sessions", wanted))
        except (NoSuchActor, ActorDied):
            return frozenset()

    async def release_and_discard_rollout_groups(self, groups: Iterable[RolloutGroup]) -> None:
        """Release the sessions of groups that nobody will use again, and free what else they refer to.

        One call to the store for all of them. It frees the references of the sessions that it released, so those are
        taken off the states before the rest is disposed of: each reference is freed exactly once.
        """
        members = [member for group in groups for member in group.members]
        released = await self.release_existing_sessions(member.session_id for member in members if member.session_id)
        dispose(detached(members, released))


def detached(members: Iterable[RolloutState], released: frozenset[str]) -> list[RolloutState]:
    """The states, those of released sessions without their references: the store has freed them already.

    A session that is not in the store, because a store that had it is dead, keeps its references: nobody else frees
    them.
    """
    return [member.without_experts() if member.session_id in released else member for member in members]
