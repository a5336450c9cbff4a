"""The iterations of one engine's scheduler process: its inbox, and runs of equal steps skipped exactly.

One *iteration* is a prefill batch, a decode step or a weight load; its end is a *boundary*. Requests and control
messages wait in an inbox and are seen at the first boundary not before they arrive, as SGLang's loop reads its socket
once per iteration. Between two boundaries nothing can change, so k equal decode steps are one event: their cost has a
closed form in integers of picoseconds. A message that arrives in the middle shortens the run to the boundary at which
it would have been seen step by step, and a reader in the middle gets the steps that have passed (``sync``).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from math import isqrt
from typing import Any

import simpy
from simpy.events import Event

from sim.engine_cost import PS_PER_NS
from sim.engine_types import Request

IDLE, PREFILLING, DECODING, LOADING = range(4)

Handler = Callable[[Any], None]


class _Boundary(Event):
    """A SimPy event that has happened, made in one attribute store instead of five."""

    _ok = True

    def __init__(self, callbacks: list[Callable[[Event], None]], generation: int) -> None:
        self.callbacks = callbacks  # type: ignore[assignment]  # SimPy only reads the list: all boundaries share it
        self._value = generation


class Iterations:
    """When iterations begin and end; ``Scheduler`` says what they do.

    Args:
        env: simulated clock in integer nanoseconds.
        intake_ns: from the arrival of a message to when the scheduler can see it, at least 1.
        priority: SimPy priority of the boundaries. Distinct per engine and above NORMAL, so that the order of events
            at one instant depends neither on the fast path nor on when an event was scheduled.
    """

    def __init__(self, env: simpy.Environment, intake_ns: int, priority: int) -> None:
        self.env: Any = env  # its time is an int, which SimPy's type does not say; ``now`` would be a call
        self.inbox: deque[tuple[int, Handler | None, Any]] = deque()
        self.waiting: deque[Request] = deque()
        self.held = False  # frozen or wedged: boundaries are not processed
        self.dead = False
        self._intake = intake_ns
        self._priority = priority
        self._enqueue: Any = self.env.schedule  # takes any int as a priority, which SimPy's type does not say
        self._callbacks: list[Callable[[Event], None]] = [self._on_event]
        self._kind = IDLE
        self._start_ps = 0
        self._step_ps = 0  # cost of the first step of the run
        self._slope_ps = 0  # how much dearer each further step is
        self._steps = 0
        self._end_ps = 0
        self._end_ns = 0
        self._now_ps = 0  # the present boundary
        self._generation = 0  # of the one event that counts; older ones are ignored when they fire
        self._kicked = False
        self._stuck = False
        self._in_boundary = False
        self._not_past_ns = sys.maxsize  # the first boundary not before this is never skipped
        self._load_ns = -1
        self._after_load: Callable[[], None] | None = None

    # --- what the scheduler does --------------------------------------------------------------------------------------

    def _start_iteration(self) -> bool:
        """Begin the next iteration by ``_run``; False when there is nothing to do."""
        raise NotImplementedError

    def _apply_decode(self, steps: int) -> None:
        """Account the first ``steps`` steps of the current run and leave the rest as the run."""
        raise NotImplementedError

    def _finish_due(self) -> None:
        """End the requests whose last token the decode step has made."""
        raise NotImplementedError

    def _end_prefill(self) -> None:
        """The prefill batch is computed."""
        raise NotImplementedError

    # --- messages -----------------------------------------------------------------------------------------------------

    def push(self, handler: Handler | None, payload: Any) -> None:
        """Send one message to the scheduler; with no handler the payload is a Request. Seen at a boundary, in order."""
        if self.dead:
            return
        due = self.env._now + self._intake
        self.inbox.append((due, handler, payload))
        if self._kind == DECODING:
            if self._steps > 1 and due < self._end_ns:
                self._shorten(due)
        elif self._kind == IDLE and not self._kicked and not self._in_boundary:
            self._kick(due)

    def hold(self) -> None:
        """Stop at the next boundary without processing it (SIGSTOP, wedge)."""
        self.held = True
        if self._kind == DECODING and self._steps > 1 and self.env._now < self._end_ns and not self.dead:
            self._shorten(self.env._now)  # a boundary of this very instant has not been processed yet

    def unhold(self) -> None:
        """Go on; a boundary that passed meanwhile is processed now."""
        self.held = False
        if self._stuck and not self.dead:
            self._stuck = False
            self._schedule(self.env._now + 1)

    def kill(self) -> None:
        """Nothing of this scheduler happens any more."""
        self.dead = True
        self._generation += 1

    def sync(self) -> None:
        """Account the decode steps that have passed, so that counters read now are those of stepping."""
        if self._kind != DECODING or self._steps < 2:
            return
        elapsed = self.env._now * PS_PER_NS - PS_PER_NS - self._start_ps  # a step that ends now has not been processed
        if elapsed < self._step_ps:
            return
        done = min(self._steps_within(elapsed), self._steps - 1)
        if done:
            self._apply_decode(done)

    def block_for(self, duration_ns: int, after: Callable[[], None]) -> None:
        """Stand still for ``duration_ns`` from this boundary on, then call ``after``. Later messages wait."""
        self._load_ns = duration_ns
        self._after_load = after

    # --- time ---------------------------------------------------------------------------------------------------------

    def _schedule(self, at_ns: int) -> None:
        self._generation = generation = self._generation + 1
        self._enqueue(_Boundary(self._callbacks, generation), self._priority, at_ns - self.env._now)

    def _kick(self, at_ns: int) -> None:
        self._kicked = True
        self._schedule(at_ns)

    def _run(self, kind: int, step_ps: int, slope_ps: int, steps: int) -> None:
        self._kind = kind
        self._start_ps = start = self._now_ps
        self._step_ps = step_ps
        self._slope_ps = slope_ps
        self._steps = steps
        self._end_ps = end = start + steps * step_ps + slope_ps * (steps * (steps - 1) >> 1)
        self._end_ns = -(-end // PS_PER_NS)
        if steps > 1:
            due = self._not_past_ns
            if self.inbox and self.inbox[0][0] < due:
                due = self.inbox[0][0]
            if due < self._end_ns:
                self._steps = self._steps_until(due)
                self._end_ps = end = self._after(self._steps)
                self._end_ns = -(-end // PS_PER_NS)
        self._schedule(self._end_ns)

    def _after(self, steps: int) -> int:
        return self._start_ps + steps * self._step_ps + self._slope_ps * (steps * (steps - 1) >> 1)

    def _steps_within(self, elapsed_ps: int) -> int:
        """How many whole steps of this run fit in ``elapsed_ps``."""
        step, slope = self._step_ps, self._slope_ps
        if not slope:
            return elapsed_ps // step
        linear = 2 * step - slope  # slope * k * k + linear * k <= 2 * elapsed
        k = max(0, (isqrt(linear * linear + 8 * slope * elapsed_ps) - linear) // (2 * slope))
        while k * step + slope * (k * (k - 1) >> 1) > elapsed_ps:
            k -= 1
        while (k + 1) * step + slope * (k * (k + 1) >> 1) <= elapsed_ps:
            k += 1
        return k

    def _steps_until(self, due_ns: int) -> int:
        """The first step of this run whose end, rounded up to nanoseconds, is not before ``due_ns``."""
        return self._steps_within(max(0, (due_ns - 1) * PS_PER_NS - self._start_ps)) + 1

    def _shorten(self, due_ns: int) -> None:
        steps = self._steps_until(due_ns)
        if steps < self._steps:
            self._steps = steps
            self._end_ps = self._after(steps)
            self._end_ns = -(-self._end_ps // PS_PER_NS)
            self._schedule(self._end_ns)

    # --- one boundary -------------------------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        if event._value != self._generation:
            return
        if self.held:
            self._stuck = True
            return
        self._kicked = False
        now = self.env._now
        kind = self._kind
        self._in_boundary = True
        if kind == IDLE or now > self._end_ns:  # a late boundary: the process was held
            self._now_ps = max(self._end_ps, now * PS_PER_NS)
        else:
            self._now_ps = self._end_ps
        self._kind = IDLE
        if kind == DECODING:
            self._apply_decode(self._steps)
            self._finish_due()
        elif kind == PREFILLING:
            self._end_prefill()
        elif kind == LOADING:
            after, self._after_load = self._after_load, None
            if after is not None:
                after()
        inbox = self.inbox
        while inbox and inbox[0][0] <= now and self._load_ns < 0 and not self.dead:
            _, handler, payload = inbox.popleft()
            if handler is None:
                self.waiting.append(payload)
            else:
                handler(payload)
        self._in_boundary = False
        if self.dead:
            return
        if self._load_ns >= 0:
            load, self._load_ns = self._load_ns, -1
            self._run(LOADING, max(1, load) * PS_PER_NS, 0, 1)
        elif not self._start_iteration() and inbox:
            self._kick(max(inbox[0][0], now + 1))

    def _now_ns(self) -> int:
        return -(-self._now_ps // PS_PER_NS)
