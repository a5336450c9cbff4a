"""Links between nodes: latency, jitter, loss, reordering, bandwidth, partitions, and the fates of single messages.

A message is a kernel callback that runs on arrival. Transport is TCP-like: while a link is partitioned or held,
messages wait and arrive after the repair, in order, unless the receiver has died by then. Losing one for good is a fate
(``request_lost``, ``reply_lost``) or a link's ``loss``, never a side effect of a partition.

Fault verbs: ``partition`` and ``repair``, ``hold`` and ``release``, ``slow_down``, ``arm`` and ``disarm``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, Protocol

from sim.links import DEN, Link, LinkSpec
from sim.read_timeouts import ReadTimeouts
from sim.timings import Timings, ns
from sim.world import Process, World

REQUEST: Final = 0
REPLY: Final = 1
CONTROL: Final = 2
"""Stream items, cancels, signals, acks: they are delayed and held as others, but no fate and no loss befalls them."""

FateKind = Literal[
    "request_lost", "reply_lost", "error_now", "delayed", "duplicated", "connect_timeout", "read_timeout"
]
_LEG: Final = {
    "request_lost": REQUEST,
    "reply_lost": REPLY,
    "error_now": REQUEST,
    "delayed": REQUEST,
    "duplicated": REQUEST,
    "connect_timeout": REQUEST,
    "read_timeout": REPLY,
}
_HTTP_ONLY: Final = ("connect_timeout", "read_timeout")
_EVENT_NAME: Final = {"error_now": "delayed"}  # what call.fate calls it: the delivery is delayed past an error


class Exchanged(Protocol):
    """What the network must know of a call or an HTTP exchange of which it carries a message."""

    number: int
    method: str
    http: bool
    background: bool
    sent_id: str

    def lost(self, leg: int) -> None:
        """One of its messages will never arrive (nobody but the world knows)."""

    def fail_now(self) -> None:
        """Its caller sees the connection break now, though its request is delivered later."""

    def late(self) -> None:
        """Its request will be delivered later."""


class Letter:
    """The envelope of control messages that belong to no call."""

    __slots__ = ("number", "method", "background", "sent_id")

    http = False

    def __init__(self, number: int, method: str, background: bool, sent_id: str) -> None:
        self.number = number
        self.method = method
        self.background = background
        self.sent_id = sent_id

    def lost(self, leg: int) -> None:
        raise AssertionError("control messages are not lost")

    def fail_now(self) -> None:
        raise AssertionError("no fate befalls a control message")

    def late(self) -> None:
        raise AssertionError("no fate befalls a control message")


@dataclasses.dataclass(slots=True, eq=False)
class Fate:
    """What shall happen to messages that match.

    Attributes:
        kind: request_lost; reply_lost (the effect happened); error_now (the caller sees ConnectionLost at once, the
            request is delivered ``delay_s`` later); delayed; duplicated (the second copy ``delay_s`` later);
            connect_timeout (HTTP: nothing is sent); read_timeout (HTTP: the answer stalls until the client gives up).
        src, dst: caller and callee of the *call*, as a process or node name; ``*`` and ``?`` match as in a shell.
        method: method or route, same patterns.
        count: how many messages it befalls; None for any number.
        chance: probability for each that matches.
        on_hit: told of every message it befell, with a text.
    """

    kind: FateKind
    src: str = "*"
    dst: str = "*"
    method: str = "*"
    count: int | None = None
    chance: float = 1.0
    delay_s: float = 0.0
    on_hit: Callable[[str], None] | None = None
    hits: int = 0

    def __post_init__(self) -> None:
        if self.kind not in _LEG:
            raise ValueError(f"unknown fate {self.kind!r}; known: {', '.join(_LEG)}")
        if not 0 <= self.chance <= 1:
            raise ValueError(f"fate {self.kind}: chance {self.chance!r} is not from 0 to 1")
        if not self.delay_s >= 0:
            raise ValueError(f"fate {self.kind}: delay_s {self.delay_s!r} must not be negative")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A partition or a hold in force: give it to ``repair`` or ``release``."""

    links: tuple[tuple[str, str], ...]
    on_hit: Callable[[str], None] | None = None


class Network:
    """Every link of a world, and the faults on them.

    Args:
        world: its clock, streams and evidence.
        timings: default latencies.
        fast_path: let messages of plain links skip the general way; the results are equal without.
    """

    def __init__(self, world: World, timings: Timings, *, fast_path: bool = True) -> None:
        self.fast_path = fast_path
        self.world = world
        self.timings = timings
        self.machine_is_up: Callable[[str], bool] = lambda node: True
        """Whether a node's kernel runs, and answers for its dead processes; the cluster says."""
        self.on_change: list[Callable[[], None]] = []
        """Called after every partition and repair (the cluster's health check)."""
        self._call_after = world.clock.call_after
        self._post = world.clock.post
        self._read_timeouts: dict[tuple[float, bool], ReadTimeouts] = {}
        self._links: dict[str, dict[str, Link]] = {}
        self._default = LinkSpec(timings.link_latency_s)
        self._loopback = LinkSpec(timings.loopback_latency_s)
        self._armed: list[Fate] = []
        self._blocks: list[Block] = []
        self._numbers = 0

    def next_number(self) -> int:
        """A run-unique number for a call or an exchange."""
        self._numbers += 1
        return self._numbers

    def read_timeouts(self, timeout_s: float, background: bool) -> ReadTimeouts:
        """The HTTP exchanges that wait for an answer with this time-out."""
        key = (timeout_s, background)
        found = self._read_timeouts.get(key)
        if found is None:
            found = self._read_timeouts[key] = ReadTimeouts(self.world.clock, ns(timeout_s), background)
        return found

    # --- links ---

    def link(self, source: str, target: str) -> Link:
        """The link from one node to another (to itself: loopback), made with the default spec when first asked for."""
        row = self._links.get(source)
        if row is None:
            row = self._links[source] = {}
        link = row.get(target)
        if link is None:
            spec = self._loopback if source == target else self._default
            explore = self.world.kernel.explore is not None
            link = row[target] = Link(source, target, spec, self.world.stream(f"net.{source}>{target}"), explore)
        return link

    def set_link(self, source: str, target: str, spec: LinkSpec) -> None:
        """Give one direction another spec."""
        self.link(source, target).set(spec)

    def slow_down(
        self, source: str, target: str, extra_s: float, on_hit: Callable[[int, str], None] | None = None
    ) -> Callable[[], None]:
        """Add latency to one direction; returns how to take it off. Once only.

        Args:
            on_hit: told of every message that it delays, with the number of its call and a text.
        """
        link = self.link(source, target)
        slowing = (ns(extra_s), on_hit)

        def off() -> None:
            link.slowings = [one for one in link.slowings if one is not slowing]
            link.set(link.spec)

        link.slowings.append(slowing)
        link.set(link.spec)
        return off

    # --- partitions and holds ---

    def partition(
        self, source: str, target: str, *, one_way: bool = False, on_hit: Callable[[str], None] | None = None
    ) -> Block:
        """Cut the link between two nodes, or one direction of it. Messages wait for the repair."""
        return self._block(source, target, one_way, on_hit)

    def repair(self, block: Block) -> None:
        """End a partition. Idempotent."""
        self._unblock(block)

    def hold(
        self, source: str, target: str, *, one_way: bool = True, on_hit: Callable[[str], None] | None = None
    ) -> Block:
        """Keep back the messages of a link until ``release``; they then arrive together, in order."""
        return self._block(source, target, one_way, on_hit)

    def release(self, block: Block) -> None:
        """End a hold. Idempotent."""
        self._unblock(block)

    def reachable(self, source: str, target: str) -> bool:
        """Whether messages pass in this direction now."""
        return not self.link(source, target).blocks

    def _block(self, source: str, target: str, one_way: bool, on_hit: Callable[[str], None] | None) -> Block:
        links = ((source, target),) if one_way else ((source, target), (target, source))
        block = Block(links, on_hit)
        self._blocks.append(block)
        for a, b in links:
            link = self.link(a, b)
            link.blocks += 1
            link.plain = link.drawn = False
        for listener in self.on_change:
            listener()
        return block

    def _unblock(self, block: Block) -> None:
        if not any(known is block for known in self._blocks):
            return
        self._blocks = [known for known in self._blocks if known is not block]
        for a, b in block.links:
            link = self.link(a, b)
            link.blocks -= 1
            if not link.blocks:
                link.set(link.spec)
                waiting, link.waiting = link.waiting, []
                for leg, call, size, fn, args in waiting:
                    # From the kernel's socket buffer: it goes out even if the sender is dead by now.
                    self._transmit(link, leg, call, size, fn, args)
        for listener in self.on_change:
            listener()

    # --- fates ---

    def arm(self, fate: Fate) -> Fate:
        """Let a fate befall the messages that match from now on."""
        self._armed.append(fate)
        return fate

    def disarm(self, fate: Fate) -> None:
        """Idempotent."""
        self._armed = [armed for armed in self._armed if armed is not fate]

    def _fate_of(self, src: Process, dst: Process, leg: int, call: Exchanged) -> Fate | None:
        caller, callee = (dst, src) if leg == REPLY else (src, dst)
        for fate in self._armed:
            if _LEG[fate.kind] != leg or (fate.count is not None and fate.hits >= fate.count):
                continue
            if not call.http and fate.kind in _HTTP_ONLY:
                continue
            if not (fnmatchcase(caller.name, fate.src) or fnmatchcase(caller.node, fate.src)):
                continue
            if not (fnmatchcase(callee.name, fate.dst) or fnmatchcase(callee.node, fate.dst)):
                continue
            if not fnmatchcase(call.method, fate.method):
                continue
            if fate.chance < 1 and not self.world.stream(f"fate.{fate.kind}").chance(int(fate.chance * DEN), DEN):
                continue
            fate.hits += 1
            self._report(call, _EVENT_NAME.get(fate.kind, fate.kind), src, dst, fate.on_hit)
            return fate
        return None

    def _report(
        self, call: Exchanged, fate: str, src: Process, dst: Process, on_hit: Callable[[str], None] | None
    ) -> None:
        self.world.observe(
            "call.fate", cause=call.sent_id or None, call=call.number, fate=fate, source=src.name, target=dst.name
        )
        if on_hit is not None:
            on_hit(f"{fate} {call.method} {src.name}>{dst.name}")

    # --- sending ---

    def certain(self, src: Process, dst: Process, within_ns: int) -> bool:
        """Whether a message that is sent now is sure to arrive within that time."""
        link = self.link(src.node, dst.node)
        return link.plain and self.fast_path and not self._armed and link.latency_ns < within_ns

    def send(
        self,
        src: Process,
        dst: Process,
        leg: int,
        call: Exchanged,
        size: int,
        fn: Callable[..., object],
        *args: Any,
    ) -> None:
        """Run ``fn(*args)`` in the kernel when the message arrives. A dead sender sends nothing.

        Args:
            leg: REQUEST, REPLY or CONTROL.
            call: what the message belongs to.
            size: bytes, for the bandwidth term.
        """
        if not src.alive:
            return
        try:
            link = self._links[src.node][dst.node]
        except KeyError:
            link = self.link(src.node, dst.node)
        if self.fast_path and not self._armed:
            if link.plain:
                self._post(link.latency_ns, fn, args, call.background)
                return
            if link.drawn:
                self._post(link.stream.spread_ns(link.latency_ns), fn, args, call.background)
                return
        if self._armed and leg != CONTROL:
            fate = self._fate_of(src, dst, leg, call)
            if fate is not None:
                self._befall(fate, link, src, dst, leg, call, size, fn, args)
                return
        self._enter(link, src, dst, leg, call, size, fn, args)

    def _enter(
        self,
        link: Link,
        src: Process,
        dst: Process,
        leg: int,
        call: Exchanged,
        size: int,
        fn: Callable[..., object],
        args: tuple[Any, ...],
    ) -> None:
        if link.blocks:
            on_hit = next(b.on_hit for b in self._blocks if (link.source, link.target) in b.links)
            self._report(call, "held", src, dst, on_hit)
            link.waiting.append((leg, call, size, fn, args))
            return
        if link.spec.loss and leg != CONTROL and link.stream.chance(int(link.spec.loss * DEN), DEN):
            self._report(call, "reply_lost" if leg == REPLY else "request_lost", src, dst, None)
            call.lost(leg)
            return
        self._transmit(link, leg, call, size, fn, args)

    def _transmit(
        self, link: Link, leg: int, call: Exchanged, size: int, fn: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        for _, on_hit in link.slowings:
            if on_hit is not None:
                on_hit(call.number, f"slowed {call.method} {link.source}>{link.target}")
        self._call_after(link.delay(self.world.clock._now, size), fn, *args, background=call.background)

    def _befall(
        self,
        fate: Fate,
        link: Link,
        src: Process,
        dst: Process,
        leg: int,
        call: Exchanged,
        size: int,
        fn: Callable[..., object],
        args: tuple[Any, ...],
    ) -> None:
        kind = fate.kind
        if kind == "connect_timeout":
            return  # nothing is sent, and the caller's connect time-out tells it so
        if kind in ("request_lost", "reply_lost", "read_timeout"):
            call.lost(leg)
            return
        if kind == "duplicated":
            self._enter(link, src, dst, leg, call, size, fn, args)
        elif kind == "error_now":
            call.fail_now()
        elif not link.blocks:  # else the handshake is held
            call.late()
        self._call_after(
            ns(fate.delay_s), self._enter, link, src, dst, leg, call, size, fn, args, background=call.background
        )

    def drop_waiting(self, node: str) -> None:
        """A node is gone, and with it what waited in its buffers."""
        for target in list(self._links.get(node, {}).values()):
            target.waiting.clear()
