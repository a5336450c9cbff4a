"""Which replica gets the next call: the routable ones, ordered by calls in flight, picked in constant time."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from protocol.messages import EngineAddress
from protocol.ports import EngineClient


class Replica:
    """Counters of one incarnation. Hashes by identity; every collection of these is ordered by insertion."""

    __slots__ = (
        "address", "name", "incarnation", "client", "in_flight", "served", "server_errors", "routable", "closed",
        "suspect", "removed", "why", "progress_at", "waiters",
    )  # fmt: skip

    def __init__(self, address: EngineAddress, client: EngineClient, now: float) -> None:
        self.address = address
        self.name = address.name
        self.incarnation = address.incarnation
        self.client = client
        self.in_flight = 0
        self.served = 0
        self.server_errors = 0
        """5xx in a row."""
        self.routable = False
        """In the pick set."""
        self.closed = False
        """Admission closed for ever: health cannot readmit it."""
        self.suspect = False
        """A transport error, and health has not judged since."""
        self.removed = False
        """Forgotten as soon as nothing is in flight."""
        self.why = ""
        """Why it is not routable."""
        self.progress_at = now
        """When it last succeeded, or began to have calls in flight; seconds of this loop."""
        self.waiters: list[asyncio.Future[None]] = []
        """Wait for it to be idle."""


class PickSet:
    """The routable replicas, in one queue per count. A pick costs the same with ten replicas as with ten thousand."""

    __slots__ = ("_queues", "_lowest", "size")

    def __init__(self) -> None:
        self._queues: list[OrderedDict[Replica, None]] = [OrderedDict()]
        self._lowest = 0  # no queue below it holds anything
        self.size = 0

    def add(self, replica: Replica) -> None:
        """Make it a member, last among those with its count. It must not be one."""
        self.size += 1
        self._put(replica)

    def discard(self, replica: Replica) -> None:
        """Take it out. It must be a member. Its calls in flight go on, and are counted by whoever made them."""
        self.size -= 1
        del self._queues[replica.in_flight][replica]

    def count(self, replica: Replica, change: int) -> None:
        """Change the count of a member: it goes to the end of its new queue."""
        del self._queues[replica.in_flight][replica]
        replica.in_flight += change
        self._put(replica)

    def pick(self) -> Replica:
        """Take the first of the lowest queue and count it. The set must not be empty."""
        queues, lowest = self._queues, self._lowest
        while not queues[lowest]:
            lowest += 1
        replica, _ = queues[lowest].popitem(last=False)
        lowest += 1
        replica.in_flight = lowest
        if lowest == len(queues):
            queues.append(OrderedDict())
        queues[lowest][replica] = None
        self._lowest = lowest - 1
        return replica

    def pick_other(self, tried: Sequence[Replica]) -> Replica | None:
        """As ``pick``, but none of those tried; None when there is no other. Looks at no more than those and one."""
        for queue in self._queues[self._lowest :]:
            for replica in queue:
                if replica not in tried:
                    self.count(replica, +1)
                    return replica
        return None

    def _put(self, replica: Replica) -> None:
        count = replica.in_flight
        while count >= len(self._queues):
            self._queues.append(OrderedDict())
        self._queues[count][replica] = None
        if count < self._lowest:
            self._lowest = count
