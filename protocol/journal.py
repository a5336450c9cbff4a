"""What an actor must not forget when it is killed: its state in storage, whole, the newest alone.

A save writes beside the file and renames, so that a death in the middle leaves the one before. What a component has
told anybody must have been saved by then; saves that come while one is under way share the next. After one that failed
nobody knows which of the two is there, so the next one writes, whatever it has to say. Without a folder nothing is
kept, and nothing is awaited: a restarted actor begins anew (hazard H12 of scaling.md).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from typing import Any

from protocol.errors import StorageError
from protocol.ports import backend

_AGAIN_S = 0.2
"""Between two tries to save, where there must be one that succeeds."""


class Journal:
    """The journal of the running actor, in a file of its name.

    Args:
        folder: in storage; empty: nothing is kept.
        state: gives what is to be kept, as JSON takes it.
    """

    def __init__(self, folder: str, state: Callable[[], Any]) -> None:
        self._folder = folder
        self._state = state
        self._one_at_a_time = asyncio.Lock()
        self._asked = 0
        self._kept = 0
        self._text: bytes | None = None
        """What is in storage; None: nothing, or nobody knows."""

    async def load(self) -> Any:
        """What was saved last under this actor's name; None: nothing.

        Raises:
            StorageError: it cannot be read, or is not what was written. To begin anew then would be to forget.
        """
        if not self._folder:
            return None
        path = self._path()
        storage = backend().storage
        if path not in await storage.list(path):
            return None
        digest, _, text = (await storage.read(path)).partition(b"\n")
        if digest.decode("ascii", "replace") != hashlib.sha256(text).hexdigest():
            raise StorageError(f"{path} is not what was written: its checksum differs; restore it, or delete it")
        self._text = text
        return json.loads(text)

    async def save(self) -> None:
        """Return when the present state, or a later one, is durable; it may be so already. Raises StorageError."""
        if not self._folder:
            return
        self._asked += 1
        mine = self._asked
        async with self._one_at_a_time:
            if self._kept >= mine:
                return  # somebody has saved it along with theirs
            covers = self._asked
            text = json.dumps(self._state(), separators=(",", ":")).encode()
            if text != self._text:
                self._text = None
                path, storage = self._path(), backend().storage
                await storage.write(f"{path}.new", hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
                await storage.rename(f"{path}.new", path)
            self._kept, self._text = covers, text

    async def keep(self) -> None:
        """As :meth:`save`, but where that fails nothing goes on: it is tried until the state is durable."""
        while True:
            try:
                return await self.save()
            except StorageError:
                await asyncio.sleep(_AGAIN_S)

    def _path(self) -> str:
        return f"{self._folder}/{backend().me.name}.json"
