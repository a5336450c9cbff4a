"""Faults between processes in the simulated world: of links, of single messages, and of answers byte for byte."""

from __future__ import annotations

from typing import ClassVar

from protocol.faulting import FaultRefused
from sim.answer_faults import AnswerFault
from sim.fault_base import Fault, Site
from sim.network import Fate, FateKind
from sim.world import Process


class LinkFault(Fault):
    """Something about the link between two nodes."""

    def look(self) -> dict[str, int]:
        self.ends = (node_of(self.site, self.target.source), node_of(self.site, self.target.destination))
        return {}


class Partition(LinkFault):
    def inject(self) -> None:
        one_way = bool(self.params.get("one_way", False))
        self._block = self.site.network.partition(*self.ends, one_way=one_way, on_hit=self.hit)

    def heal(self) -> None:
        self.site.network.repair(self._block)


class Latency(LinkFault):
    """A hit is a call, however many of its messages are late: every event of a stream is one."""

    def inject(self) -> None:
        self._met: set[int] = set()
        self._off = self.site.network.slow_down(*self.ends, self.params["extra_s"], self._slowed)

    def _slowed(self, call: int, what: str) -> None:
        if call not in self._met:
            self._met.add(call)
            self.hit(what)

    def heal(self) -> None:
        self._off()


class MessageFault(Fault):
    """A fate of single messages (sim/network.py)."""

    kind: ClassVar[FateKind]

    def inject(self) -> None:
        self._fate = self.site.network.arm(
            Fate(
                self.kind_of(),
                src=self.target.source,
                dst=self.target.destination,
                method=self.params.get("method", "*"),
                count=self.params.get("count"),
                chance=self.params.get("chance", 1.0),
                delay_s=self.params.get("delay_s", 0.0),
                on_hit=self.hit,
            )
        )

    def kind_of(self) -> FateKind:
        return self.kind

    def heal(self) -> None:
        self.site.network.disarm(self._fate)


class RequestLost(MessageFault):
    kind = "request_lost"


class ReplyLost(MessageFault):
    kind = "reply_lost"


class DelayedDelivery(MessageFault):
    def kind_of(self) -> FateKind:
        return "error_now" if self.params.get("error_now") else "delayed"


class Duplicate(MessageFault):
    kind = "duplicated"


class ConnectTimeout(MessageFault):
    kind = "connect_timeout"


class ReadTimeout(MessageFault):
    kind = "read_timeout"


class BadAnswer(Fault):
    """Answers of engines to exchanges byte for byte (sim/answer_faults.py)."""

    def inject(self) -> None:
        params = self.params
        self._fault = AnswerFault(
            params["what"],
            self.target.source,
            self.target.destination,
            params.get("method", "*"),
            params.get("count"),
            params.get("chance", 1.0),
            self.hit,
        )
        self.site.engines.answer_faults.append(self._fault)

    def heal(self) -> None:
        self.site.engines.answer_faults.remove(self._fault)


def node_of(site: Site, name: str) -> str:
    """The node that a link's end names, by itself or through a process. Raises FaultRefused."""
    if name in site.cluster.nodes:
        return name
    process: Process | None = site.engines.processes.get(name) or site.world.processes.get(name)
    if process is None:
        raise FaultRefused(f"link end {name!r}: neither a node nor a process")
    return process.node
