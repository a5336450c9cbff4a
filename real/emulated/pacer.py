"""Runs a simulated engine in step with the machine's monotonic clock.

The model's clock is only ever moved up to the present: before a request is handed in, and when the model's next event
is due. An event is processed at the model time it was due at, however late the process woke up, so that a busy machine
delays answers but does not make the model decode slower.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from typing import Any, TypeVar

import simpy

from sim.engine import SimEngine

T = TypeVar("T")

_BEAT_NS = 10_000_000
"""While requests run the process shows that it is alive this often: SIGSTOP leaves no other trace of its beginning."""


class Pacer:
    """The clock of one engine. Make the engine on ``env``, then :meth:`drive` it inside the running loop."""

    def __init__(self) -> None:
        self.env: Any = simpy.Environment(0)  # its ``now`` is an int, which SimPy's type does not say
        self._origin_ns = time.monotonic_ns()
        self._alive_ns = 0  # the model time at which the process last ran
        self._resumed_ns = -1  # the last SIGCONT that the model does not know of yet
        self._timer: asyncio.TimerHandle | None = None

    def drive(self, engine: SimEngine) -> None:
        """Start pacing."""
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._origin_ns = time.monotonic_ns()
        # A plain handler runs before any callback of the loop, and it only takes a note.
        signal.signal(signal.SIGCONT, lambda _number, _frame: self._note_resumed())

    def ask(self, call: Callable[[Callable[[T], None]], None]) -> asyncio.Future[T]:
        """``call(done)`` on the engine at the present instant; the future gets what ``done`` is given."""
        future: asyncio.Future[T] = self._loop.create_future()

        def done(value: T) -> None:
            if not future.done():  # the client may have gone
                future.set_result(value)

        self.tell(lambda: call(done))
        return future

    def tell(self, call: Callable[[], T]) -> T:
        """``call()`` on the engine at the present instant."""
        self._catch_up()
        try:
            return call()
        finally:
            self._arm()

    def _now_ns(self) -> int:
        return time.monotonic_ns() - self._origin_ns

    def _catch_up(self) -> None:
        if self._resumed_ns >= 0:
            self._live_through_stop()
        now = self._now_ns()
        self._run(now)
        self._alive_ns = now

    def _run(self, until_ns: int) -> None:
        env = self.env
        while env.peek() <= until_ns:
            env.step()
        if until_ns > env.now:
            env._now = until_ns  # env.run(until=...) would leave an event of its own in the queue

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self.env.peek()
        if due == float("inf"):
            return
        if self._engine.live:
            due = min(due, self.env.now + _BEAT_NS)
        self._timer = self._loop.call_at((self._origin_ns + due) / 1e9, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._catch_up()
        self._arm()

    # --- SIGSTOP ------------------------------------------------------------------------------------------------------

    def _note_resumed(self) -> None:
        self._resumed_ns = self._now_ns()

    def _live_through_stop(self) -> None:
        """A stopped engine makes no progress: freeze the model for as long, from the likeliest moment on."""
        resumed, self._resumed_ns = self._resumed_ns, -1
        self._run(min(self._alive_ns + _BEAT_NS // 2, resumed))
        self._engine.freeze()
        self._run(resumed)
        self._engine.thaw()
