"""Work on a Ray cluster: numbered items are given to actors of one CPU each, and each item's result comes once.

An actor that is lost, with its node or alone, costs no item: what it had not answered is given to others. Actors come
and go with the cluster: a node that joins is used within seconds.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError

_LOOK_S = 2.0  # between two looks at how many CPUs the cluster has
_MOST_LOSSES = 3
_STARTS_WITHIN_S = 300.0
_HEAD_GONE_S = 30.0
"""One that comes back sooner is waited for. Ray itself waits twice as long."""
_STILLBORN = 5
"""So many times in a row may actors be lost before they begin: a node may be lost just then; more will never begin."""


class Abandoned(NamedTuple):
    """The result of an item that lost every actor which was at work on it."""

    losses: int
    how: str


class WorkFailed(Exception):
    """The work itself raised, or no actor can be started; the text says what."""


class HeadLost(WorkFailed):
    """The head of the cluster has gone. Ray would end this process for that, a minute later, with exit code 1."""


class _Slot:
    """One actor, as the driver sees it."""

    def __init__(self, kind: Any, arguments: tuple[Any, ...]) -> None:
        self.actor = kind.remote(*arguments)
        self.asked_at = time.monotonic()
        self.waits_for: Any = self.actor.begin.remote()
        """What ray.wait is to watch: the answer of ``begin``, then a stream of results."""
        self.began = False
        self.open: deque[int] = deque()  # in the order in which they will be answered
        self.alone = False
        """Whether it was given one item."""

    def give(self, items: list[int]) -> None:
        self.open.extend(items)
        self.alone = len(items) == 1
        self.waits_for = self.actor.answer.options(num_returns="streaming").remote(items)

    def end(self) -> None:
        ray.kill(self.actor, no_restart=True)


def cpus() -> int:
    """CPUs of the nodes that Ray takes for alive."""
    return int(sum(node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]))


def in_slots(
    work: type,
    arguments: tuple[Any, ...],
    items: Sequence[int],
    most: int | None,
    batch: int,
    tell: Callable[[str], None] = lambda _: None,
) -> Generator[tuple[int, Any], None, None]:
    """(item, result) of every item as they come; the result is :class:`Abandoned` where nobody could answer.

    Args:
        work: a plain class; ``begin()`` is called first, ``answer(items)`` yields one result an item, in their order.
        arguments: of its constructor.
        items: all different.
        most: actors at a time; None: one a CPU of the cluster.
        batch: items that an actor is given at once.
        tell: called with a line for people when an actor was lost.

    Raises:
        WorkFailed: ``work`` raised, or no actor could be started in five minutes.
        HeadLost: for half a minute nobody answered at the address of the cluster's head.
    """
    kind = ray.remote(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")(work)
    pool = _Pool(kind, arguments, items, most, tell)
    try:
        while pool.todo or any(slot.open for slot in pool.slots):
            pool.fill(batch)
            yield from pool.next()
    except HeadLost:
        pool.slots.clear()  # there is nobody who could be asked to end them
        raise
    finally:
        for slot in pool.slots:
            slot.end()


class _Pool:
    def __init__(
        self,
        kind: Any,
        arguments: tuple[Any, ...],
        items: Sequence[int],
        most: int | None,
        tell: Callable[[str], None],
    ) -> None:
        self._tell = tell
        self.todo: deque[int] = deque(items)
        self.slots: list[_Slot] = []
        self._kind = kind
        self._arguments = arguments
        self._most = most
        self._losses: dict[int, int] = {}
        self._suspects: set[int] = set()  # that were with others when their actor was lost
        self._stillborn = 0
        self._stillborn_at = float("-inf")
        self._wanted = 0
        self._looked_at = float("-inf")
        self._head_answered_at = time.monotonic()
        self._head_here = True

    def fill(self, batch: int) -> None:
        """As many actors as there are CPUs and work, each with something to do."""
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            self._head_here = self._head_answers(now)
            if self._head_here:
                self._wanted = max(1, cpus()) if self._most is None else self._most
        for slot in [slot for slot in self.slots if slot.began and not slot.open]:
            if self.todo:
                slot.give(self._take(batch))
            elif self._head_here:  # nobody would notice its death, and what it is given then would be blamed for that
                self.slots.remove(slot)
                slot.end()
        busy = sum(1 for slot in self.slots if slot.open)
        while self._head_here and len(self.slots) < self._wanted and len(self.slots) - busy < len(self.todo):
            self.slots.append(_Slot(self._kind, self._arguments))

    def _head_answers(self, now: float) -> bool:
        """Whether Ray may be asked for anything that the head knows: without one it would not come back."""
        address = ray.get_runtime_context().gcs_address
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_LOOK_S).close()
        except OSError as error:
            if now - self._head_answered_at > _HEAD_GONE_S:
                raise HeadLost(f"the head of the cluster, {address}, has gone ({error.strerror or error})") from None
            return False
        self._head_answered_at = time.monotonic()
        return True

    def _take(self, batch: int) -> list[int]:
        """The next items for one actor. A suspect goes alone."""
        items = [self.todo.popleft()]
        while self.todo and len(items) < batch and self._suspects.isdisjoint((items[0], self.todo[0])):
            items.append(self.todo.popleft())
        return items

    def next(self) -> Generator[tuple[int, Any], None, None]:
        """Wait for something to happen, for a moment; what it is."""
        watched = {slot.waits_for: slot for slot in self.slots if slot.open or not slot.began}
        if not watched:  # nothing runs, and without a head nothing can be started
            time.sleep(_LOOK_S / 10)
            return
        happened, _ = ray.wait(list(watched), num_returns=1, timeout=_LOOK_S)
        for one in happened:
            yield from self._happened(watched[one])
        if self.slots and not any(slot.began for slot in self.slots):
            oldest = min(slot.asked_at for slot in self.slots)
            if time.monotonic() - oldest > _STARTS_WITHIN_S:
                raise WorkFailed(f"no worker could be started in {_STARTS_WITHIN_S:g} s: are there free CPUs?")

    def _happened(self, slot: _Slot) -> Generator[tuple[int, Any], None, None]:
        try:
            if not slot.began:
                ray.get(slot.waits_for)
                slot.began = True
                self._stillborn = 0
                return
            result = ray.get(next(slot.waits_for))
        except StopIteration:
            raise WorkFailed(f"a worker ended without an answer to {slot.open[0]}") from None
        except RayTaskError as error:
            raise WorkFailed(str(error.cause)) from error
        except RayError as error:  # the actor is gone, alone or with its node
            self.slots.remove(slot)
            slot.end()
            if not slot.began and slot.asked_at > self._stillborn_at:  # those of one node are lost together
                self._stillborn += 1
                self._stillborn_at = time.monotonic()
                if self._stillborn >= _STILLBORN:
                    raise WorkFailed(f"{_STILLBORN} workers were lost before they began, at last by {error}") from error
            yield from self._lost(slot, type(error).__name__)
            return
        yield slot.open.popleft(), result

    def _lost(self, slot: _Slot, how: str) -> Generator[tuple[int, Any], None, None]:
        self._tell(f"a worker is lost ({how}); {len(slot.open)} that it had not answered are given to others")
        if slot.alone and slot.open:
            only = slot.open[0]
            self._losses[only] = losses = self._losses.get(only, 0) + 1
            if losses >= _MOST_LOSSES:
                slot.open.popleft()
                yield only, Abandoned(losses, how)
        else:  # which of them it was at work on is not known: answers are lost with their actor, if nobody has them yet
            self._suspects.update(slot.open)
        self.todo.extendleft(reversed(slot.open))
