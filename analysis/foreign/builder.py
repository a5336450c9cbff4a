"""Collects what was found in an imported run, and writes it as events in the order of their times."""

from __future__ import annotations

from typing import Any

from protocol.evidence import Event

DRIVER, FRONT, WORLD = "driver", "front-genrm", "world"
SERVICE = "genrm"


class Replicas:
    """Names for engines, which a published run knows by address: ``genrm-0``, ``genrm-1`` and so on by first sight.

    An address that was listed, was not any more, and is listed again is another engine: ports are used again.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # address -> name, of those that are listed now
        self.initial: tuple[str, ...] = ()
        self._latest: dict[str, str] = {}
        self._made = 0

    def listed(self, addresses: list[str]) -> list[str]:
        """The names of the engines that are listed now; the others are gone."""
        self._names = {address: name for address, name in self._names.items() if address in addresses}
        return [self.name(address) for address in addresses]

    def name(self, address: str) -> str:
        """The name of an engine that answered or was listed."""
        if address not in self._names:
            self._names[address] = f"{SERVICE}-{self._made}"
            self._made += 1
        self._latest[address] = self._names[address]
        return self._names[address]

    def latest(self, address: str) -> str:
        """The engine that was last seen at an address, gone or not: a call is noted when it is over."""
        return self._latest[address] if address in self._latest else self.name(address)

    def names(self) -> list[str]:
        return list(self._names.values())

    def known(self, address: str) -> str | None:
        return self._names.get(address)

    def only_initial(self) -> None:
        """What was scaled out is gone again."""
        self._names = {address: name for address, name in self._names.items() if name in self.initial}


class Builder:
    """Events to be, each with its time in seconds since the run's start."""

    def __init__(self) -> None:
        self._found: list[tuple[int, int, str, str, dict[str, Any]]] = []
        self._asks = 0

    def add(self, t_s: float, kind: str, actor: str = DRIVER, /, **data: Any) -> None:
        self._found.append((max(0, round(t_s * 1e9)), len(self._found), kind, actor, data))

    def asked(
        self,
        t_s: float,
        route: str,
        direction: str,
        operation: str = "",
        *,
        target: int | None = None,
        timeout_s: float | None = None,
        actor: str = DRIVER,
        key: str | None = None,
        admitted: str | None = None,
        **answer: Any,
    ) -> None:
        """A question to the control API and its answer; ``answer`` as in ``scale.answered``.

        Args:
            operation: id in the path, empty for a submission.
            admitted: id in the answer to a submission.
        """
        self._asks += 1
        ask = f"ask-{self._asks:07d}"
        self.add(t_s, "scale.asked", actor, ask=ask, service=SERVICE, route=route, direction=direction,
                 operation=operation, target=target, key=key, timeout_s=timeout_s)  # fmt: skip
        filled = {"status": 200, "code": "", "operation": operation if admitted is None else admitted,
                  "state": "", "cleanup": "unknown",
                  "current": None, "ready": None}  # fmt: skip
        self.add(t_s, "scale.answered", actor, ask=ask, **{**filled, **answer})

    @property
    def last_s(self) -> float:
        return max((row[0] for row in self._found), default=0) / 1e9

    def events(self, end_s: float | None, reason: str, detail: str) -> list[Event]:
        """Everything in order; with ``run.finished`` last where the run had an end."""
        events: list[Event] = []
        counters: dict[str, int] = {}
        for t_ns, _, kind, actor, data in sorted(self._found, key=lambda row: row[:2]):
            counters[actor] = counters.get(actor, 0) + 1
            seq = len(events)
            events.append(Event(seq, t_ns, kind, actor, 0, counters[actor], seq + 1, None, data))
        if end_s is not None:
            at_ns = max([round(end_s * 1e9), *(event.t_ns for event in events[-1:])])
            data = {"reason": reason, "detail": detail, "events": len(events)}
            n = counters.get(WORLD, 0) + 1
            events.append(Event(len(events), at_ns, "run.finished", WORLD, 0, n, len(events) + 1, None, data))
        return events
