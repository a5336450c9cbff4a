"""What a simulated loop makes: futures and tasks that hash by creation number, and the callbacks that it runs."""

from __future__ import annotations

import asyncio
import contextvars
from typing import TYPE_CHECKING, Any

from sim.clock import FEW_CANCELLED

if TYPE_CHECKING:
    from sim.loop import ActorLoop


class SimFuture(asyncio.Future):  # type: ignore[type-arg]  # generic for mypy alone
    """A future that hashes by creation number: asyncio keeps futures in sets, whose order must not be by address."""

    __slots__ = ("_number",)

    _number: int

    def __hash__(self) -> int:
        number = getattr(self, "_number", 0)  # not try: a task is hashed once, so it would always raise
        if not number:
            self._number = number = next(self.get_loop()._kernel._numbers)  # type: ignore[attr-defined]  # of ours
        return number


class SimTask(asyncio.Task):  # type: ignore[type-arg]  # generic for mypy alone
    """A task that hashes by creation number (its first hash is its registration, inside the constructor)."""

    __slots__ = ("_named", "_number")
    __hash__ = SimFuture.__hash__  # type: ignore[assignment]  # a task has the field, too

    # asyncio numbers the unnamed tasks of a process; here they are numbered within the run.

    def get_name(self) -> str:
        return super().get_name() if hasattr(self, "_named") else f"Task-{hash(self)}"

    def set_name(self, value: object) -> None:
        self._named = True
        super().set_name(value)


class SimHandle(asyncio.TimerHandle):
    """A callback to be run by a loop, at once (``_when`` is None) or at a time.

    One class for both: the kernel reads these fields for every callback, and CPython caches a field's place only where
    it meets one type. The fields are set by the loop's call_soon, call_later and call_at.
    """

    __slots__ = ()
    __init__ = object.__init__  # type: ignore[assignment]  # takes nothing, sets nothing

    # By identity, as asyncio.Handle; asyncio.TimerHandle compares times.
    __hash__ = asyncio.Handle.__hash__
    __eq__ = asyncio.Handle.__eq__

    # typeshed does not declare the fields of handles.
    _scheduled: bool
    _loop: ActorLoop
    _context: contextvars.Context
    _when: Any
    _callback: Any
    _args: Any

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            if self._scheduled:  # it may lie in the queue for long: let go of what it holds
                self._callback = None
                self._args = None
                clock = self._loop._clock
                clock.cancelled = cancelled = clock.cancelled + 1
                if cancelled > FEW_CANCELLED:
                    clock.compact()

    @property
    def gone(self) -> bool:
        return self._cancelled or self._loop.dead
