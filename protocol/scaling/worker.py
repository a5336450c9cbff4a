"""Evaluates one service at its own pace: streaks, open requests, decision, submission.

Source: scaling.md 6.3 and 6.4. Each service has a worker of its own, so one that hangs delays no other (M31, M31b). A
change of configuration makes a new worker over the same state; the old one finishes what it has under way first.
"""

from __future__ import annotations

import asyncio

from protocol.ports import backend
from protocol.scaling.collector import Collector
from protocol.scaling.decision import Choice, Situation, advance_all, decide
from protocol.scaling.metrics import Frame
from protocol.scaling.policy import AutoscalerConfig
from protocol.scaling.requests import ScaleRequests, ServiceState
from protocol.scaling.targets import ServiceTarget


class Worker:
    """The evaluation loop of one service. A part of the Autoscaler.

    Args:
        service: its name.
        config: as of now; another configuration is another worker's.
        target: where requests go.
        collector: whose frames are evaluated.
        state: shared with the workers before and after.
    """

    def __init__(
        self, service: str, config: AutoscalerConfig, target: ServiceTarget, collector: Collector, state: ServiceState
    ) -> None:
        self._service = service
        self._config = config
        self._rules = config.rules(service)
        self._target = target
        self._collector = collector
        self._state = state
        self._requests = ScaleRequests(service, state)
        self._task: asyncio.Task[None] | None = None
        self._retired = False
        self._at_work = False
        self.deciding = True
        """False: open requests are followed to their end, and nothing new is asked for."""

    def start(self) -> None:
        name = f"evaluate-{self._service}"
        self._task = backend().periodic(self._config.evaluation_interval_secs, self.tick, name=name)

    def retire(self) -> None:
        """Make room for another worker: at once when idle, otherwise when the evaluation under way is over."""
        self._retired = True
        if self._task is not None and not self._at_work:
            self._task.cancel()

    async def tick(self) -> None:
        """One evaluation. One that breaks is noted, and the next one comes: it must not take others down with it."""
        if self._state.busy:
            return  # the worker before has not finished
        self._state.busy = self._at_work = True
        try:
            await self._evaluate()
        except Exception as error:
            self._state.last_error = f"{type(error).__name__}: {error}"
        else:
            self._state.last_error = ""
        finally:
            self._state.busy = self._at_work = False
            if self._retired and self._task is not None:
                self._task.cancel()

    async def _evaluate(self) -> None:
        state, config = self._state, self._config
        now_s = asyncio.get_running_loop().time()
        frame = self._collector.latest(now_s)
        if frame.taken_s != state.seen_frame_s:  # a frame that was seen already says nothing new of the time since
            state.streaks = advance_all(state.streaks, frame, self._rules, config, now_s)
            state.seen_frame_s = frame.taken_s
        await self._requests.follow()
        current = self.current(frame)
        choice = decide(config, self._rules, frame, state.streaks, self._situation(current, frame))
        if not self.deciding or self._retired:
            return
        state.last_choice = choice
        self._emit(choice, frame, current)
        if choice.action != "none":
            timeout_s = config.scale_out_request_timeout_secs
            await self._requests.submit(choice, frame, current, self._target, timeout_s)

    def current(self, frame: Frame) -> int:
        """Replicas as the service counts them (or as observed, where it does not say), and those that are to come."""
        known = self._collector.current
        coming = sum(r.delta for r in self._state.pending if r.action == "scale_out" and not r.resolved)
        return (frame.num_engines if known is None else known) + coming

    def _situation(self, current: int, frame: Frame) -> Situation:
        request = self._state.open_request()
        old = "" if frame.taken_s > self._state.changed_s else "nothing was observed since an operation ended"
        return Situation(
            now_s=asyncio.get_running_loop().time(),
            current=current,
            last_action=self._state.last_action,
            last_action_s=self._state.last_action_s,
            open_request=None if request is None else request.name,
            refusal=self._collector.refusal or old,
        )

    def _emit(self, choice: Choice, frame: Frame, current: int) -> None:
        streaks = self._state.streaks
        backend().emit(
            "autoscaler.evaluated",
            service=self._service,
            action=choice.action,
            current=current,
            delta=choice.delta,
            reason=choice.reason,
            triggered=list(choice.triggered),
            streaks={name: one.elapsed_s for name, one in streaks.items() if one.elapsed_s is not None},
            frame=frame.snapshot(),
        )
