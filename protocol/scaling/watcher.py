"""The watcher: carries one admitted operation to the manager and brings the manager's progress back into the registry.

- It hands the operation over until the manager has certainly got it; an answer that was lost is asked for again, for
  the operation's id makes that harmless (hazard H1: an operation that nobody watches excludes all others for ever).
- A terminal phase counts only with ``physical_done`` (scaling.md 2.5).
- While the manager drains a victim it closes admission and confirms the victim idle, by its full identity.
- After the deadline it aborts, waits for the lifecycle to stop, and ends the operation FAILED; one that does not stop
  in time is FAILED and not clean.
- If it breaks, the operation ends FAILED and not clean with the freshest numbers: nothing is made up (scaling.md 2.4).
- What the manager has said of it is kept with the operation: a reconcile tells it the rest (``handed_over``,
  ``called_off``), or one that was begun and never executed would exclude all others for ever.
- A manager that cannot begin anything (it has no such method) has done nothing: FAILED and clean (hazard H1).
"""

from __future__ import annotations

import asyncio

from protocol.config import ScalingConfig
from protocol.errors import Outcome, SeatrialError
from protocol.scaling.contract import TERMINAL, LifecycleRefused, Progress, Victim
from protocol.scaling.drain import DrainGate
from protocol.scaling.hooks import NoHook
from protocol.scaling.registry import IllegalTransition, Operation, ScaleRegistry
from protocol.serving.peer import PEER_LOST, Peer


class Watcher:
    """Watches operations, one call of :meth:`watch` each.

    Args:
        config: intervals and time-outs.
        registry: whose operations they are.
        manager: does the work.
        gate: where victims are closed and counted.
    """

    def __init__(self, config: ScalingConfig, registry: ScaleRegistry, manager: Peer, gate: DrainGate) -> None:
        self._config = config
        self._registry = registry
        self._manager = manager
        self._gate = gate
        self._closed: dict[str, Victim] = {}
        """The victim of each operation that was closed last."""

    async def watch(self, operation: Operation) -> None:
        """From the hand-over to a terminal state. Never raises but when it is cancelled."""
        heard: list[Progress] = []
        try:
            await self._watch(operation, heard)
        except Exception as error:  # whatever it is, the operation must not stay open without anybody to watch it
            if operation.terminal:
                raise
            self._registry.finish(
                operation,
                "FAILED",
                heard[-1] if heard else None,
                cleanup_required=True,
                error=f"its watcher broke: {type(error).__name__}: {error}",
            )
            # Nobody confirms its drain any more; it should not wait for that to its own time-out.
            await self._abort(operation)
        finally:
            self._closed.pop(operation.request_id, None)

    async def _watch(self, operation: Operation, heard: list[Progress]) -> None:
        timeout_s = self._config.timeout_s if operation.timeout_secs is None else operation.timeout_secs
        deadline = operation.created_s + timeout_s
        await self._hand_over(operation, deadline)
        if operation.terminal:
            return
        while _now() < deadline:
            progress = await self._look(operation, heard)
            if progress is not None:
                if _has_ended(operation, progress):
                    self._registry.finish(operation, progress.phase, progress)
                    return
                self._follow(operation, progress)
                await self._drain(operation, progress)
            await asyncio.sleep(min(self._config.poll_interval_s, max(0.0, deadline - _now())))
        await self._give_up(operation, timeout_s, heard)

    # --- hand-over ---

    async def _hand_over(self, operation: Operation, deadline: float) -> None:
        """Begin and execute at the manager until both are answered, or the deadline is there.

        The operation is ended here if it certainly never got there.
        """
        uncertain = False
        while True:
            try:
                await self._manager.call("begin", operation.request_id, operation.direction, operation.target)
                operation.handed_over = True
                await self._manager.call("execute", operation.request_id)
                return
            except LifecycleRefused as error:
                # Refused is not known: had an earlier try got through, this one would find the operation there.
                self._end_unbegun(operation, error)
                return
            except NoHook as error:
                await self._abort(operation)  # it may be able to begin and not to execute
                operation.detail = "manager_scale_not_implemented"
                self._end_unbegun(operation, error)
                return
            except PEER_LOST as error:
                uncertain = uncertain or error.outcome is not Outcome.NOT_DONE
                if _now() >= deadline:
                    if not uncertain:
                        self._end_unbegun(operation, error)
                    return
            await asyncio.sleep(self._config.poll_interval_s)

    def _end_unbegun(self, operation: Operation, error: SeatrialError) -> None:
        self._registry.finish(
            operation, "FAILED", None, cleanup_required=False, error=f"{type(error).__name__}: {error.message}"
        )

    # --- progress ---

    async def _look(self, operation: Operation, heard: list[Progress]) -> Progress | None:
        """The manager's progress; None when it does not answer, or does not know the operation."""
        try:
            progress: Progress | None = await self._manager.call("progress", operation.request_id)
        except PEER_LOST:
            return None
        if progress is not None:
            heard[:] = [progress]
        return progress

    def _follow(self, operation: Operation, progress: Progress) -> None:
        """The manager's phases go back and forth, replica by replica; those of the registry only forward."""
        if progress.phase in TERMINAL[operation.direction]:
            return  # not physically done: it is not believed
        try:
            self._registry.advance(operation, progress.phase)
        except IllegalTransition:
            return  # the next replica of the same operation has begun

    async def _drain(self, operation: Operation, progress: Progress) -> None:
        victim = progress.victim
        if operation.direction != "scale_in" or progress.phase != "DRAINING" or victim is None or victim.rank is None:
            return  # without an identity nothing is confirmed (M3)
        self._closed[operation.request_id] = victim
        if await self._gate.idle(victim):
            try:
                await self._manager.call("confirm_drained", operation.request_id, victim)
            except PEER_LOST:
                return  # the next look says whether it has arrived; if not, it is confirmed again

    # --- the end of the time ---

    async def _give_up(self, operation: Operation, timeout_s: float, heard: list[Progress]) -> None:
        """Abort, wait for the lifecycle to stop, and end the operation."""
        error = f"not done within {timeout_s:g} s"
        ends = _now() + self._config.completion_wait_s
        while True:
            if not operation.called_off:
                await self._abort(operation)
            progress = await self._look(operation, heard)
            await self._close_parked(operation, progress)
            if progress is not None and progress.physical_done is True:
                why = f"{error}; {progress.error}" if progress.error else error
                self._registry.finish(operation, "FAILED", progress, error=why)
                return
            if _now() >= ends:
                break
            await asyncio.sleep(self._config.poll_interval_s)
        self._registry.finish(
            operation,
            "FAILED",
            heard[-1] if heard else None,
            cleanup_required=True,
            error=f"{error}, and its lifecycle did not stop within {self._config.completion_wait_s:g} s after that",
        )

    async def _close_parked(self, operation: Operation, progress: Progress | None) -> None:
        """A victim that was chosen at the deadline is parked; it stays out all the same (scaling.md 5.2)."""
        victim = None if progress is None else progress.victim
        if victim is None or victim.rank is None or self._closed.get(operation.request_id) == victim:
            return
        if await self._gate.close(victim):
            self._closed[operation.request_id] = victim

    async def _abort(self, operation: Operation) -> None:
        try:
            await self._manager.call("abort", operation.request_id, operation.direction, operation.handed_over)
        except Exception:
            return  # whatever it is: it is not called off, and a reconcile says so again
        operation.called_off = True


def _has_ended(operation: Operation, progress: Progress) -> bool:
    return progress.phase in TERMINAL[operation.direction] and progress.physical_done is True


def _now() -> float:
    return asyncio.get_running_loop().time()
